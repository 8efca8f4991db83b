"""The ten largest dot products of a million vectors with queries: float32, and int8 with the same numbers in each library."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from selfattn import _core
from selfattn.benchmarks.app import new_parser
from selfattn.benchmarks.turns import Prepare, Row

from . import shared

K, WIDTH, PEERS = 10, 384, {"numpy": (), "faiss": ("faiss",), "usearch": ("usearch",)}


@dataclass(frozen=True)
class Case(shared.Case):
    """A search of n vectors, of which a filter leaves a share open."""

    dtype: str
    queries: int
    share: float
    n: int

    def facts(self) -> dict[str, Any]:
        """Return what is saved, with the multiply-adds and the bytes of the open vectors."""
        size, each = int(self.share * self.n * WIDTH), np.dtype(self.dtype).itemsize
        return super().facts() | {"flops": 2 * self.queries * size, "key_value_bytes": size * each}


@lru_cache(1)
def _vectors(engine: str, dtype: str, n: int) -> Any:
    x = np.random.default_rng(0).integers(-127, 128, (n, WIDTH), np.int8)
    if engine != "faiss":
        return x.astype(dtype, copy=False)
    faiss: Any = import_module("faiss")
    whole = WIDTH, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexScalarQuantizer(*whole) if dtype == "int8" else faiss.IndexFlatIP(WIDTH)
    for part in np.array_split(x, 20):
        index.add(part.astype(np.float32))
    return index


def _call(engine: str, case: Case, threads: int) -> Any:
    rng, x = np.random.default_rng(1), _vectors(engine, case.dtype, case.n)
    queries = rng.integers(-127, 128, (case.queries, WIDTH)).astype(np.float32)
    queries[:, 0] = 127  # so that a query rounded to int8 has scale 1, as vectors have
    keep = rng.random(case.n) < case.share if case.share < 1 else None
    rows: Any = slice(None) if keep is None else keep
    if engine == "selfattn":
        _core.set_num_threads(threads)
        scales = np.ones(case.n, np.float32) if case.dtype == "int8" else None
        return lambda: _core._search(queries, x, K, scales=scales, keep=keep)[0]
    if engine == "numpy":
        to, last = np.float32, slice(-K, None)
        return lambda: np.sort(np.partition(queries @ x[rows].astype(to, copy=False).T, -K)[:, last])[:, ::-1]
    module: Any = import_module("usearch.index" if engine == "usearch" else "faiss")
    if engine == "usearch":
        how = {"metric": "ip", "exact": True, "threads": threads}
        return lambda: 1 - np.atleast_2d(module.search(x[rows], queries.astype(x.dtype), K, **how).distances)
    selector = None if keep is None else module.IDSelectorBatch(np.flatnonzero(keep))
    return lambda: x.search(queries, K, params=module.SearchParameters(sel=selector) if selector else None)[0]


def _opened(engine: str, threads: int) -> Prepare:
    return lambda case: [shared.called(_call(engine, case, threads))]


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    options, rows = new_parser(prog, __doc__ or "", PEERS).parse_args(arguments), []
    for case in [Case(x, *of, 10**6) for x in ("float32", "int8") for of in ((1, 1.0), (32, 1.0), (1, 0.01))]:
        label = f"{case.queries} queries, {case.share:.0%} open"
        limit = "bytes" if case.queries == 1 else "flops"
        found = shared.contestants(case, options)
        rows.append(Row("search", f"{case.dtype}, {label}", found, limit, tolerance=1.0))
    packages = {name: name.replace("faiss", "faiss-cpu") for name in options.peers}
    return shared.run(prog, options, rows, _opened, packages, f"vectors of {WIDTH}, the best {K}")
