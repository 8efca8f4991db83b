/*
 * The reader's own words: a view's HTML and data are made again for other words, before a View enhances them. Words
 * that the page has no numbers for get made ones, the same as own_words.py makes.
 */

import { decimalsOf, decode, encode, filled, largest, Matrix, range } from "./compute.js";
import { element } from "./kit/page.js";
import { family } from "./numbers.js";
import { computed, OPS } from "./operations.js";
import { TOKENS } from "./walk.js";

/** @typedef {import("./numbers.js").NodeData} NodeData */
/** @typedef {import("./numbers.js").PageData} PageData */

/** @typedef {Record<string, number[]> | number[][]} Table rows of numbers by word, or by place */
/**
 * The words of each text; `made` collects those without numbers.
 * @typedef {{ texts: string[][], known: Record<string, Table>, made: Set<string> }} Wanted
 */

// More rows than MOST_WORDS would be abridged; MOST_PAIRS queries have weighted values that are shown, as in graph.py.
export const MOST_WORDS = 16, MOST_PAIRS = 8;

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
function dataOf({ nodes, labels, texts, ...more }, wanted) {
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
      decimals: decimalsOf(matrix.data, more.precision),
    };
  });
  for (const node of made) {
    node.size = Math.max(
      ...made
        .filter(({ name }) => family(name) === family(node.name))
        .map(({ id }) => largest(/** @type {Matrix} */ (found.get(id)).data)),
    );
  }
  const says = wanted.made.size ? filled(texts["made words"], { words: [...wanted.made].join(", ") }) : "";
  return {
    ...more,
    nodes: made,
    labels: { ...labels, ...Object.fromEntries(lists) },
    texts: { ...texts, look: texts["own look"], first: "", second: "", word: "", "made up": says },
  };
}

/**
 * A view's HTML for other words, as draw.py draws it, without the numbers in its tables.
 * @type {(html: string, wanted: Wanted | null) => HTMLElement}
 */
export function withWords(html, wanted) {
  const box = element("div");
  box.innerHTML = html;
  const root = /** @type {HTMLElement} */ (box.firstElementChild);
  if (!wanted) return root;
  const script = /** @type {Element} */ (root.querySelector("script.sa-data"));
  const data = dataOf(JSON.parse(script.textContent ?? ""), wanted),
    { labels, texts } = data,
    byId = new Map(data.nodes.map((node) => [node.id, node]));
  script.textContent = JSON.stringify(data);
  const query = (/** @type {HTMLElement} */ table) =>
    Number(/\[(\d+)\]/.exec(table.dataset.node ?? table.dataset.a ?? "")?.[1]);
  // Weighted values have a table, or a line of tables, for each query: copies of the first.
  const tables = () => /** @type {HTMLTableElement[]} */ ([...root.querySelectorAll("table.sa-m")]);
  for (const table of tables()) if (query(table) > 0) table.closest(".sa-compare, .sa-term")?.remove();
  for (const first of new Set(
    tables()
      .filter((table) => query(table) === 0)
      .map((table) => /** @type {HTMLElement} */ (table.closest(".sa-compare, .sa-term"))),
  )) {
    const most = Math.max(...wanted.texts.map((words) => Math.min(words.length, MOST_PAIRS)));
    for (const i of range(most - 1).reverse()) {
      const copy = /** @type {HTMLElement} */ (first.cloneNode(true));
      for (const part of /** @type {NodeListOf<HTMLElement>} */ (copy.querySelectorAll("table"))) {
        for (const key of ["node", "a", "b"]) {
          if (part.dataset[key]) part.dataset[key] = part.dataset[key]?.replace("[0]", `[${i + 1}]`);
        }
      }
      copy.querySelector(".sa-op")?.remove();
      first.after(copy);
    }
  }
  for (const table of tables()) {
    const { node: id = "", a = id, b = a } = table.dataset, first = byId.get(a), second = byId.get(b);
    if (!first || !second) {
      table.remove();
      continue;
    }
    const label = (/** @type {"rows" | "columns"} */ axis, /** @type {0 | 1} */ n) =>
      range(Math.min(first.shape[n], second.shape[n])).map((k) => {
        const [x, y] = [first, second].map((each) => labels[each[axis]]?.[k] ?? String(k));
        return x === y ? x : `${x} → ${y}`;
      });
    const axes = [label("rows", 0), label("columns", 1)],
      [rows, columns] = "t" in table.dataset ? axes.reverse() : axes;
    const started = table.tBodies[0].rows[0]?.id.replace(/0$/, "");
    for (const name of ["rows", "columns"]) delete table.dataset[name];
    table.tHead?.replaceChildren(
      element(
        "tr",
        {},
        element("td"),
        ...columns.map((text) => element("th", { scope: "col" }, element("bdi", {}, text))),
      ),
    );
    table.tBodies[0].replaceChildren(
      ...rows.map((text, i) =>
        element(
          "tr",
          started ? { id: started + i } : {},
          element("th", { scope: "row" }, element("bdi", {}, text)),
          ...columns.map((_, j) =>
            element("td", {
              className: first.blanks && !("t" in table.dataset) && first.blanks[i] === j ? "sa-blank" : "",
            }),
          ),
        ),
      ),
    );
    const caption = /** @type {HTMLElement} */ (table.caption), i = query(table), side = a.endsWith("~1") ? 1 : 0;
    if (i >= 0 && caption.firstChild) {
      caption.firstChild.textContent = (caption.firstChild.textContent ?? "").replace("[0]", `[${i}]`);
    }
    for (const part of caption.children) {
      if (part.tagName === "SMALL") part.textContent = `${rows.length} × ${columns.length}`;
      else if (part.className === "sa-of") part.textContent = wanted.texts[side].join(" ");
      else part.textContent = filled(texts["of query"], { token: labels[`t${side}`][i] });
    }
    if (first !== second) {
      table.dataset.size = String(
        largest(
          Float64Array.from(
            rows.flatMap((_, r) =>
              columns.map(
                (__, c) => decode(second.data)[r * second.shape[1] + c] - decode(first.data)[r * first.shape[1] + c],
              ),
            ),
          ),
        ),
      );
    }
  }
  for (const name of root.querySelectorAll(".sa-halves > div > .sa-side > bdi")) {
    name.textContent = wanted.texts[name.closest(".sa-halves > div")?.previousElementSibling ? 1 : 0].join(" ");
  }
  for (const legend of /** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll("[data-nodes]"))) {
    legend.dataset.nodes = data.nodes
      .filter(({ id }) => (legend.dataset.nodes ?? "").split(" ").includes(id.replace(/\[\d+\]/, "[0]")))
      .map(({ id }) => id)
      .join(" ");
  }
  const longest = Math.max(...wanted.texts.map((words) => words.length)),
    values = root.querySelector("[data-stage$=weighted_values] .sa-legend");
  for (const gap of root.querySelectorAll(".sa-gap")) gap.closest(".sa-stage")?.querySelector(".sa-note")?.remove();
  if (longest > MOST_PAIRS) {
    values?.before(
      element("p", { className: "sa-note" }, filled(texts["abridged queries"], { shown: MOST_PAIRS, all: longest })),
    );
  }
  return root;
}

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
  const says = element("span", { className: "sa-soft", role: "status" });
  const back = element("button", { type: "reset", hidden: true }, texts["words of the page"]);
  const change = (/** @type {string[][] | null} */ given) => {
    const fits = !given || given.every(({ length }) => length > 0 && length <= MOST_WORDS);
    says.textContent = fits ? "" : filled(texts["too many words"], { most: MOST_WORDS });
    if (!fits) return;
    back.hidden = !given;
    show(given);
  };
  return element(
    "form",
    {
      className: "sa-reader",
      onreset: () => change(null),
      onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        change(
          fields.map(({ value }) =>
            value
              .split(value.includes(",") ? "," : /\s+/)
              .map((word) => word.trim())
              .filter(Boolean),
          ),
        );
      },
    },
    element("b", {}, texts["own words"]),
    ...fields,
    element("button", { type: "submit" }, texts["show words"]),
    back,
    says,
  );
}
