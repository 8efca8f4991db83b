"""Settings of generation: those of a call, described once for all calls that answer, and those of a folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from selfattn._check import check_size, quoted, warn
from selfattn._docs import repeats
from selfattn.engine.sampling import DRAWING, Sampling, sampling
from selfattn.models._answers import stops_of

if TYPE_CHECKING:
    from selfattn.models._causal import CausalModel

Function = TypeVar("Function", bound=Callable[..., Any])

# What other programs call the settings.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens", "n_predict": "max_new_tokens", "seed": "rng", "stop_strings": "stop",
    "do_sample": 'temperature, or sampling="folder"', "eos_token_id": "stop", "top_logprobs": "logprobs", "n_probs": "logprobs",
    "min_tokens": "min_new_tokens", "max_completion_tokens": "max_new_tokens", "repeat_penalty": "repetition_penalty",
}  # fmt: skip


class GenerationSettings(TypedDict, total=False):
    """The settings of generation, with those of :class:`Sampling`. Those that are not given, or are None, are as the folder says.

    Parameters
    ----------
    sampling : {"folder"}, optional
        Draw as the folder says: its ``do_sample``, ``temperature``, ``top_k`` and so on, unless the call has others.
    rng : int, sequence of int, or Generator, optional
        The seed. Prompt, chat or conversation i of several has rng + i, or element i of a sequence.
    logit_bias : dict of int or str to float, optional
        What is added to the logits of tokens, by id or as ``model.tokens`` writes them; -inf forbids a token.
        ``sequence_bias`` also takes sequences of tokens.
    stop : str or sequence of str, optional
        An answer ends before the first of these texts, which may have special tokens. By default what the folder says.
    details : bool, default False
        Also tell why an answer ended, and how many tokens it took.
    logprobs : int, optional
        With ``details``, also tell log p of each new token, and of this many of the likeliest tokens at its place.
    min_new_tokens, min_length, max_length, no_repeat_ngram_size, bad_words_ids, sequence_bias, suppress_tokens,
    begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id : optional
        As in Transformers' ``GenerationConfig``, in its order. By default what the folder says.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    sampling: Literal["folder"] | None
    rng: Any
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int | str, float] | None
    stop: str | Sequence[str] | None
    details: bool | None
    logprobs: int | None
    min_new_tokens: int | None
    min_length: int | None
    max_length: int | None
    no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    sequence_bias: Any
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None


def takes_settings(function: Function) -> Function:
    """Show in a function's signature and docstring the settings that it takes as ``**how``."""
    signature, keyword = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    types = GenerationSettings.__annotations__.items()
    shown = [
        inspect.Parameter(name, keyword, default=None, annotation=getattr(kind, "__forward_arg__", kind))
        for name, kind in types
    ]
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return repeats(GenerationSettings)(repeats(Sampling)(function))


def settings_of(model: CausalModel, call: str, most: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, and those of the folder where it has none; ``most`` is the default of new tokens."""
    names = {*GenerationSettings.__annotations__, "max_new_tokens"}
    for name in set(given) - names:
        near = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, names, 1)
        hint = f"; its name here is {near[0]}" if near else ""
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
    given = {name: value for name, value in given.items() if value is not None}
    like = given.pop("sampling", None)
    if like not in (None, "folder"):
        raise ValueError(f"sampling must be 'folder' or None, not {quoted(like)}")
    said = {name: value for name, value in model.generation_config.items() if value is not None}
    draws = said.pop("do_sample", False)
    drawing = {name: said.pop(name) for name in DRAWING if name in said}
    if like == "folder" and (draws or "temperature" in given):
        drawing = {"temperature": 1.0, "top_k": 50} | drawing | given  # Transformers' defaults
        if drawing["temperature"] != 0:
            said |= {name: x for name, x in drawing.items() if name != "top_k" or x != 0}
    elif draws and "temperature" not in given and not model._warned:
        as_said = ", ".join(f"{name}={value}" for name, value in drawing.items()) or "temperature=1.0"
        so = "this takes the most probable token each time, as temperature=0 says"
        how = 'sampling="folder" (--sampling folder) draws so'
        warn(f"the model's settings would draw tokens with {as_said}; {so}; {how}")
        model._warned = True
    own = {"stop": said.pop("stop_strings", None), "details": False, "logprobs": None}
    found = {"max_new_tokens": most} | own | said | given
    if not isinstance(found["details"], bool):
        raise TypeError(f"details must be True or False, not {quoted(found['details'])}")
    top, biases = found["logprobs"], found.get("logit_bias")
    if top is not None and not (found["details"] and check_size("logprobs", top, 0) <= model.vocab_size):
        raise ValueError(f"logprobs needs details=True, and at most {model.vocab_size} tokens, not {top}")
    if isinstance(biases, Mapping):
        found["logit_bias"] = _by_id(model, biases)
    if "max_new_tokens" in given or ("max_new_tokens" in said and "max_length" not in given):
        found.pop("max_length", None)
    return found


def _by_id(model: CausalModel, biases: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return ``logit_bias=`` of a call with ids in place of tokens."""
    found: dict[Any, Any] = {}
    for token, bias in biases.items():
        n = (model.tokenizer and model.tokenizer.token_to_id(token)) if isinstance(token, str) else token
        if n is None:
            as_text = f"as a text it is {model.tokens(token)}"
            raise ValueError(f"logit_bias has {quoted(token)}, which is no token; {as_text}")
        if check_size("a token of logit_bias", n, 0) >= model.vocab_size or n in found:
            of = "once" if n in found else f"below {model.vocab_size}"
            raise ValueError(f"logit_bias must have each token {of}, not {n}")
        found[n] = bias
    return found


def checked_settings(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of generation that are not None; a ValueError says which one is wrong, and where it was found."""
    said = {name: value for name, value in given.items() if value is not None}
    own = {n: said[n] for n in Sampling._fields if n in said and (n != "top_k" or said[n] != 0)}
    try:
        if not isinstance(said.get("do_sample", False), bool):
            raise TypeError(f"do_sample must be true or false, not {quoted(said['do_sample'])}")
        sampling(**own | {"temperature": own.get("temperature") or 1.0})
        stops_of(said.get("stop_strings"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return said
