"""Packs of models: what they hold, and what is refused."""

import json

import numpy as np
import pytest
import tokenizers
from numpy.testing import assert_array_equal

import selfattn_models as models
from selfattn import nn
from selfattn.text import WhitespaceTokenizer
from selfattn_models.packs import packed

SIZES = {
    "vocab_size": 9,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


def header(pack):
    return json.loads(pack[16 : 16 + int.from_bytes(pack[8:16], "little")])


def word_piece():
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return made


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
    assert len(set(packs)) == 1 and header(packs[0])["model"]["tableKind"] == "int8"
    models.pack(tmp_path / "int8", tmp_path / "x.sapack", dtype="float32")
    assert header((tmp_path / "x.sapack").read_bytes())["model"]["tableKind"] == "float32"


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
