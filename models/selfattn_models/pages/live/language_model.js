/*
 * A language model of a pack in the worker: it reads a text, says what comes next, and writes. It has no document:
 * `language_page.js` asks it.
 */

import { habitsOf, storedTexts } from "./encoder.js";
import { Tokenizer } from "./tokenizers.js";
import { dot } from "../../../../selfattn/views/compute.js";
import { drawingOf, drawn, lettersOf, seen } from "../../../../selfattn/views/live/letters.js";
import { modelOf } from "../../../../selfattn/views/live/pack.js";

/** @typedef {import("../../../../selfattn/views/live/letters.js").Drawing} Drawing */
/** @typedef {import("../../../../selfattn/views/live/letters.js").Spelling} Spelling */
/** @typedef {import("../../../../selfattn/views/live/worker.js").Work} Work */

/**
 * @typedef {{ description: any, tokenizer: Spelling, ends: number[], most: number }} Language
 */

export const MOST_SHOWN = 128; // tokens whose heads are drawn
const LIKELY = 10; // tokens that are listed

/** @type {() => Record<string, Work>} the worker's jobs: load a model, look at a text, say what comes next, write */
export function languageJobs() {
  /** @type {Language | null} */ let language = null;
  /** @type {any} */ let model = null;
  let /** @type {Float32Array} */ logits = new Float32Array();
  const last = (/** @type {Float32Array} */ rows) => rows.slice(rows.length - (language?.description.d ?? 0));
  const likely = (/** @type {Drawing} */ how) => {
    const p = drawingOf(logits, how),
      order = [...p.keys()]
        .sort((a, b) => p[b] - p[a])
        .slice(0, LIKELY)
        .filter((n) => p[n] > 0),
      listed = dot(order.length, (k) => p[order[k]]);
    return {
      p,
      next: {
        likely: order.map((n) => ({
          token: seen(language?.tokenizer.spelled(n) ?? ""),
          probability: p[n],
          came: false,
        })),
        others: { n: p.length - order.length, probability: Math.max(0, 1 - listed) },
      },
    };
  };
  const read = (/** @type {string} */ text) =>
    (language?.tokenizer.encode(text).ids ?? []).slice(-(language?.most ?? 0) + 1);
  return {
    load: async ({ pack, name }, job) => {
      const [found, next] = await modelOf(pack, name, "language", ({ model, tokenizer, ends = [], most = 0 }) => [
        {
          description: model,
          tokenizer: tokenizer.letters ? lettersOf(tokenizer.letters) : new Tokenizer(tokenizer),
          ends,
          most,
        },
        job.kernel.transformer(model),
      ]);
      model?.free();
      [language, model] = [found, next];
      return {
        layers: found.description.layers.length,
        heads: dot(found.description.layers.length, (n) => found.description.layers[n].heads),
      };
    },
    look: ({ text, how }) => {
      if (!language) return null;
      const ids = read(text),
        { ids: all, unknown = [] } = language.tokenizer.encode(text),
        shown = ids.length <= MOST_SHOWN,
        begun = performance.now();
      if (!ids.length) return null;
      const { rows, weights } = model.forward(ids, { weights: shown }),
        heads = language.description.layers.map((/** @type {any} */ layer) => layer.heads);
      logits = model.logits(last(rows));
      const tokens = ids.map((id) => seen(language?.tokenizer.spelled(id) ?? "")), ms = performance.now() - begun;
      const drawn = shown
        ? { ...storedTexts([{ tokens, weights }], heads), habits: habitsOf([{ tokens, weights }], heads, true) }
        : {};
      return {
        ...drawn,
        heads,
        tokens: tokens.length,
        ms,
        unknown,
        cut: all.length > ids.length,
        next: likely(how).next,
      };
    },
    next: ({ how }) => (logits.length ? likely(how).next : null),
    write: async ({ text, how, most }, job) => {
      const ids = read(text), /** @type {number[]} */ added = [];
      if (!language || !ids.length) return null;
      const { tokenizer, ends } = language,
        own = model,
        room = Math.min(language.most, ids.length + most),
        cache = own.cache(room),
        begun = performance.now();
      try {
        let input = ids;
        while (ids.length + added.length < room && !job.stopped && own === model) {
          const { rows, weights } = own.forward(input, { cache, weights: added.length > 0 });
          logits = own.logits(last(rows));
          const { p, next } = likely(how), keys = ids.length + added.length, id = drawn(p, Math.random());
          const taken =
            weights &&
            Float64Array.from(
              { length: keys },
              (_, j) => dot(weights.length / keys, (h) => weights[h * keys + j]) / (weights.length / keys),
            );
          if (ends.includes(id)) break;
          added.push(id);
          input = [id];
          job.progress({
            written: tokenizer.decode(added),
            next,
            taken: taken && [...taken],
            tokens: [...ids, ...added.slice(0, -1)].map((each) => seen(tokenizer.spelled(each))),
          });
          await job.pause();
        }
      } finally {
        cache.free();
      }
      return { tokens: added.length, ms: performance.now() - begun };
    },
  };
}
