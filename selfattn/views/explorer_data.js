/*
 * What the explorer knows of a text, and what it computes of that: weights of any head, rows of them, and a word's way through
 * all layers. No page here. `heads.py` writes what is read.
 */

/** @typedef {{ type: "u1" | "i2" | "u2" | "f4", at: number, shape: number[] }} Stored */
/** @typedef {Uint8Array | Int16Array | Uint16Array | Float32Array} StoredNumbers */
/** @typedef {{ values: Stored, size: Stored }} Rows numbers of 16 bits, and what each row is multiplied by */
/** @typedef {{ weights: Stored } | { query: Rows, key: Rows, band: [number | null, number | null] }} StoredLayer */
/**
 * @typedef {object} StoredText
 * @property {string[]} queries
 * @property {string[]} keys
 * @property {boolean[]} marks keys that are no words
 * @property {boolean} crossed queries and keys are of different texts
 * @property {number} chosen
 * @property {number} prompt tokens that were given
 * @property {StoredNext | null} next
 * @property {StoredLayer[]} layers
 * @property {Stored} small
 * @property {Stored} [means]
 */
/** @typedef {{ layer: number, head: number, n: number }} Head n counts all heads */

/** @type {(bytes: ArrayBuffer, stored: Stored) => StoredNumbers} */
function numbersOf(bytes, { type, at, shape }) {
  const kinds = { u1: Uint8Array, i2: Int16Array, u2: Uint16Array, f4: Float32Array };
  return new kinds[type](bytes, at, shape.reduce((a, b) => a * b, 1));
}

const REMEMBERED = 12; // heads whose weights are kept

class TextData {
  /** @type {Map<number, Matrix>} */ kept = new Map();

  /**
   * @param {StoredText} stored
   * @param {ArrayBuffer} bytes
   * @param {number[]} heads of each layer
   */
  constructor(stored, bytes, heads) {
    this.stored = stored;
    this.bytes = bytes;
    this.heads = heads;
    this.rows = stored.queries.length;
    this.columns = stored.keys.length;
    this.small = numbersOf(bytes, stored.small);
  }

  /** @param {Head} head */
  weights({ layer, head, n }) {
    const known = this.kept.get(n);
    if (known) return known;
    const made = new Matrix(this.rows, this.columns, new Float64Array(this.rows * this.columns));
    for (let i = 0; i < this.rows; i++) made.data.set(this.row({ layer, head, n }, i), i * this.columns);
    this.kept.set(n, made);
    if (this.kept.size > REMEMBERED) this.kept.delete(this.kept.keys().next().value ?? n);
    return made;
  }

  /**
   * What one word takes.
   * @type {(at: Head, i: number) => Float64Array}
   */
  row({ layer, head, n }, i) {
    const known = this.kept.get(n);
    if (known) return known.row(i);
    const stored = this.stored.layers[layer];
    if ("weights" in stored) {
      const from = (head * this.rows + i) * this.columns;
      return Float64Array.from(numbersOf(this.bytes, stored.weights).subarray(from, from + this.columns), (w) => w / 65535);
    }
    return this.softmax(stored, head, i);
  }

  /**
   * The softmax of a query's products with the keys it sees.
   * @type {(stored: { query: Rows, key: Rows, band: [number | null, number | null] }, head: number, i: number) => Float64Array}
   */
  softmax({ query, key, band }, head, i) {
    const width = query.values.shape[2], group = this.heads[0] && query.values.shape[0] / key.values.shape[0];
    const own = numbersOf(this.bytes, query.values), ownSize = numbersOf(this.bytes, query.size);
    const keys = numbersOf(this.bytes, key.values), sizes = numbersOf(this.bytes, key.size);
    const q = (head * this.rows + i) * width, k = Math.floor(head / group) * this.columns;
    const first = band[0] === null ? 0 : Math.max(0, i - band[0]);
    const end = band[1] === null ? this.columns : Math.min(this.columns, i + band[1] + 1);
    const row = new Float64Array(this.columns);
    let top = -Infinity;
    for (let j = first; j < end; j++) {
      const from = (k + j) * width;
      let sum = 0;
      for (let c = 0; c < width; c++) sum += own[q + c] * keys[from + c];
      row[j] = sum * ownSize[head * this.rows + i] * sizes[k + j];
      if (row[j] > top) top = row[j];
    }
    let total = 0;
    for (let j = first; j < end; j++) total += row[j] = Math.exp(row[j] - top);
    for (let j = first; j < end; j++) row[j] /= total;
    return row;
  }

  /**
   * A head's small map: bytes of the weights' roots, and its sides.
   * @param {Head} head
   */
  smallMap({ n }) {
    const [, rows, columns] = this.stored.small.shape;
    return { rows, columns, bytes: this.small.subarray(n * rows * columns, (n + 1) * rows * columns) };
  }

  /**
   * Where a word comes from: row l says it of what layer l − 1 gave, back to what goes in.
   * @type {(i: number) => Matrix | null}
   */
  way(i) {
    if (!this.stored.means) return null;
    const means = numbersOf(this.bytes, this.stored.means), [layers, rows, columns] = this.stored.means.shape;
    const found = new Matrix(layers + 1, columns, new Float64Array((layers + 1) * columns));
    found.data[layers * columns + i] = 1;
    for (let layer = layers - 1; layer >= 0; layer--) {
      const after = found.row(layer + 1), before = found.row(layer);
      for (let row = 0; row < rows; row++) {
        if (after[row] === 0) continue;
        const from = (layer * rows + row) * columns, share = (0.5 * after[row]) / 65535;
        before[row] += 0.5 * after[row];
        for (let column = 0; column < columns; column++) before[column] += share * means[from + column];
      }
    }
    return found;
  }

  /**
   * The token of the same spelling that is nearest to a place; that place, as far as there is one, if there is none.
   * @type {(token: string, place: number) => number}
   */
  nearest(token, place) {
    const same = range(this.rows).filter((i) => this.stored.queries[i] === token);
    const distance = (/** @type {number} */ i) => Math.abs(i - place);
    return same.length ? same.reduce((best, i) => (distance(i) < distance(best) ? i : best)) : Math.min(place, this.rows - 1);
  }
}

/** @typedef {{ token: number, probability: number }} Likely */
/**
 * @typedef {object} StoredNext
 * @property {string[]} names of tokens
 * @property {number[][]} tokens the likeliest of each place, by name
 * @property {Stored} logits theirs
 * @property {number[]} temperatures
 * @property {Stored} sums the logarithm of what all tokens add up to, of each place at each temperature
 * @property {number} vocabulary
 */

/**
 * Probabilities of the likeliest tokens after a place.
 * @param {StoredNext} next
 * @param {ArrayBuffer} bytes
 * @param {number} place
 * @param {number} temperature one of `next.temperatures`, by number
 * @param {number} topK 0: all
 * @returns {Likely[]}
 */
function likely(next, bytes, place, temperature, topK) {
  const [, count] = next.logits.shape, t = next.temperatures[temperature];
  const logits = numbersOf(bytes, next.logits).subarray(place * count, (place + 1) * count);
  const kept = topK ? Math.min(topK, count) : count;
  let sum = numbersOf(bytes, next.sums)[place * next.temperatures.length + temperature];
  if (topK) sum = Math.log(dot(kept, (n) => Math.exp((logits[n] - logits[0]) / t))) + logits[0] / t;
  return range(kept).map((n) => ({ token: next.tokens[place][n], probability: Math.exp(logits[n] / t - sum) }));
}
