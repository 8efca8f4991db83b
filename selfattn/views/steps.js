/*
 * Enhances the static tables of a view: shows how a number is computed, steps through the stages, computes again in
 * float64 when a number is changed. The page holds its data: the numbers to the last bit, and how they are computed
 * (see graph.py). A view changes nothing outside its root, so that a notebook can hold several. first_screen.js shows
 * the same numbers; lesson.js puts views together.
 */

import { range, read, shade } from "./compute.js";
import { Exercise } from "./exercise.js";
import { FirstScreen } from "./first_screen.js";
import { bring, button, chooser, destination, element, isForeign, typeInto } from "./kit/page.js";
import { Numbers } from "./numbers.js";
import { linesOf, stageOf, Walk } from "./walk.js";
import { Words } from "./words.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./lesson.js").Lesson} Lesson */
/** @typedef {import("./numbers.js").Cell} Cell */
/** @typedef {import("./numbers.js").Difference} Difference */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./numbers.js").PageData} PageData */

export class View {
  /** @type {WeakMap<EventTarget, Cell>} */ cells = new WeakMap();
  /** @type {Map<NodeOfPage, HTMLTableElement>} the first table that shows the node */ tables = new Map();
  /** @type {Difference[]} */ differences = [];
  /** @type {[Element, string][]} */ lit = [];
  /** @type {HTMLTableCellElement | null} */ pinned = null;
  /** @type {HTMLTableCellElement | null} */ hovered = null;
  /** @type {[number, number]} */ pointer = [-1, -1];
  /** @type {Map<HTMLElement, HTMLElement>} the line of a stage for the sum of a number */ lines = new Map();

  /** @param {HTMLElement} root @param {Lesson} lesson */
  constructor(root, lesson) {
    this.root = root;
    this.lesson = lesson;
    /** @type {PageData} */
    const data = JSON.parse(root.querySelector("script.sa-data")?.textContent ?? "");
    this.data = data;
    this.texts = data.texts;
    this.labels = data.labels;
    this.numbers = new Numbers(data);
    this.words = new Words(data, this.numbers);
    this.walk = new Walk(this);
    /** @type {Map<NodeOfPage, Map<number, HTMLTableCellElement[]>>} index of a number: its cells */
    this.shown = new Map(this.numbers.nodes.map((node) => [node, new Map()]));
    const tables = /** @type {NodeListOf<HTMLTableElement>} */ (root.querySelectorAll("table.sa-m"));
    for (const table of tables) this.connect(table);
    this.stages = [.../** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll(".sa-stage"))];
    this.details = element("div", { className: "sa-details" });
    this.stages[0]?.before(this.details);
    this.details.append(...this.stages, ...root.querySelectorAll(".sa-answers"));
    this.addControls();
    this.addScales();
    root.querySelector(".sa-still")?.remove();
    this.screen = data.heads.length ? new FirstScreen(this, data.heads) : null;
    if (this.screen) this.details.before(this.screen.dock, this.screen.node);
    /** @type {Exercise | undefined} */
    this.exercise = new Exercise(this);
    this.listen();
    this.walk.follow("");
    this.screen?.draw();
  }

  get alone() {
    return this.root.closest("[data-alone]") !== null;
  }

  /** @param {Element} td */
  cellOf(td) {
    return /** @type {Cell} */ (this.cells.get(td));
  }

  /** @type {(node: NodeOfPage, i: number, j: number) => HTMLTableCellElement[]} the cells that show a number */
  shownAs(node, i, j) {
    return this.shown.get(node)?.get(i * node.shape[1] + j) ?? [];
  }

  /** @param {HTMLTableElement} table whose cells are matched with their numbers */
  connect(table) {
    const { byId } = this.numbers;
    const { node: id = "", a, b } = table.dataset;
    const node = byId.get(id);
    /** @type {Difference | undefined} */
    const difference = a && b ? { a: this.numbers.node(a), b: this.numbers.node(b), cells: [],
      size: Number(table.dataset.size), digits: Number(table.dataset.decimals) } : undefined;
    if (difference) this.differences.push(difference);
    else if (node && !this.tables.has(node)) this.tables.set(node, table);
    const indices = (/** @type {string | undefined} */ text, /** @type {number} */ n) =>
      text === undefined ? range(n) : text === "" ? [] : text.split(",").map(Number);
    const lines = linesOf(table);
    const rows = indices(table.dataset.rows, lines.length);
    lines.forEach((line, n) => {
      const tds = [...line.cells].filter((td) => td.tagName === "TD" && !td.classList.contains("sa-gap"));
      const columns = indices(table.dataset.columns, tds.length);
      tds.forEach((td, m) => {
        const [i, j] = "t" in table.dataset ? [columns[m], rows[n]] : [rows[n], columns[m]];
        this.cells.set(td, { node, difference, i, j });
        if (difference) return difference.cells.push([td, i, j]);
        const cells = node && this.shown.get(node), index = i * (node?.shape[1] ?? 0) + j;
        if (!cells?.has(index)) cells?.set(index, []);
        return cells?.get(index)?.push(td);
      });
    });
    table.setAttribute("role", "grid"); // Tab reaches one cell, arrow keys the others
    table.ariaReadOnly = String(!node?.editable);
    const first = /** @type {HTMLElement | null} */ (table.querySelector("tbody td:not(.sa-gap)"));
    if (first) first.tabIndex = 0;
  }

  /** @param {HTMLTableCellElement | null} td */
  light(td) {
    for (const [cell, name] of this.lit) {
      cell.classList.remove(name);
      delete (/** @type {HTMLElement} */ (cell).dataset.lit);
    }
    this.lit = [];
    for (const line of this.lines.values()) line.replaceChildren();
    const cell = td && this.cells.get(td);
    if (!td || !cell) return;
    const sources = this.numbers.sources(cell);
    for (const [colour, node, i, j] of sources) {
      for (const other of this.shownAs(node, i, j)) this.add(other, `sa-${colour}`);
    }
    for (const [node, index] of this.numbers.ancestors(sources)) {
      for (const other of this.shown.get(node)?.get(index) ?? []) if (!other.dataset.lit) this.add(other, "sa-far");
    }
    this.add(td, "sa-here");
    this.lineOf(stageOf(td)).replaceChildren(...this.words.sentence(cell));
  }

  /** @type {(td: HTMLElement, name: string) => void} */
  add(td, name) {
    if (td.classList.contains(name)) return;
    td.classList.add(name);
    td.dataset.lit = "";
    this.lit.push([td, name]);
  }

  /** @param {HTMLElement} stage */
  lineOf(stage) {
    return /** @type {HTMLElement} */ (this.lines.get(stage));
  }

  /** @type {(stage: HTMLElement | undefined, message: Child) => void} */
  tell(stage, message) {
    this.light(null);
    if (stage) this.lineOf(stage).replaceChildren(message);
  }

  addControls() {
    const { texts, labels, walk } = this;
    const named = (/** @type {string} */ name, /** @type {() => void} */ act, text = texts[name]) =>
      button({ data: { do: name }, onclick: act }, text);
    const others = labels.t1 ?? labels.t0;
    const tokens = labels.t0.map((token, i) =>
      others[i] === token || i >= others.length ? token : `${token} / ${others[i]}`,
    );
    const follow = chooser(texts.follow, [texts.everything, ...tokens], 0, (n) => walk.follow(n ? String(n - 1) : ""));
    const names = this.stages.map((stage) => stage.querySelector("h3")?.textContent ?? "");
    const goTo = chooser(texts["go to"], names, 0, (n) => walk.goTo(this.stages[n]));
    this.places = goTo.querySelector("select");
    this.counter = element("span", { className: "sa-count" });
    this.playButton = named("play", () => walk.toggle());
    const { toured } = this.lesson; // the tour has Back and Play
    this.openButton = named("open all", () => {
      const open = this.stages.some((stage) => "closed" in stage.dataset);
      for (const stage of this.stages) this.open(stage, open);
    });
    this.bar = element(
      "div",
      { className: "sa-bar", role: "group", ariaLabel: texts.title },
      this.openButton,
      named("previous", () => walk.step(-1), texts[toured ? "number before" : "previous"]),
      ...(toured ? [] : [this.playButton]),
      named("next", () => walk.step(1), texts[toured ? "number after" : "next"]),
      this.counter,
      goTo,
      follow,
    );
    this.stages[0]?.before(this.bar, element("p", { className: "sa-hint" }, texts.hint));
    for (const stage of this.stages) this.addControlsTo(stage);
  }

  /** @param {HTMLElement} stage */
  addControlsTo(stage) {
    const heading = stage.querySelector("h3");
    const fold = button(
      { className: "sa-fold", onclick: () => this.open(stage, "closed" in stage.dataset) },
      ...(heading?.childNodes ?? []),
    );
    heading?.replaceChildren(fold);
    if (stage.id) heading?.append(" ", element("a", { href: `#${stage.id}`, ariaLabel: `# ${fold.textContent}` }, "#"));
    const line = element("p", { className: "sa-say", ariaLive: "polite" });
    this.lines.set(stage, line);
    stage.append(line);
    this.open(stage, false);
  }

  /** @type {(stage: HTMLElement, open: boolean) => void} open or close the details of a stage */
  open(stage, open) {
    stage.toggleAttribute("data-closed", !open);
    const fold = /** @type {HTMLElement | null} */ (stage.querySelector(".sa-fold"));
    if (fold) fold.ariaExpanded = String(open);
    this.openButton?.replaceChildren(
      this.texts[this.stages.some((each) => "closed" in each.dataset) ? "open all" : "close all"],
    );
    this.exercise?.count();
  }

  /** @param {string} name of a stage to open and go to */
  openStage(name) {
    const stage = this.stages.find((each) => each.dataset.stage === name);
    if (!stage) return;
    this.open(stage, true);
    bring(stage, "start");
    stage.querySelector("button")?.focus({ preventScroll: true });
  }

  /** A slider for every scale, in the stage that uses it. */
  addScales() {
    /** @type {Map<NodeOfPage, HTMLInputElement>} */
    this.sliders = new Map();
    for (const node of this.numbers.nodes) {
      const stage = node.name === "scale" && this.tables.get(node)?.closest(".sa-stage");
      if (!stage) continue;
      const value = node.kernel.at(0, 0);
      const top = Math.max(1, 2 * Math.abs(value));
      const slider = element("input", {
        type: "range",
        min: String(value < 0 ? -top : 0),
        max: String(top),
        step: String(top / 200),
      });
      slider.value = String(value);
      slider.addEventListener("input", () => this.change(node, 0, 0, Number(slider.value)));
      this.sliders.set(node, slider);
      this.lineOf(/** @type {HTMLElement} */ (stage)).before(
        element("label", { className: "sa-scale" }, this.texts.scale, " ", slider),
      );
    }
  }

  /** @param {HTMLTableCellElement} td */
  edit(td) {
    const { node, i, j } = this.cells.get(td) ?? { i: 0, j: 0 };
    if (!node?.editable || td.querySelector("input")) return;
    this.walk.stop();
    if (node.name === "mask") return this.change(node, i, j, node.now.at(i, j) === 0 ? 1 : 0, td);
    td.replaceChildren();
    typeInto(td, node.now.at(i, j), this.words.plainName({ node, i, j }), (text, byKey) => {
      td.replaceChildren(this.numbers.text(node, i, j));
      if (byKey) this.focus(td);
      if (text === null) return;
      const value = read(text);
      if (value === null) this.tell(stageOf(td), this.words.fill("not a number", { text: JSON.stringify(text) }));
      else this.change(node, i, j, value, td);
    });
  }

  /**
   * The stage of td shows what changed.
   * @type {(node: NodeOfPage, i: number, j: number, value: number, td?: Element) => void}
   */
  change(node, i, j, value, td = this.tables.get(node)) {
    node.edits.set(i * node.shape[1] + j, value);
    this.compute();
    this.tell(td && stageOf(td), this.words.whatMoved());
  }

  /**
   * Set all numbers back, then make these changes.
   * @param {[string, number, number, number][]} changes node, row, column, value
   */
  set(changes) {
    if (!changes.length && !this.numbers.edited) return;
    for (const node of this.numbers.nodes) node.edits.clear();
    for (const [id, i, j, value] of changes) {
      const node = this.numbers.node(id);
      node.edits.set(i * node.shape[1] + j, value);
    }
    this.compute();
  }

  reset() {
    this.set([]);
    this.tell(this.stages.find((s) => s.classList.contains("sa-now")) ?? this.stages[0], this.texts["is reset"]);
  }

  compute() {
    this.numbers.compute();
    for (const node of this.numbers.nodes) this.draw(node);
    this.drawDifferences();
    this.drawLegends();
    for (const [node, slider] of this.sliders ?? []) slider.value = String(node.now.at(0, 0));
    this.screen?.draw();
    this.exercise?.count();
  }

  /** @param {NodeOfPage} node */
  draw(node) {
    for (const [index, tds] of this.shown.get(node) ?? []) {
      const i = Math.floor(index / node.shape[1]), j = index % node.shape[1];
      const moved = this.numbers.moved(node, i, j);
      for (const td of tds) {
        this.paint(td, node.now.data[index], this.numbers.hidden(node, i, j), node.range, node.digits, moved);
      }
    }
  }

  drawDifferences() {
    const { numbers } = this;
    for (const difference of this.differences) {
      const { a, b, cells, digits } = difference;
      const values = cells.map(([, i, j]) => numbers.minus(difference, i, j)).filter(Number.isFinite);
      const size = numbers.edited ? Math.max(0, ...values.map(Math.abs)) : difference.size;
      for (const [td, i, j] of cells) {
        const moved = numbers.moved(a, i, j) || numbers.moved(b, i, j);
        const hidden = numbers.hidden(a, i, j) || numbers.hidden(b, i, j);
        this.paint(td, numbers.minus(difference, i, j), hidden, size, Math.max(digits, a.digits, b.digits), moved);
      }
    }
  }

  /** The ranges of colours, as draw.py writes them. */
  drawLegends() {
    const { numbers, words } = this;
    for (const legend of /** @type {NodeListOf<HTMLElement>} */ (
      this.root.querySelectorAll(".sa-legend [data-nodes]")
    )) {
      const nodes = (legend.dataset.nodes ?? "").split(" ").map((id) => numbers.node(id)), size = nodes[0].range;
      const negative = nodes.some(({ now }) => now.data.some((x) => x < 0 && Number.isFinite(x)));
      const ends = negative ? [-size, -size / 2, 0, size / 2, size] : [0, size / 2, size];
      const whole = nodes.every(({ digits }) => digits === 0) && size % 2 === 0;
      const decimals = whole ? 0 : Math.min(numbers.precision, 2);
      const swatches = ends.map((x) =>
        element("span", { className: `sa-swatch ${shade(x, size)}` }, words.write(x, decimals)),
      );
      legend.replaceChildren(
        words.fill("legend", { name: legend.dataset.name ?? "" }),
        ...swatches.flatMap((swatch) => [" ", swatch]),
      );
    }
  }

  /**
   * @type {(td: HTMLTableCellElement, value: number, hidden: boolean, size: number, digits: number, moved: boolean) =>
   *   void}
   */
  paint(td, value, hidden, size, digits, moved) {
    if (hidden) {
      if (!td.querySelector("input")) td.textContent = "____";
      return;
    }
    const text = this.words.write(value, digits);
    if (td.textContent !== text) td.textContent = text;
    td.classList.toggle("sa-moved", moved);
    const level = shade(value, size);
    if (td.dataset.level === level) return;
    td.classList.remove(...[...td.classList].filter((name) => /^([pn]\d|x)$/.test(name)));
    if (level) td.classList.add(level);
    td.dataset.level = level;
  }

  listen() {
    const cellOf = (/** @type {Event} */ event) => {
      const td = /** @type {Element} */ (event.target).closest?.("td");
      return td && this.cells.has(td) ? td : null;
    };
    this.root.addEventListener("pointerover", (event) => {
      const td = cellOf(event);
      const still = event.screenX === this.pointer[0] && event.screenY === this.pointer[1];
      this.pointer = [event.screenX, event.screenY];
      if (td === this.hovered || still) return; // the page scrolled, the pointer did not move
      this.hovered = td;
      if (td) this.light(td);
    });
    this.root.addEventListener("pointerleave", () => {
      this.hovered = null;
      if (this.pinned) this.light(this.pinned);
    });
    this.root.addEventListener("focusin", (event) => {
      const td = cellOf(event);
      if (td && event.target === td) this.pin(td);
    });
    this.root.addEventListener("click", (event) => {
      const td = cellOf(event);
      if (!td || event.target !== td) return;
      this.focus(td);
      if (this.cells.get(td)?.node?.name === "mask") this.edit(td);
    });
    this.root.addEventListener("dblclick", (event) => {
      const td = cellOf(event);
      if (td && this.cells.get(td)?.node?.name !== "mask") this.edit(td);
    });
    this.root.addEventListener("keydown", (event) => {
      if (!isForeign(event) && this.act(event.target, event.key)) event.preventDefault();
    });
  }

  /** @param {HTMLTableCellElement} td */
  pin(td) {
    this.pinned = td;
    this.walk.arrive(td);
    this.light(td);
  }

  /** @param {HTMLTableCellElement} td */
  focus(td) {
    const table = td.closest("table");
    for (const other of /** @type {NodeListOf<HTMLElement>} */ (table?.querySelectorAll("td[tabindex='0']"))) {
      other.tabIndex = -1;
    }
    td.tabIndex = 0;
    td.focus({ preventScroll: false });
  }

  /** @type {(target: EventTarget | null, key: string) => boolean} whether the key was for a number */
  act(target, key) {
    const cell = target instanceof HTMLTableCellElement && this.cells.get(target);
    if (!cell) return false;
    if ((key === "Enter" || key === " " || key === "F2") && cell.node?.editable) {
      this.edit(target);
      return true;
    }
    const lines = linesOf(/** @type {HTMLTableElement} */ (target.closest("table")));
    const rows = lines.map((line) => [...line.cells].filter((td) => this.cells.has(td)));
    const i = rows.findIndex((tds) => tds.includes(target));
    const to = destination(key, i, rows[i].indexOf(target), rows.length, rows[i].length);
    if (!to) return false;
    this.focus(rows[to[0]][to[1]]);
    return true;
  }
}
