/*
 * Text to the ids of a model's tokenizer.json: BERT's WordPiece. Any part that is not done here is a fault that names it, so no
 * tokens are wrong.
 */

/** @typedef {{ ids: number[], types: number[], cut: boolean }} Encoding */

const CJK = /[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u{20000}-\u{2a6df}\u{2a700}-\u{2ceaf}\u{2f800}-\u{2fa1f}]/gu;

class WordPiece {
  /** @param {any} parts of tokenizer.json @param {string} file */
  constructor({ normalizer, pre_tokenizer: cutter, model, post_processor: frame, added_tokens: added }, file) {
    const part = (/** @type {any} */ given, /** @type {string} */ wanted) => {
      if (given?.type !== wanted) throw new Fault("tokenizer part", { file, part: String(given?.type ?? given) });
    };
    part(normalizer, "BertNormalizer");
    part(cutter, "BertPreTokenizer");
    part(model, "WordPiece");
    part(frame, "TemplateProcessing");
    this.normalizer = normalizer;
    this.model = model;
    this.frame = frame;
    this.ids = new Map(/** @type {[string, number][]} */ (Object.entries(model.vocab)));
    this.names = new Map([...this.ids].map(([name, id]) => [id, name]));
    for (const { content, id } of added ?? []) this.names.set(id, content).size && this.ids.set(content, id);
    const marks = (added ?? []).map((/** @type {any} */ { content }) => content.replace(/[^\w\s]/g, "\\$&"));
    this.marks = marks.length ? new RegExp(`(${marks.join("|")})`) : null;
    /** @type {number | null} */ this.limit = null;
  }

  /** @param {string} text @returns {string[]} */
  words(text) {
    const { clean_text: clean, handle_chinese_chars: apart, strip_accents: strip, lowercase: lower } = this.normalizer;
    if (clean) text = text.replace(/[\0\ufffd]|(?![\t\n\r])[\p{Cc}\p{Cf}\p{Co}]/gu, "").replace(/[\s\p{Zs}]/gu, " ");
    if (apart) text = text.replace(CJK, " $& ");
    if (strip ?? lower) text = text.normalize("NFD").replace(/\p{Mn}/gu, "");
    if (lower) text = Array.from(text, (letter) => letter.toLowerCase()).join(""); // a letter alone: the last sigma of a word too
    return text.split(/\s+/).flatMap((word) => word.split(/([\p{P}!-/:-@[-`{-~])/u)).filter(Boolean);
  }

  /** @param {string} word @returns {number[]} the longest pieces from the left */
  pieces(word) {
    const { model: { unk_token: unknown, continuing_subword_prefix: prefix = "##", max_input_chars_per_word: most = 100 }, ids } = this;
    const letters = [...word], found = [], nothing = [/** @type {number} */ (ids.get(unknown))];
    if (letters.length > most) return nothing;
    for (let from = 0, end = 0; from < letters.length; from = end) {
      for (end = letters.length; end > from && !ids.has((from ? prefix : "") + letters.slice(from, end).join("")); end--);
      if (end === from) return nothing;
      found.push(/** @type {number} */ (ids.get((from ? prefix : "") + letters.slice(from, end).join(""))));
    }
    return found;
  }

  /** @param {string} text @param {string} [pair] @returns {Encoding} */
  encode(text, pair) {
    const read = (/** @type {string} */ own) => (this.marks ? own.split(this.marks) : [own]).flatMap((part, n) => (n % 2 ? [/** @type {number} */ (this.ids.get(part))] : this.words(part).flatMap((word) => this.pieces(word))));
    /** @type {Record<string, number[]>} */
    const texts = { A: read(text), B: pair === undefined ? [] : read(pair) };
    const plan = /** @type {any[]} */ (pair === undefined ? this.frame.single : this.frame.pair), special = plan.filter((each) => each.SpecialToken).length;
    let room = (this.limit ?? Infinity) - special;
    const cut = texts.A.length + texts.B.length > room;
    while (texts.A.length + texts.B.length > Math.max(0, room)) (texts.A.length > texts.B.length ? texts.A : texts.B).pop();
    const ids = plan.map((each) => (each.SpecialToken ? this.frame.special_tokens[each.SpecialToken.id].ids : texts[each.Sequence.id]));
    return { ids: ids.flat(), types: plan.flatMap((each, n) => ids[n].map(() => (each.SpecialToken ?? each.Sequence).type_id)), cut };
  }

  /** @param {number} id */
  spelled(id) {
    return this.names.get(id) ?? "";
  }
}

/** @param {Map<string, Entry>} files @param {any} [_config] of the model @returns {Promise<any>} */
async function tokenizerOf(files, _config) {
  const entry = files.get("tokenizer.json");
  if (!entry) throw new Fault("no tokenizer", { file: [...files.keys()][0] ?? "" });
  return new WordPiece(await readJson(entry), entry.path);
}
