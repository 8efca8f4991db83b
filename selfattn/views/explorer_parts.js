/*
 * Parts of the explorer: all heads as small maps, a word's way through all layers, what comes next.
 */

/** @typedef {"0" | "1" | "difference" | "word"} Mode what small maps show */
/** @typedef {{ shares: number[], entropy: number, kind: string, clear: boolean }} Habit */

/** All heads as small maps, a row for each layer: choosing one, showing only some. */
class HeadGrid {
  /** @type {string | null} */ only = null;

  /** @param {ExplorerData} data @param {TextData[]} texts @param {(head: Head) => void} choose */
  constructor({ heads, habits, captions }, texts, choose) {
    this.texts = texts;
    this.captions = captions;
    this.widest = Math.max(...heads);
    /** @type {Head[]} */
    this.all = heads.flatMap((count, layer) => range(count).map((head) => ({ layer, head, n: 0 })));
    this.all.forEach((head, n) => (head.n = n));
    this.habits = habits.flat();
    this.canvases = this.all.map(() => element("canvas", { ariaHidden: "true" }));
    this.buttons = this.all.map((head, n) => {
      const name = filled(captions.head, { layer: head.layer + 1, head: head.head + 1 }), kind = this.kindOf(n);
      return button({ className: "sa-thumb", role: "option", tabIndex: n ? -1 : 0, ariaLabel: `${name}: ${kind}`, title: `${name}: ${kind}`,
        onclick: () => choose(head), onfocus: () => choose(head) }, this.canvases[n], element("span", {}, kind));
    });
    const axis = (/** @type {string} */ text) => element("span", { className: "sa-axis-name", ariaHidden: "true" }, text);
    this.node = element("div", { className: "sa-heads", role: "listbox", ariaLabel: captions["all heads"] },
      ...heads.flatMap((count, layer) => {
        const first = heads.slice(0, layer).reduce((a, b) => a + b, 0);
        return [axis(filled(captions.layer, { layer: layer + 1 })), ...this.buttons.slice(first, first + count), ...range(this.widest - count).map(() => axis(""))];
      }));
    this.node.style.setProperty("--heads", String(this.widest));
    this.node.addEventListener("keydown", (event) => {
      const n = this.buttons.findIndex((button) => button === event.target);
      if (n < 0 || isForeign(event)) return;
      const { layer, head } = this.all[n];
      const to = destination(event.key, layer, head, heads.length, heads[layer]);
      const next = to && this.all.find((each) => each.layer === to[0] && each.head === Math.min(to[1], heads[to[0]] - 1));
      if (!next) return;
      event.preventDefault();
      moveFocus(this.buttons, this.buttons[next.n]);
    });
  }

  /** @param {number} n */
  kindOf(n) {
    const { kind, clear } = this.habits[n];
    return `${clear ? "" : "~"}${this.captions[`kind.${kind}`]}`;
  }

  /**
   * Buttons that dim all heads but those of a habit.
   * @param {() => void} changed
   */
  filters(changed) {
    const kinds = [...new Set(this.habits.map(({ kind }) => kind))];
    const count = (/** @type {string} */ kind, /** @type {boolean} */ clear) => this.habits.filter((each) => each.kind === kind && each.clear === clear).length;
    kinds.sort((a, b) => count(b, true) + count(b, false) - count(a, true) - count(a, false));
    const buttons = kinds.map((kind) => {
      const partly = count(kind, false);
      return button({ ariaPressed: "false", title: this.captions[`means.${kind}`], onclick: () => {
        this.only = this.only === kind ? null : kind;
        buttons.forEach((each, n) => (each.ariaPressed = String(kinds[n] === this.only)));
        changed();
      } }, `${this.captions[`kind.${kind}`]} ${count(kind, true)}`, ...(partly ? [element("small", {}, ` ~${partly}`)] : []));
    });
    return element("div", { className: "sa-kinds", role: "group", ariaLabel: this.captions["show only"] }, element("span", {}, this.captions["show only"]), ...buttons);
  }

  /**
   * Show which head is chosen, and draw all, unless they are drawn and as they were.
   * @type {(state: { chosen: Head, mode: Mode, words: number[], colours: PixelColours, drawn: boolean }) => void}
   */
  update({ chosen, mode, words, colours, drawn }) {
    this.all.forEach((head, n) => {
      const on = head === chosen;
      this.buttons[n].ariaSelected = String(on);
      this.buttons[n].tabIndex = on ? 0 : -1;
      this.buttons[n].classList.toggle("sa-dim", this.only !== null && this.habits[n].kind !== this.only);
      if (!drawn) this.draw(head, this.canvases[n], mode, words, colours);
    });
  }

  /** @type {(head: Head, canvas: HTMLCanvasElement, mode: Mode, words: number[], colours: PixelColours) => void} */
  draw(head, canvas, mode, words, colours) {
    if (mode === "word") {
      const rows = this.texts.map((text, side) => text.row(head, words[side]));
      const columns = Math.min(Math.max(...rows.map((row) => row.length)), 48), thick = Math.max(1, Math.round(columns / (3 * rows.length)));
      const gap = rows.length > 1 ? 1 : 0;
      return paint(canvas, rows.length * thick + gap, columns, (i, j) => {
        const side = i < thick ? 0 : i < thick + gap ? -1 : 1;
        if (side < 0) return colours.paper;
        const row = rows[side], from = Math.floor((j * row.length) / columns), to = Math.max(from + 1, Math.floor(((j + 1) * row.length) / columns));
        return colours.weight(side, Math.round(255 * Math.sqrt(Math.max(...row.subarray(from, to)))));
      });
    }
    const side = mode === "1" ? 1 : 0, { rows, columns, bytes } = this.texts[side].smallMap(head);
    if (mode !== "difference") return paint(canvas, rows, columns, (i, j) => colours.weight(side, bytes[i * columns + j]));
    const other = this.texts[1].smallMap(head).bytes;
    const square = (/** @type {number} */ root) => (root / 255) ** 2;
    paint(canvas, rows, columns, (i, j) => colours.difference(square(other[i * columns + j]) - square(bytes[i * columns + j])));
  }
}

/** A word's way through all layers: a row for each layer, a column for each token. */
class WayMap {
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
    this.means = element("p", { className: "sa-means" });
    this.line = element("p", { className: "sa-line", ariaLive: "polite" });
    this.canvases = texts.map((text, side) => {
      const canvas = element("canvas", { role: "img", data: { side: String(side) } });
      canvas.addEventListener("pointermove", (event) => {
        const { i, j } = placeIn(event, canvas, (text.stored.means?.shape[0] ?? 0) + 1, text.columns);
        this.line.replaceChildren(...say(side, j, i));
      });
      return canvas;
    });
    const names = (/** @type {TextData} */ text) => text.columns > 24 ? [] : [element("div", { className: "sa-way-names", ariaHidden: "true" }, ...text.stored.keys.map((key) => element("bdi", {}, key)))];
    const ends = () => element("div", { className: "sa-way-ends", ariaHidden: "true" }, element("span", {}, captions["goes in"]), element("span", {}, captions["comes out"]));
    this.node = element("section", { className: "sa-way", ariaLabel: captions["all layers"] }, this.heading, this.means,
      element("div", { className: "sa-ways" }, ...texts.map((text, side) => element("div", { className: "sa-one-way" }, ends(), this.canvases[side], ...names(text)))), this.line);
  }

  /** @type {(words: number[], colours: PixelColours) => void} */
  update(words, colours) {
    if (!this.there) return;
    const word = wordOf(this.texts[0].stored.queries[words[0]]);
    this.heading.replaceChildren(...phrase(this.captions.way, { word: word.cloneNode(true) }));
    this.means.replaceChildren(...phrase(this.captions["way means"], { word }));
    this.texts.forEach((text, side) => {
      const way = text.way(words[side]);
      if (!way) return;
      this.canvases[side].ariaLabel = filled(this.captions["way map"], { word: text.stored.queries[words[side]] });
      paint(this.canvases[side], way.rows, way.columns, (i, j) => colours.weight(side, Math.round(255 * Math.sqrt(Math.min(1, way.at(i, j))))));
    });
    this.line.replaceChildren();
  }
}

const BARS = 12;
const TOP_K = [0, 50, 20, 10, 5, 2];

/** What a language model expects after a place: bars of the likeliest tokens, at a temperature and with top-k; and its answer, step by step. */
class NextTokens {
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
    this.said = element("p", { className: "sa-next-say" });
    this.bars = element("ol", { className: "sa-bars-list", data: { side: String(side) } });
    const step = (/** @type {string} */ name, /** @type {number} */ by) => button({ onclick: () => choose(this.place + by) }, captions[name]);
    this.back = step("back", -1);
    this.forth = step("step", 1);
    this.count = element("span", { className: "sa-soft" });
    this.node = element("section", { className: "sa-next", ariaLabel: captions.next }, element("h2", {}, captions.next),
      element("div", { className: "sa-bar" },
        chooser(captions.temperature, temperatures.map(String), this.temperature, (n) => set({ temperature: n })),
        chooser(captions["top k"], TOP_K.map((k) => (k ? String(k) : captions["all tokens"])), 0, (n) => set({ topK: TOP_K[n] })),
        this.back, this.forth, this.count),
      this.said, this.bars);
  }

  /** @param {number} place */
  show(place) {
    this.place = place;
    this.draw();
  }

  draw() {
    const { queries, prompt } = this.text.stored, { place, next, captions } = this;
    const came = queries[place + 1], found = likely(next, this.text.bytes, place, this.temperature, this.topK);
    this.back.disabled = place <= 0;
    this.forth.disabled = place >= queries.length - 1;
    this.count.textContent = queries.length > prompt ? filled(captions.added, { n: Math.max(0, place + 1 - prompt), all: queries.length - prompt }) : "";
    this.said.replaceChildren(...phrase(captions["next means"], { word: wordOf(queries[place]) }));
    const shown = found.slice(0, BARS);
    const rest = Math.max(0, 1 - dot(shown.length, (n) => shown[n].probability));
    const others = this.topK ? found.length - shown.length : next.vocabulary - shown.length;
    drawBars(this.bars, shown.map(({ token, probability }) => ({ token: next.names[token], probability, came: next.names[token] === came })),
      { n: others, probability: rest }, captions);
  }
}
