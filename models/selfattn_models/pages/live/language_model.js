/*
 * A language model in the worker: the letters' GPT of the page, or a GGUF file of the Llama family, whose weights are
 * rounded to int8. It reads a text, says what comes next, and writes. It has no document: `language_page.js` asks it.
 */

import { habitsOf, storedTexts } from "./encoder.js";
import { Fault, npz, readGguf, readModel } from "./readers.js";
import { ggufTokenizer } from "./tokenizers.js";
import { dot, range } from "../../../../selfattn/views/compute.js";
import { roundToInt8 } from "../../../../selfattn/views/live/kernel.js";
import { describeLetters, drawingOf, drawn, lettersOf, seen } from "../../../../selfattn/views/live/letters.js";

/** @typedef {import("../../../../selfattn/views/live/letters.js").Drawing} Drawing */
/** @typedef {import("../../../../selfattn/views/live/letters.js").Letters} Letters */
/** @typedef {import("../../../../selfattn/views/live/letters.js").Spelling} Spelling */
/** @typedef {import("../../../../selfattn/views/live/worker.js").Work} Work */

/**
 * @typedef {{ description: any, tokenizer: Spelling, ends: number[], most: number }} Language
 */

const LONGEST_TEXT = 1024; // tokens of a GGUF file's cache
export const MOST_SHOWN = 128; // tokens whose heads are drawn
const LIKELY = 10; // tokens that are listed

/**
 * int8 times the scales of its rows.
 * @type {(array: ArrayLike<number>, out: number, into: number, scale: ArrayLike<number>) => Float32Array}
 */
const unscaled = (array, out, into, scale) =>
  Float32Array.from({ length: out * into }, (_, n) => array[n] * scale[Math.floor(n / into)]);

/** @type {(entry: any, settings: Letters) => Promise<Language>} the arrays of views/gpt.py */
export async function readLetters(entry, settings) {
  const arrays = new Map(), found = await npz(entry);
  for (const [name, tensor] of found) {
    const scale = found.get(`${name}_scale`), data = await tensor.read();
    arrays.set(name, scale ? unscaled(data, tensor.shape[0], tensor.shape[1], await scale.read()) : data);
  }
  return {
    description: describeLetters((name) => arrays.get(name), settings),
    tokenizer: lettersOf(settings.alphabet),
    ends: [],
    most: settings.context,
  };
}

/**
 * Angles as engine/rope.py has them.
 * @type {(width: number, theta: number, longest: number) =>
 *   { cos: Float32Array, sin: Float32Array, width: number, interleaved: boolean }}
 */
function rotaryTables(width, theta, longest) {
  const half = width / 2,
    frequencies = Float32Array.from(
      { length: half },
      (_, i) => 1 / Math.fround(Math.fround(theta) ** Math.fround((2 * i) / width)),
    );
  const angle = (/** @type {number} */ n) => Math.fround(Math.floor(n / half) * frequencies[n % half]);
  return {
    cos: Float32Array.from({ length: longest * half }, (_, n) => Math.cos(angle(n))),
    sin: Float32Array.from({ length: longest * half }, (_, n) => Math.sin(angle(n))),
    width,
    interleaved: false,
  };
}

/**
 * A file of the Llama family, as models.load(path, dtype="int8") reads it.
 * @type {(entry: any, progress: (part: number) => void) => Promise<Language>}
 */
export async function readLlama(entry, progress) {
  const { metadata, tensors } = await readGguf(entry), name = metadata.get("general.architecture");
  const of = (/** @type {string} */ key, /** @type {any} */ otherwise) => metadata.get(`${name}.${key}`) ?? otherwise;
  const scaled = [...metadata.keys()].find(
    (key) => /\.rope\.scaling\.|sliding_window|\.expert_count/.test(key) && ![0, "none"].includes(metadata.get(key)),
  );
  if (name !== "llama" || scaled) throw new Fault("language architecture", { name: scaled ?? name });
  const tokenizer = ggufTokenizer(metadata, entry.path),
    [d, layers, heads, hidden] = ["embedding_length", "block_count", "attention.head_count", "feed_forward_length"].map(
      (key) => of(key),
    );
  const keyHeads = of("attention.head_count_kv", heads),
    width = d / heads,
    eps = of("attention.layer_norm_rms_epsilon", 1e-5),
    most = Math.min(of("context_length", LONGEST_TEXT), LONGEST_TEXT);
  if (of("rope.dimension_count", width) !== width) {
    throw new Fault("language architecture", { name: `rope.dimension_count ${of("rope.dimension_count")}` });
  }
  const unread = new Set(tensors.keys());
  const read = async (/** @type {string} */ which, /** @type {number[]} */ ...shape) => {
    const tensor = tensors.get(which);
    if (!tensor) throw new Fault("no tensor", { name: which });
    if (String(tensor.shape) !== String(shape)) {
      throw new Fault("shape", { name: which, shape: tensor.shape.join("×"), expected: shape.join("×") });
    }
    unread.delete(which);
    progress(1 - unread.size / tensors.size);
    return tensor.read();
  };
  const matrix = async (/** @type {string} */ which, /** @type {number} */ out, /** @type {number} */ into) =>
    roundToInt8(/** @type {Float32Array} */ (await read(which, out, into)), into);
  /**
   * Rows as Transformers has them: llama.cpp rotates pairs that are neighbours.
   * @type {(which: string, rows: number) => Promise<any>}
   */
  const turned = async (which, rows) => {
    const stored = await read(which, rows * width, d), half = width / 2, own = new Float32Array(stored.length);
    for (let r = 0; r < rows * width; r++) {
      const head = Math.floor(r / width), i = r % width, from = head * width + 2 * (i % half) + Math.floor(i / half);
      own.set(stored.subarray(from * d, (from + 1) * d), r * d);
    }
    return roundToInt8(own, d);
  };
  const rotary = rotaryTables(width, of("rope.freq_base", 10000), most),
    made = [],
    vocabulary = tensors.get("token_embd.weight")?.shape[0] ?? 0;
  for (const n of range(layers)) {
    const own = (/** @type {string} */ part) => `blk.${n}.${part}.weight`,
      bare = (/** @type {any} */ weight) => ({ weight, bias: null });
    made.push({
      heads,
      keyHeads,
      width,
      hidden,
      eps: [eps, eps],
      rms: [true, true],
      normFirst: true,
      causal: true,
      scale: 1 / Math.sqrt(width),
      activation: "silu",
      rotary,
      weights: "int8",
      parameters: {
        query: bare(await turned(own("attn_q"), heads)),
        key: bare(await turned(own("attn_k"), keyHeads)),
        value: bare(await matrix(own("attn_v"), keyHeads * width, d)),
        output: bare(await matrix(own("attn_output"), d, d)),
        attentionNorm: bare(await read(own("attn_norm"), d)),
        up: bare(await matrix(own("ffn_up"), hidden, d)),
        gate: bare(await matrix(own("ffn_gate"), hidden, d)),
        down: bare(await matrix(own("ffn_down"), d, hidden)),
        feedForwardNorm: bare(await read(own("ffn_norm"), d)),
      },
    });
  }
  const description = {
    d,
    vocabulary,
    table: await matrix("token_embd.weight", vocabulary, d),
    tableKind: "int8",
    layers: made,
    finalNorm: { weight: await read("output_norm.weight", d), bias: null, eps, rms: true },
    output: tensors.has("output.weight")
      ? { weight: await matrix("output.weight", vocabulary, d), bias: null }
      : "table",
  };
  // Such as biases, without which its numbers would be wrong.
  for (const left of unread) throw new Fault("language architecture", { name: left });
  const ends = ["eos", "eot", "eom"]
    .map((key) => metadata.get(`tokenizer.ggml.${key}_token_id`))
    .filter((id) => id !== undefined);
  return { description, tokenizer, ends, most };
}

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
    load: async ({ given, settings }, job) => {
      const files = await readModel(given),
        [[path, entry]] = files,
        found = path.endsWith(".gguf")
          ? await readLlama(entry, job.progress)
          : settings && path.endsWith(".npz")
            ? await readLetters(entry, settings)
            : null;
      if (!found) throw new Fault("no language model", { file: path });
      const next = job.kernel.transformer(found.description);
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
