/*
 * Moves through a view: step by step, by Play, along one token, and to links such as #stage=scores&row=2, the ids of
 * the static page.
 */

import { range } from "./compute.js";
import { bring } from "./kit/page.js";

/** @typedef {import("./steps.js").View} View */

const MAX_FEW = 36; // steps through a larger matrix go row by row
const LINK_MS = 200; // delay before the address changes
const STEP_MS = 1600; // time between two steps of Play

export const TOKENS = /^[tk]\d$/; // lists of labels that are tokens: t0, k0 of the first sentence, t1, k1 of the second

/** @typedef {{ stage: HTMLElement, td: HTMLTableCellElement | null }} Step */

export class Walk {
  /** @type {Step[]} */ steps = [];

  /** @param {View} view */
  constructor(view) {
    this.view = view;
    this.at = -1;
    this.timer = 0;
    this.linking = 0;
  }

  /**
   * Collect the steps, in order: every number of a small stage, the first number of each row of a large one.
   * @param {string} token the index of the token to follow; "" for all
   */
  follow(token) {
    this.stop();
    this.steps = this.view.stages.flatMap((stage) => this.stepsOf(stage, token));
    this.markRows(token);
    this.at = -1;
    this.count();
  }

  /** @type {(stage: HTMLElement, token: string) => Step[]} */
  stepsOf(stage, token) {
    /** @type {HTMLTableCellElement[]} */
    const found = [];
    for (const group of stage.querySelectorAll(".sa-eq")) {
      const results = /** @type {NodeListOf<HTMLTableElement>} */ (
        group.querySelectorAll("table.sa-result:not(.sa-input)")
      );
      const tables = [...results].map(linesOf);
      const few = tables.every((lines) => lines.length * (lines[0]?.cells.length ?? 0) <= MAX_FEW);
      const lines = group.classList.contains("sa-compare")
        ? range(Math.max(0, ...tables.map((table) => table.length))).flatMap((n) =>
            tables.flatMap((table) => table[n] ?? []),
          )
        : tables.flat();
      for (const line of lines) {
        const kept = [...line.cells].filter((td) => this.view.cells.has(td) && this.concerns(td, token));
        found.push(...(few || token !== "" ? kept : kept.slice(0, 1)));
      }
    }
    return found.length ? found.map((td) => ({ stage, td })) : [{ stage, td: null }];
  }

  /** @type {(td: HTMLTableCellElement, token: string) => boolean} whether a number is in a token's row or table */
  concerns(td, token) {
    const { node, i } = this.view.cellOf(td);
    if (!node || token === "" || !TOKENS.test(node.rows)) return true;
    return String(node.op === "pairs" ? node.options.query : i) === token;
  }

  /** @param {string} token whose rows are marked */
  markRows(token) {
    const { root, cells } = this.view;
    for (const line of root.querySelectorAll("tr.sa-row")) line.classList.remove("sa-row");
    if (token === "") return;
    for (const td of root.querySelectorAll("table.sa-m:not([data-t]) tbody td")) {
      const cell = cells.get(td);
      const rows = (cell?.node ?? cell?.difference?.a)?.rows;
      if (rows && TOKENS.test(rows) && String(cell?.i) === token) td.parentElement?.classList.add("sa-row");
    }
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
  show({ stage, td }) {
    const { view } = this;
    view.lesson.show(view);
    view.lesson.showAll(true);
    view.open(stage, true);
    for (const other of view.stages) other.classList.toggle("sa-now", other === stage);
    if (view.places) view.places.selectedIndex = view.stages.indexOf(stage);
    view.pinned = td;
    view.light(td);
    this.count();
    if (td && stage.getBoundingClientRect().height > 0.8 * innerHeight) bring(td, "center");
    else bring(stage, "nearest");
    this.link(stage, td);
  }

  /** @param {HTMLTableCellElement} td the number at the pointer or focus: the next step continues from it */
  arrive(td) {
    const { view } = this;
    const found = this.steps.findIndex((step) => step.td === td);
    if (found >= 0) {
      this.at = found;
      this.count();
    }
    const stage = stageOf(td);
    if (view.places) view.places.selectedIndex = view.stages.indexOf(stage);
    this.link(stage, td);
  }

  /**
   * Make the address a link to this number; in a notebook stages have no ids, and the address does not change.
   * @type {(stage: HTMLElement, td: HTMLTableCellElement | null) => void}
   */
  link(stage, td) {
    if (!stage.id) return;
    this.address(`#${stage.id}${td ? `&row=${this.view.cellOf(td).i}` : ""}`);
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
    const stage = this.view.stages.find((s) => s.id && s.id === id);
    if (stage) this.goTo(stage, row);
  }

  /** @type {(stage: HTMLElement, row?: string) => void} */
  goTo(stage, row = "") {
    this.stop();
    const fits = (/** @type {Step} */ s) =>
      s.stage === stage && (!s.td || row === "" || this.view.cellOf(s.td).i === Number(row));
    const found = this.steps.findIndex(fits);
    this.at = found >= 0 ? found : this.steps.findIndex((s) => s.stage === stage);
    this.show(this.steps[this.at]);
  }
}

/** @param {HTMLTableElement} table @returns its rows without those that mark a gap */
export function linesOf(table) {
  return [...table.tBodies[0].rows].filter((line) => !line.classList.contains("sa-gap"));
}

/** @param {Element} inside */
export function stageOf(inside) {
  return /** @type {HTMLElement} */ (inside.closest(".sa-stage"));
}
