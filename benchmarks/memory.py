"""How much memory a call needs at its peak, by the kernel's own count (VmHWM): nothing can hide from it.

Not the pages of a result, not the stacks of threads, not what a library keeps for later. A process of its own for each
measurement keeps what others left out of it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

AVAILABLE = os.path.exists("/proc/self/status")


def status(field: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def peak_beyond(call: Callable[[], Result]) -> tuple[int, Result]:
    """Return the bytes that a call needed at its peak on top of what was there, results included, and its result."""
    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets VmHWM
    except OSError:
        pass  # an earlier peak may count: never too little
    before = status("VmRSS")
    result = call()
    return status("VmHWM") - before, result
