"""Tokenizers of a token or two, for models whose texts do not matter."""

import tokenizers

models, pre_tokenizers = tokenizers.models, tokenizers.pre_tokenizers


def word_piece():
    made = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def byte_level():
    made = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    return made
