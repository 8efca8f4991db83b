/*
 * Probabilities as bars, the largest as long as there is room.
 */

/** @typedef {{ name: Child, probability: number, look?: string, note?: string }} Bar look: "sa-on" stands out, "sa-rest" is of many */

/**
 * @param {HTMLElement} list an ol of class sa-bars-list
 * @param {Bar[]} bars
 */
function drawBars(list, bars) {
  const most = Math.max(...bars.filter(({ look }) => look !== "sa-rest").map(({ probability }) => probability), Number.MIN_VALUE);
  list.replaceChildren(...bars.map(({ name, probability, look = "", note = "" }) => {
    const fill = element("i", { className: "sa-fill" });
    fill.style.width = `${Math.min(100, (100 * probability) / most).toFixed(2)}%`;
    return element("li", { className: look }, element("span", { className: "sa-name" }, name), element("span", { className: "sa-track" }, fill),
      element("output", {}, fixed(probability, 3)), ...(note ? [element("small", {}, note)] : []));
  }));
}
