/*
 * Text to the ids of a tokenizer whose tables a pack has, with the places of tokens in the text: BERT's WordPiece and
 * byte-level BPE, as Hugging Face's library `tokenizers` does them. `tables` of packs.py refuses other parts.
 *
 * The library's tables of characters are older than a browser's: what they do not know is below, as ranges in
 * hexadecimal.
 */

import { range } from "../../../../selfattn/views/compute.js";

/**
 * A character, and where in the text it comes from, in UTF-16 units.
 * @typedef {{ c: string, from: number, to: number }} Letter
 */
/** @typedef {{ id: number, name: string, from: number, to: number }} Token */
/**
 * Offsets are for text.slice; [0, 0] for what a template adds.
 * @typedef {{ ids: number[], types: number[], offsets: [number, number][], cut: boolean }} Encoded
 */

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

/** @type {(letters: Letter[]) => string} */
export const textOf = (letters) => letters.map(({ c }) => c).join("");

/**
 * Each character becomes any number of characters.
 * @type {(letters: Letter[], each: (c: string) => string) => Letter[]}
 */
const mapped = (letters, each) => letters.flatMap((letter) => Array.from(each(letter.c), (c) => ({ ...letter, c })));

/** @type {(letters: Letter[]) => Letter[]} */
function decomposed(letters) {
  const found = mapped(letters, (c) => (c < "\x80" || NOT_COMPOSED.test(c) ? c : c.normalize("NFD")));
  // Characters whose order the library does not know.
  const newer = found.some(
    ({ c }) => NOT_COMPOSED.test(c) || (/[\p{Mn}\u1715]/u.test(c) && !/[\u08d4-\u08e1]/.test(c) && !MARKS.test(c)),
  );
  const sorted = newer ? [] : Array.from(textOf(found).normalize("NFD"));
  // Marks have an order; their places keep theirs, as in the library.
  sorted.forEach((c, n) => (found[n] = { ...found[n], c }));
  return found;
}

/** @type {(letters: Letter[]) => Letter[]} */
function composed(letters) {
  /** @type {Letter[]} */
  const found = [];
  // A character and what may join it; the places of joined ones are near those of the library.
  for (let n = 0, end = 1; n < letters.length; n = end++) {
    while (end < letters.length && /[\p{M}\u1160-\u11ff]/u.test(letters[end].c)) end++;
    const run = letters.slice(n, end), text = textOf(run), whole = text.normalize("NFC");
    found.push(...whole === text ? run : Array.from(whole, (c, k) => ({ ...run[Math.min(k, run.length - 1)], c })));
  }
  return found;
}

/** @type {Record<string, (letters: Letter[], settings: any) => Letter[]>} */
export const NORMALIZERS = {
  BertNormalizer: (
    letters,
    { clean_text: clean, handle_chinese_chars: apart, strip_accents: strip, lowercase: lower },
  ) => {
    if (clean) {
      letters = letters.filter(({ c }) => "\t\n\r".includes(c) || !(c === "\0" || c === "\ufffd" || CONTROLS.test(c)));
    }
    if (clean) letters = mapped(letters, (c) => (SPACE.test(c) ? " " : c));
    if (apart) letters = mapped(letters, (c) => (CJK.test(c) ? ` ${c} ` : c));
    if (strip ?? lower) letters = decomposed(letters).filter(({ c }) => !MARKS.test(c));
    return lower ? NORMALIZERS.Lowercase(letters, {}) : letters;
  },
  Lowercase: (letters) => mapped(letters, (c) => c.toLowerCase()), // each alone: the last sigma of a word is a sigma
  NFC: composed,
  NFD: decomposed,
};

/** @type {(letters: Letter[], ends: (n: number) => boolean) => Letter[][]} cut before each place that is an end */
function cutAt(letters, ends) {
  /** @type {Letter[][]} */
  const found = [];
  letters.forEach((letter, n) =>
    n === 0 || ends(n) ? found.push([letter]) : /** @type {Letter[]} */ (found.at(-1)).push(letter),
  );
  return found;
}

/** @type {(letters: Letter[], pattern: RegExp) => Letter[][]} */
function cutBy(letters, pattern) {
  // The library's letters and spaces, by others of the same length that a browser takes so.
  const text = textOf(letters)
    .replace(NEW_LETTERS, (c) => (c.length > 1 ? "\u{1f600}" : "\xa4"))
    .replaceAll("\ufeff", "\xa4")
    .replaceAll("\x85", "\v");
  const ends = new Set(
    [...text.matchAll(pattern)].flatMap((match) => [match.index ?? 0, (match.index ?? 0) + match[0].length]),
  );
  let at = 0;
  const places = letters.map(({ c }) => (at += c.length) - c.length);
  return cutAt(letters, (n) => ends.has(places[n]));
}

/** @type {Record<string, (words: Letter[], settings: any) => Letter[][]>} */
export const CUTTERS = {
  BertPreTokenizer: (letters) =>
    cutAt(letters, (n) => [letters[n].c, letters[n - 1].c].some((c) => SPACE.test(c) || PUNCTUATION.test(c))).filter(
      ([{ c }]) => !SPACE.test(c),
    ),
  Digits: (letters, { individual_digits: alone }) => {
    const digit = (/** @type {number} */ n) => /^\p{N}$/u.test(letters[n].c);
    return cutAt(letters, (n) => (alone ? digit(n) || digit(n - 1) : digit(n) !== digit(n - 1)));
  },
  Split: (letters, { words }) => cutBy(letters, WORDS[words]),
  ByteLevel: (letters, { add_prefix_space: prefix, use_regex: cuts = true }) => {
    const all = prefix && letters.length && letters[0].c !== " " ? [{ ...letters[0], c: " " }, ...letters] : letters;
    const encoder = new TextEncoder();
    return (cuts ? cutBy(all, WORDS.gpt2) : [all]).map((word) =>
      mapped(word, (c) => Array.from(encoder.encode(c), (byte) => BYTE_NAMES[byte]).join("")),
    );
  },
};

export class Tokenizer {
  /** @param {any} tables of a pack */
  constructor({ normalizers, cutters, frames, model, added, side, limit = null }) {
    this.normalizers = normalizers;
    this.cutters = cutters;
    this.frames = /** @type {any[]} */ (frames);
    this.model = model;
    this.side = side;
    /** @type {number | null} the most tokens, with those that a template adds */ this.limit = limit;
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

  /** @param {string} text @returns {Token[]} without those that a template adds */
  tokens(text) {
    text = text.replace(/\p{Cs}/gu, "\ufffd"); // halves of pairs, which no file can hold
    /** @type {Token[]} */
    const found = [];
    let begin = 0;
    for (const match of this.marks ? text.matchAll(this.marks) : []) {
      const token = this.added.get(match[0]);
      let from = match.index ?? 0, to = from + match[0].length;
      if (token.lstrip) while (from > begin && SPACE.test(text[from - 1])) from--;
      if (token.rstrip) while (to < text.length && SPACE.test(text[to])) to++;
      this.plain(text, begin, from, found);
      found.push({ id: token.id, name: text.slice(from, to), from, to });
      begin = to;
    }
    this.plain(text, begin, text.length, found);
    return found;
  }

  /** @type {(text: string, begin: number, end: number, found: Token[]) => void} */
  plain(text, begin, end, found) {
    let at = begin;
    let letters = Array.from(text.slice(begin, end), (c) => ({ c, from: at, to: (at += c.length) }));
    for (const each of this.normalizers) letters = NORMALIZERS[each.type](letters, each);
    let words = letters.length ? [letters] : [];
    for (const each of this.cutters) words = words.flatMap((word) => CUTTERS[each.type](word, each));
    for (const word of words) found.push(...this.bytewise ? this.merged(word) : this.pieces(word));
  }

  /**
   * The longest pieces from the left; a word that has none is unknown as a whole.
   * @type {(word: Letter[]) => Token[]}
   */
  pieces(word) {
    const { unk_token: unknown, continuing_subword_prefix: prefix, max_input_chars_per_word: most } = this.model;
    const letters = word.map(({ c }) => c),
      nothing = [{ id: this.ids.get(unknown) ?? 0, name: unknown, from: word[0].from, to: word[word.length - 1].to }];
    /** @type {Token[]} */
    const found = [];
    for (let from = 0, end = 0; from < letters.length; from = end) {
      let name = "";
      for (end = letters.length > most ? from : letters.length; end > from; end--) {
        if (this.ids.has((name = (from ? prefix : "") + letters.slice(from, end).join("")))) break;
      }
      if (end === from) return nothing;
      found.push({ id: this.ids.get(name) ?? 0, name, from: word[from].from, to: word[end - 1].to });
    }
    return found;
  }

  /**
   * Letters are bytes; the pair of the least rank is joined first, from the left.
   * @type {(word: Letter[]) => Token[]}
   */
  merged(word) {
    const make = (/** @type {string} */ name, /** @type {number} */ from, /** @type {number} */ to) => ({
      id: this.ids.get(name) ?? -1,
      name,
      from,
      to,
    });
    const whole = textOf(word), { ignore_merges: ignores, unk_token: unknown } = this.model;
    if (ignores && this.ids.has(whole)) return [make(whole, word[0].from, word[word.length - 1].to)];
    // A byte that is no token is left out; the library then counts on from where it was, in bytes of UTF-8.
    const bytes = (/** @type {Letter} */ { c }) => (c > "\x7f" ? 2 : 1),
      spread = word.flatMap((letter) => Array(bytes(letter)).fill(letter));
    let at = 0;
    let parts = word.filter(({ c }) => this.ids.has(c) || unknown).map((letter) => {
      const { from } = spread[at], { to } = spread[(at += bytes(letter)) - 1];
      return make(this.ids.has(letter.c) ? letter.c : unknown, from, to);
    });
    const rank = (/** @type {Token} */ a, /** @type {Token | undefined} */ b) =>
      b ? (this.ranks.get(`${a.name} ${b.name}`) ?? Infinity) : Infinity;
    for (;;) {
      const ranks = parts.map((part, n) => rank(part, parts[n + 1])),
        least = ranks.reduce((a, b) => Math.min(a, b), Infinity);
      if (least === Infinity) return parts;
      /** @type {Token[]} */
      const next = [];
      let lower = false; // a pair that is new comes first
      for (let n = 0; n < parts.length; n++) {
        if (lower || ranks[n] !== least) {
          next.push(parts[n]);
          continue;
        }
        const joined = make(parts[n].name + parts[n + 1].name, parts[n].from, parts[n + 1].to), before = next.at(-1);
        next.push(joined);
        n++;
        lower = Math.min(rank(joined, parts[n + 1]), before ? rank(before, joined) : Infinity) < least;
      }
      parts = next;
    }
  }

  /** @param {string} text @param {string} [pair] @returns {Encoded} */
  encode(text, pair) {
    const texts = [this.tokens(text), ...pair === undefined ? [] : [this.tokens(pair)]];
    const plan = this.plan(texts.length === 2),
      room = Math.max(0, (this.limit ?? Infinity) - plan.filter((each) => each.token).length);
    const [short, long] = texts.map((tokens) => tokens.length).sort((a, b) => a - b), cut = short + (long ?? 0) > room;
    if (cut) {
      // the longer text loses tokens first
      const half = Math.floor(room / 2),
        most = long === undefined || short > half ? [half, room - half] : [short, room - short];
      const first = texts.length === 1 ? [room] : texts[0].length <= texts[1].length ? most : [most[1], most[0]];
      texts.forEach(
        (tokens, n) =>
          (texts[n] =
            this.side === "left"
              ? tokens.slice(tokens.length - Math.min(first[n], tokens.length))
              : tokens.slice(0, first[n])),
      );
    }
    for (const frame of this.frames) {
      if (frame.trim_offsets) {
        texts.forEach((tokens, n) => trimmed(tokens, frame.add_prefix_space, n ? (pair ?? "") : text));
      }
    }
    /** @type {{ token: Token, type: number }[]} */
    const all = plan.flatMap(({ token, of, type }) =>
      (token ? [token] : texts[of]).map((each) => ({ token: each, type })),
    );
    return {
      ids: all.map(({ token }) => token.id),
      types: all.map(({ type }) => type),
      offsets: all.map(({ token: { from, to } }) => [from, to]),
      cut,
    };
  }

  /**
   * What a template says: added tokens and texts.
   * @type {(two: boolean) => { token?: Token, of: number, type: number }[]}
   */
  plan(two) {
    const frame = this.frames.find(({ type }) => type !== "ByteLevel");
    const text = (/** @type {number} */ of, /** @type {number} */ type) => ({ of, type });
    const mark = (/** @type {number} */ id, /** @type {number} */ type) => ({
      token: { id, name: this.names.get(id) ?? "", from: 0, to: 0 },
      of: 0,
      type,
    });
    if (!frame) return two ? [text(0, 0), text(1, 1)] : [text(0, 0)];
    if (frame.type === "TemplateProcessing") {
      return (two ? frame.pair : frame.single).flatMap((/** @type {any} */ each) =>
        each.Sequence
          ? [text(each.Sequence.id === "A" ? 0 : 1, each.Sequence.type_id)]
          : frame.special_tokens[each.SpecialToken.id].ids.map((/** @type {number} */ id) =>
              mark(id, each.SpecialToken.type_id),
            ),
      );
    }
    const { sep: [, sep], cls: [, cls] } = frame, bert = frame.type === "BertProcessing" ? 1 : 0;
    return [
      mark(cls, 0),
      text(0, 0),
      mark(sep, 0),
      ...(two ? [...(bert ? [] : [mark(sep, 0)]), text(1, bert), mark(sep, bert)] : []),
    ];
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

/**
 * Spaces at the ends of byte-level tokens do not belong to their places.
 * @type {(tokens: Token[], prefix: boolean, text: string) => void}
 */
function trimmed(tokens, prefix, text) {
  tokens.forEach((token, n) => {
    const space = /^[Ġ\p{White_Space}]*/u.exec(token.name)?.[0].length ?? 0,
      last = /[Ġ\p{White_Space}]*$/u.exec(token.name)?.[0].length ?? 0;
    const letters = Array.from(text.slice(token.from, token.to)),
      first = prefix && space === 1 && (n === 0 || token.from === 0);
    const from = first ? token.from : token.from + letters.slice(0, space).join("").length;
    tokens[n] = {
      ...token,
      from,
      to: last ? Math.max(token.to - letters.slice(-last).join("").length, from) : token.to,
    };
  });
}
