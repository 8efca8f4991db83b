"""Tokenizers: whatever turns a sentence into token ids, brought to one form.

>>> from selfattn.text import as_tokenizer
>>> tokenize = as_tokenizer(lambda sentence: [len(word) for word in sentence.split()])
>>> tokenize("tom chase jerry")
[3, 5, 5]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["Tokenize", "as_tokenizer"]

Tokenize: TypeAlias = Callable[[str], Sequence[int]]


def as_tokenizer(tokenizer: Any) -> Tokenize:
    """Make a function ``str -> ids`` of a tokenizer.

    Parameters
    ----------
    tokenizer : object
        One of: something with SentencePiece's ``encode(sentence, out_type=int)``; a ``tokenizers.Tokenizer`` of
        Hugging Face, whose ``encode(sentence).ids`` is taken; a callable ``str -> list of int``.

    Returns
    -------
    callable
        ``str -> sequence of int``; what it returns is not checked.

    Raises
    ------
    TypeError
        ``tokenizer`` is none of these.

    Examples
    --------
    >>> as_tokenizer(str.split)("a b")
    ['a', 'b']
    """
    encode = getattr(tokenizer, "encode", None)
    if isinstance(tokenizer, type | str) or not (callable(encode) or callable(tokenizer)):
        raise TypeError(
            "tokenizer must have encode(sentence, out_type=int), as SentencePiece's, be a tokenizers.Tokenizer, "
            f"or a callable str -> list of int, not {tokenizer!r}"
        )
    if not callable(encode):
        return tokenizer  # type: ignore[no-any-return]
    if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "token_to_id"):
        return lambda sentence: encode(sentence).ids
    return lambda sentence: encode(sentence, out_type=int)
