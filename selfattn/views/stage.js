/*
 * A stage of a view: heading, sentence, formula, NumPy, equations, notes and the range of its colours. Its tables are
 * made when it is opened, and written again when a number changes while it is open.
 */

import { filled, largest, Matrix, range } from "./compute.js";
import { Heat } from "./kit/heat.js";
import { button, element } from "./kit/page.js";
import { tint } from "./kit/pictures.js";
import { family } from "./numbers.js";
import { TOKENS } from "./walk.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./numbers.js").Cell} Cell */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./steps.js").View} View */

/** @typedef {{ label: string, sides: string[][] }} Equation of each side ids of nodes, "T:" and an id, and signs */
/**
 * @typedef {object} StageData a step as graph.py describes it
 * @property {string} name
 * @property {string} heading
 * @property {string} sentence
 * @property {string} formula
 * @property {string} numpy
 * @property {Equation[]} equations
 * @property {[string, Record<string, number>][]} notes keys of sentences, with their values
 */
/** @typedef {{ second?: NodeOfPage, turned?: boolean, made?: boolean, of?: string }} GridOptions */

/** @type {(n: number, most: number) => number[]} all indices, or at most `most`, of which a third are the last ones */
function shownOf(n, most) {
  const tail = Math.floor(most / 3);
  return range(n).filter((k) => n <= most || k < most - tail || k >= n - tail);
}

/** A table of a stage: a matrix, its transpose if it is turned, or a second matrix minus the first. */
export class Grid {
  /** @type {Heat | null} */ heat = null;

  /** @param {Stage} stage @param {NodeOfPage} node @param {GridOptions} options `made` by the equation, `of` a text */
  constructor(stage, node, { second, turned = false, made = false, of = "" }) {
    this.stage = stage;
    this.node = node;
    /** @type {NodeOfPage | undefined} */ this.second = second;
    this.turned = turned;
    this.made = made;
    this.of = of;
    this.shape = node.shape.map((n, k) => Math.min(n, second?.shape[k] ?? n));
    if (turned) this.shape.reverse();
    const [rows, columns] = this.shape.map((n) => shownOf(n, stage.view.data.max_side));
    this.rows = rows; // indices of what is shown
    this.columns = columns;
    this.place = element("div.sa-term");
    if (!second) stage.view.gridsOf(node).push(this);
  }

  /** @type {(r: number, c: number) => Cell} the number at a place of the table */
  cell(r, c) {
    const [i, j] = this.turned ? [this.columns[c], this.rows[r]] : [this.rows[r], this.columns[c]];
    return { node: this.node, second: this.second, i, j };
  }

  /** @type {(i: number, j: number) => [number, number] | null} the place of a number, if it is not left out */
  find(i, j) {
    const [r, c] = [this.rows.indexOf(this.turned ? j : i), this.columns.indexOf(this.turned ? i : j)];
    return r < 0 || c < 0 ? null : [r, c];
  }

  /** @type {(axis: "rows" | "columns", indices: number[]) => string[]} */
  labels(axis, indices) {
    const { words } = this.stage.view;
    return indices.map((k) => words.labelOf(this.node, this.second ?? this.node, axis, k));
  }

  make() {
    const { stage, node, second, turned, rows, columns } = this, { view } = stage, { texts, labels, numbers } = view;
    /** @type {Child[]} */
    const caption = [`${second ? `${texts.difference}: ` : ""}${node.name}${turned ? ".T" : ""}`];
    if (node.op === "pairs" && !second) {
      const token = labels[`t${node.rows.slice(1)}`][node.options.query];
      caption.push(" (", element("bdi", filled(texts["of query"], { token })), ")");
    }
    if (this.of) caption.push(" ", element("bdi.sa-of", this.of));
    const title = element("caption", ...caption, " ", element("small", this.shape.join(" × ")));
    const axes = [this.labels("rows", turned ? columns : rows), this.labels("columns", turned ? rows : columns)];
    const [rowLabels, columnLabels] = turned ? axes.reverse() : axes;
    const heat = new Heat({
      name: title.textContent ?? "", rows: rows.length, columns: columns.length, rowLabels, columnLabels,
      toggle: node.name === "mask",
      ...(node.editable && !second
        ? {
            edit: (r, c, value) => {
              const { i, j } = this.cell(r, c);
              view.change(node, i, j, value, stage);
            },
            refuse: (text) => view.tell(stage, view.words.fill("not a number", { text: JSON.stringify(text) })),
          }
        : {}),
      ...(node.blanks && !second
        ? {
            asks: (r, c) => numbers.hidden(this.cell(r, c)),
            answer: (r, c, text) => view.tell(stage, view.exercise.judge(this.cell(r, c), text)),
          }
        : {}),
    });
    heat.node.prepend(title);
    heat.node.classList.toggle("sa-result", this.made);
    Object.assign(heat.node.dataset, second ? { a: node.id, b: second.id } : { node: node.id });
    if (turned) heat.node.dataset.t = "";
    heat.cells.forEach((line, r) => line.forEach((td, c) => view.places.set(td, { grid: this, r, c })));
    // "…" where rows and columns are left out
    const gap = (/** @type {number[]} */ shown) => shown.findIndex((k, n) => n > 0 && k !== shown[n - 1] + 1);
    const [below, after] = [gap(rows), gap(columns)];
    if (after > 0) {
      for (const line of heat.node.rows) line.cells[after].after(element("th.sa-gap", "…"));
    }
    if (below > 0) heat.lines[below].before(element("tr.sa-gap", element("th", "…")));
    this.place.append(heat.node);
    return (this.heat = heat);
  }

  draw() {
    const { node, second, rows, columns, turned } = this, { numbers, words, walk } = this.stage.view;
    const heat = this.heat ?? this.make(), digits = Math.max(node.digits, second?.digits ?? 0);
    const hidden = (/** @type {number} */ r, /** @type {number} */ c) => numbers.hidden(this.cell(r, c));
    const matrix = Matrix.of(rows.length, columns.length, (r, c) =>
      hidden(r, c) ? 0 : numbers.valueOf(this.cell(r, c)),
    );
    heat.update({
      matrix,
      size: second ? largest(matrix.data) : node.range,
      write: (value, r, c) => (hidden(r, c) ? "____" : words.write(value, digits)),
      moved: (r, c) => numbers.moved(this.cell(r, c)),
      row: walk.token !== "" && TOKENS.test(node.rows) && !turned ? rows.indexOf(Number(walk.token)) : -1,
    });
  }
}

export class Stage {
  /** @type {{ grids: Grid[], compared: boolean }[]} the tables of each line that it computes */ lines = [];
  /** @type {Grid[]} */ grids = [];

  /** @param {View} view @param {StageData} data @param {string} id for links; "" in a notebook */
  constructor(view, data, id) {
    const { texts, words } = view;
    this.view = view;
    this.name = data.name;
    this.heading = data.heading;
    this.fold = button({ className: "sa-fold", onclick: () => this.open(!this.isOpen) }, data.heading);
    this.said = element("p.sa-say", { ariaLive: "polite" });
    this.legend = element("p.sa-legend");
    const equations = data.equations.map((equation) => this.equation(equation));
    const nodes = new Set(this.grids.map(({ node }) => node)), masks = [...nodes].filter(({ name }) => name === "mask");
    const most = Math.max(0, ...[...nodes].flatMap(({ shape }) => shape)), shown = view.data.max_side;
    const notes = new Set(data.notes.map(([key, values]) => words.fill(key, values)));
    if (most > shown) notes.add(words.fill("abridged", { shown, all: most }));
    if (masks.length && masks.every(({ kernel }) => kernel.data.every((x) => x !== 0))) notes.add(texts["open mask"]);
    const asked = this.grids.filter(({ made, node }) => made && node.blanks).map(({ node }) => node);
    this.inside = element(
      "div",
      { onbeforematch: () => this.open(true) }, // what the browser searches for is inside
      element(
        "p.sa-formula",
        ...data.formula.split(/_([0-9A-Za-z]+)/).map((part, n) => (n % 2 ? element("sub", part) : part)),
      ),
      element("pre", element("code", data.numpy)),
      ...equations,
      ...[...notes].map((note) => element("p.sa-note", note)),
      this.legend,
      ...(asked.length
        ? [button({ data: { do: "reveal" }, onclick: () => view.exercise.reveal(asked) }, texts.reveal)]
        : []),
      this.said,
    );
    const heading = element("h3", this.fold);
    if (id) heading.append(" ", element("a", { href: `#${id}`, ariaLabel: `# ${data.heading}` }, "#"));
    this.node = element(
      "section.sa-stage",
      { ...(id && { id }), data: { stage: data.name } },
      heading,
      element("p.sa-sentence", data.sentence),
      this.inside,
    );
    this.open(false);
  }

  get isOpen() {
    return !("closed" in this.node.dataset);
  }

  /** @param {boolean} open */
  open(open) {
    this.node.toggleAttribute("data-closed", !open);
    this.inside.hidden = /** @type {any} */ (open ? false : "until-found");
    this.fold.ariaExpanded = String(open);
    if (open) this.view.stale.add(this);
    this.view.drawLater();
    this.view.opened();
  }

  /** @type {(id: string, options?: GridOptions) => Grid} */
  grid(id, options = {}) {
    const grid = new Grid(this, this.view.numbers.node(id), options);
    this.grids.push(grid);
    return grid;
  }

  /** @param {Equation} equation two texts have their operands side by side, and their results below */
  equation({ label, sides }) {
    const { view } = this;
    const head = label ? [element("h4", view.words.fill("head", { n: label }))] : [];
    if (sides.length === 1) return element("div.sa-equation", ...head, this.line(sides[0]));
    const halves = sides.map((terms, side) => [
      element("p.sa-side", element("bdi", view.sideName(side))),
      this.line(terms.slice(0, startOfResults(terms))),
    ]);
    const [first, second] = sides.map((terms) => terms.slice(startOfResults(terms)).filter(Boolean));
    return element(
      "div.sa-equation",
      ...head,
      element(
        "div.sa-halves",
        ...halves.filter(([, line]) => line.hasChildNodes()).map((half) => element("div", ...half)),
      ),
      ...range(Math.max(first.length, second.length)).map((n) => this.compare(first[n], second[n])),
    );
  }

  /** @param {string[]} terms a sign is drawn with the table after it */
  line(terms) {
    /** @type {Grid[]} */
    const made = [], start = startOfResults(terms), line = element("div.sa-eq");
    /** @type {Child[]} */
    let signs = [];
    terms.forEach((term, n) => {
      const id = term.replace(/^T:/, "");
      if (this.view.numbers.byId.has(id)) {
        const grid = this.grid(id, { turned: id !== term, made: n >= start });
        if (grid.made) made.push(grid);
        grid.place.prepend(...signs);
        line.append(grid.place);
        signs = [];
      } else if (term) signs.push(element("span.sa-op", term));
    });
    line.append(...signs);
    this.lines.push({ grids: made, compared: false });
    return line;
  }

  /** @type {(a?: string, b?: string) => HTMLElement} results of two texts, and their difference */
  compare(a, b) {
    const grids = [a, b].flatMap((id, side) =>
      id && (side === 0 || id !== a) ? [this.grid(id, { made: true, of: this.view.sideName(side) })] : [],
    );
    this.lines.push({ grids, compared: true });
    const places = grids.map(({ place }) => place);
    if (grids.length === 2) places.push(this.grid(a ?? "", { second: grids[1].node }).place);
    return element("div.sa-eq.sa-compare", ...places);
  }

  /** Write all tables, also of a closed stage: the browser may search for their numbers. */
  draw() {
    this.view.stale.delete(this);
    for (const grid of this.grids) grid.draw();
    /** @type {Map<string, NodeOfPage[]>} */
    const made = new Map();
    for (const { node } of this.grids.filter((grid) => grid.made && grid.node.op !== "row_sums")) {
      made.set(family(node.name), [...(made.get(family(node.name)) ?? []), node]);
    }
    this.legend.replaceChildren(...[...made].flatMap(([name, nodes]) => this.swatches(name, nodes)));
  }

  /** @type {(name: string, nodes: NodeOfPage[]) => HTMLElement[]} colours from the smallest to the largest number */
  swatches(name, nodes) {
    const { words, numbers } = this.view, size = nodes[0].range;
    if (!size) return [];
    const negative = nodes.some(({ now }) => now.data.some((x) => x < 0 && Number.isFinite(x)));
    const whole = nodes.every(({ digits }) => digits === 0) && size % 2 === 0;
    const drawn = (negative ? [-size, -size / 2, 0, size / 2, size] : [0, size / 2, size]).flatMap((x) => {
      const text = words.write(x, whole ? 0 : Math.min(numbers.precision, 2));
      const swatch = element("span.sa-swatch.sa-tinted", text);
      tint(swatch, x, size, "signed");
      return [" ", swatch];
    });
    return [element("span", words.fill("legend", { name }), ...drawn)];
  }
}

/** @type {(terms: string[]) => number} the place after the last = or →; 0 if there is none */
const startOfResults = (terms) => 1 + Math.max(terms.lastIndexOf("="), terms.lastIndexOf("→"));
