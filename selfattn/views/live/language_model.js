/*
 * A language model in the worker: the letters' GPT of the page, or a GGUF file of the Llama family, whose weights are rounded to int8. It
 * reads a text, says what comes next, and writes. It has no document: `language_page.js` asks it.
 */

/** @typedef {{ description: any, tokenizer: { encode: (text: string) => { ids: number[], unknown?: string[] }, decode: (ids: number[]) => string, spelled: (id: number) => string }, ends: number[], most: number }} Language */
/** @typedef {{ temperature: number, topP: number }} Drawing */

const LONGEST_TEXT = 1024; // tokens of a GGUF file's cache
const MOST_SHOWN = 128; // tokens whose heads are drawn
const LIKELY = 10; // tokens that are listed

/** @type {(array: ArrayLike<number>, out: number, into: number, scale: ArrayLike<number>) => Float32Array} int8 times the scales of its rows */
const unscaled = (array, out, into, scale) => Float32Array.from({ length: out * into }, (_, n) => array[n] * scale[Math.floor(n / into)]);

/** @typedef {{ alphabet: string[], heads: number, layers: number, context: number, eps: number, activation: string }} Letters a model of letters */

/** @type {(read: (name: string) => Float32Array, settings: Letters) => any} what `Kernel.transformer` takes, of an nn.GPT's arrays */
function describeLetters(read, { alphabet, heads, layers, eps, activation }) {
  const table = read("token_embedding.weight"), d = table.length / alphabet.length, width = d / heads;
  const both = (/** @type {string} */ name) => ({ weight: read(`${name}.weight`), bias: read(`${name}.bias`) });
  const made = range(layers).map((n) => {
    const own = `layers.${n}`, joined = read(`${own}.self_attn.in_proj_weight`), biases = read(`${own}.self_attn.in_proj_bias`);
    const third = (/** @type {number} */ k) => ({ weight: joined.subarray(k * d * d, (k + 1) * d * d), bias: biases.subarray(k * d, (k + 1) * d) }), up = both(`${own}.linear1`);
    return { heads, keyHeads: heads, width, hidden: up.bias.length, eps: [eps, eps], rms: [false, false], normFirst: true, causal: true, scale: 1 / Math.sqrt(width), activation, weights: "float32",
      parameters: { query: third(0), key: third(1), value: third(2), output: both(`${own}.self_attn.out_proj`), attentionNorm: both(`${own}.norm1`), up, down: both(`${own}.linear2`), lastNorm: both(`${own}.norm2`) } };
  });
  return { d, vocabulary: alphabet.length, table, tableKind: "float32", positions: read("position_embedding.weight"), layers: made, finalNorm: { ...both("norm"), eps, rms: false }, output: "table" };
}

/** @type {(alphabet: string[]) => Language["tokenizer"]} a letter that is not in the alphabet is read as a space */
function lettersOf(alphabet) {
  const ids = new Map(alphabet.map((letter, n) => [letter, n])), spelled = (/** @type {number} */ id) => alphabet[id];
  const encode = (/** @type {string} */ text) => {
    const found = Array.from(text, (letter) => ({ letter, id: ids.get(letter) ?? ids.get(letter.toLowerCase()) }));
    return { ids: found.map(({ id }) => id ?? ids.get(" ") ?? 0), unknown: [...new Set(found.filter(({ id }) => id === undefined).map(({ letter }) => letter))] };
  };
  return { encode, spelled, decode: (some) => some.map(spelled).join("") };
}

/** @type {(entry: any, settings: Letters) => Promise<Language>} the arrays of views/gpt.py */
async function readLetters(entry, settings) {
  const arrays = new Map(), found = await npz(entry);
  for (const [name, tensor] of found) {
    const scale = found.get(`${name}_scale`), data = await tensor.read();
    arrays.set(name, scale ? unscaled(data, tensor.shape[0], tensor.shape[1], await scale.read()) : data);
  }
  return { description: describeLetters((name) => arrays.get(name), settings), tokenizer: lettersOf(settings.alphabet), ends: [], most: settings.context };
}

/** @type {(width: number, theta: number, longest: number) => { cos: Float32Array, sin: Float32Array, width: number, interleaved: boolean }} angles as engine/rope.py has them */
function rotaryTables(width, theta, longest) {
  const half = width / 2, frequencies = Float32Array.from({ length: half }, (_, i) => 1 / Math.fround(Math.fround(theta) ** Math.fround((2 * i) / width)));
  const angle = (/** @type {number} */ n) => Math.fround(Math.floor(n / half) * frequencies[n % half]);
  return { cos: Float32Array.from({ length: longest * half }, (_, n) => Math.cos(angle(n))), sin: Float32Array.from({ length: longest * half }, (_, n) => Math.sin(angle(n))), width, interleaved: false };
}

/** @type {(entry: any, progress: (part: number) => void) => Promise<Language>} a file of the Llama family, as models.load(path, dtype="int8") reads it */
async function readLlama(entry, progress) {
  const { metadata, tensors } = await readGguf(entry), name = metadata.get("general.architecture");
  const of = (/** @type {string} */ key, /** @type {any} */ otherwise) => metadata.get(`${name}.${key}`) ?? otherwise;
  const scaled = [...metadata.keys()].find((key) => /\.rope\.scaling\.|sliding_window|\.expert_count/.test(key) && ![0, "none"].includes(metadata.get(key)));
  if (name !== "llama" || scaled) throw new Fault("language architecture", { name: scaled ?? name });
  const tokenizer = ggufTokenizer(metadata, entry.path), [d, layers, heads, hidden] = ["embedding_length", "block_count", "attention.head_count", "feed_forward_length"].map((key) => of(key));
  const keyHeads = of("attention.head_count_kv", heads), width = d / heads, eps = of("attention.layer_norm_rms_epsilon", 1e-5), most = Math.min(of("context_length", LONGEST_TEXT), LONGEST_TEXT);
  if (of("rope.dimension_count", width) !== width) throw new Fault("language architecture", { name: `rope.dimension_count ${of("rope.dimension_count")}` });
  const unread = new Set(tensors.keys());
  const read = async (/** @type {string} */ which, /** @type {number[]} */ ...shape) => {
    const tensor = tensors.get(which);
    if (!tensor) throw new Fault("no tensor", { name: which });
    if (String(tensor.shape) !== String(shape)) throw new Fault("shape", { name: which, shape: tensor.shape.join("×"), expected: shape.join("×") });
    unread.delete(which);
    progress(1 - unread.size / tensors.size);
    return tensor.read();
  };
  const matrix = async (/** @type {string} */ which, /** @type {number} */ out, /** @type {number} */ into) => roundToInt8(/** @type {Float32Array} */ (await read(which, out, into)), into);
  /** @type {(which: string, rows: number) => Promise<any>} rows as Transformers has them: llama.cpp rotates pairs that are neighbours */
  const turned = async (which, rows) => {
    const stored = await read(which, rows * width, d), half = width / 2, own = new Float32Array(stored.length);
    for (let r = 0; r < rows * width; r++) {
      const head = Math.floor(r / width), i = r % width, from = head * width + 2 * (i % half) + Math.floor(i / half);
      own.set(stored.subarray(from * d, (from + 1) * d), r * d);
    }
    return roundToInt8(own, d);
  };
  const rotary = rotaryTables(width, of("rope.freq_base", 10000), most), made = [], vocabulary = tensors.get("token_embd.weight")?.shape[0] ?? 0;
  for (const n of range(layers)) {
    const own = (/** @type {string} */ part) => `blk.${n}.${part}.weight`, bare = (/** @type {any} */ weight) => ({ weight, bias: null });
    made.push({ heads, keyHeads, width, hidden, eps: [eps, eps], rms: [true, true], normFirst: true, causal: true, scale: 1 / Math.sqrt(width), activation: "silu", rotary, weights: "int8", parameters: {
      query: bare(await turned(own("attn_q"), heads)), key: bare(await turned(own("attn_k"), keyHeads)), value: bare(await matrix(own("attn_v"), keyHeads * width, d)),
      output: bare(await matrix(own("attn_output"), d, d)), attentionNorm: bare(await read(own("attn_norm"), d)), up: bare(await matrix(own("ffn_up"), hidden, d)),
      gate: bare(await matrix(own("ffn_gate"), hidden, d)), down: bare(await matrix(own("ffn_down"), d, hidden)), lastNorm: bare(await read(own("ffn_norm"), d)) } });
  }
  const description = { d, vocabulary, table: await matrix("token_embd.weight", vocabulary, d), tableKind: "int8", layers: made,
    finalNorm: { weight: await read("output_norm.weight", d), bias: null, eps, rms: true },
    output: tensors.has("output.weight") ? { weight: await matrix("output.weight", vocabulary, d), bias: null } : "table" };
  for (const left of unread) throw new Fault("language architecture", { name: left }); // such as biases, without which its numbers would be wrong
  const ends = ["eos", "eot", "eom"].map((key) => metadata.get(`tokenizer.ggml.${key}_token_id`)).filter((id) => id !== undefined);
  return { description, tokenizer, ends, most };
}

/** @type {(logits: Float32Array, how: Drawing) => Float64Array} probabilities of drawing each token: `probabilities` of engine/sampling.py; at temperature 0 the likeliest */
function drawingOf(logits, { temperature, topP }) {
  const most = logits.reduce((a, b) => Math.max(a, b)), p = Float64Array.from(logits, (x) => (temperature > 0 ? Math.exp((x - most) / temperature) : Number(x === most)));
  const scale = (/** @type {number} */ sum) => p.forEach((x, n) => (p[n] = x / sum));
  scale(p.reduce((a, b) => a + b));
  if (topP >= 1 || temperature === 0) return p;
  const order = [...p.keys()].filter((n) => p[n] > 1e-12).sort((a, b) => p[b] - p[a] || b - a), kept = new Set();
  for (let sum = 0, k = 0; k < order.length && (k === 0 || sum < topP); k++) {
    kept.add(order[k]);
    sum += p[order[k]];
  }
  p.forEach((_, n) => kept.has(n) || (p[n] = 0));
  scale(p.reduce((a, b) => a + b));
  return p;
}

/** @type {(p: Float64Array, at: number) => number} the token at a place from 0 to 1 of the probabilities in a row */
function drawn(p, at) {
  let sum = 0, last = 0;
  for (let n = 0; n < p.length; n++) {
    if (p[n] === 0) continue;
    [sum, last] = [sum + p[n], n];
    if (at < sum) break;
  }
  return last;
}

/** @type {() => Record<string, Work>} the worker's jobs: load a model, look at a text, say what comes next, write */
function languageJobs() {
  /** @type {Language | null} */ let language = null;
  /** @type {any} */ let model = null;
  let /** @type {Float32Array} */ logits = new Float32Array();
  const last = (/** @type {Float32Array} */ rows) => rows.slice(rows.length - (language?.description.d ?? 0));
  const likely = (/** @type {Drawing} */ how) => {
    const p = drawingOf(logits, how), order = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, LIKELY).filter((n) => p[n] > 0), listed = dot(order.length, (k) => p[order[k]]);
    return { p, next: { likely: order.map((n) => ({ token: seen(language?.tokenizer.spelled(n) ?? ""), probability: p[n], came: false })), others: { n: p.length - order.length, probability: Math.max(0, 1 - listed) } } };
  };
  const read = (/** @type {string} */ text) => (language?.tokenizer.encode(text).ids ?? []).slice(-(language?.most ?? 0) + 1);
  return {
    load: async ({ given, settings }, job) => {
      const files = await readModel(given), [[path, entry]] = files, found = path.endsWith(".gguf") ? await readLlama(entry, job.progress) : settings && path.endsWith(".npz") ? await readLetters(entry, settings) : null;
      if (!found) throw new Fault("no language model", { file: path });
      const next = job.kernel.transformer(found.description);
      model?.free();
      [language, model] = [found, next];
      return { layers: found.description.layers.length, heads: dot(found.description.layers.length, (n) => found.description.layers[n].heads) };
    },
    look: ({ text, how }) => {
      if (!language) return null;
      const ids = read(text), { ids: all, unknown = [] } = language.tokenizer.encode(text), shown = ids.length <= MOST_SHOWN, begun = performance.now();
      if (!ids.length) return null;
      const { rows, weights } = model.forward(ids, { weights: shown }), heads = language.description.layers.map((/** @type {any} */ layer) => layer.heads);
      logits = model.logits(last(rows));
      const tokens = ids.map((id) => seen(language?.tokenizer.spelled(id) ?? "")), ms = performance.now() - begun;
      const drawn = shown ? { ...storedTexts([{ tokens, weights }], heads), habits: habitsOf([{ tokens, weights }], heads) } : {};
      return { ...drawn, heads, tokens: tokens.length, ms, unknown, cut: all.length > ids.length, next: likely(how).next };
    },
    next: ({ how }) => (logits.length ? likely(how).next : null),
    write: async ({ text, how, most }, job) => {
      const ids = read(text), /** @type {number[]} */ added = [];
      if (!language || !ids.length) return null;
      const { tokenizer, ends } = language, own = model, room = Math.min(language.most, ids.length + most), cache = own.cache(room), begun = performance.now();
      try {
        let input = ids;
        while (ids.length + added.length < room && !job.stopped && own === model) {
          const { rows, weights } = own.forward(input, { cache, weights: added.length > 0 });
          logits = own.logits(last(rows));
          const { p, next } = likely(how), keys = ids.length + added.length, id = drawn(p, Math.random());
          const taken = weights && Float64Array.from({ length: keys }, (_, j) => dot(weights.length / keys, (h) => weights[h * keys + j]) / (weights.length / keys));
          if (ends.includes(id)) break;
          added.push(id);
          input = [id];
          job.progress({ written: tokenizer.decode(added), next, taken: taken && [...taken], tokens: [...ids, ...added.slice(0, -1)].map((each) => seen(tokenizer.spelled(each))) });
          await job.pause();
        }
      } finally {
        cache.free();
      }
      return { tokens: added.length, ms: performance.now() - begun };
    },
  };
}
