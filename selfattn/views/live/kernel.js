/*
 * The core in WebAssembly (csrc/wasm/api.c): attention and its gradients, products, transformers, AdamW. Numbers have
 * the bits that Python has with the instruction set "baseline". It has no DOM: a worker runs it.
 */

/** @typedef {Float32Array | Float64Array} Floats */
/**
 * (out, in); int8 has a scale for each 128 numbers of a row.
 * @typedef {Float32Array | { values: Int8Array, scale: Float32Array }} Weights
 */
/** @typedef {{ weight: Weights, bias?: Float32Array | null }} Affine */
/** @typedef {{ weight: Float32Array, bias?: Float32Array | null, eps: number, rms?: boolean }} NormOfModel */
/**
 * query is (heads, L, E), key (keyHeads, S, E), value (keyHeads, S, Dv); mask (L, S) of the type of query, or 1 where a
 * pair is open; slopes of ALiBi and sinks by heads; gradOut (heads, L, Dv) asks for gradients.
 * @typedef {{ query: Floats, key: Floats, value: Floats, L: number, S: number, heads?: number, keyHeads?: number,
 *   mask?: Floats | Uint8Array | null, slopes?: number[] | null, sinks?: number[] | null,
 *   causal?: "upper_left" | "lower_right" | null, window?: [number | null, number | null] | null,
 *   scale?: number | null, softcap?: number | null, dropout?: number, seed?: bigint | number, weights?: boolean,
 *   gradOut?: Floats | null }} AttentionCall
 */
/**
 * width is that of a head; hidden 0: there is no feed-forward network; weights is the kind of the projections;
 * parameters have the names of PARAMETERS.
 * @typedef {{ heads: number, keyHeads?: number, width: number, hidden?: number, eps: [number, number],
 *   rms?: [boolean, boolean], normFirst?: boolean, causal?: boolean, windowLeft?: number | null,
 *   windowRight?: number | null, scale?: number, softcap?: number | null, activation?: string,
 *   weights?: "float32" | "int8", rotary?: { cos: Float32Array, sin: Float32Array, width: number,
 *   interleaved?: boolean } | null, parameters: Record<string, Affine | null | undefined> }} LayerOfModel
 */
/**
 * table is (vocabulary, d), without one the input is rows; tokenTypeRow (d,) is added to its rows; positions (most
 * tokens, d); output is the head of a language model, "table": the table.
 * @typedef {{ d: number, vocabulary?: number, table?: Weights | null,
 *   tokenTypeRow?: Float32Array | null, positions?: Float32Array | null, embeddingNorm?: NormOfModel | null,
 *   finalNorm?: NormOfModel | null, output?: Affine | "table" | null, layers: LayerOfModel[] }} ModelDescription
 */

// The order of SA_QUERY …, of which later ones are not used here.
const PARAMETERS = ["query", "key", "value", "output", "attentionNorm", "up", "gate", "down", "feedForwardNorm"];
const ACTIVATION_NAMES = ["none", "relu", "gelu", "gelu_tanh", "silu"]; // the order of SA_ACT_NONE …
const POOLINGS = [null, "mean", "first", "last"]; // the order of SA_EACH_ROW …
export const GROUP = 128; // numbers of a row that share a scale
const MOST_BYTES = 2 ** 31 - 128; // of one array, with 32-bit addresses

/** @type {(name: string, message: string) => Error} an error that a page has a sentence for */
export const failure = (name, message) => Object.assign(new Error(message), { name });

/** @type {(what: string, array: ArrayLike<unknown>, ...shape: number[]) => void} */
function checkLength(what, array, ...shape) {
  const wanted = shape.reduce((n, each) => n * each, 1);
  if (array.length !== wanted) {
    throw failure("sizes", `${what} must have ${shape.join(" x ")} = ${wanted} numbers, not ${array.length}`);
  }
}

/** @type {(weight: Weights) => { values: Int8Array, scale: Float32Array } | null} null if weights are float32 */
const int8Of = (weight) => (weight instanceof Float32Array ? null : weight);

export class Kernel {
  /** @type {number[]} what `within` gives back */ held = [];

  /** @param {ArrayBuffer | Uint8Array} bytes of selfattn.wasm @returns {Promise<Kernel>} */
  static async load(bytes) {
    const { instance } = await WebAssembly.instantiate(bytes, {});
    return new Kernel(instance.exports);
  }

  /** @param {any} core */
  constructor(core) {
    this.core = core;
    /** @type {Record<string, { value: number, kind: string }>} offsets, sizes and constants by their names */
    this.layout = {};
    for (let at = core.layout(); this.view.getUint32(at, true); at += 12) {
      const [name, value, kind] = [0, 4, 8].map((offset) => this.view.getInt32(at + offset, true));
      this.layout[this.text(name)] = { value, kind: String.fromCharCode(kind) };
    }
  }

  /** A growing memory detaches views, so that each use makes one. */
  get view() {
    return new DataView(this.core.memory.buffer);
  }

  /** @param {number} at */
  text(at) {
    const bytes = new Uint8Array(this.core.memory.buffer);
    return new TextDecoder().decode(bytes.slice(at, bytes.indexOf(0, at)));
  }

  /** @type {(bytes: number) => number} the address of zeros, which `within` gives back */
  take(bytes) {
    const at = bytes <= MOST_BYTES ? this.core.take(bytes) >>> 0 : 0;
    if (at === 0) throw failure("memory", `there is no memory for ${bytes} bytes`);
    this.held.push(at);
    return at;
  }

  /**
   * The address of a copy; 0 for none.
   * @type {(array: Floats | Int8Array | Uint8Array | BigInt64Array | null | undefined) => number}
   */
  copy(array) {
    if (!array) return 0;
    const at = this.take(array.byteLength);
    new Uint8Array(this.core.memory.buffer, at, array.byteLength).set(
      new Uint8Array(array.buffer, array.byteOffset, array.byteLength),
    );
    return at;
  }

  /** @type {<T extends Floats>(like: T, at: number, n: number) => T} a copy of n numbers */
  read(like, at, n) {
    const type = /** @type {any} */ (like.constructor);
    return new type(this.core.memory.buffer, at, n).slice();
  }

  /**
   * @template T
   * @param {() => T} act
   * @param {number[]} [kept]
   * @returns {T} of act, run with memory that is given back at the end, or if `kept` is given is added to it
   */
  within(act, kept) {
    const before = this.held;
    this.held = [];
    try {
      const result = act();
      kept?.push(...this.held.splice(0));
      return result;
    } finally {
      for (const at of this.held) this.core.give(at);
      this.held = before;
    }
  }

  /**
   * Write fields, each a number or several in a row; the address.
   * @type {(struct: string, fields?: Record<string, any>, at?: number) => number}
   */
  put(struct, fields = {}, at = this.take(this.layout[struct].value)) {
    const { view } = this;
    for (const [name, value] of Object.entries(fields)) {
      const { value: offset, kind } = this.layout[`${struct}.${name}`], size = { d: 8, q: 8, b: 1 }[kind] ?? 4;
      for (const [n, each] of (Array.isArray(value) ? value : [value]).entries()) {
        const to = at + offset + n * size;
        if (kind === "d") view.setFloat64(to, each, true);
        else if (kind === "q") view.setBigUint64(to, BigInt.asUintN(64, BigInt(each)), true);
        else if (kind === "b") view.setUint8(to, each ? 1 : 0);
        else view.setInt32(to, each, true);
      }
    }
    return at;
  }

  /**
   * Arrays of heads.
   * @type {(struct: string, at: number, name: string, data: number, rows: number, columns: number, dtype: number,
   *   shared?: boolean) => void}
   */
  tensor(struct, at, name, data, rows, columns, dtype, shared = false) {
    const item = { [this.layout.SA_F64.value]: 8, [this.layout.SA_BOOL.value]: 1 }[dtype] ?? 4;
    const strides = {
      "m.row_stride": columns * item,
      "m.col_stride": item,
      "lead_stride[0]": shared ? 0 : rows * columns * item,
    };
    this.put(
      "sa_tensor",
      { "m.data": data, "m.dtype": dtype, ...strides },
      at + this.layout[`${struct}.${name}`].value,
    );
  }

  /** @param {number} status of api.c */
  check(status) {
    if (status === 9) throw failure("memory", "there is no memory for the call");
    if (status !== 0) {
      throw failure("sizes", status === 1 ? "the call is too large" : "a size, an id or an offset does not fit");
    }
  }

  /**
   * @param {AttentionCall} call
   * @returns {{ out: Floats, weights?: Floats, dQuery?: Floats, dKey?: Floats, dValue?: Floats }}
   */
  attention(call) {
    const {
      query,
      key,
      value,
      L,
      S,
      heads = 1,
      keyHeads = heads,
      mask,
      slopes,
      sinks,
      causal,
      window,
      scale,
      softcap,
      dropout = 0,
      seed = 0,
      weights,
      gradOut,
    } = call;
    if (![L, S, heads, keyHeads].every((n) => Number.isInteger(n) && n > 0) || heads % keyHeads) {
      throw failure("sizes", "sizes must be positive, and keyHeads divide heads");
    }
    const E = query.length / heads / L, Dv = value.length / keyHeads / S;
    if (![E, Dv].every((n) => Number.isInteger(n) && n > 0)) {
      throw failure("sizes", `query or value does not have heads of ${L} or ${S} rows`);
    }
    checkLength("key", key, keyHeads, S, E);
    if (mask) checkLength("mask", mask, L, S);
    for (const each of [slopes, sinks]) if (each) checkLength("slopes", each, heads);
    if (gradOut) checkLength("gradOut", gradOut, heads, L, Dv);
    const wide = query instanceof Float64Array,
      size = query.BYTES_PER_ELEMENT,
      { SA_F32, SA_F64, SA_BOOL, SA_UNBOUNDED, SA_MAX_LENGTH } = this.layout;
    for (const each of [key, value, gradOut, mask instanceof Uint8Array ? null : mask]) {
      if (each && each.constructor !== query.constructor) throw failure("sizes", "arrays must have the type of query");
    }
    const dtype = (wide ? SA_F64 : SA_F32).value, most = SA_MAX_LENGTH.value;
    const bound = (/** @type {number | null | undefined} */ n) =>
      n === null || n === undefined || n > most ? SA_UNBOUNDED.value : Math.max(0, n);
    return this.within(() => {
      const a = this.put("sa_attention", {
        L,
        S,
        E,
        Dv,
        n_lead: 1,
        "lead[0]": heads,
        gqa: heads / keyHeads,
        f64: wide,
        scale: scale ?? 1 / Math.sqrt(E),
        softcap: softcap ?? 0,
        causal: !!causal,
        diagonal: causal === "lower_right" ? S - L : 0,
        window_left: bound(window?.[0]),
        window_right: bound(window?.[1]),
        dropout_p: dropout,
        seed,
      });
      const g = gradOut ? this.put("sa_attention_gradients", { a }) : 0;
      const give = (
        /** @type {string} */ name,
        /** @type {number} */ data,
        /** @type {number} */ rows,
        /** @type {number} */ columns,
        type = dtype,
        shared = false,
      ) => {
        this.tensor("sa_attention", a, name, data, rows, columns, type, shared);
        return data;
      };
      give("query", this.copy(query), L, E);
      give("key", this.copy(key), S, E);
      give("value", this.copy(value), S, Dv);
      if (mask) give("mask", this.copy(mask), L, S, mask instanceof Uint8Array ? SA_BOOL.value : dtype, true);
      if (slopes) give("alibi", this.copy(Float64Array.from(slopes)), 1, 1, SA_F64.value);
      if (sinks) give("sinks", this.copy(Float64Array.from(sinks)), 1, 1, SA_F64.value);
      const out = give("out", this.take(heads * L * Dv * size), L, Dv);
      const shown = weights ? give("weights", this.take(heads * L * S * size), L, S) : 0;
      /** @type {[string, Floats, number, number][]} name, array, rows, columns */
      const wanted = [["dquery", query, L, E], ["dkey", key, S, E], ["dvalue", value, S, Dv]];
      const gradients = g ? wanted.map(([name, { byteLength }, rows, columns]) => {
        const data = this.take(byteLength);
        this.tensor("sa_attention_gradients", g, name, data, rows, columns, dtype);
        return data;
      }) : [];
      if (g) {
        give("stats", this.take(heads * L * 2 * size), L, 2);
        this.tensor("sa_attention_gradients", g, "grad_out", this.copy(gradOut), L, Dv, dtype);
        // Its strides order the additions.
        if (mask && !(mask instanceof Uint8Array)) {
          this.tensor("sa_attention_gradients", g, "dmask", 0, L, S, dtype, true);
        }
      }
      this.check(this.core.attention(a, g));
      const [dQuery, dKey, dValue] = gradients.map((at, n) => this.read(query, at, wanted[n][1].length));
      return {
        out: this.read(query, out, heads * L * Dv),
        ...(shown && { weights: this.read(query, shown, heads * L * S) }),
        ...(g && { dQuery, dKey, dValue }),
      };
    });
  }

  /**
   * x·weightᵀ + bias, or with `dy` its gradients; x is (rows, columns), weight (out, columns).
   * @type {(call: { x: Floats, weight: Floats, bias?: Floats | null, columns: number, dy?: Floats | null }) =>
   *   { y?: Floats, dx?: Floats, dWeight?: Floats, dBias?: Floats }}
   */
  linear({ x, weight, bias, columns, dy }) {
    const rows = x.length / columns, out = weight.length / columns, size = x.BYTES_PER_ELEMENT;
    checkLength("x", x, Math.floor(rows), columns);
    checkLength("weight", weight, Math.floor(out), columns);
    if (bias) checkLength("bias", bias, out);
    if (dy) checkLength("dy", dy, rows, out);
    return this.within(() => {
      const y = dy ? 0 : this.take(rows * out * size),
        [dx, dweight, dbias] = dy ? [rows * columns, out * columns, out].map((n) => this.take(n * size)) : [];
      const l = this.product(rows, columns, out, this.copy(weight), dy ? dbias : this.copy(bias), this.copy(x), y, {
        f64: size === 8,
      });
      if (!dy) {
        this.check(this.core.linear(l, 0));
        return { y: this.read(x, y, rows * out) };
      }
      this.check(
        this.core.linear(
          l,
          this.put("sa_linear_gradients", { l, "dy[0]": this.copy(dy), dx, "dweight[0]": dweight, "dbias[0]": dbias }),
        ),
      );
      return {
        dx: this.read(x, dx, x.length),
        dWeight: this.read(x, dweight, weight.length),
        dBias: this.read(x, dbias, out),
      };
    });
  }

  /**
   * A sa_linear.
   * @type {(rows: number, columns: number, out: number, weight: number, bias: number, x: number, y: number,
   *   more?: object) => number}
   */
  product(rows, columns, out, weight, bias, x, y, more = {}) {
    return this.put("sa_linear", {
      rows,
      in: columns,
      count: 1,
      "out[0]": out,
      "weight[0]": weight,
      "bias[0]": bias,
      x,
      "y[0]": y,
      ...more,
    });
  }

  /**
   * A step of AdamW; arrays are changed.
   * @type {(call: { parameter: Float32Array, gradient: Float32Array, mean: Float32Array, square: Float32Array,
   *   step: number, lr: number, beta1?: number, beta2?: number, eps?: number, decay?: number }) => void}
   */
  adamw({ parameter, gradient, mean, square, step, lr, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, decay = 0.01 }) {
    for (const each of [gradient, mean, square]) checkLength("gradient", each, parameter.length);
    this.within(() => {
      const written = [parameter, mean, square], [at, meanAt, squareAt] = written.map((each) => this.copy(each));
      const arrays = this.put("sa_update_array", {
        n: parameter.length,
        step,
        parameter: at,
        gradient: this.copy(gradient),
        mean: meanAt,
        square: squareAt,
      });
      this.core.update(
        this.put("sa_update", {
          kind: this.layout.SA_ADAM.value,
          lr,
          weight_decay: decay,
          beta1,
          beta2,
          eps,
          decoupled: true,
          count: 1,
          arrays,
        }),
      );
      for (const [n, each] of written.entries()) each.set(this.read(each, [at, meanAt, squareAt][n], each.length));
    });
  }

  /** @param {ModelDescription} description */
  transformer(description) {
    return new Model(this, description);
  }
}

/** A transformer whose parameters are in the kernel's memory, until `free`. */
class Model {
  /** @type {number[]} memory of the parameters */ memory = [];
  /** @type {number[]} memory of the last call that keeps what gradients read */ last = [];
  /**
   * Addresses of the float32 parameters, in the order of `backward`'s gradients.
   * @type {{ parameter: string, layer: number, at: number, length: number }[]}
   */
  parameters = [];
  size = 0; // numbers of all parameters, whatever their type

  /** @param {Kernel} kernel @param {ModelDescription} description */
  constructor(kernel, description) {
    this.kernel = kernel;
    this.description = description;
    this.most = kernel.layout.SA_MAX_LENGTH.value; // tokens of a sequence
    this.vocabulary = this.output = this.table = this.positions = 0;
    /** @type {Record<string, unknown>} */ this.head = {};
    try {
      kernel.within(() => this.build(description), this.memory);
    } catch (error) {
      this.free();
      throw error;
    }
  }

  free() {
    for (const at of [...this.memory.splice(0), ...this.last.splice(0)]) this.kernel.core.give(at);
  }

  /** @type {(what: string, layer: number, array: Float32Array | null | undefined, ...shape: number[]) => number} */
  parameter(what, layer, array, ...shape) {
    if (!array) return 0;
    checkLength(what, array, ...shape);
    this.size += array.length;
    const at = this.kernel.copy(array);
    this.parameters.push({ parameter: what, layer, at, length: array.length });
    return at;
  }

  /**
   * What products read.
   * @type {(what: string, out: number, columns: number, int8: { values: Int8Array, scale: Float32Array }) => number}
   */
  panels(what, out, columns, { values, scale }) {
    checkLength(what, values, out, columns);
    checkLength(`${what}.scale`, scale, out, Math.ceil(columns / GROUP));
    this.size += values.length;
    const { kernel } = this,
      at = kernel.within(() => kernel.core.panels(out, columns, kernel.copy(values), kernel.copy(scale)) >>> 0);
    if (at === 0) throw failure("memory", `there is no memory for ${what}`);
    kernel.held.push(at);
    return at;
  }

  /** @param {ModelDescription} description */
  build({ d, table, tokenTypeRow, positions, embeddingNorm, finalNorm, output, layers }) {
    const { kernel } = this, rows = table ? (table instanceof Float32Array ? table : table.values).length / d : 0;
    const int8 = table ? int8Of(table) : null,
      SA_WEIGHTS_INT8 = kernel.layout.SA_WEIGHTS_INT8.value;
    this.vocabulary = rows;
    this.most = Math.min(this.most, positions ? positions.length / d : Infinity);
    this.size += (positions?.length ?? 0) + ((output !== "table" && int8?.values.length) || 0); // a head counts its own
    const norm = (/** @type {string} */ which, /** @type {NormOfModel | null | undefined} */ given) =>
      given
        ? {
            [`${which}.weight`]: this.parameter(which, -1, given.weight, d),
            [`${which}.bias`]: this.parameter(`${which}.bias`, -1, given.bias, d),
            [`${which}.eps`]: given.eps,
            [`${which}.rms`]: given.rms ?? false,
          }
        : {};
    const tableAt = int8
      ? kernel.copy(int8.values)
      : this.parameter("table", -1, /** @type {Float32Array | null} */ (table), Math.floor(rows), d);
    this.table = tableAt;
    const layer = kernel.take(Math.max(1, layers.length) * kernel.layout.sa_layer.value);
    this.e = kernel.put("sa_transformer", {
      d,
      vocabulary: rows,
      layers: layers.length,
      layer,
      table: tableAt,
      table_kind: int8 ? SA_WEIGHTS_INT8 : 0,
      table_scale: kernel.copy(int8?.scale),
      token_type_row: kernel.copy(tokenTypeRow),
      positions: (this.positions = kernel.copy(positions)),
      ...norm("embedding_norm", embeddingNorm),
      ...norm("final_norm", finalNorm),
    });
    if (int8) checkLength("table", int8.values, Math.floor(rows), d);
    if (int8) checkLength("table.scale", int8.scale, rows, Math.ceil(d / GROUP));
    if (tokenTypeRow) checkLength("tokenTypeRow", tokenTypeRow, d);
    for (const [n, each] of layers.entries()) this.layer(n, each, layer + n * kernel.layout.sa_layer.value, d);
    if (!output) return;
    const weight = output === "table" ? table : output.weight, bias = output === "table" ? null : output.bias;
    if (!weight) throw failure("sizes", "the head needs a table or weights");
    const own = output === "table" ? int8 : int8Of(weight);
    this.output = (weight instanceof Float32Array ? weight : weight.values).length / d;
    const at = own
      ? this.panels("output", this.output, d, own)
      : output === "table"
        ? tableAt
        : this.parameter("output", -1, /** @type {Float32Array} */ (weight), this.output, d);
    this.head = {
      weight: at,
      bias: this.parameter("output.bias", -1, bias, this.output),
      weights: own ? SA_WEIGHTS_INT8 : 0,
    };
  }

  /** @type {(n: number, layer: LayerOfModel, at: number, d: number) => void} */
  layer(
    n,
    {
      heads,
      keyHeads = heads,
      width,
      hidden = 0,
      eps,
      rms = [false, false],
      normFirst = false,
      causal = false,
      windowLeft,
      windowRight,
      scale,
      softcap,
      activation = "none",
      rotary,
      weights,
      parameters,
    },
    at,
    d,
  ) {
    const { kernel } = this,
      most = kernel.layout.SA_MAX_WIDTH.value,
      sizes = [heads, keyHeads, width, d, heads * width];
    const given = (/** @type {string} */ name) => !!parameters[name];
    if (
      !sizes.every((size) => Number.isInteger(size) && size > 0 && size <= most) ||
      !Number.isInteger(hidden) ||
      hidden < 0 ||
      hidden > most ||
      heads % keyHeads
    ) {
      throw failure("sizes", `layer ${n} must have positive sizes, and keyHeads that divide heads`);
    }
    const sums = given("output") || (!normFirst && given("attentionNorm") && heads * width === d);
    const whole =
      hidden > 0
        ? given("up") && given("down") && ACTIVATION_NAMES.indexOf(activation) > 0
        : !["up", "gate", "down", "feedForwardNorm"].some(given);
    if (!given("query") || !given("key") || !given("value") || !sums || !whole) {
      throw failure("sizes", `layer ${n} needs query, key and value; an output or a norm after the sum;` +
        " and up, down and an activation, or hidden 0");
    }
    const inner = heads * width, keys = keyHeads * width;
    /** @type {Record<string, number[]>} */
    const shapes = {
      query: [inner, d],
      key: [keys, d],
      value: [keys, d],
      output: [d, inner],
      attentionNorm: [d],
      up: [hidden, d],
      gate: [hidden, d],
      down: [d, hidden],
      feedForwardNorm: [d],
    };
    const addresses = PARAMETERS.map((name) => {
      const one = parameters[name], [out, columns] = shapes[name];
      if (!one) return [0, 0];
      const int8 = columns ? int8Of(one.weight) : null;
      const weight = int8
        ? this.panels(name, out, columns, int8)
        : this.parameter(name, n, /** @type {Float32Array} */ (one.weight), ...shapes[name]);
      if (columns && !!int8 !== (weights === "int8")) {
        throw failure("sizes", `${name} of layer ${n} must have the weights of its layer, ${weights}`);
      }
      return [weight, this.parameter(`${name}.bias`, n, one.bias, out)];
    });
    if (rotary) {
      const half = rotary.width / 2, rows = rotary.cos.length / half;
      if (!Number.isInteger(half) || half < 1 || rotary.width > width || !Number.isInteger(rows)) {
        throw failure("sizes", `layer ${n} has angles of a width that does not fit`);
      }
      checkLength("sines", rotary.sin, rows, half);
      this.most = Math.min(this.most, rows);
    }
    const bound = (/** @type {number | null | undefined} */ window) => window ?? kernel.layout.SA_UNBOUNDED.value;
    const ofNorms = (/** @type {any[]} */ both) =>
      PARAMETERS.map((name) => (name === "attentionNorm" ? both[0] : name === "feedForwardNorm" ? both[1] : 0));
    kernel.put(
      "sa_layer",
      {
        "weight[0]": addresses.map(([weight]) => weight),
        "bias[0]": addresses.map(([, bias]) => bias),
        weights: weights === "int8" ? kernel.layout.SA_WEIGHTS_INT8.value : 0,
        heads,
        key_heads: keyHeads,
        width,
        hidden,
        "eps[0]": ofNorms(eps),
        "rms[0]": ofNorms(rms),
        norm_first: normFirst,
        causal,
        window_left: bound(windowLeft),
        window_right: bound(windowRight),
        scale: scale ?? 1 / Math.sqrt(width),
        softcap: softcap ?? 0,
        activation: ACTIVATION_NAMES.indexOf(activation),
        ...(rotary && {
          "rotary.cos": kernel.copy(rotary.cos),
          "rotary.sin": kernel.copy(rotary.sin),
          "rotary.rotated": rotary.width,
          "rotary.interleaved": rotary.interleaved ?? false,
        }),
      },
      at,
    );
  }

  /**
   * Room for keys and values of a sequence.
   * @type {(capacity: number) => { keys: number, values: number, past: number, capacity: number, free: () => void }}
   */
  cache(capacity) {
    const {
        kernel,
        description: { layers },
      } = this,
      [{ keyHeads, heads, width }] = layers,
      memory = /** @type {number[]} */ ([]);
    if (
      !layers.every(
        (layer) => layer.causal && (layer.keyHeads ?? layer.heads) === (keyHeads ?? heads) && layer.width === width,
      )
    ) {
      throw failure("sizes", "layers with a cache are causal, and have as many key heads of one width");
    }
    const bytes = layers.length * (keyHeads ?? heads) * capacity * width * 4;
    const [keys, values] = kernel.within(() => [kernel.take(bytes), kernel.take(bytes)], memory);
    return { keys, values, past: 0, capacity, free: () => memory.splice(0).forEach((at) => kernel.core.give(at)) };
  }

  /**
   * The rows after the last layer, or a row of each sequence. With a cache the tokens are appended to it; `keep` lets
   * `backward` follow.
   * @param {ArrayLike<number>} input ids, or Float32Array rows (tokens, d), which enter before the first norm
   * @param {{ pooling?: null | "mean" | "first" | "last", weights?: boolean,
   *   cache?: { keys: number, values: number, past: number, capacity: number }, lengths?: number[],
   *   keep?: boolean }} [options] `lengths` of several sequences
   * @returns {{ rows: Float32Array, weights?: Float32Array }} weights: (layers, sequences, heads, longest, longest),
   *   with a cache (layers, heads, tokens, keys)
   */
  forward(input, options = {}) {
    const { pooling = null, weights = false, cache, lengths, keep = false } = options;
    const {
        kernel,
        description: { d, layers },
      } = this,
      given = input instanceof Float32Array,
      tokens = given ? input.length / d : input.length;
    const each = lengths ?? [tokens],
      longest = Math.max(...each),
      keys = (cache?.past ?? 0) + longest,
      heads = layers[0]?.heads ?? 0;
    if (given && !Number.isInteger(tokens)) throw failure("sizes", `rows must have ${d} numbers each`);
    if (each.reduce((n, length) => n + length, 0) !== tokens) {
      throw failure("sizes", "lengths must add up to the number of tokens");
    }
    if (weights && !layers.every((layer) => layer.heads === heads)) {
      throw failure("sizes", "weights need layers with as many heads");
    }
    for (const at of this.last.splice(0)) kernel.core.give(at);
    const rows = pooling === null ? tokens : each.length, shown = layers.length * each.length * heads * longest * keys;
    return kernel.within(() => {
      const out = kernel.take(rows * d * 4), at = weights ? kernel.take(shown * 4) : 0;
      kernel.within(
        () => {
          const starts = [0];
          for (const length of each) starts.push(starts[starts.length - 1] + length);
          const { e = 0 } = this,
            plan = kernel.put("sa_transformer_plan"),
            saved = keep ? kernel.take(8) : 0;
          kernel.put(
            "sa_transformer",
            {
              tokens,
              sequences: each.length,
              longest,
              starts: kernel.copy(BigInt64Array.from(starts, BigInt)),
              pooling: POOLINGS.indexOf(pooling),
              weights: at,
              ids: given ? 0 : kernel.copy(BigInt64Array.from(/** @type {number[]} */ (input), BigInt)),
              rows: given ? kernel.copy(input) : 0,
              table: given ? 0 : this.table,
              "cache.keys": cache?.keys ?? 0,
              "cache.values": cache?.values ?? 0,
              "cache.capacity": cache?.capacity ?? 0,
              "cache.past": cache ? kernel.copy(BigInt64Array.of(BigInt(cache.past))) : 0,
            },
            e,
          );
          const status = kernel.core.transformer(e, this.most, plan, out, saved, 0);
          if (saved) kernel.held.push(kernel.view.getUint32(saved, true));
          this.kept = { plan, saved, rows, tokens, given };
          kernel.check(status);
        },
        keep ? this.last : undefined,
      );
      if (cache) cache.past += tokens;
      return {
        rows: kernel.read(new Float32Array(), out, rows * d),
        ...(weights && { weights: kernel.read(new Float32Array(), at, shown) }),
      };
    });
  }

  /**
   * The head's logits of rows; `decoding`: of the next tokens.
   * @type {(rows: Float32Array, decoding?: boolean) => Float32Array}
   */
  logits(rows, decoding = true) {
    const { kernel, output, description: { d } } = this, n = rows.length / d;
    checkLength("rows", rows, Math.floor(n), d);
    if (!output) throw failure("sizes", "the model has no head");
    return kernel.within(() => {
      const y = kernel.take(n * output * 4),
        { weight, bias, weights } = /** @type {Record<string, number>} */ (this.head);
      kernel.check(
        kernel.core.linear(kernel.product(n, d, output, weight, bias, kernel.copy(rows), y, { weights, decoding }), 0),
      );
      return kernel.read(rows, y, n * output);
    });
  }

  /**
   * The gradients of the last call with `keep`, by `parameters`, whose weights are float32; `rows` has that of what
   * enters the first norm or layer.
   * @param {Float32Array} gradOut of the rows that the call returned
   * @returns {{ gradients: (Float32Array | null)[], rows: Float32Array }} null: a parameter of the head, which `linear`
   *   differentiates
   */
  backward(gradOut) {
    const { kernel, e = 0, kept, last, description: { d, layers } } = this;
    if (!last.length || !kept) throw failure("sizes", "there is no call with keep");
    const { plan, saved, rows, tokens, given } = kept;
    checkLength("gradOut", gradOut, rows, d);
    return kernel.within(() => {
      const each = kernel.layout.sa_layer_gradients.value, layer = kernel.take(each * Math.max(1, layers.length));
      const ofRows = kernel.take(tokens * d * 4),
        g = kernel.put("sa_transformer_gradients", { grad_out: kernel.copy(gradOut), layer, rows: ofRows });
      const field = (/** @type {string} */ name) => kernel.layout[`sa_transformer_gradients.${name}`].value;
      /** @type {Record<string, number>} */
      const own = {
        table: field("table"),
        embedding_norm: field("embedding_norm[0]"),
        "embedding_norm.bias": field("embedding_norm[0]") + 4,
        final_norm: field("final_norm[0]"),
        "final_norm.bias": field("final_norm[0]") + 4,
      };
      const addresses = this.parameters.map(({ parameter, layer: n, length }) => {
        const bias = parameter.endsWith(".bias"), which = PARAMETERS.indexOf(bias ? parameter.slice(0, -5) : parameter);
        const to =
          n >= 0
            ? layer + n * each + 4 * (which + (bias ? kernel.layout.SA_LAYER_PARAMETERS.value : 0))
            : Object.hasOwn(own, parameter) && !(given && parameter === "table")
              ? g + own[parameter]
              : 0;
        const at = to ? kernel.take(length * 4) : 0;
        if (to) kernel.view.setUint32(to, at, true);
        return at;
      });
      kernel.check(kernel.core.transformer(e, this.most, plan, 0, saved, g));
      const read = (/** @type {number} */ at, /** @type {number} */ n) =>
        at ? kernel.read(new Float32Array(), at, n) : null;
      return {
        gradients: addresses.map((at, n) => read(at, this.parameters[n].length)),
        rows: kernel.read(gradOut, ofRows, tokens * d),
      };
    });
  }
}
