"""Packs of models: what they hold, what is refused, and what a page says of hostile ones."""

import base64
import json
import random

import numpy as np
import pytest
import tokenizers
from hostile import NUMBERS, TEXTS
from live import run
from numpy.testing import assert_array_equal
from small_tokenizers import word_piece

import selfattn_models as models
from selfattn import nn
from selfattn.text import WhitespaceTokenizer
from selfattn.views.packs import gpt_pack
from selfattn_models.packs import packed
from selfattn_models.pages.texts import own

SIZES = {
    "vocab_size": 9,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


def header(pack):
    return json.loads(pack[16 : 16 + int.from_bytes(pack[8:16], "little")])


def encoder(kind=models.BertModel, **settings):
    made = kind(SIZES | settings, rng=0)
    made.tokenizer = word_piece()
    return made


def test_a_model_is_rounded_once_and_stays_as_it_is(tmp_path):
    model = encoder()
    models.save(model, tmp_path / "float32")
    models.save(encoder().quantize("int8"), tmp_path / "int8")
    packs = [packed(given, "x") for given in (model, tmp_path / "float32", tmp_path / "int8")]
    assert model.dtype == "float32"
    packs.append(packed(model.quantize("int8"), "x"))
    assert len(set(packs)) == 1 and header(packs[0])["model"]["layers"][0]["weights"] == "int8"
    models.pack(tmp_path / "int8", tmp_path / "x.sapack", dtype="float32")
    found = header((tmp_path / "x.sapack").read_bytes())
    assert found["model"]["layers"][0]["weights"] == "float32" and found["name"] == "x"


def test_what_pages_do_not_do_is_refused():
    dense = encoder()
    dense.pipeline.after = [("2_Dense", object())]
    euclidean = encoder()
    euclidean.pipeline.similarity = "euclidean"
    sentencepiece = encoder()
    sentencepiece.tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    split = encoder()
    split.tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+b"), "isolated")
    words = encoder()
    words.tokenizer.add_tokens([tokenizers.AddedToken("b", single_word=True)])
    for model, said in (
        (dense, "a Dense after the pooling"),
        (euclidean, "the similarity 'euclidean'"),
        (sentencepiece, '"Metaspace"'),
        (split, '"Split"'),
        (words, '"single_word": true'),
        (models.BertModel(SIZES, rng=0), "no tokenizer.json"),
        (nn.GPT(3, 4, 1, 1, max_seq_len=4), "a letter for each of its 3 ids, not None"),
    ):
        with pytest.raises(ValueError, match=said):
            packed(model, "x")
    small = nn.EmbeddingModel(str.split, 3, 4, max_seq_len=4)
    for model in (encoder(models.MPNetModel), small):
        with pytest.raises(TypeError, match="packs hold BERT"):
            packed(model, "x")


def test_a_small_model_has_its_words():
    model = nn.EmbeddingModel(WhitespaceTokenizer(["<unk>", "sea"]), 2, 4, max_seq_len=6, num_heads=2, rng=0)
    found = header(packed(model, "toy"))
    assert found["tokenizer"] == {"words": ["<unk>", "sea"], "limit": 6}
    assert (found["model"]["vocabulary"], found["model"]["layers"][0]["hidden"]) == (2, 0)


def test_a_gpt_that_was_trained_on_letters_is_packed(tmp_path):
    from selfattn_models.gpt2 import character_tokenizer

    gpt = nn.GPT(4, 8, 1, 2, max_seq_len=6, rng=0)
    models.save(gpt, tmp_path / "mine", character_tokenizer("ab "))
    pack = packed(tmp_path / "mine", "mine")
    found = header(pack)
    assert found["tokenizer"] == {"letters": ["\ufffd", "a", "b", " "]} and found["most"] == 6
    at = found["model"]["table"]["at"] + 16 + int.from_bytes(pack[8:16], "little")
    assert_array_equal(np.frombuffer(pack, "<f4", 32, at), gpt.token_embedding.weight.ravel())


SCRIPTS = ("live/kernel.js", "live/pack.js", *own("live/encoder.js"))
READ = """
const bytes = (text) => new Uint8Array(Buffer.from(text, "base64"));
const kernel = await Kernel.load(bytes(given.wasm)), found = [];
for (const pack of given.packs) {
  try {
    const encoder = await modelOf(bytes(pack), "x", "encoder", (pack) => new Encoder(kernel, pack));
    found.push(encoder.name);
    encoder.model.free();
  } catch (error) {
    found.push([error.sentence ?? error.name, error.values?.place ?? ""]);
  }
}
return found;
"""
MEMORY = 200  # MB of node's heap: hostile sizes would need more


def read_all(kernels, packs):
    wasm = base64.b64encode(kernels.read_bytes()).decode()
    return run(SCRIPTS, READ, {"wasm": wasm, "packs": [base64.b64encode(x).decode() for x in packs]}, MEMORY)


def with_header(pack, header):
    """Return a pack with another header: a tree, or its bytes."""
    own = header if isinstance(header, bytes) else json.dumps(header).encode()
    own += b" " * (-(16 + len(own)) % 64)
    return pack[:8] + len(own).to_bytes(8, "little") + own + pack[16 + int.from_bytes(pack[8:16], "little") :]


def test_a_page_names_what_is_wrong_with_a_pack(kernels):
    pack = packed(encoder(), "</script><script>alert(1)</script>")

    def changed(**change):
        found = header(pack)
        found["model"]["positions"] |= change
        return with_header(pack, found)

    letters = gpt_pack(nn.GPT(3, 4, 1, 1, max_seq_len=4, rng=0), "ab ")
    size = 2**60
    cases = [
        (pack, "</script><script>alert(1)</script>"),  # a name, which pages show as text
        (b"", ["no pack", ""]),
        (b"PK\3\4" * 99, ["no pack", ""]),
        (letters, ["other kind", ""]),
        (pack[:-64], ["cut file", ""]),
        (pack[:100], ["cut file", ""]),
        (pack[:8] + b"\xff" * 8 + pack[16:], ["damaged file", 8]),
        (with_header(pack, b"{"), ["damaged file", "JSON"]),
        (with_header(pack, b"[" * 200_000), ["damaged file", "JSON"]),
        (with_header(pack, {"kind": "encoder"}), ["damaged file", "JSON"]),
        (changed(at=len(pack) // 64 * 64), ["cut file", ""]),
        (changed(at=4), ["damaged file", "positions"]),
        (changed(at=-64), ["damaged file", "positions"]),
        (changed(shape=[size, size, size]), ["cut file", ""]),
        (changed(shape=[-1, -4]), ["damaged file", "positions"]),
        (changed(shape="4"), ["damaged file", "positions"]),
        (changed(type="int8"), ["damaged file", "positions"]),
        (with_header(pack, header(pack) | {"tokenizer": {"model": 0}}), ["damaged file", "model"]),
        (
            with_header(pack, header(pack) | {"model": header(pack)["model"] | {"d": 2}}),
            ["damaged file", "model"],
        ),
    ]
    for found, (_, said) in zip(read_all(kernels, [each for each, _ in cases]), cases, strict=True):
        assert found == said


def test_drawn_damage_of_a_pack_is_named_or_harmless(kernels):
    """Any value of the header may be another one."""
    draw, pack = random.Random(6), packed(encoder(), "x", "float32")
    values = [n for n in NUMBERS if -1e308 <= n <= 1e308 and abs(n) < 2**200] + TEXTS + [None, True, [], {}]
    packs = []
    for _ in range(300):
        tree = header(pack)
        at = tree
        while isinstance(at, dict | list) and at:
            key = draw.choice([*at]) if isinstance(at, dict) else draw.randrange(len(at))
            if draw.random() < 0.15 or not isinstance(at[key], dict | list) or not at[key]:
                at[key] = draw.choice(values)
                break
            at = at[key]
        packs.append(with_header(pack, tree))
    found = read_all(kernels, packs)
    assert {each[0] for each in found if isinstance(each, list)} <= {
        "damaged file",
        "cut file",
        "other kind",
        "memory",
    }
    assert sum(isinstance(each, list) for each in found) > 60
