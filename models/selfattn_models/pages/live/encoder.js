/*
 * An encoder in the worker: a pack becomes a model of the kernel; texts become embeddings, and the weights of all heads
 * as the explorer stores them. It has no document: `encoder_page.js` asks it.
 */

import { Tokenizer } from "./tokenizers.js";
import { dot, range } from "../../../../selfattn/views/compute.js";
import { GROUP } from "../../../../selfattn/views/live/kernel.js";
import { habitsOf, isMark, PIXELS, smallMaps } from "../../../../selfattn/views/live/habits.js";
import { seen } from "../../../../selfattn/views/live/letters.js";
import { modelOf } from "../../../../selfattn/views/live/pack.js";

/** @typedef {import("../../../../selfattn/views/live/kernel.js").Kernel} Kernel */
/** @typedef {import("../../../../selfattn/views/live/kernel.js").Weights} Weights */
/** @typedef {import("../../../../selfattn/views/live/pack.js").Pack} Pack */
/** @typedef {import("../../../../selfattn/views/live/worker.js").Work} Work */

/** @typedef {{ ids: number[], tokens: string[], cut: boolean }} Read a text as the model reads it */

/** @type {Record<string, string>} poolings of the core; max and several ones are computed here */
const IN_CORE = { mean: "mean", cls: "first", lasttoken: "last" };

/** @type {(tables: { words: string[], limit: number }) => any} the tokenizer of text.WhitespaceTokenizer */
function wordsOf({ words, limit }) {
  const ids = new Map(words.map((word, n) => [word, n])), unknown = ids.get("<unk>");
  const encode = (/** @type {string} */ text) => {
    const found = text
      .trim()
      .split(/\s+/)
      .filter(Boolean)
      .map((word) => ids.get(word) ?? unknown)
      .filter((id) => id !== undefined);
    return { ids: found.slice(0, limit), cut: found.length > limit };
  };
  return {
    encode,
    spelled: (/** @type {number} */ id) => words[id],
    list: words.filter((word) => word !== "<unk>"),
  };
}

export class Encoder {
  /** @param {Kernel} kernel @param {Pack} pack */
  constructor(kernel, { name, model, tokenizer, pipeline, pad = null }) {
    this.name = name;
    this.description = model;
    this.pipeline = pipeline;
    this.pad = pad;
    this.tokenizer = tokenizer.words ? wordsOf(tokenizer) : new Tokenizer(tokenizer);
    this.heads = /** @type {number[]} */ (model.layers.map((/** @type {any} */ layer) => layer.heads));
    this.model = /** @type {any} */ (kernel.transformer(model));
  }

  /** @param {string} text @returns {Read} */
  read(text) {
    const { ids, cut } = this.tokenizer.encode(this.pipeline.prompt + text);
    return { ids, cut, tokens: ids.map((/** @type {number} */ id) => seen(this.tokenizer.spelled(id))) };
  }

  /**
   * Ids; or rows, where the core would add other positions, as `_inputs` of _text_encoder.py makes them.
   * @type {(ids: number[]) => Int32Array | Float32Array}
   */
  inputs(ids) {
    const { pad, description: { d, table, tokenTypeRow: type, positions, padRow } } = this;
    if (!ids.includes(pad)) return Int32Array.from(ids);
    const rows = new Float32Array(ids.length * d), groups = Math.ceil(d / GROUP);
    let place = 0;
    ids.forEach((id, i) => {
      const row = id === pad ? padRow : positions.subarray(place++ * d);
      for (let c = 0; c < d; c++) {
        const word =
          table instanceof Float32Array
            ? table[id * d + c]
            : Math.fround(table.values[id * d + c] * table.scale[id * groups + Math.floor(c / GROUP)]);
        rows[i * d + c] = Math.fround((type ? Math.fround(word + type[c]) : word) + row[c]);
      }
    });
    return rows;
  }

  /**
   * @param {Pick<Read, "ids">} read
   * @param {boolean} [weights]
   * @returns {{ embedding: Float32Array, weights: Float32Array }}
   */
  compute({ ids }, weights = false) {
    const { modes, scaled, width } = this.pipeline, pooling = modes.length === 1 ? IN_CORE[modes[0]] ?? null : null;
    const found = this.model.forward(this.inputs(ids), { pooling, weights });
    let embedding = pooling ? found.rows : pooled(found.rows, this.description.d, modes);
    if (scaled) embedding = scaledToOne(embedding);
    return { embedding: embedding.slice(0, width ?? undefined), weights: found.weights };
  }
}

/** @type {(rows: Float32Array, d: number, modes: string[]) => Float32Array} */
function pooled(rows, d, modes) {
  const n = rows.length / d,
    column = (/** @type {number} */ c, /** @type {(a: number, b: number) => number} */ join) =>
      range(n - 1).reduce((all, i) => join(all, rows[(i + 1) * d + c]), rows[c]);
  /** @type {Record<string, (c: number) => number>} */
  const ways = {
    cls: (c) => rows[c],
    lasttoken: (c) => rows[(n - 1) * d + c],
    mean: (c) => column(c, (a, b) => a + b) / n,
    max: (c) => column(c, Math.max),
  };
  return Float32Array.from(modes.flatMap((mode) => range(d).map(ways[mode])));
}

/** @type {(row: Float32Array) => Float32Array} */
function scaledToOne(row) {
  const length = Math.max(Math.sqrt(dot(row.length, (k) => row[k] * row[k])), 1e-12);
  return row.map((x) => x / length);
}

// --------------------------------------------------------------------------------------------- what the explorer draws

/**
 * As `stored` of views/heads.py, weights in float32.
 * @type {(texts: { tokens: string[], weights: Float32Array }[], heads: number[]) =>
 *   { texts: any[], bytes: Uint8Array }}
 */
export function storedTexts(texts, heads) {
  const all = dot(heads.length, (n) => heads[n]), whole = (/** @type {number} */ bytes) => Math.ceil(bytes / 8) * 8;
  const sizes = texts.map(({ tokens: { length: n } }) =>
    [4 * all * n * n, all * Math.min(n, PIXELS) ** 2, 2 * heads.length * n * n].map(whole),
  );
  const bytes = new ArrayBuffer(dot(texts.length, (t) => dot(3, (k) => sizes[t][k])));
  let at = 0;
  const made = texts.map(({ tokens, weights }, t) => {
    const n = tokens.length,
      side = Math.min(n, PIXELS),
      [a, b, c] = [at, at + sizes[t][0], at + sizes[t][0] + sizes[t][1]];
    at = c + sizes[t][2];
    new Float32Array(bytes, a, weights.length).set(weights);
    const means = new Uint16Array(bytes, c, heads.length * n * n), sums = new Float64Array(n * n);
    let w = 0;
    heads.forEach((own, layer) => {
      sums.fill(0);
      for (let k = 0; k < own * n * n; k++) sums[k % (n * n)] += weights[w++];
      for (let k = 0; k < n * n; k++) means[layer * n * n + k] = Math.round((65535 / own) * sums[k]);
    });
    new Uint8Array(bytes, b, all * side * side).set(smallMaps(weights, n));
    let first = 0;
    const layers = heads.map((own) => ({
      weights: { type: "f4", at: a + 4 * n * n * (first += own) - 4 * n * n * own, shape: [own, n, n] },
    }));
    return {
      queries: tokens,
      keys: tokens,
      crossed: false,
      prompt: n,
      next: null,
      marks: tokens.map(isMark),
      layers,
      small: { type: "u1", at: b, shape: [all, side, side] },
      ...(heads.length > 1 ? { means: { type: "u2", at: c, shape: [heads.length, n, n] } } : {}),
    };
  });
  return { texts: made, bytes: new Uint8Array(bytes) };
}

// ------------------------------------------------------------------------------------------------- what a page asks

const SLICE = 15; // milliseconds of a long job, after which other questions are answered
const NEAREST = 10;

/** @type {() => Record<string, Work>} the worker's jobs: load a model, look at texts, embed a collection */
export function encoderJobs() {
  /** @type {Encoder | null} */ let encoder = null;
  let /** @type {string[]} */ texts = [], /** @type {Float32Array[]} */ rows = [];
  const product = (/** @type {Float32Array} */ x, /** @type {Float32Array} */ y) => dot(x.length, (k) => x[k] * y[k]);
  const alike = (/** @type {Float32Array} */ a, /** @type {Float32Array} */ b) =>
    product(a, b) / (encoder?.pipeline.dots ? 1 : Math.sqrt(product(a, a) * product(b, b)) || 1);
  return {
    load: async ({ pack, name }, job) => {
      const next = await modelOf(pack, name, "encoder", (found) => new Encoder(job.kernel, found));
      encoder?.model.free();
      encoder = next;
      texts = rows = [];
      return {
        name: next.name,
        layers: next.heads.length,
        heads: dot(next.heads.length, (n) => next.heads[n]),
        words: next.tokenizer.list,
      };
    },
    look: ({ texts: given }) => {
      if (!encoder) return null;
      const { heads } = encoder,
        of = encoder,
        begun = performance.now(),
        /** @type {Read[]} */ read = given.map((/** @type {string} */ text) => of.read(text));
      if (!read.every(({ ids }) => ids.length)) return null;
      const found = read.map((each) => of.compute(each, true)), ms = performance.now() - begun;
      const shown = read.map(({ tokens }, t) => ({ tokens, weights: found[t].weights })),
        [first, second] = found.map(({ embedding }) => embedding);
      const near = rows
        .map((row, n) => ({ text: texts[n], score: alike(first, row) }))
        .sort((a, b) => b.score - a.score)
        .slice(0, NEAREST);
      return {
        ...storedTexts(shown, heads),
        heads,
        habits: habitsOf(shown, heads),
        near,
        ms,
        cut: read.some(({ cut }) => cut),
        alike: second ? alike(first, second) : null,
      };
    },
    embed: async ({ texts: given }, job) => {
      const known = new Map(texts.map((text, n) => [text, rows[n]])),
        of = encoder,
        /** @type {string[]} */ kept = [],
        /** @type {Float32Array[]} */ made = [];
      let since = performance.now();
      if (!of) return null;
      for (const text of given) {
        const read = known.has(text) ? null : of.read(text);
        if (read && !read.ids.length) continue;
        kept.push(text);
        made.push(known.get(text) ?? of.compute(/** @type {Read} */ (read)).embedding);
        if (performance.now() - since < SLICE) continue;
        job.progress({ done: made.length, all: given.length });
        await job.pause();
        since = performance.now();
        if (of !== encoder) return null;
        if (job.stopped) break;
      }
      [texts, rows] = [kept, made];
      return { all: kept.length };
    },
  };
}
