/*
 * The page of a language model: a text, what comes next as bars, all heads of the text, and what the model writes,
 * token by token. A worker computes; until a file is given it has the letters' model of the page.
 */

import { ModelPage } from "./head_explorer.js";
import { languageJobs, MOST_SHOWN } from "./language_model.js";
import { filled, fixed } from "../../../../selfattn/views/compute.js";
import { button, element, phrase, start } from "../../../../selfattn/views/kit/page.js";
import { drawBars, tint } from "../../../../selfattn/views/kit/pictures.js";
import { inWorker, serve } from "../../../../selfattn/views/live/worker.js";

/** @typedef {import("../../../../selfattn/views/live/letters.js").Drawing} Drawing */

const MOST_WRITTEN = 200; // tokens

class LanguagePage extends ModelPage {
  writing = false;

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    super(root, data, wasm);
    const { captions } = data;
    this.text = element("textarea", { rows: 3, spellcheck: false, value: data.prompt, oninput: () => this.look() });
    this.slides = { temperature: [0.8, 0, 2, 0.1], topP: [0.9, 0.05, 1, 0.05] };
    this.inputs = Object.fromEntries(
      Object.entries(this.slides).map(([name, [value, min, max, step]]) => {
        const output = element("output", {}, fixed(value, 2));
        const input = element("input", {
          type: "range",
          min: String(min),
          max: String(max),
          step: String(step),
          value: String(value),
          oninput: () => {
            output.textContent = fixed(Number(input.value), 2);
            this.next();
          },
        });
        return [name, { input, label: element("label", {}, captions[name], input, output) }];
      }),
    );
    this.one = button({ onclick: () => this.write(1) }, captions["one token"]);
    this.write_ = button(
      { onclick: () => (this.writing ? this.worker.stop("write") : this.write(MOST_WRITTEN)) },
      captions.write,
    );
    this.about = element("p");
    this.bars = element("ol", { className: "sa-bars-list" });
    this.heading = element("h2", {}, captions["comes next"]);
    this.taken = element("p", { className: "sa-taken", ariaLabel: captions.taken, hidden: true });
    root.replaceChildren(
      this.top(element("p", { className: "sa-lede" }, ...phrase(captions.look))),
      element(
        "div",
        { className: "sa-fields" },
        element(
          "div",
          {},
          element("label", {}, captions["your text"], this.text),
          element(
            "div",
            { className: "sa-bar" },
            this.one,
            this.write_,
            ...Object.values(this.inputs).map(({ label }) => label),
          ),
          this.status,
          this.taken,
        ),
        element("section", { ariaLabel: captions["comes next"] }, this.heading, this.bars),
      ),
      this.shown,
      element(
        "section",
        { className: "sa-model", ariaLabel: captions["the model"] },
        this.about,
        element(
          "div",
          { className: "sa-bar" },
          ...this.opened,
          this.bar,
        ),
      ),
      this.built,
    );
    this.begin(captions.letters);
  }

  /** @returns {Drawing} */
  get how() {
    return { temperature: Number(this.inputs.temperature.input.value), topP: Number(this.inputs.topP.input.value) };
  }

  /** @type {(pack: Blob | Uint8Array, name: string) => Promise<void>} */
  async load(pack, name) {
    const { captions, data } = this, model = await this.loaded(pack, name);
    if (!model) return;
    this.about.replaceChildren(
      ...phrase(captions[name === captions.letters ? "own letters" : "real"], {
        name,
        ...model,
        code: element("code", {}, data.code),
      }),
    );
    await this.look();
  }

  async look() {
    const { captions, name } = this, text = this.text.value;
    if (this.writing) return;
    if (!this.model && this.pack) return this.load(this.pack, name); // its worker has ended
    const found = await this.during(this.worker.ask("look", { text, how: this.how }));
    if (!found) return;
    const { texts, tokens, ms, next, unknown, cut } = found;
    this.draw(next);
    this.shown.hidden = !texts;
    this.taken.hidden = true;
    if (texts) {
      for (const each of texts) each.chosen = each.queries.length - 1;
      this.explore(found, this.explorer);
    }
    const said = [
      filled(captions[texts ? "computed" : "computed long"], {
        tokens,
        heads: this.model?.heads ?? 0,
        ms: fixed(ms, 1),
      }),
      ...(cut ? [filled(captions["read from"], { tokens })] : []),
      ...(unknown.length ? [filled(captions["no letters"], { letters: unknown.join(" ") })] : []),
    ];
    this.status.textContent = said.join(" ");
    this.root.dataset.looked = text;
  }

  async next() {
    const next = await this.during(this.worker.ask("next", { how: this.how }));
    if (next) this.draw(next);
  }

  /** @param {any} next */
  draw({ likely, others }) {
    drawBars(this.bars, likely, others, this.captions);
  }

  /** @param {number} most */
  async write(most) {
    const { captions } = this, text = this.text.value;
    this.writing = this.text.readOnly = true;
    this.write_.textContent = captions.stop;
    const found = await this.during(
      this.worker.ask(
        "write",
        { text, how: this.how, most },
        {
          progress: ({ written, next, taken, tokens }) => {
            this.text.value = text + written;
            this.text.scrollTop = this.text.scrollHeight;
            this.draw(next);
            if (taken) this.show(taken, tokens);
          },
        },
      ),
    );
    this.writing = this.text.readOnly = false;
    this.write_.textContent = captions.write;
    if (!found) return;
    await this.look();
    if (most > 1) {
      this.status.textContent = filled(captions.wrote, {
        tokens: found.tokens,
        rate: fixed(found.tokens / (found.ms / 1000), 0),
      });
    }
  }

  /**
   * How much the newest token attends to each, as a mean of all heads.
   * @type {(taken: number[], tokens: string[]) => void}
   */
  show(taken, tokens) {
    this.taken.hidden = false;
    this.taken.replaceChildren(
      ...phrase(this.captions["it takes"]),
      " ",
      ...tokens.slice(-MOST_SHOWN).map((token, n) => {
        const weight = taken[Math.max(0, tokens.length - MOST_SHOWN) + n],
          word = element("bdi", { title: fixed(weight, 2) }, token);
        tint(word, Math.sqrt(weight), 1, "share");
        return word;
      }),
    );
  }
}

if (inWorker) serve(languageJobs());
else start("sa-language", LanguagePage);
