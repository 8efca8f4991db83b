/*
 * The matrices of a view and how they are computed (see graph.py): which numbers were changed, all others computed
 * again in float64, and the sources of a number. No DOM.
 */

import { decimalsOf, decode, largest, Matrix, same, write } from "./compute.js";
import { computed, OPS } from "./operations.js";

/** @typedef {import("./first_screen.js").HeadData} HeadData */
/** @typedef {import("./operations.js").Options} Options */
/** @typedef {import("./stage.js").StageData} StageData */

const MAX_FAR = 4000; // pages with more numbers do not highlight sources of sources

/**
 * @typedef {object} NodeData a matrix as graph.py describes it
 * @property {string} id
 * @property {string} name
 * @property {[number, number]} shape
 * @property {string} data float64, row by row, in base 64
 * @property {string} rows list of labels
 * @property {string} columns
 * @property {string} op
 * @property {string[]} args
 * @property {Options} options
 * @property {boolean} editable
 * @property {number[] | null} blanks of each row, in an exercise
 * @property {string} where block and head, if there are several
 */
/**
 * @typedef {object} NodeState
 * @property {Matrix} kernel the numbers of the kernel
 * @property {Matrix} now the numbers that are shown
 * @property {Matrix} mine computed here from the changed numbers
 * @property {Matrix} [base] computed here from the given numbers
 * @property {Map<number, number>} edits index of a number: its new value
 * @property {number} decimals that the numbers of the kernel need
 * @property {number} digits decimals that are shown
 * @property {number} size largest of the kernel's numbers in all matrices of its name
 * @property {number} range as size, of the numbers that are shown
 * @property {Set<number>} revealed rows whose blank is filled in
 */
/** @typedef {NodeData & NodeState} NodeOfPage */
/** @typedef {{ node: NodeOfPage, second?: NodeOfPage, i: number, j: number }} Cell a number, or second minus first */
/** @typedef {[colour: string, node: NodeOfPage, i: number, j: number]} Origin */
/**
 * @typedef {object} PageData
 * @property {NodeData[]} nodes
 * @property {StageData[]} stages
 * @property {Record<string, string[]>} labels
 * @property {number} precision
 * @property {number} max_side
 * @property {Record<string, string>} texts
 * @property {HeadData[]} heads
 */

export class Numbers {
  /** @param {PageData} data */
  constructor({ nodes, precision }) {
    this.precision = precision;
    this.byId = new Map(nodes.map((node) => [node.id, this.prepare(node)]));
    this.nodes = [...this.byId.values()]; // in the order of computation
    this.count = this.nodes.reduce((n, node) => n + node.kernel.data.length, 0);
    this.measure();
    for (const node of this.nodes) node.size = node.range;
  }

  /** @type {(node: NodeData) => NodeOfPage} */
  prepare(node) {
    const kernel = new Matrix(...node.shape, decode(node.data)), decimals = decimalsOf(kernel.data, this.precision);
    return {
      ...node,
      kernel,
      now: kernel,
      mine: kernel,
      edits: new Map(),
      decimals,
      digits: decimals,
      size: 0,
      range: 0,
      revealed: new Set(),
    };
  }

  /** @param {string} id */
  node(id) {
    const found = this.byId.get(id);
    if (!found) throw new Error(`the page has no ${id}`);
    return found;
  }

  get edited() {
    return this.nodes.some((node) => node.edits.size);
  }

  /** @param {NodeOfPage} node */
  args(node) {
    return node.args.map((id) => this.node(id));
  }

  /** @type {(cell: Cell) => boolean} whether a number is still to be guessed */
  hidden({ node, second = node, i, j }) {
    return [node, second].some(({ blanks, revealed }) => blanks?.[i] === j && !revealed.has(i));
  }

  /** @type {(cell: Cell) => boolean} */
  moved({ node, second = node, i, j }) {
    return [node, second].some(({ now, kernel }) => !same(now.at(i, j), kernel.at(i, j), 0));
  }

  /** @type {(cell: Cell) => number} a difference is 0 if it is rounding alone */
  valueOf({ node, second, i, j }) {
    if (!second) return node.now.at(i, j);
    const value = second.now.at(i, j) - node.now.at(i, j);
    return Math.abs(value) <= 1e-12 * node.size ? 0 : value;
  }

  /** @type {(node: NodeOfPage, i: number, j: number) => string} */
  text(node, i, j) {
    return this.hidden({ node, i, j }) ? "?" : write(node.now.at(i, j), node.digits, this.precision);
  }

  /**
   * Compute again. A number that no edit changes stays the kernel's: `base` is the result in float64 without
   * edits, and a number has changed if it differs from that.
   */
  compute() {
    const { edited } = this;
    for (const node of this.nodes) {
      const op = OPS[node.op];
      if (!edited) {
        node.now = node.kernel;
      } else if (!op) {
        node.base = node.kernel;
        const data = node.kernel.data.slice();
        for (const [index, value] of node.edits) data[index] = value;
        node.mine = node.now = new Matrix(...node.shape, data);
      } else {
        const args = this.args(node);
        const base = (node.base ??= computed(
          op,
          args.map((arg) => /** @type {Matrix} */ (arg.base)),
          node.shape,
          node.options,
        ));
        node.mine = computed(op, args.map((arg) => arg.mine), node.shape, node.options);
        for (const [index, value] of node.edits) node.mine.data[index] = value; // for a finite difference
        const tolerance = 1e-12 * node.size;
        const keep = (/** @type {number} */ x, /** @type {number} */ index) =>
          same(x, base.data[index], tolerance) ? node.kernel.data[index] : x;
        node.now = new Matrix(...node.shape, node.mine.data.map(keep));
      }
      node.digits = edited ? Math.max(node.decimals, decimalsOf(node.now.data, this.precision)) : node.decimals;
    }
    this.measure();
  }

  /** Find the largest number of each name, which has the full colour. */
  measure() {
    /** @type {Map<string, number>} */
    const sizes = new Map();
    for (const { name, now } of this.nodes) {
      const all = family(name);
      sizes.set(all, Math.max(sizes.get(all) ?? 0, largest(now.data)));
    }
    for (const node of this.nodes) node.range = sizes.get(family(node.name)) ?? 0;
  }

  /** How many computed numbers have changed, and which changed most relative to the largest number of its name. */
  mostMoved() {
    let n = 0;
    /** @type {{ node: NodeOfPage, by: number, before: number, value: number, i: number, j: number } | null} */
    let most = null;
    for (const node of this.nodes) {
      for (const [index, value] of node.now.data.entries()) {
        const before = node.kernel.data[index];
        if (node.edits.has(index) || same(value, before, 0)) continue;
        n++;
        const by = Math.abs(value - before) / (node.size || 1);
        if (!most || by > most.by) {
          most = { node, by, before, value, i: Math.floor(index / node.shape[1]), j: index % node.shape[1] };
        }
      }
    }
    return { n, most };
  }

  /** @type {(cell: Cell) => Origin[]} the number itself and its sources */
  sources({ node, second, i, j }) {
    if (second) return [["a", node, i, j], ["b", second, i, j]];
    /** @type {Origin[]} */
    const itself = [["to", node, i, j]];
    const op = OPS[node.op];
    if (!op) return itself;
    const args = this.args(node);
    const made = op.made(args.map((arg) => arg.now), i, j, node.options);
    return [
      ...itself,
      ...made.map(([colour, which, row, column]) => /** @type {Origin} */ ([colour, args[which], row, column])),
    ];
  }

  /**
   * The sources of the sources, back to the given numbers; a large page has too many to highlight, and highlights none.
   * @type {(sources: Origin[]) => Generator<[NodeOfPage, number, number]>}
   */
  *ancestors(sources) {
    if (this.count > MAX_FAR) return;
    const queue = sources.map(([, ...source]) => source); // the loop below adds to it
    const seen = new Set();
    for (const [node, i, j] of queue) {
      const name = `${node.id} ${i} ${j}`;
      if (seen.has(name)) continue;
      seen.add(name);
      yield [node, i, j];
      for (const [, ...source] of this.sources({ node, i, j }).slice(1)) queue.push(source);
    }
  }
}

/**
 * @param {string} name
 * @returns the common name of matrices that share a colour scale: weighted_values for weighted_values[0]
 */
export function family(name) {
  return name.split("[")[0];
}
