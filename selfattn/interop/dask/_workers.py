"""What a task needs on its worker: the client's version of selfattn, and the worker's share of the CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import selfattn
from selfattn._extras import import_extra

dask: Any = import_extra("dask", "dask")


def on_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that tasks run first compare versions."""

    @functools.wraps(function)
    def run(version: str, *arguments: Any) -> Any:
        if version != selfattn.__version__:
            raise RuntimeError(f"a worker has selfattn {selfattn.__version__}, and the client {version}")
        return function(*arguments)

    return run


def task(function: Callable[..., Any], *arguments: Any, results: int | None = None) -> Any:
    """Return a task of a function that `on_worker` made: a Delayed object, or as many as there are ``results``."""
    return dask.delayed(function, pure=True, nout=results)(selfattn.__version__, *arguments)


def threads() -> int | None:
    """Return how many threads a call in a task may use: as many as its worker runs tasks; None without a worker."""
    try:
        worker = import_extra("distributed", "dask").get_worker()
    except ValueError:  # another scheduler, in this process
        return None
    return int(worker.state.nthreads)
