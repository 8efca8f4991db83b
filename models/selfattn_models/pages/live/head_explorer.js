/*
 * What pages of models share: packs that they have, fetch or are given, and the explorer, which is fed again and again.
 */

import { ExplorerPage } from "../explorer.js";
import { isSpecial, KINDS } from "./encoder.js";
import { filled } from "../../../../selfattn/views/compute.js";
import { button, element, inflate } from "../../../../selfattn/views/kit/page.js";
import { KernelPage } from "../../../../selfattn/views/live/kernel_page.js";
import { droppedPack, fetchedPack } from "../../../../selfattn/views/live/pack.js";

/** @typedef {import("../explorer_parts.js").StoredText} StoredText */

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
  /** @type {Blob | Uint8Array | null} */ pack = null;
  name = "";

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    super(root, data, wasm);
    this.bar = element("progress", { hidden: true, ariaLabel: data.captions.progress ?? "" });
    this.shown = element("div", { className: "sa-explorer" });
    const open = (/** @type {File | undefined} */ file) => file && this.load(file, file.name);
    const input = element("input", {
      type: "file",
      hidden: true,
      accept: ".sapack",
      onchange: () => open(input.files?.[0]),
    });
    this.opened = [input, button({ onclick: () => input.click() }, data.captions["open pack"])];
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      const { dataTransfer } = event;
      if (dataTransfer) this.during(new Promise((done) => done(droppedPack(dataTransfer)))).then(open);
    });
  }

  /**
   * Run a model, and show it.
   * @type {(pack: Blob | Uint8Array, name: string) => Promise<void>}
   */
  async load(pack, name) {}

  /** @param {string} name of the model inside the page, after which the one next to it is fetched */
  async begin(name) {
    const { pack, address, size } = this.data;
    await this.load(new Uint8Array(await inflate(pack)), name);
    if (!address || !location.protocol.startsWith("http")) return;
    this.bar.hidden = false;
    const found = await this.during(fetchedPack(address, (bytes) => (this.bar.value = bytes / size)));
    if (found) await this.load(found, address);
  }

  recolour() {
    this.explorer?.recolour();
  }

  failed() {
    this.bar.hidden = true;
  }

  /** @type {(pack: Blob | Uint8Array, name: string) => Promise<any>} what the worker's job `load` says */
  async loaded(pack, name) {
    this.status.textContent = filled(this.captions["reading model"], { name });
    const model = await this.during(this.worker.ask("load", { pack, name }));
    if (model) Object.assign(this, { model, pack, name, explorer: undefined });
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
