"""The ten largest dot products of vectors with queries: float32, and int8 with the same numbers in each library."""

from functools import cache
from importlib import import_module
from itertools import product
from typing import NamedTuple

import numpy as np

import selfattn
from benchmarks.peers import Peer, Row, calling
from selfattn.cli.parser import count
from selfattn.engine import search_rows

K, WIDTH = 10, 384
SUITES = ("float32", "int8")
PEERS = ("numpy", "faiss", "usearch")


class Case(NamedTuple):
    """A search of n vectors, of which a filter leaves a share open."""

    library: str
    dtype: str
    queries: int
    share: float
    n: int


@cache
def vectors(library, dtype, n):
    """Return the vectors as a library keeps them."""
    x = np.random.default_rng(0).integers(-127, 128, (n, WIDTH), np.int8)
    if library != "faiss":
        return x.astype(dtype, copy=False)
    faiss = import_module("faiss")
    whole = WIDTH, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexScalarQuantizer(*whole) if dtype == "int8" else faiss.IndexFlatIP(WIDTH)
    for some in np.array_split(x, 20):
        index.add(some.astype(np.float32))
    return index


def prepare(case, threads):
    """Prepare the search of a library."""
    rng, x = np.random.default_rng(1), vectors(case.library, case.dtype, case.n)
    queries = rng.integers(-127, 128, (case.queries, WIDTH)).astype(np.float32)
    queries[:, 0] = 127  # so that a query rounded to int8 has scale 1, as vectors have
    keep = rng.random(case.n) < case.share if case.share < 1 else None
    rows = slice(None) if keep is None else keep
    if case.library == "selfattn":
        selfattn.set_num_threads(threads)
        scales = np.ones(case.n, np.float32) if case.dtype == "int8" else None
        return calling(lambda: search_rows(queries, x, K, scales=scales, keep=keep)[0])
    if case.library == "numpy":
        return calling(
            lambda: np.sort(np.partition(queries @ x[rows].astype(np.float32, copy=False).T, -K)[:, -K:])[
                :, ::-1
            ]
        )
    if case.library == "usearch":
        how = {"metric": "ip", "exact": True, "threads": threads}
        search, given = import_module("usearch.index").search, queries.astype(x.dtype)
        return calling(lambda: 1 - np.atleast_2d(search(x[rows], given, K, **how).distances))
    faiss = import_module("faiss")
    faiss.omp_set_num_threads(threads)
    selector = None if keep is None else faiss.IDSelectorBatch(np.flatnonzero(keep))
    chosen = None if keep is None else faiss.SearchParameters(sel=selector)
    return calling(lambda: x.search(queries, K, params=chosen)[0])


def add_options(parser):
    """Add the options of this program."""
    parser.add_argument(
        "--vectors", type=count, default=10**6, metavar="N", help="of 384 numbers (%(default)s)"
    )


def rows(options):
    """Return the rows: one query, bound by reading the vectors; 32, bound by multiply-adds; few open vectors."""
    found = []
    for dtype, (queries, share) in product(options.suite, ((1, 1.0), (32, 1.0), (1, 0.01))):
        size = int(share * options.vectors) * WIDTH
        limit, work = (
            ("bytes", size * np.dtype(dtype).itemsize) if queries == 1 else ("float32", 2 * queries * size)
        )
        names = ("selfattn", *options.peers)
        peers = {name: Peer(prepare, Case(name, dtype, queries, share, options.vectors)) for name in names}
        label = f"{dtype}, {queries} queries, {share:.0%} open"
        found.append(Row(label, peers, limit, float(work), tolerance=1.0))
    return found
