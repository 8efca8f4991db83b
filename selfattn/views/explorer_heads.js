/*
 * All heads as small maps, a row for each layer: choosing one, showing only some, and what is worth a look.
 */

/** @typedef {"0" | "1" | "difference" | "word"} Mode what small maps show */
/** @typedef {{ shares: number[], entropy: number, kind: string, clear: boolean }} Habit */

/**
 * Colours as a canvas holds them, one number each: of weights' roots from 0 to 255 for both texts, and of differences.
 * @param {HTMLElement} root
 */
function explorerColours(root) {
  const probe = element("i");
  root.append(probe);
  const rgb = (/** @type {string} */ name) => {
    probe.style.color = `var(${name})`;
    const context = element("canvas", { width: 1, height: 1 }).getContext("2d");
    if (!context) return [0, 0, 0];
    context.fillStyle = getComputedStyle(probe).color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data.subarray(0, 3)];
  };
  const panel = rgb("--panel"), texts = [rgb("--text0"), rgb("--text1")], paper = rgb("--paper");
  probe.remove();
  const packed = (/** @type {number[]} */ [red, green, blue]) => red | (green << 8) | (blue << 16) | (255 << 24);
  const mixed = (/** @type {number[]} */ to, /** @type {number} */ part) => packed(panel.map((from, n) => Math.round(from + (to[n] - from) * part)));
  const scale = texts.map((to) => range(256).map((n) => mixed(to, n / 255)));
  return {
    paper: packed(paper),
    /** @param {number} side @param {number} root of a weight, 0 to 255 */
    weight: (side, root) => scale[side][root],
    /** @param {number} difference −1 to 1 */
    difference: (difference) => scale[difference < 0 ? 0 : 1][Math.round(255 * Math.min(1, Math.abs(difference)) ** 0.75)],
  };
}

/** @typedef {ReturnType<typeof explorerColours>} Colours */

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number} rows
 * @param {number} columns
 * @param {(i: number, j: number) => number} colour
 */
function paint(canvas, rows, columns, colour) {
  canvas.width = Math.max(1, columns);
  canvas.height = Math.max(1, rows);
  const context = canvas.getContext("2d");
  if (!context || !rows || !columns) return;
  const image = context.createImageData(columns, rows), pixels = new Int32Array(image.data.buffer);
  for (let i = 0, at = 0; i < rows; i++) for (let j = 0; j < columns; j++) pixels[at++] = colour(i, j);
  context.putImageData(image, 0, 0);
}

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
   * @param {Colours} state.colours
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
   * @param {Colours} colours
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
