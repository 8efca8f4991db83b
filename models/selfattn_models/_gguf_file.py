"""The container of GGUF: header, entries and tensors.

The header is read here and not by the package ``gguf``, whose reader makes an array of every token and trusts every
number. That package only expands the kinds of quants that the core does not know. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn.engine import Array, disk, import_extra
from selfattn.engine.weights import QUANTS, Quants, to_float32
from selfattn_models._folder import Config

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT, MOST_ALIGNMENT = 32, 2**20
MOST_DIMENSIONS, MOST_ELEMENTS = 4, 2**42
LEAST_ENTRY, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of an entry and of a tensor in the header
# Kinds of tensors: name, numbers that share scales, and their bytes.
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class Tensor(NamedTuple):
    """Where a tensor is in the file."""

    kind: str
    shape: tuple[int, ...]  # the last axis is contiguous
    begin: int
    size: int


def begins_as_gguf(path: Path) -> bool:
    """Tell whether a file is GGUF, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class GGUF:
    """A file: ``metadata`` (numbers, texts and lists of these, by name) and ``tensors``.

    A ValueError says what is damaged where.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if (size := disk.check_regular(path)) < 24:
            raise ValueError(f"{path} is no GGUF file: it has {size} bytes")
        self.data = disk.mapped(path)
        self._bytes: Any = self.data.base  # the mmap, whose slices are bytes
        self._at, self._size = 0, size
        if self._take(4) != MAGIC:
            raise self._error("it does not begin with GGUF")
        if (version := self._number("I")) not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little")) in (*VERSIONS, 1)
            what = "is written for big-endian machines" if swapped else f"has version {version}"
            raise self._error(f"it {what}; supported are little-endian files of the versions 2 and 3")
        tensors, entries = self._number("Q"), self._number("Q")
        left = self._size - self._at
        if entries > left // LEAST_ENTRY or tensors > left // LEAST_TENSOR:
            raise self._error(f"it claims to have {entries} entries and {tensors} tensors in {left} bytes")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._text("a name")
            if name in self.metadata:
                raise self._error(f"it has the entry {name!r} twice")
            self.metadata[name] = self._value(name, self._number("I"))
        self.tensors = self._read_tensors(tensors)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read as GGUF: {what} (byte {self._at})")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._error(f"expected {count} bytes, and the file ends after {self._size - self._at}")
        found: bytes = self._bytes[self._at : end]
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
        if inner != STRING and inner not in SCALARS:
            raise self._error(f"{name} is an array of the type {inner}, which is not supported")
        size = 8 if inner == STRING else struct.calcsize("<" + SCALARS[inner])
        if count > (self._size - self._at) // size:
            raise self._error(f"{name} has {count} elements, more than the file has bytes for")
        if inner == STRING:
            return self._texts(name, count)
        return np.frombuffer(self._take(count * size), np.dtype("<" + SCALARS[inner])).tolist()

    def _texts(self, name: str, count: int) -> list[str]:
        """Read many texts, such as the tokens, faster than one by one."""
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

    def _read_tensors(self, count: int) -> dict[str, Tensor]:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two from 8 on, not {alignment!r}")
        found: dict[str, Tensor] = {}
        for _ in range(count):
            name = self._text("the name of a tensor")
            if name in found:
                raise self._error(f"it has the tensor {name!r} twice")
            found[name] = self._read_tensor(name, alignment)
        begin = -(-self._at // alignment) * alignment
        found = {name: tensor._replace(begin=begin + tensor.begin) for name, tensor in found.items()}
        before, end = "", begin
        for name, tensor in sorted(found.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise self._error(f"the tensors {before!r} and {name!r} overlap")
            before, end = name, tensor.begin + tensor.size
            if end > self._size:
                where = f"ends at byte {end}, and the file has {self._size}"
                raise self._error(f"the tensor {name!r} {where}: it is cut off or damaged")
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
            newer = "it may be newer than this version, or the file is damaged"
            raise self._error(f"the tensor {name!r} is of the kind {kind}, which has no name here: {newer}")
        label, numbers, size = KINDS[kind]
        if shape[-1] % numbers:
            raise self._error(f"the tensor {name!r} has rows of {shape[-1]} numbers, in blocks of {numbers}")
        if offset % alignment:
            where = f"the offset {offset}, not a multiple of {alignment}"
            raise self._error(f"the tensor {name!r} is at {where}")
        return Tensor(label, shape, offset, math.prod(shape) // numbers * size)

    def raw(self, name: str) -> Array:
        """Return the bytes of a tensor, (rows, bytes of a row), a view of the mapped file."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        return np.asarray(self.data[tensor.begin : tensor.begin + tensor.size]).reshape(rows, -1)

    def quants(self, name: str) -> Quants | None:
        """Return a matrix as it is stored, or None where the core cannot multiply by its kind."""
        tensor = self.tensors[name]
        if len(tensor.shape) != 2 or tensor.kind not in QUANTS or tensor.kind == "F32":
            return None
        return Quants(self.raw(name), tensor.kind, (tensor.shape[0], tensor.shape[1]))

    def array(self, name: str) -> Array:
        """Return a tensor as float32, a view of a file in float32.

        Raise ImportError if its kind needs the package ``gguf``.
        """
        tensor = self.tensors[name]
        if tensor.kind in FLOATS:
            found = self.raw(name).reshape(-1).view(FLOATS[tensor.kind]).reshape(tensor.shape)
            return to_float32(found, None) if tensor.kind == "BF16" else found.astype(np.float32, copy=False)
        if tensor.kind in QUANTS:
            raw = self.raw(name)
            return Quants(raw, tensor.kind, (len(raw), tensor.shape[-1]))[:].reshape(tensor.shape)
        gguf = import_extra("gguf")
        try:
            found = gguf.quants.dequantize(self.raw(name), gguf.GGMLQuantizationType[tensor.kind])
        except (NotImplementedError, KeyError):
            known = f"{', '.join(FLOATS)}, {', '.join(QUANTS)} and what the package gguf expands"
            what = f"the tensor {name!r} is of the kind {tensor.kind}"
            raise ValueError(f"{self.path}: {what}; supported are {known}") from None
        return np.ascontiguousarray(found, np.float32).reshape(tensor.shape)


def kinds(path: Path) -> dict[str, tuple[int, int, str]]:
    """Return how many tensors a file has of each kind, their bytes, and how the core computes with them."""
    found: dict[str, tuple[int, int, str]] = {}
    for tensor in GGUF(path).tensors.values():
        count, size, _ = found.get(tensor.kind, (0, 0, ""))
        how = "multiplied as stored" if tensor.kind in QUANTS else "expanded to float32, four bytes a number"
        found[tensor.kind] = count + 1, size + tensor.size, how
    return found


class Entries(Config):
    """The entries of a file's header whose names begin with a prefix."""

    off = (*Config.off, "", "none")

    def __init__(self, file: GGUF, prefix: str) -> None:
        own = prefix + "."
        values = {key.removeprefix(own): value for key, value in file.metadata.items() if key.startswith(own)}
        kind = "tokenizer.ggml" if prefix == "tokenizer.ggml" else "architecture"
        super().__init__(values, f"{file.path}: {prefix}", f"GGUF: {kind}", file.path.name, own)
        self.prefix, self._is_architecture = prefix, prefix not in ("general.sampling", "tokenizer.ggml")

    def _get(self, name: str, default: Any) -> Any:
        value = super()._get(name, default)
        # A list has a number for each layer, all the same.
        by_layer = isinstance(value, list) and self._is_architecture
        return value[0] if by_layer and len(set(map(repr, value))) == 1 else value
