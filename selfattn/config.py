"""The properties of this copy of selfattn: version, CPU, instruction set, threads, compiler."""

from __future__ import annotations

import os
import platform
from typing import Any, Literal, overload

import numpy as np

from . import _core, _cpus
from ._version import __version__

usable_cpus = _cpus.usable_cpus
_ENVIRONMENT = ("SELFATTN_ISA", "OMP_", "GOMP_", "KMP_")  # how the names begin


def cpu_model() -> str:
    """Return the operating system's name of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                field, _, text = line.partition(":")
                if field.strip().lower() in ("model name", "cpu model") and text.strip():
                    return text.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _collect() -> dict[str, Any]:
    threads = _core.get_num_threads()
    return {
        "selfattn": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpus": usable_cpus(),
        "isa": _core.get_isa(),
        "available_isas": list(_core.available_isas()),
        "threads": threads,
        "threads_reason": _cpus.REASON if threads == _cpus.DEFAULT else "set since the import",
        "build": dict(_core.build_info()),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
    }


def format_config(config: dict[str, Any]) -> str:
    """Return the text of `show_config`, one fact a line."""
    lines = {
        "selfattn": config["selfattn"],
        "Python": config["python"],
        "NumPy": config["numpy"],
        "system": config["system"],
        "CPU": f"{config['cpu']} ({config['cpus']} usable)",
        "ISA": f"{config['isa']} (available: {', '.join(config['available_isas'])})",
        "threads": f"{config['threads']}: {config['threads_reason']}",
        **{name.replace("_", " "): value for name, value in config["build"].items() if value},
        **config["environment"],
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Print, or return, the properties of this copy of selfattn and of the machine.

    Parameters
    ----------
    mode : {'stdout', 'dicts'}
        'stdout' prints one fact a line; 'dicts' returns the same as a dictionary that `json.dumps` takes.

    Returns
    -------
    dict or None
        With 'dicts': versions (``selfattn``, ``python``, ``numpy``), ``system``, ``cpu`` and the number of
        usable ``cpus``, the ``isa`` in use, ``available_isas`` (best first), the number of ``threads`` that
        calls use by default and its ``threads_reason`` (``'of 8 CPUs the group /x may use 1.5'``), ``build``
        (the ``compiler`` of the extension; the ``team`` that runs its loops, ``'OpenMP'`` or ``'POSIX threads'``,
        and ``team_library``, its file, or None), ``environment``: the variables that selfattn or OpenMP reads
        and that are set.

    Examples
    --------
    >>> import selfattn as sa
    >>> sa.show_config("dicts")["isa"] == sa.get_isa()
    True
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"mode must be 'stdout' or 'dicts', not {mode!r}")
    config = _collect()
    if mode == "dicts":
        return config
    print(format_config(config))
    return None
