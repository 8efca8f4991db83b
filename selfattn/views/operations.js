/*
 * How each matrix of a steps page is computed from others, the sources of each number, and how its sum is written. It
 * draws nothing.
 */

import { dot, exponentials, Matrix, range, softmax } from "./compute.js";

/** @type {(x: Matrix, i: number) => number[]} mean and variance of a row, in two passes */
function moments(x, i) {
  const mean = dot(x.columns, (k) => x.at(i, k)) / x.columns;
  return [mean, dot(x.columns, (k) => (x.at(i, k) - mean) ** 2) / x.columns];
}

/** @typedef {Record<string, any>} Options */
/**
 * Of an operation: a number of one of its arguments.
 * @typedef {[colour: string, which: number, row: number, column: number]} Source
 */
/** @typedef {(which: number, row: number, column: number) => string} Figure */
/**
 * @typedef {object} Speller
 * @property {Record<string, string>} texts
 * @property {(n: number, term: (k: number) => string) => string} sum
 * @property {(value: number) => string} write
 */
/**
 * @typedef {object} Operation with `number` or, where the numbers of a row share their work, `all`
 * @property {(args: Matrix[], i: number, j: number, options: Options) => number} [number]
 * @property {(args: Matrix[], options: Options) => Matrix} [all]
 * @property {(args: Matrix[], i: number, j: number, options: Options) => Source[]} made the sources of number (i, j)
 * @property {(t: Figure, args: Matrix[], i: number, j: number, options: Options, words: Speller,
 *   nameOf: Figure) => string} spell how it is computed, in figures: t(which, row, column) writes a number,
 *   nameOf(which, row, column) names it
 */

/** @type {(...all: Source) => Source} */
const source = (...all) => all;

/** @type {(sign: string, number: (x: number, y: number) => number) => Operation} of the same number of each matrix */
const combined = (sign, number) => ({
  number: (args, i, j) => args.map((x) => x.at(i, j)).reduce(number),
  made: (args, i, j) => args.map((_, n) => source("abc"[n], n, i, j)),
  spell: (t, args, i, j) => args.map((_, n) => t(n, i, j)).join(sign),
});

/** @param {Matrix} x */
const transposed = (x) => Matrix.of(x.columns, x.rows, (i, j) => x.at(j, i));

/** @type {(args: Matrix[], i: number, j: number, options: Options) => [number, number][][]} the places in a product */
const factors = ([a], i, j, { turned }) =>
  range(turned === "first" ? a.rows : a.columns).map((k) => [
    turned === "first" ? [k, i] : [i, k],
    turned === "second" ? [j, k] : [k, j],
  ]);

/** @type {(mask: Matrix, i: number) => number[]} the keys that a query may attend to */
const openKeys = (mask, i) => range(mask.columns).filter((k) => mask.at(i, k) !== 0);

/** @type {(weights: Matrix, gradient: Matrix, i: number) => number} a row's gradient, weighted by its weights */
export const meanOf = (weights, gradient, i) => dot(weights.columns, (j) => weights.at(i, j) * gradient.at(i, j));

/** @type {(op: Operation, args: Matrix[], shape: [number, number], options: Options) => Matrix} */
export function computed({ all, number = () => NaN }, args, [rows, columns], options) {
  return all ? all(args, options) : Matrix.of(rows, columns, (i, j) => number(args, i, j, options));
}

/** @type {Record<string, Operation>} */
export const OPS = {
  // A product of two matrices, of which one may be turned, plus a bias, or times a scale.
  matmul: {
    all: ([a, b, c], { turned, scaled }) => {
      const x = turned === "first" ? transposed(a) : a, y = turned === "second" ? transposed(b) : b;
      return Matrix.of(x.rows, y.columns, (i, j) => {
        const sum = dot(x.columns, (k) => x.at(i, k) * y.at(k, j));
        return !c ? sum : scaled ? sum * c.at(0, 0) : sum + c.at(0, j);
      });
    },
    made: (args, i, j, options) => [
      ...factors(args, i, j, options).flatMap(([a, b]) => [source("a", 0, ...a), source("b", 1, ...b)]),
      ...(args[2] ? [source("c", 2, 0, options.scaled ? 0 : j)] : []),
    ],
    spell: (t, args, i, j, options, words) => {
      const all = factors(args, i, j, options);
      const sum = words.sum(all.length, (k) => `${t(0, ...all[k][0])}·${t(1, ...all[k][1])}`);
      return !args[2] ? sum : options.scaled ? `(${sum}) × ${t(2, 0, 0)}` : `${sum} + ${t(2, 0, j)}`;
    },
  },
  additive: {
    number: ([q, k, v], i, j) => dot(v.columns, (c) => Math.tanh(q.at(i, c) + k.at(j, c)) * v.at(0, c)),
    made: ([q], i, j) =>
      range(q.columns).flatMap((c) => [source("a", 0, i, c), source("b", 1, j, c), source("c", 2, 0, c)]),
    spell: (t, [q], i, j, _, words) => words.sum(q.columns, (c) => `tanh(${t(0, i, c)} + ${t(1, j, c)})·${t(2, 0, c)}`),
  },
  scale: {
    number: ([s, scale, cap], i, j) => {
      const x = s.at(i, j) * scale.at(0, 0);
      return cap ? cap.at(0, 0) * Math.tanh(x / cap.at(0, 0)) : x;
    },
    made: ([, , cap], i, j) => [source("a", 0, i, j), source("b", 1, 0, 0), ...(cap ? [source("c", 2, 0, 0)] : [])],
    spell: (t, [, , cap], i, j) => {
      const x = `${t(0, i, j)}·${t(1, 0, 0)}`;
      return cap ? `${t(2, 0, 0)}·tanh(${x} / ${t(2, 0, 0)})` : x;
    },
  },
  mask: {
    number: ([s, mask, added], i, j) => (mask.at(i, j) === 0 ? -Infinity : s.at(i, j) + (added ? added.at(i, j) : 0)),
    made: ([, , added], i, j) => [source("a", 0, i, j), source("b", 1, i, j), ...(added ? [source("c", 2, i, j)] : [])],
    spell: (t, [, mask, added], i, j, _, words, nameOf) =>
      mask.at(i, j) === 0 ? words.texts.masked : added ? `${t(0, i, j)} + ${t(2, i, j)}` : nameOf(0, i, j),
  },
  softmax: {
    all: ([s, mask, sink]) => softmax(s, mask, sink?.at(0, 0)),
    made: ([, mask, sink], i, j) => [
      ...openKeys(mask, i).map((k) => source("a", 0, i, k)),
      source("b", 0, i, j),
      ...(sink ? [source("c", 2, 0, 0)] : []),
    ],
    spell: (t, [s, mask, sink], i, j, _, words) => {
      if (mask.at(i, j) === 0) return words.texts["masked weight"];
      if (exponentials(s, mask, sink?.at(0, 0), i)[1] === 0) return words.texts.nothing;
      const open = openKeys(mask, i);
      const first = sink ? `exp${paren(t(2, 0, 0))} + ` : "";
      return `exp${paren(t(0, i, j))} / (${first}${words.sum(open.length, (k) => `exp${paren(t(0, i, open[k]))}`)})`;
    },
  },
  choose: {
    number: ([computed, given, use], i, j) => (use.at(0, 0) === 0 ? computed : given).at(i, j),
    made: ([, , use], i, j) => [source("a", use.at(0, 0) === 0 ? 0 : 1, i, j), source("b", 2, 0, 0)],
    spell: (t, [, , use], i, j, _, words, nameOf) => nameOf(use.at(0, 0) === 0 ? 0 : 1, i, j),
  },
  multiply: combined("·", (x, y) => x * y),
  add: combined(" + ", (x, y) => x + y),
  pairs: {
    number: ([w, v, mask], j, c, { query }) => (mask.at(query, j) === 0 ? 0 : w.at(query, j) * v.at(j, c)),
    made: (_, j, c, { query }) => [source("a", 0, query, j), source("b", 1, j, c)],
    spell: (t, [, , mask], j, c, { query }, words) =>
      mask.at(query, j) === 0 ? words.texts["masked weight"] : `${t(0, query, j)}·${t(1, j, c)}`,
  },
  sum: {
    number: ([w, v, mask], i, c) => dot(v.rows, (j) => (mask.at(i, j) === 0 ? 0 : w.at(i, j) * v.at(j, c))),
    made: ([, , mask, ...pairs], i, c) =>
      openKeys(mask, i).flatMap((j) => [
        source("a", 0, i, j),
        source("b", 1, j, c),
        ...(i < pairs.length ? [source("c", 3 + i, j, c)] : []),
      ]),
    spell: (t, [, , mask], i, c, _, words) => {
      const open = openKeys(mask, i);
      return open.length
        ? words.sum(open.length, (n) => `${t(0, i, open[n])}·${t(1, open[n], c)}`)
        : words.texts.nothing;
    },
  },
  slice: {
    number: ([x], i, j, { start }) => x.at(i, start + j),
    made: (_, i, j, { start }) => [source("a", 0, i, start + j)],
    spell: (t, _, i, j, { start }, words, nameOf) => nameOf(0, i, start + j),
  },
  concat: {
    number: (heads, i, j) => heads[Math.floor(j / heads[0].columns)].at(i, j % heads[0].columns),
    made: ([head], i, j) => [source("a", Math.floor(j / head.columns), i, j % head.columns)],
    spell: (t, [head], i, j, _, words, nameOf) => nameOf(Math.floor(j / head.columns), i, j % head.columns),
  },
  norm: {
    all: ([x, w, b], { eps }) => {
      const lines = range(x.rows).map((i) => moments(x, i));
      return Matrix.of(x.rows, x.columns, (i, j) => {
        const [mean, variance] = lines[i];
        return ((x.at(i, j) - mean) / Math.sqrt(variance + eps)) * w.at(0, j) + b.at(0, j);
      });
    },
    made: ([x], i, j) => [
      ...range(x.columns).map((k) => source("a", 0, i, k)),
      source("b", 0, i, j),
      source("c", 1, 0, j),
      source("c", 2, 0, j),
    ],
    spell: (t, [x], i, j, { eps }, words) => {
      const [mean, variance] = moments(x, i).map((m) => paren(words.write(m), true));
      return `(${t(0, i, j)} - ${mean}) / √(${variance} + ${eps}) · ${t(1, 0, j)} + ${t(2, 0, j)}`;
    },
  },
  softmax_gradient: {
    number: ([p, g], i, j) => p.at(i, j) * (g.at(i, j) - meanOf(p, g, i)),
    made: ([p], i, j) => [source("a", 0, i, j), ...range(p.columns).map((k) => source("b", 1, i, k))],
    spell: (t, [p, g], i, j, _, words) =>
      `${t(0, i, j)} · (${t(1, i, j)} − ${paren(words.write(meanOf(p, g, i)), true)})`,
  },
  row_sums: {
    number: ([x], i) => dot(x.columns, (j) => x.at(i, j)),
    made: ([x], i) => range(x.columns).map((j) => source("a", 0, i, j)),
    spell: (t, [x], i, _, __, words) => words.sum(x.columns, (j) => t(0, i, j)),
  },
  mean: {
    number: ([x], _, j) => dot(x.rows, (i) => x.at(i, j)) / x.rows,
    made: ([x], _, j) => range(x.rows).map((i) => source("a", 0, i, j)),
    spell: (t, [x], _, j, __, words) => `(${words.sum(x.rows, (i) => t(0, i, j))}) / ${x.rows}`,
  },
};

/**
 * A number in parentheses; when `negative`, only if it has a sign.
 * @type {(text: string, negative?: boolean) => string}
 */
export function paren(text, negative = false) {
  if (text.startsWith("(")) return text;
  return negative && !text.startsWith("-") ? text : `(${text})`;
}
