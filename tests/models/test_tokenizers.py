"""Tokenizers: text of ids that come one by one."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfattn.text import TextStream

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
