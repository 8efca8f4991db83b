/*
 * Numbers as pictures: colours, a matrix as squares on a canvas, numbers on lines, probabilities as bars. kit.css has
 * the hues, this file their strengths.
 *
 * "signed": green above zero, purple below. "share": a weight, in the colour of its text (0 or 1). "mask": dark where
 * it is 0.
 */

import { clamp, filled, fixed, range } from "../compute.js";
import { element, placeIn, shape, wordOf } from "./page.js";

/** @typedef {import("../compute.js").Matrix} Matrix */
/** @typedef {import("./page.js").Child} Child */
/** @typedef {import("./page.js").Place} Place */

/** @typedef {"signed" | "share" | "mask"} Kind */

/**
 * The colour of a number: the whole hue at `size`.
 * @type {(target: HTMLElement, value: number, size: number, kind: Kind) => void}
 */
export function tint(target, value, size, kind) {
  target.style.setProperty("--strength", strengthOf(value, size).toFixed(3));
  target.dataset.tone = toneOf(value, kind);
}

/** @type {(value: number, size: number) => number} */
const strengthOf = (value, size) => (Number.isFinite(value) && size > 0 ? Math.min(1, Math.abs(value) / size) : 0);

/** @type {(value: number, kind: Kind) => "share" | "none" | "closed" | "open" | "minus" | "plus"} */
function toneOf(value, kind) {
  if (!Number.isFinite(value)) return "none";
  if (kind === "share") return "share";
  if (kind === "mask") return value === 0 ? "closed" : "open";
  return value < 0 ? "minus" : "plus";
}

/**
 * Colours as a canvas holds them, one number each: of weights, for both texts, of differences, and of `tint`.
 * @param {HTMLElement} root
 */
export function pixelColours(root) {
  const probe = element("i.sa-tinted"), { style } = probe;
  const context = element("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  root.append(probe);
  const rgb = (/** @type {string} */ colour) => {
    style.background = colour;
    if (!context) return [0, 0, 0];
    context.fillStyle = getComputedStyle(probe).backgroundColor;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data.subarray(0, 3)];
  };
  const panel = rgb("var(--panel)"), texts = [rgb("var(--text0)"), rgb("var(--text1)")], paper = rgb("var(--paper)");
  style.setProperty("--strength", "1");
  const whole = (/** @type {string} */ tone, side = 0) => {
    Object.assign(probe.dataset, { tone, side });
    return rgb("");
  };
  const tones = ["plus", "minus", "open", "closed", "none"].map((tone) => [tone, whole(tone)]),
    shares = range(2).map((side) => whole("share", side));
  probe.remove();
  const packed = (/** @type {number[]} */ [red, green, blue]) => red | (green << 8) | (blue << 16) | (255 << 24);
  const mixed = (/** @type {number[]} */ to, /** @type {number} */ part) =>
    packed(panel.map((from, n) => Math.round(from + (to[n] - from) * part)));
  const scaled = (/** @type {number[]} */ to) => range(256).map((n) => mixed(to, n / 255));
  const scale = texts.map(scaled), share = shares.map(scaled);
  const scales = Object.fromEntries(tones.map(([tone, to]) => [tone, scaled(/** @type {number[]} */ (to))]));
  return {
    paper: packed(paper),
    /** @param {number} side @param {number} root of a weight, times 255 */
    root: (side, root) => scale[side][root],
    /** @param {number} side @param {number} weight 0 to 1 */
    weight: (side, weight) => scale[side][Math.round(255 * Math.sqrt(Math.min(1, weight)))],
    /** @param {number} difference −1 to 1 */
    difference: (difference) =>
      scale[difference < 0 ? 0 : 1][Math.round(255 * Math.min(1, Math.abs(difference)) ** 0.75)],
    /** @type {(value: number, size: number, kind: Kind, side: number) => number} as `tint` */
    tint: (value, size, kind, side) =>
      (kind === "share" ? share[side] : scales[toneOf(value, kind)])[Math.round(255 * strengthOf(value, size))],
  };
}

/** @typedef {ReturnType<typeof pixelColours>} PixelColours */

/**
 * @type {(canvas: HTMLCanvasElement, rows: number, columns: number, colour: (i: number, j: number) => number) => void}
 */
export function paint(canvas, rows, columns, colour) {
  for (const [side, n] of /** @type {const} */ ([["width", columns], ["height", rows]])) {
    if (canvas[side] !== Math.max(1, n)) canvas[side] = Math.max(1, n); // a set size is a new canvas
  }
  const context = canvas.getContext("2d");
  if (!context || !rows || !columns) return;
  const image = context.createImageData(columns, rows), pixels = new Int32Array(image.data.buffer);
  for (let i = 0, at = 0; i < rows; i++) for (let j = 0; j < columns; j++) pixels[at++] = colour(i, j);
  context.putImageData(image, 0, 0);
}

/**
 * @typedef {object} PictureOptions
 * @property {string} name for screen readers
 * @property {number} rows
 * @property {number} columns
 * @property {Kind} [kind]
 * @property {number} [side]
 * @property {(place: Place | null) => void} [point]
 */

/** A canvas with a square for each number of a matrix, and an outline of a row. */
export class Picture {
  /** @param {PictureOptions} options */
  constructor(options) {
    const { name, rows, columns, side = 0, point } = (this.options = options);
    this.canvas = element("canvas", {
      width: Math.max(1, columns),
      height: Math.max(1, rows),
      role: "img",
      ariaLabel: name,
    });
    this.line = element("i.sa-map-row");
    this.node = element("div.sa-map", { data: { side: String(side) } }, this.canvas, this.line);
    this.node.style.aspectRatio = `${Math.max(1, columns)} / ${Math.max(1, rows)}`;
    if (!point) return;
    this.canvas.addEventListener("pointermove", (event) => point(placeIn(event, this.canvas, rows, columns)));
    this.canvas.addEventListener("pointerleave", () => point(null));
  }

  /** @param {number} row -1 for no row */
  outline(row) {
    this.line.hidden = row < 0;
    this.line.style.top = `${(100 * row) / this.options.rows}%`;
    this.line.style.height = `${100 / this.options.rows}%`;
  }
}

/** A matrix that is too large for numbers, or small multiples, in the colours of `tint`. */
export class HeatMap extends Picture {
  /** @type {unknown[]} what is painted */
  painted = [];

  /**
   * @param {object} state
   * @param {Matrix} state.matrix a new one whenever its numbers change
   * @param {number} state.size
   * @param {number} [state.row] is marked
   * @param {PixelColours} state.colours
   */
  update({ matrix, size, row = -1, colours }) {
    const { rows, columns, kind = "signed", side = 0 } = this.options, wanted = [matrix, size, colours];
    this.outline(row);
    if (wanted.every((each, n) => each === this.painted[n])) return;
    this.painted = wanted;
    paint(this.canvas, rows, columns, (i, j) => colours.tint(matrix.at(i, j), size, kind, side));
  }
}

/**
 * @typedef {object} Mark
 * @property {number} value
 * @property {string} look class: "sa-mark-0" a disc, "sa-mark-1" a square, in the colours of the texts; "sa-mark-part"
 *   a ring
 * @property {number} [size] radius, in pixels
 * @property {string} [text] above it
 */

// The drawing's width, the ends of lines, and room above the first line.
const WIDE = 224, LEFT = 26, RIGHT = 212, TOP = 7;

export class NumberLines {
  constructor() {
    this.node = shape("svg", { class: "sa-lines", role: "img" });
  }

  /** @param {{ name: string, marks: Mark[] }[]} lines @param {string} description for screen readers */
  update(lines, description) {
    const values = lines.flatMap(({ marks }) => marks.map(({ value }) => value)).filter(Number.isFinite);
    const low = Math.min(0, ...values), high = Math.max(low + 0.5, ...values);
    const at = (/** @type {number} */ value) => LEFT + ((value - low) / (high - low)) * (RIGHT - LEFT);
    const step = lines.length > 3 ? 30 : 36;
    this.node.setAttribute("viewBox", `0 0 ${WIDE} ${Math.max(1, TOP + lines.length * step)}`);
    this.node.setAttribute("aria-label", description);
    this.node.replaceChildren(
      ...lines.flatMap(({ name, marks }, n) =>
        this.line(
          name,
          marks.filter(({ value }) => Number.isFinite(value)),
          TOP + n * step + step - 13,
          at,
        ),
      ),
    );
  }

  /** @type {(name: string, marks: Mark[], y: number, at: (value: number) => number) => SVGElement[]} */
  line(name, marks, y, at) {
    /** @type {SVGElement[]} */
    const drawn = [
      shape("text", { x: 4, y: y + 5, class: "sa-line-name" }, name),
      shape("line", { x1: LEFT, x2: RIGHT, y1: y, y2: y, class: "sa-axis" }),
    ];
    const ends = marks.filter(({ look }) => look !== "sa-mark-part");
    if (ends.length === 2) {
      drawn.push(shape("line", { x1: at(ends[0].value), x2: at(ends[1].value), y1: y, y2: y, class: "sa-span" }));
    }
    for (const { value, look, size = 6 } of marks) {
      const x = at(value);
      drawn.push(
        look === "sa-mark-1"
          ? shape("rect", {
              x: x - size + 0.5,
              y: y - size + 0.5,
              width: 2 * size - 1,
              height: 2 * size - 1,
              class: look,
            })
          : shape("circle", { cx: x, cy: y, r: size, class: look }),
      );
    }
    return [...drawn, ...this.texts(ends, y - 10, at)];
  }

  /**
   * The numbers; two numbers that would overlap move apart, and stay inside the drawing.
   * @type {(marks: Mark[], y: number, at: (value: number) => number) => SVGTextElement[]}
   */
  texts(marks, y, at) {
    if (!marks.length) return [];
    if (marks.length === 2 && marks[0].text === marks[1].text) {
      // equal numbers are written once
      return [
        shape(
          "text",
          { x: Math.min(at(marks[0].value), WIDE - 18).toFixed(1), y, "text-anchor": "middle" },
          marks[0].text ?? "",
        ),
      ];
    }
    const near = marks.length === 2 && Math.abs(at(marks[0].value) - at(marks[1].value)) < 36;
    const middle = clamp((at(marks[0].value) + at(marks[marks.length - 1].value)) / 2, LEFT + 17, WIDE - 37);
    return marks.map(({ value, look, text = "" }, n) => {
      const first = near && (value < marks[1 - n].value || (value === marks[1 - n].value && n === 0));
      const anchor = !near ? "middle" : first ? "end" : "start";
      const x = !near
        ? clamp(at(value), LEFT + 2, WIDE - 18)
        : first
          ? Math.min(at(value) + 1, middle - 3)
          : Math.max(at(value) - 1, middle + 3);
      return shape("text", { x: x.toFixed(1), y, "text-anchor": anchor, class: `${look}-text` }, text);
    });
  }
}

/**
 * Draw the likeliest tokens as bars; the token that came next has its text's colour, and one bar is for all others.
 * @param {HTMLElement} list an ol of class sa-bars-list
 * @param {{ token: string, probability: number, came: boolean }[]} likely
 * @param {{ n: number, probability: number }} others
 * @param {Record<string, string>} texts
 */
export function drawBars(list, likely, others, texts) {
  const most = Math.max(...likely.map(({ probability }) => probability), Number.MIN_VALUE);
  const bar = (/** @type {Child} */ name, /** @type {number} */ probability, look = "", note = "") => {
    const fill = element("i.sa-fill");
    fill.style.width = `${Math.min(100, (100 * probability) / most).toFixed(2)}%`;
    return element(
      "li",
      { className: look },
      element("span.sa-name", name),
      element("span.sa-track", fill),
      element("output", fixed(probability, 3)),
      ...(note ? [element("small", note)] : []),
    );
  };
  list.replaceChildren(
    ...likely.map(({ token, probability, came }) =>
      bar(wordOf(token), probability, ...(came ? ["sa-on", texts.came] : [])),
    ),
    ...(others.n > 0 ? [bar(filled(texts.rest, { n: others.n }), others.probability, "sa-rest")] : []),
  );
}
