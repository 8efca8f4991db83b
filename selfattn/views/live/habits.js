/*
 * What each head of a live page does, of its weights: its habit, as `habits` of selfattn_models/pages/heads.py names
 * it, and its small map.
 */

import { dot, range } from "../compute.js";

/** @typedef {{ shares: number[], entropy: number, kind: string, clear: boolean }} Habit */

export const KINDS = ["itself", "first", "separators", "marks", "before", "after", "words"];
export const PIXELS = 48; // the side of a small map
const SPECIAL = /^(\[.+\]|<.+>)$/su, NO_WORD = /^[^\p{L}\p{N}_]+$/u;
export const isSpecial = (/** @type {string} */ token) => SPECIAL.test(token);
export const isMark = (/** @type {string} */ token) =>
  isSpecial(token) || NO_WORD.test(token.replace(/^[␣Ġ▁#]+|[␣Ġ▁#]+$/g, ""));

/**
 * The kind of each pair, and the rows that count: `_plan` of pages/heads.py.
 * @type {(tokens: string[], isCausal: boolean) => { kinds: Uint8Array, rows: number[] }}
 */
function planOf(tokens, isCausal) {
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
 * Habits over all texts; in a causal model a word has no later keys among which it could choose.
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
 * Small maps of heads, whose weights are (heads, n, n): the square root of the largest weight of a pixel, times 255.
 * Pixel k begins at ⌊n·k / PIXELS⌋.
 * @type {(weights: Float32Array, n: number) => Uint8Array}
 */
export function smallMaps(weights, n) {
  const side = Math.min(n, PIXELS), all = weights.length / (n * n), most = new Float32Array(all * side * side);
  const pixel = Uint8Array.from({ length: n }, (_, i) => (n > PIXELS ? Math.floor(((i + 1) * PIXELS - 1) / n) : i));
  for (let row = 0, w = 0; row < all * n; row++) {
    const from = (Math.floor(row / n) * side + pixel[row % n]) * side;
    for (let j = 0; j < n; j++, w++) {
      if (weights[w] > most[from + pixel[j]]) most[from + pixel[j]] = weights[w];
    }
  }
  return Uint8Array.from(most, (weight) => Math.round(255 * Math.sqrt(weight)));
}
