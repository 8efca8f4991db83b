"""Scripts and styles of the pages, put together: a page is one file, which fetches nothing."""

from __future__ import annotations

import re
from importlib import resources

__all__ = ["KIT", "code", "script", "style"]

# Types within a line, other comments, indentation.
_NOT_CODE = re.compile(r"\s*/\*\* @\w+ [^*\n]*\*/(?= )|^\s*/\*.*?\*/\n|^\s+", re.DOTALL | re.MULTILINE)

#: What pages are drawn with, in order of use; see ``kit/README.md``.
KIT = (
    "compute.js",
    *(f"kit/{name}.js" for name in ("elements", "colours", "keys", "heat", "map", "ribbons", "lines", "tour", "tools")),
)  # fmt: skip


def script(*names: str) -> str:
    """Return a script element with the files of these names, in one function in strict mode.

    Examples
    --------
    >>> script(*KIT).startswith("<script>(() => {")
    True
    """
    return f"<script>{code(*names)}</script>"


def code(*names: str) -> str:
    """Return the files of these names in one function in strict mode, which is called."""
    plain = _NOT_CODE.sub("", "".join(map(_read, names)))
    return f'(() => {{\n"use strict";\n{plain}}})();'


def style(*names: str) -> str:
    """Return a style element with the kit's rules, then those of the files of these names."""
    return f"<style>{''.join(map(_read, ('kit/kit.css', *names)))}</style>"


def _read(name: str) -> str:
    return resources.files("selfattn.views").joinpath(*name.split("/")).read_text(encoding="utf-8")
