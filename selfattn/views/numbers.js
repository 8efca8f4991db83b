/*
 * The matrices of a view and what they are made of (see graph.py): which numbers were changed, all others computed
 * anew from them in float64, and the way back from a number to its sources. No DOM.
 */

const MAX_FAR = 4000; // numbers of a page that still lights up what the sources are made of

class Numbers {
  constructor({ nodes, precision }) {
    this.precision = precision;
    this.byId = new Map(nodes.map((node) => [node.id, this.prepare(node)]));
    this.nodes = [...this.byId.values()]; // in the order in which they are computed
    this.count = this.nodes.reduce((n, node) => n + node.kernel.data.length, 0);
  }

  prepare(node) {
    const [rows, columns] = node.shape;
    node.kernel = new Matrix(rows, columns, decode(node.data));
    node.now = node.kernel;
    node.edits = new Map(); // index of a number: its new value
    node.digits = node.decimals;
    node.revealed = new Set(); // rows whose blank is filled in
    return node;
  }

  get edited() {
    return this.nodes.some((node) => node.edits.size);
  }

  args(node) {
    return node.args.map((id) => this.byId.get(id));
  }

  hidden(node, i, j) {
    return node.blanks !== null && node.blanks[i] === j && !node.revealed.has(i);
  }

  text(node, i, j) {
    return this.hidden(node, i, j) ? "?" : write(node.now.at(i, j), node.digits, this.precision);
  }

  moved(node, i, j) {
    return !same(node.now.at(i, j), node.kernel.at(i, j), 0);
  }

  /** Second minus first; what differs by rounding alone is 0, as in draw.py. */
  minus({ a, b }, i, j) {
    const value = b.now.at(i, j) - a.now.at(i, j);
    return Math.abs(value) <= 1e-12 * a.size ? 0 : value;
  }

  /**
   * Compute anew. The kernel's own numbers stand wherever an edit changes nothing: `base` is what float64 gives
   * without edits, and a number has moved if it differs from that.
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
        node.base ??= op.all(args.map((arg) => arg.base), node.shape, node.options);
        node.mine = op.all(args.map((arg) => arg.mine), node.shape, node.options);
        const tolerance = 1e-12 * node.size;
        const keep = (x, index) => (same(x, node.base.data[index], tolerance) ? node.kernel.data[index] : x);
        node.now = new Matrix(...node.shape, node.mine.data.map(keep));
      }
      node.digits = edited ? Math.max(node.decimals, decimalsOf(node.now.data, this.precision)) : node.decimals;
    }
  }

  /** How many computed numbers have moved, and which one the most for its size. */
  mostMoved() {
    let n = 0, most = null;
    for (const node of this.nodes) {
      node.now.data.forEach((value, index) => {
        const before = node.kernel.data[index];
        if (node.edits.has(index) || same(value, before, 0)) return;
        n++;
        const by = Math.abs(value - before) / (node.size || 1);
        if (!most || by > most.by) most = { node, by, before, value, i: Math.floor(index / node.shape[1]), j: index % node.shape[1] };
      });
    }
    return { n, most };
  }

  /** The number itself and what it is made of: [colour, node, row, column]. */
  sources({ node, difference, i, j }) {
    if (difference) return [["a", difference.a, i, j], ["b", difference.b, i, j]];
    const itself = [["to", node, i, j]];
    const op = OPS[node.op];
    if (!op) return itself;
    const args = this.args(node);
    const made = op.made(args.map((arg) => arg.now), i, j, node.options);
    return [...itself, ...made.map(([colour, which, row, column]) => [colour, args[which], row, column])];
  }

  /** What the sources are made of in turn, back to what is given; on a large page that would be too much to light. */
  *ancestors(sources) {
    if (this.count > MAX_FAR) return;
    const queue = sources.map(([, ...source]) => source);
    const seen = new Set();
    for (const [node, i, j] of queue) {
      const index = i * node.shape[1] + j;
      const name = `${node.id} ${index}`;
      if (seen.has(name)) continue;
      seen.add(name);
      yield [node, index];
      for (const [, ...source] of this.sources({ node, i, j }).slice(1)) queue.push(source);
    }
  }
}
