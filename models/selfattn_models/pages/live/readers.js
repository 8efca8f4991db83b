/*
 * Files of models: dropped folders and files, .zip archives, addresses; safetensors, .npz and GGUF, from which tensors
 * are read one at a time. What the tensors mean is the pages' business.
 *
 * A file may be hostile: each size that it claims is compared with the bytes that are there before anything is
 * allocated.
 */

import { range } from "../../../../selfattn/views/compute.js";

/** @typedef {{ path: string, file: Blob }} Given */
/**
 * A file, read in parts.
 * @typedef {{ path: string, size: number, bytes: (from?: number, to?: number) => Promise<Uint8Array> }} Entry
 */
/**
 * Some rows of the last axis, or all; int8 stays int8.
 * @typedef {(from?: number, to?: number) => Promise<Float32Array | Int8Array>} ReadRows
 */
/** @typedef {{ kind: string, shape: number[], read: ReadRows }} Tensor */

const MOST_GIVEN = 10_000; // files of a folder
const MOST_UNPACKED = 2 ** 32; // bytes: the memory of a page's kernels has no more
const MOST_HEADER = 2 ** 28; // bytes
const FOLDER = [
  "config.json",
  "model.safetensors",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "modules.json",
  "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", "generation_config.json",
];

/** What is wrong with a file and what to do: the name of a sentence of the page, and the values in its places. */
export class Fault extends Error {
  /** @param {string} sentence @param {Record<string, string | number>} values */
  constructor(sentence, values) {
    super(`${sentence} ${JSON.stringify(values)}`);
    this.name = Fault.name;
    this.sentence = sentence;
    this.values = values;
  }
}

/** @type {(file: string, place: string | number) => Fault} */
export const damaged = (file, place) => new Fault("damaged file", { file, place });

/** @type {(size: number, file: string) => ArrayBuffer} memory, or a fault if there is not as much */
function memoryFor(size, file) {
  try {
    return new ArrayBuffer(size);
  } catch {
    throw new Fault("too large", { file, size });
  }
}

// ----------------------------------------------------------------------------------------------- where files come from

/**
 * The files of a drop, with those of its folders; called in the event itself.
 * @type {(transfer: DataTransfer) => Promise<Given[]>}
 */
export async function dropped(transfer) {
  /** @type {Given[]} */
  const found = [];
  const walk = async (/** @type {any} */ entry) => {
    if (found.length >= MOST_GIVEN) throw new Fault("no model", { file: entry.fullPath });
    if (entry.isFile) {
      found.push({
        path: entry.fullPath.slice(1),
        file: await new Promise((done, failed) => entry.file(done, failed)),
      });
      return;
    }
    const reader = entry.createReader();
    for (;;) { // some at a time, until there are no more
      const some = await new Promise((done, failed) => reader.readEntries(done, failed));
      if (some.length === 0) return;
      for (const each of some) await walk(each);
    }
  };
  for (const entry of [...transfer.items].flatMap((item) => item.webkitGetAsEntry?.() ?? [])) await walk(entry);
  return found;
}

/** @type {(files: Iterable<File>) => Given[]} the files that a field of the page has */
export const picked = (files) => [...files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));

/**
 * A .zip, a .gguf, or a folder's files, of which some may be missing.
 * @type {(address: string, progress?: (bytes: number) => void) => Promise<Given[]>}
 */
export async function fetched(address, progress = () => {}) {
  let bytes = 0;
  /** @type {Given[]} */
  const found = [];
  const alone = /\.(zip|gguf)$/.test(address);
  for (const name of alone ? [""] : FOLDER) {
    const answer = await fetch(alone ? address : `${address.replace(/\/?$/, "/")}${name}`).catch(() => null);
    if (answer?.status === 404 && !alone) continue;
    if (!answer?.ok || !answer.body) throw new Fault("not fetched", { address, status: answer?.status ?? 0 });
    const counting = new TransformStream({
      transform(chunk, out) {
        progress((bytes += chunk.length));
        out.enqueue(chunk);
      },
    });
    found.push({
      path: name || address.replace(/.*\//, ""),
      file: await new Response(answer.body.pipeThrough(counting)).blob(),
    });
  }
  return found;
}

/** @type {(file: Blob, path: string) => Entry} */
export function entryOf(file, path) {
  const bytes = async (from = 0, to = file.size) => {
    const content = await file.slice(from, to).arrayBuffer().catch(() => {
      throw new Fault("not read", { file: path });
    });
    if (content.byteLength !== to - from) throw new Fault("cut file", { file: path, size: file.size });
    return new Uint8Array(content);
  };
  return { path, size: file.size, bytes };
}

/**
 * A model's files by name within its folder; a .gguf or .npz file is alone in it.
 * @type {(given: Given[]) => Promise<Map<string, Entry>>}
 */
export async function readModel(given) {
  let files = new Map(given.map(({ path, file }) => [path, entryOf(file, path)]));
  const [alone] = files.size === 1 ? files.values() : [];
  const begin = alone ? String.fromCharCode(...await alone.bytes(0, Math.min(4, alone.size))) : "";
  if (alone && begin.startsWith("PK") && !alone.path.endsWith(".npz")) files = await unzipped(alone);
  const visible = [...files.keys()].filter((name) => !/(^|\/)(\.|__MACOSX\/)/.test(name));
  const single = begin === "GGUF" ? visible : visible.filter((name) => /\.(gguf|npz)$/.test(name));
  /** @type {(names: string[]) => string[]} the folders, of those with these names, that are in no other one */
  const outermost = (names) => {
    const folders = names.map((name) => name.replace(/[^/]*$/, ""));
    return folders.filter((one) => !folders.some((other) => other !== one && one.startsWith(other)));
  };
  const named = (/** @type {string} */ name) => visible.filter((path) => path === name || path.endsWith(`/${name}`));
  const roots = outermost([...named("modules.json"), ...named("config.json")]).filter(
    (one, n, all) => all.indexOf(one) === n,
  );
  const weights = visible.some((name) => name.endsWith(".safetensors"));
  const found = weights || single.length === 0 ? roots : single;
  if (found.length !== 1) {
    const file = given[0]?.path ?? "";
    throw found.length
      ? new Fault("several models", { names: found.slice(0, 5).join(", ") })
      : ((await standIn(alone)) ?? new Fault("no model", { file }));
  }
  if (found === single) return new Map([[found[0].replace(/.*\//, ""), /** @type {Entry} */ (files.get(found[0]))]]);
  return new Map(
    [...files]
      .filter(([name]) => name.startsWith(found[0]))
      .map(([name, entry]) => [name.slice(found[0].length), entry]),
  );
}

/**
 * What came in place of a file: a pointer of Git LFS, or a page that says why a download failed.
 * @type {(entry?: Entry) => Promise<Fault | null>}
 */
async function standIn(entry) {
  const begin = entry
    ? String.fromCharCode(...(await entry.bytes(0, Math.min(100, entry.size))))
        .trimStart()
        .toLowerCase()
    : "";
  return entry && /^(version https:\/\/git-lfs|<!doctype html|<html)/.test(begin)
    ? new Fault("stand-in", { file: entry.path })
    : null;
}

/** @type {(entry: Entry) => Promise<any>} */
export async function readJson(entry) {
  if (entry.size > MOST_HEADER) throw new Fault("too large", { file: entry.path, size: entry.size });
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(await entry.bytes()));
  } catch (error) {
    throw error instanceof Fault ? error : await standIn(entry) ?? damaged(entry.path, "JSON");
  }
}

// -------------------------------------------------------------------------------------------------------- zip archives

/**
 * Reads numbers and texts one after the other. What goes beyond the bytes that are there is a RangeError, as a
 * DataView's.
 */
class Cursor {
  /** @param {Uint8Array} bytes @param {string} file */
  constructor(bytes, file) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.file = file;
    this.at = 0;
  }
  /** @type {(size: 1 | 2 | 4) => number} an integer without sign */
  uint(size) {
    const at = this.at;
    this.at += size;
    return size === 1
      ? this.view.getUint8(at)
      : size === 2
        ? this.view.getUint16(at, true)
        : this.view.getUint32(at, true);
  }
  /** A size or a place of 8 bytes. */
  long() {
    const found = this.view.getBigUint64(this.at, true);
    if (found > Number.MAX_SAFE_INTEGER) throw damaged(this.file, this.at);
    this.at += 8;
    return Number(found);
  }
  /** @param {number} size */
  take(size) {
    if (size > this.bytes.length - this.at) throw new RangeError();
    return this.bytes.subarray(this.at, (this.at += size));
  }
  /** @param {number} size */
  text(size) {
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(this.take(size));
    } catch (error) {
      throw error instanceof RangeError ? error : damaged(this.file, this.at);
    }
  }
}

/** @type {(archive: Entry) => Promise<Map<string, Entry>>} */
async function unzipped(archive) {
  const cut = () => new Fault("cut file", { file: archive.path, size: archive.size });
  const part = async (/** @type {number} */ from, /** @type {number} */ size) => {
    if (from < 0 || from + size > archive.size) throw cut();
    return new Cursor(await archive.bytes(from, from + size), archive.path);
  };
  // The end of an archive: 22 bytes and a comment. Zip64 has a longer one before it.
  const from = Math.max(0, archive.size - 22 - 0xffff), tail = await part(from, archive.size - from);
  let end = tail.bytes.length - 22;
  while (
    end >= 0 &&
    (tail.view.getUint32(end, true) !== 0x06054b50 ||
      end + 22 + tail.view.getUint16(end + 20, true) !== tail.bytes.length)
  ) {
    end--;
  }
  if (end < 0) throw cut();
  tail.at = end + 10;
  let count = tail.uint(2), size = tail.uint(4), begin = tail.uint(4);
  if (end >= 20 && tail.view.getUint32(end - 20, true) === 0x07064b50) {
    tail.at = end - 12;
    const record = await part(tail.long(), 56);
    record.at = 32;
    [count, size, begin] = [record.long(), record.long(), record.long()];
  }
  if (begin + size > from + end) throw damaged(archive.path, from + end);
  const directory = await part(begin, size);
  /** @type {Map<string, Entry>} */
  const found = new Map();
  for (let n = 0; n < count; n++) {
    if (directory.bytes.length - directory.at < 46) throw cut();
    const entry = zipEntry(directory, archive, part);
    if (found.has(entry.path)) throw damaged(archive.path, entry.path);
    if (!entry.path.endsWith("/")) found.set(entry.path, entry);
  }
  if (directory.at !== size) throw damaged(archive.path, begin + directory.at);
  return found;
}

/**
 * The next file of an archive's directory.
 * @type {(directory: Cursor, archive: Entry, part: (from: number, size: number) => Promise<Cursor>) => Entry}
 */
function zipEntry(directory, archive, part) {
  const start = directory.at;
  if (directory.uint(4) !== 0x02014b50) throw damaged(archive.path, start);
  directory.at += 4;
  const flags = directory.uint(2), method = directory.uint(2);
  directory.at += 4;
  const crc = directory.uint(4),
    lengths = [directory.uint(4), directory.uint(4)],
    sizes = [directory.uint(2), directory.uint(2), directory.uint(2)];
  directory.at += 8;
  let [packed, size] = lengths, place = directory.uint(4);
  if (sizes[0] + sizes[1] + sizes[2] > directory.bytes.length - directory.at) throw damaged(archive.path, start);
  const path = directory.text(sizes[0]).replaceAll("\\", "/").replace(/^(\.?\/)+/, "");
  const extra = new Cursor(directory.take(sizes[1]), archive.path);
  directory.at += sizes[2];
  while (extra.bytes.length - extra.at >= 4) {
    const id = extra.uint(2),
      field = new Cursor(extra.take(Math.min(extra.uint(2), extra.bytes.length - extra.at)), archive.path);
    if (id !== 1) continue;
    const long = (/** @type {number} */ short) =>
      short !== 0xffffffff ? short : field.bytes.length - field.at < 8 ? Infinity : field.long();
    [size, packed, place] = [long(size), long(packed), long(place)];
  }
  if (flags & 1 || ![0, 8].includes(method)) throw new Fault("packed otherwise", { file: archive.path, name: path });
  if (method === 0 && size !== packed) throw damaged(archive.path, path);
  if (size > MOST_UNPACKED) throw new Fault("too large", { file: path, size });
  /** @type {Promise<Entry> | undefined} */
  let unpacked;
  return { path, size, bytes: async (from = 0, to = size) => {
    const local = await part(place, 30);
    if (local.uint(4) !== 0x04034b50) throw damaged(archive.path, path);
    local.at = 26;
    const begin = place + 30 + local.uint(2) + local.uint(2);
    if (begin + packed > archive.size) throw new Fault("cut file", { file: archive.path, size: archive.size });
    if (method === 0) return archive.bytes(begin + from, begin + to);
    unpacked ??= inflated(archive, begin, packed, { path, size, crc });
    return (await unpacked).bytes(from, to);
  } };
}

const CRC = Uint32Array.from({ length: 256 }, (_, n) =>
  range(8).reduce((c) => (c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1), n),
);

/**
 * @type {(archive: Entry, begin: number, packed: number, is: { path: string, size: number, crc: number }) =>
 *   Promise<Entry>}
 */
async function inflated(archive, begin, packed, is) {
  let seen = 0, crc = -1;
  const wrong = () => damaged(archive.path, is.path);
  const checking = new TransformStream({
    transform(chunk, out) {
      if ((seen += chunk.length) > is.size) throw wrong();
      for (let n = 0; n < chunk.length; n++) crc = CRC[(crc ^ chunk[n]) & 255] ^ (crc >>> 8);
      out.enqueue(chunk);
    },
  });
  const stream = new Blob([await archive.bytes(begin, begin + packed)])
    .stream()
    .pipeThrough(new /** @type {any} */ (globalThis).DecompressionStream("deflate-raw"));
  const file = await new Response(stream.pipeThrough(checking)).blob().catch(() => {
    throw wrong();
  });
  if (file.size !== is.size || ~crc >>> 0 !== is.crc) throw wrong();
  return entryOf(file, is.path);
}

// ------------------------------------------------------------------------------------------- tensors: kinds of numbers

/**
 * The kinds that are expanded to float32: the numbers that share scales, and their bytes.
 * @type {Record<string, [number, number]>}
 */
const EXPANDED = {
  F32: [1, 4],
  F16: [1, 2],
  BF16: [1, 2],
  Q4_0: [32, 18],
  Q4_1: [32, 20],
  Q5_0: [32, 22],
  Q5_1: [32, 24],
  Q8_0: [32, 34],
  Q4_K: [256, 144], Q5_K: [256, 176], Q6_K: [256, 210],
};

/** @type {(half: number) => number} the number whose bits in float16 are these */
function ofHalf(half) {
  const sign = half & 0x8000 ? -1 : 1, power = (half >> 10) & 31, rest = half & 1023;
  return (
    sign * (power === 31 ? (rest ? NaN : Infinity) : power ? 2 ** (power - 15) * (1 + rest / 1024) : rest * 2 ** -24)
  );
}
const HALVES = Float32Array.from({ length: 65536 }, (_, half) => ofHalf(half));

/**
 * Each number is d·q + m, rounded once: products are exact in float32, sums in float64. The sum is also made with
 * m = 0, as in C: it is no −0.
 * @type {(kind: string, b: Uint8Array, y: Float32Array) => void}
 */
function expand(kind, b, y) {
  const [, size] = EXPANDED[kind], half = (/** @type {number} */ at) => HALVES[b[at] | (b[at + 1] << 8)];
  const bits = new Uint32Array(y.buffer, y.byteOffset, y.length);
  let n = 0;
  /**
   * 16 bytes: low halves, then high ones, with fifth bits.
   * @type {(q: number, high: number, d: number, zero: number, m: number) => void}
   */
  const halves = (q, high, d, zero, m) => {
    for (let i = 0; i < 32; i++, n++) {
      y[n] = d * (((b[q + (i & 15)] >> (i & 16 ? 4 : 0)) & 15) + ((high >>> i) & 1) * 16 - zero) + m;
    }
  };
  const whole = (/** @type {number} */ at) => b[at] | (b[at + 1] << 8) | (b[at + 2] << 16) | (b[at + 3] << 24);
  /**
   * Eight groups of 32, with scales and least numbers of 6 bits.
   * @type {(p: number, fifth: number, q: number) => void}
   */
  const groups = (p, fifth, q) => {
    const d = half(p), m = half(p + 2), s = p + 4;
    for (let g = 0; g < 8; g++) {
      const [scale, least] = g < 4 ? [b[s + g] & 63, b[s + 4 + g] & 63]
        : [(b[s + 4 + g] & 15) | ((b[s + g - 4] >> 6) << 4), (b[s + 4 + g] >> 4) | ((b[s + g] >> 6) << 4)];
      const factor = d * scale, add = -(m * least), from = q + (g >> 1) * 32, shift = g & 1 ? 4 : 0;
      for (let i = 0; i < 32; i++, n++) {
        y[n] = factor * (((b[from + i] >> shift) & 15) + (fifth ? ((b[fifth + i] >> g) & 1) * 16 : 0)) + add;
      }
    }
  };
  /** @type {Record<string, (p: number) => void>} */
  const of = {
    F16: (p) => { y[n++] = half(p); },
    BF16: (p) => { bits[n++] = (b[p] << 16) | (b[p + 1] << 24); },
    Q4_0: (p) => halves(p + 2, 0, half(p), 8, 0),
    Q4_1: (p) => halves(p + 4, 0, half(p), 0, half(p + 2)),
    Q5_0: (p) => halves(p + 6, whole(p + 2), half(p), 16, 0),
    Q5_1: (p) => halves(p + 8, whole(p + 4), half(p), 0, half(p + 2)),
    Q8_0: (p) => { for (let i = 2, d = half(p); i < 34; i++) y[n++] = d * ((b[p + i] << 24) >> 24) + 0; },
    Q4_K: (p) => groups(p, 0, p + 16),
    Q5_K: (p) => groups(p, p + 16, p + 48),
    Q6_K: (p) => {
      const d = half(p + 208);
      for (let k = 0; k < 256; k++) {
        const low = p + 64 * (k >> 7) + (k & 63), high = p + 128 + 32 * (k >> 7) + (k & 31), part = (k >> 5) & 3;
        const q = (((b[low] >> (part & 2 ? 4 : 0)) & 15) | (((b[high] >> (2 * part)) & 3) << 4)) - 32;
        y[n++] = d * ((b[p + 192 + (k >> 4)] << 24) >> 24) * q + 0;
      }
    },
  };
  for (let p = 0; p < b.length; p += size) of[kind](p);
}

/** @type {(entry: Entry, name: string, kind: string, shape: number[], begin: number) => Tensor} */
function tensorOf(entry, name, kind, shape, begin) {
  const width = shape.at(-1) ?? 1, rows = shape.slice(0, -1).reduce((a, b) => a * b, 1);
  const [numbers, size] = kind === "I8" ? [1, 1] : EXPANDED[kind] ?? [0, 0];
  return {
    kind,
    shape,
    read: async (from = 0, to = rows) => {
      if (!numbers) {
        throw new Fault("kind of numbers", {
          file: entry.path,
          name,
          kind,
          known: ["I8", ...Object.keys(EXPANDED)].join(", "),
        });
      }
      const row = (width / numbers) * size,
        bytes = await entry.bytes(begin + from * row, begin + to * row);
      if (kind === "I8") return new Int8Array(bytes.buffer);
      if (kind === "F32") return new Float32Array(bytes.buffer);
      const y = new Float32Array(memoryFor(4 * width * (to - from), entry.path));
      expand(kind, bytes, y);
      return y;
    },
  };
}

// ---------------------------------------------------------------------------------------------------- safetensors, npz

/**
 * Bytes of a number; those that EXPANDED lacks may be in a file that is read, but are not read themselves.
 * @type {Record<string, number>}
 */
const SAFETENSORS = {
  F64: 8,
  F32: 4,
  F16: 2,
  BF16: 2,
  I64: 8,
  I32: 4,
  I16: 2,
  I8: 1,
  U64: 8,
  U32: 4,
  U16: 2,
  U8: 1,
  BOOL: 1,
};
const isSize = (/** @type {any} */ n) => Number.isSafeInteger(n) && n >= 0;

/** @type {(entry: Entry) => Promise<Map<string, Tensor>>} */
export async function safetensors(entry) {
  const wrong = async (/** @type {string | number} */ place) => await standIn(entry) ?? damaged(entry.path, place);
  if (entry.size < 8) throw await wrong(0);
  const length = new DataView((await entry.bytes(0, 8)).buffer).getBigUint64(0, true);
  if (length > Math.min(MOST_HEADER, entry.size - 8)) throw await wrong(0);
  const begin = 8 + Number(length), header = await entry.bytes(8, begin);
  if (header[0] !== 0x7b) throw await wrong(8); // {
  const tree = await readJson({ path: entry.path, size: header.length, bytes: async (a, b) => header.slice(a, b) });
  if (tree === null || typeof tree !== "object" || Array.isArray(tree)) throw await wrong(8);
  /** @type {{ name: string, kind: string, shape: number[], from: number, to: number }[]} */
  const found = [];
  for (const [name, value] of Object.entries(tree)) {
    if (name === "__metadata__") continue;
    const kind = value?.dtype, shape = value?.shape, at = value?.data_offsets;
    if (!Array.isArray(shape) || !shape.every(isSize) || !Array.isArray(at) || at.length !== 2 || !at.every(isSize)) {
      throw damaged(entry.path, name);
    }
    if (!Object.hasOwn(SAFETENSORS, kind)) {
      throw new Fault("kind of numbers", {
        file: entry.path,
        name,
        kind: String(kind),
        known: Object.keys(SAFETENSORS).join(", "),
      });
    }
    if (shape.reduce((a, b) => a * b, SAFETENSORS[kind]) !== at[1] - at[0]) throw damaged(entry.path, name);
    found.push({ name, kind, shape, from: at[0], to: at[1] });
  }
  let end = 0;
  for (const { name, from, to } of [...found].sort((a, b) => a.from - b.from || a.to - b.to)) {
    if (from !== end) throw damaged(entry.path, name);
    end = to;
  }
  if (begin + end > entry.size) throw new Fault("cut file", { file: entry.path, size: entry.size });
  if (begin + end < entry.size) throw damaged(entry.path, begin + end);
  return new Map(found.map(({ name, kind, shape, from }) => [name, tensorOf(entry, name, kind, shape, begin + from)]));
}

/** @type {(entry: Entry) => Promise<Map<string, Tensor>>} what numpy.savez writes; nothing is unpickled */
export async function npz(entry) {
  /** @type {Record<string, string>} */
  const kinds = { "<f4": "F32", "<f2": "F16", "|i1": "I8" };
  /** @type {Map<string, Tensor>} */
  const found = new Map();
  for (const [path, file] of await unzipped(entry)) {
    const start = await file.bytes(0, Math.min(file.size, 12));
    const head = new Cursor(start, entry.path), longer = start[6] > 1, least = longer ? 12 : 10;
    if (start.length < least || String.fromCharCode(...start.subarray(1, 6)) !== "NUMPY") {
      throw damaged(entry.path, path);
    }
    head.at = 8;
    const begin = least + (longer ? head.uint(4) : head.uint(2));
    if (begin > Math.min(file.size, 65536)) throw damaged(entry.path, path);
    const text = String.fromCharCode(...await file.bytes(least, begin));
    const [, dtype, inner] =
      /^\{'descr': '([^']*)', 'fortran_order': False, 'shape': \(([\d, ]*)\), \}\s*$/.exec(text) ?? [];
    const shape = (inner ?? "").split(",").filter((n) => n.trim()).map(Number), kind = kinds[dtype] ?? dtype;
    if (inner === undefined || !shape.every(isSize)) throw damaged(entry.path, path);
    if (kinds[dtype] && shape.reduce((a, b) => a * b, SAFETENSORS[kind]) !== file.size - begin) {
      throw damaged(entry.path, path);
    }
    const name = path.replace(/\.npy$/, "");
    found.set(name, tensorOf({ ...file, path: entry.path }, name, kind, shape, begin));
  }
  return found;
}

// ---------------------------------------------------------------------------------------------------------------- GGUF

/** @type {Record<number, string>} the kinds of GGUF that are read; others are named by their number */
const GGUF_KINDS = {
  0: "F32",
  1: "F16",
  2: "Q4_0",
  3: "Q4_1",
  6: "Q5_0",
  7: "Q5_1",
  8: "Q8_0",
  12: "Q4_K",
  13: "Q5_K",
  14: "Q6_K",
  30: "BF16",
};
const TEXT = 8, LIST = 9;
/**
 * Numbers of a header: bytes, and how they are read.
 * @type {Record<number, [number, (view: DataView, at: number) => any]>}
 */
const SCALARS = {
  0: [1, (v, at) => v.getUint8(at)],
  1: [1, (v, at) => v.getInt8(at)],
  2: [2, (v, at) => v.getUint16(at, true)],
  3: [2, (v, at) => v.getInt16(at, true)],
  4: [4, (v, at) => v.getUint32(at, true)],
  5: [4, (v, at) => v.getInt32(at, true)],
  6: [4, (v, at) => v.getFloat32(at, true)],
  7: [1, (v, at) => v.getUint8(at) !== 0],
  10: [8, (v, at) => Number(v.getBigUint64(at, true))],
  11: [8, (v, at) => Number(v.getBigInt64(at, true))],
  12: [8, (v, at) => v.getFloat64(at, true)],
};

/** @type {(entry: Entry) => Promise<{ metadata: Map<string, any>, tensors: Map<string, Tensor> }>} */
export async function readGguf(entry) {
  for (let size = Math.min(entry.size, 2 ** 22); ; size = Math.min(entry.size, 4 * size)) {
    const head = new Cursor(await entry.bytes(0, size), entry.path);
    try {
      return parsedGguf(head, entry);
    } catch (error) {
      if (!(error instanceof RangeError)) throw await standIn(entry) ?? error;
      if (size === entry.size) throw new Fault("cut file", { file: entry.path, size });
      if (size > MOST_HEADER) throw damaged(entry.path, head.at);
    }
  }
}

/**
 * A RangeError: the header is longer.
 * @type {(head: Cursor, entry: Entry) => { metadata: Map<string, any>, tensors: Map<string, Tensor> }}
 */
function parsedGguf(head, entry) {
  const wrong = () => damaged(entry.path, head.at);
  const fits = (/** @type {number} */ count, /** @type {number} */ each) => {
    if (count > (entry.size - head.at) / each) throw new Fault("cut file", { file: entry.path, size: entry.size });
    return count;
  };
  const text = () => head.text(fits(head.long(), 1));
  /** @type {(kind: number, inner: boolean) => any} */
  const value = (kind, inner) => {
    if (kind === TEXT) return text();
    if (kind === LIST && !inner) {
      const of = head.uint(4), count = fits(head.long(), of === TEXT ? 8 : SCALARS[of]?.[0] ?? 1), list = [];
      for (let n = 0; n < count; n++) list.push(value(of, true));
      return list;
    }
    if (!SCALARS[kind]) throw wrong();
    head.at += SCALARS[kind][0];
    return SCALARS[kind][1](head.view, head.at - SCALARS[kind][0]);
  };
  if (head.uint(4) !== 0x46554747) throw new Fault("no model", { file: entry.path });
  const version = head.uint(4);
  if (version !== 2 && version !== 3) throw new Fault("version", { file: entry.path, version });
  const count = fits(head.long(), 32), entries = fits(head.long(), 13);
  const metadata = new Map();
  for (let n = 0; n < entries; n++) {
    const name = text();
    if (metadata.has(name)) throw wrong();
    metadata.set(name, value(head.uint(4), false));
  }
  if (![0, 1].includes(metadata.get("split.count") ?? 0)) throw new Fault("part of a model", { file: entry.path });
  const alignment = metadata.get("general.alignment") ?? 32;
  if (!range(18).includes(Math.log2(alignment) - 3)) throw wrong();
  const places = range(count).map(() => {
    const name = text(), dimensions = head.uint(4);
    if (dimensions < 1 || dimensions > 4) throw damaged(entry.path, name);
    const shape = range(dimensions).map(() => head.long()).reverse(), kind = head.uint(4), begin = head.long();
    return { name, shape, kind: GGUF_KINDS[kind] ?? String(kind), begin };
  });
  const data = Math.ceil(head.at / alignment) * alignment;
  let end = 0;
  for (const { name, shape, kind, begin } of [...places].sort((a, b) => a.begin - b.begin)) {
    const elements = shape.reduce((a, b) => a * b, 1), [numbers, size] = EXPANDED[kind] ?? [1, 0];
    if (!(elements > 0 && elements <= 2 ** 42) || (shape.at(-1) ?? 0) % numbers || begin % alignment || begin < end) {
      throw damaged(entry.path, name);
    }
    end = begin + (elements / numbers) * size;
    if (data + end > entry.size) throw new Fault("cut file", { file: entry.path, size: entry.size });
  }
  const tensors = new Map(
    places.map(({ name, shape, kind, begin }) => [name, tensorOf(entry, name, kind, shape, data + begin)]),
  );
  if (tensors.size !== count) throw wrong();
  return { metadata, tensors };
}
