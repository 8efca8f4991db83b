"""The peak of memory that a call needs, as the kernel counts it (VmHWM).

It includes the pages of results, the stacks of threads, and memory that a library keeps for later. Each measurement
should run in a new process, which has nothing from others.
"""

from __future__ import annotations

import gc
import os
from typing import TypeVar

Result = TypeVar("Result")

AVAILABLE = os.path.exists("/proc/self/status")


def status(field):
    """Read a field of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def peak_beyond(call):
    """Return the bytes that a call needed at its peak beyond those in use before, results included, and its result."""
    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets VmHWM
    except OSError:
        pass  # without a reset, the peak may be an earlier, higher one
    before = status("VmRSS")
    result = call()
    return status("VmHWM") - before, result
