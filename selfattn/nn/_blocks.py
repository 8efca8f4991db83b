"""Weights in the blocks of a GGUF file: read where they lie, expanded to float32 number by number where they multiply."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn import _core

Array = npt.NDArray[Any]

# The numbers and the bytes of a block, by GGUF's name of the kind.
SHAPES: dict[str, tuple[int, int]] = _core._block_shapes()


class Blocks:
    """A matrix of weights as a GGUF file stores it. To NumPy it is float32: an index gives its rows, ``np.asarray`` all of it.

    Parameters
    ----------
    raw : ndarray of uint8, shape (out, bytes of a row)
        Contiguous; it may be part of a mapped file, and is never copied.
    kind : str
        GGUF's name: ``"Q4_0"``, ``"Q4_1"``, ``"Q8_0"``, ``"Q4_K"``, ``"Q6_K"``, ``"F16"``, ``"BF16"`` or ``"F32"``.
    shape : tuple of int
        (out, in); ``in`` must be a multiple of the kind's block, 32 numbers for Q4_0, Q4_1 and Q8_0, 256 for Q4_K and Q6_K.

    Raises
    ------
    ValueError
        There is no such kind, or ``raw`` has not as many bytes as the shape says.
    TypeError
        ``raw`` is not a contiguous array of uint8.

    Examples
    --------
    >>> import numpy as np
    >>> block = np.frombuffer(np.float16(0.5).tobytes() + bytes(range(32)), np.uint8)
    >>> Blocks(block[None], "Q8_0", (1, 32)).dequantize()[0, :4]
    array([0. , 0.5, 1. , 1.5], dtype=float32)
    """

    dtype = np.dtype(np.float32)

    def __init__(self, raw: Array, kind: str, shape: tuple[int, int]) -> None:
        if kind not in SHAPES:
            raise ValueError(f"kind must be one of {', '.join(SHAPES)}, not {kind!r}")
        numbers, size = SHAPES[kind]
        out, width = shape
        if width % numbers or width < 0:
            raise ValueError(f"rows of {kind} must have a multiple of {numbers} columns, not {width}")
        if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or not raw.flags.c_contiguous:
            got = f"{raw.dtype} of shape {raw.shape}" if isinstance(raw, np.ndarray) else type(raw).__name__
            raise TypeError(f"raw must be a contiguous array of uint8, not {got}")
        if raw.shape != (out, width // numbers * size):
            raise ValueError(
                f"{kind} of shape {tuple(shape)} must be bytes of shape {(out, width // numbers * size)}, not {raw.shape}"
            )
        self.raw, self.kind, self.shape = raw, kind, (int(out), int(width))

    @functools.cached_property
    def packed(self) -> Any:
        """The weights as the core multiplies by them."""
        return _core._blocks(self.raw, self.kind, self.shape[1])

    @property
    def table(self) -> Any:
        """The weights as the core looks rows up."""
        return self.packed

    def part(self, rows: slice) -> Blocks:
        """Return some rows, which lie where they do."""
        raw = self.raw[rows]
        return Blocks(raw, self.kind, (len(raw), self.shape[1]))

    @property
    def nbytes(self) -> int:
        """The bytes of the weights as they are stored."""
        return self.raw.nbytes

    def dequantize(self) -> Array:
        """Return all weights as float32, (out, in)."""
        return self[:]

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the pointers to the bytes: a copy has its own."""
        return {name: value for name, value in vars(self).items() if name != "packed"}

    def __getitem__(self, rows: Any) -> Array:
        picked = np.arange(self.shape[0])[rows]
        flat = np.ascontiguousarray(picked.reshape(-1), np.int64)
        y: Array = _core._expand_blocks(self.packed, flat)
        return y.reshape(*picked.shape, self.shape[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or self.dtype, copy=False)
