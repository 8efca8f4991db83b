/*
 * Moves through a view: step by step, by Play, along one token, and to links such as #stage=scores&row=2, the ids of
 * stages.
 */

import { bring } from "./kit/page.js";

/** @typedef {import("./numbers.js").Cell} Cell */
/** @typedef {import("./stage.js").Grid} Grid */
/** @typedef {import("./stage.js").Stage} Stage */
/** @typedef {import("./steps.js").View} View */

const MAX_FEW = 36; // steps through a larger matrix go row by row
const LINK_MS = 200; // delay before the address changes
const STEP_MS = 1600; // time between two steps of Play

export const TOKENS = /^[tk]\d$/; // lists of labels that are tokens: t0, k0 of the first sentence, t1, k1 of the second

/** @typedef {{ stage: Stage, grid?: Grid, r: number, c: number }} Step a number, or a stage without one */

export class Walk {
  /** @type {Step[]} */ steps = [];
  token = ""; // the index of the token that is followed; "" for all

  /** @param {View} view */
  constructor(view) {
    this.view = view;
    this.at = -1;
    this.timer = 0;
    this.linking = 0;
  }

  /**
   * Collect the steps, in order: every number of a small stage, the first number of each row of a large one.
   * @param {string} token
   */
  follow(token) {
    this.stop();
    this.token = token;
    this.steps = this.view.stages.flatMap((stage) => this.stepsOf(stage));
    this.view.draw();
    this.at = -1;
    this.count();
  }

  /** @type {(stage: Stage) => Step[]} */
  stepsOf(stage) {
    const found = stage.lines.flatMap((line) => {
      const grids = line.grids.filter(({ node }) => !node.editable);
      const few = grids.every(({ rows, columns }) => rows.length * (columns.length + 1) <= MAX_FEW);
      const rows = grids.flatMap((grid) => grid.rows.map((_, r) => ({ stage, grid, r })));
      if (line.compared) rows.sort((a, b) => a.r - b.r);
      return rows.flatMap((row) => {
        const kept = row.grid.columns.map((_, c) => ({ ...row, c })).filter((step) => this.concerns(step));
        return few || this.token !== "" ? kept : kept.slice(0, 1);
      });
    });
    return found.length ? found : [{ stage, r: 0, c: 0 }];
  }

  /** @type {(step: { grid: Grid, r: number, c: number }) => boolean} whether a number is in the token's row or table */
  concerns({ grid, r, c }) {
    const { node } = grid;
    if (this.token === "" || !TOKENS.test(node.rows)) return true;
    return String(node.op === "pairs" ? node.options.query : grid.cell(r, c).i) === this.token;
  }

  count() {
    if (this.view.counter) this.view.counter.textContent = `${this.at + 1} / ${this.steps.length}`;
  }

  /** @param {number} by */
  step(by) {
    const next = this.at + by;
    if (next < 0 || next >= this.steps.length) return this.stop();
    this.at = next;
    this.show(this.steps[next]);
  }

  /** @param {Step} step */
  show({ stage, grid, r, c }) {
    const { view } = this;
    view.lesson.show(view);
    view.lesson.showAll(true);
    stage.open(true);
    if (view.stale.has(stage)) stage.draw();
    for (const other of view.stages) other.node.classList.toggle("sa-now", other === stage);
    if (view.chosen) view.chosen.selectedIndex = view.stages.indexOf(stage);
    view.pinned = grid?.heat?.cells[r][c] ?? null;
    view.light(view.pinned);
    this.count();
    if (view.pinned && stage.node.getBoundingClientRect().height > 0.8 * innerHeight) bring(view.pinned, "center");
    else bring(stage.node, "nearest");
    this.link(stage, grid?.cell(r, c));
  }

  /** @type {(grid: Grid, r: number, c: number) => void} a number has the focus: the next step continues from it */
  arrive(grid, r, c) {
    const { view } = this, { stage } = grid;
    const found = this.steps.findIndex((step) => step.grid === grid && step.r === r && step.c === c);
    if (found >= 0) {
      this.at = found;
      this.count();
    }
    if (view.chosen) view.chosen.selectedIndex = view.stages.indexOf(stage);
    this.link(stage, grid.cell(r, c));
  }

  /**
   * Make the address a link to this number; in a notebook stages have no ids, and the address does not change.
   * @type {(stage: Stage, cell?: Cell) => void}
   */
  link({ node }, cell) {
    if (node.id) this.address(`#${node.id}${cell ? `&row=${cell.i}` : ""}`);
  }

  /** @param {string} address */
  address(address) {
    clearTimeout(this.linking); // browsers refuse to change the address many times a second
    this.linking = window.setTimeout(() => history.replaceState(history.state, "", address), LINK_MS);
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.at >= this.steps.length - 1) this.at = -1;
    this.timer = window.setInterval(() => this.step(1), STEP_MS);
    this.view.playButton?.replaceChildren(this.view.texts.pause);
    this.step(1);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.view.playButton?.replaceChildren(this.view.texts.play);
  }

  /** @param {string} hash */
  goToHash(hash) {
    const [, id, row] = /^#(.*?)(?:&row=(\d+))?$/.exec(hash) ?? [];
    this.view.build();
    const stage = this.view.stages.find(({ node }) => node.id && node.id === id);
    if (stage) this.goTo(stage, row);
  }

  /** @type {(stage: Stage, row?: string) => void} */
  goTo(stage, row = "") {
    this.stop();
    const fits = (/** @type {Step} */ { grid, r, c, ...step }) =>
      step.stage === stage && (!grid || row === "" || grid.cell(r, c).i === Number(row));
    const found = this.steps.findIndex(fits);
    this.at = found >= 0 ? found : this.steps.findIndex((step) => step.stage === stage);
    this.show(this.steps[this.at]);
  }
}
