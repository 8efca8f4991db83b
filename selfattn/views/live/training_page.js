/*
 * The page of training: a text of one's own, the loss as a line, what the model writes, and all its heads, as they
 * change.
 */

import { filled, fixed, Matrix, range } from "../compute.js";
import { button, chooser, element, phrase, shape, start } from "../kit/page.js";
import { paint, Picture, pixelColours } from "../kit/pictures.js";
import { Ribbons } from "../kit/ribbons.js";
import { KernelPage } from "./kernel_page.js";
import { trainingJobs } from "./training.js";
import { inWorker, serve } from "./worker.js";

/** @typedef {import("../kit/ribbons.js").Chosen} Chosen */
/** @typedef {import("./training.js").Look} Look */

const BATCH = 8, FOREVER = 1e9, WIDE_LINE = 600, HIGH_LINE = 150; // sequences of a step; pixels
const HEAD_HIGH = 380; // pixels of the ribbons of a head
const MOST_LISTED = 3; // letters to which a letter gives most weight
const RATES = ["0.0003", "0.001", "0.003", "0.01"];

/** @typedef {{ map: Picture, node: HTMLButtonElement }} HeadPicture */

class TrainingPage extends KernelPage {
  /** @type {number[]} */ losses = [];
  running = false;
  /** @type {Look | null} */ look = null;
  /** @type {HeadPicture[]} */ thumbs = [];
  /** @type {Ribbons | null} */ ribbons = null;
  chosen = 0; // among all heads
  /** @type {Chosen | null} */ selected = null;

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    super(root, data, wasm);
    const { captions } = data;
    this.colours = pixelColours(root);
    this.text = element("textarea", {
      rows: 6,
      spellcheck: false,
      value: captions.verses,
      oninput: () => this.begin(),
    });
    this.go = button(
      { onclick: () => (this.running ? this.worker.stop("train") : this.train(FOREVER)) },
      captions.train,
    );
    this.one = button({ onclick: () => this.train(1) }, captions["one step"]);
    this.rate = chooser(captions.rate, RATES, 2, () => this.changed());
    this.line = shape("polyline", {
      fill: "none",
      stroke: "currentColor",
      "stroke-width": "2",
      "vector-effect": "non-scaling-stroke",
    });
    this.picture = shape(
      "svg",
      { viewBox: `0 0 ${WIDE_LINE} ${HIGH_LINE}`, preserveAspectRatio: "none", role: "img", class: "sa-curve" },
      this.line,
    );
    this.loss = element("p.sa-means");
    this.written = element("p.sa-written");
    this.grid = element("div.sa-heads");
    this.large = element("div");
    this.takes = element("p.sa-takes", { ariaLive: "polite" });
    root.replaceChildren(
      this.top(element("p.sa-lede", ...phrase(captions.look))),
      element(
        "div.sa-fields",
        element(
          "div",
          element("label", captions["your text"], this.text),
          element(
            "div.sa-bar",
            this.go,
            this.one,
            button({ onclick: () => this.begin() }, captions.anew),
            this.rate,
          ),
          this.status,
        ),
        element(
          "section",
          { ariaLabel: captions["the loss"] },
          element("h2", captions["the loss"]),
          this.picture,
          this.loss,
          element("h2", captions["it writes"]),
          this.written,
        ),
      ),
      element(
        "div.sa-fields.sa-shown",
        element("section", { ariaLabel: captions["all heads"] }, element("h2", captions["all heads"]), this.grid),
        element("section", { ariaLabel: captions["one head"] }, this.takes, this.large),
      ),
      this.built,
    );
    this.begin();
  }

  /** The first line of the text, whose heads are shown. */
  get sample() {
    return Array.from(this.text.value.trim().split("\n")[0]).slice(0, 24).join("");
  }

  get settings() {
    return { ...this.data.settings, alphabet: [...new Set([...Array.from(this.text.value), " "])].sort() };
  }

  async begin() {
    const { captions, text: { value: text }, settings, sample } = this;
    this.worker.stop("train");
    this.losses = [];
    if (text.trim().length < 2) return;
    const found = await this.during(this.worker.ask("begin", { text, settings, sample }));
    if (!found) return;
    this.model = found;
    this.written.textContent = "…";
    this.status.textContent = filled(captions.begun, { n: found.parameters, letters: settings.alphabet.length });
    this.curve();
    this.heads(found);
    this.root.dataset.begun = "";
  }

  changed() {
    if (this.running) this.worker.stop("train"); // the next press of the button takes the new rate
  }

  /** @param {number} steps */
  async train(steps) {
    const { captions, sample, rate } = this, lr = Number(RATES[rate.querySelector("select")?.selectedIndex ?? 2]);
    if (!this.model) await this.begin(); // its worker has ended
    this.running = true;
    this.go.textContent = captions.pause;
    const { losses } = this, before = losses.length, show = (/** @type {any} */ found) => {
      if (losses !== this.losses) return; // begun anew
      losses.push(...found.losses);
      this.curve();
      if (found.weights) this.heads(found);
      if (found.written) this.written.replaceChildren(element("b", sample), found.written);
      this.root.dataset.step = String(found.step);
    };
    const found = await this.during(this.worker.ask("train", { lr, steps, batch: BATCH, sample }, { progress: show }));
    this.running = false;
    this.go.textContent = captions.train;
    if (!found || losses !== this.losses) return;
    show(found);
    this.status.textContent = filled(captions.trained, {
      n: found.step,
      rate: fixed((this.losses.length - before) / (found.ms / 1000), 0),
    });
  }

  curve() {
    const { losses, captions } = this,
      n = losses.length,
      every = Math.max(1, Math.ceil(n / WIDE_LINE)),
      most = Math.max(...losses.slice(0, 20), 1);
    const means = range(Math.ceil(n / every)).map((k) => {
      const some = losses.slice(k * every, (k + 1) * every);
      return some.reduce((a, b) => a + b, 0) / some.length;
    });
    this.line.setAttribute(
      "points",
      means
        .map(
          (loss, k) =>
            `${(WIDE_LINE * (k + 1)) / Math.max(40, means.length)},${HIGH_LINE * (1 - Math.min(1, loss / most))}`,
        )
        .join(" "),
    );
    const text = n
      ? filled(captions["loss is"], { first: fixed(losses[0], 2), last: fixed(means.at(-1) ?? 0, 2), n })
      : captions["no loss"];
    this.loss.textContent = text;
    this.picture.setAttribute("aria-label", text);
  }

  recolour() {
    this.colours = pixelColours(this.root);
    this.draw();
  }

  /** @param {Look} look */
  heads(look) {
    const { settings: { layers, heads } } = this, n = look.tokens.length;
    if (this.look?.tokens.join("") !== look.tokens.join("")) {
      this.selected = { kind: "to", index: n - 1 };
      this.thumbs = range(layers * heads).map((k) => this.thumb(k, n));
      this.grid.style.setProperty("--heads", String(heads));
      this.grid.replaceChildren(...this.thumbs.map(({ node }) => node));
      this.ribbons = new Ribbons({
        keys: look.tokens,
        queries: look.tokens,
        side: 0,
        name: this.captions["one head"],
        ends: { from: this.captions["goes in"], to: this.captions["comes out"] },
        heading: element("b", ""),
        high: HEAD_HIGH,
        point: (chosen) => {
          this.selected = chosen ?? this.selected;
          this.draw();
        },
      });
      this.large.replaceChildren(this.ribbons.node);
    }
    this.look = look;
    this.draw();
  }

  /** @param {number} head among all heads */
  named(head) {
    const { settings: { heads } } = this;
    return filled(this.captions.head, { layer: Math.floor(head / heads), head: head % heads });
  }

  /** @type {(head: number, n: number) => HeadPicture} a small map that chooses its head */
  thumb(head, n) {
    const map = new Picture({ name: this.named(head), rows: n, columns: n });
    map.outline(-1);
    const choose = () => {
      this.chosen = head;
      this.draw();
    };
    return { map, node: button({ className: "sa-thumb", onclick: choose }, map.node) };
  }

  /** @param {number} head @returns its weights */
  weightsOf(head) {
    const { tokens: { length: n }, weights } = /** @type {Look} */ (this.look);
    return Matrix.of(n, n, (i, j) => weights[(head * n + i) * n + j]);
  }

  draw() {
    const { look, ribbons, thumbs, captions, selected, colours } = this;
    if (!look || !ribbons || !selected) return;
    const n = look.tokens.length;
    this.chosen = Math.min(this.chosen, thumbs.length - 1);
    thumbs.forEach(({ map, node }, k) => {
      paint(map.canvas, n, n, (i, j) => colours.weight(0, look.weights[(k * n + i) * n + j]));
      node.ariaPressed = String(k === this.chosen);
    });
    const weights = this.weightsOf(this.chosen), row = selected.kind === "to" ? selected.index : n - 1;
    ribbons.update({ weights, selected });
    const likeliest = range(n)
      .sort((a, b) => weights.at(row, b) - weights.at(row, a))
      .slice(0, MOST_LISTED);
    const list = likeliest
      .map((j) => filled(captions.part, { weight: fixed(weights.at(row, j), 2), word: look.tokens[j] }))
      .join(", ");
    const head = this.named(this.chosen);
    this.takes.textContent = filled(captions.takes, { head, word: look.tokens[row], list });
  }
}

if (inWorker) serve(trainingJobs());
else start("sa-training", TrainingPage);
