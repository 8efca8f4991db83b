/*
 * A GPT of letters, as `Kernel.transformer` takes it; its letters as tokens; and how the next token is drawn.
 */

import { range } from "../compute.js";

/**
 * What turns a text into ids, and ids into a text.
 * @typedef {{ encode: (text: string) => { ids: number[], unknown?: string[] }, decode: (ids: number[]) => string,
 *   spelled: (id: number) => string }} Spelling
 */
/** @typedef {{ temperature: number, topP: number }} Drawing */
/**
 * A model of letters.
 * @typedef {{ alphabet: string[], heads: number, layers: number, context: number, eps: number,
 *   activation: string }} Letters
 */

/** @type {(token: string) => string} a token as pages show it: spaces at its ends and ends of lines are visible */
export const seen = (token) =>
  token.replaceAll("\n", "⏎").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";

/**
 * What `Kernel.transformer` takes, of an nn.GPT's arrays.
 * @type {(read: (name: string) => Float32Array, settings: Letters) => any}
 */
export function describeLetters(read, { alphabet, heads, layers, eps, activation }) {
  const table = read("token_embedding.weight"), d = table.length / alphabet.length, width = d / heads;
  const both = (/** @type {string} */ name) => ({ weight: read(`${name}.weight`), bias: read(`${name}.bias`) });
  const made = range(layers).map((n) => {
    const own = `layers.${n}`,
      joined = read(`${own}.self_attn.in_proj_weight`),
      biases = read(`${own}.self_attn.in_proj_bias`);
    const third = (/** @type {number} */ k) => ({
        weight: joined.subarray(k * d * d, (k + 1) * d * d),
        bias: biases.subarray(k * d, (k + 1) * d),
      }),
      up = both(`${own}.linear1`);
    return {
      heads,
      keyHeads: heads,
      width,
      hidden: up.bias.length,
      eps: [eps, eps],
      rms: [false, false],
      normFirst: true,
      causal: true,
      scale: 1 / Math.sqrt(width),
      activation,
      weights: "float32",
      parameters: {
        query: third(0),
        key: third(1),
        value: third(2),
        output: both(`${own}.self_attn.out_proj`),
        attentionNorm: both(`${own}.norm1`),
        up,
        down: both(`${own}.linear2`),
        feedForwardNorm: both(`${own}.norm2`),
      },
    };
  });
  return {
    d,
    vocabulary: alphabet.length,
    table,
    positions: read("position_embedding.weight"),
    layers: made,
    finalNorm: { ...both("norm"), eps, rms: false },
    output: "table",
  };
}

/**
 * Reads the longest piece that fits, also of small letters; a letter that no piece has is read as a space.
 * @type {(alphabet: string[]) => Spelling}
 */
export function lettersOf(alphabet) {
  const ids = new Map(alphabet.map((piece, n) => [piece, n])),
    longest = alphabet.reduce((most, { length }) => Math.max(most, length), 1),
    spelled = (/** @type {number} */ id) => alphabet[id];
  const encode = (/** @type {string} */ text) => {
    const found = [], /** @type {Set<string>} */ unknown = new Set();
    for (let at = 0; at < text.length; ) {
      const pieces = range(longest).map((k) => text.slice(at, at + longest - k)),
        fits = (/** @type {string} */ piece) => ids.has(piece) || ids.has(piece.toLowerCase()),
        letter = String.fromCodePoint(text.codePointAt(at) ?? 0),
        piece = pieces.find((each) => ids.has(each)) ?? pieces.find(fits) ?? letter,
        id = ids.get(piece) ?? ids.get(piece.toLowerCase());
      if (id === undefined) unknown.add(piece);
      found.push(id ?? ids.get(" ") ?? -1);
      at += piece.length;
    }
    return { ids: found.filter((id) => id >= 0), unknown: [...unknown] };
  };
  return { encode, spelled, decode: (some) => some.map(spelled).join("") };
}

/**
 * Probabilities of drawing each token: `probabilities` of engine/sampling.py; at temperature 0 the likeliest.
 * @type {(logits: Float32Array, how: Drawing) => Float64Array}
 */
export function drawingOf(logits, { temperature, topP }) {
  const most = logits.reduce((a, b) => Math.max(a, b)),
    p = Float64Array.from(logits, (x) => (temperature > 0 ? Math.exp((x - most) / temperature) : Number(x === most)));
  const scale = (/** @type {number} */ sum) => p.forEach((x, n) => (p[n] = x / sum));
  scale(p.reduce((a, b) => a + b));
  if (topP >= 1 || temperature === 0) return p;
  const order = [...p.keys()].filter((n) => p[n] > 1e-12).sort((a, b) => p[b] - p[a] || b - a), kept = new Set();
  for (let sum = 0, k = 0; k < order.length && (k === 0 || sum < topP); k++) {
    kept.add(order[k]);
    sum += p[order[k]];
  }
  p.forEach((_, n) => kept.has(n) || (p[n] = 0));
  scale(p.reduce((a, b) => a + b));
  return p;
}

/** @type {(p: Float64Array, at: number) => number} the token at a place from 0 to 1 of the probabilities in a row */
export function drawn(p, at) {
  let sum = 0, last = 0;
  for (let n = 0; n < p.length; n++) {
    if (p[n] === 0) continue;
    [sum, last] = [sum + p[n], n];
    if (at < sum) break;
  }
  return last;
}
