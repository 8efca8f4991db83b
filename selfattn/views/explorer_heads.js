/*
 * All heads as small maps, a row for each layer: choosing one, showing only some, and what is worth a look.
 */

/** @typedef {"0" | "1" | "difference" | "word"} Mode what small maps show */
/** @typedef {{ shares: number[], entropy: number, kind: string, clear: boolean }} Habit */

class HeadGrid {
  /**
   * @param {object} options
   * @param {number[]} options.heads of each layer
   * @param {Habit[][]} options.habits
   * @param {TextData[]} options.texts
   * @param {Record<string, string>} options.captions
   * @param {(head: Head) => void} options.choose
   */
  constructor({ heads, habits, texts, captions, choose }) {
    this.texts = texts;
    this.captions = captions;
    this.widest = Math.max(...heads);
    /** @type {Head[]} */
    this.all = heads.flatMap((count, layer) => range(count).map((head) => ({ layer, head, n: 0 })));
    this.all.forEach((head, n) => (head.n = n));
    this.habits = habits.flat();
    /** @type {string | null} */
    this.only = null;
    this.canvases = this.all.map(() => element("canvas", { ariaHidden: "true" }));
    this.buttons = this.all.map((head, n) => {
      const name = filled(captions.head, { layer: head.layer + 1, head: head.head + 1 }), kind = this.kindOf(n);
      return element("button", { type: "button", className: "sa-thumb", role: "option", tabIndex: n ? -1 : 0, ariaLabel: `${name}: ${kind}`, title: `${name}: ${kind}`,
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
      const button = element("button", { type: "button", ariaPressed: "false", title: this.captions[`means.${kind}`], onclick: () => {
        this.only = this.only === kind ? null : kind;
        buttons.forEach((each, n) => (each.ariaPressed = String(kinds[n] === this.only)));
        changed();
      } }, `${this.captions[`kind.${kind}`]} ${count(kind, true)}`, ...(partly ? [element("small", {}, ` ~${partly}`)] : []));
      return button;
    });
    return element("div", { className: "sa-kinds", role: "group", ariaLabel: this.captions["show only"] }, element("span", {}, this.captions["show only"]), ...buttons);
  }

  /**
   * @param {object} state
   * @param {Head} state.chosen
   * @param {Mode} state.mode
   * @param {number[]} state.words the chosen token of each text
   * @param {PixelColours} state.colours
   * @param {boolean} state.drawn small maps are as they were
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

  /**
   * @param {Head} head
   * @param {HTMLCanvasElement} canvas
   * @param {Mode} mode
   * @param {number[]} words
   * @param {PixelColours} colours
   */
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
