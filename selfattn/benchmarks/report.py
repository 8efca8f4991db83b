"""From raw results to tables: pure functions of what `measure` returned, so saved runs can be shown too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from .engines import ENGINES

Result = dict[str, Any]


def best_time(contestant: Result) -> float | None:
    """Return the seconds of the fastest sample of the fastest spelling, or None where there is none."""
    samples = [t for rounds in contestant["times"].values() for times in rounds for t in times]
    return min(samples, default=None)


def median_time(contestant: Result) -> float | None:
    """Return the median of the rounds' medians, of the spelling for which it is least."""
    medians = [median(median(times) for times in rounds) for rounds in contestant["times"].values()]
    return min(medians, default=None)


def rate(row: Result, contestant: Result) -> float | None:
    """Return operations or bytes per second, best of all rounds."""
    best = best_time(contestant)
    work = {"flops": contestant["flops"], "bytes": contestant["key_value_bytes"]}.get(row["limit"])
    return work / best if best and work else None


def share_of_limit(row: Result, contestant: Result) -> float | None:
    """Return the rate as a share of the highest limit measured around the batches of these rounds."""
    own = rate(row, contestant)
    return own / max(contestant["limits"]) if own and contestant["limits"] else None


def ratio(row: Result, name: str) -> float | None:
    """Return how many times as long as selfattn the named contestant takes, best against best.

    Where it computes more or less than selfattn (a yardstick), that is the time for an operation.
    """
    own, others = row["contestants"][0], {each["name"]: each for each in row["contestants"]}
    other = others.get(name)
    times = best_time(own), best_time(other) if other else None
    if other is None or not times[0] or not times[1]:
        return None
    return times[1] / times[0] * float(own["flops"] / other["flops"])


def format_time(seconds: float) -> str:
    """Write a time with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def title_of(contestant: str) -> str:
    """Return what a contestant is called at the head of its column."""
    return ENGINES[contestant].title if contestant in ENGINES else contestant


class Table:
    """Lines of a table as plain text or as Markdown.

    Widths are fixed beforehand, so that lines can appear one by one.
    """

    def __init__(self, names: Sequence[str], label_width: int, markdown: bool) -> None:
        self.names, self.markdown = names, markdown
        self.heads = [
            "case",
            "best",
            "median",
            "rate",
            "of peak",
            *(f"vs {title_of(name)}" for name in names),
        ]
        self.widths = [max(label_width, 4), 8, 8, 12, 7, *(len(head) for head in self.heads[5:])]

    def line(self, cells: Sequence[str]) -> str:
        """Join cells that are already text."""
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, self.widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |" if self.markdown else "  ".join(padded).rstrip()

    def header(self) -> str:
        """Return the head, and the rule below it."""
        rules = ["-" * width for width in self.widths]
        if self.markdown:
            rules = [rule if i == 0 else rule[:-1] + ":" for i, rule in enumerate(rules)]
        return f"{self.line(self.heads)}\n{self.line(rules)}"

    def row(self, row: Result) -> str:
        """Return the line of one row of results."""
        own = row["contestants"][0]
        best, middle = best_time(own), median_time(own)
        speed, share = rate(row, own), share_of_limit(row, own)
        unit = "GB/s" if row["limit"] == "bytes" else "GFLOP/s"
        cells = [
            row["label"],
            format_time(best) if best else own.get("unsupported") or own.get("error") or "-",
            format_time(middle) if middle else "-",
            f"{speed / 1e9:.0f} {unit}" if speed else "-",
            f"{share:.0%}" if share else "-",
        ]
        return self.line(cells + [self._ratio(row, name) for name in self.names])

    def _ratio(self, row: Result, name: str) -> str:
        value = ratio(row, name)
        if value is None:
            return "-"
        differs = any(c["name"] == name and c.get("agrees") is False for c in row["contestants"])
        return f"{value:.2f}x" + ("!" if differs else "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def columns(contestants: Iterable[Sequence[str]]) -> list[str]:
    """List everybody that some row compares selfattn with, in the order of first appearance."""
    return list(dict.fromkeys(name for names in contestants for name in names[1:]))


def preamble(run: Result) -> str:
    """Name the machine, the versions and the rules of the run."""
    config, settings = run["config"], run["settings"]
    versions = ", ".join(f"{title_of(name)} {version}" for name, version in run["versions"].items())
    return (
        f"{config['cpu']}, {config['system']}; {_count(settings['threads'], 'thread')}; ISA {config['isa']}\n"
        f"{versions}\n"
        f"{_count(settings['rounds'], 'round')} of {settings['seconds']:g} s, interleaved, each library in "
        "its own process; B=1, H=8, float32 unless said otherwise; L x D"
    )


def limits_line(rows: Sequence[Result]) -> str:
    """Tell the limits that the shares refer to: what was measured, from the lowest to the highest."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for contestant in row["contestants"]:
            isa = contestant["environment"].get("SELFATTN_ISA", "")
            dtype = contestant.get("limit_dtype", contestant["case"]["dtype"])
            kind = "reading" if row["limit"] == "bytes" else f"{isa} {dtype} FMA".strip()
            if contestant["limits"]:
                found.setdefault(kind, []).extend(contestant["limits"])
    parts = []
    for kind, values in found.items():
        unit = "GB/s" if kind == "reading" else "GFLOP/s"
        parts.append(f"{kind} {min(values) / 1e9:.0f} to {max(values) / 1e9:.0f} {unit}")
    return "Limits measured before and after each batch: " + "; ".join(parts) if parts else ""


def problems(rows: Sequence[Result]) -> list[str]:
    """List what a reader must know: results that differ, errors, and what a library could not do."""
    lines: dict[str, None] = {}
    for row in rows:
        for contestant in row["contestants"]:
            title = title_of(contestant["name"])
            if contestant.get("agrees") is False:
                lines[
                    f"! {row['label']}: {title} differs from selfattn by {contestant['difference']:.2g}"
                ] = None
            if "error" in contestant:
                lines[f"error in {row['label']}, {title}: {contestant['error']}"] = None
            if "unsupported" in contestant:
                lines[f"not possible with {title}: {contestant['unsupported']}"] = None
    return list(lines)


def is_sound(rows: Sequence[Result]) -> bool:
    """Tell whether selfattn ran every row and all who ran agree."""
    return all(
        row["contestants"][0]["times"] and all(c.get("agrees", True) for c in row["contestants"])
        for row in rows
    )
