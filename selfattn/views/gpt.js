/*
 * The page of a GPT: a prompt, a letter's values in every layer, the next letters, and the effect of changes to the
 * model.
 */

import { clamp, filled, fixed, largest, range, read } from "./compute.js";
import { choices, GPTModel, Pass, randomNumbers, sample } from "./gpt_compute.js";
import { gptStops } from "./gpt_tour.js";
import { announce, button, chooser, element, moveAlong, phrase, placeIn, start, topOf, wordOf } from "./kit/page.js";
import { drawBars, paint, pixelColours } from "./kit/pictures.js";
import { Tour } from "./kit/tour.js";

/** @typedef {import("./gpt_compute.js").GPTSettings} GPTSettings */
/** @typedef {import("./gpt_tour.js").GPTStop} GPTStop */

/**
 * @typedef {GPTSettings & { alphabet: string[], shown: string[], prompt: string, count: number,
 *   captions: Record<string, string>, tour: Record<string, string> }} GPTData
 */

const TEMPERATURES = [0, 0.3, 0.6, 0.8, 1, 1.5];
const TOP_KS = [0, 10, 5, 3, 2];
const LETTERS_BEFORE = 10; // the likeliest letters, which are shown as bars
const COMPARED = 60; // both models write this many letters
const PACE = 60; // milliseconds per letter
const SEED = 1;

export class GPTView {
  /** @type {number[]} */ ids = [];

  /** @param {HTMLElement} root @param {GPTData} data @param {ArrayBuffer} bytes */
  constructor(root, data, bytes) {
    this.root = root;
    this.data = data;
    const captions = (this.captions = data.captions);
    this.model = new GPTModel(data, bytes);
    this.trained = new GPTModel(data, bytes);
    this.pass = new Pass(this.model);
    this.given = 0; // letters of the prompt
    this.place = 0;
    this.chosen = { layer: 0, head: 0 };
    this.temperature = 0;
    this.topK = 0;
    this.timer = 0;
    this.random = randomNumbers(SEED);
    this.edits = new Set(); // changed weights, as "name.n"
    this.colours = pixelColours(root);
    this.field = element("input", {
      value: data.prompt,
      ariaLabel: captions.prompt,
      spellcheck: false,
      maxLength: 4 * data.context,
      oninput: () => this.begin(),
    });
    this.note = element("small", { className: "sa-soft", role: "status" });
    this.text = element("div", { className: "sa-written", role: "group", ariaLabel: captions.text });
    moveAlong(this.text, () => /** @type {HTMLElement[]} */ ([...this.text.children]), (n) => this.goTo(n));
    const named = (/** @type {string} */ name, /** @type {() => void} */ act) =>
      button({ onclick: act }, captions[name]);
    this.stepButton = named("step", () => this.step());
    this.backButton = named("back", () => this.undo());
    this.writeButton = named("write", () => this.toggle());
    const set = (/** @type {{ temperature?: number, topK?: number }} */ chosen) => {
      Object.assign(this, chosen);
      this.drawNext();
    };
    this.temperatures = chooser(captions.temperature, TEMPERATURES.map(String), 0, (n) =>
      set({ temperature: TEMPERATURES[n] }),
    );
    this.embedding = element("canvas", { role: "img" });
    this.embeddingSays = element("p", { className: "sa-soft" });
    this.heads = range(data.layers).flatMap((layer) => range(data.heads).map((head) => this.head(layer, head)));
    this.hidden = range(data.layers).map(() => element("canvas", { role: "img" }));
    this.headSays = element("p", { className: "sa-line", ariaLive: "polite" });
    this.nextHeading = element("h2");
    this.bars = element("ol", { className: "sa-bars-list", data: { side: "0" } });
    this.before = element("p", { className: "sa-output" });
    this.after = element("p", { className: "sa-output" });
    this.parted = element("p", { className: "sa-soft", ariaLive: "polite" });
    this.weights = new WeightEditor(this.model, captions, (name, places) => {
      for (const n of places) this.edits.add(`${name}.${n}`);
      this.changed();
    });
    this.counted = element("span", { className: "sa-soft" });
    const layers = range(data.layers).map((layer) =>
      element(
        "div",
        { className: "sa-layer" },
        element("h3", {}, filled(captions.layer, { layer })),
        element(
          "div",
          { className: "sa-gpt-heads" },
          ...this.heads.filter((each) => each.layer === layer).map(({ node }) => node),
        ),
        this.hidden[layer],
      ),
    );
    const size = filled(captions.size, {
      parameters: data.count.toLocaleString("fr"),
      layers: data.layers,
      heads: data.heads,
    });
    root.replaceChildren(
      topOf(root, captions, element("p", {}, ...phrase(captions.look)), size, () => this.recolour()),
      element(
        "div",
        { className: "sa-bar" },
        element("label", { className: "sa-prompt" }, element("strong", {}, captions.prompt), " ", this.field),
        this.stepButton,
        this.backButton,
        this.writeButton,
        this.temperatures,
        chooser(
          captions["top k"],
          TOP_KS.map((k) => (k ? String(k) : captions["all tokens"])),
          0,
          (n) => set({ topK: TOP_KS[n] }),
        ),
      ),
      this.note,
      this.text,
      element(
        "div",
        { className: "sa-gpt-columns" },
        element(
          "section",
          { ariaLabel: captions.way },
          element("h2", {}, captions.way),
          element("h3", {}, captions.embedding),
          this.embedding,
          this.embeddingSays,
          ...layers,
          this.headSays,
        ),
        element(
          "section",
          {},
          this.nextHeading,
          this.bars,
          element("h2", {}, captions.compare),
          element("small", {}, captions.trained),
          this.before,
          element("small", {}, captions.now),
          this.after,
          this.parted,
          element("h2", {}, captions.weights),
          this.weights.node,
          element(
            "div",
            { className: "sa-bar" },
            button({ onclick: () => this.reset() }, captions.reset),
            this.counted,
          ),
        ),
      ),
    );
    this.begin();
    const { tour, quiz } = gptStops(this),
      worded = (/** @type {string} */ name) => ({
        ...data.tour,
        "tour start": captions.start,
        "tour start name": captions[`name.${name}`],
        "tour invitation": captions[`invite.${name}`],
      });
    this.tours = Object.entries({ tour, quiz }).map(
      ([name, stops]) =>
        new Tour({
          stops,
          texts: worded(name),
          show: (stop, open) => this.visit(/** @type {GPTStop | null} */ (stop), open),
        }),
    );
    root.querySelector(".sa-bar")?.before(...this.tours.map(({ node }) => node));
  }

  /**
   * Show a stop of the tour or of the exercise; null: the page without them.
   * @type {(stop: GPTStop | null, open: boolean) => void}
   */
  visit(stop, open) {
    for (const other of this.tours ?? []) if (stop && !other.stops.includes(stop) && other.at >= 0) other.leave();
    this.root.dataset.hide = stop && !open ? stop.hide : "";
    this.root.toggleAttribute("data-quiz", stop !== null && this.tours?.[1].stops.includes(stop));
    this.field.value = this.data.prompt;
    this.model.reset();
    this.edits.clear();
    this.weights.show();
    this.setTemperature(0);
    this.begin();
    stop?.act(open);
  }

  /** @param {number} temperature one of those that can be chosen */
  setTemperature(temperature) {
    this.temperature = temperature;
    const list = this.temperatures.querySelector("select");
    if (list) list.selectedIndex = TEMPERATURES.indexOf(temperature);
    this.drawNext();
  }

  /** @param {number} layer @param {number} head */
  head(layer, head) {
    const name = filled(this.captions.head, { layer, head });
    const canvas = element("canvas", { ariaHidden: "true" });
    const look = button(
      {
        className: "sa-thumb",
        ariaLabel: name,
        onclick: () => this.chooseHead(layer, head),
        onfocus: () => this.chooseHead(layer, head),
      },
      canvas,
    );
    const power = button(
      {
        className: "sa-switch",
        ariaPressed: "true",
        ariaLabel: filled(this.captions.switch, { head: name }),
        onclick: () => {
          const key = `${layer}.${head}`;
          if (!this.model.off.delete(key)) this.model.off.add(key);
          this.changed();
        },
      },
      this.captions.on,
    );
    return { layer, head, canvas, look, power, node: element("div", { className: "sa-gpt-head" }, look, power) };
  }

  /** Read the prompt. */
  begin() {
    const { alphabet, context } = this.data,
      order = range(alphabet.length).sort((a, b) => alphabet[b].length - alphabet[a].length);
    const prompt = this.field.value, /** @type {number[]} */ ids = [], unknown = new Set();
    for (let at = 0; at < prompt.length; ) {
      const longest = (/** @type {string} */ text) => order.find((id) => text.startsWith(alphabet[id], at));
      const found = longest(prompt) ?? longest(prompt.toLowerCase());  // an alphabet may have no capitals
      if (found === undefined) unknown.add(prompt[at]);
      else ids.push(found);
      at += found === undefined ? 1 : alphabet[found].length;
    }
    const room = context - 1, cut = ids.length > room;
    this.note.textContent = [
      unknown.size ? filled(this.captions.unknown, { letters: [...unknown].join(" ") }) : "",
      cut ? filled(this.captions["too long"], { context: room }) : "",
    ]
      .filter(Boolean)
      .join(" ");
    this.ids = cut ? ids.slice(-room) : ids;
    if (!this.ids.length) this.ids = [0];
    this.given = this.ids.length;
    this.random = randomNumbers(SEED);
    this.stop();
    this.place = this.ids.length - 1;
    this.changed();
  }

  /** The model or the text has changed. */
  changed() {
    this.pass = new Pass(this.model);
    for (const id of this.ids) this.pass.push(id);
    this.place = Math.min(this.place, this.ids.length - 1);
    this.draw();
    this.compare();
  }

  /** Write a letter; false if there is no more room. */
  step() {
    if (this.ids.length >= this.data.context) return false;
    const last = this.pass.traces[this.ids.length - 1].logits;
    this.ids.push(sample(choices(last, this.temperature, this.topK), this.temperature ? this.random() : 0));
    this.pass.push(this.ids[this.ids.length - 1]);
    this.place = this.ids.length - 1;
    this.draw();
    return this.ids.length < this.data.context;
  }

  undo() {
    if (this.ids.length <= this.given) return;
    this.ids.pop();
    this.place = this.ids.length - 1;
    this.changed();
  }

  toggle() {
    if (this.timer) return this.stop();
    this.writeButton.textContent = this.captions.stop;
    this.timer = window.setInterval(() => {
      if (!this.step()) this.stop();
    }, PACE);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.writeButton.textContent = this.captions.write;
  }

  reset() {
    this.model.reset();
    this.edits.clear();
    this.weights.show();
    this.changed();
  }

  /** @type {(layer: number, head: number) => void} */
  chooseHead(layer, head) {
    this.chosen = { layer, head };
    this.drawWay();
  }

  recolour() {
    this.colours = pixelColours(this.root);
    this.draw();
    this.weights.show();
  }

  draw() {
    this.text.replaceChildren(
      ...this.ids.map((id, n) =>
        button(
          {
            className: n >= this.given ? "sa-added" : "",
            ariaLabel: this.data.shown[id],
            ariaPressed: String(n === this.place),
            tabIndex: n === this.place ? 0 : -1,
            onclick: () => this.goTo(n),
          },
          this.letter(id),
        ),
      ),
    );
    this.stepButton.disabled = this.ids.length >= this.data.context;
    this.backButton.disabled = this.ids.length <= this.given;
    this.counted.textContent = filled(this.captions.changed, { weights: this.edits.size, heads: this.model.off.size });
    this.drawWay();
    this.drawNext();
  }

  /** @param {number} place of the letter that is chosen and focused */
  goTo(place) {
    this.place = place;
    this.draw();
    const letter = this.text.children[place];
    if (letter instanceof HTMLElement) letter.focus();
    announce(this.root, { place, token: this.data.alphabet[this.ids[place]] });
  }

  /** @param {number} id */
  letter(id) {
    const shown = this.data.shown[id];
    return shown === "␣" ? "\u00a0" : shown === "\\n" ? "⏎" : shown;
  }

  /** The chosen letter, as a word in a sentence. */
  here() {
    return wordOf(this.data.shown[this.ids[this.place]]);
  }

  drawWay() {
    const { captions, place, pass, colours, chosen, data } = this, trace = pass.traces[place];
    const strip = (
      /** @type {HTMLCanvasElement} */ canvas,
      /** @type {Float64Array} */ row,
      /** @type {string} */ name,
    ) => {
      const size = largest(row) || 1;
      paint(canvas, 1, row.length, (_, j) => colours.difference(-row[j] / size));
      canvas.ariaLabel = name;
    };
    const shown = data.shown[this.ids[place]];
    strip(this.embedding, trace.embedding, captions.embedding);
    this.embeddingSays.replaceChildren(
      ...phrase(captions["embedding means"], { letter: this.here(), width: data.width }),
    );
    this.hidden.forEach((canvas, layer) =>
      strip(
        canvas,
        trace.hidden[layer],
        filled(captions.hidden, { letter: shown, place: filled(captions.layer, { layer }) }),
      ),
    );
    for (const { layer, head, canvas, look, power } of this.heads) {
      const on = !this.model.off.has(`${layer}.${head}`);
      paint(canvas, this.ids.length, this.ids.length, (i, j) =>
        colours.weight(0, pass.traces[i].weights[layer][head][j] ?? 0),
      );
      look.ariaPressed = String(layer === chosen.layer && head === chosen.head);
      look.classList.toggle("sa-dim", !on);
      power.ariaPressed = String(on);
      power.textContent = on ? captions.on : captions.off;
    }
    const row = trace.weights[chosen.layer]?.[chosen.head];
    if (!row) return;
    const most = range(row.length).sort((a, b) => row[b] - row[a]).slice(0, 4);
    const around = (/** @type {number} */ j) =>
      this.ids
        .slice(Math.max(0, j - 3), j)
        .map((id) => this.letter(id))
        .join("");
    const list = most.flatMap((j, n) => [
      n ? ", " : "",
      ...phrase(captions.part, { weight: fixed(row[j], 2), before: around(j), word: wordOf(data.shown[this.ids[j]]) }),
    ]);
    this.headSays.replaceChildren(
      `${filled(captions.head, { layer: chosen.layer, head: chosen.head })}: `,
      ...phrase(captions.takes, { word: this.here(), list }),
    );
  }

  drawNext() {
    const { captions, place } = this, found = choices(this.pass.traces[place].logits, this.temperature || 1, this.topK);
    const came = this.ids[place + 1], shown = found.slice(0, LETTERS_BEFORE), rest = found.slice(LETTERS_BEFORE);
    this.nextHeading.replaceChildren(...phrase(captions.next, { letter: this.here() }));
    drawBars(
      this.bars,
      shown.map(({ id, probability }) => ({ token: this.data.shown[id], probability, came: id === came })),
      { n: rest.length, probability: rest.reduce((sum, { probability }) => sum + probability, 0) },
      captions,
    );
  }

  /** What the trained model and the changed model write after the prompt, always with the likeliest letter. */
  compare() {
    const prompt = this.ids.slice(0, this.given);
    const written = (/** @type {GPTModel} */ model) => {
      const pass = new Pass(model), /** @type {number[]} */ found = [];
      let trace = prompt.map((id) => pass.push(id))[prompt.length - 1];
      while (found.length < COMPARED && pass.traces.length < this.data.context) {
        found.push(choices(trace.logits, 0, 1)[0].id);
        trace = pass.push(found[found.length - 1]);
      }
      return found;
    };
    const before = written(this.trained), now = this.edits.size + this.model.off.size ? written(this.model) : before;
    const n = before.findIndex((id, k) => id !== now[k]);
    const lead = prompt.map((id) => this.data.alphabet[id]).join("");
    const say = (/** @type {HTMLElement} */ node, /** @type {number[]} */ ids) => {
      const part = (/** @type {number[]} */ some) => some.map((id) => this.data.alphabet[id]).join("");
      node.replaceChildren(
        element("span", { className: "sa-soft" }, lead),
        part(n < 0 ? ids : ids.slice(0, n)),
        ...(n < 0 ? [] : [element("mark", {}, part(ids.slice(n)))]),
      );
    };
    say(this.before, before);
    say(this.after, now);
    this.parted.textContent = n < 0 ? this.captions.same : filled(this.captions.differs, { n: n + 1 });
  }
}

/** A matrix as a picture, with a field to change one weight. */
class WeightEditor {
  /**
   * @param {GPTModel} model
   * @param {Record<string, string>} captions
   * @param {(name: string, places: number[]) => void} changed
   */
  constructor(model, captions, changed) {
    this.model = model;
    this.captions = captions;
    this.changed = changed;
    const names = [...model.parameters].filter(([, { shape }]) => shape.length === 2).map(([name]) => name);
    this.name = names.includes("layers.0.self_attn.in_proj_weight") ? "layers.0.self_attn.in_proj_weight" : names[0];
    this.at = 0;
    this.choice = element("select", { ariaLabel: captions.matrix, onchange: () => {
      this.name = names[this.choice.selectedIndex];
      this.at = 0;
      this.show();
    } }, ...names.map((name) => element("option", { selected: name === this.name }, name)));
    this.canvas = element("canvas", { role: "img", onclick: (/** @type {MouseEvent} */ event) => {
      const { shape: [rows, columns] } = model.get(this.name), { i, j } = placeIn(event, this.canvas, rows, columns);
      this.at = i * columns + j;
      this.show();
    } });
    this.says = element("span");
    const index = (/** @type {string} */ name) =>
      element("input", { type: "number", min: "0", ariaLabel: captions[name], onchange: () => this.goTo() });
    this.row = index("row");
    this.column = index("column");
    this.value = element("input", {
      inputMode: "decimal",
      ariaLabel: captions.value,
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Enter") this.set();
      },
    });
    this.node = element("div", { className: "sa-weight-editor" }, this.choice, this.canvas,
      element("div", { className: "sa-bar" }, "[", this.row, ", ", this.column, "] ", this.says, this.value,
        button({ onclick: () => this.set() }, captions.set), button({ onclick: () => this.zero() }, captions.zero)));
    requestAnimationFrame(() => this.show());
  }

  show() {
    const {
        shape: [rows, columns],
        data,
      } = this.model.get(this.name),
      colours = pixelColours(/** @type {HTMLElement} */ (this.node.closest(".sa-view") ?? this.node));
    const size = largest(data) || 1;
    paint(this.canvas, rows, columns, (i, j) => colours.difference(-data[i * columns + j] / size));
    this.canvas.ariaLabel = filled(this.captions["weight map"], { name: this.name, rows, columns });
    const row = Math.floor(this.at / columns), column = this.at % columns;
    this.row.max = String(rows - 1);
    this.column.max = String(columns - 1);
    this.row.value = String(row);
    this.column.value = String(column);
    this.says.textContent = `= ${fixed(data[this.at], 4)}`;
    this.value.value = String(Number(fixed(data[this.at], 4)));
  }

  goTo() {
    const { shape: [rows, columns] } = this.model.get(this.name);
    const index = (/** @type {HTMLInputElement} */ field, /** @type {number} */ n) =>
      clamp(Math.floor(Number(field.value)) || 0, 0, n - 1);
    this.at = index(this.row, rows) * columns + index(this.column, columns);
    this.show();
  }

  set() {
    const value = read(this.value.value);
    if (value === null || !Number.isFinite(value)) return this.show();
    this.model.get(this.name).data[this.at] = value;
    this.done([this.at]);
  }

  zero() {
    const { shape: [, columns], data } = this.model.get(this.name), first = Math.floor(this.at / columns) * columns;
    data.fill(0, first, first + columns);
    this.done(range(columns).map((n) => first + n));
  }

  /** @param {number[]} places */
  done(places) {
    this.show();
    this.changed(this.name, places);
  }
}

start("sa-gpt", GPTView);
