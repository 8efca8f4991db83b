"""Tables of raw results: pure functions, so that saved runs can be shown too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from .attention import ENGINES
from .turns import Result

Planned = Sequence[tuple[str, list[str]]]  # the label and the contestants of each row
ATTENTION = "B=1, H=8, float32 unless said otherwise; L x D"


def best_time(contestant: Result) -> float | None:
    """Return the seconds of the fastest sample of the fastest spelling, or None without samples."""
    samples = [t for rounds in contestant["times"].values() for times in rounds for t in times]
    return min(samples, default=None)


def median_time(contestant: Result) -> float | None:
    """Return the least median, over spellings, of the rounds' medians."""
    medians = [median(median(times) for times in rounds) for rounds in contestant["times"].values()]
    return min(medians, default=None)


def rate(row: Result, contestant: Result) -> float | None:
    """Return operations or bytes per second, best of all rounds."""
    best = best_time(contestant)
    work = {"flops": contestant["flops"], "bytes": contestant["key_value_bytes"]}.get(row["limit"])
    return work / best if best and work else None


def ratio(row: Result, name: str) -> float | None:
    """Return a contestant's best time divided by selfattn's; per operation if they do different numbers of them."""
    own, other = row["contestants"][0], next((c for c in row["contestants"] if c["name"] == name), None)
    times = best_time(own), best_time(other) if other else None
    if other is None or not times[0] or not times[1]:
        return None
    return times[1] / times[0] * float(own["flops"] / other["flops"])


def format_time(seconds: float | None) -> str:
    """Write a time with three digits and a unit."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def title_of(contestant: str) -> str:
    """Return the heading of a contestant's column."""
    return ENGINES[contestant].title if contestant in ENGINES else contestant


def table(planned: Planned, results: Iterable[Result], markdown: bool) -> Iterator[str]:
    """Yield the lines of a table, each as soon as its result arrives."""
    names = list(dict.fromkeys(name for _, contestants in planned for name in contestants[1:]))
    heads = ["case", "best", "median", "rate", "of peak", *(f"vs {title_of(name)}" for name in names)]
    widths = [max([4, *(len(label) for label, _ in planned)]), 8, 8, 12, 7, *map(len, heads[5:])]

    def line(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip()

    rules = ["-" * width for width in widths]
    yield line(heads)
    yield line(rules[:1] + [rule[:-1] + ":" for rule in rules[1:]] if markdown else rules)
    for row in results:
        yield line(_cells(row) + [_ratio_cell(row, name) for name in names])


def _cells(row: Result) -> list[str]:
    own = row["contestants"][0]
    best, middle, speed = best_time(own), median_time(own), rate(row, own)
    share = f"{speed / max(own['limits']):.0%}" if speed and own["limits"] else "-"
    shown = f"{speed / 1e9:.0f} {'GB/s' if row['limit'] == 'bytes' else 'GFLOP/s'}" if speed else "-"
    if best and "count" in row:
        shown = f"{row['count'][0] / best:.1f} {row['count'][1]}/s"
    return [row["label"], own.get("error") or format_time(best), format_time(middle), shown, share]


def _ratio_cell(row: Result, name: str) -> str:
    value = ratio(row, name)
    differs = any(c["name"] == name and c.get("agrees") is False for c in row["contestants"])
    return "-" if value is None else f"{value:.2f}x" + "!" * differs


def preamble(run: Result) -> str:
    """Name the machine, the versions and the rules of the run."""
    config, settings = run["config"], run["settings"]
    threads, rounds = settings["threads"], settings["rounds"]
    versions = ", ".join(f"{title_of(name)} {version}" for name, version in run["versions"].items())
    return (
        f"{config['cpu']}, {config['system']}; {threads} thread{'s' * (threads != 1)}; ISA {config['isa']}\n"
        f"{versions}\n"
        f"{rounds} round{'s' * (rounds != 1)} of {settings['seconds']:g} s, interleaved, each library in "
        f"its own process; {run.get('about', ATTENTION)}"
    )


def limits_line(rows: Sequence[Result]) -> str:
    """Return a line with the lowest and the highest measured limits, of which the shares are fractions."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for each in row["contestants"]:
            kind = f"{each['engine'].removeprefix('selfattn')} {each.get('limit_dtype', 'float32')} FMA {{}} GFLOP/s"
            kind = "reading {} GB/s" if row["limit"] == "bytes" else kind.strip()
            found[kind] = found.get(kind, []) + each["limits"]
    parts = [kind.format(f"{min(n) / 1e9:.0f} to {max(n) / 1e9:.0f}") for kind, n in found.items() if n]
    return "Limits measured before and after each batch: " + "; ".join(parts) if parts else ""


def problems(rows: Sequence[Result]) -> list[str]:
    """Return lines about errors and results that differ."""
    lines = []
    for row in rows:
        for contestant in row["contestants"]:
            title = title_of(contestant["name"])
            if contestant.get("agrees") is False:
                how = f"differs from selfattn by {contestant['difference']:.2g}"
                lines.append(f"! {row['label']}: {title} {how}")
            if "error" in contestant:
                lines.append(f"error in {row['label']}, {title}: {contestant['error']}")
    return list(dict.fromkeys(lines))


def is_sound(rows: Sequence[Result]) -> bool:
    """Return whether selfattn ran every row and all results agree."""
    contestants = [each for row in rows for each in row["contestants"]]
    computed = all(row["contestants"][0]["times"] for row in rows)
    return computed and all(each.get("agrees", True) for each in contestants)
