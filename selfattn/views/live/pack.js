/*
 * Reads packs, which selfattn/views/packs.py writes and describes.
 *
 * A pack may be hostile: each offset, shape, type and size is compared with the bytes that are there before an array is
 * made; what the numbers mean is checked by the kernel, and texts of a pack are shown as text.
 */

/**
 * @typedef {{ kind: string, name: string, model: any, tokenizer: any, ends?: number[], most?: number,
 *   [more: string]: any }} Pack
 */

const PACK_MARK = "sa-pack1";
const ALIGNED = 64; // bytes
const MOST_HEADER = 2 ** 28; // bytes

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

/**
 * A pack's header, whose model has the arrays: views of the bytes, int8 under the name "values" and else float32.
 * @type {(given: Blob | Uint8Array, file: string) => Promise<Pack>}
 */
export async function readPack(given, file) {
  const bytes = given instanceof Uint8Array ? given : new Uint8Array(await given.arrayBuffer().catch(() => {
    throw new Fault("not read", { file });
  }));
  const begin = PACK_MARK.length + 8, view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  if (bytes.length < begin || String.fromCharCode(...bytes.subarray(0, PACK_MARK.length)) !== PACK_MARK) {
    throw new Fault("no pack", { file });
  }
  const damaged = (/** @type {string | number} */ place) => new Fault("damaged file", { file, place });
  const cut = () => new Fault("cut file", { file, size: bytes.length });
  const length = Number(view.getBigUint64(PACK_MARK.length, true)), first = begin + length;
  if (length > MOST_HEADER || first % ALIGNED) throw damaged(PACK_MARK.length);
  if (first > bytes.length) throw cut();
  /** @type {any} */
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(begin, first)));
  } catch {
    throw damaged("JSON");
  }
  const size = (/** @type {unknown} */ n) => Number.isInteger(n) && Number(n) >= 0;
  const arrayOf = (/** @type {any} */ { type, shape, at }, /** @type {string} */ name) => {
    const isInt8 = name === "values", Numbers = isInt8 ? Int8Array : Float32Array;
    const fits = type === (isInt8 ? "int8" : "float32") && Array.isArray(shape) && shape.every(size) && size(at);
    if (!fits || at % ALIGNED) throw damaged(name);
    const count = shape.reduce((a, b) => a * b, 1), from = first + at;
    if (!(from + count * Numbers.BYTES_PER_ELEMENT <= bytes.length)) throw cut();
    return new Numbers(bytes.buffer, bytes.byteOffset + from, count);
  };
  /** @type {(value: any, name?: string) => any} */
  const withArrays = (value, name = "") => {
    if (typeof value !== "object" || value === null) return value;
    if (Object.hasOwn(value, "at")) return arrayOf(value, name);
    if (Array.isArray(value)) return value.map((each) => withArrays(each));
    return Object.fromEntries(Object.entries(value).map(([own, each]) => [own, withArrays(each, own)]));
  };
  const { model, tokenizer } = header ?? {};
  if (!Array.isArray(model?.layers) || !Number.isInteger(model.d) || typeof tokenizer !== "object" || !tokenizer) {
    throw damaged("JSON");
  }
  return { ...header, name: String(header.name ?? ""), model: withArrays(model) };
}

/**
 * What `make` makes of a pack; a pack of another kind, or without what its kind has, is a fault.
 * @template T
 * @param {Blob | Uint8Array} given
 * @param {string} file
 * @param {string} kind
 * @param {(pack: Pack) => T} make
 */
export async function modelOf(given, file, kind, make) {
  const pack = await readPack(given, file);
  if (pack.kind !== kind) throw new Fault("other kind", { file, kind: String(pack.kind) });
  try {
    return make(pack);
  } catch (error) {
    const wrong = error instanceof TypeError || /** @type {Error} */ (error).name === "sizes";
    throw wrong ? new Fault("damaged file", { file, place: "model" }) : error;
  }
}

/** @type {(transfer: DataTransfer) => File | undefined} the file of a drop; a folder is a fault */
export function droppedPack(transfer) {
  const folder = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).find((entry) => entry?.isDirectory);
  if (folder) throw new Fault("no pack", { file: folder.name });
  return transfer.files[0];
}

/** @type {(address: string, progress: (bytes: number) => void) => Promise<Blob>} */
export async function fetchedPack(address, progress) {
  const answer = await fetch(address).catch(() => null);
  if (!answer?.ok || !answer.body) throw new Fault("not fetched", { address, status: answer?.status ?? 0 });
  let bytes = 0;
  const counting = new TransformStream({
    transform(chunk, out) {
      progress((bytes += chunk.length));
      out.enqueue(chunk);
    },
  });
  return new Response(answer.body.pipeThrough(counting)).blob();
}
