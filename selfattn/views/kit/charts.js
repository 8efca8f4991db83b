/*
 * Numbers as charts. Lines: one for each number, marks on it, and how far apart they are. Bars: probabilities, the largest as long
 * as there is room.
 */

/**
 * @typedef {object} Mark
 * @property {number} value
 * @property {string} look class: "sa-mark-0" a disc, "sa-mark-1" a square, in the colours of the texts; "sa-mark-part" a ring
 * @property {number} [size] radius, in pixels
 * @property {string} [text] above it
 */

const WIDE = 224, LEFT = 26, RIGHT = 212, TOP = 7; // of the drawing, where lines begin and end, and room for the first numbers

class NumberLines {
  constructor() {
    this.node = shape("svg", { class: "sa-lines", role: "img" });
  }

  /**
   * @param {{ name: string, marks: Mark[] }[]} lines
   * @param {string} description for screen readers
   */
  update(lines, description) {
    const values = lines.flatMap(({ marks }) => marks.map(({ value }) => value)).filter(Number.isFinite);
    const low = Math.min(0, ...values), high = Math.max(low + 0.5, ...values);
    const at = (/** @type {number} */ value) => LEFT + ((value - low) / (high - low)) * (RIGHT - LEFT);
    const step = lines.length > 3 ? 30 : 36;
    this.node.setAttribute("viewBox", `0 0 ${WIDE} ${Math.max(1, TOP + lines.length * step)}`);
    this.node.setAttribute("aria-label", description);
    this.node.replaceChildren(...lines.flatMap(({ name, marks }, n) => this.line(name, marks.filter(({ value }) => Number.isFinite(value)), TOP + n * step + step - 13, at)));
  }

  /** @type {(name: string, marks: Mark[], y: number, at: (value: number) => number) => SVGElement[]} */
  line(name, marks, y, at) {
    /** @type {SVGElement[]} */
    const drawn = [
      shape("text", { x: 4, y: y + 5, class: "sa-line-name" }, name),
      shape("line", { x1: LEFT, x2: RIGHT, y1: y, y2: y, class: "sa-axis" }),
    ];
    const ends = marks.filter(({ look }) => look !== "sa-mark-part");
    if (ends.length === 2) drawn.push(shape("line", { x1: at(ends[0].value), x2: at(ends[1].value), y1: y, y2: y, class: "sa-span" }));
    for (const { value, look, size = 6 } of marks) {
      const x = at(value);
      drawn.push(look === "sa-mark-1"
        ? shape("rect", { x: x - size + 0.5, y: y - size + 0.5, width: 2 * size - 1, height: 2 * size - 1, class: look })
        : shape("circle", { cx: x, cy: y, r: size, class: look }));
    }
    return [...drawn, ...this.texts(ends, y - 10, at)];
  }

  /**
   * The numbers; two that are near each other step aside, and stay inside.
   * @type {(marks: Mark[], y: number, at: (value: number) => number) => SVGTextElement[]}
   */
  texts(marks, y, at) {
    if (marks.length === 2 && marks[0].text === marks[1].text) { // the same number: once
      return [shape("text", { x: Math.min(at(marks[0].value), WIDE - 18).toFixed(1), y, "text-anchor": "middle" }, marks[0].text ?? "")];
    }
    const near = marks.length === 2 && Math.abs(at(marks[0].value) - at(marks[1].value)) < 36;
    return marks.map(({ value, look, text = "" }, n) => {
      const first = marks.length < 2 || value < marks[1 - n].value || (value === marks[1 - n].value && n === 0);
      let x = at(value), anchor = "middle";
      if (near) [x, anchor] = first ? [x + 1, "end"] : [x - 1, "start"];
      if (anchor === "end") x = Math.max(x, LEFT + 14);
      if (anchor === "start") x = Math.min(x, WIDE - 34);
      if (anchor === "middle") x = Math.min(Math.max(x, LEFT + 2), WIDE - 18);
      return shape("text", { x: x.toFixed(1), y, "text-anchor": anchor, class: `${look}-text` }, text);
    });
  }
}

/**
 * Draw the likeliest tokens as bars, the one that came next in the text in its colour, and all others as one bar.
 * @param {HTMLElement} list an ol of class sa-bars-list
 * @param {{ token: string, probability: number, came: boolean }[]} likely
 * @param {{ n: number, probability: number }} others
 * @param {Record<string, string>} texts
 */
function drawBars(list, likely, others, texts) {
  const most = Math.max(...likely.map(({ probability }) => probability), Number.MIN_VALUE);
  const bar = (/** @type {Child} */ name, /** @type {number} */ probability, look = "", note = "") => {
    const fill = element("i", { className: "sa-fill" });
    fill.style.width = `${Math.min(100, (100 * probability) / most).toFixed(2)}%`;
    return element("li", { className: look }, element("span", { className: "sa-name" }, name), element("span", { className: "sa-track" }, fill),
      element("output", {}, fixed(probability, 3)), ...(note ? [element("small", {}, note)] : []));
  };
  list.replaceChildren(...likely.map(({ token, probability, came }) => bar(wordOf(token), probability, ...(came ? ["sa-on", texts.came] : []))),
    ...(others.n > 0 ? [bar(filled(texts.rest, { n: others.n }), others.probability, "sa-rest")] : []));
}
