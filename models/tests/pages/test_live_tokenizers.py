"""The tokenizer of live pages, under node, against Hugging Face's library: ids of drawn texts in many scripts."""

import random
import re
from importlib import resources
from types import SimpleNamespace

import pytest
import tokenizers
from live import TOKENIZERS, run

from selfattn_models import packs
from selfattn_models.pages.texts import PACKAGE

AddedToken, Tokenizer = tokenizers.AddedToken, tokenizers.Tokenizer
decoders, models, normalizers = tokenizers.decoders, tokenizers.models, tokenizers.normalizers
pre_tokenizers, processors, trainers = tokenizers.pre_tokenizers, tokenizers.processors, tokenizers.trainers

WORDS = (
    "the river bank's it'S don't naïve ÀÉÎ Straße ΟΔΟΣ İstanbul ﬁne 日本語 汉字 한국어 "
    "각 שָׁלוֹם سَلَام हिन्दी ไทย 12345 ٣٤ ½ Ⅷ x² [MASK] <|end|> "
    "e\u0301\u0323 a\u0300\u0301 👩\u200d👩\u200d👧 🇩🇪 "
    "\ufeff \x85 \xa0 \u3000 \u2028 \u0000 \ufffd \u200b \xad \t \n \r\n "
    ".,;:!? — “q” \U0001e6c0 \u1734 \U000323b0 \u0345 "
)
RANGES = [
    (1, 128),
    (0x80, 0x250),
    (0x250, 0x590),
    (0x590, 0x900),
    (0x900, 0x1200),
    (0x1200, 0x2C00),
    (0x2C00, 0xD7FF),
    (0xE000, 0xFFFF),
    (0x10000, 0x20000),
    (0x20000, 0x33500),
]


def texts(count, seed=0, known=()):
    """Words of many scripts, drawn characters, and one very long word."""
    draw = random.Random(seed)
    words = [*WORDS.split(" "), *known]

    def piece():
        what = draw.randrange(10)
        if what < 6:
            return draw.choice(words)
        low, high = draw.choice(RANGES)
        return "".join(chr(draw.randrange(low, high)) for _ in range(draw.randrange(1, 5)))

    drawn = [
        "".join(piece() + draw.choice(["", " ", " ", "  "]) for _ in range(draw.randrange(12)))
        for _ in range(count)
    ]
    whole = [text.encode("utf-8", "ignore").decode() for text in drawn]
    return [*whole, "", " ", "ab" * 3000, "é" * 99 + "x"]


BODY = """
const made = new Tokenizer(given.tables);
return given.texts.map((text) => {
  const { ids } = made.encode(text);
  return [ids, given.decodes ? made.decode(ids) : ""];
});
"""


def check(made, drawn, limit=None, decodes=False):
    made.no_padding()
    made.no_truncation() if limit is None else made.enable_truncation(limit)
    tables = packs.tables(SimpleNamespace(tokenizer=made)) | ({} if limit is None else {"limit": limit})
    found = run(TOKENIZERS, BODY, {"tables": tables, "texts": drawn, "decodes": decodes})
    for text, (ids, decoded) in zip(drawn, found, strict=True):
        expected = made.encode(text)
        assert ids == expected.ids, (text, expected.tokens)
        if decodes:
            assert decoded == made.decode(ids), text


def word_piece(**options):
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**options)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        texts(100, 9), trainers.WordPieceTrainer(vocab_size=900, special_tokens=marks, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def byte_level(cutter, after=None, normalizer=None, ignore_merges=False):
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer, made.decoder = cutter, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts(100, 9), trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(
        [
            AddedToken("<|end|>", rstrip=True, normalized=False),
            AddedToken("[MASK]", lstrip=True, normalized=False),
        ]
    )
    if normalizer:
        made.normalizer = normalizer
    if after:
        made.post_processor = after
    return made


@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 9), ({"lowercase": False}, None), ({"strip_accents": False, "handle_chinese_chars": False}, None)],
)
def test_wordpiece_is_the_librarys(options, limit):
    made = word_piece(**options)
    check(made, texts(200, 1), limit)


def test_byte_level_bpe_is_the_librarys():
    from selfattn_models._gguf_tokenizer import LLAMA3, QWEN2

    steps, regex = pre_tokenizers, tokenizers.Regex
    bytewise = steps.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = byte_level(steps.ByteLevel(add_prefix_space=False), processors.ByteLevel(trim_offsets=True))
    roberta = byte_level(
        steps.ByteLevel(add_prefix_space=True),
        processors.RobertaProcessing(("<|end|>", 700), ("[MASK]", 701)),
    )
    smollm2 = byte_level(
        steps.Sequence([steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)])
    )
    llama3 = byte_level(
        steps.Sequence([steps.Split(regex(LLAMA3), "isolated"), bytewise]), ignore_merges=True
    )
    qwen2 = byte_level(
        steps.Sequence([steps.Split(regex(QWEN2), "isolated"), bytewise]), normalizer=normalizers.NFC()
    )
    for seed, (made, limit) in enumerate(
        [(gpt2, None), (roberta, 12), (smollm2, None), (llama3, 7), (qwen2, None)]
    ):
        check(made, texts(120, seed), limit, decodes=limit is None)


def test_a_new_pair_of_a_lower_rank_is_joined_first():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: n for n, name in enumerate([*letters, "ab", "aba"])}
    made = Tokenizer(models.BPE(vocab, [("ab", "a"), ("a", "b")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    check(made, ["abab", "ababab abaab"])


def test_characters_that_browsers_and_the_library_take_differently():
    """Unicode has grown: the library cuts and cleans by older tables. All code points have been compared; here are
    the ends of ranges, and drawn ones."""
    script = resources.files(PACKAGE).joinpath("live", "tokenizers.js").read_text()
    listed = " ".join(re.findall(r'^ *.*"([0-9A-F -]{9,})"', script, re.M))
    ends = {int(each, 16) + step for each in re.findall(r"[0-9A-F]+", listed) for step in (-1, 0, 1)}
    drawn = {random.Random(n).randrange(0x110000) for n in range(3000)}
    points = [chr(n) for n in sorted(ends | drawn) if not 0xD800 <= n < 0xE000]
    assert len(ends) > 600
    clean, cut = normalizers.BertNormalizer(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    punctuation = pre_tokenizers.BertPreTokenizer()
    body = """
    const bert = { clean_text: true, handle_chinese_chars: true, strip_accents: null, lowercase: true };
    return given.map((c) => [
      NORMALIZERS.BertNormalizer([...c], bert).join(""),
      ...["a", "1", "!"].map((first) => CUTTERS.ByteLevel([...first + c], {}).length),
      CUTTERS.BertPreTokenizer([...`a${c}a`], {}).length,
    ]);
    """
    for c, (normal, *cuts, words) in zip(points, run(TOKENIZERS, body, points), strict=True):
        assert normal == clean.normalize_str(c), hex(ord(c))
        assert cuts == [len(cut.pre_tokenize_str(first + c)) for first in "a1!"], hex(ord(c))
        assert words == len(punctuation.pre_tokenize_str(f"a{c}a")), hex(ord(c))
