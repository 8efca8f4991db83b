/*
 * An encoder in the worker: a folder's files become the description that `Kernel.transformer` takes; texts become
 * embeddings, and the weights of all heads as the explorer stores them. It has no document: `encoder_page.js` asks it.
 */

import { Fault, readJson, readModel, safetensors } from "./readers.js";
import { tokenizerOf } from "./tokenizers.js";
import { dot, range } from "../../../../selfattn/views/compute.js";
import { GROUP, roundToInt8 } from "../../../../selfattn/views/live/kernel.js";
import { seen } from "../../../../selfattn/views/live/letters.js";

/** @typedef {import("../explorer_parts.js").Habit} Habit */
/** @typedef {import("../../../../selfattn/views/live/kernel.js").Kernel} Kernel */
/** @typedef {import("../../../../selfattn/views/live/kernel.js").Weights} Weights */
/** @typedef {import("../../../../selfattn/views/live/worker.js").Work} Work */

/** @typedef {{ ids: number[], types: number[], tokens: string[], cut: boolean }} Read a text as the model reads it */

const SPECIAL = /^(\[.+\]|<.+>)$/su, NO_WORD = /^[^\p{L}\p{N}_]+$/u;
/** @type {Record<string, string>} */
const ENCODER_ACTIVATIONS = {
  gelu: "gelu",
  gelu_python: "gelu",
  gelu_new: "gelu_tanh",
  gelu_pytorch_tanh: "gelu_tanh",
  gelu_fast: "gelu_tanh",
  relu: "relu",
  silu: "silu",
  swish: "silu",
};
const BERT = {
  prefix: "bert.", layer: "encoder.layer.", typed: true, pads: false,
  sizes: ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"],
  fields: {
    query: "attention.self.query",
    key: "attention.self.key",
    value: "attention.self.value",
    output: "attention.output.dense",
    attentionNorm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    feedForwardNorm: "output.LayerNorm",
  },
};
const ROBERTA = { ...BERT, prefix: "roberta.", pads: true };
/** @type {Record<string, typeof BERT>} by model_type; the names are those of selfattn/models/bert.py */
const ARCHITECTURES = {
  bert: BERT, roberta: ROBERTA, "xlm-roberta": ROBERTA, camembert: ROBERTA,
  distilbert: {
    prefix: "distilbert.",
    layer: "transformer.layer.",
    typed: false,
    pads: false,
    sizes: ["dim", "n_layers", "n_heads", "hidden_dim", "activation"],
    fields: {
      query: "attention.q_lin",
      key: "attention.k_lin",
      value: "attention.v_lin",
      output: "attention.out_lin",
      attentionNorm: "sa_layer_norm",
      up: "ffn.lin1", down: "ffn.lin2", feedForwardNorm: "output_layer_norm",
    },
  },
};
const OFF = { is_decoder: false, add_cross_attention: false, position_embedding_type: "absolute" };
/** @type {Record<string, string>} poolings of the core; max and several ones are computed here */
const IN_CORE = { mean: "mean", cls: "first", lasttoken: "last" };
/** @type {Record<string, string>} */
const OLD_MODES = {
  pooling_mode_cls_token: "cls",
  pooling_mode_max_tokens: "max",
  pooling_mode_mean_tokens: "mean",
  pooling_mode_lasttoken: "lasttoken",
};

/**
 * @param {Record<string, any>} values
 * @param {string} name
 * @param {any} [otherwise]
 * @param {(value: any) => boolean} [fits]
 * @returns {any} a setting, by default a size; one that does not fit is a fault
 */
function setting(values, name, otherwise, fits = (value) => Number.isInteger(value) && value >= 0) {
  const value = values[name] ?? otherwise;
  if (!fits(value)) throw new Fault("setting", { name, value: JSON.stringify(value) ?? "?" });
  return value;
}

/** The tensors of a folder, as parameters: float32, rounded to int8 if asked for, or int8 as they are stored. */
class WeightReader {
  /**
   * @param {Map<string, { kind: string, shape: number[], data: any }>} all
   * @param {string} prefix
   * @param {string} kind
   */
  constructor(all, prefix, kind) {
    this.all = all;
    this.prefix = prefix;
    this.kind = [...all.values()].some((tensor) => tensor.kind === "I8") ? "int8" : kind;
  }

  /** @type {(name: string, ...shape: number[]) => Float32Array} */
  array(name, ...shape) {
    const found = this.all.get(name) ?? this.all.get(this.prefix + name);
    if (!found) throw new Fault("no tensor", { name });
    if (String(found.shape) !== String(shape)) {
      throw new Fault("shape", { name, shape: found.shape.join("×"), expected: shape.join("×") });
    }
    return found.data;
  }

  /** @type {(name: string, out: number, into: number) => Weights} a matrix that is multiplied, or the table of words */
  weight(name, out, into) {
    const data = this.array(name, out, into);
    if (data instanceof Int8Array) {
      return { values: data, scale: this.array(`${name}_scale`, out, Math.ceil(into / GROUP)) };
    }
    return this.kind === "int8" ? roundToInt8(data, into) : data;
  }

  /**
   * @param {string} name
   * @param {number} out
   * @param {number} [into]
   * @returns {{ weight: any, bias: Float32Array }} a projection; without `into` a norm
   */
  both(name, out, into) {
    return {
      weight: into === undefined ? this.array(`${name}.weight`, out) : this.weight(`${name}.weight`, out, into),
      bias: this.array(`${name}.bias`, out),
    };
  }
}

/**
 * Null for an nn.EmbeddingModel; one that the page does not run is a fault.
 * @type {(config: Record<string, any>) => typeof BERT | null}
 */
function architectureOf(config) {
  if (config.format === "selfattn.EmbeddingModel") return null;
  const classifier = [config.architectures ?? []].flat().find((name) => /ForSequenceClassification$/.test(name));
  if (classifier || !Object.hasOwn(ARCHITECTURES, config.model_type)) {
    throw new Fault("architecture", { name: classifier ?? config.model_type ?? "?" });
  }
  return ARCHITECTURES[config.model_type];
}

/**
 * What `Kernel.transformer` takes; and `tables`, which are added to words where the core would add other rows: see
 * `Encoder.inputs`.
 * @type {(config: Record<string, any>, all: Map<string, any>, kind: string) => any}
 */
function describeEncoder(config, all, kind) {
  const architecture = architectureOf(config);
  if (!architecture) return describeSmall(config, new WeightReader(all, "", "float32"));
  const { prefix, layer, typed, pads, sizes, fields } = architecture, p = new WeightReader(all, prefix, kind);
  for (const [name, off] of Object.entries(OFF)) setting(config, name, off, (value) => value === off);
  const [d, layers, heads, hidden] = sizes.slice(0, 4).map((name) => setting(config, name));
  setting(config, sizes[2], 0, (value) => value > 0 && d % value === 0);
  const activation =
    ENCODER_ACTIVATIONS[setting(config, sizes[4], "gelu", (value) => Object.hasOwn(ENCODER_ACTIVATIONS, value))];
  const vocabulary = setting(config, "vocab_size"),
    rows = setting(config, "max_position_embeddings", 512),
    eps = (typed && config.layer_norm_eps) || 1e-12;
  const pad = pads ? setting(config, "pad_token_id", 1) : null, first = pad === null ? 0 : pad + 1;
  const positions = p.array("embeddings.position_embeddings.weight", rows, d);
  const types = typed
    ? p.array("embeddings.token_type_embeddings.weight", setting(config, "type_vocab_size", 2), d)
    : null;
  return {
    d,
    vocabulary,
    table: p.weight("embeddings.word_embeddings.weight", vocabulary, d),
    tableKind: p.kind,
    longest: rows - first,
    pad,
    first,
    tables: { types, positions },
    positions: positions.subarray(first * d),
    tokenTypeRow: types?.subarray(0, d),
    embeddingNorm: { ...p.both("embeddings.LayerNorm", d), eps, rms: false },
    layers: range(layers).map((n) =>
      layerOf(
        d,
        heads,
        hidden,
        eps,
        p.kind,
        activation,
        Object.fromEntries(
          Object.entries(fields).map(([field, name]) => [
            field,
            p.both(
              `${layer}${n}.${name}`,
              field === "up" ? hidden : d,
              /Norm$/.test(field) ? undefined : field === "down" ? hidden : d,
            ),
          ]),
        ),
      ),
    ),
  };
}

/**
 * @type {(d: number, heads: number, hidden: number, eps: number, weights: string, activation: string,
 *   parameters: Record<string, any>) => any}
 */
function layerOf(d, heads, hidden, eps, weights, activation, parameters) {
  const width = d / heads;
  return {
    heads,
    keyHeads: heads,
    width,
    hidden,
    eps: [eps, eps],
    rms: [false, false],
    normFirst: false,
    causal: false,
    scale: 1 / Math.sqrt(width),
    activation,
    weights,
    parameters,
  };
}

/**
 * The description of an nn.EmbeddingModel, with its sines and cosines.
 * @type {(config: Record<string, any>, p: WeightReader) => any}
 */
function describeSmall(config, p) {
  const [vocabulary, d, longest, layers, heads] = [
    "vocab_size",
    "embedding_dim",
    "max_seq_len",
    "num_layers",
    "num_heads",
  ].map((name) => setting(config, name));
  setting(config, "num_heads", 0, (value) => value > 0 && d % value === 0);
  const angle = (/** @type {number} */ n) => Math.floor(n / d) * Math.exp((n % d & ~1) * (-Math.log(10000) / d));
  const positions = Float32Array.from({ length: longest * d }, (_, n) =>
    n % 2 ? Math.cos(angle(n)) : Math.sin(angle(n)),
  );
  return {
    d,
    vocabulary,
    table: p.array("embedding_layer.weight", vocabulary, d),
    tableKind: "float32",
    longest,
    pad: null,
    first: 0,
    tables: { types: null, positions },
    positions,
    layers: range(layers).map((n) => {
      const name = `attention_layers.${n}.`;
      return layerOf(d, heads, 0, 1e-5, "float32", "gelu", {
        query: p.both(`${name}query`, d, d),
        key: p.both(`${name}key`, d, d),
        value: p.both(`${name}value`, d, d),
        attentionNorm: p.both(`${name}ln`, d),
      });
    }),
  };
}

/**
 * What sentence-transformers does before and after the transformer: see _pipeline.py.
 * @type {(files: Map<string, any>, modules: any) => Promise<any>}
 */
async function readPipeline(files, modules) {
  const read = async (/** @type {string} */ path) => (files.has(path) ? readJson(files.get(path)) : {});
  const inner = modules?.[0]?.path ? `${modules[0].path}/` : "";
  const [limits, words] = [
    await read(`${inner}sentence_bert_config.json`),
    await read("config_sentence_transformers.json"),
  ];
  let modes = ["mean"], scaled = false;
  for (const { type, path } of modules?.slice(1) ?? []) {
    const kind = String(type).split(".").at(-1);
    if (kind === "Pooling") {
      const config = await read(`${path}/config.json`), old = Object.keys(OLD_MODES).filter((name) => config[name]);
      modes = [config.pooling_mode ?? (old.length ? old.map((name) => OLD_MODES[name]) : "mean")].flat();
      for (const mode of modes) {
        setting({ mode }, "mode", "", (value) => value === "max" || Object.hasOwn(IN_CORE, value));
      }
      if (words.default_prompt_name) setting(config, "include_prompt", true, (value) => value === true);
    } else if (kind === "Normalize") scaled = true;
    else if (kind !== "Dropout") throw new Fault("architecture", { name: kind ?? "?" });
  }
  setting(words, "similarity_fn_name", "cosine", (value) => value === "cosine" || value === "dot");
  return {
    inner,
    modes,
    scaled,
    longest: limits.max_seq_length,
    lowercase: limits.do_lower_case,
    prompt: words.prompts?.[words.default_prompt_name] ?? "",
    width: words.truncate_dim ?? undefined,
    dots: words.similarity_fn_name === "dot",
  };
}

/** @type {(words: string[]) => any} the tokenizer of text.WhitespaceTokenizer */
function wordsOf(words) {
  const ids = new Map(words.map((word, n) => [word, n])), unknown = ids.get("<unk>");
  const encode = (/** @type {string} */ text) => {
    const found = text
      .trim()
      .split(/\s+/)
      .filter(Boolean)
      .map((word) => ids.get(word) ?? unknown)
      .filter((id) => id !== undefined);
    return { ids: found.slice(0, tokenizer.limit), types: found.map(() => 0), cut: found.length > tokenizer.limit };
  };
  const tokenizer = {
    limit: Infinity,
    encode,
    spelled: (/** @type {number} */ id) => words[id],
    list: words.filter((word) => word !== "<unk>"),
  };
  return tokenizer;
}

export class Encoder {
  /**
   * @param {string} name
   * @param {any} description
   * @param {any} model of the kernel
   * @param {any} tokenizer
   * @param {any} pipeline
   */
  constructor(name, description, model, tokenizer, pipeline) {
    this.name = name;
    this.description = description;
    this.model = model;
    this.tokenizer = tokenizer;
    this.pipeline = pipeline;
    this.heads = /** @type {number[]} */ (description.layers.map((/** @type {any} */ layer) => layer.heads));
  }

  /**
   * @param {Kernel} kernel
   * @param {Map<string, any>} files
   * @param {string} name
   * @param {string} kind of the weights, if they are stored in float32
   * @param {(part: number) => void} [progress]
   */
  static async of(kernel, files, name, kind = "int8", progress = () => {}) {
    const pipeline = await readPipeline(
        files,
        files.has("modules.json") ? await readJson(files.get("modules.json")) : null,
      ),
      { inner } = pipeline;
    const [about, weights] = ["config.json", "model.safetensors"].map((file) => files.get(inner + file));
    if (!about || !weights) throw new Fault("no model", { file: name });
    const config = await readJson(about);
    architectureOf(config);
    const stored = await safetensors(weights), all = new Map();
    for (const [own, { kind: type, shape, read }] of stored) {
      if (/^(F|BF|I8)/.test(type)) all.set(own, { kind: type, shape, data: await read() });
      progress(all.size / stored.size);
    }
    const description = describeEncoder(config, all, kind),
      own = new Map([...files].map(([path, file]) => [path.startsWith(inner) ? path.slice(inner.length) : path, file]));
    const tokenizer =
      config.tokenizer === "whitespace"
        ? wordsOf(await readJson(files.get("vocabulary.json")))
        : await tokenizerOf(own, config);
    tokenizer.limit = Math.min(pipeline.longest ?? Infinity, description.longest, tokenizer.limit ?? Infinity);
    return new Encoder(name, description, kernel.transformer(description), tokenizer, pipeline);
  }

  /** @param {string} text @param {string} [pair] @returns {Read} */
  read(text, pair) {
    const { lowercase, prompt } = this.pipeline,
      own = (/** @type {string} */ words) => (lowercase ? words.toLowerCase() : words);
    const { ids, types, cut } = this.tokenizer.encode(own(prompt + text), pair === undefined ? undefined : own(pair));
    return { ids: [...ids], types: [...types], cut, tokens: [...ids].map((id) => seen(this.tokenizer.spelled(id))) };
  }

  /**
   * Ids; or rows, where the core would add another type or position, as `_inputs` of _text_encoder.py makes them.
   * @type {(read: Pick<Read, "ids" | "types">) => Int32Array | Float32Array}
   */
  inputs({ ids, types: of }) {
    const { d, table, pad, first, tables: { types, positions } } = this.description;
    if (!(types && of.some(Boolean)) && !ids.includes(pad)) return Int32Array.from(ids);
    const rows = new Float32Array(ids.length * d), groups = Math.ceil(d / GROUP);
    let place = first;
    ids.forEach((id, i) => {
      const at = id === pad ? pad : place++;
      for (let c = 0; c < d; c++) {
        const word =
          table instanceof Float32Array
            ? table[id * d + c]
            : Math.fround(table.values[id * d + c] * table.scale[id * groups + Math.floor(c / GROUP)]);
        rows[i * d + c] = Math.fround(
          (types ? Math.fround(word + types[of[i] * d + c]) : word) + positions[at * d + c],
        );
      }
    });
    return rows;
  }

  /**
   * @param {Pick<Read, "ids" | "types">} read
   * @param {boolean} [weights]
   * @returns {{ embedding: Float32Array, weights: Float32Array }}
   */
  compute(read, weights = false) {
    const { modes, scaled, width } = this.pipeline, pooling = modes.length === 1 ? IN_CORE[modes[0]] ?? null : null;
    const found = this.model.forward(this.inputs(read), { pooling, weights });
    let embedding = pooling ? found.rows : pooled(found.rows, this.description.d, modes);
    if (scaled) embedding = scaledToOne(embedding);
    return { embedding: embedding.slice(0, width), weights: found.weights };
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

// PIXELS: the side of a small map.
export const KINDS = ["itself", "first", "separators", "marks", "before", "after", "words"], PIXELS = 48;
export const isSpecial = (/** @type {string} */ token) => SPECIAL.test(token);
const isMark = (/** @type {string} */ token) =>
  isSpecial(token) || NO_WORD.test(token.replace(/^[␣Ġ▁#]+|[␣Ġ▁#]+$/g, ""));

/**
 * The kind of each pair, and the rows that count: `_plan` of pages/heads.py.
 * @type {(tokens: string[], isCausal: boolean) => { kinds: Uint8Array, rows: number[] }}
 */
export function planOf(tokens, isCausal) {
  const n = tokens.length, special = tokens.map(isSpecial), mark = tokens.map(isMark), kinds = new Uint8Array(n * n);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < n; j++) {
      kinds[i * n + j] =
        i === j ? 0 : j === 0 ? 1 : special[j] ? 2 : mark[j] ? 3 : j === i - 1 ? 4 : j === i + 1 ? 5 : 6;
    }
  }
  const words = range(n).filter((i) => !mark[i]),
    apart = words.filter((i) => i > 0 && !mark[i - 1] && (isCausal || !mark[i + 1]));
  return { kinds, rows: apart.length ? apart : words.length ? words : range(n) };
}

/**
 * `habits` of pages/heads.py, over all texts; in a causal model a word has no later keys among which it could choose.
 * @type {(texts: { tokens: string[], weights: Float32Array }[], heads: number[], isCausal?: boolean) => Habit[][]}
 */
export function habitsOf(texts, heads, isCausal = false) {
  const plans = texts.map(({ tokens }) => planOf(tokens, isCausal)),
    count = dot(plans.length, (t) => plans[t].rows.length);
  let from = 0;
  return heads.map((own) =>
    range(own).map(() => {
      const shares = new Float64Array(KINDS.length),
        head = from++;
      let entropy = 0;
      texts.forEach(({ tokens: { length: n }, weights }, t) => {
        const { kinds, rows } = plans[t];
        for (const i of rows) {
          const scale = 1 / (Math.log(Math.max(isCausal ? i + 1 : n, 2)) * count);
          for (let j = 0, at = (head * n + i) * n; j < n; j++, at++) {
            const weight = weights[at];
            shares[kinds[i * n + j]] += weight / count;
            if (weight > 0) entropy -= weight * Math.log(weight) * scale;
          }
        }
      });
      const most = Math.max(...shares),
        kind = entropy >= 0.85 ? "broad" : most >= 0.35 ? KINDS[shares.indexOf(most)] : "mixed";
      return { shares: [...shares], entropy, kind, clear: kind === "broad" || kind === "mixed" || most >= 0.5 };
    }),
  );
}

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
    const means = new Uint16Array(bytes, c, heads.length * n * n),
      sums = new Float64Array(n * n),
      most = new Float32Array(all * side * side);
    // Pixel k begins at ⌊n·k / PIXELS⌋.
    const pixel = Uint8Array.from({ length: n }, (_, i) => (n > PIXELS ? Math.floor(((i + 1) * PIXELS - 1) / n) : i));
    let head = 0, w = 0;
    heads.forEach((own, layer) => {
      sums.fill(0);
      for (const end = head + own; head < end; head++) {
        for (let i = 0, k = 0; i < n; i++) {
          for (let j = 0, row = (head * side + pixel[i]) * side; j < n; j++, w++, k++) {
            const weight = weights[w], place = row + pixel[j];
            sums[k] += weight;
            if (weight > most[place]) most[place] = weight;
          }
        }
      }
      for (let k = 0; k < n * n; k++) means[layer * n * n + k] = Math.round((65535 / own) * sums[k]);
    });
    new Uint8Array(bytes, b, most.length).set(most.map((weight) => Math.round(255 * Math.sqrt(weight))));
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
    load: async ({ given, name, kind }, job) => {
      const next = await Encoder.of(job.kernel, await readModel(given), name, kind, job.progress);
      encoder?.model.free();
      encoder = next;
      texts = rows = [];
      return {
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
