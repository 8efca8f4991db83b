"""The character model that ships, and models and prompts that the page of a GPT takes."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from selfattn._extras import models_module
from selfattn.functional import softmax
from selfattn.views.document import weights_svg
from selfattn.views.language import fill
from selfattn.views.writing import Array, visible

if TYPE_CHECKING:
    from selfattn.nn.gpt import GPT

#: Letters of the model that ships, by id.
ALPHABET = "\n !'(),-.:;?abcdefghijklmnopqrstuvwxyz"
SETTINGS: dict[str, Any] = {"d_model": 64, "num_layers": 3, "num_heads": 4, "max_seq_len": 96}
PROMPT = "in the beginning "
SCALE = "_scale"  # the suffix of the names of scales of rounded matrices
MOST_PARAMETERS = 1_000_000  # a larger model makes the page slow


def restored(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return rounded parameters times their scales."""
    found = {}
    for name, array in arrays.items():
        if not name.endswith(SCALE):
            scale = arrays.get(name + SCALE)
            found[name] = array if scale is None else array * scale[:, None]
    found["head.weight"] = found["token_embedding.weight"]  # tied
    return found


@functools.cache
def _shipped() -> dict[str, Array]:
    packed = resources.files("selfattn.views").joinpath("data", "gpt.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return restored(arrays)


def page_gpt() -> tuple[GPT, str]:
    """Return the character model that ships with the package, and its letters by id.

    It was trained on the World English Bible, in lower case; see ``examples/page_gpt.py``. Its weights are of 8 bits.

    Returns
    -------
    model : nn.GPT
        A new copy each time, with 3 layers of 4 heads and a context of 96 letters.
    alphabet : str

    Examples
    --------
    >>> model, alphabet = page_gpt()
    >>> ids = [alphabet.index(letter) for letter in "in the beginn"]
    >>> "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=3))
    'ing'
    """
    from selfattn.nn.gpt import GPT

    model = GPT(len(ALPHABET), **SETTINGS, rng=0)
    model.load_state_dict(_shipped())
    return model, ALPHABET


def given_gpt(
    model: GPT | str | os.PathLike[str] | None, alphabet: Sequence[str] | None, prompt: str
) -> tuple[GPT, list[str], list[int]]:
    """Return the model, the letters and the ids of the prompt of a page, as ``views.gpt_page`` takes them."""
    from selfattn.nn.gpt import GPT

    if model is None:
        if alphabet is not None:
            raise ValueError("alphabet needs model: the model that ships has its own")
        model, alphabet = page_gpt()
    if isinstance(model, str | os.PathLike):
        model, alphabet = _of_folder(model, alphabet)
    if not isinstance(model, GPT):
        raise TypeError(f"model must be an nn.GPT or the folder of one, not {type(model).__name__}")
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be a str, not {type(prompt).__name__}")
    alphabet = [] if alphabet is None else list(alphabet)
    if len(alphabet) != model.vocab_size or not all(isinstance(x, str) and x for x in alphabet):
        raise ValueError(
            f"alphabet has a text for each of the model's {model.vocab_size} ids, not {len(alphabet) or 'none'}"
        )
    kinds = sorted({array.dtype.name for array in model.state_dict().values()} - {"float32"})
    if kinds:
        raise ValueError(f"the page computes with weights of float32, not {' and '.join(kinds)}")
    count = sum(array.size for array in model.parameters().values())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the page computes models of at most {MOST_PARAMETERS:,} parameters, not {count:,}")
    return model, alphabet, _ids(prompt, alphabet)[-max(1, model.max_seq_len - 1) :]


def _of_folder(path: str | os.PathLike[str], alphabet: Sequence[str] | None) -> tuple[GPT, Sequence[str]]:
    models, gpt2 = (
        models_module("a GPT of a folder", name) for name in ("selfattn_models", "selfattn_models.gpt2")
    )
    found = models.load(path)
    if not isinstance(found, models.GPT2LMHeadModel):
        raise TypeError(f"{path} holds a {type(found).__name__}; views.explorer(model, text) shows it")
    if alphabet is None:
        known = found.vocab_size if found.tokenizer else 0
        alphabet = [found.tokenizer.id_to_token(n) for n in range(known)]
    return gpt2.as_gpt(found), alphabet


def _ids(prompt: str, alphabet: list[str]) -> list[int]:
    """Convert a prompt to ids, always with the longest piece that fits."""
    order = sorted(range(len(alphabet)), key=lambda n: -len(alphabet[n]))
    ids, at = [], 0
    while at < len(prompt):
        here = (text.startswith(alphabet[n], at) for text in (prompt, prompt.lower()) for n in order)
        found = next((n for n, fits in zip(order * 2, here, strict=True) if fits), None)
        if found is None:
            raise ValueError(
                f"the prompt has {prompt[at]!r}, which the model does not know; it knows {''.join(alphabet)!r}"
            )
        ids.append(found)
        at += len(alphabet[found])
    if not ids:
        raise ValueError("the prompt is empty")
    return ids


def next_letters(model: GPT, ids: list[int], alphabet: list[str], title: str, caption: str) -> str:
    """Draw the probability of each letter after the prompt."""
    shares = softmax(np.float64(model(np.array(ids))[-1]))
    best = np.argsort(-shares, kind="stable")[:12]
    name = fill(caption, prompt="".join(alphabet[n] for n in ids))
    return weights_svg([(name, shares[None, best], [""], [visible(alphabet[n]) for n in best], set())], title)
