/*
 * The explorer's data of a text, which `heads.py` writes, and the parts that show them: all heads as small maps, a
 * word's rollout through all layers, the next tokens.
 */

import { dot, filled, fixed, Matrix, normalise, range } from "../../../selfattn/views/compute.js";
import {
  button, chooser, destination, element, inSlices, isForeign, moveFocus, phrase, placeIn, wordOf,
} from "../../../selfattn/views/kit/page.js";
import { drawBars, paint } from "../../../selfattn/views/kit/pictures.js";

/** @typedef {import("./explorer.js").ExplorerData} ExplorerData */
/** @typedef {import("./explorer_ablation.js").Off} Off */
/** @typedef {import("../../../selfattn/views/kit/page.js").Child} Child */
/** @typedef {import("../../../selfattn/views/kit/pictures.js").PixelColours} PixelColours */

/** @typedef {{ type: "u1" | "i2" | "u2" | "f4", at: number, shape: number[] }} Stored */
/** @typedef {{ values: Stored, size: Stored }} Rows numbers of 16 bits, and a factor for each row */
/**
 * The band is how far a query sees.
 * @typedef {{ query: Rows, key: Rows, band: [number | null, number | null] }} Products
 */
/**
 * @typedef {object} StoredText
 * @property {string[]} queries
 * @property {string[]} keys
 * @property {boolean[]} marks keys that are not words
 * @property {boolean} crossed queries and keys are of different texts
 * @property {number} chosen
 * @property {number} prompt how many tokens were given
 * @property {StoredNext | null} next
 * @property {({ weights: Stored } | Products)[]} layers
 * @property {Stored} small
 * @property {Stored} [means]
 */
/** @typedef {{ layer: number, head: number, n: number }} Head n counts all heads */
/** @typedef {"0" | "1" | "difference" | "word" | "off"} Mode what small maps show */
/** @typedef {{ shares: number[], entropy: number, kind: string, clear: boolean }} Habit */

/** @type {(bytes: ArrayBuffer, stored: Stored) => Uint8Array | Int16Array | Uint16Array | Float32Array} */
export function numbersOf(bytes, { type, at, shape }) {
  const kinds = { u1: Uint8Array, i2: Int16Array, u2: Uint16Array, f4: Float32Array };
  return new kinds[type](bytes, at, shape.reduce((a, b) => a * b, 1));
}

const REMEMBERED = 12; // heads whose weights are kept

export class TextData {
  /** @type {Map<number, Matrix>} */ kept = new Map();

  /** @param {StoredText} stored @param {ArrayBuffer} bytes */
  constructor(stored, bytes) {
    this.stored = stored;
    this.bytes = bytes;
    this.rows = stored.queries.length;
    this.columns = stored.keys.length;
    this.small = numbersOf(bytes, stored.small);
  }

  /** @param {Head} at */
  weights(at) {
    const known = this.kept.get(at.n);
    if (known) return known;
    const made = Matrix.of(this.rows, this.columns, () => 0);
    for (let i = 0; i < this.rows; i++) made.row(i).set(this.row(at, i));
    this.kept.set(at.n, made);
    if (this.kept.size > REMEMBERED) this.kept.delete(this.kept.keys().next().value ?? at.n);
    return made;
  }

  /** @type {(at: Head, i: number) => Float64Array} the weights of one query */
  row({ layer, head, n }, i) {
    const known = this.kept.get(n), stored = this.stored.layers[layer];
    if (known) return known.row(i);
    if (!("weights" in stored)) return this.softmax(stored, head, i);
    const from = (head * this.rows + i) * this.columns, weights = numbersOf(this.bytes, stored.weights);
    const one = stored.weights.type === "f4" ? 1 : 65535, row = new Float64Array(this.columns);
    for (let j = 0; j < row.length; j++) row[j] = weights[from + j] / one;
    return row;
  }

  /**
   * The softmax of a query's products with the keys that it sees.
   * @type {(stored: Products, head: number, i: number) => Float64Array}
   */
  softmax({ query, key, band }, head, i) {
    const width = query.values.shape[2], group = query.values.shape[0] / key.values.shape[0];
    const own = numbersOf(this.bytes, query.values), ownSize = numbersOf(this.bytes, query.size);
    const keys = numbersOf(this.bytes, key.values), sizes = numbersOf(this.bytes, key.size);
    const q = (head * this.rows + i) * width, k = Math.floor(head / group) * this.columns;
    const first = band[0] === null ? 0 : Math.max(0, i - band[0]);
    const end = band[1] === null ? this.columns : Math.min(this.columns, i + band[1] + 1);
    const row = new Float64Array(this.columns);
    for (let j = first; j < end; j++) {
      const from = (k + j) * width;
      let sum = 0;
      for (let c = 0; c < width; c++) sum += own[q + c] * keys[from + c];
      row[j] = sum * ownSize[head * this.rows + i] * sizes[k + j];
    }
    normalise(row.subarray(first, end));
    return row;
  }

  /** @param {Head} head @returns the head's small map: the square roots of its weights as bytes, and its sides */
  smallMap({ n }) {
    const [, rows, columns] = this.stored.small.shape;
    return { rows, columns, bytes: this.small.subarray(n * rows * columns, (n + 1) * rows * columns) };
  }

  /**
   * Attention rollout of word i. Row l: the share of each token, as it is after l layers, in the word's output. Row 0:
   * the share of each input.
   * @type {(i: number) => Matrix | null}
   */
  way(i) {
    if (!this.stored.means) return null;
    const means = numbersOf(this.bytes, this.stored.means), [layers, rows, columns] = this.stored.means.shape;
    const found = Matrix.of(layers + 1, columns, (layer, j) => Number(layer === layers && j === i));
    for (let layer = layers - 1; layer >= 0; layer--) {
      const after = found.row(layer + 1), before = found.row(layer);
      for (let row = 0; row < rows; row++) {
        if (after[row] === 0) continue;
        const from = (layer * rows + row) * columns, share = (0.5 * after[row]) / 65535;
        before[row] += 0.5 * after[row];
        for (let column = 0; column < columns; column++) before[column] += share * means[from + column];
      }
    }
    return found;
  }

  /**
   * The nearest place that has the token; if there is none, the place itself.
   * @type {(token: string, place: number) => number}
   */
  nearest(token, place) {
    const distance = (/** @type {number} */ i) => Math.abs(i - place);
    const found = range(this.rows).filter((i) => this.stored.queries[i] === token);
    return found.length
      ? found.reduce((best, i) => (distance(i) < distance(best) ? i : best))
      : Math.min(place, this.rows - 1);
  }
}

/** All heads as small maps, a row for each layer; one can be chosen, and heads with other habits can be dimmed. */
export class HeadGrid {
  /** @type {string | null} */ only = null;
  frame = 0;

  /**
   * @param {ExplorerData} data
   * @param {TextData[]} texts
   * @param {(head: Head) => void} choose
   * @param {Off | null} off
   */
  constructor(data, texts, choose, off) {
    const { heads, habits, captions } = data;
    this.texts = texts;
    this.off = off;
    this.captions = captions;
    this.choose = choose;
    const widest = Math.max(...heads);
    /** @type {Head[]} */
    this.all = heads.flatMap((count, layer) => range(count).map((head) => ({ layer, head, n: 0 })));
    this.all.forEach((head, n) => (head.n = n));
    this.habits = habits.flat();
    this.canvases = this.all.map(() => element("canvas", { ariaHidden: "true" }));
    this.kinds = this.all.map(() => element("span"));
    this.buttons = this.all.map((head, n) => button({ className: "sa-thumb", role: "option", tabIndex: n ? -1 : 0,
      onclick: () => this.choose(head), onfocus: () => this.choose(head) }, this.canvases[n], this.kinds[n]));
    this.renew(data, texts, choose);
    const lens = off?.stored.lens, named = off?.stored.names ?? [];
    const says = (/** @type {number} */ layer) =>
      lens
        ? [
            element(
              "span.sa-lens",
              {
                title: filled(captions.lens, { layer, probability: fixed(lens[layer][1], 2) }),
              },
              wordOf(named[lens[layer][0]]),
            ),
          ]
        : [];
    const axis = (/** @type {Child[]} */ ...text) =>
      element("span.sa-axis-name", { ariaHidden: "true" }, ...text);
    this.node = element(
      "div.sa-heads",
      { role: "listbox", ariaLabel: captions["all heads"] },
      ...heads.flatMap((count, layer) => [
        axis(...phrase(captions.layer, { layer: element("b", String(layer)) })),
        ...this.buttons.filter((_, n) => this.all[n].layer === layer),
        ...range(widest - count).map(() => axis()),
        ...says(layer),
      ]),
    );
    if (lens) this.node.classList.add("sa-with-lens");
    this.node.addEventListener("keydown", (event) => {
      const n = this.buttons.findIndex((button) => button === event.target);
      if (n < 0 || isForeign(event)) return;
      const { layer, head } = this.all[n];
      const to = destination(event.key, layer, head, heads.length, heads[layer]);
      const next =
        to && this.all.find((each) => each.layer === to[0] && each.head === Math.min(to[1], heads[to[0]] - 1));
      if (!next) return;
      event.preventDefault();
      moveFocus(this.buttons, this.buttons[next.n]);
    });
  }

  /**
   * Show other texts, for the same heads.
   * @type {(data: ExplorerData, texts: TextData[], choose: (head: Head) => void) => HeadGrid}
   */
  renew({ habits, captions }, texts, choose) {
    Object.assign(this, { habits: habits.flat(), captions, texts, choose });
    this.letters = Math.max(...this.all.map((_, n) => this.kindOf(n).length));
    this.all.forEach((head, n) => {
      this.kinds[n].textContent = this.kindOf(n);
      this.buttons[n].ariaLabel = this.buttons[n].title = `${this.nameOf(head)}: ${this.kindOf(n)}`;
    });
    return this;
  }

  /** @param {Head} head */
  nameOf({ layer, head }) {
    return filled(this.captions.head, { layer, head });
  }

  /** @param {number} n */
  kindOf(n) {
    const { kind, clear } = this.habits[n];
    return `${clear ? "" : "~"}${this.captions[`kind.${kind}`]}`;
  }

  /** @param {() => void} changed @returns buttons that dim all heads but those of a habit */
  filters(changed) {
    const { captions } = this, kinds = [...new Set(this.habits.map(({ kind }) => kind))];
    const count = (/** @type {string} */ kind, /** @type {boolean} */ clear) =>
      this.habits.filter((each) => each.kind === kind && each.clear === clear).length;
    kinds.sort((a, b) => count(b, true) + count(b, false) - count(a, true) - count(a, false));
    const buttons = kinds.map((kind) => {
      const partly = count(kind, false);
      return button(
        {
          ariaPressed: String(this.only === kind),
          title: captions[`means.${kind}`],
          onclick: () => {
            this.only = this.only === kind ? null : kind;
            buttons.forEach((each, n) => (each.ariaPressed = String(kinds[n] === this.only)));
            changed();
          },
        },
        `${captions[`kind.${kind}`]} ${count(kind, true)}`,
        ...(partly ? [element("small", ` ~${partly}`)] : []),
      );
    });
    return element(
      "div.sa-kinds",
      { role: "group", ariaLabel: captions["show only"] },
      element("span", captions["show only"]),
      ...buttons,
    );
  }

  /**
   * Mark the chosen head, and paint all maps if `repaint`: the first ones at once.
   * @type {(state: { chosen: Head, mode: Mode, words: number[], colours: PixelColours, repaint: boolean }) => void}
   */
  update({ chosen, mode, words, colours, repaint }) {
    this.all.forEach((head, n) => {
      const on = head === chosen;
      this.buttons[n].ariaSelected = String(on);
      this.buttons[n].tabIndex = on ? 0 : -1;
      this.buttons[n].classList.toggle("sa-dim", this.only !== null && this.habits[n].kind !== this.only);
    });
    if (repaint) inSlices(this, this.all, (head) => this.paint(head, mode, words, colours));
  }

  /** @type {(head: Head, mode: Mode, words: number[], colours: PixelColours) => void} */
  paint(head, mode, words, colours) {
    const canvas = this.canvases[head.n], { off } = this;
    if (mode === "off" && off) return paint(canvas, 1, 1, () => colours.difference(off.share(head.n)));
    if (mode === "word") {
      const rows = this.texts.map((text, side) => text.row(head, words[side]));
      const columns = Math.min(Math.max(...rows.map((row) => row.length)), 48),
        thick = Math.max(1, Math.round(columns / (3 * rows.length)));
      const gap = rows.length > 1 ? 1 : 0, shades = rows.map((row, side) => range(columns).map((j) => {
        const from = Math.floor((j * row.length) / columns),
          to = Math.max(from + 1, Math.floor(((j + 1) * row.length) / columns));
        return colours.weight(side, Math.max(...row.subarray(from, to)));
      }));
      return paint(canvas, rows.length * thick + gap, columns, (i, j) =>
        i < thick ? shades[0][j] : i < thick + gap ? colours.paper : shades[1][j],
      );
    }
    const side = mode === "1" ? 1 : 0, { rows, columns, bytes } = this.texts[side].smallMap(head);
    if (mode !== "difference") {
      return paint(canvas, rows, columns, (i, j) => colours.root(side, bytes[i * columns + j]));
    }
    const other = this.texts[1].smallMap(head).bytes;
    const square = (/** @type {number} */ root) => (root / 255) ** 2;
    paint(canvas, rows, columns, (i, j) =>
      colours.difference(square(other[i * columns + j]) - square(bytes[i * columns + j])),
    );
  }
}

/** A word's rollout through all layers: a row for each layer, a column for each token. */
export class WayMap {
  /**
   * @param {TextData[]} texts
   * @param {Record<string, string>} captions
   * @param {(side: number, j: number, layer: number) => Child[]} say
   */
  constructor(texts, captions, say) {
    this.texts = texts;
    this.captions = captions;
    this.there = texts.every((text) => text.stored.means !== undefined);
    this.heading = element("h2");
    this.means = element("p.sa-means");
    this.line = element("p.sa-line", { ariaLive: "polite" });
    this.canvases = texts.map((text, side) => {
      const canvas = element("canvas", { role: "img", data: { side: String(side) } });
      canvas.addEventListener("pointermove", (event) => {
        const { i, j } = placeIn(event, canvas, (text.stored.means?.shape[0] ?? 0) + 1, text.columns);
        this.line.replaceChildren(...say(side, j, i));
      });
      return canvas;
    });
    const names = (/** @type {TextData} */ text) =>
      text.columns > 24
        ? []
        : [
            element(
              "div.sa-way-names",
              { ariaHidden: "true" },
              ...text.stored.keys.map((key) => element("bdi", key)),
            ),
          ];
    const ends = () =>
      element(
        "div.sa-way-ends",
        { ariaHidden: "true" },
        element("span", captions["goes in"]),
        element("span", captions["comes out"]),
      );
    this.node = element(
      "section.sa-way",
      { ariaLabel: captions["all layers"] },
      this.heading,
      this.means,
      element(
        "div.sa-ways",
        ...texts.map((text, side) =>
          element("div.sa-one-way", ends(), this.canvases[side], ...names(text)),
        ),
      ),
      this.line,
    );
  }

  /** @type {(words: number[], colours: PixelColours) => void} */
  update(words, colours) {
    if (!this.there) return;
    const word = this.texts[0].stored.queries[words[0]];
    this.heading.replaceChildren(...phrase(this.captions.way, { word: wordOf(word) }));
    this.means.replaceChildren(...phrase(this.captions["way means"], { word: wordOf(word) }));
    this.texts.forEach((text, side) => {
      const way = text.way(words[side]);
      if (!way) return;
      this.canvases[side].ariaLabel = filled(this.captions["way map"], { word: text.stored.queries[words[side]] });
      paint(this.canvases[side], way.rows, way.columns, (i, j) => colours.weight(side, way.at(i, j)));
    });
    this.line.replaceChildren();
  }
}

/**
 * @typedef {object} StoredNext
 * @property {string[]} names of tokens
 * @property {number[][]} tokens the likeliest tokens of each place, as indices of names
 * @property {Stored} logits of these tokens
 * @property {number[]} temperatures
 * @property {Stored} sums the log-sum-exp of all logits, of each place at each temperature
 * @property {number} vocabulary
 */

const BARS = 12;
const TOP_K = [0, 50, 20, 10, 5, 2]; // 0 means all

/** What a language model expects after a place: bars of the likeliest tokens; and its continuation, step by step. */
export class NextTokens {
  /**
   * @param {TextData} text
   * @param {Record<string, string>} captions
   * @param {number} side
   * @param {(place: number) => void} choose
   */
  constructor(text, captions, side, choose) {
    this.text = text;
    this.captions = captions;
    this.next = /** @type {StoredNext} */ (text.stored.next);
    this.place = text.stored.prompt - 1;
    const { temperatures } = this.next;
    this.temperature = Math.max(0, temperatures.indexOf(1));
    this.topK = 0;
    const set = (/** @type {{ temperature?: number, topK?: number }} */ chosen) => {
      Object.assign(this, chosen);
      this.draw();
    };
    this.said = element("p.sa-next-say");
    this.bars = element("ol.sa-bars-list", { data: { side: String(side) } });
    const step = (/** @type {string} */ name, /** @type {number} */ by) =>
      button({ onclick: () => choose(this.place + by) }, captions[name]);
    this.back = step("back", -1);
    this.forth = step("step", 1);
    this.count = element("span.sa-soft");
    this.node = element(
      "section.sa-next",
      { ariaLabel: captions.next },
      element("h2", captions.next),
      element(
        "div.sa-bar",
        chooser(captions.temperature, temperatures.map(String), this.temperature, (n) => set({ temperature: n })),
        chooser(
          captions["top k"],
          TOP_K.map((k) => (k ? String(k) : captions["all tokens"])),
          0,
          (n) => set({ topK: TOP_K[n] }),
        ),
        this.back,
        this.forth,
        this.count,
      ),
      this.said,
      this.bars,
    );
  }

  /** @param {number} place */
  show(place) {
    this.place = place;
    this.draw();
  }

  /** The likeliest tokens of the place; with top-k, only the first k. */
  likely() {
    const { place, topK, temperature, next, text: { bytes } } = this;
    const [, count] = next.logits.shape,
      t = next.temperatures[temperature],
      kept = topK ? Math.min(topK, count) : count;
    const logits = numbersOf(bytes, next.logits).subarray(place * count, (place + 1) * count);
    const sum = topK
      ? Math.log(dot(kept, (n) => Math.exp((logits[n] - logits[0]) / t))) + logits[0] / t
      : numbersOf(bytes, next.sums)[place * next.temperatures.length + temperature];
    const came = this.text.stored.queries[place + 1];
    return range(kept).map((n) => {
      const token = next.names[next.tokens[place][n]];
      return { token, probability: Math.exp(logits[n] / t - sum), came: token === came };
    });
  }

  draw() {
    const { queries, prompt } = this.text.stored,
      { place, captions } = this,
      found = this.likely(),
      shown = found.slice(0, BARS);
    this.back.disabled = place <= 0;
    this.forth.disabled = place >= queries.length - 1;
    this.count.textContent =
      queries.length > prompt
        ? filled(captions.added, { n: Math.max(0, place + 1 - prompt), all: queries.length - prompt })
        : "";
    this.said.replaceChildren(...phrase(captions["next means"], { word: wordOf(queries[place]) }));
    const rest = Math.max(0, 1 - dot(shown.length, (n) => shown[n].probability));
    drawBars(
      this.bars,
      shown,
      { n: (this.topK ? found.length : this.next.vocabulary) - shown.length, probability: rest },
      captions,
    );
  }
}
