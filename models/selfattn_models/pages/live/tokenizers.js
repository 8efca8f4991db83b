/*
 * Text to the ids of a tokenizer whose tables a pack has: BERT's WordPiece and byte-level BPE, as Hugging Face's
 * library `tokenizers` does them. `tables` of packs.py refuses other parts.
 *
 * The library's tables of characters are older than a browser's: what they do not know is below, as ranges in
 * hexadecimal.
 */

import { range } from "../../../../selfattn/views/compute.js";

/** @type {(hex: string) => string} the ranges as the inside of a regular expression's brackets */
const inBrackets = (hex) => hex.replace(/[0-9A-F]+/g, "\\u{$&}").replaceAll(" ", "");
/** @type {(category: string, lacks: string, has?: string) => RegExp} */
const characters = (category, lacks, has = "") =>
  new RegExp(`^(?:(?![${inBrackets(lacks)}])[${category}]${has && `|[${has}]`})$`, "u");
const MARKS = characters(
  "\\p{Mn}",
  "7FD 897-89F 8CA-8E1 9FE AFA-AFF B55 C04 C3C D00 D3B-D3C D81 EBA ECE 180F 1885-1886 1ABF-1ADD 1AE0-1AEB " +
    "1DF6-1DFB A82C A8C5 A8FF A9BD 10D24-10D27 10D69-10D6D 10EAB-10EAC 10EFA-10EFF 10F46-10F50 10F82-10F85 11070 " +
    "11073-11074 110C2 111C9 111CF 1123E 11241 1133B 113BB-113C0 113CE 113D0 113D2 113E1-113E2 11438-1143F " +
    "11442-11444 11446 1145E 1182F-11837 11839-1183A 1193B-1193C 1193E 11943 119D4-119D7 119DA-119DB 119E0 " +
    "11A01-11A0A 11A33-11A38 11A3B-11A3E 11A47 11A51-11A56 11A59-11A5B 11A8A-11A96 11A98-11A99 11B60 11B62-11B64 " +
    "11B66 11C30-11C36 11C38-11C3D 11C3F 11C92-11CA7 11CAA-11CB0 11CB2-11CB3 11CB5-11CB6 11D31-11D36 11D3A " +
    "11D3C-11D3D 11D3F-11D45 11D47 11D90-11D91 11D95 11D97 11EF3-11EF4 11F00-11F01 11F36-11F3A 11F40 11F42 11F5A " +
    "13440 13447-13455 1611E-16129 1612D-1612F 16F4F 16FE4 1CF00-1CF2D 1CF30-1CF46 1E000-1E006 1E008-1E018 " +
    "1E01B-1E021 1E023-1E024 1E026-1E02A 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF 1E6E3 1E6E6 " +
    "1E6EE-1E6EF 1E6F5 1E944-1E94A ",
  "\\u1734\\u{1171e}",
);
const PUNCTUATION = characters(
  "\\p{P}!-/:-@[-`{-~",
  "61D 9FD A76 C77 C84 1B4E-1B4F 1B7D-1B7F 2E43-2E4F 2E52-2E5D 10D6E 10EAD 10ED0 10F55-10F59 10F86-10F89 " +
    "113D4-113D5 113D7-113D8 1144B-1144F 1145A-1145B 1145D 11660-1166C 116B9 1183B 11944-11946 119E2 11A3F-11A46 " +
    "11A9A-11A9C 11A9E-11AA2 11B00-11B09 11BE1 11C41-11C45 11C70-11C71 11EF7-11EF8 11F43-11F4F 11FFF 12FF1-12FF2 " +
    "16D6D-16D6F 16E97-16E9A 16FE2 1E5FF 1E95E-1E95F ",
  "\\u166d\\u{111c9}",
);
const CONTROLS = characters("\\p{Cc}\\p{Cf}\\p{Co}", "890-891 8E2 110CD 13430-1343F ");
const NEW_LETTERS = new RegExp(
  `[${inBrackets(
    "88F C5C CDC A7CE-A7CF A7D2 A7D4 A7F1 10940-10959 10EC5-10EC7 11DB0-11DDB 16EA0-16EB8 16EBB-16ED3 16FF2-16FF3 " +
      "187F8-187FF 18D09-18D1E 18D80-18DF2 1E6C0-1E6DE 1E6E0-1E6E2 1E6E4-1E6E5 1E6E7-1E6ED 1E6F0-1E6F4 1E6FE-1E6FF " +
      "2B73A-2B73F 2CEA2-2CEAD 323B0-33479 11DE0-11DE9 16FF4-16FF6 ",
  )}]`,
  "gu",
);
const NOT_COMPOSED = /[\u{105c9}\u{105e4}\u{11383}-\u{113c8}\u{11938}\u{16121}-\u{16128}\u{16d68}-\u{16d6a}]/u;
const SPACE = /^\p{White_Space}$/u;
const CJK = new RegExp(
  "^[\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff" +
    "\\u{20000}-\\u{2a6df}\\u{2a700}-\\u{2b81f}\\u{2b920}-\\u{2ceaf}\\u{2f800}-\\u{2fa1f}]$",
  "u",
);

/** @type {(digits: string) => RegExp} the library's (?i:…) as alternatives */
const wordsWith = (digits) =>
  new RegExp(
    `'(?:[sS\u017f]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|${digits}` +
      "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "gu",
  );
/** @type {Record<string, RegExp>} words by the names that packs give them */
const WORDS = {
  gpt2: /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu,
  qwen2: wordsWith("\\p{N}"),
  llama3: wordsWith("\\p{N}{1,3}"),
};

// A byte-level tokenizer names each byte by a letter: itself where it can be seen, the others from U+0100 on.
const SEEN = range(256).filter((n) => (n > 32 && n < 127) || (n > 160 && n !== 173));
const HIDDEN = range(256).filter((n) => !SEEN.includes(n));
const BYTE_NAMES = range(256).map((n) => String.fromCharCode(SEEN.includes(n) ? n : 256 + HIDDEN.indexOf(n)));
const BYTES_OF = new Map(BYTE_NAMES.map((name, n) => [name, n]));

/**
 * Each character becomes any number of characters.
 * @type {(letters: string[], each: (c: string) => string) => string[]}
 */
const mapped = (letters, each) => letters.flatMap((c) => Array.from(each(c)));

/** @type {(letters: string[], form: string) => string[]} */
const inForm = (letters, form) => Array.from(letters.join("").normalize(form));

/** @type {(letters: string[]) => string[]} */
function decomposed(letters) {
  const found = mapped(letters, (c) => (c < "\x80" || NOT_COMPOSED.test(c) ? c : c.normalize("NFD")));
  // Characters whose order the library does not know.
  const newer = found.some(
    (c) => NOT_COMPOSED.test(c) || (/[\p{Mn}\u1715]/u.test(c) && !/[\u08d4-\u08e1]/.test(c) && !MARKS.test(c)),
  );
  return newer ? found : inForm(found, "NFD");
}

/** @type {Record<string, (letters: string[], settings: any) => string[]>} */
export const NORMALIZERS = {
  BertNormalizer: (
    letters,
    { clean_text: clean, handle_chinese_chars: apart, strip_accents: strip, lowercase: lower },
  ) => {
    if (clean) {
      letters = letters.filter((c) => "\t\n\r".includes(c) || !(c === "\0" || c === "\ufffd" || CONTROLS.test(c)));
    }
    if (clean) letters = mapped(letters, (c) => (SPACE.test(c) ? " " : c));
    if (apart) letters = mapped(letters, (c) => (CJK.test(c) ? ` ${c} ` : c));
    if (strip ?? lower) letters = decomposed(letters).filter((c) => !MARKS.test(c));
    return lower ? NORMALIZERS.Lowercase(letters, {}) : letters;
  },
  Lowercase: (letters) => mapped(letters, (c) => c.toLowerCase()), // each alone: the last sigma of a word is a sigma
  NFC: (letters) => inForm(letters, "NFC"),
  NFD: decomposed,
};

/** @type {(letters: string[], ends: (n: number) => boolean) => string[][]} cut before each place that is an end */
function cutAt(letters, ends) {
  /** @type {string[][]} */
  const found = [];
  letters.forEach((letter, n) =>
    n === 0 || ends(n) ? found.push([letter]) : /** @type {string[]} */ (found.at(-1)).push(letter),
  );
  return found;
}

/** @type {(letters: string[], pattern: RegExp) => string[][]} */
function cutBy(letters, pattern) {
  // The library's letters and spaces, by others of the same length that a browser takes so.
  const text = letters
    .join("")
    .replace(NEW_LETTERS, (c) => (c.length > 1 ? "\u{1f600}" : "\xa4"))
    .replaceAll("\ufeff", "\xa4")
    .replaceAll("\x85", "\v");
  const ends = new Set(
    [...text.matchAll(pattern)].flatMap((match) => [match.index ?? 0, (match.index ?? 0) + match[0].length]),
  );
  let at = 0;
  const places = letters.map((c) => (at += c.length) - c.length);
  return cutAt(letters, (n) => ends.has(places[n]));
}

/** @type {Record<string, (words: string[], settings: any) => string[][]>} */
export const CUTTERS = {
  BertPreTokenizer: (letters) =>
    cutAt(letters, (n) => [letters[n], letters[n - 1]].some((c) => SPACE.test(c) || PUNCTUATION.test(c))).filter(
      ([c]) => !SPACE.test(c),
    ),
  Digits: (letters, { individual_digits: alone }) => {
    const digit = (/** @type {number} */ n) => /^\p{N}$/u.test(letters[n]);
    return cutAt(letters, (n) => (alone ? digit(n) || digit(n - 1) : digit(n) !== digit(n - 1)));
  },
  Split: (letters, { words }) => cutBy(letters, WORDS[words]),
  ByteLevel: (letters, { add_prefix_space: prefix, use_regex: cuts = true }) => {
    const all = prefix && letters.length && letters[0] !== " " ? [" ", ...letters] : letters;
    const encoder = new TextEncoder();
    return (cuts ? cutBy(all, WORDS.gpt2) : [all]).map((word) =>
      mapped(word, (c) => Array.from(encoder.encode(c), (byte) => BYTE_NAMES[byte]).join("")),
    );
  },
};

export class Tokenizer {
  /** @param {any} tables of a pack */
  constructor({ normalizers, cutters, before, after, model, added, side, limit = Infinity }) {
    this.normalizers = normalizers;
    this.cutters = cutters;
    /** @type {number[]} ids before and after each text */ this.before = before;
    this.after = /** @type {number[]} */ (after);
    this.model = model;
    this.side = side;
    this.limit = limit; // the most tokens, with those before and after
    this.bytewise = model.type === "BPE";
    /** @type {Map<string, number>} */ this.ids = new Map(Object.entries(model.vocab));
    /** @type {Map<string, number>} */ this.ranks = new Map(
      (model.merges ?? []).map((/** @type {string[]} */ merge, /** @type {number} */ n) => [merge.join(" "), n]),
    );
    /** @type {Map<string, any>} */ this.added = new Map(
      added.map((/** @type {any} */ token) => [token.content, token]),
    );
    for (const { content, id } of added) this.ids.set(content, id);
    this.names = new Map([...this.ids].map(([name, id]) => [id, name]));
    const escaped = [...this.added.keys()]
      .sort((a, b) => b.length - a.length)
      .map((text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
    this.marks = added.length ? new RegExp(escaped.join("|"), "gu") : null;
  }

  /** @param {string} text @returns {number[]} without those before and after it */
  tokens(text) {
    text = text.replace(/\p{Cs}/gu, "\ufffd"); // halves of pairs, which no file can hold
    /** @type {number[]} */
    const found = [];
    let begin = 0;
    for (const match of this.marks ? text.matchAll(this.marks) : []) {
      const token = this.added.get(match[0]);
      let from = match.index ?? 0, to = from + match[0].length;
      if (token.lstrip) while (from > begin && SPACE.test(text[from - 1])) from--;
      if (token.rstrip) while (to < text.length && SPACE.test(text[to])) to++;
      found.push(...this.plain(text.slice(begin, from)), token.id);
      begin = to;
    }
    return [...found, ...this.plain(text.slice(begin))];
  }

  /** @param {string} text without added tokens @returns {number[]} */
  plain(text) {
    let letters = Array.from(text);
    for (const each of this.normalizers) letters = NORMALIZERS[each.type](letters, each);
    let words = letters.length ? [letters] : [];
    for (const each of this.cutters) words = words.flatMap((word) => CUTTERS[each.type](word, each));
    return words.flatMap((word) => (this.bytewise ? this.merged(word) : this.pieces(word)));
  }

  /**
   * The longest pieces from the left; a word that has none is unknown as a whole.
   * @type {(letters: string[]) => number[]}
   */
  pieces(letters) {
    const { unk_token: unknown, continuing_subword_prefix: prefix, max_input_chars_per_word: most } = this.model;
    const found = [];
    for (let from = 0, end = 0; from < letters.length; from = end) {
      let id;
      for (end = letters.length > most ? from : letters.length; end > from; end--) {
        id = this.ids.get((from ? prefix : "") + letters.slice(from, end).join(""));
        if (id !== undefined) break;
      }
      if (id === undefined) return [this.ids.get(unknown) ?? 0];
      found.push(id);
    }
    return found;
  }

  /**
   * Letters are bytes; the pair of the least rank is joined first, from the left.
   * @type {(word: string[]) => number[]}
   */
  merged(word) {
    const whole = word.join(""), { ignore_merges: ignores, unk_token: unknown } = this.model, { ids } = this;
    let parts = ignores && ids.has(whole) ? [whole] : word.flatMap((c) => (ids.has(c) ? c : unknown ?? []));
    const rank = (/** @type {string} */ a, /** @type {string | undefined} */ b) =>
      this.ranks.get(`${a} ${b}`) ?? Infinity;
    for (;;) {
      const ranks = parts.map((part, n) => rank(part, parts[n + 1])),
        least = ranks.reduce((a, b) => Math.min(a, b), Infinity);
      if (least === Infinity) return parts.map((name) => ids.get(name) ?? -1);
      /** @type {string[]} */
      const next = [];
      let lower = false; // a pair that is new comes first
      for (let n = 0; n < parts.length; n++) {
        if (lower || ranks[n] !== least) {
          next.push(parts[n]);
          continue;
        }
        const before = next.at(-1) ?? "", joined = parts[n] + parts[++n];
        next.push(joined);
        lower = Math.min(rank(joined, parts[n + 1]), rank(before, joined)) < least;
      }
      parts = next;
    }
  }

  /** @type {(text: string) => { ids: number[], cut: boolean }} */
  encode(text) {
    const ids = this.tokens(text), room = Math.max(0, this.limit - this.before.length - this.after.length);
    const kept = this.side === "left" ? ids.slice(Math.max(0, ids.length - room)) : ids.slice(0, room);
    return { ids: [...this.before, ...kept, ...this.after], cut: ids.length > room };
  }

  /** @type {(id: number) => string} a token as it reads in a text; bytes of an unfinished character as <0x…> */
  spelled(id) {
    const name = this.names.get(id) ?? "", bytes = Array.from(name, (c) => BYTES_OF.get(c) ?? -1);
    if (!this.bytewise || this.added.has(name) || bytes.includes(-1)) return name.replaceAll("▁", " ");
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
    } catch {
      return bytes.map((byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
    }
  }

  /**
   * The text of a byte-level tokenizer's ids, without special tokens.
   * @type {(ids: number[], skips?: boolean) => string}
   */
  decode(ids, skips = true) {
    const names = ids
      .flatMap((id) => this.names.get(id) ?? [])
      .filter((name) => !(skips && this.added.get(name)?.special));
    const bytes = names.flatMap((name) => {
      const own = Array.from(name, (c) => BYTES_OF.get(c) ?? -1);
      return own.includes(-1) ? [...new TextEncoder().encode(name)] : own;
    });
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  }
}
