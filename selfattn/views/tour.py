"""Stops of a guided tour: a question, its answers, and what the first screen shows with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from selfattn.views.writing import script_json

Change: TypeAlias = tuple[str, int, int, float]  # node, row, column, value


@dataclass(frozen=True)
class Stop:
    """One stop.

    Attributes
    ----------
    name : str
    ask, reveal : str
        Sentences; a ``*word*`` stands out.
    options : tuple of str
        Answers to choose from.
    right : int
        Which of them is right.
    view : int
        Which view of the page shows it.
    word : int
        The word whose ribbons stand out.
    block, head : str
        Which of them, if there are several.
    before, after : tuple of (node, row, column, value)
        Numbers that are changed while it is asked, and more of them once the answer is open.
    hide : {"", "scores", "weights", "output"}
        What must not be seen until then.
    """

    name: str
    ask: str
    options: tuple[str, ...]
    right: int
    reveal: str
    view: int = 0
    word: int = 0
    block: str = ""
    head: str = ""
    before: tuple[Change, ...] = ()
    after: tuple[Change, ...] = ()
    hide: str = ""


def tour_data(stops: Sequence[Stop]) -> str:
    """Return the stops as a script element that lesson.js reads."""
    data = script_json([asdict(stop) for stop in stops])
    return f'<script type="application/json" class="sa-tour-data">{data}</script>'
