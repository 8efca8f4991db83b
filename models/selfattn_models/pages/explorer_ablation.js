/*
 * What a model says with a head off, for the explorer: a sentence, a switch, bars. `ablation.py` has computed all
 * heads; a live page may give `Off` another `without`, which computes one.
 */

import { numbersOf } from "./explorer_parts.js";
import { fixed } from "../../../selfattn/views/compute.js";
import { button, element, phrase, wordOf } from "../../../selfattn/views/kit/page.js";
import { drawBars } from "../../../selfattn/views/kit/pictures.js";

/** @typedef {import("./explorer.js").ExplorerData} ExplorerData */
/** @typedef {import("./explorer_parts.js").Stored} Stored */
/** @typedef {import("../../../selfattn/views/kit/page.js").Child} Child */

/** @typedef {[number, number]} Said a token, as an index of names, and its probability */
/**
 * Of a language model: after which place, and its likeliest tokens with each head off and after each layer.
 * @typedef {{ place?: number, names?: string[], tokens?: number[][], likely?: Stored, lens?: Said[] }} NextOff
 */
/**
 * The target with all heads, and with each one off; and what each word of each text does for it, −1 to 1.
 * @typedef {{ kind: string, name: string, before: number, after: Stored, words: number[][] } & NextOff} StoredOff
 */

export class Off {
  isOff = false;
  n = 0;

  /** @param {StoredOff} stored @param {ArrayBuffer} bytes @param {ExplorerData} data */
  constructor(stored, bytes, { captions, texts }) {
    this.stored = stored;
    this.captions = captions;
    this.word = stored.place === undefined ? "" : texts[0].queries[stored.place];
    this.after = [...numbersOf(bytes, stored.after)];
    this.likely = stored.likely && numbersOf(bytes, stored.likely);
    this.most = Math.max(...this.after.map((after) => Math.abs(after - stored.before)), Number.MIN_VALUE);
    this.says = element("p.sa-off-says", { ariaLive: "polite" });
    this.bars = element("ol.sa-bars-list", { data: { side: "0" } });
    this.toggle = button({ onclick: () => {
      this.isOff = !this.isOff;
      this.draw();
    } });
    const words = stored.words.length
      ? [element("p.sa-soft", ...phrase(captions["off words"], { name: this.name() }))]
      : [];
    this.node = element(
      "section.sa-off",
      { ariaLabel: captions["off title"] },
      element("div.sa-bar", this.toggle, this.says),
      this.bars,
      ...words,
    );
  }

  name() {
    return this.stored.name ? wordOf(this.stored.name) : this.captions["off similarity"];
  }

  /**
   * What the model says with head n off.
   * @type {(n: number) => { after: number, likely: { token: string, probability: number }[] }}
   */
  without(n) {
    const { names = [], tokens = [] } = this.stored, own = tokens[n] ?? [];
    return {
      after: this.after[n],
      likely: own.map((token, k) => ({ token: names[token], probability: this.likely?.[n * own.length + k] ?? 0 })),
    };
  }

  /**
   * @param {number} n
   * @returns how much head n speaks for the answer, as a share of the head that does most; below 0 against it
   */
  share(n) {
    return (this.stored.before - this.after[n]) / this.most;
  }

  /** @returns the head without which the answer changes most */
  first() {
    return this.after.reduce((best, _, n) => (Math.abs(this.share(n)) > Math.abs(this.share(best)) ? n : best), 0);
  }

  /** @type {(n: number, caption: string) => Child[]} */
  sentence(n, caption) {
    const values = {
      name: this.name(),
      word: wordOf(this.word),
      before: fixed(this.stored.before, 3),
      after: fixed(this.without(n).after, 3),
    };
    return phrase(this.captions[caption], values);
  }

  /** @param {number} [n] a head */
  draw(n = this.n) {
    const { stored, captions, isOff } = this;
    this.n = n;
    const { after, likely } = this.without(n);
    this.toggle.textContent = captions[isOff ? "on again" : "switch off"];
    this.toggle.ariaPressed = String(isOff);
    this.says.replaceChildren(...(isOff ? this.sentence(n, `off ${stored.kind} says`) : [captions["off asks"]]));
    const bars =
      isOff && likely.length
        ? likely
        : [{ token: stored.name || captions["off similarity"], probability: isOff ? after : stored.before }];
    drawBars(this.bars, bars.map((each) => ({ ...each, came: false })), { n: 0, probability: 0 }, captions);
  }
}
