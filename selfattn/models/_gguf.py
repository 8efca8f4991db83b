"""GGUF files, as llama.cpp writes them: the header, read and checked, and tensors mapped into memory.

The header is read here and not by the package ``gguf``, whose reader makes an array of every token and trusts every number. The
package is asked for what only it knows: kinds of quants that the core does not expand. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn._check import Array
from selfattn._extras import import_extra
from selfattn.engine.weights import QUANTS, Quants, to_float32

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT, MOST_ALIGNMENT = 32, 2**20
MOST_DIMENSIONS, MOST_ELEMENTS = 4, 2**42
LEAST_ENTRY, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of an entry and of a tensor in the header
# The kinds that files have: their names, and how many numbers share scales, and their bytes.
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 30: ("BF16", 1, 2),
}  # fmt: skip
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class Tensor(NamedTuple):
    """Where a tensor is."""

    kind: str
    shape: tuple[int, ...]  # the last axis is contiguous
    begin: int
    size: int


def begins_as_gguf(path: Path) -> bool:
    """Tell a GGUF file, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class GGUF:
    """A file: what its header says, and its tensors.

    Attributes
    ----------
    metadata : dict
        Numbers, texts, and lists of such, by name.
    tensors : dict of str to Tensor

    Raises
    ------
    ValueError
        The file is cut off or damaged: the message says what is wrong where.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < 24:
            raise ValueError(f"{path} is no GGUF file: it has {path.stat().st_size} bytes")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = np.memmap(path, np.uint8, "c")
        self._at, self._size = 0, len(self._bytes)
        if self._take(4) != MAGIC:
            raise self._error("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0] in (*VERSIONS, 1)
            what = "is written for big-endian machines" if swapped else f"has version {version}"
            raise self._error(f"it {what}; supported are little-endian files of the versions 2 and 3")
        tensors, entries = self._number("Q"), self._number("Q")
        left = self._size - self._at
        if entries > left // LEAST_ENTRY or tensors > left // LEAST_TENSOR:
            raise self._error(f"it says that it has {entries} entries and {tensors} tensors, in {left} bytes")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._text("a name")
            if name in self.metadata:
                raise self._error(f"the entry {name!r} stands there twice")
            self.metadata[name] = self._value(name, self._number("I"))
        self.tensors = self._read_tensors(tensors)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read as GGUF: {what} (byte {self._at})")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._error(f"{count} bytes are expected, and the file ends after {self._size - self._at}")
        found = self._bytes[self._at : end]
        self._at = end
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _text(self, what: str) -> str:
        found = self._take(self._number("Q"))
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from None

    def _value(self, name: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(name)
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise self._error(f"{name} is of the type {kind}, which is not known")
        inner, count = self._number("I"), self._number("Q")
        if inner == STRING:
            return self._texts(name, count)
        if inner not in SCALARS:
            raise self._error(f"{name} is an array of the type {inner}, which is not supported")
        size = struct.calcsize("<" + SCALARS[inner])
        if count > (self._size - self._at) // size:
            raise self._error(f"{name} has {count} elements, more than the file has bytes for")
        return np.frombuffer(self._take(count * size), np.dtype("<" + SCALARS[inner])).tolist()

    def _texts(self, name: str, count: int) -> list[str]:
        """Read many texts, such as the tokens."""
        if count > (self._size - self._at) // 8:
            raise self._error(f"{name} has {count} elements, more than the file has bytes for")
        found, at, content, unpack = [], self._at, self._bytes, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + unpack(content, at)[0]
                if at > self._size:
                    raise struct.error
                found.append(content[begin:at].decode())
        except struct.error:
            raise self._error(f"text {len(found)} of {name} goes beyond the end of the file") from None
        except UnicodeDecodeError as error:
            raise self._error(f"text {len(found)} of {name} is not UTF-8: {error}") from None
        self._at = at
        return found

    # --------------------------------------------------------------------------------------------------- tensors

    def _read_tensors(self, count: int) -> dict[str, Tensor]:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two from 8 on, not {alignment!r}")
        found: dict[str, Tensor] = {}
        for _ in range(count):
            name = self._text("the name of a tensor")
            if name in found:
                raise self._error(f"the tensor {name!r} stands there twice")
            found[name] = self._read_tensor(name, alignment)
        begin = -(-self._at // alignment) * alignment
        found = {name: tensor._replace(begin=begin + tensor.begin) for name, tensor in found.items()}
        before, end = "", begin
        for name, tensor in sorted(found.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise self._error(f"the tensors {before!r} and {name!r} overlap")
            before, end = name, tensor.begin + tensor.size
            if end > self._size:
                raise self._error(
                    f"the tensor {name!r} ends at byte {end}, and the file has {self._size}: it is cut off or damaged"
                )
        return found

    def _read_tensor(self, name: str, alignment: int) -> Tensor:
        dimensions = self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._error(f"the tensor {name!r} has {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if not 0 < math.prod(shape) <= MOST_ELEMENTS:
            raise self._error(f"the tensor {name!r} has the shape {shape}")
        if kind not in KINDS:
            raise self._error(f"the tensor {name!r} is of the type {kind}, which is not known here")
        label, numbers, size = KINDS[kind]
        if shape[-1] % numbers:
            raise self._error(f"the tensor {name!r} has rows of {shape[-1]} numbers, in blocks of {numbers}")
        if offset % alignment or offset > self._size:
            raise self._error(
                f"the tensor {name!r} is at the offset {offset}, not a multiple of {alignment} within the file"
            )
        return Tensor(label, shape, offset, math.prod(shape) // numbers * size)

    def raw(self, name: str) -> Array:
        """Return the bytes of a tensor, (rows, bytes of a row), mapped."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        return np.asarray(self.data[tensor.begin : tensor.begin + tensor.size]).reshape(rows, -1)

    def quants(self, name: str) -> Quants | None:
        """Return a matrix as it is stored, or None where the core does not multiply by it so."""
        tensor = self.tensors[name]
        if len(tensor.shape) != 2 or tensor.kind not in QUANTS or tensor.kind == "F32":
            return None
        return Quants(self.raw(name), tensor.kind, (tensor.shape[0], tensor.shape[1]))

    def array(self, name: str) -> Array:
        """Return a tensor as float32; what is stored so is mapped.

        Raises
        ------
        ImportError
            Only the package ``gguf`` expands its kind, and it is not installed.
        """
        tensor = self.tensors[name]
        if tensor.kind in FLOATS:
            found = self.raw(name).reshape(-1).view(FLOATS[tensor.kind]).reshape(tensor.shape)
            return to_float32(found, None) if tensor.kind == "BF16" else found.astype(np.float32, copy=False)
        if tensor.kind in QUANTS:
            rows = math.prod(tensor.shape[:-1])
            quants = Quants(self.raw(name), tensor.kind, (rows, tensor.shape[-1]))
            return quants.dequantize().reshape(tensor.shape)
        gguf = import_extra("gguf", "gguf")
        found = gguf.quants.dequantize(self.raw(name), gguf.GGMLQuantizationType[tensor.kind])
        return np.ascontiguousarray(found, np.float32).reshape(tensor.shape)
