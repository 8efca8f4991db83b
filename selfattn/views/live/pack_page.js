/*
 * What pages share that run a pack: the one inside, then the one next to the page; or one that is opened or dropped.
 */

import { filled } from "../compute.js";
import { button, element, inflate } from "../kit/page.js";
import { KernelPage } from "./kernel_page.js";
import { droppedPack, Fault, fetchedPack } from "./pack.js";

/** @typedef {Blob | Uint8Array} Packed */

export class PackPage extends KernelPage {
  /** @type {Packed | null} */ pack = null;
  name = "";

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    super(root, data, wasm);
    const { captions } = this, open = (/** @type {File | undefined} */ file) => file && this.load(file, file.name);
    this.bar = element("progress", { hidden: true, ariaLabel: captions.progress });
    const input = element("input", {
      type: "file",
      hidden: true,
      accept: ".sapack",
      onchange: () => open(input.files?.[0]),
    });
    this.opener = [input, button({ onclick: () => input.click() }, captions["open pack"]), this.bar];
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      const { dataTransfer } = event;
      if (dataTransfer) this.during(new Promise((done) => done(droppedPack(dataTransfer)))).then(open);
    });
  }

  failed() {
    this.bar.hidden = true;
  }

  /** @param {string} name of the model inside the page, after which the one next to it is fetched */
  async begin(name) {
    const { pack, address, size } = this.data, near = location.protocol.startsWith("http");
    await this.load(new Uint8Array(await inflate(pack)), name);
    if (!address) return;
    this.bar.hidden = !near;
    const found = await this.during(
      near
        ? fetchedPack(address, (bytes) => (this.bar.value = bytes / size))
        : Promise.reject(new Fault("not fetched", { address, status: 0 })),
    );
    if (found) await this.load(found, address);
    this.bar.hidden = true;
  }

  /** @type {(pack: Packed, name: string) => Promise<void>} run a model, and show it */
  async load(pack, name) {
    this.status.textContent = filled(this.captions["reading model"], { name });
    const model = await this.ask("load", { pack, name });
    if (!model) return;
    Object.assign(this, { model, pack, name: model.name || name });
    await this.loaded();
  }

  /** Show what the worker said of a model that it has read. */
  async loaded() {}
}
