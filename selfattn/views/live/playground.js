/*
 * A playground of attention: a text's words, or matrices, through the core's kernels, as a picture first; and the lines
 * of Python that compute the same numbers.
 */

import { clamp, filled, fixed, largest, Matrix, range, read, write } from "../compute.js";
import { Heat } from "../kit/heat.js";
import {
  announce, button, chooser, destination, element, isForeign, phrase, placeIn, start, topOf, wordOf,
} from "../kit/page.js";
import { paint, pixelColours } from "../kit/pictures.js";
import { failure } from "./kernel.js";
import { faultOf, inWorker, KernelWorker, serve } from "./worker.js";
import { shareOf } from "../own_words.js";

/** @typedef {import("../kit/page.js").Place} Place */
/** @typedef {import("./kernel.js").AttentionCall} AttentionCall */
/** @typedef {import("./kernel.js").Floats} Floats */
/** @typedef {import("./kernel.js").Kernel} Kernel */
/** @typedef {import("./worker.js").Work} Work */

/**
 * closed has pairs "i,j"; slope is that of head 0, each further head has half of it; bounds are null without one.
 * @typedef {{ words: string[], matrices: number[][][] | null, heads: number, keyHeads: number,
 *   causal: "" | "upper_left" | "lower_right", left: number | null, right: number | null, slope: number,
 *   softcap: number | null, scale: number | null, dropout: number, seed: number, closed: string[] }} Settings
 */
/**
 * Numbers of a head; of a large matrix the largest of each block.
 * @typedef {{ rows: number, columns: number, data: Floats }} Shown
 */

const NUMBERS = 16; // of a word
const MOST_TOKENS = 4096, MOST_HEADS = 16;
const SIDE = 512; // numbers of a picture's side, at most
const LEGIBLE = 12; // rows and columns that are shown as numbers
const SHOWN = /** @type {const} */ (["weights", "scores", "out", "dQuery", "dKey", "dValue"]);

/** @param {Settings} settings @returns {AttentionCall} */
function callOf({
  words,
  matrices,
  heads,
  keyHeads,
  causal,
  left,
  right,
  slope,
  softcap,
  scale,
  dropout,
  seed,
  closed,
}) {
  const group = heads / keyHeads,
    n = words.length,
    flat = (matrices ?? []).map((matrix) => Float64Array.from(matrix.flat()));
  const made = /** @type {Map<string, number[]>} */ (
    new Map(
      words.map((word) => [
        word,
        range(keyHeads * NUMBERS).map((c) => 4 * shareOf(`${c % NUMBERS} ${Math.floor(c / NUMBERS)} ${word}`) - 2),
      ]),
    )
  );
  const rows = (/** @type {number} */ head) =>
    words.flatMap((word) => made.get(word)?.slice(head * NUMBERS, (head + 1) * NUMBERS) ?? []);
  const key = Float32Array.from(range(matrices ? 0 : keyHeads).flatMap(rows));
  const query = Float32Array.from(
    range(matrices ? 0 : heads).flatMap((head) =>
      rows(Math.floor(head / group)).map((x) => Math.fround(x) * (1 + (head % group))),
    ),
  );
  const L = matrices?.[0].length ?? n,
    S = matrices?.[1].length ?? n,
    mask = closed.length ? new Uint8Array(L * S).fill(1) : null;
  for (const pair of closed) {
    const [i, j] = pair.split(",").map(Number);
    if (mask && i < L && j < S) mask[i * S + j] = 0;
  }
  const given = matrices ? { query: flat[0], key: flat[1], value: flat[2] } : { query, key, value: key };
  return {
    ...given,
    L,
    S,
    heads,
    keyHeads,
    mask,
    causal: causal || null,
    window: left === null && right === null ? null : [left, right],
    slopes: slope ? range(heads).map((h) => slope / 2 ** h) : null,
    softcap,
    scale,
    dropout,
    seed,
  };
}

/** @type {(call: AttentionCall, i: number, j: number) => boolean} */
function isOpen({ L, S, mask, causal, window }, i, j) {
  const at = i + (causal === "lower_right" ? S - L : 0), [left, right] = window ?? [null, null];
  return (
    (!causal || j <= at) &&
    (left === null || j >= at - left) &&
    (right === null || j <= at + right) &&
    (!mask || mask[i * S + j] !== 0)
  );
}

/** @type {(kernel: Kernel, call: AttentionCall, head: number) => Floats} a head's scores; -inf closes a pair */
function scoresOf(kernel, call, head) {
  const { query, key, L, S, heads = 1, keyHeads = 1, softcap, slopes, causal } = call,
    E = query.length / heads / L,
    from = Math.floor((head * keyHeads) / heads) * S * E;
  const y = /** @type {Floats} */ (
    kernel.linear({
      x: query.subarray(head * L * E, (head + 1) * L * E),
      weight: key.subarray(from, from + S * E),
      columns: E,
    }).y
  );
  const scale = call.scale ?? 1 / Math.sqrt(E), offset = causal === "lower_right" ? S - L : 0;
  for (let i = 0, at = 0; i < L; i++) {
    for (let j = 0; j < S; j++, at++) {
      const scaled = y[at] * scale, capped = softcap ? softcap * Math.tanh(scaled / softcap) : scaled;
      y[at] = isOpen(call, i, j) ? capped - (slopes ? slopes[head] * Math.abs(i + offset - j) : 0) : -Infinity;
    }
  }
  return y;
}

/** @type {(data: Floats, rows: number, columns: number) => Shown} */
function pooled(data, rows, columns) {
  const by = Math.max(1, Math.ceil(Math.max(rows, columns) / SIDE)),
    wide = Math.ceil(columns / by),
    high = Math.ceil(rows / by);
  if (by === 1) return { rows, columns, data };
  const most = new Float64Array(high * wide).fill(-Infinity);
  for (let i = 0, at = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++, at++) {
      const to = Math.floor(i / by) * wide + Math.floor(j / by);
      if (most[to] === -Infinity || Math.abs(data[at]) > Math.abs(most[to])) most[to] = data[at];
    }
  }
  return { rows: high, columns: wide, data: most };
}

/** @type {Record<string, Work>} */
const PLAYGROUND_JOBS = {
  attention: (
    /** @type {{ settings: Settings, shown: typeof SHOWN[number], head: number }} */ { settings, shown, head },
    { kernel },
  ) => {
    const call = callOf(settings),
      { L, S, query, value, heads = 1, keyHeads = 1 } = call,
      E = query.length / heads / L,
      Dv = value.length / keyHeads / S;
    const own = shown === "dKey" || shown === "dValue" ? Math.floor((head * keyHeads) / heads) : head;
    const [rows, columns] = {
      weights: [L, S],
      scores: [L, S],
      out: [L, Dv],
      dQuery: [L, E],
      dKey: [S, E],
      dValue: [S, Dv],
    }[shown];
    const part = (/** @type {Floats} */ all) => all.slice(own * rows * columns, (own + 1) * rows * columns);
    if (shown === "scores") return { ...pooled(scoresOf(kernel, call, head), L, S), L, S };
    const ones = shown.startsWith("d")
      ? query.slice(0, 0).constructor === Float32Array
        ? new Float32Array(heads * L * Dv).fill(1)
        : new Float64Array(heads * L * Dv).fill(1)
      : null;
    const found = kernel.attention({ ...call, weights: shown === "weights", gradOut: ones });
    return { ...pooled(part(/** @type {Floats} */ (found[shown])), rows, columns), L, S };
  },
};

/**
 * Python that computes the same; both give scores or weights, out and gradients.
 * @type {(settings: Settings) => { selfattn: string, numpy: string }}
 */
function pythonOf(settings) {
  const { words, matrices, heads, keyHeads, causal, left, right, slope, softcap, scale, dropout, seed, closed } =
      settings,
    group = heads / keyHeads;
  const array = (/** @type {number[][]} */ rows) =>
    `np.array([[${JSON.stringify(rows).slice(1, -1)}]], np.float64)`.replaceAll("],[", "],\n    [");
  const data = matrices
    ? ["query", "key", "value"].map((name, n) => `${name} = ${array(matrices[n])}`)
    : [
        `words = ${JSON.stringify(words.join(" "))}.split(" ")`,
        "",
        "def share(text):",
        "    n = 2166136261",
        "    for byte in text.encode() * 2:",
        "        n = (n ^ byte) * 16777619 % 2**32",
        "    return n / 2**32",
        "",
        `made = {word: [[4 * share(f"{c} {head} {word}") - 2 for c in range(${NUMBERS})]` +
          ` for head in range(${keyHeads})] for word in set(words)}`,
        "key = value = np.array([made[word] for word in words], np.float32).swapaxes(0, 1)",
        `query = ${
          group === 1 ? "key" : `np.stack([key[h // ${group}] * (1 + h % ${group}) for h in range(${heads})])`}`,
      ];
  const pairs = closed.map((pair) => pair.split(",")),
    mask = pairs.length
      ? [
          "L, S = query.shape[1], key.shape[1]",
          "mask = np.ones((L, S), bool)",
          `mask[[${pairs.map(([i]) => i)}], [${pairs.map(([, j]) => j)}]] = False`,
        ]
      : [];
  const bound = (/** @type {number | null} */ n) => n ?? "None",
    slopes = `[${range(heads).map((h) => slope / 2 ** h)}]`;
  const options = [
    ...(pairs.length ? ["attn_mask=mask"] : []),
    ...(causal ? [`causal="${causal}"`] : []),
    ...(left !== null || right !== null ? [`window=(${bound(left)}, ${bound(right)})`] : []),
    ...(slope ? [`alibi_slopes=${slopes}`] : []),
    ...(softcap ? [`softcap=${softcap}`] : []),
    ...(scale !== null ? [`scale=${scale}`] : []),
    ...(dropout ? [`dropout_p=${dropout}, rng=${seed}`] : []),
    ...(group > 1 ? ["enable_gqa=True"] : []),
  ];
  const rules = [
    ...(causal ? ["(j <= i)"] : []),
    ...(left !== null ? [`(j >= i - ${left})`] : []),
    ...(right !== null ? [`(j <= i + ${right})`] : []),
    ...(pairs.length ? ["mask"] : []),
  ];
  const grouped = group > 1 ? [`k, v = (x.repeat(${group}, axis=0) for x in (key, value))`] : ["k, v = key, value"];
  const summed = (/** @type {string} */ name) =>
    group > 1 ? `${name} = ${name}.reshape(${keyHeads}, ${group}, *${name}.shape[1:]).sum(axis=1)` : "";
  const text = (/** @type {string[]} */ lines) => `${lines.join("\n")}\n`;
  return {
    selfattn: text([
      "import numpy as np",
      "import selfattn as sa",
      "",
      ...data,
      ...mask,
      `options = dict(${options.join(", ")})`,
      "out, weights = sa.scaled_dot_product_attention(query, key, value, return_weights=True, **options)",
      "_, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, **options)",
      "d_query, d_key, d_value = pullback(np.ones_like(out))",
    ]),
    numpy: text([
      "import numpy as np",
      ...(dropout ? ["from selfattn.reference import dropout_keep_mask"] : []),
      "",
      ...data,
      ...mask,
      ...grouped,
      "i, j = np.arange(query.shape[1])[:, None]" +
        `${causal === "lower_right" ? " + key.shape[1] - query.shape[1]" : ""}, np.arange(key.shape[1])`,
      `opened = ${["np.full((len(i), len(j)), True)", ...rules].join(" & ")}`,
      `scale = ${scale ?? "query.shape[2] ** -0.5"}`,
      "scores = scale * (query @ k.swapaxes(1, 2))",
      ...(softcap ? [`squashed = np.tanh(scores / ${softcap})`, `scores = ${softcap} * squashed`] : []),
      ...(slope ? [`scores = scores - np.array(${slopes})[:, None, None] * abs(i - j)`] : []),
      "scores = np.where(opened, scores, -np.inf)",
      "exps = np.exp(scores - np.maximum(scores.max(axis=2, keepdims=True), -1e30))",
      "total = exps.sum(axis=2, keepdims=True)",
      "softmax = exps / (total + (total == 0))",
      ...(dropout
        ? [
            `kept = dropout_keep_mask(${seed}, ${dropout}, (${heads},), len(i), len(j)) / (1 - ${dropout})`,
            "weights = softmax * kept",
          ]
        : ["weights = softmax"]),
      "out = weights @ v",
      "",
      "d_out = np.ones_like(out)",
      "d_value = weights.swapaxes(1, 2) @ d_out",
      `d_softmax = d_out @ v.swapaxes(1, 2)${dropout ? " * kept" : ""}`,
      "d_scores = softmax * (d_softmax - (softmax * d_softmax).sum(axis=2, keepdims=True))",
      ...(softcap ? ["d_scores = d_scores * (1 - squashed**2)"] : []),
      "d_query, d_key = scale * d_scores @ k, scale * d_scores.swapaxes(1, 2) @ query",
      ...["d_key", "d_value"].map(summed).filter(Boolean),
    ]),
  };
}

class Playground {
  /** @type {Set<string>} */ closed = new Set();
  head = 0;
  turn = 0;
  /** @type {typeof SHOWN[number]} */ shown = "weights";
  /** @type {{ L: number, S: number, shown: typeof SHOWN[number], words: string[] } & Shown | null} */ found = null;
  /** @type {Place} the cell of the keyboard */ at = { i: 0, j: 0 };

  /**
   * @param {HTMLElement} root
   * @param {{ captions: Record<string, string>, built: string }} data
   * @param {ArrayBuffer} wasm
   */
  constructor(root, { captions, built }, wasm) {
    this.root = root;
    this.captions = captions;
    this.worker = new KernelWorker(wasm);
    const area = (/** @type {string} */ name, value = captions.example) =>
      element("textarea", { ariaLabel: captions[name], value, spellcheck: false, oninput: () => this.compute() });
    const number = (/** @type {string} */ name, value = "") => {
      const field = element("input", { value, inputMode: "decimal", oninput: () => this.compute() });
      return { field, node: element("label", captions[name], field) };
    };
    this.words = area("words");
    this.matrices = ["1 0 2\n0 1 1\n2 1 0", "1 1 0\n0 1 2\n1 0 1", "1 0\n0 1\n2 2"].map((value, n) =>
      area(["query", "key", "value"][n], value),
    );
    this.fields = Object.fromEntries(
      ["heads", "keyHeads", "left", "right", "slope", "softcap", "scale", "dropout", "seed"].map((name) => [
        name,
        number(name, name === "heads" || name === "keyHeads" ? "1" : ""),
      ]),
    );
    this.source = chooser(captions.source, [captions.text, captions.own], 0, () => this.compute());
    this.causal = chooser(captions.causal, [captions.all, captions.upper, captions.lower], 0, () => this.compute());
    this.heads = element("span.sa-tabs");
    this.kinds = element(
      "span.sa-tabs",
      ...SHOWN.map((name) =>
        button(
          {
            data: { do: name },
            ariaPressed: String(name === this.shown),
            onclick: () => {
              this.shown = name;
              this.compute();
            },
          },
          captions[`show ${name}`],
        ),
      ),
    );
    this.canvas = element("canvas", { tabIndex: 0, role: "application", ariaLabel: captions.picture });
    this.strip = element("div.sa-strip");
    this.line = element("p.sa-line", { ariaLive: "polite" });
    this.code = { selfattn: element("pre", { tabIndex: 0 }), numpy: element("pre", { tabIndex: 0 }) };
    this.canvas.onpointermove = (event) =>
      this.found && this.tell(placeIn(event, this.canvas, this.found.rows, this.found.columns));
    this.canvas.onclick = (event) =>
      this.found && this.toggle(placeIn(event, this.canvas, this.found.rows, this.found.columns));
    this.canvas.onkeydown = (event) => this.key(event);
    const given = element(
      "div.sa-controls",
      this.source,
      ...[this.words, ...this.matrices].map((each) =>
        element("label.sa-wide", each.ariaLabel ?? "", each),
      ),
    );
    this.controls = element(
      "div.sa-controls",
      this.causal,
      ...Object.values(this.fields).map(({ node }) => node),
      button({ onclick: () => (this.closed.clear(), this.compute()) }, captions.open),
    );
    this.result = element("div", this.kinds, " ", this.heads, this.strip, this.line);
    root.replaceChildren(
      topOf(root, captions, element("p", ...phrase(captions.look)), "", () => this.draw()),
      given,
      element("div.sa-columns", this.controls, this.result),
      element(
        "div.sa-code",
        ...Object.entries(this.code).map(([name, pre]) =>
          element(
            "div",
            element("h2", captions[`with ${name}`], " ", button({ onclick: () => this.copy(pre) }, captions.copy)),
            pre,
          ),
        ),
      ),
      element("p.sa-soft", built),
    );
    this.compute();
  }

  /** @returns {Settings} what is typed; throws a sentence for what cannot be */
  settings() {
    const { captions, closed } = this, own = this.source.querySelector("select")?.selectedIndex === 1;
    const value = (/** @type {string} */ name, low = -Infinity, high = Infinity, whole = false) => {
      const { field } = this.fields[name],
        typed = field.value.trim() ? read(field.value) : null,
        wrong =
          typed === null ? field.value.trim() : typed < low || typed > high || (whole && !Number.isInteger(typed));
      field.setAttribute("aria-invalid", String(!!wrong));
      if (wrong) throw failure("input", filled(captions["wrong number"], { name: captions[name], text: field.value }));
      return typed;
    };
    const words = this.words.value.split(/\s+/).filter(Boolean),
      heads = own ? 1 : (value("heads", 1, MOST_HEADS, true) ?? 1),
      keyHeads = own ? 1 : (value("keyHeads", 1, heads, true) ?? 1);
    if (!own && (!words.length || words.length > MOST_TOKENS)) {
      throw failure("input", filled(captions["wrong words"], { n: words.length }));
    }
    if (heads % keyHeads) throw failure("input", captions["wrong heads"]);
    const matrices = own
      ? this.matrices.map(({ value: text }) =>
          text
            .trim()
            .split("\n")
            .map((line) =>
              line
                .trim()
                .split(/[\s;]+/)
                .map((each) => read(each) ?? NaN),
            ),
        )
      : null;
    const [q, k, v] = matrices ?? [],
      even = (/** @type {number[][]} */ m) =>
        m.every((row) => row.length === m[0].length && row.every(Number.isFinite));
    if (
      matrices &&
      (!matrices.every(even) ||
        q[0].length !== k[0].length ||
        k.length !== v.length ||
        Math.max(q.length, k.length) > MOST_TOKENS)
    ) {
      throw failure("input", captions["wrong matrices"]);
    }
    return {
      words: own ? [] : words,
      matrices,
      heads,
      keyHeads,
      causal: /** @type {const} */ (["", "upper_left", "lower_right"])[
        this.causal.querySelector("select")?.selectedIndex ?? 0
      ],
      left: value("left", 0, 2 ** 20, true),
      right: value("right", 0, 2 ** 20, true),
      slope: value("slope") ?? 0,
      softcap: value("softcap", 1e-3, 1e6),
      scale: value("scale"),
      dropout: value("dropout", 0, 0.999) ?? 0,
      seed: value("seed", 0, 2 ** 53 - 1, true) ?? 0,
      closed: [...closed],
    };
  }

  async compute() {
    const own = this.source.querySelector("select")?.selectedIndex === 1;
    for (const each of [this.words, this.fields.heads.field, this.fields.keyHeads.field]) {
      if (each.parentElement) each.parentElement.hidden = own;
    }
    for (const each of this.matrices) if (each.parentElement) each.parentElement.hidden = !own;
    for (const each of this.kinds.children) {
      each.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (each).dataset.do === this.shown));
    }
    this.result.ariaBusy = "true";
    const turn = ++this.turn;
    try {
      const settings = this.settings(), { shown } = this, { words, heads } = settings;
      this.head = Math.min(this.head, heads - 1);
      this.heads.replaceChildren(
        ...(heads > 1 ? range(heads) : []).map((h) =>
          button(
            {
              ariaPressed: String(h === this.head),
              onclick: () => {
                this.head = h;
                this.compute();
              },
            },
            filled(this.captions.head, { n: h }),
          ),
        ),
      );
      for (const [name, text] of Object.entries(pythonOf(settings))) {
        this.code[/** @type {"selfattn" | "numpy"} */ (name)].textContent = text;
      }
      const found = await this.worker.ask("attention", { settings, shown, head: this.head });
      if (turn !== this.turn) return; // a newer request is on its way
      this.found = { ...found, shown, words };
      this.line.classList.remove("sa-fault");
      this.draw();
      this.root.dataset.computed = shown;
      announce(this.root, /** @type {any} */ ({ shown, head: this.head, numbers: found.data }));
    } catch (error) {
      if (turn !== this.turn) return;
      this.line.classList.add("sa-fault");
      this.line.textContent = faultOf(error, this.captions);
    }
    this.result.ariaBusy = "false";
  }

  draw() {
    const { found, captions } = this;
    if (!found) return;
    const { rows, columns, data, shown, words, L, S } = found,
      size = shown === "weights" ? 1 : largest(Float64Array.from(data)),
      pairs = shown === "weights" || shown === "scores";
    if (rows <= LEGIBLE && columns <= Math.max(LEGIBLE, NUMBERS)) {
      const table = new Heat({
        name: captions[`show ${shown}`],
        rows,
        columns,
        kind: shown === "weights" ? "share" : "signed",
        ...(words.length && { rowLabels: words, ...(pairs && { columnLabels: words }) }),
        toggle: pairs,
        ...(pairs && { edit: (i, j) => this.toggle({ i, j }) }),
        point: (place) => place && this.tell(place),
      });
      this.strip.replaceChildren(table.node);
      table.update({
        matrix: new Matrix(rows, columns, Float64Array.from(data)),
        size,
        write: (x) => (shown === "weights" ? fixed(x, 2) : write(x, 2, 3)),
      });
      const { i, j } = this.at;
      table.cells[Math.min(i, rows - 1)][Math.min(j, columns - 1)].tabIndex = 0;
    } else {
      const colours = pixelColours(this.root), map = element("div.sa-map", this.canvas);
      if (this.canvas.parentElement?.parentElement !== this.strip) this.strip.replaceChildren(map);
      /** @type {HTMLElement} */ (this.canvas.parentElement).style.aspectRatio =
        `${columns} / ${clamp(rows, columns / 4, columns)}`;
      paint(this.canvas, rows, columns, (i, j) => {
        const value = data[i * columns + j];
        return shown === "weights"
          ? colours.weight(0, value)
          : Number.isFinite(value)
            ? colours.difference(-value / (size || 1))
            : colours.paper;
      });
    }
    this.line.replaceChildren(...phrase(captions[pairs ? "point" : "point number"], { L, S }));
  }

  /** @param {Place} place */
  tell({ i, j }) {
    const { found, captions } = this;
    if (!found) return;
    const { rows, columns, data, shown, words, L, S } = found,
      pairs = shown === "weights" || shown === "scores",
      value = write(data[i * columns + j], 4, 4);
    const row = Math.floor((i * (shown === "dKey" || shown === "dValue" ? S : L)) / rows),
      column = pairs ? Math.floor((j * S) / columns) : j;
    const name = (/** @type {number} */ n) => (words.length ? wordOf(words[n]) : String(n));
    this.line.replaceChildren(
      ...phrase(captions[shown === "weights" ? "takes" : "cell"], {
        row: String(row),
        column: String(column),
        value,
        of: name(row),
        from: pairs ? name(column) : "",
        what: captions[`show ${shown}`],
      }),
    );
  }

  /** @param {Place} place of a pair that is closed, or opened again */
  toggle({ i, j }) {
    const { found } = this;
    if (!found || (found.shown !== "weights" && found.shown !== "scores")) return;
    this.at = { i, j };
    const pair = `${Math.floor((i * found.L) / found.rows)},${Math.floor((j * found.S) / found.columns)}`;
    if (!this.closed.delete(pair)) this.closed.add(pair);
    this.compute();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const { found, at } = this,
      to = found && !isForeign(event) ? destination(event.key, at.i, at.j, found.rows, found.columns) : null;
    if (to) this.tell((this.at = { i: to[0], j: to[1] }));
    else if (event.key === "Enter" || event.key === " ") this.toggle(at);
    else return;
    event.preventDefault();
  }

  /** @param {HTMLElement} pre whose text is copied; without a clipboard it is chosen, for Ctrl-C */
  async copy(pre) {
    getSelection()?.selectAllChildren(pre);
    await navigator.clipboard?.writeText(pre.textContent ?? "").catch(() => {});
  }
}

if (inWorker) serve(PLAYGROUND_JOBS);
else start("sa-playground", Playground);
