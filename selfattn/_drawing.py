"""How a notebook shows steps. Pages draw them, which are on a higher floor: the package's ``__init__`` sets `draw`."""

from __future__ import annotations

from collections.abc import Callable


def _no_drawing(kind: str, steps: object) -> str | None:
    return None


draw: Callable[[str, object], str | None] = _no_drawing
