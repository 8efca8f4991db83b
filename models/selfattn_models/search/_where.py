"""Conditions on metadata: what ``where`` may be, and as SQL over the JSON of a text."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
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


def _json(values: Iterable[Any]) -> str:
    """Return values as a list of JSON; infinities as numbers that SQLite reads as such."""
    written = (
        "9e999" if each == math.inf else "-9e999" if each == -math.inf else json.dumps(each)
        for each in values
    )
    return f"[{', '.join(written)}]"


def meeting(name: str, conditions: Sequence[Condition], outside: bool = False) -> list[tuple[str, list[str]]]:
    """Return what selects the texts that meet an equality or all bounds, or the others, with its arguments.

    A text is selected by one of the parts or more, each of which reads a range of the field's index.
    """
    operator, values = conditions[0]
    if operator == "==":
        return (_different if outside else _equal)(value_of(name), values)
    if operator == "!=":
        return (_equal if outside else _different)(value_of(name), values)
    return _between(value_of(name), conditions, outside)


def _lists(field: str, has: str) -> str:
    """Return what selects the lists that have one of some values."""
    inner = f"EXISTS (SELECT 1 FROM json_each(CAST({field} AS TEXT)) WHERE {ELEMENT} {AMONG})"
    return f"{field} >= x'5b' AND {field} < x'5c' AND {has} {inner}"


def _equal(field: str, values: list[Any]) -> list[tuple[str, list[str]]]:
    given = [_json(each for each in values if each is not None)]
    found = [(f"{field} {AMONG}", given), (_lists(field, ""), given)]
    return [(f"{field} IS NULL", []), *found] if None in values else found


def _different(field: str, values: list[Any]) -> list[tuple[str, list[str]]]:
    """Return the ranges between values, which are sorted as SQLite does it, and the lists without them."""
    kinds = {bool: 2, str: 1}
    plain = sorted((kinds.get(type(each), 0), each) for each in values if each is not None)
    limits = [(f"(SELECT {ELEMENT} FROM json_each(?))", [_json([each])]) for _, each in plain]
    found = [(_lists(field, "NOT"), [_json(each for _, each in plain)]), (f"{field} >= x'5c'", [])]
    for (least, of_least), (end, of_end) in itertools.pairwise([("-9e999", []), *limits, ("x'5b'", [])]):
        operator = ">" if of_least else ">="
        found.append((f"{field} {operator} {least} AND {field} < {end}", [*of_least, *of_end]))
    return found if None in values else [(f"{field} IS NULL", []), *found]


def _between(field: str, bounds: Sequence[Condition], outside: bool) -> list[tuple[str, list[str]]]:
    limits = [(operator, "json_extract(?, '$[0]')", [_json([value])]) for operator, value in bounds]
    for operator, value in bounds:
        least, end = ("''", "x''") if isinstance(value, str) else ("-9e999", "''")
        others = {each[0][0] for each in bounds if isinstance(each[1], str) is isinstance(value, str)}
        if len(others) == 1:  # else another bound keeps other kinds out
            limits.append(("<", end, []) if operator[0] == ">" else (">=", least, []))
    if outside:
        parts = [(f"{field} {OPPOSITE[operator]} {limit}", given) for operator, limit, given in limits]
        return [(f"{field} IS NULL", []), *parts]
    every = " AND ".join(f"{field} {operator} {limit}" for operator, limit, _ in limits)
    return [(every, [each for *_, given in limits for each in given])]
