/*
 * Computes in a worker, so that typing never waits. A live page's script ends with
 *     if (inWorker) serve(JOBS); else start("sa-…", Page);
 * and the worker runs the same script. Of requests with one name the newest waits alone; a long job works in slices.
 */

import { filled } from "../compute.js";
import { failure, Kernel } from "./kernel.js";

/**
 * `pause` lets messages in, such as a stop.
 * @typedef {{ kernel: Kernel, stopped: boolean, progress: (value: unknown) => void, pause: () => Promise<void> }} Job
 */
/** @typedef {(args: any, job: Job) => unknown} Work its result, or a promise of it */
/**
 * @typedef {{ id: number, name: string, args: unknown, transfer: Transferable[], progress: (value: any) => void,
 *   done: (result: any) => void, failed: (error: Error) => void }} Asked
 */

export const inWorker = typeof document === "undefined";
// @ts-expect-error: Python names the function of the whole page so, and it is no script in a widget
const OWN_SCRIPT = `(${$script})()`;
const PATIENCE = 60_000; // milliseconds without a word from the worker while it works

/** @type {(result: any) => Transferable[]} the memory of a result's arrays, which moves to the page */
const movable = (result) => [
  ...new Set(
    Object.values(result ?? {})
      .filter(ArrayBuffer.isView)
      .map(({ buffer }) => /** @type {ArrayBuffer} */ (buffer)),
  ),
];

/** @param {Record<string, Work>} jobs by their names */
export function serve(jobs) {
  const { port1, port2 } = new MessageChannel();
  /** @type {(() => void)[]} */ const waiting = [];
  port1.onmessage = () => waiting.shift()?.();
  const pause = () => /** @type {Promise<void>} */ (new Promise((on) => {
    waiting.push(on);
    port2.postMessage(0);
  }));
  const post = (/** @type {object} */ message, /** @type {Transferable[]} */ moved = []) =>
    /** @type {any} */ (globalThis).postMessage(message, moved);
  /** @type {Map<number, Job>} */ const running = new Map();
  /** @type {Promise<Kernel>} */ let kernel;
  globalThis.onmessage = async ({ data: { id, name, args, wasm, stop } }) => {
    if (wasm) {
      kernel = Kernel.load(wasm).catch((/** @type {Error} */ error) => {
        throw failure("wasm", error.message);
      });
      kernel.catch(() => {}); // each request says it
      return;
    }
    if (stop !== undefined) {
      const job = running.get(stop);
      if (job) job.stopped = true;
      return;
    }
    try {
      const job = /** @type {Job} */ ({ stopped: false, progress: (value) => post({ id, progress: value }), pause });
      running.set(id, job);
      job.kernel = await kernel;
      const result = await jobs[name](args, job);
      post({ id, result }, movable(result));
    } catch (error) {
      const { name: kind, message, sentence, values } = /** @type {any} */ (error);
      post({
        id,
        error: {
          name: error instanceof RangeError || error instanceof WebAssembly.RuntimeError ? "memory" : kind,
          message,
          sentence,
          values,
        },
      });
    }
    running.delete(id);
  };
}

/** The page's end: `ask` returns a promise of a job's result. */
export class KernelWorker {
  /** @type {Worker | null} */ worker = null;
  /** @type {Map<string, Asked>} */ running = new Map();
  /** @type {Map<string, Asked>} */ waiting = new Map();
  count = 0;
  timer = 0;

  /** @param {ArrayBuffer} wasm @param {number} [patience] milliseconds */
  constructor(wasm, patience = PATIENCE) {
    this.wasm = wasm;
    this.patience = patience;
  }

  /**
   * A job's result; undefined if a newer request of the name took its place before it began.
   * @type {(name: string, args: unknown, options?: { transfer?: Transferable[], progress?: (value: any) => void }) =>
   *   Promise<any>}
   */
  ask(name, args, options = {}) {
    return new Promise((done, failed) => {
      const { transfer = [], progress = () => {} } = options;
      const request = { id: ++this.count, name, args, transfer, progress, done, failed };
      this.waiting.get(name)?.done(undefined);
      this.waiting.delete(name);
      if (this.running.has(name)) this.waiting.set(name, request);
      else this.send(request);
    });
  }

  /** @param {string} name whose job is to end early, with the result that it has */
  stop(name) {
    const request = this.running.get(name);
    this.waiting.get(name)?.done(undefined);
    this.waiting.delete(name);
    if (request) this.worker?.postMessage({ stop: request.id });
  }

  /** @param {Asked} request */
  send(request) {
    this.running.set(request.name, request);
    try {
      this.worker ??= this.begin();
      this.worker.postMessage({ id: request.id, name: request.name, args: request.args }, request.transfer);
      this.wait();
    } catch (error) {
      this.running.delete(request.name);
      request.failed(/** @type {Error} */ (error));
    }
  }

  begin() {
    if (typeof WebAssembly === "undefined") throw failure("wasm", "there is no WebAssembly");
    const address = URL.createObjectURL(new Blob([OWN_SCRIPT], { type: "text/javascript" })),
      worker = new Worker(address);
    worker.onmessage = ({ data }) => this.hear(data);
    worker.onerror = (event) => {
      event.preventDefault();
      this.end();
    };
    worker.postMessage({ wasm: this.wasm });
    return worker;
  }

  /**
   * @param {{ id: number, result?: unknown, error?: { name: string, message: string }, progress?: unknown }} message
   */
  hear({ id, result, error, progress }) {
    this.wait();
    const request = [...this.running.values()].find((each) => each.id === id);
    if (!request) return;
    if (progress !== undefined) return request.progress(progress);
    this.running.delete(request.name);
    if (error) request.failed(Object.assign(new Error(error.message), error));
    else request.done(result);
    const next = this.waiting.get(request.name);
    this.waiting.delete(request.name);
    if (next) this.send(next);
    this.wait();
  }

  /** Expect a word from the worker while it works. */
  wait() {
    clearTimeout(this.timer);
    if (this.running.size) this.timer = setTimeout(() => this.end(), this.patience);
  }

  /** The worker has ended; the next request begins a new one, which knows nothing of the old one's models. */
  end() {
    const lost = [...this.running.values(), ...this.waiting.values()];
    clearTimeout(this.timer);
    this.worker?.terminate();
    this.worker = null;
    this.running.clear();
    this.waiting.clear();
    for (const each of lost) each.failed(failure("worker", ""));
  }
}

/**
 * What went wrong and what to do, in the page's language.
 * @type {(error: any, texts: Record<string, string>) => string}
 */
export function faultOf(error, texts) {
  const said = texts[error.sentence] ?? texts[error.name];
  return said ? filled(said, error.values ?? {}) : String(error.message);
}
