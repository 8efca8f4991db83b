"""What Transformers' tokenizer classes make of a folder.

They add tokens to those of tokenizer.json, and their settings replace steps.

Most classes take ``tokenizer.json`` as it is. Those of ``CLASSES`` take only its vocabulary, its merges and, where
they make none themselves, its post-processor; the other steps are always theirs, with the settings of
``tokenizer_config.json``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfattn.engine import disk, import_extra
from selfattn_models._folder import Config, read_settings

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
EXTRA, OLD = "extra_special_tokens", "additional_special_tokens"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

BERT = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}
ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
# Each class that makes the steps itself: its kind of model, and its special tokens.
CLASSES: dict[str, tuple[str, dict[str, str]]] = {
    "BertTokenizer": ("WordPiece", BERT),
    "CamembertTokenizer": ("Unigram", ROBERTA),
    "GemmaTokenizer": ("BPE", {f"{n}_token": f"<{n}>" for n in ("bos", "eos", "unk", "pad", "mask")}),
    "GPT2Tokenizer": ("BPE", dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")),
    "LlamaTokenizer": ("BPE", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "MPNetTokenizer": ("WordPiece", ROBERTA | {"unk_token": "[UNK]"}),
    "Qwen2Tokenizer": ("BPE", dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")),
    "RobertaTokenizer": ("BPE", ROBERTA),
    "XLMRobertaTokenizer": ("Unigram", ROBERTA),
}
OTHER_NAMES = {
    "BartTokenizer": "RobertaTokenizer",
    "DistilBertTokenizer": "BertTokenizer",
    "MobileBertTokenizer": "BertTokenizer",
    "SqueezeBertTokenizer": "BertTokenizer",
}
AS_WRITTEN = "_selfattn_as_written"  # true: the file as it is, also where Transformers would not take it so
AS_IT_IS = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
# Transformers' class of a model whose folder names none.
BY_MODEL = {
    "bert": "BertTokenizer",
    "camembert": "CamembertTokenizer",
    "distilbert": "BertTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "mpnet": "MPNetTokenizer",
    "qwen3": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
# Models whose tokens become text.
LANGUAGE = ("gemma3_text", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
NOT_USED = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")  # CamembertTokenizer's
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def named_class(config: Mapping[str, Any], of_model: Mapping[str, Any]) -> Any:
    """Return the class that the files of a folder name, if they do."""
    return config.get("tokenizer_class") or of_model.get("tokenizer_class")


def class_name(config: Mapping[str, Any], of_model: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return the class that Transformers takes for a folder, by its own name.

    For one that takes the file as it is, this is "".
    """
    kind = of_model.get("model_type")
    if config.get(AS_WRITTEN) is True:
        return ""
    if kind == "qwen2":
        return "Qwen2Tokenizer"
    name = str(named_class(config, of_model) or BY_MODEL.get(str(kind), "")).removesuffix("Fast")
    name = OTHER_NAMES.get(name, name)
    steps = (json.dumps(content.get(step)) for step in ("pre_tokenizer", "decoder"))
    bytewise = name == "LlamaTokenizer" and any('"ByteLevel"' in step for step in steps)
    return "" if bytewise or kind in ("mistral", "modernbert", "phi3") else name


def _names_a_token(key: str, value: Any) -> bool:
    """Tell whether a setting is a special token.

    Beyond the usual ones, Transformers takes texts and its own objects.
    """
    written = isinstance(value, str) or (isinstance(value, dict) and "__type" in value)
    return key in SPECIAL_TOKENS or (key.endswith("_token") and written)


class Tokens:
    """The tokens that a folder adds: ``named`` special ones, ``extra`` ones without a name, and all others ``by_id``.

    Which file counts where several name tokens is what Transformers has grown into: with ``added_tokens_decoder``, no
    other file is read; without it, ``special_tokens_map.json`` comes before ``tokenizer_config.json``.
    """

    def __init__(
        self, folder: Path, config: Config, content: Mapping[str, Any], name: str, rows: Any
    ) -> None:
        self.library, self.where = import_extra("tokenizers"), config.where
        self.rows = rows if isinstance(rows, int) else 0
        self.by_id: dict[int, Any] = {}
        self.declared: dict[str, int] = {}  # ids that files other than tokenizer.json give
        settings = {key: config.raw(key) for key in config.values if _names_a_token(key, config.values[key])}
        lists = {key: config.raw(key) for key in (EXTRA, OLD) if key in config.values}
        if OLD in lists and not lists.get(EXTRA):
            lists[EXTRA] = lists.pop(OLD)
        # Texts and objects of names come after tokens that are objects themselves.
        texts = [key for key, x in settings.items() if key not in SPECIAL_TOKENS and isinstance(x, str)]
        last = {key: settings.pop(key) for key in texts}
        last |= lists.pop(EXTRA) if isinstance(lists.get(EXTRA), dict) else {}
        listed = config.values.get("added_tokens_decoder")
        if listed is None:
            self._read_map(read_settings(folder / SPECIAL_TOKENS_MAP), settings, lists, last)
        for n, value in config.object("added_tokens_decoder").items():
            self._declare(n, self._token(f"added_tokens_decoder[{n}]", value))
        defaults = CLASSES[name][1] if name in CLASSES else {}
        self.own = {text for key, text in defaults.items() if settings.get(key) is None}
        special = {*map(str, lists.get(EXTRA) or ())} if isinstance(lists.get(EXTRA), list) else set[str]()
        usual = (settings[key] for key in SPECIAL_TOKENS if settings.get(key))
        special |= {getattr(token, "content", str(token)) for token in usual}
        settings = dict.fromkeys(SPECIAL_TOKENS) | defaults | settings | last
        self.named = {key: self._token(key, value) for key, value in settings.items() if value is not None}
        extra = lists.get(EXTRA, lists.get(OLD))
        if name == "CamembertTokenizer" and not lists:
            extra, self.own = NOT_USED, self.own | set(NOT_USED)
        if not isinstance(extra, list | tuple | None):
            raise config.error(f"{EXTRA} must be a list of tokens, or an object, not {extra!r:.80}")
        self.extra = [self._token(EXTRA, value) for value in extra or ()]
        if listed is None:
            for text, n in disk.read_object(folder / ADDED_TOKENS, required=False).items():
                marks = text in special
                self._declare(n, self.library.AddedToken(text, normalized=not marks, special=marks))
            for value in content.get("added_tokens", []):
                fields = {key: each for key, each in value.items() if key != "id"}
                self.by_id[value["id"]] = self.library.AddedToken(**fields)
        known = {token.content: token for token in self.by_id.values()}
        self.named = {key: known.get(token.content, token) for key, token in self.named.items()}

    def _read_map(
        self, found: Config, settings: dict[str, Any], lists: dict[str, Any], last: dict[str, Any]
    ) -> None:
        """Read special_tokens_map.json into the settings and lists of tokens that tokenizer_config.json has."""

        def marked(value: Any) -> Any:
            return {**value, "special": True} if isinstance(value, dict) else value

        for key in found.values:
            if key.endswith("_token"):
                settings[key] = self._token(key, marked(found.raw(key)))
        more = found.raw(EXTRA)
        if isinstance(more, dict):
            last |= more
        elif more is not None:
            lists[EXTRA] = [*(lists.get(EXTRA) or []), *map(marked, more)]
        if OLD in found.values:
            lists[OLD] = found.raw(OLD)
        found.finish()

    def _token(self, name: str, value: Any) -> Any:
        """Return a token that a file writes as a text, or as an object with the token's properties."""
        if isinstance(value, self.library.AddedToken):
            return value
        fields = dict(value) if isinstance(value, dict) else {"content": value, "special": True}
        fields.pop("__type", None)
        if isinstance(fields.get("content"), str):
            with contextlib.suppress(TypeError):
                return self.library.AddedToken(**fields)
        what = f"must be a text or an object with a content, not {value!r:.80}"
        raise ValueError(f"{self.where}: {name} {what}")

    def _declare(self, n: Any, token: Any) -> None:
        try:
            number = int(n)
        except (TypeError, ValueError):
            raise ValueError(f"{self.where}: the id of the token {token.content!r} is {n!r:.80}") from None
        self.by_id[number] = token
        self.declared[token.content] = number

    def add_to(self, tokenizer: Any, needed: tuple[str, ...] = ()) -> None:
        """Add all to a tokenizer as Transformers does.

        A class's own tokens are left out if the model has no rows for them.
        """
        names = {token.content for token in self.named.values()}
        tokens = [token for _, token in sorted(self.by_id.items())]
        known = {token.content for token in (*tokens, *tokenizer.get_added_tokens_decoder().values())}
        tokens += [token for token in (*self.named.values(), *self.extra) if token.content not in known]
        new = {token.content for token in tokens if tokenizer.token_to_id(token.content) is None}
        if tokenizer.get_vocab_size() + len(new) > self.rows:
            left_out = new & self.own - {self.named[key].content for key in needed}
            tokens = [token for token in tokens if token.content not in left_out]
        for token in tokens:
            token.special = token.special or token.content in names
        tokenizer.add_tokens(tokens)
        for text, n in self.declared.items():
            found = tokenizer.token_to_id(text)
            if found != n:
                after = f"{found} after those that come before it"
                given = f"has the id {n} in the files beside {TOKENIZER}, and {after}"
                raise ValueError(f"{self.where}: the token {text!r} {given}")


def as_its_class(tokenizer: Any, folder: Path, raw: bytes, config: Config) -> tuple[Any, dict[str, str]]:
    """Return the tokenizer that Transformers makes of a folder's files, and its special tokens by name."""
    content = json.loads(raw)
    of_model = disk.read_object(folder / "config.json", required=False)
    name = class_name(config.values, of_model, content)
    kind = content["model"].get("type")
    makes = CLASSES[name][0] if name in CLASSES else kind
    if kind not in (None, makes, "WordLevel" if makes == "WordPiece" else makes):
        if name == "Qwen2Tokenizer" or named_class(config.values, of_model):
            raise ValueError(
                f"{folder / TOKENIZER} has a {kind} model, of which {name} makes a {makes} model; for a "
                f"tokenizer as the file says, set tokenizer_class in {TOKENIZER_CONFIG} to "
                "'PreTrainedTokenizerFast'"
            )
        config.values["tokenizer_class"], name = name, ""  # nobody names it; the file as it is, and a warning
    elif name in ("", *AS_IT_IS, *CLASSES):
        config.read.add("tokenizer_class")  # another one is in the warning: tokenizer.json is taken as it is
    tokens = Tokens(folder, config, content, name, of_model.get("vocab_size"))
    if name in CLASSES:
        written = {token["id"]: token for token in content.get("added_tokens", [])}
        wanted = {n: {"id": n, **token.__getstate__()} for n, token in tokens.by_id.items()}
        made = _model(name, content["model"], tokens)
        if made != content["model"] or written != wanted:
            fresh = json.dumps(content | {"added_tokens": [], "model": made}).encode()
            tokenizer = disk.parse_tokenizer(folder / TOKENIZER, fresh, "models")
        _make(name, tokenizer, config, content, tokens)
    else:
        tokens.add_to(tokenizer)
    cleans = "clean_up_tokenization_spaces"
    forced = config.raw(f"{cleans}_for_bpe_even_though_it_will_corrupt_output")
    if config.raw(cleans) and of_model.get("model_type") in LANGUAGE and (forced or kind != "BPE"):
        raise config.error(f"{cleans}=true would change answers; it is not supported, so set it to false")
    tokenizer.encode_special_tokens = config.flag("split_special_tokens", False)
    return tokenizer, {name: token.content for name, token in tokens.named.items()}


def _model(name: str, model: dict[str, Any], tokens: Tokens) -> dict[str, Any]:
    """Return the model that a class makes of a file's."""
    if CLASSES[name][0] == "Unigram":
        pieces = [piece for piece, _ in model["vocab"]]
        unknown = tokens.named["unk_token"].content
        n = 3 if name == "XLMRobertaTokenizer" else pieces.index(unknown) if unknown in pieces else 0
        return model | {"unk_id": n, "byte_fallback": False}
    words = {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return model | words if model.get("type") == "WordLevel" else model


def _make(name: str, tokenizer: Any, config: Config, content: Mapping[str, Any], tokens: Tokens) -> None:
    """Replace the steps of a tokenizer by those of a class."""
    library = tokens.library
    steps, before = library.normalizers, library.pre_tokenizers
    after, ends = library.decoders, library.processors
    named = {key: token.content for key, token in tokens.named.items()}
    model = tokenizer.model
    needed: tuple[str, ...] = ()
    if CLASSES[name][0] == "WordPiece":
        accents = config.raw("strip_accents")
        if not isinstance(accents, bool | None):
            raise config.error(f"strip_accents must be true or false, not {accents!r:.80}")
        model.unk_token, model.continuing_subword_prefix = named["unk_token"], "##"
        model.max_input_chars_per_word = 100
        tokenizer.normalizer = steps.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=config.flag("tokenize_chinese_chars", True),
            strip_accents=accents,
            lowercase=config.flag("do_lower_case", True),
        )
        tokenizer.pre_tokenizer, tokenizer.decoder = before.BertPreTokenizer(), after.WordPiece(prefix="##")
        needed = ("cls_token", "sep_token")
    elif CLASSES[name][0] == "Unigram":
        prefix = "always" if _prefix_space(config, False, True) else "never"
        charsmap = _charsmap(content.get("normalizer"))
        tokenizer.normalizer = steps.Precompiled(charsmap) if charsmap else None
        metaspace = before.Metaspace(replacement="▁", prepend_scheme=prefix)
        tokenizer.pre_tokenizer = before.Sequence([before.WhitespaceSplit(), metaspace])
        tokenizer.decoder = after.Metaspace(replacement="▁", prepend_scheme=prefix)
        needed = ("bos_token", "eos_token")
    else:
        llama, gemma = name == "LlamaTokenizer", name == "GemmaTokenizer"
        model.dropout, model.ignore_merges = None, False
        model.unk_token = named["unk_token"] if gemma else None
        model.continuing_subword_prefix = model.end_of_word_suffix = None
        model.fuse_unk = model.byte_fallback = llama or gemma
        prefix_space = _prefix_space(config, llama, llama)
        tokenizer.normalizer, tokenizer.decoder = None, after.ByteLevel()
        if llama:
            prefix = ("always" if config.raw("legacy") else "first") if prefix_space else "never"
            tokenizer.pre_tokenizer = before.Metaspace(replacement="▁", prepend_scheme=prefix, split=False)
            tokenizer.decoder = sentencepiece_decoder(library, prefix_space)
        elif gemma:
            tokenizer.normalizer = steps.Replace(" ", "▁")
            tokenizer.pre_tokenizer = before.Split(" ", "merged_with_previous")
            tokenizer.decoder = sentencepiece_decoder(library, False)
        elif name == "Qwen2Tokenizer":
            tokenizer.normalizer = steps.NFC()
            split = before.Split(library.Regex(QWEN2), behavior="isolated", invert=False)
            bytewise = before.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
            tokenizer.pre_tokenizer = before.Sequence([split, bytewise])
        else:
            tokenizer.pre_tokenizer = before.ByteLevel(add_prefix_space=prefix_space)
            needed = ("cls_token", "sep_token") if name == "RobertaTokenizer" else ()
    tokens.add_to(tokenizer, needed)
    if name == "Qwen2Tokenizer":  # once more, without their properties
        again = [token.content for token in (*tokens.named.values(), *tokens.extra)]
        tokenizer.add_special_tokens([text for text in again if tokenizer.token_to_id(text) is not None])
    if needed:
        first, last = ((named[key], tokenizer.token_to_id(named[key])) for key in needed)
        if name in ("MPNetTokenizer", "RobertaTokenizer"):
            tokenizer.post_processor = ends.RobertaProcessing(last, first)
        else:
            one = f"{first[0]} $A {last[0]}"
            pair = f"{one} $B:1 {last[0]}:1" if name == "BertTokenizer" else f"{one} {last[0]} $B {last[0]}"
            tokenizer.post_processor = ends.TemplateProcessing(one, pair, [first, last])


def sentencepiece_decoder(library: Any, prefix_space: bool) -> Any:
    """Return the decoder of SentencePiece's BPE; the space that is put before each text is left out."""
    steps = library.decoders
    strip = [steps.Strip(" ", 1, 0)] if prefix_space else []
    return steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), *strip])


def _prefix_space(config: Config, llama: bool, default: bool) -> bool:
    given = config.raw("add_prefix_space", default)
    return llama if given is None else config.flag("add_prefix_space", default)


def _charsmap(normalizer: Any) -> bytes | None:
    """Return SentencePiece's map of characters among the normalizers of a tokenizer.json."""
    import base64

    for each in (normalizer or {}).get("normalizers", [normalizer]):
        if each and each.get("type") == "Precompiled" and "precompiled_charsmap" in each:
            return base64.b64decode(each["precompiled_charsmap"])
    return None
