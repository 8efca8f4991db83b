"""The tokenizer of a GGUF file.

There are two kinds: byte-level BPE ("gpt2"), whose pre-tokenizer has a name of llama.cpp's, and SentencePiece's BPE
("llama"), whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from selfattn.engine import Array, disk, import_extra, quoted, warn
from selfattn_models._gguf_file import GGUF, Entries
from selfattn_models._known_settings import FolderWarning
from selfattn_models._tokenizer_class import QWEN2, sentencepiece_decoder

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
WHOLE = (CONTROL, UNKNOWN, USER_DEFINED)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is cut before BPE: by a pattern of words, at each digit ("digits") and by GPT-2's pattern, or by GPT-2's
# pattern alone.
PRE = {
    name: pattern
    for names, pattern in (
        ("gpt-2 gpt2 mpt olmo jais phi-2 roberta-bpe", None),
        ("smollm starcoder refact command-r codeshell", "digits"),
        ("llama-bpe llama3 llama-v3 dbrx smaug-bpe falcon3", LLAMA3),
        ("qwen2 stablelm2 deepseek-r1-qwen megrez", QWEN2),
        ("tekken", TEKKEN),
    )
    for name in names.split()
}
# The models of these normalise texts to NFC, but no key of a GGUF file says so.
NFC = ("qwen2", "deepseek-r1-qwen", "megrez", "mpt", "olmo", "command-r")
# Old files do not name a pre-tokenizer; the first models of the architecture had these.
UNNAMED = {"qwen2": "qwen2", "qwen3": "qwen2", "gpt2": "gpt-2", "llama": "gpt-2"}
# As in Llama 3, a word that is a token needs no merges, and a text begins with the bos token unless the file says no.
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
BOS_FIRST = WHOLE_WORDS_FIRST
# Phi-3's marks end with the white space after them, but no key says so: llama.cpp knows the models by their names. The
# marks of Phi-4, of the same architecture, do not, and its tokenizer is of another kind.
PHI3 = ("phi-3", "phi3")
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
# Normal tokens that look like these are special: old converters wrote no types, or called such tokens normal.
MARK = re.compile(r"<\|.*\|>|<｜.*｜>|<(start|end)_of_\w+>|\[/?INST\]", re.DOTALL)
ENDS_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
HASHES = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "cls": "cls_token",
    "mask": "mask_token",
}
ENDS = ("eos", "eot", "eom")


class Vocabulary(Entries):
    """The entries of the tokenizer: its tokens, and their ids."""

    def __init__(self, file: GGUF) -> None:
        super().__init__(file, "tokenizer.ggml")
        self.tokens = self.list_of("tokens", str)
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        self.types = self.list_of("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.error(f"there are {len(self.types)} types for {len(self.tokens)} tokens")
        self.architecture = file.metadata["general.architecture"]

    def list_of(self, name: str, kind: type) -> list[Any]:
        """Read a list, which may be missing."""
        found = self.raw(name, [])
        if not isinstance(found, list) or not {*map(type, found)} <= {kind}:
            raise self.error(f"{name} must be a list of {kind.__name__}, not {quoted(found)}")
        return found

    def special(self, name: str) -> int | None:
        """Read the id of a special token, if there is one."""
        found = self.raw(f"{name}_token_id")
        if found is None or (name not in ENDS and name != "bos" and found == 2**32 - 1):
            return None
        if type(found) is not int or not 0 <= found < max(len(self.tokens), 1):
            raise self.error(f"{name}_token_id must be one of {len(self.tokens)} tokens, not {found!r:.80}")
        return found if self.tokens else None


def attach_tokenizer(model: Any, file: GGUF) -> None:
    """Give a model the tokenizer of a file, if it has one, its chat template, and the tokens that end its answers."""
    entries = Vocabulary(file)
    kind, tokens = entries.raw("model"), entries.tokens
    if len(tokens) > model.vocab_size:
        raise entries.error(f"there are {len(tokens)} tokens, and a table of {model.vocab_size} rows")
    special = {name: entries.special(name) for name in {*NAMES, *ENDS}}
    found = {name: n for name, n in special.items() if n is not None}
    model.special_tokens = {NAMES[name]: tokens[n] for name, n in found.items() if name in NAMES}
    controls = {n for name, n in found.items() if name in (*ENDS, "bos")}
    controls |= {n for n, token in enumerate(tokens) if token[:1] in "<[" and MARK.fullmatch(token)}
    types = [CONTROL if own == NORMAL and n in controls else own for n, own in enumerate(entries.types)]
    turns = [n for n in map(entries.ids.get, ENDS_OF_TURN) if n is not None and types[n] == CONTROL]
    if kind == "llama" and "eos" not in found and len(tokens) > 2:
        turns.append(2)  # </s>, as llama.cpp and Transformers take it
    model.stop_ids = frozenset([*turns, *(n for name, n in found.items() if name in ENDS)])
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{file.path}: tokenizer.chat_template must be a text, not {quoted(template)}")
    model.chat_template, model._folder = template, file.path
    model._expect_chats()
    if kind in (None, "none", "no_vocab"):
        return
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if make is None:
        raise entries.error(f"tokenizers of kind {kind!r:.80} are not supported; gpt2 and llama are")
    library = import_extra("tokenizers")
    if len(entries.ids) < len(tokens):
        twice = next(token for n, token in enumerate(tokens) if entries.ids[token] != n)
        raise entries.error(f"it has the token {quoted(twice)} twice")
    what = f"{entries.where}: no tokenizer can be made of its tokens and merges"
    with disk.library_errors(what, ValueError, ImportError, Warning):
        tokenizer = make(library, entries)
    # These are found whole in a text; decoding leaves out the special ones.
    whole = [(token, own) for token, own in zip(tokens, types, strict=True) if token and own in WHOLE]
    name = str(file.metadata.get("general.name", "")).lower()
    is_phi3 = kind == "llama" and (entries.architecture == "phi3" or any(each in name for each in PHI3))
    added = [
        library.AddedToken(
            token,
            special=own != USER_DEFINED,
            normalized=False,
            rstrip=is_phi3 and token not in KEEP_SPACE,
        )
        for token, own in whole
    ]
    tokenizer.add_tokens(added)
    begins = entries.raw("pre") in BOS_FIRST or kind == "llama"  # converters name a pre-tokenizer, too
    wanted = {"bos": entries.flag("add_bos_token", begins), "eos": entries.flag("add_eos_token", False)}
    first, last = ([tokens[found[x]]] if wanted[x] and x in found else [] for x in wanted)
    if first or last:
        second = [*(f"{each}:1" for each in first), "$B:1", *(f"{each}:1" for each in last)]
        one, marks = [*first, "$A", *last], [(token, entries.ids[token]) for token in {*first, *last}]
        tokenizer.post_processor = library.processors.TemplateProcessing(one, one + second, marks)
    model.tokenizer = tokenizer
    entries.finish()


def _byte_level(library: Any, entries: Vocabulary) -> Any:
    pre = entries.raw("pre", "default")
    if pre == "default":
        usual = UNNAMED.get(entries.architecture, "gpt-2")
        pre = "llama-bpe" if "<|begin_of_text|>" in entries.ids else usual
        older = "the file is older than their names"
        what = f"{entries.where}.pre names no pre-tokenizer: {older}, and texts are cut as by {pre}"
        warn(FolderWarning(what))
    if not isinstance(pre, str) or pre not in PRE:
        known = ", ".join(PRE)
        raise entries.error(f"the pre-tokenizer {pre!r:.80} is not supported; supported are {known}")
    merges = [tuple(merge.split(" ")) for merge in entries.list_of("merges", str)]
    for merge in merges:
        if len(merge) != 2:
            raise entries.error(f"a merge must be two tokens and a space, not {' '.join(merge)!r:.80}")
    model = library.models.BPE(entries.ids, merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    tokenizer = library.Tokenizer(model)
    steps, pattern = library.pre_tokenizers, PRE[pre]
    cuts = [steps.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, "digits"))]
    if pattern == "digits":
        cuts.insert(0, steps.Digits(individual_digits=True))
    elif pattern is not None:
        cuts.insert(0, steps.Split(library.Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = steps.Sequence(cuts) if pattern else cuts[0]
    if pre in NFC:
        tokenizer.normalizer = library.normalizers.NFC()
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(library: Any, entries: Vocabulary) -> Any:
    """Make the tokenizer that Transformers makes of SentencePiece's BPE (Kudo and Richardson, 2018)."""
    scores, tokens, ids = entries.list_of("scores", float), entries.tokens, entries.ids
    if len(scores) != len(tokens):
        raise entries.error(f"there are {len(scores)} scores for {len(tokens)} tokens")
    kinds = np.isin(entries.types, (NORMAL, USER_DEFINED, UNUSED))
    order = np.argsort(-np.array(scores), kind="stable")  # equal scores in order
    merges = _merges(tokens, order[kinds[order]])
    place = entries.special("unknown")
    unknown = None if place is None else tokens[place]
    model = library.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = library.Tokenizer(model)
    prefix = entries.flag("add_space_prefix", True)
    before = [library.normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = library.normalizers.Sequence([*before, library.normalizers.Replace(" ", "▁")])
    tokenizer.decoder = sentencepiece_decoder(library, prefix)
    return tokenizer


def _merges(tokens: list[str], order: Array) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make one of the tokens of ``order``.

    The pairs are in its order, and those of one token by the id of their first.

    Texts are compared by a hash, the sum of (code + 1) · HASHES^(place + 1) modulo 2^64; the library refuses a pair
    that makes no token.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    codes = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32) + np.uint64(1)
    up, down = (np.full(len(codes) + 1, n, np.uint64).cumprod() for n in (HASHES, pow(HASHES, -1, 2**64)))
    sums = np.append(np.uint64(0), np.cumsum(codes * up[:-1]))
    cuts = np.maximum(lengths[order] - 1, 0)
    place = np.repeat(np.arange(len(order)), cuts)
    begin, end = (ends - lengths)[order][place], ends[order][place]
    cut = begin + 1 + np.arange(len(place)) - (np.cumsum(cuts) - cuts)[place]
    texts = (ends - lengths, ends), (begin, cut), (cut, end)
    whole, *parts = ((sums[b] - sums[a]) * down[a] for a, b in texts)
    by_hash = np.argsort(whole)
    ids = [by_hash[np.searchsorted(whole[by_hash], part) % len(tokens)] for part in parts]
    good = np.logical_and(*(whole[n] == part for n, part in zip(ids, parts, strict=True)))
    sort = np.argsort((place * len(tokens) + ids[0])[good], kind="stable")
    first, second = (map(tokens.__getitem__, n[good][sort].tolist()) for n in ids)
    return list(zip(first, second, strict=True))
