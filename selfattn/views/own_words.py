"""Numbers of words: those of a table, and made ones for words that it does not have.

`own_words.js` makes the same ones in a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfattn.views.language import say
from selfattn.views.texts import CAPTIONS
from selfattn.views.writing import Array, decimals_of

Table = Mapping[str, Sequence[float]]


def rows(words: Sequence[str], table: Table, name: str) -> Array:
    """Return a row of numbers for each word; words that the table lacks get made ones, which differ by ``name``.

    Examples
    --------
    >>> rows(["bank", "love", "bank"], {"bank": [0.8, 0.2], "mud": [0.9, 0.0]}, "inputs")
    array([[0.8, 0.2],
           [0.8, 0. ],
           [0.8, 0.2]])
    """
    return np.array([table[word] if word in table else numbers_of(word, table, name) for word in words])


def numbers_of(word: str, table: Table, name: str) -> list[float]:
    """Return numbers for a word that are always the same.

    They are between the least and the largest of each column of a table.
    """
    known = np.array(list(table.values()), np.float64)
    unit = 10.0 ** decimals_of(known, 2)
    return [
        math.floor((low + (high - low) * _share(f"{column} {name} {word}")) * unit + 0.5) / unit
        for column, (low, high) in enumerate(zip(known.min(axis=0), known.max(axis=0), strict=True))
    ]


def _share(text: str) -> float:
    """Return a share from 0 to 1 that text decides.

    The hash is FNV-1a, 32 bits, twice, since a text's last letters hardly change its first bits.
    """
    found = 2166136261
    for byte in text.encode("utf-8", "backslashreplace") * 2:
        found = (found ^ byte) * 16777619 % 2**32
    return found / 2**32


def note(texts: Sequence[Sequence[str]], table: Mapping[str, Any], lang: str) -> str:
    """Return a sentence that says which numbers are made up; "" if there are none."""
    words = dict.fromkeys(word for words in texts for word in words if word not in table)
    return say(CAPTIONS["made words"], lang, words=", ".join(words)) if words else ""
