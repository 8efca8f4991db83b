"""How many threads calls use by default: no more than the CPUs that Linux's control groups let this process use.

A container usually sees all CPUs of its machine, and has a quota: microseconds of CPU time in each period. More threads
use it up sooner, and then all of them wait until the period ends.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from . import _core

_MOST_BYTES = 4 << 20  # read of a file; a machine with thousands of mounts lists them in 1 MiB
_LONGEST_PATH = 4096  # Linux's own limit
_MOST_MOUNTS = 16


class Quota(NamedTuple):
    """The CPUs that a control group may use at a time, on average, and the group as /proc/self/cgroup names it."""

    cpus: float
    group: str


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _open(path: Any, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe does not wait for its writer


def _read(path: bytes) -> bytes:
    """Return what a file holds; nothing if it cannot be read or if reading it might not end."""
    try:
        with open(path, "rb", opener=_open) as file:
            return file.read(_MOST_BYTES) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return b""


def _unescaped(field: bytes) -> bytes:
    return re.sub(rb"\\([0-3][0-7]{2})", lambda found: bytes([int(found[1], 8)]), field)


def _paths(root: bytes) -> dict[bytes, bytes]:
    """Return the process's group in the hierarchy of version 2 and in that of version 1's controller cpu."""
    paths: dict[bytes, bytes] = {}
    for line in _read(root + b"/proc/self/cgroup").split(b"\n"):
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        kind = b"cgroup2" if (number, controllers) == (b"0", b"") else b"cgroup"
        if (kind == b"cgroup2" or b"cpu" in controllers.split(b",")) and path.startswith(b"/"):
            paths[kind] = path.rstrip(b"/")
    return {kind: path for kind, path in paths.items() if len(path) <= _LONGEST_PATH}


def _mounts(root: bytes) -> dict[bytes, tuple[bytes, bytes]]:
    """Return where groups are mounted: the mount's folder, then its type and the group that the folder shows."""
    mounts: dict[bytes, tuple[bytes, bytes]] = {}
    for line in _read(root + b"/proc/self/mountinfo").split(b"\n"):
        fields, _, rest = line.partition(b" - ")
        place, source = fields.split(b" ")[3:5], rest.split(b" ")
        if len(place) == 2 and len(source) == 3 and len(mounts) < _MOST_MOUNTS:
            top, folder = map(_unescaped, place)
            mounts.pop(folder, None)  # a later mount hides an earlier one in the same folder
            if source[0] == b"cgroup2" or (source[0] == b"cgroup" and b"cpu" in source[2].split(b",")):
                mounts[folder] = source[0], top.rstrip(b"/")
    return mounts


def _cpus(folder: bytes, kind: bytes) -> float:
    """Return the quota of a group: infinity if there is none."""
    if kind == b"cgroup2":
        numbers = _read(folder + b"/cpu.max").split()
    else:
        numbers = [_read(folder + name).strip() for name in (b"/cpu.cfs_quota_us", b"/cpu.cfs_period_us")]
    try:
        quota, period = map(int, numbers)
        return quota / period if quota > 0 and period > 0 else math.inf
    except (ValueError, OverflowError):  # "max", no file, or something else
        return math.inf


def _shown(path: bytes, top: bytes, folder: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the process's group and those above it that a mount shows in its folder, and their folders."""
    within = path[len(top) :]
    parts = within.split(b"/")
    if path.startswith(top) and parts[0] == b"" and b".." not in parts:
        while parts:
            within = b"/".join(parts)
            yield top + within, folder + within
            parts.pop()
    elif top == b"/.." * (above := top.count(b"/..")) and 0 < above >= path.split(b"/").count(b".."):
        # The process has a namespace, whose root is "/", and the mount's folder shows a group above that root.
        yield top, folder


def read_quota(root: str = "/") -> Quota | None:
    """Return the smallest quota of the process's group and of those above it that are mounted.

    Parameters
    ----------
    root : str
        The folder that has proc and what is mounted, for tests.

    Returns
    -------
    Quota or None
        None if there is no quota, as on other systems. Files that are missing or odd count as none.
    """
    above = os.fsencode(root).rstrip(b"/")
    found = [
        (_cpus(above + place, kind), os.fsdecode(group or b"/"))
        for kind, path in _paths(above).items()
        for folder, (mounted, top) in _mounts(above).items()
        if mounted == kind
        for group, place in _shown(path, top, folder)
    ]
    cpus, group = min(found, default=(math.inf, ""), key=itemgetter(0))
    return Quota(cpus, group) if cpus < math.inf else None


def _number_in_environment() -> bool:
    """Return whether OMP_NUM_THREADS has a number: who sets it decides."""
    return re.match(r"\s*\+?0*[1-9]\d{0,17}\s*(,|$)", os.environ.get("OMP_NUM_THREADS", "")) is not None


def limit_threads(quota: Quota | None) -> str:
    """Make a quota, rounded up, the most threads that the core uses by default; return the reason for its number."""
    if _number_in_environment():
        return "OMP_NUM_THREADS"
    cpus, number = usable_cpus(), _core.get_num_threads()
    if quota is not None and quota.cpus < cpus:
        most = math.ceil(quota.cpus)
        _core._limit_threads(most)  # if it is more than `number` too, which OpenMP may raise later
        if most <= number:
            return f"of {cpus} CPUs the group {quota.group} may use {quota.cpus:g}"
    return "one for each usable CPU" if number == cpus else "OpenMP's number"


REASON = limit_threads(read_quota())
DEFAULT = _core.get_num_threads()
