/*
 * What a steps page computes and how it writes and spells it: pure functions, no DOM.
 */

const LEVELS = 8; // of colour, for each sign; as in draw.py

/* ------------------------------------------------------------------ numbers, written as writing.py does */

/**
 * x with so many decimals; a tie goes to the even digit, as in Python, where toFixed goes up.
 * @param {number} x
 * @param {number} decimals
 */
function fixed(x, decimals) {
  const long = x.toFixed(decimals + 40);
  if (/50{39}$/.test(long)) {
    const down = long.slice(0, -40).replace(/\.$/, "");
    if ("02468".includes(down.at(-1) ?? "")) return down;
  }
  return x.toFixed(decimals);
}

/**
 * @param {number} x
 * @param {number} decimals
 */
function exponential(x, decimals) {
  const [long, power] = x.toExponential(decimals + 40).split("e");
  if (/50{39}$/.test(long)) {
    const down = long.slice(0, -40).replace(/\.$/, "");
    if ("02468".includes(down.at(-1) ?? "")) return `${down}e${power}`;
  }
  return x.toExponential(decimals);
}

/**
 * @param {number} value
 * @param {number} decimals
 * @param {number} precision
 */
function write(value, decimals, precision) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size >= 1e7) return exponential(value, Math.max(precision - 1, 0));
  const rounded = Number(fixed(value, decimals));
  if (size < 1e-3 && Math.abs(value - rounded) > 1e-12) return exponential(value, Math.max(precision - 1, 0));
  return fixed(rounded === 0 ? size : value, decimals);
}

/**
 * How many decimals show every number exactly; `precision` if that many do not suffice.
 * @param {Float64Array} data
 * @param {number} precision
 */
function decimalsOf(data, precision) {
  for (let decimals = 0; decimals < precision; decimals++) {
    const unit = 10 ** decimals;
    const exact = (/** @type {number} */ x) => !(Math.abs(x) < 2 ** 53) || Math.abs(x - Math.round(x * unit) / unit) <= 1e-12 * Math.max(1, Math.abs(x));
    if (data.every(exact)) return decimals;
  }
  return precision;
}

/**
 * A sentence with values where it names them in braces, as texts.py fills it.
 * @param {string} sentence
 * @param {Record<string, string | number>} values
 */
function filled(sentence, values) {
  return sentence.replace(/\{(\w+)\}/g, (braces, name) => (Object.hasOwn(values, name) ? String(values[name]) : braces));
}

/**
 * What was typed, as a number; null if it is none, or too large for one.
 * @param {string} text
 */
function read(text) {
  const plain = text.trim().toLowerCase().replace("−", "-");
  /** @type {Record<string, number>} */
  const named = { inf: Infinity, "-inf": -Infinity, nan: NaN };
  if (Object.hasOwn(named, plain)) return named[plain];
  const typed = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/.test(plain) ? Number(plain) : NaN;
  return Number.isFinite(typed) ? typed : null;
}

/** @param {string} base64 */
function decode(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return new Float64Array(bytes.buffer);
}

/* ----------------------------------------------------------------------------------- how it is computed */

class Matrix {
  /**
   * @param {number} rows
   * @param {number} columns
   * @param {Float64Array} data row by row
   */
  constructor(rows, columns, data) {
    this.rows = rows;
    this.columns = columns;
    this.data = data;
  }
  /**
   * @param {number} i
   * @param {number} j
   */
  at(i, j) {
    return this.data[i * this.columns + j];
  }
  /**
   * @param {number} rows
   * @param {number} columns
   * @param {(i: number, j: number) => number} number
   */
  static of(rows, columns, number) {
    const data = new Float64Array(rows * columns);
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) data[i * columns + j] = number(i, j);
    return new Matrix(rows, columns, data);
  }
}

const range = (/** @type {number} */ n) => Array.from({ length: n }, (_, k) => k);

/**
 * @param {number} n
 * @param {(k: number) => number} term
 */
function dot(n, term) {
  let sum = 0;
  for (let k = 0; k < n; k++) sum += term(k);
  return sum;
}

/**
 * Mean and variance of a row, in two passes.
 * @param {Matrix} x
 * @param {number} i
 */
function moments(x, i) {
  const mean = dot(x.columns, (k) => x.at(i, k)) / x.columns;
  return [mean, dot(x.columns, (k) => (x.at(i, k) - mean) ** 2) / x.columns];
}

/**
 * The exponentials of a row less its maximum, and their sum; masked keys take no part.
 * @param {Matrix} scores
 * @param {Matrix} mask
 * @param {number | undefined} sink
 * @param {number} i
 * @returns {[number[], number]}
 */
function exponentials(scores, mask, sink, i) {
  const open = (/** @type {number} */ k) => mask.at(i, k) !== 0;
  let top = sink === undefined ? -Infinity : sink;
  for (let k = 0; k < scores.columns; k++) if (open(k) && scores.at(i, k) > top) top = scores.at(i, k);
  if (top === -Infinity) top = 0;
  const exps = range(scores.columns).map((k) => (open(k) ? Math.exp(scores.at(i, k) - top) : 0));
  return [exps, exps.reduce((a, b) => a + b, 0) + (sink === undefined ? 0 : Math.exp(sink - top))];
}

/** @typedef {Record<string, any>} Options */
/** @typedef {[colour: string, which: number, row: number, column: number]} Source of an operation: a number of one of its arguments */
/** @typedef {(which: number, row: number, column: number) => string} Figure */
/**
 * @typedef {object} Speller
 * @property {Record<string, string>} texts
 * @property {(n: number, term: (k: number) => string) => string} sum
 * @property {(value: number) => string} write
 */
/**
 * @typedef {object} Operation
 * @property {(args: Matrix[], shape: [number, number], options: Options) => Matrix} all
 *   the whole matrix from the matrices it is made of
 * @property {(args: Matrix[], i: number, j: number, options: Options) => Source[]} made
 *   [colour, which argument, row, column] of what number (i, j) is made of
 * @property {(t: Figure, args: Matrix[], i: number, j: number, options: Options, words: Speller, nameOf: Figure) => string} spell
 *   how it is made, in figures: t(which, row, column) writes a number, nameOf(which, row, column) names it
 */

/** @type {(...all: Source) => Source} */
const source = (...all) => all;

/** @type {Record<string, Operation>} */
const OPS = {
  matmul: {
    all: ([x, w, b], [rows, columns]) =>
      Matrix.of(rows, columns, (i, j) => dot(x.columns, (k) => x.at(i, k) * w.at(k, j)) + (b ? b.at(0, j) : 0)),
    made: ([x, , b], i, j) => [
      ...range(x.columns).flatMap((k) => [source("a", 0, i, k), source("b", 1, k, j)]),
      ...(b ? [source("c", 2, 0, j)] : []),
    ],
    spell: (t, [x, , b], i, j, _, words) => words.sum(x.columns, (k) => `${t(0, i, k)}·${t(1, k, j)}`) + (b ? ` + ${t(2, 0, j)}` : ""),
  },
  matmulT: {
    all: ([q, k], [rows, columns]) => Matrix.of(rows, columns, (i, j) => dot(q.columns, (c) => q.at(i, c) * k.at(j, c))),
    made: ([q], i, j) => range(q.columns).flatMap((c) => [source("a", 0, i, c), source("b", 1, j, c)]),
    spell: (t, [q], i, j, _, words) => words.sum(q.columns, (c) => `${t(0, i, c)}·${t(1, j, c)}`),
  },
  additive: {
    all: ([q, k, v], [rows, columns]) =>
      Matrix.of(rows, columns, (i, j) => dot(v.columns, (c) => Math.tanh(q.at(i, c) + k.at(j, c)) * v.at(0, c))),
    made: ([q], i, j) => range(q.columns).flatMap((c) => [source("a", 0, i, c), source("b", 1, j, c), source("c", 2, 0, c)]),
    spell: (t, [q], i, j, _, words) => words.sum(q.columns, (c) => `tanh(${t(0, i, c)} + ${t(1, j, c)})·${t(2, 0, c)}`),
  },
  scale: {
    all: ([s, scale, cap], [rows, columns]) =>
      Matrix.of(rows, columns, (i, j) => {
        const x = s.at(i, j) * scale.at(0, 0);
        return cap ? cap.at(0, 0) * Math.tanh(x / cap.at(0, 0)) : x;
      }),
    made: ([, , cap], i, j) => [source("a", 0, i, j), source("b", 1, 0, 0), ...(cap ? [source("c", 2, 0, 0)] : [])],
    spell: (t, [, , cap], i, j) => {
      const x = `${t(0, i, j)}·${t(1, 0, 0)}`;
      return cap ? `${t(2, 0, 0)}·tanh(${x} / ${t(2, 0, 0)})` : x;
    },
  },
  mask: {
    all: ([s, mask, added], [rows, columns]) =>
      Matrix.of(rows, columns, (i, j) => (mask.at(i, j) === 0 ? -Infinity : s.at(i, j) + (added ? added.at(i, j) : 0))),
    made: ([, , added], i, j) => [source("a", 0, i, j), source("b", 1, i, j), ...(added ? [source("c", 2, i, j)] : [])],
    spell: (t, [, mask, added], i, j, _, words, nameOf) =>
      mask.at(i, j) === 0 ? words.texts.masked : added ? `${t(0, i, j)} + ${t(2, i, j)}` : nameOf(0, i, j),
  },
  softmax: {
    all: ([s, mask, sink], [rows, columns]) => {
      const lines = range(rows).map((i) => exponentials(s, mask, sink?.at(0, 0), i));
      return Matrix.of(rows, columns, (i, j) => {
        const [exps, total] = lines[i];
        return mask.at(i, j) === 0 || total === 0 ? 0 : exps[j] / total;
      });
    },
    made: ([s, mask, sink], i, j) => [
      ...range(s.columns).filter((k) => mask.at(i, k) !== 0).map((k) => source("a", 0, i, k)),
      source("b", 0, i, j),
      ...(sink ? [source("c", 2, 0, 0)] : []),
    ],
    spell: (t, [s, mask, sink], i, j, _, words) => {
      if (mask.at(i, j) === 0) return words.texts["masked weight"];
      if (exponentials(s, mask, sink?.at(0, 0), i)[1] === 0) return words.texts.nothing;
      const open = range(s.columns).filter((k) => mask.at(i, k) !== 0);
      const first = sink ? `exp${paren(t(2, 0, 0))} + ` : "";
      return `exp${paren(t(0, i, j))} / (${first}${words.sum(open.length, (k) => `exp${paren(t(0, i, open[k]))}`)})`;
    },
  },
  choose: {
    all: ([computed, given, use], [rows, columns]) =>
      Matrix.of(rows, columns, (i, j) => (use.at(0, 0) === 0 ? computed : given).at(i, j)),
    made: ([, , use], i, j) => [source("a", use.at(0, 0) === 0 ? 0 : 1, i, j), source("b", 2, 0, 0)],
    spell: (t, [, , use], i, j, _, words, nameOf) => nameOf(use.at(0, 0) === 0 ? 0 : 1, i, j),
  },
  multiply: {
    all: ([x, y], [rows, columns]) => Matrix.of(rows, columns, (i, j) => x.at(i, j) * y.at(i, j)),
    made: (_, i, j) => [source("a", 0, i, j), source("b", 1, i, j)],
    spell: (t, _, i, j) => `${t(0, i, j)}·${t(1, i, j)}`,
  },
  pairs: {
    all: ([w, v, mask], [rows, columns], { query }) =>
      Matrix.of(rows, columns, (j, c) => (mask.at(query, j) === 0 ? 0 : w.at(query, j) * v.at(j, c))),
    made: (_, j, c, { query }) => [source("a", 0, query, j), source("b", 1, j, c)],
    spell: (t, [, , mask], j, c, { query }, words) =>
      mask.at(query, j) === 0 ? words.texts["masked weight"] : `${t(0, query, j)}·${t(1, j, c)}`,
  },
  sum: {
    all: ([w, v, mask], [rows, columns]) =>
      Matrix.of(rows, columns, (i, c) => dot(v.rows, (j) => (mask.at(i, j) === 0 ? 0 : w.at(i, j) * v.at(j, c)))),
    made: ([, v, mask, ...pairs], i, c) =>
      range(v.rows)
        .filter((j) => mask.at(i, j) !== 0)
        .flatMap((j) => [source("a", 0, i, j), source("b", 1, j, c), ...(i < pairs.length ? [source("c", 3 + i, j, c)] : [])]),
    spell: (t, [, values, mask], i, c, _, words) => {
      const open = range(values.rows).filter((j) => mask.at(i, j) !== 0);
      return open.length ? words.sum(open.length, (n) => `${t(0, i, open[n])}·${t(1, open[n], c)}`) : words.texts.nothing;
    },
  },
  slice: {
    all: ([x], [rows, columns], { start }) => Matrix.of(rows, columns, (i, j) => x.at(i, start + j)),
    made: (_, i, j, { start }) => [source("a", 0, i, start + j)],
    spell: (t, _, i, j, { start }, words, nameOf) => nameOf(0, i, start + j),
  },
  concat: {
    all: (heads, [rows, columns]) =>
      Matrix.of(rows, columns, (i, j) => heads[Math.floor(j / heads[0].columns)].at(i, j % heads[0].columns)),
    made: ([head], i, j) => [source("a", Math.floor(j / head.columns), i, j % head.columns)],
    spell: (t, [head], i, j, _, words, nameOf) => nameOf(Math.floor(j / head.columns), i, j % head.columns),
  },
  add: {
    all: ([x, y], [rows, columns]) => Matrix.of(rows, columns, (i, j) => x.at(i, j) + y.at(i, j)),
    made: (_, i, j) => [source("a", 0, i, j), source("b", 1, i, j)],
    spell: (t, _, i, j) => `${t(0, i, j)} + ${t(1, i, j)}`,
  },
  norm: {
    all: ([x, w, b], [rows, columns], { eps }) => {
      const lines = range(rows).map((i) => moments(x, i));
      return Matrix.of(rows, columns, (i, j) => {
        const [mean, variance] = lines[i];
        return ((x.at(i, j) - mean) / Math.sqrt(variance + eps)) * w.at(0, j) + b.at(0, j);
      });
    },
    made: ([x], i, j) => [...range(x.columns).map((k) => source("a", 0, i, k)), source("b", 0, i, j), source("c", 1, 0, j), source("c", 2, 0, j)],
    spell: (t, [x], i, j, { eps }, words) => {
      const [mean, variance] = moments(x, i).map((m) => paren(words.write(m), true));
      return `(${t(0, i, j)} - ${mean}) / √(${variance} + ${eps}) · ${t(1, 0, j)} + ${t(2, 0, j)}`;
    },
  },
  row_sums: {
    all: ([x], [rows, columns]) => Matrix.of(rows, columns, (i) => dot(x.columns, (j) => x.at(i, j))),
    made: ([x], i) => range(x.columns).map((j) => source("a", 0, i, j)),
    spell: (t, [x], i, _, __, words) => words.sum(x.columns, (j) => t(0, i, j)),
  },
  mean: {
    all: ([x], [rows, columns]) => Matrix.of(rows, columns, (_, j) => dot(x.rows, (i) => x.at(i, j)) / x.rows),
    made: ([x], _, j) => range(x.rows).map((i) => source("a", 0, i, j)),
    spell: (t, [x], _, j, __, words) => `(${words.sum(x.rows, (i) => t(0, i, j))}) / ${x.rows}`,
  },
};

/**
 * A number in parentheses; when `negative`, only if it has a sign.
 * @param {string} text
 * @param {boolean} [negative]
 */
function paren(text, negative = false) {
  if (text.startsWith("(")) return text;
  return negative && !text.startsWith("-") ? text : `(${text})`;
}

/**
 * Whether two numbers are the same but for a tolerance; NaN is the same as NaN.
 * @param {number} x
 * @param {number} y
 * @param {number} tolerance
 */
function same(x, y, tolerance) {
  return Object.is(x, y) || x === y || Math.abs(x - y) <= tolerance;
}

/**
 * As in draw.py: p1 to p8 for positive numbers, n1 to n8 for negative ones, x for what is not finite.
 * @param {number} value
 * @param {number} size
 */
function shade(value, size) {
  if (!Number.isFinite(value)) return "x";
  const level = size ? Math.min(LEVELS, Math.round((Math.abs(value) / size) * LEVELS)) : 0;
  return level === 0 ? "" : `${value < 0 ? "n" : "p"}${level}`;
}
