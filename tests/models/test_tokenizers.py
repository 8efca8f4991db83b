"""Tokenizers: files that contradict each other, copies; text of ids that come one by one; drawn folders have Transformers' ids."""

import copy
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfattn import models, views
from selfattn.models._tokenizer import load_tokenizer
from selfattn.text import TextStream, spelled

tokenizers = pytest.importorskip("tokenizers")
decoders = tokenizers.decoders
WORDS = ["<unk>", *(f"<0x{n:02X}>" for n in "é中".encode()), "▁", "▁▁", "▁a", "a", "▁é", ".", ""]
PIECES = ["[UNK]", "a", "##b", ".", "'", "s", "n't"]
BYTES = ["a", "Ġ", "Ġa", "Ã", "©", "Ġä", "¸Ń", "Ċ"]
SPACES, STRIP = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
DECODERS = {
    "byte-level": (BYTES, decoders.ByteLevel()),
    "SentencePiece": (WORDS, [SPACES, decoders.ByteFallback(), decoders.Fuse(), STRIP]),
    "SentencePiece without a space first": (WORDS, [SPACES, decoders.ByteFallback(), decoders.Fuse()]),
    "Metaspace": (WORDS, decoders.Metaspace()),
    "WordPiece": (PIECES, decoders.WordPiece()),
    "suffixes": (["a", "a</w>", "b</w>"], decoders.BPEDecoder()),
    "none": (PIECES, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data())
@settings(max_examples=150)
def test_texts_of_a_stream_join_to_the_text_of_all_ids(kind, data):
    words, decoder = DECODERS[kind]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}))
    if decoder is not None:
        tokenizer.decoder = decoders.Sequence(decoder) if isinstance(decoder, list) else decoder
    tokenizer.add_special_tokens(["<x>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    one = st.integers(0, tokenizer.get_vocab_size())  # the last has no token
    some = st.one_of(
        one.map(lambda n: [n]), st.sampled_from([[1, 2], [3, 4, 5]])
    )  # "é", "中" in SentencePiece's bytes
    ids = st.lists(some, max_size=8).map(lambda lists: list(itertools.chain(*lists)))
    before, new, special = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    first = tokenizer.decode(before, skip_special_tokens=not special)
    whole = tokenizer.decode(before + new, skip_special_tokens=not special)
    stream = TextStream(tokenizer, before, skip_special_tokens=not special)
    pieces = [stream.add(n) for n in new]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    if whole.startswith(first) and not first.endswith("\ufffd"):  # no character is half in the prompt
        assert first + "".join(pieces) + stream.finish() == whole


MARKS = ["<s>", "</s>", "<pad>", "<unk>", "<mask>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
LETTERS = ["the", "sea", "Sea", "é", "e", "a", "s", "t", "h", "日"]
SIZES = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}  # fmt: skip


def make(kind):
    kinds, steps = tokenizers.models, tokenizers.pre_tokenizers
    words = (MARKS + LETTERS + ["▁"] + [f"{'▁' if kind in ('spaces', 'unigram') else '##'}{word}" for word in LETTERS])  # fmt: skip
    if kind == "bytes":
        words = MARKS + sorted(steps.ByteLevel.alphabet()) + ["Ġs"]
    ids = {word: n for n, word in enumerate(words)}
    if kind == "unigram":
        tokenizer = tokenizers.Tokenizer(kinds.Unigram([(w, -1.0 - 1 / len(w)) for w in words], 3, False))
    elif kind == "pieces":
        tokenizer = tokenizers.Tokenizer(kinds.WordPiece(ids, unk_token="[UNK]"))
        tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    else:
        pair = ("Ġ", "s") if kind == "bytes" else ("s", "▁s")
        tokenizer = tokenizers.Tokenizer(kinds.BPE(ids | {"s▁s": len(ids)}, [pair], unk_token=None))
    tokenizer.pre_tokenizer = {"pieces": steps.BertPreTokenizer(), "bytes": steps.ByteLevel()}.get(
        kind, steps.Metaspace()
    )
    tokenizer.add_special_tokens(MARKS[:4])
    return tokenizer


def test_a_token_that_has_another_id_beside_the_tokenizer_is_an_error(tmp_path):
    tokenizer = make("bytes")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<z>": size + 1}))
    with pytest.raises(ValueError, match=f"the token '<z>' has the id {size + 1} .* and {size} after"):
        load_tokenizer(tmp_path)


def test_a_class_that_makes_another_kind_of_model_is_an_error(tmp_path):
    make("pieces").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(
        ValueError, match=r"has a WordPiece model, of which GPT2Tokenizer makes a BPE model; .* 'PreTrained"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # nobody names the class
    with pytest.warns(models.FolderWarning, match=r"tokenizer_config.json.*: tokenizer_class$"):
        tokenizer, _ = load_tokenizer(tmp_path)
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["the"]


def test_a_qwen2_folder_has_qwen2s_steps_whatever_class_it_names(tmp_path):
    make("bytes").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert "NFC" in str(load_tokenizer(tmp_path)[0].normalizer)


@pytest.mark.parametrize("name", ["bert", "qwen2", "roberta"])
def test_a_tokenizer_that_its_class_would_change_is_saved_as_it_is(name, tmp_path):
    tokenizer = make("pieces")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = {"bert": models.BertModel, "qwen2": models.LlamaForCausalLM, "roberta": models.RobertaModel}[name]
    model = made(SIZES | {"model_type": name}, rng=0)
    model.tokenizer = tokenizer
    models.save(model, tmp_path)
    assert models.load(tmp_path).tokens("the Sea") == ["the", "Sea"]


def test_steps_and_pages_show_characters():
    model = models.RobertaModel(SIZES | {"vocab_size": 300}, rng=0)
    model.tokenizer = make("bytes")
    tokens = [" s", "e", "<0xC3>", "<0xA9>", "<s>"]
    assert model.tokens("seé<s>") == ["Ġs", "e", "Ã", "©", "<s>"]
    assert list(model.steps("seé<s>").tokens) == tokens
    page = views.explorer(model, "seé<s>", word="<0xA9>").html
    assert "␣s" in page and "Ã" not in page
    assert spelled(make("pieces"), [10, 11 + len(LETTERS)]) == ["the", "##the"]
    assert spelled(make("spaces"), [10, 11 + len(LETTERS), 0]) == ["the", " the", "<s>"]


def test_marks_that_are_cut_are_cut_in_copies_too(tmp_path):
    models.save(models.BertModel(SIZES, rng=0), tmp_path)
    make("pieces").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    model = models.load(tmp_path)
    models.save(copy.deepcopy(model), tmp_path / "again")
    for each in (model, copy.deepcopy(model), models.load(tmp_path / "again")):
        assert "</s>" not in each.tokens("</s>")
