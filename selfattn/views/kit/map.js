/*
 * A matrix as a picture: a canvas of coloured squares, for those that are too large for numbers, and for small multiples.
 */

/**
 * @typedef {object} HeatMapOptions
 * @property {string} name for screen readers
 * @property {number} rows
 * @property {number} columns
 * @property {Kind} [kind]
 * @property {number} [side]
 * @property {(place: Place | null) => void} [point]
 */

class HeatMap {
  /** @param {HeatMapOptions} options */
  constructor(options) {
    this.options = options;
    this.canvas = element("canvas", { width: Math.max(1, options.columns), height: Math.max(1, options.rows), role: "img", ariaLabel: options.name });
    this.line = element("i", { className: "sa-map-row" });
    this.node = element("div", { className: "sa-map", data: { side: String(options.side ?? 0) } }, this.canvas, this.line);
    /** @type {unknown[]} what is painted */
    this.painted = [];
    this.node.style.aspectRatio = `${Math.max(1, options.columns)} / ${Math.max(1, options.rows)}`;
    if (!options.point) return;
    this.canvas.addEventListener("pointermove", (event) => options.point?.(this.placeOf(event)));
    this.canvas.addEventListener("pointerleave", () => options.point?.(null));
  }

  /**
   * @param {PointerEvent} event
   * @returns {Place}
   */
  placeOf({ clientX, clientY }) {
    const { rows, columns } = this.options;
    const box = this.canvas.getBoundingClientRect();
    const along = (/** @type {number} */ x, /** @type {number} */ n) => Math.min(n - 1, Math.max(0, Math.floor(x * n)));
    return { i: along((clientY - box.top) / box.height, rows), j: along((clientX - box.left) / box.width, columns) };
  }

  /**
   * @param {object} state
   * @param {{ at: (i: number, j: number) => number }} state.matrix another one whenever its numbers are others
   * @param {number} state.size
   * @param {number} [state.row] stands out
   * @param {Record<string, string[]>} [state.colours] of `palette`, if many maps share them
   */
  update({ matrix, size, row = -1, colours = palette(this.node) }) {
    const { rows, columns, kind = "signed" } = this.options;
    this.line.hidden = row < 0;
    this.line.style.top = `${(100 * row) / rows}%`;
    this.line.style.height = `${100 / rows}%`;
    const context = this.canvas.getContext("2d"), wanted = [matrix, size, colours];
    if (!context || wanted.every((each, n) => each === this.painted[n])) return;
    this.painted = wanted;
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < columns; j++) {
        const value = matrix.at(i, j);
        const strength = Number.isFinite(value) && size > 0 ? Math.min(1, Math.abs(value) / size) : 0;
        context.fillStyle = colours[toneOf(value, kind)][Math.round(strength * STRENGTHS)];
        context.fillRect(j, i, 1, 1);
      }
    }
  }
}
