/*
 * The map of a corpus: points on a canvas, some with their texts; a field's values as colours; the chosen text and its
 * neighbours. A map that is made larger has the chosen text in its middle.
 */

import { clamp, filled, fixed, range } from "../../../selfattn/views/compute.js";
import {
  announce, button, chooser, destination, element, isForeign, phrase, start, topOf, wordOf,
} from "../../../selfattn/views/kit/page.js";

/**
 * @typedef {{ texts: string[], fields: { name: string, values: string[] }[], field: number, nearest: number,
 *   captions: Record<string, string> }} MapData
 */

const NAMED = 24, LETTERS_OF_NAME = 28; // names on the map, and their letters, at most
const REACH = 16; // pixels from which a point is found
const OTHERS = 6; // the colour of values without one of their own
const LARGER = 1.6, LARGEST = 100;

class MapPage {
  size = 1;
  chosen = 0;
  pointed = -1;
  only = ""; // the colour that alone is shown
  wide = 0; // pixels of the canvas
  high = 0;
  /** @type {number[]} the points that are on the canvas and not faint */ shown = [];

  /** @param {HTMLElement} root @param {MapData} data @param {ArrayBuffer} bytes */
  constructor(root, data, bytes) {
    const { captions, texts, fields, nearest } = data, n = texts.length, k = n * nearest;
    this.root = root;
    this.data = data;
    this.points = new Float32Array(bytes, 0, 2 * n);
    this.scores = new Float32Array(bytes, 8 * n, k);
    this.nearest = new Uint16Array(bytes, 8 * n + 4 * k, k);
    this.codes = fields.map((_, f) => new Uint16Array(bytes, 8 * n + 6 * k + 2 * f * n, n));
    this.colours = this.codes[0];
    this.lower = texts.map((text) => text.toLowerCase());
    this.field = data.field;
    this.canvas = element("canvas", { tabIndex: 0, role: "application", ariaLabel: captions.map });
    this.line = element("p.sa-line", { ariaLive: "polite" });
    this.legend = element("div.sa-legend");
    this.side = element("section", { ariaLabel: captions.near });
    this.typed = element("input", {
      type: "search",
      placeholder: captions.words,
      ariaLabel: captions.words,
      oninput: () => this.draw(),
    });
    const sizes = /** @type {[string, string, number][]} */ ([
      ["−", "smaller", 1 / LARGER],
      ["+", "larger", LARGER],
      ["⤢", "whole", 0],
    ]);
    root.replaceChildren(
      topOf(root, captions, element("p", ...phrase(captions.look, { share: captions.share })), "", () =>
        this.draw(),
      ),
      element(
        "div.sa-bar",
        ...(fields.length > 1
          ? [
              chooser(
                captions.colour,
                fields.map(({ name }) => name),
                this.field,
                (f) => this.colour(f),
              ),
            ]
          : []),
        this.typed,
        element(
          "span.sa-tabs",
          ...sizes.map(([sign, name, by]) =>
            button({ title: captions[name], ariaLabel: captions[name], onclick: () => this.scale(by) }, sign),
          ),
        ),
      ),
      this.legend,
      element("div.sa-columns", element("div", this.canvas, this.line), this.side),
    );
    this.canvas.onpointermove = (event) => {
      const n = this.at(event);
      if (n !== this.pointed) this.draw(n);
    };
    this.canvas.onpointerleave = () => this.draw(-1);
    this.canvas.onclick = (event) => this.choose(this.at(event));
    this.canvas.onkeydown = (event) => this.key(event);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.colour(this.field);
    this.choose(0);
  }

  /** @type {(n: number) => [number, number]} where a point is, in pixels */
  place(n) {
    const { points, wide, high } = this,
      unit = (Math.min(wide, high) / 2 - 10) * this.size,
      [x, y] = this.size > 1 ? points.subarray(2 * this.chosen) : [0, 0];
    return [wide / 2 + (points[2 * n] - x) * unit, high / 2 - (points[2 * n + 1] - y) * unit];
  }

  /**
   * The shown point with the least distance, or -1.
   * @type {(far: (x: number, y: number) => number, most?: number) => number}
   */
  closest(far, most = Infinity) {
    let best = -1;
    for (const n of this.shown) {
      const [x, y] = this.place(n), now = far(x, y);
      if (now < most) [best, most] = [n, now];
    }
    return best;
  }

  /** @type {(event: MouseEvent) => number} the point at the pointer, or -1 */
  at({ offsetX, offsetY }) {
    return this.closest((x, y) => Math.hypot(x - offsetX, y - offsetY), REACH);
  }

  /** @param {KeyboardEvent} event an arrow chooses the nearest point in its direction */
  key(event) {
    const by = { "+": LARGER, "=": LARGER, "-": 1 / LARGER, "0": 0 }[event.key],
      to = event.key.startsWith("Arrow") ? destination(event.key, 1, 1, 3, 3) : null;
    if (isForeign(event) || (by === undefined && !to)) return;
    event.preventDefault();
    if (by !== undefined || !to) return this.scale(by ?? 1);
    const [x0, y0] = this.place(this.chosen), down = to[0] - 1, right = to[1] - 1;
    this.choose(this.closest((x, y) => {
      const along = (x - x0) * right + (y - y0) * down, across = Math.abs((x - x0) * down) + Math.abs((y - y0) * right);
      return along > 0.5 && along >= across ? along + across : Infinity;
    }));
  }

  /** @param {number} by a factor, or 0 for the whole map */
  scale(by) {
    this.size = clamp(this.size * by, 1, LARGEST);
    this.draw();
  }

  /** @param {number} field whose values have the colours */
  colour(field) {
    const { fields, captions } = this.data, counts = new Map();
    this.field = field;
    this.only = "";
    this.colours = this.codes[field].map((code) => Math.min(code, OTHERS));
    for (const code of this.colours) counts.set(code, (counts.get(code) ?? 0) + 1);
    this.legend.replaceChildren(
      ...[...counts]
        .sort(([a], [b]) => a - b)
        .map(([code, count]) =>
          button(
            {
              ariaPressed: "false",
              data: { code },
              onclick: () => {
                this.only = this.only === String(code) ? "" : String(code);
                for (const each of this.keys()) each.ariaPressed = String(each.dataset.code === this.only);
                this.draw();
              },
            },
            element("i", { className: `sa-colour-${code}` }),
            code < OTHERS ? wordOf(fields[field].values[code]) : captions.others,
            element("small", ` ${count}`),
          ),
        ),
    );
    this.legend.hidden = counts.size < 2;
    this.draw();
  }

  keys() {
    return /** @type {HTMLElement[]} */ ([...this.legend.children]);
  }

  /** @param {number} n the chosen text; -1 leaves it */
  choose(n) {
    const { captions, texts, fields, nearest } = this.data,
      values = fields.map(({ name, values }, f) => `${name}: ${values[this.codes[f][n]]}`);
    if (n < 0) return;
    this.chosen = n;
    this.side.replaceChildren(
      element("p", element("strong", element("bdi", texts[n]))),
      element("p.sa-soft", fields[0].name && values.join(" · ")),
      element("h2", captions.near),
      element(
        "ol",
        ...range(nearest)
          .map((k) => n * nearest + k)
          .map((at) =>
            element(
              "li",
              button(
                { onclick: () => this.choose(this.nearest[at]) },
                element("output", fixed(this.scores[at], 2)),
                " ",
                element("bdi", texts[this.nearest[at]]),
              ),
            ),
          ),
      ),
    );
    announce(this.root, { place: n, text: texts[n] });
    this.draw();
  }

  /** @param {number} pointed the text at the pointer, or -1 */
  draw(pointed = this.pointed) {
    const { canvas, chosen, data: { texts, nearest, captions } } = this, { clientWidth, clientHeight } = canvas;
    const context = canvas.getContext("2d"),
      dots = devicePixelRatio || 1,
      style = getComputedStyle(this.root),
      words = this.typed.value.toLowerCase().split(/\s+/);
    if (!context || !clientWidth) return;
    Object.assign(this, { pointed, wide: clientWidth, high: clientHeight });
    canvas.width = clientWidth * dots;
    canvas.height = clientHeight * dots;
    context.scale(dots, dots);
    context.font = `13px ${style.fontFamily}`;
    const colours = new Map(
      this.keys().map((each) => [
        Number(each.dataset.code),
        getComputedStyle(/** @type {Element} */ (each.firstChild)).backgroundColor,
      ]),
    );
    const radius = clamp(90 / Math.sqrt(texts.length), 1.3, 5) * Math.min(3, this.size ** 0.4),
      near = range(nearest).map((k) => this.nearest[chosen * nearest + k]);
    const dot = (/** @type {[number, number]} */ place, /** @type {number} */ r) => {
      context.beginPath();
      context.arc(...place, r, 0, 7);
    };
    this.shown = [];
    let left = 0, last = -1;
    for (let n = 0; n < texts.length; n++) {
      const [x, y] = this.place(n),
        passes =
          (!this.only || String(this.colours[n]) === this.only) && words.every((word) => this.lower[n].includes(word));
      left += Number(passes);
      if (x < 0 || y < 0 || x > clientWidth || y > clientHeight) continue;
      if (passes) this.shown.push(n);
      context.globalAlpha = passes ? 0.75 : 0.07;
      if (this.colours[n] !== last) context.fillStyle = colours.get(last = this.colours[n]) ?? "";
      if (radius < 2) context.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
      else {
        dot([x, y], radius);
        context.fill();
      }
    }
    context.globalAlpha = 1;
    context.strokeStyle = context.fillStyle = style.color;
    context.lineWidth = 2;
    for (const [n, r] of [...near.map((n) => [n, 3]), [chosen, 7], ...(pointed < 0 ? [] : [[pointed, 5]])]) {
      dot(this.place(n), radius + r);
      context.stroke();
    }
    this.name(
      [chosen, ...near, ...this.shown.filter((_, n) => n % Math.ceil(this.shown.length / 300) === 0)],
      context,
      style.backgroundColor,
    );
    this.line.replaceChildren(pointed >= 0 ? element("bdi", texts[pointed])
      : filled(captions[left < texts.length ? "some" : "point"], { n: left, of: texts.length }));
  }

  /**
   * Write texts next to their points, the first ones first, where there is room.
   * @type {(points: number[], context: CanvasRenderingContext2D, paper: string) => void}
   */
  name(points, context, paper) {
    /** @type {[number, number, number][]} */ const taken = [];
    context.lineWidth = 4;
    context.strokeStyle = paper;
    for (const n of points) {
      const text = this.data.texts[n],
        name = text.length > LETTERS_OF_NAME ? `${text.slice(0, LETTERS_OF_NAME)}…` : text,
        [x, y] = this.place(n),
        wide = context.measureText(name).width;
      const left = x + wide + 16 < this.wide ? x + 14 : x - wide - 14;
      if (
        left < 0 ||
        taken.length >= NAMED ||
        taken.some(([a, b, w]) => Math.abs(b - y) < 17 && left < a + w && a < left + wide)
      ) {
        continue;
      }
      taken.push([left, y, wide]);
      context.strokeText(name, left, y + 4);
      context.fillText(name, left, y + 4);
    }
  }
}

start("sa-corpus-map", MapPage);
