/*
 * Numbers of every page: how they are written and read, matrices of them, sums and softmax. It draws nothing.
 */

/**
 * A number with that many decimals; a tie goes to the even digit, as in Python; toFixed and toExponential round ties
 * up.
 * @type {(x: number, decimals: number, form?: "toFixed" | "toExponential") => string}
 */
export function fixed(x, decimals, form = "toFixed") {
  const [long, power] = x[form](decimals + 40).split("e");
  const down = long.slice(0, -40).replace(/\.$/, "");
  if (!/50{39}$/.test(long) || !"02468".includes(down.at(-1) ?? "")) return x[form](decimals);
  return power ? `${down}e${power}` : down;
}

/** @type {(value: number, decimals: number, precision: number) => string} */
export function write(value, decimals, precision) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size >= 1e7) return fixed(value, Math.max(precision - 1, 0), "toExponential");
  const rounded = Number(fixed(value, decimals));
  if (size < 1e-3 && Math.abs(value - rounded) > 1e-12) {
    return fixed(value, Math.max(precision - 1, 0), "toExponential");
  }
  return fixed(rounded === 0 ? size : value, decimals);
}

/**
 * How many decimals show all numbers exactly, at most `precision`.
 * @type {(data: Float64Array, precision: number) => number}
 */
export function decimalsOf(data, precision) {
  for (let decimals = 0; decimals < precision; decimals++) {
    const unit = 10 ** decimals;
    const exact = (/** @type {number} */ x) =>
      !(Math.abs(x) < 2 ** 53) || Math.abs(x - Math.round(x * unit) / unit) <= 1e-12 * Math.max(1, Math.abs(x));
    if (data.every(exact)) return decimals;
  }
  return precision;
}

let plurals = new Intl.PluralRules("en");

/** @param {string} lang the language whose plurals the page says; other texts may have a lang that is no language */
export function speak(lang) {
  plurals = new Intl.PluralRules(/^[a-z]{2,3}(?=-|$)/i.exec(lang)?.[0] ?? "en");
}

/**
 * With the forms of numbers in place of plurals: see language.py.
 * @type {(sentence: string, values: Record<string, unknown>) => string}
 */
export function counted(sentence, values) {
  return sentence.replace(/\{(\w+), plural,((?: \w+ \{[^{}]*\})+)\}/g, (braces, name, forms) => {
    const form = Object.fromEntries(
      [...forms.matchAll(/(\w+) \{([^{}]*)\}/g)].map(([, category, text]) => [category, text]),
    );
    return Object.hasOwn(values, name)
      ? (form[plurals.select(Number(values[name]))] ?? form.other).replace("#", values[name])
      : braces;
  });
}

/**
 * With values in place of names in braces: see language.py.
 * @type {(sentence: string, values: Record<string, string | number>) => string}
 */
export function filled(sentence, values) {
  return counted(sentence, values).replace(/\{(\w+)\}/g, (braces, name) =>
    Object.hasOwn(values, name) ? String(values[name]) : braces,
  );
}

/**
 * The number that was typed; null for other text and for a number that is too large.
 * @type {(text: string) => number | null}
 */
export function read(text) {
  // 0,84 in many languages.
  const plain = text.trim().toLowerCase().replace("−", "-").replace(/^([^.,]*),([^.,]*)$/, "$1.$2");
  /** @type {Record<string, number>} */
  const named = { inf: Infinity, "-inf": -Infinity, nan: NaN };
  if (Object.hasOwn(named, plain)) return named[plain];
  const typed = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/.test(plain) ? Number(plain) : NaN;
  return Number.isFinite(typed) ? typed : null;
}

/** @param {string} base64 */
export function decode(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return new Float64Array(bytes.buffer);
}

/** @param {Float64Array} data @returns base 64 */
export const encode = (data) =>
  btoa(
    Array.from(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), (byte) => String.fromCharCode(byte)).join(
      "",
    ),
  );

export class Matrix {
  /** @param {number} rows @param {number} columns @param {Float64Array} data row by row */
  constructor(rows, columns, data) {
    this.rows = rows;
    this.columns = columns;
    this.data = data;
  }
  /** @type {(i: number, j: number) => number} */
  at(i, j) {
    return this.data[i * this.columns + j];
  }
  /** @param {number} i */
  row(i) {
    return this.data.subarray(i * this.columns, (i + 1) * this.columns);
  }
  /** @type {(rows: number, columns: number, number: (i: number, j: number) => number) => Matrix} */
  static of(rows, columns, number) {
    const data = new Float64Array(rows * columns);
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) data[i * columns + j] = number(i, j);
    return new Matrix(rows, columns, data);
  }
}

export const range = (/** @type {number} */ n) => Array.from({ length: n }, (_, k) => k);

/** @type {(x: number, low: number, high: number) => number} */
export const clamp = (x, low, high) => Math.max(low, Math.min(x, high));

/** @type {(n: number, term: (k: number) => number) => number} */
export function dot(n, term) {
  let sum = 0;
  for (let k = 0; k < n; k++) sum += term(k);
  return sum;
}

/**
 * The exponentials of a row minus its maximum, and their sum, without masked keys.
 * @type {(scores: Matrix, mask: Matrix, sink: number | undefined, i: number) => [number[], number]}
 */
export function exponentials(scores, mask, sink, i) {
  const open = (/** @type {number} */ k) => mask.at(i, k) !== 0;
  let top = sink === undefined ? -Infinity : sink;
  for (let k = 0; k < scores.columns; k++) if (open(k) && scores.at(i, k) > top) top = scores.at(i, k);
  if (top === -Infinity) top = 0;
  const exps = range(scores.columns).map((k) => (open(k) ? Math.exp(scores.at(i, k) - top) : 0));
  return [exps, exps.reduce((a, b) => a + b, 0) + (sink === undefined ? 0 : Math.exp(sink - top))];
}

/** @type {(data: Float64Array) => number} the largest finite absolute value; 0 if there is none */
export const largest = (data) => data.reduce((most, x) => (Number.isFinite(x) ? Math.max(most, Math.abs(x)) : most), 0);

/** @param {Float64Array} row scores, which become their softmax */
export function normalise(row) {
  const top = Math.max(...row);
  let total = 0;
  for (let j = 0; j < row.length; j++) total += row[j] = Math.exp(row[j] - top);
  for (let j = 0; j < row.length; j++) row[j] /= total;
}

/**
 * @param {Matrix} scores
 * @param {Matrix} mask
 * @param {number} [sink]
 * @returns weights: 0 for masked keys, also if all are masked
 */
export function softmax(scores, mask, sink) {
  const lines = range(scores.rows).map((i) => exponentials(scores, mask, sink, i));
  return Matrix.of(scores.rows, scores.columns, (i, j) => (lines[i][1] === 0 ? 0 : lines[i][0][j] / lines[i][1]));
}

/** @type {(x: number, y: number, tolerance: number) => boolean} whether two numbers are equal; NaN equals NaN */
export function same(x, y, tolerance) {
  return Object.is(x, y) || x === y || Math.abs(x - y) <= tolerance;
}
