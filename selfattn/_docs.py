"""Docstrings: those of functions in C, and sections that one function shows as another has them, in full."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from selfattn import _core

Function = TypeVar("Function", bound=Callable[..., Any])

TITLE = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
ENTRY = re.compile(r"^\S.*(?:(?<=,)\n.*|\n .*)*", re.MULTILINE)  # a head may end with a comma and continue


def in_core(function: Function) -> Function:
    """Return the C core's function of the same name, and give it this signature and docstring.

    Calls then cost nothing more, and the body of ``function``, which says the same, is never run.
    """
    name, signature = function.__name__, inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    shown = str(inspect.Signature(plain)).replace("(", "($module, /, ", 1)
    _core._describe(name, f"{name}{shown}\n--\n\n{inspect.cleandoc(function.__doc__ or '')}\n")
    return cast("Function", getattr(_core, name))


def sections(function: Any) -> dict[str, str]:
    """Return the sections of a docstring by title, and what precedes them by ""; under -OO all texts are empty."""
    first, *rest = TITLE.split(inspect.cleandoc(function.__doc__ or ""))
    titled = zip(rest[::2], rest[1::2], strict=True)
    return {"": first.strip()} | {title: text.strip() for title, text in titled}


def entries(section: str) -> dict[str, str]:
    """Return the entry of each name in a section.

    Names may share an entry, and its list of names may have several lines.
    """
    found = ENTRY.findall(section)
    heads = [re.split(r" : |\n ", entry, maxsplit=1)[0] for entry in found]
    pairs = zip(heads, found, strict=True)
    return {name.lstrip("*"): entry for head, entry in pairs for name in re.split(r",\s", head)}


def copy_doc(other: Callable[..., Any]) -> Callable[[Function], Function]:
    """Add to a function's docstring the parameters, results and errors of ``other``, in place of "as other takes them".

    What the function says itself stays, and what ``other`` says of parameters that the function lacks is left out.
    Where the first sentence names a pullback, as in ``dy -> (dx, grads)``, the results are y, the result of
    ``other``, and the pullback.
    """

    def described(function: Function) -> Function:
        if not function.__doc__:
            return function
        given, own = sections(other), sections(function)
        known = entries(given.get("Parameters", "")) | entries(own.pop("Parameters", ""))
        names = [name for name in inspect.signature(function).parameters if name in known]
        text, results = own.pop(""), own.pop("Returns", "")
        arrow = re.search(r"``(d_?(\w+)) -> \(?(.+?)\)?``", text)
        if not arrow:
            results = results or given.get("Returns", "")
        elif not results:
            dy, _, pulled = arrow.groups()
            results = f"pullback : callable, ``{pulled} = pullback({dy})``, as :class:`Module` says"
        if results.startswith("pullback"):
            result = re.sub(r"^\w+ : ", "", given["Returns"])
            results = f"{arrow[2] if arrow else 'y'} : {result}\n{results}"
        shown = {
            "Parameters": "\n".join(dict.fromkeys(known[name] for name in names)),
            "Returns": results or given.get("Returns"),
            "Raises": given.get("Raises"),
            **own,
        }
        titled = [f"{title}\n{'-' * len(title)}\n{section}" for title, section in shown.items() if section]
        function.__doc__ = "\n\n".join([text, *titled])
        return function

    return described
