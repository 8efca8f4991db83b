"""Writes numbers, tokens and data as text of a page: decimals, powers of ten, characters that a page cannot hold.

`compute.js` has the same rules for numbers, so that recomputed numbers look the same.
"""

from __future__ import annotations

import json
import math
import operator
import unicodedata
from collections.abc import Iterable
from html import escape
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import check_rows

Array: TypeAlias = npt.NDArray[Any]

WHOLE = 2.0**53  # from here on a float64 has no digits after the point


def as_whole(value: Any) -> int:
    """Return an integer of any type as an int, and −1 for any other value."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool | np.bool_)
    return operator.index(value) if whole else -1


def decimals_of(array: Array, precision: int) -> int:
    """Return how many decimals show every number exactly, at most ``precision``."""
    numbers = array[np.abs(array) < WHOLE].astype(np.float64)  # leaves NaN out
    for decimals in range(precision):
        if np.all(np.abs(numbers - numbers.round(decimals)) <= 1e-12 * np.maximum(1.0, np.abs(numbers))):
            return decimals
    return precision


def number(value: float, decimals: int, precision: int) -> str:
    """Write a number with that many decimals, or in powers of ten if it is very small or large.

    Examples
    --------
    >>> [number(x, 4, 4) for x in (1 / 3, -2.0, 6.0337e-06, 12345678.9, float("-inf"), -0.0)]
    ['0.3333', '-2.0000', '6.034e-6', '1.235e+7', '-inf', '0.0000']
    """
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    value = float(value)  # Python's rounds without overflow
    size = abs(value)
    rounded = round(value, decimals)
    small = size < 1e-3 and abs(value - rounded) > 1e-12
    if small or size >= 1e7:
        mantissa, exponent = f"{value:.{max(precision - 1, 0)}e}".split("e")
        return f"{mantissa}e{exponent[0] if exponent[0] == '-' else '+'}{int(exponent[1:])}"
    return f"{abs(value) if rounded == 0 else value:.{decimals}f}"


def plain_number(x: float, decimals: int = 2) -> str:
    """Write a number for a sentence: with a true minus sign, which 0 never has.

    Examples
    --------
    >>> [plain_number(x) for x in (1 / 3, -1.5, -0.001)]
    ['0.33', '−1.50', '0.00']
    """
    return f"{round(float(x), decimals) + 0.0:.{decimals}f}".replace("-", "−")


def visible(token: str) -> str:
    r"""Return the token with its invisible characters written as escapes: control characters, spaces at the ends.

    Characters without a width, such as the joiners of an emoji, stay unless all characters are invisible.

    Examples
    --------
    >>> [visible(t) for t in ("bank", " bank", "a\nb", " ", "", "\u200b")]
    ['bank', '␣bank', 'a\\nb', '␣', '∅', '\\u200b']
    """
    if not token:
        return "∅"
    inner = token.strip(" ")
    unseen = all(unicodedata.category(c) in ("Cf", "Mn", "Zs") for c in inner)
    spelled = "".join(map(_escape, inner)) if unseen else storable(inner)
    before = len(token) - len(token.lstrip(" "))
    return "␣" * before + spelled + "␣" * (len(token) - before - len(inner))


def token_list(name: str, tokens: Any) -> list[str]:
    """Return tokens as they are shown; one string is split at spaces, and anything but strings is a TypeError."""
    if isinstance(tokens, str):
        tokens = tokens.split()
    check_rows(name, tokens)
    several = isinstance(tokens, Iterable) and not isinstance(tokens, bytes)
    each = list(tokens) if several else []
    if not several or not all(isinstance(token, str) for token in each):
        raise TypeError(f"{name} is a sequence of strings, one for each row, not {tokens!r:.80}")
    return [visible(token) for token in each]


def short(token: str, most: int) -> str:
    """Return a token, or if it is longer than ``most`` characters, its beginning with an ellipsis."""
    return token if len(token) <= most else token[: most - 1] + "…"


def storable(line: str) -> str:
    r"""Return text with escapes for characters that HTML or UTF-8 cannot hold: control characters, lone surrogates.

    Examples
    --------
    >>> storable("one\x00 \ud800")
    'one\\x00 \\ud800'
    """
    spelled = ("Cc", "Cs", "Zl", "Zp", "Cn")
    return "".join(_escape(c) if unicodedata.category(c) in spelled else c for c in line)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def letters(label: str) -> int:
    r"""Return the width of a label in letters: wide characters count twice, combining ones not at all.

    Examples
    --------
    >>> [letters(label) for label in ("bank", "天気", "e\u0301")]
    [4, 4, 1]
    """
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in label
    )


def text(token: str) -> str:
    """Escape for HTML text and for quoted attributes."""
    return escape(token, quote=True)


def script_data(payload: Any, kind: str = "sa-data") -> str:
    r"""Return data as a script element of a page: JSON in ASCII, without characters of markup.

    Examples
    --------
    >>> script_data({"token": "</script>"})
    '<script type="application/json" class="sa-data">{"token":"\\u003c/script\\u003e"}</script>'
    """
    plain = json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    plain = plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" class="{kind}">{plain}</script>'
