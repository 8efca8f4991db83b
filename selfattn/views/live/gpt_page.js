/*
 * The page of a GPT: a prompt, how much each token attends to the others in each head, what comes next, and the effect
 * of changes to the model. A worker computes; the page has a pack inside, or reads another one.
 */

import { clamp, filled, fixed, range, read } from "../compute.js";
import { announce, button, element, moveAlong, phrase, placeIn, start, wordOf } from "../kit/page.js";
import { drawBars, paint, pixelColours, tint } from "../kit/pictures.js";
import { Tour } from "../kit/tour.js";
import { gptJobs } from "./gpt_model.js";
import { PackPage } from "./pack_page.js";
import { inWorker, serve } from "./worker.js";

/** @typedef {import("./gpt_tour.js").GPTStop} GPTStop */
/** @typedef {import("./letters.js").Spelling} Spelling */

const MOST_WRITTEN = 200; // tokens
const MOST_IN_A_ROW = 8; // heads
const LISTED = 4, AROUND = 3; // tokens that a sentence lists, and those before each of them

/** @param {(tables: any) => Spelling} spelling makes a tokenizer of a pack's tables */
export function run(spelling) {
  if (inWorker) serve(gptJobs(spelling));
  else start("sa-gpt", GPTPage);
}

export class GPTPage extends PackPage {
  /** @type {any} what the worker found in the text, and wrote */ found = null;
  /** @type {number[]} the ids of tokens that the model wrote */ added = [];
  /** @type {ArrayLike<number>} weights of the chosen token in the chosen head */ row = [];
  /** @type {any[]} */ heads = [];
  /** @type {Map<string, any>} heads that are off */ off = new Map();
  /** @type {Map<string, any>} weights that are changed */ edits = new Map();
  /** @type {Tour[]} */ tours = [];
  writing = false;
  place = -1; // of the chosen token; below 0 from the end
  chosen = 0; // among all heads
  turn = 0; // of looks

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    super(root, data, wasm);
    const { captions } = this;
    const named = (/** @type {string} */ name, /** @type {() => void} */ act) =>
      button({ onclick: act }, captions[name]);
    this.colours = pixelColours(root);
    this.prompt = element("textarea", { rows: 1, spellcheck: false, value: data.prompt, oninput: () => this.anew() });
    this.text = element(
      "div.sa-written",
      { role: "group", ariaLabel: captions.text, data: { side: "0" } },
    );
    moveAlong(this.text, () => /** @type {HTMLElement[]} */ ([...this.text.children]), (n) => this.goTo(n));
    this.one = named("step", () => this.write(1));
    this.back = named("back", () => {
      this.added.pop();
      this.place = -1;
      this.look();
    });
    this.more = named("write", () => (this.writing ? this.worker.stop("write") : this.write(MOST_WRITTEN)));
    this.how = { temperature: 0, topP: 1 };
    this.sliders = { temperature: this.slider("temperature", 0, 2, 0.1), topP: this.slider("topP", 0.05, 1, 0.05) };
    this.says = element("p.sa-line", { ariaLive: "polite" });
    this.grid = element("div");
    this.heading = element("h2");
    this.bars = element("ol.sa-bars-list", { data: { side: "0" } });
    this.outputs = range(2).map(() => element("p.sa-output"));
    this.parted = element("p.sa-soft", { ariaLive: "polite" });
    this.editor = new WeightEditor(this);
    this.counted = element("span.sa-soft");
    this.changing = element(
      "div",
      element("h2", captions.compare),
      ...["trained", "now"].flatMap((name, n) => [element("small", captions[name]), this.outputs[n]]),
      this.parted,
      element("h2", captions.weights),
      this.editor.node,
      element("div.sa-bar", named("reset", () => this.reset()), this.counted),
    );
    this.lede = element("p");
    this.about = element("p");
    this.guide = element("div");
    root.replaceChildren(
      this.top(this.lede),
      this.guide,
      element(
        "div.sa-bar",
        element("label.sa-prompt", element("strong", captions.prompt), this.prompt),
        this.one,
        this.back,
        this.more,
        ...Object.values(this.sliders).map(({ label }) => label),
      ),
      this.text,
      this.says,
      this.status,
      element(
        "div.sa-gpt-columns",
        element("section", { ariaLabel: captions["all heads"] }, element("h2", captions["all heads"]), this.grid),
        element("section", this.heading, this.bars, this.changing),
      ),
      element("div.sa-bar", this.about, ...this.opener),
      this.built,
    );
    this.begin("");
  }

  /** @type {(name: "temperature" | "topP", min: number, max: number, step: number) => any} */
  slider(name, min, max, step) {
    const output = element("output");
    const input = element("input", {
      type: "range",
      min: String(min),
      max: String(max),
      step: String(step),
      oninput: () => this.next({ [name]: Number(input.value) }),
    });
    const show = () => {
      input.value = String(this.how[name]);
      output.textContent = fixed(this.how[name], 2);
    };
    show();
    return { show, label: element("label", this.captions[name], input, output) };
  }

  /** @param {Partial<import("./letters.js").Drawing>} how */
  draws(how) {
    Object.assign(this.how, how);
    for (const { show } of Object.values(this.sliders)) show();
  }

  /** What each request says of the text and of the model. */
  get asked() {
    const { prompt, added, how, off, edits, place } = this;
    return { text: prompt.value, added, how, place, changes: { off: [...off.values()], weights: [...edits.values()] } };
  }

  async loaded() {
    const { captions, data, model } = this, heads = /** @type {number[]} */ (model.heads);
    this.about.replaceChildren(
      ...(this.name ? [element("strong", this.name), " "] : []),
      ...phrase(captions.about, {
        parameters: model.parameters.toLocaleString(captions.lang),
        layers: heads.length,
        heads: heads[0],
      }),
    );
    this.chosen = 0;
    this.heads = heads.flatMap((count, layer) => range(count).map((head) => this.head(layer, head)));
    this.heads.forEach((each, k) => (each.look.onclick = each.look.onfocus = () => this.choose(k)));
    this.grid.replaceChildren(
      ...heads.flatMap((_, layer) => [
        element("h3", filled(captions.layer, { layer })),
        element(
          "div.sa-gpt-heads",
          ...this.heads.filter(({ at }) => at[0] === layer).map(({ node }) => node),
        ),
      ]),
    );
    this.grid.style.setProperty("--heads", String(Math.min(MOST_IN_A_ROW, Math.max(...heads))));
    this.changing.hidden = !model.matrices.length;
    this.lede.replaceChildren(...phrase(captions[model.matrices.length ? "look" : "look of tokens"]));
    this.editor.offer(model.matrices);
    this.off.clear();
    this.edits.clear();
    await this.anew();
    const questions = await this.ask("questions", { text: data.prompt, captions });
    if (!questions) return;
    this.tours = ["tour", "quiz"].map((name) => new Tour({
      stops: questions[name],
      texts: {
        ...data.tour,
        "tour start": captions.start,
        "tour start name": captions[`name.${name}`],
        "tour invitation": captions[`invite.${name}`],
      },
      show: (stop, open) => this.visit(/** @type {GPTStop | null} */ (stop), open),
    }));
    this.guide.replaceChildren(...this.tours.map(({ node }) => node));
    this.root.dataset.toured = "";
  }

  /**
   * Show a stop of the tour or of the exercise; null: the page without them.
   * @type {(stop: GPTStop | null, open: boolean) => void}
   */
  visit(stop, open) {
    for (const other of this.tours) if (stop && !other.stops.includes(stop) && other.at >= 0) other.leave();
    const { head, off, temperature = 0, added = /** @type {number[]} */ ([]) } = stop?.shows ?? {},
      shown = head ?? off;
    this.root.dataset.hide = stop && !open ? stop.hide : "";
    this.root.toggleAttribute("data-quiz", added.length > 0);
    this.prompt.value = this.data.prompt;
    this.edits.clear();
    this.off.clear();
    if (off) this.off.set(String(off), off);
    if (shown) this.chosen = this.heads.findIndex(({ at }) => String(at) === String(shown));
    this.draws({ temperature: open ? temperature : 0, topP: 1 });
    this.added = added.slice(0, added.length - Number(!open));
    this.place = open && added.length ? -2 : -1; // the bars show what came next, not what will
    this.changed();
  }

  /** @type {(layer: number, head: number) => any} a head's map, its habit, and its switch */
  head(layer, head) {
    const { captions, off } = this,
      at = [layer, head],
      key = String(at),
      name = filled(captions.head, { layer, head }),
      canvas = element("canvas", { ariaHidden: "true" }),
      kind = element("small"),
      look = button({ className: "sa-thumb" }, canvas, kind);
    const power = button(
      {
        className: "sa-switch",
        hidden: !this.model.matrices.length,
        ariaLabel: filled(captions.switch, { head: name }),
        onclick: () => {
          if (!off.delete(key)) off.set(key, at);
          this.changed();
        },
      },
    );
    const node = element("div.sa-gpt-head", look, power);
    return { at, key, name, canvas, kind, look, power, node };
  }

  reset() {
    this.off.clear();
    this.edits.clear();
    return this.changed();
  }

  /** The prompt is another one. */
  anew() {
    this.added = [];
    this.place = -1;
    return this.changed();
  }

  /** The prompt or the model is another one. */
  async changed() {
    this.worker.stop("write");
    this.counted.textContent = filled(this.captions.changed, { weights: this.edits.size, heads: this.off.size });
    await this.look();
    if (this.changing.hidden) return;
    this.editor.show();
    await this.compare();
  }

  async look() {
    const { captions } = this;
    if (this.writing) return;
    const turn = ++this.turn;
    delete this.root.dataset.looked;
    if (!this.model && this.pack) return this.load(this.pack, this.name); // its worker has ended
    const found = await this.ask("look", this.asked);
    if (!found) return;
    this.found = found;
    const { tokens, weights, ms, unknown, cut, given } = found, { most } = this.model;
    this.status.textContent = [
      filled(captions[weights ? "computed" : "computed long"], {
        tokens: tokens.length,
        heads: this.heads.length,
        ms: fixed(ms, 1),
      }),
      cut ? filled(captions["too long"], { context: most - 1 }) : "",
      unknown.length ? filled(captions.unknown, { letters: unknown.join(" ") }) : "",
    ].join(" ");
    this.one.disabled = this.more.disabled = tokens.length >= most;
    this.back.disabled = tokens.length <= given;
    this.draw();
    if (turn === this.turn) this.root.dataset.looked = "";
  }

  /** @param {Partial<import("./letters.js").Drawing>} [how] */
  async next(how = {}) {
    this.draws(how);
    const { found } = this,
      next = found && (await this.ask("next", { ...this.asked, place: found.place }));
    if (next && found === this.found) this.drawNext(next);
  }

  /** @param {number} most tokens */
  async write(most) {
    const { captions, asked, chosen, added, found } = this;
    if (this.writing || !found) return;
    this.writing = this.prompt.readOnly = true;
    this.more.textContent = captions.stop;
    const done = await this.ask(
      "write",
      { ...asked, most, head: chosen },
      {
        progress: ({ id, token, weights = [] }) => {
          added.push(id);
          if (added !== this.added) return;
          found.tokens.push(token);
          this.row = weights;
          this.drawText();
        },
      },
    );
    this.writing = this.prompt.readOnly = false;
    this.more.textContent = captions.write;
    this.place = -1;
    await this.look();
    if (done && most > 1) {
      this.status.textContent = filled(captions.wrote, { tokens: done.n, rate: fixed(done.n / (done.ms / 1000), 0) });
    }
  }

  recolour() {
    this.colours = pixelColours(this.root);
    if (!this.found) return;
    this.draw();
    this.editor.draw();
  }

  draw() {
    const { found, captions, colours, off } = this, { small, habits, next } = found;
    this.grid.hidden = !small;
    if (small) {
      const side = Math.sqrt(small.length / this.heads.length), named = habits.flat();
      this.heads.forEach(({ key, name, canvas, kind, look, power }, k) => {
        paint(canvas, side, side, (i, j) => colours.root(0, small[(k * side + i) * side + j]));
        kind.textContent = `${named[k].clear ? "" : "~"}${captions[`kind.${named[k].kind}`]}`;
        look.ariaLabel = look.title = `${name}: ${kind.textContent}`;
        look.classList.toggle("sa-dim", off.has(key));
        power.ariaPressed = String(!off.has(key));
        power.textContent = captions[off.has(key) ? "off" : "on"];
      });
    }
    this.choose(this.chosen);
    this.drawNext(next);
  }

  /** @param {number} head whose weights the text shows */
  choose(head) {
    const { tokens: { length: n }, place, weights } = this.found;
    this.chosen = head;
    this.heads.forEach(({ look }, k) => (look.ariaPressed = String(k === head)));
    this.row = weights ? weights.subarray((head * n + place) * n, (head * n + place) * n + place + 1) : [];
    this.drawText();
  }

  /** @param {number} place of the letter that is chosen and focused */
  async goTo(place) {
    this.place = this.found.place = place;
    this.choose(this.chosen);
    /** @type {HTMLElement} */ (this.text.children[place]).focus();
    announce(this.root, { place, token: this.found.tokens[place] });
    await this.next();
  }

  /** The text, in the colours of the weights, and a sentence with the largest ones. */
  drawText() {
    const { found: { tokens, given, place }, row, captions } = this, of = this.writing ? row.length - 1 : place;
    this.text.replaceChildren(
      ...tokens.map((/** @type {string} */ token, /** @type {number} */ n) => {
        const made = button(
          {
            className: `sa-tinted${n < given ? "" : " sa-added"}`,
            ariaLabel: token,
            ariaPressed: String(n === of),
            tabIndex: n === of ? 0 : -1,
            onclick: () => this.goTo(n),
          },
          bare(token),
        );
        tint(made, Math.sqrt(row[n] ?? 0), 1, "share");
        return made;
      }),
    );
    if (!row.length) return this.says.replaceChildren();
    const most = range(row.length).sort((a, b) => row[b] - row[a]).slice(0, LISTED);
    const list = most.flatMap((j, n) => [
      n ? ", " : "",
      ...phrase(captions.part, {
        weight: fixed(row[j], 2),
        before: tokens.slice(Math.max(0, j - AROUND), j).map(bare).join(""),
        word: wordOf(tokens[j]),
      }),
    ]);
    const head = this.heads[this.chosen].name;
    this.says.replaceChildren(...phrase(captions.takes, { head, word: wordOf(tokens[of]), list }));
  }

  /** @param {any} next */
  drawNext({ likely, others }) {
    const { captions, found: { tokens, place } } = this;
    this.heading.replaceChildren(...phrase(captions.next, { letter: wordOf(tokens[place]) }));
    drawBars(this.bars, likely, others, captions);
  }

  /** What the trained model and the changed one write after the prompt, always with the likeliest token. */
  async compare() {
    this.worker.stop("compare");
    const found = await this.ask("compare", this.asked), { captions } = this;
    if (!found) return;
    const { prompt, parts, differ } = found;
    this.outputs.forEach((output, n) =>
      output.replaceChildren(
        element("span.sa-soft", prompt),
        parts[n][0],
        element("mark", parts[n][1]),
      ),
    );
    this.parted.textContent = differ < 0 ? captions.same : filled(captions.differs, { n: differ + 1 });
  }
}

/** @type {(token: string) => string} a token within a text, whose spaces are spaces */
const bare = (token) => token.replaceAll("␣", "\u00a0");

/** A matrix as a picture, with fields to change one weight. */
class WeightEditor {
  /** @type {{ n: number, name: string, rows: number, columns: number }[]} */ matrices = [];
  /** @type {Float32Array} */ numbers = new Float32Array();
  which = 0;
  at = 0; // the chosen weight

  /** @param {GPTPage} page */
  constructor(page) {
    const { captions } = (this.page = page);
    const index = (/** @type {string} */ name) =>
      element("input", { type: "number", min: "0", ariaLabel: captions[name], onchange: () => this.goTo() });
    this.choice = element("select", { ariaLabel: captions.matrix, onchange: () => {
      this.which = this.choice.selectedIndex;
      this.at = 0;
      this.show();
    } });
    this.canvas = element("canvas", { role: "img", onclick: (/** @type {MouseEvent} */ event) => {
      const { rows, columns } = this.matrix, { i, j } = placeIn(event, this.canvas, rows, columns);
      this.at = i * columns + j;
      this.write();
    } });
    this.row = index("row");
    this.column = index("column");
    this.value = element("input", {
      inputMode: "decimal",
      ariaLabel: captions.value,
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Enter") this.set();
      },
    });
    this.node = element(
      "div.sa-weight-editor",
      this.choice,
      this.canvas,
      element(
        "div.sa-bar",
        "[",
        this.row,
        ", ",
        this.column,
        "] = ",
        this.value,
        button({ onclick: () => this.set() }, captions.set),
        button({ onclick: () => this.zero() }, captions.zero),
      ),
    );
  }

  get matrix() {
    return this.matrices[this.which];
  }

  /** @param {{ n: number, name: string, rows: number, columns: number }[]} matrices */
  offer(matrices) {
    this.matrices = matrices;
    this.which = Math.max(0, matrices.findIndex(({ name }) => name.startsWith("layers.")));
    this.at = 0;
    this.choice.replaceChildren(
      ...matrices.map(({ name }, n) => element("option", { selected: n === this.which }, name)),
    );
  }

  async show() {
    const { page, matrix } = this,
      found = await page.ask("matrix", { ...page.asked, n: matrix.n });
    if (!found || matrix !== this.matrix) return;
    this.numbers = found.numbers;
    this.draw();
  }

  draw() {
    const { page, numbers, matrix } = this,
      size = numbers.reduce((most, x) => Math.max(most, Math.abs(x)), 0) || 1;
    if (!numbers.length) return;
    const { name, rows, columns } = matrix;
    paint(this.canvas, rows, columns, (i, j) => page.colours.difference(-numbers[i * columns + j] / size));
    this.canvas.ariaLabel = filled(page.captions["weight map"], { name, rows, columns });
    this.write();
  }

  /** The chosen place, and its weight. */
  write() {
    const { rows, columns } = this.matrix;
    [this.row.max, this.column.max] = [String(rows - 1), String(columns - 1)];
    this.row.value = String(Math.floor(this.at / columns));
    this.column.value = String(this.at % columns);
    this.value.value = String(Number(fixed(this.numbers[this.at], 4)));
  }

  goTo() {
    const { rows, columns } = this.matrix;
    const index = (/** @type {HTMLInputElement} */ field, /** @type {number} */ n) =>
      clamp(Math.floor(Number(field.value)) || 0, 0, n - 1);
    this.at = index(this.row, rows) * columns + index(this.column, columns);
    this.write();
  }

  set() {
    const value = read(this.value.value);
    if (value === null || !Number.isFinite(value)) return this.write();
    this.change([this.at], value);
  }

  zero() {
    const { columns } = this.matrix, first = this.at - (this.at % columns);
    this.change(range(columns).map((n) => first + n), 0);
  }

  /** @type {(places: number[], value: number) => void} */
  change(places, value) {
    const { page, matrix: { n } } = this;
    for (const place of places) page.edits.set(`${n}.${place}`, [n, place, value]);
    page.changed();
  }
}
