/*
 * Words at the left and right, and between them a ribbon for every weight, as thick as the weight: the ribbons of a
 * word at the right fill its bar, and the bar of a word at the left is the sum of the weights for it.
 *
 * All ribbons that are not marked are two paths, one for each colour, so that hundreds of words draw quickly.
 */

import { dot, fixed, Matrix, range, same } from "../compute.js";
import { button, destination, element, isForeign, isStill, moveFocus, shape } from "./page.js";

/** @typedef {{ kind: "to" | "from", index: number }} Chosen "to": a query's row; "from": a key's column */
/**
 * @typedef {object} RibbonsOptions
 * @property {string[]} keys the words at the left
 * @property {string[]} queries the words at the right
 * @property {number} side the text, 0 or 1, in whose colours words are
 * @property {string} name for screen readers
 * @property {boolean} [small] for a dock
 * @property {{ from: string, to: string }} ends descriptions of the words at the left and right
 * @property {HTMLElement} [heading] between the descriptions; without it only screen readers have these
 * @property {number} [high] pixels for all words, until each has the least height
 * @property {() => number} [room] pixels that all words are to fill; 0: there is no room to fill
 * @property {boolean} [crossed] keys and queries are of different texts: no ribbon is a word's own
 * @property {(selection: Chosen | null, pin: boolean) => void} point a word is pointed at, or chosen
 */
/**
 * @typedef {object} RibbonsState
 * @property {Matrix} weights
 * @property {Matrix} [before] is outlined where it differs in the marked row
 * @property {Chosen} selected
 * @property {boolean} [now] without a transition
 * @property {(weight: number, i: number, j: number) => string} [write] the number on a ribbon
 */
/** @typedef {{ from: number, to: number, height: number }} Ribbon tops at the left and right, and thickness */
/**
 * @typedef {{ total: number, ribbons: Ribbon[][], left: number[], right: number[], sums: number[],
 *   ends: number[] }} Layout
 */

// Thickness of weight 1, space between bars, least height of a word, in pixels at 16 px type.
const UNIT = 50, SMALL_UNIT = 26, GAP = 12, LEAST = 15;
const NARROW = 430, TOUCHED = 32; // pixels: on a phone a finger can choose each word
const MOST_HIGH = 560; // the default of `high`
const BAR = 7; // width
const TALL = 1.3; // times the width is the most height that words fill
const THIN = 0.25; // pixels; thinner ribbons are not drawn
const TRANSITION = 260; // milliseconds

/**
 * Where every ribbon starts and ends. A weight of 1 is `unit` thick, a word at least `least` high.
 * @type {(weights: Matrix, unit: number, gap: number, least: number) => Layout}
 */
function layout(weights, unit, gap, least) {
  const { rows, columns } = weights;
  const at = (/** @type {number} */ i, /** @type {number} */ j) => Math.max(0, weights.at(i, j) || 0);
  const sums = range(columns).map((j) => dot(rows, (i) => at(i, j)));
  const ends = range(rows).map((i) => Math.max(1, dot(columns, (j) => at(i, j))));
  const needed = (/** @type {number[]} */ sizes) => sizes.reduce((sum, size) => sum + Math.max(size * unit, least), 0);
  const total = Math.max(Math.max(rows, columns) * (unit + gap), needed(sums), needed(ends));
  const tops = (/** @type {number[]} */ sizes) => {
    const room = sizes.length ? Math.max(0, total - needed(sizes)) / sizes.length : 0;
    let y = room / 2;
    return sizes.map((size) => {
      const height = Math.max(size * unit, least), top = y + (height - size * unit) / 2;
      y += height + room;
      return top;
    });
  };
  const left = tops(sums), right = tops(ends);
  const from = left.slice();
  const ribbons = range(rows).map((i) => {
    let to = right[i];
    return range(columns).map((j) => {
      const height = at(i, j) * unit, ribbon = { from: from[j], to, height };
      from[j] += height;
      to += height;
      return ribbon;
    });
  });
  return { total, ribbons, left, right, sums, ends };
}

/** @type {(ribbon: Ribbon, left: number, right: number) => string} */
function outline({ from, to, height }, left, right) {
  const middle = (left + right) / 2;
  const p = (/** @type {number} */ x, /** @type {number} */ y) => `${x.toFixed(1)},${y.toFixed(1)}`;
  const down = `C${p(middle, from)} ${p(middle, to)} ${p(right, to)}`;
  const back = `C${p(middle, to + height)} ${p(middle, from + height)} ${p(left, from + height)}`;
  return `M${p(left, from)}${down}v${height.toFixed(1)}${back}Z`;
}

export class Ribbons {
  /** @type {RibbonsState | null} */ state = null;
  /** @type {Matrix | null} */ shown = null;

  /** @param {RibbonsOptions} options */
  constructor(options) {
    this.options = options;
    const { keys, queries, side, small, ends, heading } = options;
    const path = (/** @type {string} */ name) => shape("path", { class: name });
    this.paths = {
      others: path("sa-others"),
      own: path("sa-own"),
      strong: path("sa-strong"),
      strongOwn: path("sa-strong sa-own"),
    };
    this.ghost = path("sa-ghost");
    this.bars = path("sa-bars");
    this.figures = shape("g", { class: "sa-figures" });
    const art = shape(
      "svg",
      { "aria-hidden": "true" },
      ...Object.values(this.paths),
      this.ghost,
      this.bars,
      this.figures,
    );
    this.left = keys.map((word, j) => this.word(word, "from", j));
    this.right = queries.map((word, i) => this.word(word, "to", i));
    if (this.right[0]) this.right[0].tabIndex = small ? -1 : 0;
    this.field = element("div.sa-field", art, ...this.left, ...this.right);
    this.caption = element("figcaption");
    this.node = element(
      "figure",
      { className: `sa-ribbons${small ? " sa-small" : ""}`, ariaLabel: options.name, data: { side: String(side) } },
      ...(heading
        ? [
            element(
              "div.sa-ends",
              element("span", ends.from),
              heading,
              element("span", ends.to),
            ),
          ]
        : []),
      element("div.sa-scroll", this.field),
      this.caption,
    );
    this.field.addEventListener("keydown", (event) => {
      if (!isForeign(event) && this.key(event.key, event.target)) event.preventDefault();
    });
    this.width = 0;
    this.frame = 0;
    new ResizeObserver(() => this.shown && this.field.clientWidth !== this.width && this.paint(this.shown)).observe(
      this.field,
    );
  }

  /** @type {(word: string, kind: "to" | "from", index: number) => HTMLButtonElement} */
  word(word, kind, index) {
    const { point, ends } = this.options, selection = { kind, index };
    return button({
      className: `sa-token sa-${kind}`, tabIndex: -1, title: word, ariaDescription: ends[kind],
      onclick: () => point(selection, true), onfocus: () => point(selection, false), onblur: () => point(null, false),
      onpointerenter: () => point(selection, false), onpointerleave: () => point(null, false),
    }, element("bdi", word));
  }

  /** @type {(key: string, target: EventTarget | null) => boolean} */
  key(key, target) {
    const columns = [this.left, this.right];
    const j = columns.findIndex((words) => words.some((word) => word === target));
    if (j < 0) return false;
    const i = columns[j].findIndex((word) => word === target);
    const to = destination(key, i, j, columns[j].length, 2);
    if (!to) return false;
    const words = columns[to[1]];
    moveFocus(columns.flat(), words[Math.min(to[0], words.length - 1)]);
    return true;
  }

  /** @param {RibbonsState} state */
  update(state) {
    this.state = state;
    cancelAnimationFrame(this.frame);
    const from = this.shown, to = state.weights;
    if (!from || state.now || isStill() || from.data.every((x, n) => same(x, to.data[n], 0))) return this.paint(to);
    const start = performance.now();
    const step = (/** @type {number} */ time) => {
      const part = Math.min(1, Math.max(0, (time - start) / TRANSITION)), eased = part * (2 - part);
      this.paint(
        part < 1 ? Matrix.of(to.rows, to.columns, (i, j) => from.at(i, j) + (to.at(i, j) - from.at(i, j)) * eased) : to,
      );
      if (part < 1) this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  /** Room for a word at both ends, and how high a weight of 1 is. */
  measures() {
    const { small, keys, queries } = this.options;
    const type = parseFloat(getComputedStyle(this.field).fontSize) / 16 || 1;
    const n = Math.max(keys.length, queries.length, 1);
    this.width = this.field.clientWidth || 500;
    const narrow = !small && this.width < NARROW,
      least = (narrow ? TOUCHED : LEAST) * type,
      filled = Math.min(this.options.room?.() ?? 0, TALL * this.width),
      fair = (filled || (this.options.high ?? MOST_HIGH) * type) / n;
    const whole = small ? SMALL_UNIT : filled ? Infinity : narrow ? 0.7 * UNIT : UNIT;
    const unit = small
      ? Math.max(3, Math.min(whole * type, (SMALL_UNIT * 3.3 * type) / n))
      : Math.max(least - 3, Math.min(whole * type, 0.8 * fair));
    const gap = small ? 2 : Math.max(3, Math.min(filled || GAP * type, 0.25 * unit));
    const most = 0.3 * this.width;
    const room = (/** @type {HTMLElement[]} */ words) =>
      Math.min(most, Math.max(0, ...words.map((word) => word.offsetWidth))) + 4;
    return {
      type,
      unit,
      gap,
      least: small ? Math.min(least, 80 / n) : least,
      left: room(this.left),
      right: this.width - room(this.right),
    };
  }

  /** @param {Matrix} weights */
  paint(weights) {
    if (!this.state) return;
    this.shown = weights;
    const { selected, before } = this.state, { crossed } = this.options;
    const m = this.measures(), laid = layout(weights, m.unit, m.gap, m.least);
    const left = m.left + BAR, right = m.right - BAR;
    this.field.style.height = `${laid.total.toFixed(1)}px`;
    const lines = { others: "", own: "", strong: "", strongOwn: "" };
    laid.ribbons.forEach((row, i) => row.forEach((ribbon, j) => {
      if (ribbon.height < THIN) return;
      const marked = (selected.kind === "to" ? i : j) === selected.index, own = !crossed && i === j;
      lines[marked ? (own ? "strongOwn" : "strong") : own ? "own" : "others"] += outline(ribbon, left, right);
    }));
    for (const name of /** @type {(keyof typeof lines)[]} */ (Object.keys(lines))) {
      this.paths[name].setAttribute("d", lines[name]);
    }
    this.ghost.setAttribute("d", before ? this.ghosts(before, weights, m, left, right) : "");
    const bar = (/** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ size) =>
      `M${x.toFixed(1)},${y.toFixed(1)}h${BAR}v${Math.max(1, size * m.unit).toFixed(1)}h-${BAR}Z`;
    this.bars.setAttribute(
      "d",
      laid.left.map((y, j) => bar(m.left, y, laid.sums[j])).join("") +
        laid.right.map((y, i) => bar(right, y, laid.ends[i])).join(""),
    );
    this.left.forEach((word, j) =>
      this.put(word, laid.left[j] + (laid.sums[j] * m.unit) / 2, { right: this.width - m.left + 2 }, selected),
    );
    this.right.forEach((word, i) =>
      this.put(word, laid.right[i] + (laid.ends[i] * m.unit) / 2, { left: m.right + 2 }, selected),
    );
    this.label(laid, weights, m.type, left, right);
  }

  /** @type {(word: HTMLElement, y: number, x: { left?: number, right?: number }, selected: Chosen) => void} */
  put(word, y, { left, right }, { kind, index }) {
    word.style.top = `${y.toFixed(1)}px`;
    if (left !== undefined) word.style.left = `${left.toFixed(1)}px`;
    if (right !== undefined) word.style.right = `${right.toFixed(1)}px`;
    const on = (kind === "to" ? this.right : this.left)[index] === word;
    word.classList.toggle("sa-on", on);
    word.ariaPressed = String(on);
  }

  /**
   * The marked row before an edit, if the edit changed it.
   * @type {(before: Matrix, weights: Matrix, m: { unit: number, gap: number, least: number }, left: number,
   *   right: number) => string}
   */
  ghosts(before, weights, m, left, right) {
    const selected = this.state?.selected;
    if (!selected || selected.kind !== "to" || this.options.small) return "";
    const i = selected.index;
    if (!range(weights.columns).some((j) => !same(before.at(i, j), weights.at(i, j), 0.004))) return "";
    return layout(before, m.unit, m.gap, m.least)
      .ribbons[i].filter((r) => r.height >= THIN)
      .map((r) => outline(r, left, right))
      .join("");
  }

  /**
   * Numbers on the marked ribbons, at the end of the chosen word; small numbers only if there is room.
   * @type {(laid: Layout, weights: Matrix, type: number, left: number, right: number) => void}
   */
  label(laid, weights, type, left, right) {
    const { selected, write: say = (/** @type {number} */ w) => fixed(w, 2) } = /** @type {RibbonsState} */ (
      this.state
    );
    const to = selected.kind === "to", n = to ? weights.columns : weights.rows;
    const line = 16 * type;
    const all = range(n).map((k) => {
      const [i, j] = to ? [selected.index, k] : [k, selected.index];
      const ribbon = laid.ribbons[i]?.[j], value = weights.at(i, j);
      return {
        ribbon,
        value,
        text: ribbon ? say(value, i, j) : "",
        y: ribbon ? (to ? ribbon.to : ribbon.from) + ribbon.height / 2 : 0,
      };
    });
    const kept = all
      .filter(({ ribbon, value, text }) => ribbon && text && (n <= 4 || value >= 0.145))
      .sort((a, b) => a.y - b.y);
    const middle = kept.reduce((sum, { y }) => sum + y, 0) / kept.length;
    kept.forEach((each, k) => (each.y = k ? Math.max(each.y, kept[k - 1].y + line) : each.y));
    const last = kept.at(-1)?.y ?? 0, first = kept[0]?.y ?? 0, half = 0.5 * line;
    const centred = middle - kept.reduce((sum, { y }) => sum + y, 0) / kept.length;
    // Inside the drawing; the first label before the last.
    const shift = Math.max(half - first, Math.min(laid.total - half - last, centred));
    this.figures.replaceChildren(
      ...kept.map(({ y, text }) =>
        shape(
          "text",
          { x: to ? right - 6 : left + 6, y: (y + shift + 5 * type).toFixed(1), "text-anchor": to ? "end" : "start" },
          text,
        ),
      ),
    );
  }
}
