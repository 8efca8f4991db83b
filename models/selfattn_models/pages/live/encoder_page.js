/*
 * The page of an encoder: the explorer of what is typed, of one sentence or two, and the texts of one's own that are
 * nearest. A worker computes; until a model is given it has a toy.
 */

import { encoderJobs } from "./encoder.js";
import { ModelPage } from "./head_explorer.js";
import { clamp, dot, filled, fixed, range } from "../../../../selfattn/views/compute.js";
import { button, chooser, element, moveAlong, moveFocus, phrase, start } from "../../../../selfattn/views/kit/page.js";
import { inWorker, serve } from "../../../../selfattn/views/live/worker.js";

/** @typedef {import("../explorer_parts.js").StoredText} StoredText */

class EncoderPage extends ModelPage {
  word = ""; // the token that was chosen
  frame = 0; // that will embed the texts

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    super(root, data, wasm);
    const { captions } = data;
    this.fields = range(2).map((side) =>
      element("input", {
        type: "text",
        value: data.sentences[side],
        autocomplete: "off",
        spellcheck: false,
        oninput: () => this.look(),
      }),
    );
    this.labels = this.fields.map((field, side) =>
      element(
        "label",
        { hidden: side === 1 },
        element("b", { data: { side: String(side) } }, captions[side ? "second" : "sentence"]),
        field,
      ),
    );
    this.compare = button({ ariaPressed: "false", onclick: () => this.pair() }, captions.compare);
    this.alike = element("strong");
    this.words = element("div.sa-words", { role: "group", ariaLabel: captions.words });
    moveAlong(
      this.words,
      () => /** @type {HTMLElement[]} */ ([...this.words.children]),
      (n) =>
        moveFocus(
          /** @type {HTMLElement[]} */ ([...this.words.children]),
          /** @type {HTMLElement} */ (this.words.children[n]),
        ),
    );
    this.about = element("p");
    this.shown.addEventListener("sa-chosen", (event) => (this.word = /** @type {CustomEvent} */ (event).detail.token));
    this.texts = element("textarea", {
      rows: 9,
      spellcheck: false,
      value: captions.collection,
      // Text that is inserted may be an event for each of its lines.
      oninput: () => {
        this.frame ||= requestAnimationFrame(() => {
          this.frame = 0;
          this.embed();
        });
      },
    });
    this.cut = chooser(captions["cut at"], [captions.lines, captions.paragraphs], 0, () => this.embed());
    this.near = element("ol.sa-near");
    this.arrange();
    this.begin(captions["the toy"]);
  }

  arrange() {
    const { captions, root } = this;
    root.replaceChildren(
      this.top(element("p.sa-lede", ...phrase(captions.type))),
      element(
        "div.sa-fields",
        ...this.labels,
        this.words,
        element("div.sa-bar", this.compare, this.alike, this.status),
      ),
      element(
        "section.sa-model",
        { ariaLabel: captions["the model"] },
        this.about,
        element("div.sa-bar", ...this.opener),
      ),
      this.shown,
      element(
        "section.sa-search",
        { ariaLabel: captions.search },
        element("h2", captions.search),
        element("p", captions["search means"]),
        element(
          "div.sa-columns",
          element("div", element("label", captions.texts, this.texts), this.cut),
          this.near,
        ),
      ),
      this.built,
    );
  }

  async loaded() {
    const { captions, data, model, name } = this;
    this.explorer = undefined;
    const { layers, heads, words } = model;
    this.about.replaceChildren(
      ...phrase(captions[!words ? "real" : data.address ? "next to it" : "toy"], {
        name,
        layers,
        heads,
        n: words?.length ?? 0,
        code: element("code", data.code),
        file: data.address ?? "",
      }),
    );
    const buttons = (words ?? []).map((/** @type {string} */ word, /** @type {number} */ n) =>
      button(
        {
          tabIndex: n ? -1 : 0,
          onclick: () => {
            this.fields[0].value = `${this.fields[0].value.trimEnd()} ${word}`;
            this.look();
          },
        },
        word,
      ),
    );
    this.words.replaceChildren(...buttons);
    await this.look();
    await this.embed();
  }

  pair() {
    const on = this.labels[1].hidden;
    this.labels[1].hidden = !on;
    this.compare.ariaPressed = String(on);
    this.explorer = undefined;
    this.look();
    if (on) this.fields[1].focus();
  }

  async look() {
    const { captions } = this,
      texts = this.fields.slice(0, this.labels[1].hidden ? 1 : 2).map(({ value }) => value);
    if (!this.model && this.pack) return this.load(this.pack, this.name); // its worker has ended
    const found = await this.during(this.worker.ask("look", { texts }));
    if (!found) return;
    const { texts: stored, near, ms, cut, alike } = found,
      tokens = dot(stored.length, (n) => stored[n].queries.length);
    const common = (/** @type {string} */ token) =>
      stored.every((/** @type {StoredText} */ { queries }) => queries.includes(token));
    for (const text of stored) {
      // the word that was chosen; else the longest one, of all texts if there is one
      const lengths = text.queries.map((/** @type {string} */ token, /** @type {number} */ n) =>
        text.marks[n] ? 0 : token.length + (common(token) ? 1000 : 0),
      );
      text.chosen = text.queries.includes(this.word)
        ? text.queries.indexOf(this.word)
        : lengths.indexOf(Math.max(...lengths));
    }
    this.explore(found, this.explorer);
    this.alike.textContent = alike === null ? "" : filled(captions.alike, { value: fixed(alike, 3) });
    this.status.textContent = filled(captions[cut ? "computed cut" : "computed"], {
      tokens,
      heads: this.model?.heads ?? 0,
      ms: fixed(ms, 1),
    });
    this.near.replaceChildren(
      ...near.map((/** @type {{ text: string, score: number }} */ { text, score }) => {
        const bar = element("i.sa-fill");
        bar.style.width = `${100 * clamp(score, 0, 1)}%`;
        return element(
          "li",
          element("output", fixed(score, 2).replace("-", "−")),
          element("span", element("bdi", text), bar),
        );
      }),
    );
    this.root.dataset.looked = texts.join("\n");
  }

  async embed() {
    const { captions } = this, at = this.cut.querySelector("select")?.selectedIndex ? /\n\s*\n/ : /\n/;
    const texts = [...new Set(this.texts.value.split(at).map((text) => text.trim()).filter(Boolean))];
    this.bar.hidden = false;
    this.worker.stop("embed");
    const found = await this.during(this.worker.ask("embed", { texts }, { progress: ({ done, all }) => {
      this.bar.value = done / all;
      this.status.textContent = filled(captions.embedded, { done, all });
    } }));
    if (!found) return;
    this.bar.hidden = true;
    await this.look();
  }
}

if (inWorker) serve(encoderJobs());
else start("sa-encoder", EncoderPage);
