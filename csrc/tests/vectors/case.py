"""A case: its numbers, arrays in any layout, and what is expected of them. __main__.py describes the file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
# The package without its __init__.py, which needs the built extension.
sys.modules["selfattn"] = ModuleType("selfattn")
sys.modules["selfattn"].__path__ = [str(ROOT / "selfattn")]

from selfattn import reference  # noqa: E402, F401

UNBOUNDED = 2**63 - 1
TILE = 64  # SA_KEYS_PER_TILE
STORED = {"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8", "bool": "?"}
INTEGERS = tuple(f"{kind}{8 * n}" for kind in "iu" for n in (1, 2, 4, 8))
STORED |= {x: f"{x[0]}{int(x[1:]) // 8}" for x in INTEGERS}
FLOATS = ("f32", "f64", "f16", "bf16")
EPS = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}
LAYOUTS = [
    "transposed",
    "flipped_rows",
    "flipped_cols",
    "flipped_lead",
    "stepped",
    "unaligned",
    "odd_lead",
    "odd_rows",
    "swapped",
    "long_rows",
    "heads_inside",
]


def encoded(x, dtype):
    """Round numbers to a dtype, to nearest even; bfloat16 is its bits."""
    with np.errstate(all="ignore"):
        if dtype != "bf16":
            return np.asarray(x).astype(STORED[dtype])
        bits = np.asarray(x, np.float32).view(np.uint32)
        return np.where(np.isnan(x), bits >> 16 | 64, bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(
            np.uint16
        )


def decoded(x, dtype):
    """Return stored numbers as float64."""
    with np.errstate(all="ignore"):
        return ((x.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else x).astype(np.float64)


def rounded(x, dtype):
    """Return numbers as a dtype has them."""
    return decoded(encoded(x, dtype), dtype)


def lay_out(shape, item, layout):
    """Return strides, the offset of the first element, and the bytes of the memory of an array.

    The last two axes are rows and columns. Axes of one element have stride 0, as broadcast ones need it.
    """
    n, strides, extent = len(shape), [0] * len(shape), item
    order = list(range(n))[::-1]
    if "transposed" in layout:
        order[:2] = order[1::-1]
    if "heads_inside" in layout and n > 2:
        order.insert(1, order.pop(2))
    for axis in order:
        name = "rows" if axis == n - 2 else "cols" if axis == n - 1 else "lead"
        extent *= 3 if name == "cols" and "stepped" in layout else 1
        if shape[axis] != 1:
            extent += f"odd_{name}" in layout
            if name == "rows" and "long_rows" in layout:
                extent = max(extent, 8192 + 3 * item)
            strides[axis] = -extent if f"flipped_{name}" in layout else extent
            extent *= max(shape[axis], 1)
    ends = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    first = ("unaligned" in layout) - (sum(min(end, 0) for end in ends) if np.prod(shape) else 0)
    return strides, first, first + (sum(max(end, 0) for end in ends) + item if np.prod(shape) else 0)


class Case:
    """One case: its numbers, arrays and what is expected of them."""

    def __init__(self, file, name, tolerance, quick=True, coarse=1, wide=True):
        self.file, self.wide = file[bool(quick)], wide
        self.line("case", Path(self.file.name).name, name.replace(" ", "_"), tolerance, coarse)

    def line(self, *words):
        """Write a line of text."""
        self.file.write((" ".join(map(str, words)) + "\n").encode())

    def numbers(self, **numbers):
        """Write numbers; flags are 0 or 1."""
        for name, x in numbers.items():
            integer = isinstance(x, bool | int | np.integer)
            self.line("number", name.replace("__", "."), int(x) if integer else float(x).hex())

    def array(self, name, role, dtype, shape, layout=(), content=None):
        """Write an array."""
        stored = np.dtype(STORED[dtype])
        strides, first, size = lay_out(shape, stored.itemsize, layout)
        swapped = "swapped" in layout and stored.itemsize > 1
        words = (int(swapped), first, size, len(shape), *shape, *strides)
        self.line("array", name.replace("__", "."), role, dtype, *words)
        if content is not None:
            memory = bytearray(size)
            if np.prod(shape):
                at = stored.newbyteorder(">" if swapped else "<")
                np.ndarray(shape, at, memory, first, strides)[...] = content
            self.file.write(memory)

    def given(self, name, x, dtype="f32", layout=(), role="i"):
        """Write an input, or with role "c" what the call changes; return the numbers that it has."""
        content = encoded(x, dtype)
        self.array(name, role, dtype, content.shape, layout, content)
        return decoded(content, dtype)

    def draw(self, rng, name, shape, dtype="f32", magnitude=1.0, layout=()):
        """Write an input of random numbers, and return them."""
        x = rng.uniform(-magnitude, magnitude, shape)
        return self.given(
            name, np.rint(np.abs(x) if dtype[0] == "u" else x) if dtype[0] in "iu" else x, dtype, layout
        )

    def expect(self, right, size=None, coarse=None):
        """Write what is expected of the last array."""
        sizes = [x for x in (size, coarse) if x is not None]
        bytes_ = 8 if self.wide else 4
        self.line("expect", np.size(right), bytes_, len(sizes))
        with np.errstate(all="ignore"):
            self.file.write(np.ascontiguousarray(right, f"<f{bytes_}").tobytes())
            for x in sizes:
                upper = np.broadcast_to(x, np.shape(right)).astype("<f4").view("<u4") >> 16
                self.file.write((upper + (upper < 0x7F80)).astype("<u2").tobytes())

    def output(self, name, right, size=None, coarse=None, dtype="f32", layout=(), role="o", shape=None):
        """Write an output and what is expected of it."""
        self.array(name, role, dtype, np.shape(right) if shape is None else shape, layout)
        self.expect(right, size, coarse)
