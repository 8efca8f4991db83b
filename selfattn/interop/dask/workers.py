"""What tasks need on their workers: the client's version of selfattn, and the worker's share of the CPUs."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from selfattn._extras import import_extra
from selfattn._version import __version__

dask: Any = import_extra("dask", "dask")
_limited = threading.local()  # OpenMP's limit is that of a thread


def on_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that tasks run compare versions first, and use as many threads as its worker has."""

    @functools.wraps(function)
    def run(version: str, *arguments: Any) -> Any:
        if version != __version__:
            raise RuntimeError(f"a worker has selfattn {__version__}, and the client {version}")
        _follow_worker()
        return function(*arguments)

    return run


def task(function: Callable[..., Any], *arguments: Any, results: int | None = None) -> Any:
    """Return a task of a function that `on_worker` made.

    It is a Delayed object, which has as many parts as there are ``results``.
    """
    return dask.delayed(function, pure=True, nout=results)(__version__, *arguments)


def tree(combine: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    """Combine parts, four neighbours in a task, until one is left."""
    while len(parts) > 1:
        parts = [combine(parts[n : n + 4]) for n in range(0, len(parts), 4)]
    return parts[0]


def _follow_worker() -> None:
    distributed = sys.modules.get("distributed")
    try:
        n = distributed.get_worker().state.nthreads if distributed else None
    except ValueError:  # another scheduler, in this process
        n = None
    if n is not None and getattr(_limited, "n", None) != n:
        import_extra("threadpoolctl", "dask").threadpool_limits(n, user_api="openmp")
        _limited.n = n
