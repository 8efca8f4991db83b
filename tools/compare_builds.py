#!/usr/bin/env python3
"""Compares two builds of the extension in one process: the bits of their results, or their speed.

    tools/compare_builds.py OLD NEW [--isa avx2,avx512] [--quick]     bits
    tools/compare_builds.py OLD NEW --speed [--isa …]                 times, new / old

OLD and NEW are built extensions (`_core.….so`), used with the Python layer of this checkout, or checkouts with an
extension built in place, used with their own. Bits are compared over cases that are drawn with a seed
(the catalogue in tests/support/operations.py), and over those that have a name there, or, with --models, in
models/tests/support/model_operations.py; the same seed and number give the same case. The exit status is 1 when a
result differs in a case whose arguments are float32 or float64; when one build fails where the other does not, or
with another message; and when no case of a dtype was computed. Other differences in cases of float16 and bfloat16 are
only reported.

This file owns loading, comparing and timing; the catalogue has the computations.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / part) for part in ("tests/support", "models/tests/support", ".")
]  # ".": benchmarks
EXACT = ("float32", "float64")  # bits must not change


class Build:
    """A build: its own copy of the package `selfattn`, over its own extension.

    With ``models`` also of `selfattn_models`.
    """

    def __init__(self, path: Path, models: bool = False) -> None:
        folder, extension = (path, None) if path.is_dir() else (ROOT, path.resolve())
        if extension is None:
            extension = next((folder / "selfattn").glob("_core.*.so")).resolve()
        self.modules: dict[str, ModuleType] = {}
        spec = importlib.util.spec_from_file_location("selfattn._core", extension)
        finder: Any = SimpleNamespace(find_spec=lambda name, *_: spec if name == "selfattn._core" else None)
        with self.imported():
            sys.path[:0] = [str(folder), str(folder / "models")]
            sys.meta_path.insert(0, finder)
            self.package: Any = importlib.import_module("selfattn")
            self.operations: Any = importlib.import_module("operations")  # with this package
            self.named: dict[str, Any] = dict(self.operations.OPERATIONS)
            if models:
                self.named |= importlib.import_module("model_operations").OPERATIONS
            self.core: Any = sys.modules["selfattn._core"]
            sys.meta_path.remove(finder)
            del sys.path[:2]
            assert self.package.get_num_threads.__self__ is self.core

    @contextmanager
    def imported(self) -> Iterator[Build]:
        """Let `import selfattn` mean this build."""
        others = {name: sys.modules.pop(name) for name in list(sys.modules) if is_package(name)}
        sys.modules.update(self.modules)
        try:
            yield self
        finally:
            self.modules = {name: sys.modules.pop(name) for name in list(sys.modules) if is_package(name)}
            sys.modules.update(others)


def is_package(name: str) -> bool:
    """Tell whether a module belongs to the package, or calls it."""
    first = name.partition(".")[0]
    return first in ("selfattn", "selfattn_models", "benchmarks", "operations", "inputs", "model_operations")


# ------------------------------------------------------------------------------------------------- bits

Results = dict[str, npt.NDArray[Any]]


class Case(NamedTuple):
    """The results of a case in one build."""

    dtype: str
    title: str
    results: Results | str


def flat(found: Any, name: str = "") -> Results:
    """Give each array in nested results a name of its own."""
    if hasattr(found, "_asdict"):
        found = found._asdict()
    if isinstance(found, list | tuple):
        found = dict(enumerate(found))
    if isinstance(found, dict):
        return {inner: x for key in found for inner, x in flat(found[key], f"{name} {key}").items()}
    return {} if found is None else {name: np.asarray(found)}


def compute(build: Build, seed: int, which: int | str) -> Case:
    """Compute a drawn case, or one with a name; an exception becomes its text."""
    with build.imported():
        tried = build.operations
        if isinstance(which, str):
            operation = build.named[which]
            draw = operation.draw()
        else:
            operation, draw = tried.operation(tried.drawn), tried.Draw(seed, which)
        try:
            call, _ = operation.make(draw, **operation.options)
            build.package.set_num_threads(operation.threads)
            return Case(draw.name, " ".join(draw.words), flat(call()))
        except Exception as error:  # compared like a result
            return Case(draw.name, " ".join(draw.words), f"{type(error).__name__}: {error}")


def distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the largest difference in units in the last place: 0 for the same bits. All NaNs are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    bits = np.dtype(f"i{a.dtype.itemsize}")
    integers = [np.ascontiguousarray(x).view(bits) for x in (a, b)]
    nan = [np.isnan(x) for x in (a, b)]
    if not np.array_equal(*nan):
        return np.inf
    if not np.any(different := (integers[0] != integers[1]) & ~nan[0]):
        return 0.0
    least = np.iinfo(bits).min
    places = [np.where(x < 0, float(least) - x, x.astype(float))[different] for x in integers]  # ordered
    return max(1.0, float(np.abs(places[0] - places[1]).max()))


def difference(old: Results | str, new: Results | str) -> dict[str, float]:
    """Name the results that differ, with the distance of each."""
    if isinstance(old, str) or isinstance(new, str):
        return {} if isinstance(old, str) and old == new else {"error": np.inf}
    if old.keys() != new.keys():
        return {"names": np.inf}
    distances = {name: distance(old[name], new[name]) for name in old}
    return {name: d for name, d in distances.items() if d > 0}


def compare_bits(builds: list[Build], isa: str, cases: list[int | str], seed: int, show: int) -> bool:
    """Compare all cases on one instruction set, print the result, and return whether it is good."""
    equal: Counter[str] = Counter()
    refused: Counter[str] = Counter()  # by both, with the same message
    differing: dict[str, list[tuple[float, str]]] = {}
    start = time.monotonic()
    for which in cases:
        case, new = (compute(build, seed, which) for build in builds)
        found = difference(case.results, new.results)
        if not found:
            (refused if isinstance(case.results, str) else equal)[case.dtype] += 1
            continue
        worst = max(found.values())
        text = ", ".join(f"{name} {d:.0f} ulp" for name, d in found.items())
        for build, results in (("old", case.results), ("new", new.results)):
            text += f"\n      {build}: {results}" if isinstance(results, str) else ""
        differing.setdefault(case.dtype, []).append((worst, f"case {which}: {case.title}\n      {text}"))
    print(f"{isa}: {len(cases)} cases, {time.monotonic() - start:.0f} s")
    well = True
    for dtype in sorted(equal.keys() | refused.keys() | differing.keys()):
        bad = differing.get(dtype, [])
        computed = bool(equal[dtype] or bad)
        well &= computed and not (bad and dtype in EXACT) and not any(np.isinf(d) for d, _ in bad)
        most = f", at most {max(d for d, _ in bad):.0f} ulp" if bad else ""
        nothing = "" if computed else ": nothing was compared"
        print(
            f"  {dtype}: {equal[dtype]} equal, {refused[dtype]} refused alike, {len(bad)} different{most}{nothing}"
        )
        for _, text in sorted(bad, reverse=True)[:show]:
            print(f"    {text}")
    sys.stdout.flush()
    return well


# ------------------------------------------------------------------------------------------------ speed

Timed = Callable[[Any, int], tuple[str, dict[str, Any]]]  # package, threads -> a statement and its names


def timed_cases() -> dict[str, Timed]:
    """List calls to time: some of the benchmark's cases, and options and operations that it lacks."""
    suite = importlib.import_module("benchmarks.attention")
    suites = ("forward", "causal", "masks", "float64", "16bit", "backward")
    cases = [case for name in suites for case in suite.cases_of(name, [128, 1024], [64])]
    cases += suite.cases_of("decoding", [4096], None)
    found = {case.label: spelled(case) for case in cases}
    rng = np.random.default_rng(0)
    q, x = (rng.standard_normal(shape, dtype=np.float32) for shape in ((1, 8, 512, 64), (512, 768)))
    packed, ends = np.ascontiguousarray(q[0].swapaxes(0, 1)), [0, 100, 512]
    options: dict[str, Callable[[Any], dict[str, Any]]] = {
        "dropout": lambda _: {"dropout_p": 0.1, "rng": 1},
        "softcap": lambda _: {"softcap": 20.0},
        "window": lambda _: {"window": (64, 0)},
        "prefix": lambda sa: {"block_mask": sa.BlockMask.prefix_lm(128)},
        "alibi": lambda _: {"alibi_slopes": np.full(8, 0.1, np.float32)},
        "key lengths": lambda _: {"key_lengths": np.array([300])},
        "weights": lambda _: {"return_weights": True},
    }
    for name, make in options.items():
        found[f"{name} 512 x 64"] = lambda sa, threads, make=make: (
            "f(q, q, q, **o)",
            {"f": sa.scaled_dot_product_attention, "q": q, "o": make(sa) | {"num_threads": threads}},
        )
    calls = {
        "packed 512 x 64": ("varlen_attention", packed, packed, packed, ends, ends),
        "softmax 512 x 768": ("softmax", x),
        "layer_norm 512 x 768": ("layer_norm", x, 768, x[0], x[1]),
        "gelu 512 x 768": ("gelu", x),
        "softmax 1 x 4": ("softmax", x[0, :4]),
        "2-D 3 x 4": ("scaled_dot_product_attention", *[x[:3, :4].copy()] * 3),
        "(B, L, H, D) 512 x 64": ("scaled_dot_product_attention", *[packed[None].swapaxes(1, 2)] * 3),
    }
    for name, (function, *arguments) in calls.items():
        names = {"a": arguments}
        found[name] = lambda sa, _, function=function, names=names: (
            "f(*a)",
            names | {"f": getattr(sa, function)},
        )
    inputs = {"s": rng.integers(0, 50, 24).tolist(), "dy": x[0, :64]}
    for name, statement in (("model 24 x 64", "m(s)"), ("model's gradients 24 x 64", "m.vjp(s)[1](dy)")):
        found[name] = lambda sa, _, statement=statement: (
            statement,
            inputs | {"m": sa.nn.EmbeddingModel(str.split, 50, 64, max_seq_len=64, rng=0)},
        )
    return found


def spelled(case: Any) -> Timed:
    """Return the call of selfattn in a case of the benchmark; both builds compute the same arrays."""
    inputs: dict[str, Any] = {}

    def make(_: Any, threads: int) -> tuple[str, dict[str, Any]]:
        spelling = importlib.import_module("benchmarks.attention").selfattn(case, threads)[0]
        inputs.update({name: spelling.names[name] for name in "qkv" if name not in inputs})
        return spelling.statement, {**spelling.names, **inputs}

    return make


def ratio_of(builds: list[Build], timers: list[timeit.Timer], seconds: float) -> tuple[float, float, int]:
    """Time old, new, new, old, in turn, and return the median of new / old, the old time, and the number of pairs."""

    def sample(which: int) -> float:
        with builds[which].imported():
            return timers[which].timeit(number)

    number = 1
    while (elapsed := sample(0)) < min(2e-3, seconds / 20):
        number *= 2
    sample(1)
    ratios: list[float] = []
    olds: list[float] = []
    end = time.monotonic() + max(seconds, 8 * elapsed)
    while time.monotonic() < end:
        times = [sample(which) / number for which in (0, 1, 1, 0)]
        ratios += [times[1] / times[0], times[2] / times[3]]
        olds += [times[0], times[3]]
    return statistics.median(ratios), statistics.median(olds), len(ratios)


def compare_speed(builds: list[Build], isa: str, seconds: float, only: str, threads: int) -> None:
    """Time all cases on one instruction set, and print the ratios, the worst of them again at the end."""
    found: list[tuple[float, str]] = []
    with builds[1].imported():
        cases = {name: make for name, make in timed_cases().items() if only in name}
    if not cases:
        raise SystemExit(f"no timed case has {only!r} in its name")
    for build in builds:
        build.package.set_num_threads(threads)  # for functions without num_threads
    for name in list(cases):
        make = cases.pop(name)  # free its arrays afterwards
        timers = []
        for build in builds:
            with build.imported():
                statement, names = make(build.package, threads)
                timer = timeit.Timer(statement, globals=names)
                timer.timeit(1)
                timers.append(timer)
        ratio, old, count = ratio_of(builds, timers, seconds)
        found.append((ratio, name))
        print(f"{isa:11s} {name:48s} {old * 1e6:11.2f} µs  new/old {ratio:6.3f}  ({count} pairs)", flush=True)
    middle = statistics.geometric_mean(ratio for ratio, _ in found)
    print(
        f"{isa}: geometric mean {middle:.3f}, worst:",
        *(f"{r:.3f} {n}" for r, n in sorted(found)[:-4:-1]),
        sep="\n    ",
    )


# -------------------------------------------------------------------------------------------------- main


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--isa", metavar="A,B", help="instruction sets; all that both builds have here")
    parser.add_argument("--quick", action="store_true", help="1500 cases in place of 8000")
    parser.add_argument("--cases", metavar="N or A:B or A,B", help="how many cases, or which")
    parser.add_argument("--models", action="store_true", help="pretrained models too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--show", type=int, default=5, metavar="N", help="print N differing cases of each dtype"
    )
    parser.add_argument("--speed", action="store_true", help="compare times")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="T", help="for each timed case")
    parser.add_argument("--only", default="", metavar="TEXT", help="timed cases with TEXT in their names")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of timed calls")
    options = parser.parse_args()

    builds = [Build(path, options.models) for path in (options.old, options.new)]
    available = [isa for isa in builds[0].core.available_isas() if isa in builds[1].core.available_isas()]
    isas = options.isa.split(",") if options.isa else available
    if unknown := set(isas) - set(available):
        parser.error(f"not here: {', '.join(sorted(unknown))}; there are {', '.join(available)}")
    well = True
    for isa in isas:
        for build in builds:
            build.core._set_isa(isa)
        if options.speed:
            compare_speed(builds, isa, options.seconds, options.only, options.threads)
        else:
            numbers = numbers_of(options.cases or ("1500" if options.quick else "8000"))
            every = builds[1].named.items()
            named = [] if options.cases else [name for name, each in every if not each.random]
            well &= compare_bits(builds, isa, [*numbers, *named], options.seed, options.show)
    return 0 if well else 1


def numbers_of(text: str) -> list[int]:
    """Read "N", "A:B" or "A,B,C"."""
    if "," in text:
        return [int(number) for number in text.split(",") if number]
    first, colon, last = text.rpartition(":")
    return list(range(int(first) if colon and first else 0, int(last)))


if __name__ == "__main__":
    sys.exit(main())
