/*
 * A small matrix as a table of coloured numbers: Tab reaches one, arrow keys the others. Dragging sideways, + and -, or
 * Enter and typing change an editable number; a click changes a cell of a mask. Larger matrices are pictures: see
 * pictures.js.
 */

import { range, read } from "../compute.js";
import { destination, element, isForeign, moveFocus, typeInto } from "./page.js";
import { tint } from "./pictures.js";

/** @typedef {import("../compute.js").Matrix} Matrix */
/** @typedef {import("./page.js").Place} Place */
/** @typedef {import("./pictures.js").Kind} Kind */

/**
 * @typedef {object} HeatOptions
 * @property {string} name for screen readers
 * @property {number} rows
 * @property {number} columns
 * @property {string[]} [rowLabels]
 * @property {string[]} [columnLabels]
 * @property {Kind} [kind]
 * @property {number} [side] 0 or 1: the text whose colours the weights have
 * @property {(place: Place | null) => void} [point] is called with the cell at the pointer or focus, or null
 * @property {(i: number, j: number, value: number) => void} [edit] is called with what was typed, or the same number
 * @property {(text: string) => void} [refuse] is called with text that is not a number
 * @property {boolean} [toggle] cells are 0 or 1
 * @property {(i: number, j: number) => boolean} [asks] whether a number is to be guessed
 * @property {(i: number, j: number, text: string) => void} [answer] is called with a guess
 */
/**
 * @typedef {object} HeatState
 * @property {Matrix} matrix
 * @property {number} size the number that has the full colour
 * @property {(value: number, i: number, j: number) => string} write
 * @property {(i: number, j: number) => boolean} [moved]
 * @property {number} [row] the marked row
 */

const DRAG = { still: 4, pixels: 80, step: 0.05 }; // a drag begins after 4 pixels; 80 change a number by 1
const NUDGE = 0.1; // the change by + or -

export class Heat {
  /** @type {Matrix | null} */ matrix = null;
  /** @type {WeakMap<EventTarget, Place>} */ places = new WeakMap();

  /** @param {HeatOptions} options */
  constructor(options) {
    this.options = options;
    this.cells = range(options.rows).map((i) => range(options.columns).map((j) => this.cell(i, j)));
    const corner = () => (options.rowLabels ? [element("td")] : []);
    const head =
      options.columnLabels &&
      element(
        "thead",
        element(
          "tr",
          ...corner(),
          ...options.columnLabels.map((label) => element("th", { scope: "col", title: label }, label)),
        ),
      );
    this.lines = this.cells.map((cells, i) =>
      element(
        "tr",
        ...(options.rowLabels
          ? [element("th", { scope: "row", title: options.rowLabels[i] }, options.rowLabels[i])]
          : []),
        ...cells,
      ),
    );
    this.node = element("table", {
      className: `sa-heat${options.edit ? " sa-editable" : ""}`, role: "grid", ariaLabel: options.name,
      ariaReadOnly: String(!options.edit), data: { side: String(options.side ?? 0) },
    }, ...(head ? [head] : []), element("tbody", ...this.lines));
    if (this.cells[0]?.[0]) this.cells[0][0].tabIndex = 0;
    this.listen();
  }

  /** @type {(i: number, j: number) => HTMLTableCellElement} */
  cell(i, j) {
    const td = element("td.sa-tinted", { tabIndex: -1 });
    this.places.set(td, { i, j });
    return td;
  }

  listen() {
    const { point, edit, toggle, asks } = this.options;
    /**
     * @type {<T extends keyof HTMLElementEventMap>(type: T,
     *   act: (place: Place, event: HTMLElementEventMap[T]) => void) => void}
     */
    const on = (type, act) => this.node.addEventListener(type, (event) => {
      const place = event.target && this.places.get(event.target);
      if (place) act(place, event);
    });
    for (const name of /** @type {const} */ (["pointerover", "focusin"])) on(name, (place) => point?.(place));
    for (const name of /** @type {const} */ (["pointerleave", "focusout"])) {
      this.node.addEventListener(name, () => point?.(null));
    }
    on("keydown", (place, event) => {
      if (!isForeign(event) && this.key(event.key, place)) event.preventDefault();
    });
    if (asks) on("click", (place) => asks(place.i, place.j) && this.open(place));
    if (edit) on(toggle ? "click" : "dblclick", (place) => this.open(place));
    if (edit && !toggle) on("pointerdown", (place, event) => this.drag(event, place));
  }

  /** @type {(key: string, place: Place) => boolean} whether the key was for the table */
  key(key, { i, j }) {
    const { rows, columns, edit, toggle } = this.options;
    const to = destination(key, i, j, rows, columns);
    if (to) {
      moveFocus(this.cells.flat(), this.cells[to[0]][to[1]]);
      return true;
    }
    if (!(edit || this.options.asks?.(i, j)) || !this.matrix) return false;
    if (["Enter", "F2", " "].includes(key)) {
      this.open({ i, j });
      return true;
    }
    const by = { "+": NUDGE, "=": NUDGE, "-": -NUDGE, "−": -NUDGE }[key];
    if (by === undefined || toggle || !edit) return false;
    edit(i, j, Number((this.matrix.at(i, j) + by).toFixed(6)));
    return true;
  }

  /** @param {Place} place where a number is to be typed, or a cell of a mask to change */
  open({ i, j }) {
    const { edit, refuse, toggle, asks, answer, rowLabels, columnLabels } = this.options;
    const td = this.cells[i][j], name = `${this.options.name}, ${rowLabels?.[i] ?? i}, ${columnLabels?.[j] ?? j}`;
    if (!this.matrix || td.querySelector("input")) return;
    if (asks?.(i, j)) {
      typeInto(td, "", name, (text, byKey) => {
        if (byKey) td.focus();
        if (text) answer?.(i, j, text);
      });
    }
    if (!edit) return;
    const now = this.matrix.at(i, j);
    if (toggle) return edit(i, j, now === 0 ? 1 : 0);
    typeInto(td, now, name, (text, byKey) => {
      const value = text === null ? now : read(text);
      if (byKey) td.focus();
      edit(i, j, value ?? now);
      if (value === null) refuse?.(text ?? "");
    });
  }

  /** @type {(event: PointerEvent, place: Place) => void} */
  drag(event, { i, j }) {
    const { edit } = this.options;
    if (!edit || !this.matrix || event.target instanceof HTMLInputElement) return;
    const start = event.clientX, before = this.matrix.at(i, j), td = this.cells[i][j];
    if (!Number.isFinite(before)) return;
    let moving = false;
    const move = (/** @type {PointerEvent} */ { clientX }) => {
      moving ||= Math.abs(clientX - start) >= DRAG.still;
      if (!moving) return;
      if (!td.hasPointerCapture(event.pointerId)) td.setPointerCapture(event.pointerId);
      const value = Math.round((before + (clientX - start) / DRAG.pixels) / DRAG.step) * DRAG.step;
      edit(i, j, Number(value.toFixed(6)));
    };
    const drag = new AbortController(), { signal } = drag;
    addEventListener("pointermove", move, { signal });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => drag.abort(), { signal });
  }

  /** @param {HeatState} state */
  update({ matrix, size, write: say, moved, row = -1 }) {
    this.matrix = matrix;
    const kind = this.options.kind ?? "signed";
    this.cells.forEach((cells, i) => {
      this.lines[i].classList.toggle("sa-on", i === row);
      cells.forEach((td, j) => {
        if (td.querySelector("input")) return;
        const value = matrix.at(i, j), written = say(value, i, j);
        if (td.textContent !== written) td.textContent = written;
        tint(td, value, size, kind);
        td.classList.toggle("sa-moved", moved?.(i, j) ?? false);
      });
    });
  }

  /** @type {(place: Place | null, sources?: Place[]) => void} outline a number, and with dashes its sources */
  mark(place, sources = []) {
    for (const td of this.cells.flat()) td.classList.remove("sa-is", "sa-from");
    for (const { i, j } of sources) this.cells[i]?.[j]?.classList.add("sa-from");
    if (place) this.cells[place.i]?.[place.j]?.classList.add("sa-is");
  }
}
