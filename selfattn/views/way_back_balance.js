/*
 * A row of dS as areas: as wide as a share, as high as what its word says for the wish, more or less than the mean. Areas above
 * the mean are as large as those below.
 */

const BALANCE = { high: 236, top: 28, bottom: 196, left: 44, right: 46, least: 330, most: 700 }; // pixels

/**
 * @param {number} x
 * @param {number} decimals
 */
function figure(x, decimals) {
  const plain = fixed(x, decimals);
  return (Number(plain) === 0 ? plain.replace("-", "") : plain).replace("-", "−");
}

/**
 * @param {number} x
 * @param {number} decimals
 */
function signedFigure(x, decimals) {
  const plain = figure(x, decimals);
  return plain.startsWith("−") ? plain : `+${plain}`;
}

class Balance {
  /** @param {Record<string, string>} captions */
  constructor(captions) {
    this.captions = captions;
    this.heading = element("h2");
    this.art = shape("svg", { role: "img", class: "sa-balance" });
    this.caption = element("figcaption");
  }

  /**
   * @param {object} row
   * @param {Child} row.word
   * @param {string} row.name of the word
   * @param {string[]} row.keys
   * @param {number[]} row.shares
   * @param {number[]} row.said
   * @param {number[]} row.gradients
   * @param {number} row.mean
   */
  update({ word, name, keys, shares, said, gradients, mean }) {
    const { captions } = this, empty = said.every((x) => x === 0);
    const wide = Math.max(BALANCE.least, Math.min(BALANCE.most, this.art.parentElement?.clientWidth || 660));
    this.art.setAttribute("viewBox", `0 0 ${wide} ${BALANCE.high}`);
    const top = Math.max(0.01, ...said), low = Math.min(0, ...said);
    const across = (/** @type {number} */ x) => BALANCE.left + x * (wide - BALANCE.left - BALANCE.right);
    const up = (/** @type {number} */ y) => BALANCE.bottom - ((y - low) / (top - low)) * (BALANCE.bottom - BALANCE.top);
    /** @type {SVGElement[]} */
    const drawn = [];
    const write = (/** @type {number} */ x, /** @type {number} */ y, /** @type {string} */ text, /** @type {string} */ look, anchor = "middle") =>
      drawn.push(shape("text", { x: x.toFixed(1), y: y.toFixed(1), class: look, "text-anchor": anchor }, text));
    const box = (/** @type {number} */ from, /** @type {number} */ to, /** @type {number} */ a, /** @type {number} */ b, /** @type {string} */ look) =>
      drawn.push(shape("rect", { x: (from + 1).toFixed(1), width: Math.max(0, to - from - 2).toFixed(1), y: Math.min(a, b).toFixed(1), height: Math.abs(a - b).toFixed(1), class: look }));
    let at = 0;
    shares.forEach((share, j) => {
      const from = across(at), to = across((at += share)), above = said[j] > mean, middle = (from + to) / 2;
      box(from, to, up(0), up(above ? mean : said[j]), "sa-plain");
      box(from, to, up(said[j]), up(mean), above ? "sa-gain" : "sa-loss");
      if (share <= 0.07) return;
      const y = Math.min(up(said[j]), up(mean)), high = Math.abs(up(said[j]) - up(mean));
      write(middle, 214, keys[j], "sa-strong-text");
      write(middle, 231, filled(captions.share, { share: figure(share, 2) }), "sa-note");
      write(middle, above ? y - 6 : Math.min(y + high + 17, BALANCE.bottom - 4), filled(captions.says, { value: figure(said[j], 2) }), "sa-note");
      write(middle, high > 24 ? y + high / 2 + 5 : above ? y + high + 18 : y - 8, signedFigure(gradients[j], 3), "sa-strong-text");
    });
    drawn.push(shape("line", { x1: BALANCE.left, x2: wide - BALANCE.right + 4, y1: up(mean).toFixed(1), y2: up(mean).toFixed(1), class: "sa-mean" }));
    write(BALANCE.left - 4, up(mean) + 5, figure(mean, 3), "sa-note", "end");
    write(wide - BALANCE.right + 7, up(mean) + 5, captions.mean, "sa-note", "start");
    this.art.replaceChildren(...drawn);
    this.heading.replaceChildren(...phrase(captions[empty ? "empty" : "balance"], { word }));
    const sum = gradients.map((x) => signedFigure(x, 4)).join(" ");
    this.caption.replaceChildren(...phrase(captions[empty ? "choose another" : "balance sum"], { sum }));
    const parts = keys.map((key, j) => filled(captions["picture part"], { word: key, share: figure(shares[j], 2), says: figure(said[j], 2), gradient: signedFigure(gradients[j], 3) }));
    this.art.setAttribute("aria-label", filled(captions.picture, { word: name, list: parts.join("; "), mean: figure(mean, 3) }));
  }
}
