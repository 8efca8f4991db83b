/*
 * What pages share that compute in a worker: the worker, its faults, the first and the last line.
 */

import { element, topOf } from "../kit/page.js";
import { faultOf, KernelWorker } from "./worker.js";

export class KernelPage {
  /** @type {any} what the worker said of its model; null if the worker has ended */ model = null;

  /** @param {HTMLElement} root @param {any} data @param {ArrayBuffer} wasm */
  constructor(root, data, wasm) {
    this.root = root;
    this.data = data;
    this.captions = /** @type {Record<string, string>} */ (data.captions);
    this.worker = new KernelWorker(wasm);
    this.status = element("span.sa-soft", { role: "status" });
    this.built = element("p.sa-soft.sa-built", data.built);
  }

  /** @type {(look: HTMLElement) => HTMLElement} the first line */
  top(look) {
    return topOf(this.root, this.captions, look, "", () => this.recolour());
  }

  /** The paper is dark now, or light. */
  recolour() {}

  /**
   * What a promise gives; a fault is said, and undefined.
   * @template T
   * @param {Promise<T>} promise
   */
  async during(promise) {
    try {
      return await promise;
    } catch (error) {
      this.failed();
      this.status.textContent = faultOf(error, this.captions);
      if (/** @type {Error} */ (error).name === "worker") this.model = null;
    }
  }

  /** @type {KernelWorker["ask"]} what the worker answers; a fault is said, and undefined */
  ask(...request) {
    return this.during(this.worker.ask(...request));
  }

  /** A fault is about to be said. */
  failed() {}
}
