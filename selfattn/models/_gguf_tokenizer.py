"""The tokenizer and the chat template of a GGUF file, made into one of the library ``tokenizers``.

There are two kinds: byte-level BPE ("gpt2"), whose pre-tokenizer has a name of llama.cpp's, and SentencePiece's BPE ("llama"), whose
merges follow from the scores of its tokens.
"""

from __future__ import annotations

from typing import Any

from selfattn._check import quoted
from selfattn._extras import import_extra
from selfattn.models._gguf import GGUF

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# What stands before the bytes: a pattern whose matches are words, "digits" one by one and GPT-2's pattern, or that alone.
PRE = {
    "gpt-2": None, "gpt2": None, "mpt": None, "olmo": None, "jais": None, "phi-2": None, "roberta-bpe": None,
    "smollm": "digits", "starcoder": "digits", "refact": "digits", "command-r": "digits", "codeshell": "digits",
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "dbrx": LLAMA3, "smaug-bpe": LLAMA3,
    "qwen2": QWEN2, "stablelm2": QWEN2, "deepseek-r1-qwen": QWEN2,
}  # fmt: skip
# Of Llama 3: a word that is a token needs no merges, and a text begins with the first of all tokens unless the file says no.
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")
START = "tokenizer.ggml."
MOST_LETTERS = 1000  # of a token that is cut at each place
NAMES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
ENDS = ("eos", "eot", "eom")


def attach_tokenizer(model: Any, file: GGUF) -> None:
    """Give a model the tokenizer of a file, its chat template, and what ends its answers; a file may have none.

    Raises
    ------
    ValueError
        It is of a kind that is not supported, or is damaged.
    """
    kind = file.metadata.get(START + "model")
    tokens = _list(file, "tokens", str)
    if len(tokens) > model.vocab_size:
        raise ValueError(f"{file.path} has {len(tokens)} tokens, and a table of {model.vocab_size} rows")
    special = {name: _id(file, name, tokens) for name in {*NAMES, *ENDS}}
    model.special_tokens = {
        NAMES[name]: tokens[n] for name, n in special.items() if n is not None and name in NAMES
    }
    model.stop_ids = frozenset(n for name, n in special.items() if n is not None and name in ENDS)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{file.path}: tokenizer.chat_template must be a text, not {quoted(template)}")
    model.chat_template, model._folder = template, file.path
    if kind in (None, "none", "no_vocab"):
        return
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{file.path} has a tokenizer of the kind {kind!r:.80}; supported are 'gpt2' and 'llama'"
        )
    library = import_extra("tokenizers", "models")
    vocabulary = {token: n for n, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for n, token in enumerate(tokens) if vocabulary[token] != n)
        raise ValueError(f"{file.path} has the token {quoted(twice)} twice")
    make = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        tokenizer = make(library, file, vocabulary, tokens)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file.path}: its tokens and merges make no tokenizer: {error}") from None
    _add_special(library, tokenizer, file, tokens)
    if _flag(file, "add_eos_token", False):
        raise ValueError(f"{file.path}: {START}add_eos_token, an end behind every text, is not supported")
    begins = kind == "llama" or file.metadata.get(START + "pre") in WHOLE_WORDS_FIRST
    if _flag(file, "add_bos_token", begins) and special["bos"] is not None:
        bos = tokens[special["bos"]]
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, special["bos"])]
        )
    model.tokenizer = tokenizer


def _list(file: GGUF, name: str, kind: type) -> list[Any]:
    found = file.metadata.get(START + name, [])
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise ValueError(f"{file.path}: {START}{name} must be a list of {kind.__name__}, not {quoted(found)}")
    return found


def _flag(file: GGUF, name: str, default: bool) -> bool:
    found = file.metadata.get(START + name, default)
    if type(found) is not bool:
        raise ValueError(f"{file.path}: {START}{name} must be true or false, not {quoted(found)}")
    return found


def _id(file: GGUF, name: str, tokens: list[str]) -> int | None:
    found = file.metadata.get(f"{START}{name}_token_id")
    if found is None or (name not in ENDS and name != "bos" and found == 2**32 - 1):
        return None
    if type(found) is not int or not 0 <= found < max(len(tokens), 1):
        raise ValueError(
            f"{file.path}: {START}{name}_token_id must be one of {len(tokens)} tokens, not {found!r:.80}"
        )
    return found if tokens else None


def _byte_level(library: Any, file: GGUF, vocabulary: dict[str, int], tokens: list[str]) -> Any:
    pre = file.metadata.get(START + "pre", "default")
    if not isinstance(pre, str) or pre not in PRE:
        raise ValueError(
            f"{file.path}: the pre-tokenizer {pre!r:.80} is not supported; there are {', '.join(PRE)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _list(file, "merges", str)]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise ValueError(
            f"{file.path}: a merge must be two tokens with a space between, not {' '.join(wrong)!r:.80}"
        )
    tokenizer = library.Tokenizer(
        library.models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    )
    steps, pattern = library.pre_tokenizers, PRE[pre]
    last = steps.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, "digits"))
    if pattern is None:
        tokenizer.pre_tokenizer = last
    elif pattern == "digits":
        tokenizer.pre_tokenizer = steps.Sequence([steps.Digits(individual_digits=True), last])
    else:
        tokenizer.pre_tokenizer = steps.Sequence([steps.Split(library.Regex(pattern), "isolated"), last])
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(library: Any, file: GGUF, vocabulary: dict[str, int], tokens: list[str]) -> Any:
    """Make the tokenizer that Transformers makes of SentencePiece's BPE (Kudo and Richardson, 2018)."""
    scores = _list(file, "scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{file.path} has {len(scores)} scores for {len(tokens)} tokens")
    types = _list(file, "token_type", int) or [NORMAL] * len(tokens)
    merges = []
    for n in sorted(range(len(tokens)), key=lambda n: -scores[n]):  # stable: equal scores in order
        token = tokens[n]
        if n >= len(types) or types[n] not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        if len(token) > MOST_LETTERS:
            raise ValueError(
                f"{file.path} has a token of {len(token)} characters; there may be {MOST_LETTERS} at most"
            )
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        cuts = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        merges += sorted(cuts, key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))
    place = _id(file, "unknown", tokens)
    unknown = None if place is None else tokens[place]
    tokenizer = library.Tokenizer(
        library.models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    normalizers, decoders = library.normalizers, library.decoders
    prefix = _flag(file, "add_space_prefix", True)
    before, after = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _add_special(library: Any, tokenizer: Any, file: GGUF, tokens: list[str]) -> None:
    """Tell the tokenizer which tokens are found as a whole in a text, and which are left out of what is decoded."""
    types = _list(file, "token_type", int)
    if types and len(types) != len(tokens):
        raise ValueError(f"{file.path} has {len(types)} types for {len(tokens)} tokens")
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        found = [
            library.AddedToken(token, special=special, normalized=False)
            for token, own in zip(tokens, types, strict=False)
            if own == wanted and token
        ]
        if found:
            tokenizer.add_special_tokens(found) if special else tokenizer.add_tokens(found)
