"""What docstrings share: descriptions of parameters are written once, and put where another function takes them too."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar


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


Method = TypeVar("Method", bound=Callable[..., Any])

_SECTIONS = """

Parameters
----------
{names}
    As :meth:`forward` takes {them}.{stay}

Returns
-------
{result}
    What :meth:`forward` returns.
pullback : callable
    {pullback}

Raises
------
TypeError, ValueError
    As for :meth:`forward`. In the pullback: the gradient has another shape than its result, or holds neither
    floats nor integers.
"""
_CHANGED = """\
RuntimeError
    In the pullback: {changed} has changed.
"""
_PULLBACK = """\
``dx, grads = pullback(dy)``, as often as wanted: ``dx`` in the shape and dtype of ``{first}``, ``grads`` keyed
    like :meth:`parameters`, in their shapes and dtypes."""


def documented_vjp(
    changed: str | None = "a parameter that it needs",
    *,
    keeps: bool = True,
    result: str = "y : ndarray",
    pullback: str = _PULLBACK,
) -> Callable[[Method], Method]:
    """Put the sections of a `vjp` behind what its docstring says.

    ``changed`` says what must not change before the pullback is called, if there is such a thing, ``keeps`` whether
    that holds for the arguments; ``result`` and ``pullback`` are entries of the section Returns.
    """

    def documented(method: Method) -> Method:
        parameters = list(inspect.signature(method).parameters.values())[1:]
        names = [str(p).split(":")[0].split("=")[0] for p in parameters]
        they, are = ("they", "are") if len(names) > 1 else ("it", "is")
        stay = f" Until the last call of the pullback, {they} must stay as {they} {are}." if keeps else ""
        text = _SECTIONS.format(
            names="\n".join(textwrap.wrap(", ".join(names), 100)),
            them="them" if len(names) > 1 else "it",
            stay=stay,
            result=result,
            pullback=pullback.format(first=names[0]),
        )
        text += "" if changed is None else _CHANGED.format(changed=changed)
        if method.__doc__:  # none under -OO
            method.__doc__ = method.__doc__.rstrip() + textwrap.indent(text, " " * 8) + " " * 8
        return method

    return documented
