/*
 * What pages of models share: files that are dropped, and the explorer, which is fed again and again.
 */

import { ExplorerPage } from "../explorer.js";
import { isSpecial, KINDS } from "./encoder.js";
import { dropped } from "./readers.js";
import { filled } from "../../../../selfattn/views/compute.js";
import { element } from "../../../../selfattn/views/kit/page.js";
import { KernelPage } from "../../../../selfattn/views/live/kernel_page.js";

/** @typedef {import("../explorer_parts.js").StoredText} StoredText */
/** @typedef {import("./readers.js").Given} Given */

/**
 * The explorer below the fields, which have its first line; each change of a text makes a new one, with the choices of
 * the last.
 */
class LiveExplorer extends ExplorerPage {
  top() {
    return this.look;
  }
}

/**
 * Sentences that name a special token, if it is the only one of its kind: `_places` of views/explore.py.
 * @type {(texts: StoredText[], captions: Record<string, string>) => Record<string, string>}
 */
function placesOf(texts, captions) {
  const all = texts.flatMap(({ queries }) => queries.slice(1)).filter(isSpecial);
  return Object.assign(
    {},
    ...Object.entries({
      first: [texts.map(({ queries }) => queries[0]), "first token"],
      separators: [all, "separators"],
    }).map(([kind, [tokens, plural]]) => {
      const only = new Set(tokens).size === 1 && isSpecial(tokens[0]) ? tokens[0] : "",
        where = only || captions[String(plural)];
      return {
        ...(only && { [`kind.${kind}`]: only }),
        [`means.${kind}`]: filled(captions[`means.${kind}`], { where }),
        [`place.${kind}`]: where,
      };
    }),
  );
}

export class ModelPage extends KernelPage {
  /** @type {ExplorerPage | undefined} */ explorer;
  /** @type {Given[]} the files of the model */ given = [];
  name = "";

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    super(root, data, wasm);
    this.bar = element("progress", { hidden: true, ariaLabel: data.captions.progress ?? "" });
    this.shown = element("div", { className: "sa-explorer" });
  }

  recolour() {
    this.explorer?.recolour();
  }

  failed() {
    this.bar.hidden = true;
  }

  /** @param {(given: Given[]) => unknown} load takes what is dropped anywhere onto the page */
  dropping(load) {
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer?.items.length) {
        this.during(dropped(event.dataTransfer)).then((given) => given && load(given));
      }
    });
  }

  /**
   * What the worker's job `load` says, while a bar fills.
   * @type {(given: Given[], name: string, more?: object) => Promise<any>}
   */
  async loaded(given, name, more = {}) {
    this.status.textContent = filled(this.captions["reading model"], { name });
    this.bar.hidden = false;
    const model = await this.during(
      this.worker.ask(
        "load",
        { given, name, ...more },
        { progress: (/** @type {number} */ part) => (this.bar.value = part) },
      ),
    );
    if (model) Object.assign(this, { model, given, name, explorer: undefined });
    return model;
  }

  /** @type {(found: any, before: ExplorerPage | undefined) => void} draw all heads of the texts that a job looked at */
  explore({ texts, bytes, heads, habits }, before) {
    const captions = { ...this.captions, ...placesOf(texts, this.captions) };
    this.explorer = new LiveExplorer(
      this.shown,
      { name: this.name, off: null, heads, habits, names: KINDS, texts, ribbons: this.data.ribbons, captions },
      bytes.buffer,
      before,
    );
  }
}
