/*
 * The questions of the page of a GPT, in the worker: a tour and an exercise, made from what the trained model computes
 * for the page's prompt.
 */

import { filled, fixed, range } from "../compute.js";

/** @typedef {import("./gpt_model.js").LanguageModel} LanguageModel */
/** @typedef {{ id: number, token: string, probability: number }[]} Likely */
/**
 * Hides "next" tokens or weights of a "head" until the answer is open. The page shows a head, or has one off; once the
 * answer is open it has a temperature; it has these tokens added, and one more once the answer is open.
 * @typedef {import("../kit/tour.js").Stop & { hide: string, shows: { head?: [number, number], off?: [number, number],
 *   temperature?: number, added?: number[] } }} GPTStop
 */

const GUESSES = 8; // tokens of the exercise
const OFFERED = 4; // answers to choose from
const BOLD = 1.5; // a temperature
const AROUND = 3; // tokens before a place that name it

/**
 * @type {(of: LanguageModel, ids: number[], captions: Record<string, string>) =>
 *   { tour: GPTStop[], quiz: GPTStop[] }}
 */
export function stopsOf(of, ids, captions) {
  if (!ids.length) return { tour: [], quiz: [] };
  const { trained, heads } = of, text = (/** @type {number[]} */ some) =>
    some.map((id) => of.shown(id)).join("").replaceAll("*", "∗");
  const after = (/** @type {any} */ model, temperature = 1, some = ids) =>
    of.likely(of.logits(model, some), { temperature, topP: 1 }, Infinity);
  /**
   * @type {(name: string, options: string[], right: number, hide: string, values: Record<string, string | number>,
   *   shows?: GPTStop["shows"]) => GPTStop}
   */
  const stop = (name, options, right, hide, values, shows = {}) => ({
    name: filled(captions[`stop.${name}`], values),
    ask: filled(captions[`ask.${name}`], values),
    reveal: filled(captions[`reveal.${name}`], values),
    options,
    right,
    hide,
    shows,
  });
  /**
   * @type {(name: string, some: Likely, values: Record<string, string | number>, shows?: GPTStop["shows"]) => GPTStop}
   */
  const next = (name, some, values, shows) => {
    const [{ id, probability }] = some, offered = some.slice(0, OFFERED).map((each) => each.id).sort((a, b) => a - b);
    return stop(
      name,
      offered.map((each) => text([each])),
      offered.indexOf(id),
      "next",
      { ...values, letter: text([id]), p: fixed(probability, 2) },
      shows,
    );
  };
  const likely = after(trained),
    [{ id: best, probability }] = likely,
    chance = (/** @type {Likely} */ some) => some.find(({ id }) => id === best)?.probability ?? 0,
    said = { letter: text([best]), p: fixed(probability, 2) },
    named = (/** @type {[number, number]} */ [layer, head]) => filled(captions.head, { layer, head });
  const all = heads.flatMap((count, layer) =>
    range(count).map((head) => /** @type {[number, number]} */ ([layer, head])),
  );
  const tour = [next("next", likely, { text: text(ids) })], n = ids.length;
  const { weights } = n > 1 ? trained.forward(ids, { weights: true }) : { weights: null };
  if (weights) {
    const rows = all.map((_, k) => [...weights.subarray(((k + 1) * n - 1) * n, (k + 1) * n * n)]),
      strongest = rows.map((row) => Math.max(...row.slice(0, -1))),
      k = strongest.indexOf(Math.max(...strongest)),
      row = rows[k],
      places = range(n).sort((i, j) => row[j] - row[i]),
      offered = places.slice(0, OFFERED).sort((i, j) => i - j),
      options = offered.map((j) => `…${text(ids.slice(Math.max(0, j - AROUND), j + 1))}`),
      right = offered.indexOf(places[0]);
    tour.push(
      stop(
        "head",
        options,
        right,
        "head",
        { head: named(all[k]), place: options[right], weight: fixed(row[places[0]], 2) },
        { head: all[k] },
      ),
    );
  }
  if (of.open) {
    const without = all.map((head) => after(of.with({ off: [head], weights: [] }))),
      left = without.map(chance),
      k = left.indexOf(Math.min(...left)),
      [other] = without[k];
    tour.push(
      stop(
        "off",
        [captions.yes, captions.no],
        other.id === best ? 0 : 1,
        "next",
        { ...said, head: named(all[k]), q: fixed(left[k], 2), other: other.token, r: fixed(other.probability, 2) },
        { off: all[k] },
      ),
    );
  }
  const warm = chance(after(trained, BOLD));
  tour.push(
    stop(
      "temperature",
      [captions.rises, captions.falls],
      warm > probability ? 0 : 1,
      "",
      { ...said, q: fixed(warm, 2), t: BOLD },
      { temperature: BOLD },
    ),
  );
  const added = /** @type {number[]} */ ([]), quiz = range(Math.min(GUESSES, of.most - n)).map((k) => {
    const some = [...ids, ...added], found = after(trained, 1, some);
    added.push(found[0].id);
    return next("guess", found, { n: GUESSES - k, text: text(some) }, { added: added.slice() });
  });
  return { tour, quiz };
}
