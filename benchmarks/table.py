"""The options, the table and the saved results of all benchmarks."""

from __future__ import annotations

import json
import math
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.peers import Turns
from selfattn import config
from selfattn.cli import streams
from selfattn.cli.parser import count, rate


def add_options(parser, suites, peers):
    """Add the options of every benchmark; a peer's name is its module's."""
    add, usual = parser.add_argument, [name for name in suites if name != "long"]
    what = f"of {', '.join(suites)}; default: all{' but long' * (len(usual) < len(suites))}"
    add("--suite", nargs="+", choices=suites, default=usual, metavar="NAME", help=what)
    which, installed = f"of {', '.join(peers)}; default: all that are installed", [*filter(find_spec, peers)]
    add("--peers", nargs="*", choices=peers, default=installed, metavar="NAME", help=which)
    add("--threads", type=count, default=config.usable_cpus(), metavar="N", help="default: all CPUs")
    add("--rounds", type=count, default=7, metavar="N", help="turns of each library (%(default)s)")
    add("--seconds", type=rate, default=0.1, metavar="T", help="time of a turn (%(default)s)")
    add("--json", metavar="FILE", type=Path, help="save all samples, too")
    parser.set_defaults(lacking=set(peers).difference(installed))


def times_of(peer):
    """Return the best sample, and the least median of the rounds' medians, of the fastest spelling; NaN without any."""
    spellings = [[median(times) for times in rounds] for rounds in peer["times"].values()]
    best = (min(times) for rounds in peer["times"].values() for times in rounds)
    return min(best, default=math.nan), min(map(median, spellings), default=math.nan)


def format_time(seconds):
    """Write a time with three digits and a unit."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    return next((f"{seconds / size:.3g} {unit}" for unit, size in units.items() if seconds >= size), "-")


def cells(row, columns):
    """Return the cells of a line."""
    (_, own), *others = row["peers"].items()
    best, middle = times_of(own)
    speed = share = "-"
    if own["limits"]:
        speed = f"{row['work'] / best / 1e9:.3g} {'GB/s' if row['limit'] == 'bytes' else 'GFLOP/s'}"
        share = f"{row['work'] / best / max(own['limits']):.0%}"
    if row["count"]:
        speed = f"{row['count'][0] / best:.4g} {row['count'][1]}/s"
    needed = "-" if own["memory"] is None else f"{own['memory'] / 2**20:.0f} MiB"
    ratios = {name: f"{times_of(each)[0] / best:.2f}x".replace("nanx", "-") for name, each in others}
    first = [row["label"], format_time(best), format_time(middle), speed, share, needed]
    return first + [ratios.get(name, "-") for name in columns]


def table(rows, results):
    """Yield the lines of a table, in Markdown, each when its result arrives."""
    columns = list(dict.fromkeys(name for row in rows for name in [*row.peers][1:]))
    heads = ["case", "best", "median", "rate", "of limit", "memory", *(f"vs {name}" for name in columns)]
    widths = [max(len(row.label) for row in rows), *(max(len(head), 11) for head in heads[1:])]

    def line(texts):
        texts = [
            texts[0].ljust(widths[0]),
            *(text.rjust(n) for text, n in zip(texts[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(texts)} |"

    yield line(heads)
    yield line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for result in results:
        yield line(cells(result, columns))


def run(rows, options):
    """Measure rows, print the table, save the results; return the exit code."""
    facts = config.show_config("dicts")
    settings = {name: getattr(options, name) for name in ("threads", "rounds", "seconds")}
    owners = metadata.packages_distributions()
    versions = {
        name: metadata.version(owners[name][0]) for name in ("selfattn", *options.peers) if name in owners
    }
    found = {"config": facts, "versions": versions, "settings": settings, "rows": []}
    streams.check(options.json)
    try:
        with Turns(**settings) as turns:
            print(f"{facts['cpu']}, {facts['system']}; ISA {facts['isa']}; {options.threads} threads")
            print(*(f"{name} {version}" for name, version in versions.items()), sep=", ")
            print("not installed:", ", ".join(sorted(options.lacking)) or "nothing")
            print(f"{options.rounds} rounds of {options.seconds:g} s, in turns", end="\n\n")
            results = (found["rows"].append(each) or each for each in map(turns.measure, rows))
            for line in table(rows, results):
                print(line, flush=True)
            print("", *(note for row in found["rows"] for note in row["notes"]), sep="\n")
    finally:  # keep what was measured
        if options.json:
            options.json.write_text(json.dumps(found), encoding="utf-8")
    return 0 if all(row["sound"] for row in found["rows"]) else 1
