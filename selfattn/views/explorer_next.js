/*
 * What a language model expects after a place: bars of the likeliest tokens, at a temperature and with top-k; and its answer, step by step.
 */

const BARS = 12;
const TOP_K = [0, 50, 20, 10, 5, 2];

class NextTokens {
  /**
   * @param {TextData} text
   * @param {Record<string, string>} captions
   * @param {number} side
   * @param {(place: number) => void} choose
   */
  constructor(text, captions, side, choose) {
    this.text = text;
    this.captions = captions;
    this.next = /** @type {StoredNext} */ (text.stored.next);
    this.place = text.stored.prompt - 1;
    const { temperatures } = this.next;
    this.temperature = Math.max(0, temperatures.indexOf(1));
    this.topK = 0;
    const select = (/** @type {string} */ name, /** @type {string[]} */ options, /** @type {number} */ first, /** @type {(n: number) => void} */ chosen) =>
      element("label", {}, `${name} `, element("select", { onchange: (/** @type {Event} */ event) => {
        if (event.target instanceof HTMLSelectElement) chosen(event.target.selectedIndex);
        this.draw();
      } }, ...options.map((text, n) => element("option", { selected: n === first }, text))));
    this.said = element("p", { className: "sa-next-say" });
    this.bars = element("ol", { className: "sa-bars-list", data: { side: String(side) } });
    const step = (/** @type {string} */ name, /** @type {number} */ by) => element("button", { type: "button", onclick: () => choose(this.place + by) }, captions[name]);
    this.back = step("back", -1);
    this.forth = step("step", 1);
    this.count = element("span", { className: "sa-soft" });
    this.node = element("section", { className: "sa-next", ariaLabel: captions.next }, element("h2", {}, captions.next),
      element("div", { className: "sa-bar" },
        select(captions.temperature, temperatures.map(String), this.temperature, (n) => (this.temperature = n)),
        select(captions["top k"], TOP_K.map((k) => (k ? String(k) : captions["all tokens"])), 0, (n) => (this.topK = TOP_K[n])),
        this.back, this.forth, this.count),
      this.said, this.bars);
  }

  /** @param {number} place */
  show(place) {
    this.place = place;
    this.draw();
  }

  draw() {
    const { queries, prompt } = this.text.stored, { place, next, captions } = this;
    const came = queries[place + 1], found = likely(next, this.text.bytes, place, this.temperature, this.topK);
    this.back.disabled = place <= 0;
    this.forth.disabled = place >= queries.length - 1;
    this.count.textContent = queries.length > prompt ? filled(captions.added, { n: Math.max(0, place + 1 - prompt), all: queries.length - prompt }) : "";
    this.said.replaceChildren(...phrase(captions["next means"], { word: wordOf(queries[place]) }));
    const shown = found.slice(0, BARS);
    const rest = Math.max(0, 1 - dot(shown.length, (n) => shown[n].probability));
    const others = this.topK ? found.length - shown.length : next.vocabulary - shown.length;
    drawBars(this.bars, [
      ...shown.map(({ token, probability }) => {
        const on = next.names[token] === came;
        return { name: wordOf(next.names[token]), probability, ...(on ? { look: "sa-on", note: captions.came } : {}) };
      }),
      ...(others > 0 ? [{ name: filled(captions.rest, { n: others }), probability: rest, look: "sa-rest" }] : []),
    ]);
  }
}
