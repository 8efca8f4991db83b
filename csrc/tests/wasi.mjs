// Runs a program of WebAssembly's system interface: node tests/wasi.mjs PROGRAM [argument …]. Node's own interface ends
// the process in the middle of long programs. This one has what the tests call: arguments, a clock, input, output.
import { readFileSync, readSync } from "node:fs";

const [file, ...rest] = process.argv.slice(2);
const words = [file, ...rest].map((word) => new TextEncoder().encode(`${word}\0`));
const text = new TextDecoder();
let memory;
let line = "";

class Exit extends Error {
  constructor(status) {
    super();
    this.status = status;
  }
}
const view = () => new DataView(memory.buffer);
const NOT_SUPPORTED = 52;
const calls = {
  args_sizes_get(count, bytes) {
    view().setUint32(count, words.length, true);
    view().setUint32(bytes, words.reduce((sum, word) => sum + word.length, 0), true);
    return 0;
  },
  args_get(pointers, to) {
    for (const word of words) {
      view().setUint32(pointers, to, true);
      new Uint8Array(memory.buffer, to).set(word);
      to += word.length;
      pointers += 4;
    }
    return 0;
  },
  clock_time_get(clock, precision, to) {
    view().setBigUint64(to, BigInt(Math.round((clock ? performance.now() : Date.now()) * 1e6)), true);
    return 0;
  },
  fd_read(file, pieces, count, got) {
    let bytes = 0, whole = true;
    for (let i = 0; i < count && whole; ++i) {
      const from = view().getUint32(pieces + 8 * i, true), length = view().getUint32(pieces + 8 * i + 4, true);
      const read = length ? readSync(0, new Uint8Array(memory.buffer, from, length)) : 0;
      bytes += read;
      whole = read === length; // a pipe may give less: the next piece must wait
    }
    view().setUint32(got, bytes, true);
    return 0;
  },
  fd_write(file, pieces, count, written) {
    let bytes = 0;
    for (let i = 0; i < count; ++i) {
      const from = view().getUint32(pieces + 8 * i, true), length = view().getUint32(pieces + 8 * i + 4, true);
      line += text.decode(new Uint8Array(memory.buffer, from, length), { stream: true });
      bytes += length;
    }
    view().setUint32(written, bytes, true);
    const end = line.lastIndexOf("\n") + 1;
    process.stdout.write(line.slice(0, end));
    line = line.slice(end);
    return 0;
  },
  fd_fdstat_get(file, to) {
    new Uint8Array(memory.buffer, to, 24).fill(0);
    view().setUint8(to, 2); // a character device
    return 0;
  },
  proc_exit(status) {
    throw new Exit(status);
  },
};
const system = new Proxy(calls, { get: (all, name) => all[name] ?? (() => NOT_SUPPORTED) });
const { instance } = await WebAssembly.instantiate(readFileSync(file), { wasi_snapshot_preview1: system });
memory = instance.exports.memory;
try {
  instance.exports._start();
} catch (error) {
  if (!(error instanceof Exit)) {
    throw error;
  }
  process.exitCode = error.status;
}
