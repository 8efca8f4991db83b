/*
 * A language model of a pack in the worker: it reads a text, says what comes next, and writes; heads can be off, and
 * weights changed. It has no document: `gpt_page.js` asks it.
 */

import { dot } from "../compute.js";
import { stopsOf } from "./gpt_tour.js";
import { habitsOf, smallMaps } from "./habits.js";
import { drawingOf, drawn, seen } from "./letters.js";
import { modelOf } from "./pack.js";

/** @typedef {import("./kernel.js").Kernel} Kernel */
/** @typedef {import("./letters.js").Drawing} Drawing */
/** @typedef {import("./letters.js").Spelling} Spelling */
/** @typedef {import("./worker.js").Work} Work */
/**
 * Heads that are off, as [layer, head], and weights that are changed, as [number of the parameter, place, value].
 * @typedef {{ off: [number, number][], weights: [number, number, number][] }} Changes
 */

const MOST_SHOWN = 128; // tokens whose heads are drawn
const LIKELY = 10; // tokens that are listed
const COMPARED = 60; // tokens that the trained model and the changed one write
const PACE = 40; // milliseconds a token, so that one can follow a small model

export class LanguageModel {
  /** @type {any} a copy of the trained model, with changes */ copy = null;
  made = ""; // the changes of the copy

  /** @param {Kernel} kernel @param {any} pack @param {(tables: any) => Spelling} spelling */
  constructor(kernel, { name, model, tokenizer, ends = [], most }, spelling) {
    /** @type {string} */ this.name = name;
    this.kernel = kernel;
    this.tokenizer = spelling(tokenizer);
    /** @type {any} */ this.trained = kernel.transformer(model);
    const { d, layers } = model;
    /** @type {number} */ this.d = d;
    /** @type {any[]} */ this.layers = layers;
    /** @type {number[]} */ this.ends = ends;
    /** @type {number} */ this.most = most;
    this.heads = this.layers.map(({ heads }) => /** @type {number} */ (heads));
    /** whether the weights lie as they are, so that they can be changed */
    this.open = this.layers.every(({ weights, parameters }) => weights === "float32" && parameters.output);
    this.copyOf = () => kernel.transformer(model);
  }

  free() {
    this.trained.free();
    this.copy?.free();
  }

  /**
   * Matrices that can be changed.
   * @returns {{ n: number, name: string, columns: number, rows: number }[]}
   */
  matrices() {
    const parameters = /** @type {any[]} */ (this.open ? this.trained.parameters : []);
    return parameters.flatMap(({ parameter, layer, length }, n) => {
      const { heads, width, hidden } = this.layers[layer] ?? {},
        inputs = /** @type {Record<string, number>} */ ({ output: heads * width, down: hidden }),
        columns = (layer < 0 ? 0 : inputs[parameter]) || this.d;
      return /bias|norm/i.test(parameter)
        ? []
        : [{ n, name: layer < 0 ? parameter : `layers.${layer}.${parameter}`, columns, rows: length / columns }];
    });
  }

  /** @type {(of: any, n: number) => Float32Array} the numbers of a parameter in the kernel's memory */
  numbers({ parameters }, n) {
    return new Float32Array(this.kernel.view.buffer, parameters[n].at, parameters[n].length);
  }

  /** @type {(changes: Changes) => any} the model with these changes; a head that is off adds nothing to the output */
  with({ off, weights }) {
    if (!off.length && !weights.length) return this.trained;
    const wanted = JSON.stringify([off, weights]);
    const copy = (this.copy ??= this.copyOf());
    if (wanted === this.made) return copy;
    this.made = wanted;
    copy.parameters.forEach((/** @type {unknown} */ _, /** @type {number} */ n) =>
      this.numbers(copy, n).set(this.numbers(this.trained, n)),
    );
    for (const [n, place, value] of weights) this.numbers(copy, n)[place] = value;
    for (const [layer, head] of off) {
      const { heads, width } = this.layers[layer],
        output = this.numbers(
          copy,
          copy.parameters.findIndex(
            (/** @type {any} */ each) => each.layer === layer && each.parameter === "output",
          ),
        );
      for (let at = head * width; at < output.length; at += heads * width) output.fill(0, at, at + width);
    }
    return copy;
  }

  /** @param {number} id */
  shown(id) {
    return seen(this.tokenizer.spelled(id));
  }

  /**
   * The tokens of a text, the last ones if there are too many; one place is left for a token to come.
   * @type {(text: string) => { ids: number[], unknown: string[], cut: boolean }}
   */
  read(text) {
    const { ids, unknown = [] } = this.tokenizer.encode(text), kept = ids.slice(-Math.max(1, this.most - 1));
    return { ids: kept, unknown, cut: kept.length < ids.length };
  }

  /** @type {(model: any, ids: number[]) => Float32Array} what a model says after tokens */
  logits(model, ids) {
    return model.logits(model.forward(ids).rows.slice(-this.d));
  }

  /**
   * The likeliest tokens and their probabilities, as `how` draws them; at temperature 0 as at 1.
   * @type {(logits: Float32Array, how: Drawing, most?: number) => { id: number, token: string, probability: number }[]}
   */
  likely(logits, { temperature, topP }, most = LIKELY) {
    const p = drawingOf(logits, { temperature: temperature || 1, topP });
    return [...p.keys()]
      .sort((a, b) => p[b] - p[a])
      .slice(0, most)
      .filter((id) => p[id] > 0)
      .map((id) => ({ id, token: this.shown(id), probability: p[id] }));
  }

  /**
   * Tokens that a model writes after others, one by one, with the weights of its heads for the token before.
   * @type {(model: any, ids: number[], most: number, how: Drawing) =>
   *   Generator<{ id: number, weights?: Float32Array, keys: number }>}
   */
  *writing(model, ids, most, how) {
    const room = Math.min(this.most, ids.length + most), cache = model.cache(room);
    try {
      for (let input = ids, keys = ids.length; keys < room; keys++) {
        const { rows, weights } = model.forward(input, { cache, weights: input !== ids }),
          id = drawn(drawingOf(model.logits(rows.slice(-this.d)), how), Math.random());
        if (this.ends.includes(id)) return;
        input = [id];
        yield { id, weights, keys };
      }
    } finally {
      cache.free();
    }
  }
}

/**
 * The worker's jobs: read a pack, look at a text, say what comes next, write, compare, show a matrix, ask questions.
 * @type {(spelling: (tables: any) => Spelling) => Record<string, Work>} spelling: a pack's tokenizer
 */
export function gptJobs(spelling) {
  /** @type {LanguageModel | null} */ let language = null;
  let /** @type {any} */ model = null, rows = new Float32Array(), ids = /** @type {number[]} */ ([]);
  const next = (/** @type {number} */ place, /** @type {Drawing} */ how) => {
    const of = /** @type {LanguageModel} */ (language),
      logits = model.logits(rows.slice(place * of.d, (place + 1) * of.d));
    const likely = of.likely(logits, how).map((each) => ({ ...each, came: each.id === ids[place + 1] }));
    return {
      likely,
      others: {
        n: logits.length - likely.length,
        probability: Math.max(0, 1 - dot(likely.length, (n) => likely[n].probability)),
      },
    };
  };
  return {
    load: async ({ pack, name }, { kernel }) => {
      const read = await modelOf(pack, name, "language", (found) => new LanguageModel(kernel, found, spelling));
      language?.free();
      language = read;
      return {
        name: read.name,
        heads: read.heads,
        most: read.most,
        matrices: read.matrices(),
        parameters: read.trained.size,
      };
    },
    look: ({ text, added, place, how, changes }) => {
      if (!language) return null;
      const begun = performance.now(), read = language.read(text), given = read.ids.length;
      if (!given) return null;
      ids = [...read.ids, ...added];
      model = language.with(changes);
      const tokens = ids.map((id) => /** @type {LanguageModel} */ (language).shown(id)),
        found = model.forward(ids, { weights: ids.length <= MOST_SHOWN }),
        at = place < 0 ? ids.length + place : Math.min(place, ids.length - 1),
        { weights } = found;
      rows = found.rows;
      return {
        ...read,
        tokens,
        given,
        place: at,
        next: next(at, how),
        ...(weights && {
          weights,
          small: smallMaps(weights, tokens.length),
          habits: habitsOf([{ tokens, weights }], language.heads, true),
        }),
        ms: performance.now() - begun,
      };
    },
    next: ({ place, how }) => (place * (language?.d ?? 0) < rows.length ? next(place, how) : null),
    write: async ({ text, added, how, changes, most, head }, job) => {
      const of = language, begin = of ? [...of.read(text).ids, ...added] : [];
      if (!of || !begin.length) return null;
      let n = 0, ms = 0, since = performance.now();
      for (const { id, weights, keys } of of.writing(of.with(changes), begin, most, how)) {
        n++;
        ms += performance.now() - since;
        job.progress({ id, token: of.shown(id), weights: weights?.slice(head * keys, (head + 1) * keys) });
        if (most > 1) await new Promise((on) => setTimeout(on, since + PACE - performance.now()));
        if (job.stopped || of !== language) break;
        since = performance.now();
      }
      return { n, ms };
    },
    compare: async ({ text, changes }, job) => {
      const of = language, prompt = of?.open ? of.read(text).ids : [];
      if (!of || !prompt.length) return null;
      const both = [];
      for (const each of [of.trained, of.with(changes)]) {
        const written = [];
        for (const { id } of of.writing(each, prompt, COMPARED, { temperature: 0, topP: 1 })) {
          written.push(id);
          await job.pause();
          if (job.stopped || of !== language) return null;
        }
        both.push(written);
      }
      const [before, now] = both,
        differ = before.findIndex((id, k) => id !== now[k]),
        common = differ < 0 ? before.length : differ,
        { tokenizer } = of;
      return {
        prompt: tokenizer.decode(prompt),
        differ,
        parts: both.map((all) => [all.slice(0, common), all.slice(common)].map((part) => tokenizer.decode(part))),
      };
    },
    matrix: ({ n, changes }) => language && { numbers: language.numbers(language.with(changes), n).slice() },
    questions: ({ text, captions }) => language && stopsOf(language, language.read(text).ids, captions),
  };
}
