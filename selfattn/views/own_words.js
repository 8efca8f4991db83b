/*
 * The reader's own words: the data of a view is made again for other words. Words that the page has no numbers for get
 * made ones, the same as own_words.py makes.
 */

import { decimalsOf, decode, encode, filled, Matrix, range } from "./compute.js";
import { element } from "./kit/page.js";
import { computed, OPS } from "./operations.js";
import { TOKENS } from "./walk.js";

/** @typedef {import("./numbers.js").NodeData} NodeData */
/** @typedef {import("./numbers.js").PageData} PageData */
/** @typedef {import("./stage.js").StageData} StageData */

/** @typedef {Record<string, number[]> | number[][]} Table rows of numbers by word, or by place */
/**
 * The words of each text; `made` collects those without numbers.
 * @typedef {{ texts: string[][], known: Record<string, Table>, made: Set<string> }} Wanted
 */

// MOST_PAIRS queries have weighted values that are shown, as in graph.py.
const MOST_WORDS = 16, MOST_PAIRS = 8;

/** @type {(data: PageData) => boolean} whether a view can have other words */
export const takesWords = ({ nodes }) =>
  nodes.every(
    ({ op, rows, columns, name }) =>
      OPS[op] || !TOKENS.test(rows) || !TOKENS.test(columns) || ["mask", "given_weights"].includes(name),
  );

/** @param {string} text @returns a share from 0 to 1 that the text decides, as in own_words.py */
export function shareOf(text) {
  let found = 2166136261;
  const bytes = new TextEncoder().encode(text);
  for (const byte of [...bytes, ...bytes]) found = Math.imul(found ^ byte, 16777619) >>> 0;
  return found / 2 ** 32;
}

/** @type {(word: string, table: number[][], name: string) => number[]} */
function madeRow(word, table, name) {
  const unit = 10 ** decimalsOf(Float64Array.from(table.flat()), 2);
  return table[0].map((_, column) => {
    const all = table.map((row) => row[column]), low = Math.min(...all), high = Math.max(...all);
    return Math.floor((low + (high - low) * shareOf(`${column} ${name} ${word}`)) * unit + 0.5) / unit;
  });
}

/**
 * The rows of a given matrix for other words.
 * @type {(node: NodeData, old: Matrix, words: string[], before: string[], wanted: Wanted) => Matrix}
 */
function rowsOf(node, old, words, before, { known, made }) {
  const name = node.id.split("~")[0];
  if (node.name === "positions") {
    const sine = (/** @type {number} */ i, /** @type {number} */ c) =>
      [Math.sin, Math.cos][c % 2](i / 10000 ** ((c - (c % 2)) / old.columns));
    return Matrix.of(words.length, old.columns, (i, c) => (i < old.rows ? old.at(i, c) : sine(i, c)));
  }
  // x may be query, key and value.
  const names = Object.keys(known), at = known[name] || names.length !== 1 ? name : names[0];
  const table = known[at] ?? Object.fromEntries(before.map((word, i) => [word, [...old.row(i)]])),
    salt = known[at] ? at : JSON.stringify(table);
  const all = Object.values(table), numbers = words.map((word, i) => {
    const row = Array.isArray(table) ? table[i] : Object.hasOwn(table, word) ? table[word] : undefined;
    if (!row) made.add(word);
    return row ?? madeRow(word, all, salt);
  });
  return Matrix.of(words.length, old.columns, (i, c) => numbers[i][c]);
}

/**
 * A mask of another size: open, causal, or with the same last columns.
 * @type {(old: Matrix, rows: number, columns: number) => Matrix}
 */
function maskOf(old, rows, columns) {
  const all = (/** @type {(i: number, j: number) => number} */ rule) =>
    range(old.rows).every((i) => range(old.columns).every((j) => old.at(i, j) === rule(i, j)));
  if (all((i, j) => Number(j <= i)) && old.rows > 1) return Matrix.of(rows, columns, (i, j) => Number(j <= i));
  if (all((_, j) => old.at(0, j))) {
    return Matrix.of(rows, columns, (_, j) => old.at(0, Math.max(0, j - columns + old.columns)));
  }
  return Matrix.of(rows, columns, (i, j) => (i < old.rows && j < old.columns ? old.at(i, j) : 1));
}

/** @type {(data: PageData, wanted: Wanted) => PageData} the data of a view for other words */
export function dataOf({ nodes, stages, labels, texts, ...more }, wanted) {
  /** @type {Map<string, string[]>} lists of labels that change */
  const lists = new Map();
  wanted.texts.forEach((words, side) => {
    lists.set(`t${side}`, words);
    if (labels[`t${side}`].join("\n") === labels[`k${side}`]?.join("\n")) lists.set(`k${side}`, words);
  });
  /** @type {Map<string, Matrix>} */
  const found = new Map();
  const count = (/** @type {string} */ list, /** @type {number} */ n) => lists.get(list)?.length ?? n;
  const pairs = (/** @type {string} */ id) => {
    const side = id.endsWith("~1") ? "t1" : "t0";
    return range(Math.min(MOST_PAIRS, count(side, labels[side].length))).map((i) => id.replace("[0]", `[${i}]`));
  };
  const all = nodes
    .filter(({ op, options }) => op !== "pairs" || options.query === 0)
    .flatMap((node) =>
      node.op === "pairs"
        ? pairs(node.id).map((id, query) => ({
            ...node,
            id,
            name: node.name.replace("[0]", `[${query}]`),
            options: { query },
          }))
        : [node],
    );
  const made = all.map((node) => {
    const [rows, columns] = [count(node.rows, node.shape[0]), count(node.columns, node.shape[1])],
      old = new Matrix(...node.shape, decode(node.data));
    const args =
      node.op === "sum" ? [...node.args.slice(0, 3), ...(node.args[3] ? pairs(node.args[3]) : [])] : node.args;
    const words = lists.get(node.rows),
      op = OPS[node.op],
      matrices = args.map((id) => /** @type {Matrix} */ (found.get(id)));
    let matrix = old;
    if (op) matrix = computed(op, matrices, [rows, columns], node.options);
    else if (node.name === "mask") matrix = maskOf(old, rows, columns);
    else if (node.name === "given_weights" && (rows !== old.rows || columns !== old.columns)) {
      const weights = /** @type {Matrix} */ (found.get(node.id.replace("given_weights", "weights")));
      matrix = Matrix.of(rows, columns, (i, j) => Math.round(weights.at(i, j) * 10) / 10);
    } else if (words && node.name !== "given_weights") matrix = rowsOf(node, old, words, labels[node.rows], wanted);
    found.set(node.id, matrix);
    const step = columns % 2 ? 2 : 1,
      blanks = node.blanks && range(rows).map((i) => (step * i + (node.blanks?.[0] ?? 0)) % columns);
    return {
      ...node,
      args,
      blanks,
      shape: /** @type {[number, number]} */ ([matrix.rows, matrix.columns]),
      data: encode(matrix.data),
    };
  });
  const ofPairs = (/** @type {string} */ term) =>
    /\[\d+\]/.test(term) ? (term.includes("[0]") ? pairs(term) : []) : [term];
  const leftOut = wanted.texts.filter(({ length }) => length > MOST_PAIRS);
  /** @type {StageData[]} */
  const drawn = stages.map(({ equations, notes, ...stage }) => ({
    ...stage,
    equations: equations.map(({ label, sides }) => ({ label, sides: sides.map((terms) => terms.flatMap(ofPairs)) })),
    notes: [
      ...notes.filter(([key]) => key !== "abridged queries"),
      ...(/weighted_values$/.test(stage.name) ? leftOut : []).map(
        ({ length }) => /** @type {StageData["notes"][0]} */ (["abridged queries", { shown: MOST_PAIRS, all: length }]),
      ),
    ],
  }));
  const says = wanted.made.size ? filled(texts["made words"], { words: [...wanted.made].join(", ") }) : "";
  return {
    ...more,
    nodes: made,
    stages: drawn,
    labels: { ...labels, ...Object.fromEntries(lists) },
    texts: { ...texts, look: texts["own look"], first: "", second: "", word: "", "made up": says },
  };
}

/** @type {(text: string) => string[]} its words, with commas or spaces between them */
export const wordsOf = (text) =>
  text
    .split(text.includes(",") ? "," : /\s+/)
    .map((word) => word.trim())
    .filter(Boolean);

/** @type {(words: string[]) => boolean} whether a text can have these */
export const fits = ({ length }) => length > 0 && length <= MOST_WORDS;

/**
 * Fields for the reader's words, one for each text; `show` gets the words, or null for those of the page.
 * @type {(texts: Record<string, string>, words: string[][], show: (texts: string[][] | null) => void) =>
 *   HTMLFormElement}
 */
export function ownWords(texts, words, show) {
  const fields = words.map((each) =>
    element("input", {
      defaultValue: each.join(each.some((word) => word.includes(" ")) ? ", " : " "),
      ariaLabel: texts["own words"],
      autocomplete: "off",
      spellcheck: false,
    }),
  );
  const says = element("span.sa-soft", { role: "status" });
  const back = element("button", { type: "reset", hidden: true }, texts["words of the page"]);
  const change = (/** @type {string[][] | null} */ given) => {
    const isRight = !given || given.every(fits);
    says.textContent = isRight ? "" : filled(texts["too many words"], { most: MOST_WORDS });
    if (!isRight) return;
    back.hidden = !given;
    show(given);
  };
  return element(
    "form.sa-reader",
    {
      onreset: () => change(null),
      onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        change(fields.map(({ value }) => wordsOf(value)));
      },
    },
    element("b", texts["own words"]),
    ...fields,
    element("button", { type: "submit" }, texts["show words"]),
    back,
    says,
  );
}
