#!/usr/bin/env python3
"""Write the table of selfattn.tape's names into docs/guide/from_scratch.md.

python tools/tape_names.py           write it
python tools/tape_names.py --check   change nothing; the exit status is 1 if the page has another table
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import selfattn.tape as torch
from selfattn.tape import creation, dtypes, nn
from selfattn.tape.operations import ALIASES, TABLE
from selfattn.tape.tensors import Tensor

PAGE = Path(__file__).resolve().parents[1] / "docs/guide/from_scratch.md"
START, END = "<!-- names -->\n", "<!-- end of names -->\n"
# How an operation is called, by the letters of its places.
PLACES = {
    "tmi": "`torch.name(x)`, `x.name()`, `x.name_()`",
    "tm": "`torch.name(x)`, `x.name()`",
    "t": "`torch.name(x)`",
    "m": "`x.name()`",
    "i": "`x.name_()`",
    "tmf": "`torch.name(x)`, `x.name()`, `F.name(x)`",
    "tmfi": "`torch.name(x)`, `x.name()`, `F.name(x)`, `x.name_()`",
    "tf": "`torch.name(x)`, `F.name(x)`",
    "f": "`F.name(x)`",
}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))


def _functions(module: Any) -> set[str]:
    """Return the public names that a module itself defines."""
    return {
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    }


def rows() -> list[tuple[str, str]]:
    """Return where names are, and the names."""
    places = {name: op.places for name, op in TABLE.items()}
    found = [
        (how, _listed(name for name, own in places.items() if set(own) == set(where)))
        for where, how in PLACES.items()
    ]
    operations = {*places, *ALIASES, *(f"{name}_" for name in places)}
    own = {name for name in vars(Tensor) if not name.startswith("_")} - operations
    at_top = {name for name, value in vars(torch).items() if not isinstance(value, ModuleType | dtypes.dtype)}
    at_top -= (
        operations | {*creation.__all__, "result_dtype"} | {name for name in at_top if name.startswith("_")}
    )
    modules = {"functional", "init", "utils", "module"}
    return [
        *found,
        (
            "other names of these",
            ", ".join(f"`{name}` ({of})" for name, of in ALIASES.items() if name not in places),
        ),
        ("`torch.name(…)`, tensors", _listed({*creation.__all__} - {"Parameter"})),
        ("`torch.name`, others", _listed(at_top)),
        ("`x.name`", _listed(own)),
        ("`torch.autograd`", _listed(torch.autograd.__all__)),
        ("`nn`", _listed({*nn.__all__} - modules)),
        ("`nn.init`", _listed(nn.init.__all__)),
        ("`nn.utils`", _listed(_functions(nn.utils))),
        ("`optim`", _listed({*torch.optim.__all__} - {"lr_scheduler"})),
        ("`optim.lr_scheduler`", _listed(torch.optim.lr_scheduler.__all__)),
        ("`utils.data`", _listed(torch.utils.data.__all__)),
    ]


def page_with_table(text: str) -> str:
    """Return the page with the table as it is now."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    table = ["| where | names |", "| --- | --- |", *(f"| {where} | {names} |" for where, names in rows())]
    return before + START + "\n" + "\n".join(table) + "\n\n" + END + after


def main() -> int:
    """Write the table, or compare it."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = page_with_table(text)
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    return int("--check" in sys.argv and wanted != text)


if __name__ == "__main__":
    sys.exit(main())
