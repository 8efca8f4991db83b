/*
 * A GPT that computes letter by letter and keeps keys and values. It draws nothing.
 *
 * Per layer x += out(attention(LayerNorm(x))), x += linear2(activation(linear1(LayerNorm(x)))); then
 * logits = head(LayerNorm(x)).
 */

import { dot, normalise, range } from "./compute.js";

/** @typedef {{ shape: number[], data: Float64Array }} Parameter */
/**
 * @typedef {object} GPTSettings
 * @property {number} layers
 * @property {number} heads
 * @property {number} width
 * @property {number} context
 * @property {"gelu" | "relu"} activation
 * @property {number} eps
 * @property {Record<string, number[]>} parameters shapes, in order
 */
/**
 * @typedef {object} Trace the values of one letter in every layer
 * @property {Float64Array} embedding
 * @property {Float64Array[][]} weights by layer and head, over the letters so far
 * @property {Float64Array[]} hidden after each layer
 * @property {Float64Array} logits
 */

/** @param {number} x @returns the error function, to 1e-14: its series near 0, a continued fraction beyond */
function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  if (size < 2.5) {
    let term = x, sum = x;
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) {
      term *= (-x * x) / n;
      sum += term / (2 * n + 1);
    }
    return (2 / Math.sqrt(Math.PI)) * sum;
  }
  let below = 0;
  for (let n = 60; n > 0; n--) below = (n / 2) / (size + below);
  return Math.sign(x) * (1 - Math.exp(-x * x) / (Math.sqrt(Math.PI) * (size + below)));
}

const ACTIVATIONS = {
  gelu: (/** @type {number} */ x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  relu: (/** @type {number} */ x) => Math.max(x, 0),
};

export class GPTModel {
  /** @type {Map<string, Parameter>} */ parameters = new Map();

  /** @param {GPTSettings} settings @param {ArrayBuffer} bytes */
  constructor(settings, bytes) {
    this.settings = settings;
    this.bytes = bytes;
    this.off = new Set(); // heads that are off, as "layer.head"
    this.reset();
  }

  reset() {
    let at = 0;
    for (const [name, shape] of Object.entries(this.settings.parameters)) {
      const count = shape.reduce((a, b) => a * b, 1);
      this.parameters.set(name, { shape, data: Float64Array.from(new Float32Array(this.bytes, at, count)) });
      at += 4 * count;
    }
    this.off.clear();
  }

  /** @type {(name: string, x: Float64Array, bias?: string) => Float64Array} */
  linear(name, x, bias = "") {
    const { shape: [rows, columns], data } = this.get(name), b = bias ? this.parameters.get(bias)?.data : undefined;
    const y = new Float64Array(rows);
    for (let i = 0, at = 0; i < rows; i++) {
      let sum = b ? b[i] : 0;
      for (let j = 0; j < columns; j++) sum += data[at++] * x[j];
      y[i] = sum;
    }
    return y;
  }

  /** @param {string} name */
  get(name) {
    const found = this.parameters.get(name);
    if (!found) throw new Error(`there is no ${name}`);
    return found;
  }

  /** @type {(name: string, x: Float64Array) => Float64Array} */
  norm(name, x) {
    const n = x.length, mean = dot(n, (i) => x[i]) / n, variance = dot(n, (i) => (x[i] - mean) ** 2) / n;
    const scale = 1 / Math.sqrt(variance + this.settings.eps);
    const weight = this.get(`${name}.weight`).data, bias = this.parameters.get(`${name}.bias`)?.data;
    return x.map((value, i) => (value - mean) * scale * weight[i] + (bias ? bias[i] : 0));
  }
}

/** The letters that a model has read, with their keys and values. */
export class Pass {
  /** @type {Trace[]} */ traces = [];

  /** @param {GPTModel} model */
  constructor(model) {
    this.model = model;
    /** @type {Float64Array[][]} by layer */
    this.joined = range(model.settings.layers).map(() => []);
  }

  /** @type {(id: number) => Trace} */
  push(id) {
    const { model } = this, { layers, width, activation } = model.settings, place = this.traces.length;
    const row = (/** @type {string} */ name, /** @type {number} */ n) =>
      model.get(name).data.subarray(n * width, (n + 1) * width);
    const token = row("token_embedding.weight", id), position = row("position_embedding.weight", place);
    let x = Float64Array.from(token, (value, i) => value + position[i]);
    /** @type {Trace} */
    const trace = { embedding: x, weights: [], hidden: [], logits: new Float64Array(0) };
    for (let layer = 0; layer < layers; layer++) {
      const name = `layers.${layer}`;
      this.joined[layer].push(
        model.linear(
          `${name}.self_attn.in_proj_weight`,
          model.norm(`${name}.norm1`, x),
          `${name}.self_attn.in_proj_bias`,
        ),
      );
      const { weights, found } = this.attend(layer, place);
      trace.weights.push(weights);
      const added = model.linear(`${name}.self_attn.out_proj.weight`, found, `${name}.self_attn.out_proj.bias`);
      const s = x.map((value, i) => value + added[i]);
      const wide = model
        .linear(`${name}.linear1.weight`, model.norm(`${name}.norm2`, s), `${name}.linear1.bias`)
        .map(ACTIVATIONS[activation]);
      const down = model.linear(`${name}.linear2.weight`, wide, `${name}.linear2.bias`);
      x = s.map((value, i) => value + down[i]);
      trace.hidden.push(x);
    }
    trace.logits = model.linear("head.weight", model.norm("norm", x));
    this.traces.push(trace);
    return trace;
  }

  /**
   * Heads that are off give 0.
   * @type {(layer: number, place: number) => { weights: Float64Array[]; found: Float64Array; }}
   */
  attend(layer, place) {
    const { width, heads } = this.model.settings, each = width / heads, joined = this.joined[layer];
    const found = new Float64Array(width), weights = range(heads).map(() => new Float64Array(place + 1));
    for (let head = 0; head < heads; head++) {
      const from = head * each, row = weights[head], query = joined[place];
      for (let j = 0; j <= place; j++) {
        row[j] = dot(each, (c) => query[from + c] * joined[j][width + from + c]) / Math.sqrt(each);
      }
      normalise(row);
      if (this.model.off.has(`${layer}.${head}`)) continue;
      for (let c = 0; c < each; c++) found[from + c] = dot(place + 1, (j) => row[j] * joined[j][2 * width + from + c]);
    }
    return { weights, found };
  }
}

/**
 * Probabilities of all letters, or of the top-k if topK is not 0, the largest first. At temperature 0 the likeliest has
 * probability 1.
 * @type {(logits: Float64Array, temperature: number, topK: number) => { id: number, probability: number }[]}
 */
export function choices(logits, temperature, topK) {
  const order = range(logits.length).sort((a, b) => logits[b] - logits[a]).slice(0, topK || logits.length);
  if (temperature === 0) return order.map((id, n) => ({ id, probability: n ? 0 : 1 }));
  const powers = order.map((id) => Math.exp((logits[id] - logits[order[0]]) / temperature));
  const total = powers.reduce((a, b) => a + b, 0);
  return order.map((id, n) => ({ id, probability: powers[n] / total }));
}

/** @param {number} seed @returns a source of random numbers from 0 to 1 (mulberry32) */
export function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** @type {(from: { id: number, probability: number }[], u: number) => number} the id that a number from 0 to 1 picks */
export function sample(from, u) {
  let sum = 0;
  for (const { id, probability } of from) if ((sum += probability) > u) return id;
  return from[from.length - 1].id;
}
