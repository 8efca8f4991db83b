/*
 * A GPT of letters that is trained in the worker: the core's forward and backward passes and AdamW, the loss in this
 * file. It has no document: `training_page.js` asks it.
 */

import { dot, range } from "../compute.js";
import { describeLetters, drawingOf, drawn, lettersOf, seen } from "./letters.js";

/** @typedef {import("./kernel.js").Kernel} Kernel */
/** @typedef {import("./letters.js").Letters} Letters */
/** @typedef {import("./worker.js").Work} Work */

const STD = 0.02; // of initial weights, as nn.GPT draws them
const PROGRESS = 120, LOOK = 600; // milliseconds between losses, and between pictures

/** @type {(settings: Letters & { width: number }) => Record<string, number[]>} the shapes of nn.GPT's arrays */
function shapesOf({ alphabet, layers, context, width: d }) {
  const layer = (/** @type {number} */ n) =>
    Object.fromEntries(
      Object.entries({
        "self_attn.in_proj_weight": [3 * d, d],
        "self_attn.in_proj_bias": [3 * d],
        "self_attn.out_proj.weight": [d, d],
        "self_attn.out_proj.bias": [d],
        "linear1.weight": [4 * d, d],
        "linear1.bias": [4 * d],
        "linear2.weight": [d, 4 * d],
        "linear2.bias": [d],
        "norm1.weight": [d],
        "norm1.bias": [d],
        "norm2.weight": [d],
        "norm2.bias": [d],
      }).map(([name, shape]) => [`layers.${n}.${name}`, shape]),
    );
  return Object.assign(
    { "token_embedding.weight": [alphabet.length, d], "position_embedding.weight": [context, d] },
    ...range(layers).map(layer),
    { "norm.weight": [d], "norm.bias": [d] },
  );
}

/** @type {(settings: Letters & { width: number }) => (name: string) => Float32Array} new weights */
function drawnWeights(settings) {
  const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return (name) => {
    const shape = shapesOf(settings)[name],
      added = /(out_proj|linear2)\.weight$/.test(name) ? Math.sqrt(2 * settings.layers) : 1;
    return Float32Array.from({ length: shape.reduce((a, b) => a * b) }, () =>
      shape.length > 1 ? (STD / added) * normal() : Number(/norm.*weight$/.test(name)),
    );
  };
}

/**
 * The mean cross-entropy, and its gradient.
 * @type {(logits: Float32Array, targets: number[]) => { loss: number, gradient: Float32Array }}
 */
function crossEntropy(logits, targets) {
  const n = targets.length, size = logits.length / n, gradient = new Float32Array(logits.length);
  let loss = 0;
  targets.forEach((target, row) => {
    const own = logits.subarray(row * size, (row + 1) * size),
      most = own.reduce((a, b) => Math.max(a, b)),
      exps = Float64Array.from(own, (x) => Math.exp(x - most)),
      sum = exps.reduce((a, b) => a + b);
    loss += (Math.log(sum) + most - own[target]) / n;
    exps.forEach((x, k) => (gradient[row * size + k] = (x / sum - Number(k === target)) / n));
  });
  return { loss, gradient };
}

/** @typedef {{ tokens: string[], weights: Float32Array }} Look weights: (layers, heads, tokens, tokens) */

export class Trainer {
  step = 0;

  /**
   * @param {Kernel} kernel
   * @param {Letters & { width: number }} settings
   * @param {(name: string) => Float32Array} weights
   */
  constructor(kernel, settings, weights) {
    this.kernel = kernel;
    this.settings = settings;
    this.tokenizer = lettersOf(settings.alphabet);
    this.model = kernel.transformer(describeLetters(weights, settings));
    const places = {
      parameter: "positions",
      layer: -1,
      at: this.model.positions,
      length: settings.context * settings.width,
    };
    this.parameters = [...this.model.parameters, places]; // the rows' gradient is that of positions
    this.arrays = this.parameters.map(({ at, length }) => kernel.read(new Float32Array(), at, length));
    this.moments = this.arrays.map(({ length }) => ({
      mean: new Float32Array(length),
      square: new Float32Array(length),
    }));
    this.table = this.parameters.findIndex(({ parameter }) => parameter === "table");
  }

  /**
   * A step of AdamW on sequences, of which each token but the last is to be followed by the next; returns the loss
   * before it.
   * @type {(texts: number[][], lr: number) => number}
   */
  train(texts, lr) {
    const {
        kernel,
        model,
        arrays,
        table,
        settings: { width: columns },
      } = this,
      lengths = texts.map(({ length }) => length - 1),
      weight = arrays[table];
    const { rows } = model.forward(texts.flatMap((ids) => ids.slice(0, -1)), { lengths, keep: true });
    const { loss, gradient } = crossEntropy(
      /** @type {Float32Array} */ (kernel.linear({ x: rows, weight, columns }).y),
      texts.flatMap((ids) => ids.slice(1)),
    );
    const head = kernel.linear({ x: rows, weight, columns, dy: gradient }),
      { gradients, rows: ofRows } = model.backward(/** @type {Float32Array} */ (head.dx));
    const ofPlaces = new Float32Array(arrays[arrays.length - 1].length);
    let from = 0;
    for (const length of lengths) for (let k = 0; k < length * columns; k++) ofPlaces[k] += ofRows[from++];
    this.step++;
    arrays.forEach((parameter, n) => {
      const own = n < gradients.length ? /** @type {Float32Array} */ (gradients[n]) : ofPlaces;
      // The head is the table.
      if (n === table) own.forEach((x, k) => (own[k] = x + /** @type {Float32Array} */ (head.dWeight)[k]));
      kernel.adamw({ parameter, gradient: own, ...this.moments[n], step: this.step, lr });
      new Float32Array(kernel.view.buffer, this.parameters[n].at, parameter.length).set(parameter);
    });
    return loss;
  }

  /** @type {(ids: number[], more: number) => string} what the model writes after some tokens */
  write(ids, more) {
    const { model, settings: { width } } = this, added = /** @type {number[]} */ ([]);
    while (added.length < more) {
      const { rows } = model.forward([...ids, ...added].slice(-this.settings.context));
      added.push(drawn(drawingOf(model.logits(rows.slice(-width)), { temperature: 0.7, topP: 0.95 }), Math.random()));
    }
    return this.tokenizer.decode(added);
  }

  /** @type {(text: string) => Look} the weights of all heads for a text */
  look(text) {
    const ids = this.tokenizer.encode(text).ids.slice(0, this.settings.context);
    const { weights } = this.model.forward(ids, { weights: true });
    return {
      tokens: ids.map((id) => seen(this.tokenizer.spelled(id))),
      weights: /** @type {Float32Array} */ (weights),
    };
  }
}

/** @type {() => Record<string, Work>} the worker's jobs: begin anew, train until it is stopped */
export function trainingJobs() {
  /** @type {Trainer | null} */ let trainer = null;
  /** @type {number[]} */ let ids = [];
  return {
    begin: ({ text, settings, sample }, { kernel }) => {
      trainer?.model.free();
      trainer = new Trainer(kernel, settings, drawnWeights(settings));
      ids = trainer.tokenizer.encode(text).ids;
      return { parameters: dot(trainer.arrays.length, (n) => trainer?.arrays[n].length ?? 0), ...trainer.look(sample) };
    },
    train: async ({ lr, steps, batch, sample }, job) => {
      const own = trainer, losses = /** @type {number[]} */ ([]), begun = performance.now();
      if (!own) return null;
      const length = Math.min(own.settings.context + 1, ids.length);
      let told = begun, looked = begun;
      for (let n = 0; n < steps && !job.stopped && own === trainer; n++) {
        losses.push(own.train(range(batch).map(() => {
          const from = Math.floor(Math.random() * (ids.length - length + 1));
          return ids.slice(from, from + length);
        }), lr));
        const now = performance.now();
        if (now - told > PROGRESS) {
          /** @type {Partial<Look> & { written?: string }} */
          const look =
            now - looked > LOOK
              ? { ...own.look(sample), written: own.write(own.tokenizer.encode(sample).ids, 60) }
              : {};
          if (look.written) looked = now;
          job.progress({ losses: losses.splice(0), step: own.step, ...look });
          told = now;
        }
        await job.pause();
      }
      if (own !== trainer) return null; // its model is freed
      return {
        losses,
        step: own.step,
        steps: own.step,
        ms: performance.now() - begun,
        ...own.look(sample),
        written: own.write(own.tokenizer.encode(sample).ids, 60),
      };
    },
  };
}
