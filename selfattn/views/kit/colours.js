/*
 * From a number to its colour. kit.css owns the hues; here are the strengths.
 *
 * "signed": green above zero, purple below. "share": a weight, in the colour of its text, 0 or 1. "mask": dark where it is 0.
 */

/** @typedef {"signed" | "share" | "mask"} Kind */

/**
 * Colour an element by a number: the whole hue at `size`.
 * @param {HTMLElement} target
 * @param {number} value
 * @param {number} size
 * @param {Kind} kind
 */
function tint(target, value, size, kind) {
  const strength = Number.isFinite(value) && size > 0 ? Math.min(1, Math.abs(value) / size) : 0;
  target.style.setProperty("--strength", strength.toFixed(3));
  target.dataset.tone = toneOf(value, kind);
}

/**
 * @param {number} value
 * @param {Kind} kind
 */
function toneOf(value, kind) {
  if (!Number.isFinite(value)) return "none";
  if (kind === "share") return "share";
  if (kind === "mask") return value === 0 ? "closed" : "open";
  return value < 0 ? "minus" : "plus";
}

const STRENGTHS = 32;

/**
 * The colours that a canvas needs, read from the style of an element that is in the page: for each tone, from weak to strong.
 * @param {HTMLElement} place inside the view, and inside the text's side
 * @returns {Record<string, string[]>}
 */
function palette(place) {
  const probe = element("i", { className: "sa-tinted" });
  place.append(probe);
  /** @type {Record<string, string[]>} */
  const found = {};
  for (const tone of ["plus", "minus", "share", "open", "closed", "none"]) {
    probe.dataset.tone = tone;
    found[tone] = Array.from({ length: STRENGTHS + 1 }, (_, n) => {
      probe.style.setProperty("--strength", String(n / STRENGTHS));
      return getComputedStyle(probe).backgroundColor;
    });
  }
  probe.remove();
  return found;
}
