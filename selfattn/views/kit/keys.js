/*
 * Arrow keys inside a group that has one stop for Tab.
 */

/**
 * Where a key leads from row i and column j; null for keys that do not move.
 * @param {string} key
 * @param {number} i
 * @param {number} j
 * @param {number} rows
 * @param {number} columns
 * @returns {[number, number] | null}
 */
function destination(key, i, j, rows, columns) {
  /** @type {Record<string, [number, number]>} */
  const moves = {
    ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1], Home: [i, 0], End: [i, columns - 1],
  };
  if (!Object.hasOwn(moves, key)) return null;
  const inside = (/** @type {number} */ x, /** @type {number} */ n) => Math.min(Math.max(x, 0), n - 1);
  return [inside(moves[key][0], rows), inside(moves[key][1], columns)];
}

/**
 * Give the group's stop to one of its elements, and focus it.
 * @param {Iterable<HTMLElement>} group
 * @param {HTMLElement} target
 */
function moveFocus(group, target) {
  for (const other of group) other.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}

/**
 * Whether a key belongs to the page around, or to what is typed.
 * @param {KeyboardEvent} event
 */
function isForeign(event) {
  const { target } = event;
  const typed = target instanceof HTMLInputElement && target.type !== "range";
  return event.ctrlKey || event.metaKey || event.altKey || typed || target instanceof HTMLSelectElement;
}
