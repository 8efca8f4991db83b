/*
 * Attention and its gradients, stage by stage, for the way back. It draws nothing.
 *
 * dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P∘(dP − mean), dQ = scale·dS·K, dK = scale·dSᵀ·Q, dx = dQ·Wqᵀ + dK·Wkᵀ + dV·Wvᵀ.
 */

import { dot, Matrix, range, softmax } from "./compute.js";

/** @typedef {import("./way_back.js").WayBackData} WayBackData */

/** @typedef {"x" | "Q" | "K" | "V" | "S" | "P" | "O"} Stage */
/** @typedef {Partial<Record<Stage, Matrix>>} Stages */
/** @typedef {{ weight: Matrix, bias: number[] }} Projection */

/** @param {number[][]} rows */
const matrixOf = (rows) => Matrix.of(rows.length, rows[0]?.length ?? 0, (i, j) => rows[i][j]);

/** @type {(a: Matrix, b: Matrix) => Matrix} */
const product = (a, b) => Matrix.of(a.rows, b.columns, (i, j) => dot(a.columns, (k) => a.at(i, k) * b.at(k, j)));

/** @param {Matrix} a */
const transposed = (a) => Matrix.of(a.columns, a.rows, (i, j) => a.at(j, i));

export class WayBackModel {
  /** @param {WayBackData} given */
  constructor({ forward, weights, scale, closed, added, wish }) {
    /** @type {Record<string, Matrix>} what may be changed */
    this.inputs = Object.fromEntries(
      (weights ? ["x"] : ["Q", "K", "V"]).map((name) => [name, matrixOf(forward[name])]),
    );
    /** @type {Record<string, Projection> | null} */
    this.projections =
      weights &&
      Object.fromEntries(
        Object.entries(weights).map(([name, { weight, bias }]) => [name, { weight: matrixOf(weight), bias }]),
      );
    this.scale = scale;
    this.closed = matrixOf(closed);
    this.added = matrixOf(added);
    this.wish = matrixOf(wish);
  }

  /** @type {Stage[]} */
  get stages() {
    return [...(this.projections ? /** @type {Stage[]} */ (["x"]) : []), "Q", "K", "V", "S", "P", "O"];
  }

  /** @type {(given?: Stages) => Record<string, Matrix>} all stages; a given one replaces the computed one */
  forward(given = {}) {
    const x = given.x ?? this.inputs.x;
    const projected = (/** @type {"Q" | "K" | "V"} */ name) => {
      const replaced = given[name];
      if (replaced) return replaced;
      if (!this.projections) return this.inputs[name];
      const { weight, bias } = this.projections[name];
      return Matrix.of(x.rows, weight.columns, (i, j) => dot(x.columns, (k) => x.at(i, k) * weight.at(k, j)) + bias[j]);
    };
    const Q = projected("Q"), K = projected("K"), V = projected("V");
    const S =
      given.S ??
      Matrix.of(Q.rows, K.rows, (i, j) =>
        this.closed.at(i, j)
          ? -Infinity
          : this.scale * dot(Q.columns, (k) => Q.at(i, k) * K.at(j, k)) + this.added.at(i, j),
      );
    const open = Matrix.of(S.rows, S.columns, (i, j) => 1 - this.closed.at(i, j));
    const P = given.P ?? softmax(S, open);
    return { ...(x ? { x } : {}), Q, K, V, S, P, O: given.O ?? product(P, V) };
  }

  /** @type {(f: Record<string, Matrix>) => { gradients: Record<string, Matrix>, means: number[] }} */
  backward({ Q, K, V, P }) {
    const O = this.wish, dV = product(transposed(P), O), dP = product(O, transposed(V));
    const means = range(P.rows).map((i) => dot(P.columns, (j) => P.at(i, j) * dP.at(i, j)));
    const S = Matrix.of(P.rows, P.columns, (i, j) => P.at(i, j) * (dP.at(i, j) - means[i]));
    const scaled = (/** @type {Matrix} */ m) => Matrix.of(m.rows, m.columns, (i, j) => this.scale * m.at(i, j));
    const found = { Q: scaled(product(S, K)), K: scaled(product(transposed(S), Q)), V: dV, S, P: dP, O };
    if (!this.projections) return { gradients: found, means };
    const ways = range(3).map((n) => this.way(found, "QKV"[n]));
    return {
      gradients: {
        x: Matrix.of(ways[0].rows, ways[0].columns, (i, j) => ways[0].at(i, j) + ways[1].at(i, j) + ways[2].at(i, j)),
        ...found,
      },
      means,
    };
  }

  /** @type {(gradients: Record<string, Matrix>, name: string) => Matrix} the gradient of x through one projection */
  way(gradients, name) {
    const { weight } = /** @type {Record<string, Projection>} */ (this.projections)[name];
    return product(gradients[name], transposed(weight));
  }

  /** @param {Record<string, Matrix>} f @returns the sum of the output times dO */
  value({ O }) {
    return dot(O.rows, (i) => dot(O.columns, (j) => O.at(i, j) * this.wish.at(i, j)));
  }

  /**
   * The finite difference.
   * @type {(f: Record<string, Matrix>, stage: Stage, i: number, j: number, step: number) => number}
   */
  slope(f, stage, i, j, step) {
    const moved = (/** @type {number} */ by) =>
      this.value(
        this.forward({
          [stage]: Matrix.of(
            f[stage].rows,
            f[stage].columns,
            (r, c) => f[stage].at(r, c) + (r === i && c === j ? by : 0),
          ),
        }),
      );
    return (moved(step) - moved(-step)) / (2 * step);
  }
}
