"""What docstrings share: descriptions of parameters are written once, and put where another function takes them too."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any


def described(function: Callable[..., Any], names: Iterable[str] | None = None) -> str:
    """Return what a docstring says of parameters, of all by default, as its section Parameters has it."""
    doc = inspect.cleandoc(function.__doc__ or "")  # none under -OO
    section = re.search(r"^Parameters\n-+\n(.*?)\n\n(?=\S.*\n---)", doc, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^\S.*(?:\n .*)*", section[1] if section else "", re.MULTILINE)
    if names is None:
        return "\n".join(entries)
    found = {name: entry for entry in entries for name in entry.partition(" : ")[0].split(", ")}
    return "\n".join(dict.fromkeys(found.get(name, name) for name in names))


def put(function: Callable[..., Any], place: str, text: str) -> None:
    """Put a text in the place of the lines of a docstring that match a pattern, indented as they are."""

    def in_place(found: re.Match[str]) -> str:
        return textwrap.indent(text, found[1])

    if function.__doc__:
        function.__doc__ = re.sub(rf"^( *){place}", in_place, function.__doc__, count=1, flags=re.MULTILINE)
