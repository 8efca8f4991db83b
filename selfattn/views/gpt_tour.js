/*
 * The questions of the page of a GPT: a tour and an exercise, made from what the trained model computes for the page's
 * prompt.
 */

import { filled, fixed, range } from "./compute.js";
import { choices, Pass } from "./gpt_compute.js";

/** @typedef {import("./gpt.js").GPTView} GPTView */
/** @typedef {import("./kit/tour.js").Stop} Stop */

const GUESSES = 8; // letters of the exercise
const OFFERED = 4; // answers to choose from
const BOLD = 1.5; // a temperature

/**
 * Hides "next" letters or weights of a "head" until the answer is open.
 * @typedef {Stop & { hide: string, act: (open: boolean) => void }} GPTStop
 */
/**
 * @typedef {(name: string, options: string[], right: number, hide: string, values: Record<string, string | number>,
 *   act?: (open: boolean) => void) => GPTStop} MakeStop
 */

/** @type {(view: GPTView) => { tour: GPTStop[], quiz: GPTStop[] }} */
export function gptStops(view) {
  const { trained: model, captions, data: { shown, layers, heads } } = view, ids = view.ids.slice();
  const text = (/** @type {number[]} */ some) => some.map((id) => shown[id]).join("").replaceAll("*", "∗");
  /** @type {MakeStop} */
  const stop = (name, options, right, hide, values, act = () => {}) => ({
    name: filled(captions[`stop.${name}`], values),
    ask: filled(captions[`ask.${name}`], values),
    reveal: filled(captions[`reveal.${name}`], values),
    options,
    right,
    hide,
    act,
  });
  const read = (/** @type {number[]} */ some) => {
    const pass = new Pass(model);
    return some.map((id) => pass.push(id))[some.length - 1];
  };
  const last = read(ids),
    likely = choices(last.logits, 1, 0),
    letter = text([likely[0].id]),
    p = fixed(likely[0].probability, 2);
  /**
   * @type {(name: string, some: { id: number, probability: number }[], values: Record<string, string | number>,
   *   act?: (open: boolean) => void) => GPTStop}
   */
  const next = (name, some, values, act) => {
    const offered = some.slice(0, OFFERED).map(({ id }) => id).sort((a, b) => a - b);
    return stop(
      name,
      offered.map((id) => text([id])),
      offered.indexOf(some[0].id),
      "next",
      { ...values, letter: text([some[0].id]), p: fixed(some[0].probability, 2) },
      act,
    );
  };
  const all = range(layers).flatMap((layer) =>
    range(heads).map((head) => ({ layer, head, name: filled(captions.head, { layer, head }) })),
  );
  const tour = [next("next", likely, { text: text(ids) })];
  if (all.length && ids.length > 1) {
    const taken = all.map(({ layer, head }) => last.weights[layer][head]),
      strongest = taken.map((row) => Math.max(...row.slice(0, -1)));
    const at = strongest.indexOf(Math.max(...strongest)), row = taken[at], { layer, head, name } = all[at];
    const places = range(row.length).sort((i, j) => row[j] - row[i]).slice(0, OFFERED).sort((i, j) => i - j);
    const named = places.map((j) => `…${text(ids.slice(Math.max(0, j - 3), j + 1))}`),
      right = places.findIndex((j) => row[j] === Math.max(...row));
    tour.push(
      stop(
        "head",
        named,
        right,
        "head",
        { head: name, place: named[right], weight: fixed(row[places[right]], 2) },
        () => view.chooseHead(layer, head),
      ),
    );
  }
  const without = all.map(({ layer, head }) => {
    model.off.add(`${layer}.${head}`);
    const found = choices(read(ids).logits, 1, 0);
    model.off.clear();
    return found;
  });
  const left = without.map((found) => found.find(({ id }) => id === likely[0].id)?.probability ?? 0),
    weakest = left.indexOf(Math.min(...left));
  if (all.length) {
    const { layer, head, name } = all[weakest], [best] = without[weakest];
    tour.push(
      stop(
        "off",
        [captions.yes, captions.no],
        best.id === likely[0].id ? 0 : 1,
        "next",
        { head: name, letter, p, q: fixed(left[weakest], 2), other: text([best.id]), r: fixed(best.probability, 2) },
        () => {
          view.model.off.add(`${layer}.${head}`);
          view.changed();
        },
      ),
    );
  }
  const [{ probability: q }] = choices(last.logits, BOLD, 0);
  tour.push(
    stop(
      "temperature",
      [captions.rises, captions.falls],
      q > likely[0].probability ? 0 : 1,
      "",
      { letter, p, q: fixed(q, 2), t: BOLD },
      (open) => view.setTemperature(open ? BOLD : 0),
    ),
  );
  const written = ids.slice(),
    quiz = range(Math.min(GUESSES, view.data.context - ids.length)).map((k) => {
      const found = choices(read(written).logits, 1, 0),
        made = next("guess", found, { n: GUESSES - k, text: text(written) }, (open) => {
          for (let n = 0; n < k + Number(open); n++) view.step();
          view.place = ids.length + k - 1; // the bars show what came next, not what will
          view.draw();
        });
      written.push(found[0].id);
      return made;
    });
  return { tour, quiz };
}
