"""Conditions on metadata: what ``where`` may be, and as SQL over the JSON of a text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

import numpy as np

from selfattn.engine import if_missing, quoted

Condition: TypeAlias = tuple[str, Any]  # an operator, and a value or a list of values
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
OPERATORS = ("==", "!=", *OPPOSITE)
WANTED = "a text, a number, True, False, None, a list of such, or a pair of an operator and a value"
# Numbers are before texts in SQLite, and these before blobs, so kinds do not mix: lists and objects begin with [ and {.
KINDS = (
    "CASE {0} WHEN 'true' THEN x'01' WHEN 'false' THEN x'00' WHEN 'array' THEN CAST({1} AS BLOB) "
    "WHEN 'object' THEN CAST({1} AS BLOB) ELSE {1} END"
)
ELEMENT = KINDS.format("type", "value")
AMONG = f"IN (SELECT {ELEMENT} FROM json_each(?))"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # a name that is written in JSON as it is


def _literal(text: str) -> str:
    return f"CAST(x'{text.encode().hex()}' AS TEXT)"


def value_of(name: str) -> str:
    """Return the expression of a field's value; of one that is null or missing it is NULL."""
    if _PLAIN.fullmatch(name):
        path = "'$.\"" + name.replace("'", "''") + "\"'"
        return KINDS.format(f"json_type(metadata, {path})", f"json_extract(metadata, {path})")
    return f"(SELECT {ELEMENT} FROM json_each(metadata) WHERE key = {_literal(name)})"


def index_name(name: str) -> str | None:
    """Return the name of a field's index, as SQL has it; None if it can have none."""
    return f'"field {name}"' if _PLAIN.fullmatch(name) else None


def checked_where(where: Any, fields: Collection[str]) -> dict[str, list[Condition]]:
    """Return the conditions on each field to select by."""
    if where is not None and not hasattr(where, "items"):
        raise TypeError(f"where must be a mapping of fields to values, not {quoted(where)}")
    found = {}
    for name, value in (where or {}).items():
        if name not in fields:
            known = ", ".join(map(repr, fields)) or "none at all"
            raise ValueError(f"no text has the field {name!r}; the fields are {known:.400}")
        pairs = value if isinstance(value, list | tuple) and value and all(map(_is_pair, value)) else None
        found[name] = [
            _condition(name, *each) for each in pairs or [value if _is_pair(value) else ("==", value)]
        ]
    return found


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0] in OPERATORS
    )


def _condition(name: str, operator: str, value: Any) -> Condition:
    given = value.tolist() if hasattr(value, "tolist") else value  # of NumPy and pandas
    is_list = isinstance(given, list | tuple | set | frozenset)
    listed = [
        each.item() if isinstance(each, np.generic) else each for each in (given if is_list else [given])
    ]
    for each in listed:
        if each is not None and (not isinstance(each, str | int | float) or if_missing(each)):
            raise TypeError(f"where: {name!r} must be {WANTED}, not {quoted(each)}")
    if operator in ("==", "!="):
        return operator, listed
    if is_list or isinstance(listed[0], bool | None):
        raise TypeError(f"where: {name!r} {operator} needs a number or a text, not {quoted(value)}")
    return operator, listed[0]


def _json(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "9e999" if value > 0 else "-9e999"  # what JSON reads as such
    return json.dumps(value)


def equal(name: str, values: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield what selects the texts that have one of some values, with its arguments."""
    field = value_of(name)
    if None in values:
        yield f"{field} IS NULL", []
    given = [f"[{', '.join(_json(each) for each in values if each is not None)}]"]
    yield f"{field} {AMONG}", given
    inner = f"EXISTS (SELECT 1 FROM json_each(CAST({field} AS TEXT)) WHERE {ELEMENT} {AMONG})"
    yield f"{field} >= x'5b' AND {field} < x'5c' AND {inner}", given


def between(name: str, bounds: list[Condition], outside: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield what selects the texts that meet all bounds, or the others, with its arguments."""
    field = value_of(name)
    found = [(operator, "json_extract(?, '$')", [_json(value)]) for operator, value in bounds]
    for operator, value in bounds:
        least, end = ("''", "x''") if isinstance(value, str) else ("-9e999", "''")
        others = {each[0][0] for each in bounds if isinstance(each[1], str) is isinstance(value, str)}
        if len(others) == 1:  # else another bound keeps other kinds out
            found.append(("<", end, []) if operator[0] == ">" else (">=", least, []))
    if outside:
        yield f"{field} IS NULL", []
        for operator, limit, given in found:
            yield f"{field} {OPPOSITE[operator]} {limit}", given
    else:
        every = " AND ".join(f"{field} {operator} {limit}" for operator, limit, _ in found)
        yield every, [each for *_, given in found for each in given]
