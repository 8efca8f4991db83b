"""What is computed: a case is one call, a row the contestants of one line of a table, a suite a list of rows.

No library is named here but as a string, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn._timing import attention_flops

Array = npt.NDArray[Any]

LENGTHS = (128, 197, 512, 777, 1000, 1024, 4096)
WIDTHS = (32, 64, 80, 128)
SHORTEST = 16  # in a ragged batch

# The pullback alone, or with the forward call.
BACKWARD, BOTH = "backward", "forward + backward"


class Inputs(NamedTuple):
    """query, key and value, and the mask or None.

    They are (B, H, L, D), or (L, D) for one head, or (total, H, D) for a ragged batch.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None


@dataclass(frozen=True)
class Case:
    """One call: L queries of width D over S keys, or a ragged batch whose sequences have up to L of both."""

    length: int
    width: int
    keys: int = 0  # 0: as many as queries
    batch: int = 1
    heads: int = 8
    kv_heads: int = 0  # 0: as many as query heads
    dtype: str = "float32"
    causal: bool = False
    mask: str = ""  # "", "float" or "bool": (L, S); "float per head": (B, H, L, S)
    layout: str = "BHLD"  # order in memory: "BHLD", "BLHD", or "LD" for 2-D
    gradients: str = ""  # "", BACKWARD or BOTH
    ragged: int = 0  # number of packed sequences
    split: bool = False  # one call per sequence or bucket
    blocks: str = ""  # "", "documents", "prefix" or "window"
    block_length: int = 0  # of a document, the prefix, the window

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.keys or self.length)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads of query do not fall to {self.kv_heads} of key")

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of the sequences of a ragged batch: log-uniform from 16 to `length`."""
        shortest = min(SHORTEST, self.length)
        logarithms = np.random.default_rng(0).uniform(np.log(shortest), np.log(self.length), self.ragged)
        return [round(x) for x in np.exp(logarithms).tolist()]

    @cached_property
    def offsets(self) -> Array:
        """Where the sequences of a ragged batch begin, and where the last one ends."""
        return np.cumsum([0, *self.lengths])

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """What NumPy, or ml_dtypes, calls the dtype."""
        return np.dtype(import_module("ml_dtypes").bfloat16 if self.dtype == "bfloat16" else self.dtype)

    @property
    def limit_dtype(self) -> str:
        """The dtype of the multiply-adds that bound the case: 16 bits are computed in float32."""
        return self.dtype if self.dtype == "float64" else "float32"

    @property
    def flops(self) -> float:
        """Floating-point operations that count: two products forward, five backward; of open blocks alone."""
        pairs = [(n, n) for n in self.lengths] if self.ragged else [(self.length, self.keys)]
        forward = sum(attention_flops(self.batch, self.heads, *n, self.width, self.causal) for n in pairs)
        return forward * {"": 1.0, BACKWARD: 2.5, BOTH: 3.5}[self.gradients] * self.open_share

    @property
    def open_share(self) -> float:
        """The share of the pairs that `blocks` leaves open."""
        own = np.arange(1, self.length + 1)
        keys = {
            "": np.full(self.length, self.keys),
            "documents": np.full(self.length, self.block_length),
            "prefix": np.maximum(own, self.block_length),
            "window": np.minimum(own, self.block_length + 1),
        }[self.blocks]
        return float(keys.mean()) / self.keys

    @property
    def key_value_bytes(self) -> int:
        """Bytes of the keys and the values: what a call of one query must read."""
        keys = sum(self.lengths) if self.ragged else self.keys
        return 2 * self.batch * self.kv_heads * keys * self.width * self.numpy_dtype.itemsize

    def inputs(self) -> Inputs:
        """Make the same numbers in every process that asks."""
        rng = np.random.default_rng(0)

        def tensor(heads: int, length: int) -> Array:
            array = self._normal(rng, heads, length)
            if self.layout == "LD":
                return np.asarray(array[0, 0])
            if self.layout == "BLHD":
                return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
            return array

        query = tensor(self.heads, self.length)
        key, value = tensor(self.kv_heads, self.keys), tensor(self.kv_heads, self.keys)
        pairs = (self.length, self.keys)
        mask: Array | None = None
        if self.mask == "bool":
            mask = rng.random(pairs) < 0.75
            mask[:, 0] = True  # libraries differ on rows without keys
        elif self.mask == "float":
            mask = rng.standard_normal(pairs, dtype=np.float32)
        elif self.mask == "float per head":
            mask = rng.standard_normal((self.batch, self.heads, *pairs), dtype=np.float32)
        if mask is not None and mask.dtype != np.bool_:
            mask = mask.astype(self.numpy_dtype)
        return Inputs(query, key, value, mask)

    def grad_out(self) -> Array:
        """Make the gradient with respect to the output, contiguous."""
        return self._normal(np.random.default_rng(1), self.heads, self.length)

    def _normal(self, rng: np.random.Generator, heads: int, length: int) -> Array:
        dtype = np.float64 if self.dtype == "float64" else np.float32
        return rng.standard_normal(self._shape(heads, length), dtype=dtype).astype(
            self.numpy_dtype, copy=False
        )

    def _shape(self, heads: int, length: int) -> tuple[int, ...]:
        if self.ragged:
            return int(self.offsets[-1]), heads, self.width
        return self.batch, heads, length, self.width

    def to_dict(self) -> dict[str, Any]:
        """Return what ``Case(**…)`` takes."""
        return asdict(self)


@dataclass(frozen=True)
class Contestant:
    """A library and what it is to compute, with environment variables for its process."""

    name: str
    engine: str
    case: Case
    environment: dict[str, str] = field(default_factory=dict)
    yardstick: bool = False  # computes something else


@dataclass(frozen=True)
class Row:
    """One line of a table: the first contestant is selfattn, the others are what it is compared with."""

    suite: str
    label: str
    contestants: tuple[Contestant, ...]
    limit: str = "flops"  # "flops", "bytes", or "" for calls of no size


@dataclass(frozen=True)
class Choice:
    """What the command line asked for; None where a suite is to choose."""

    peers: Sequence[str]
    lengths: Sequence[int] | None = None
    widths: Sequence[int] | None = None
    other_isas: Sequence[str] = ()
    quick: bool = False
    full: bool = False

    def sizes(self, lengths: Sequence[int]) -> Sequence[int]:
        """Give the lengths asked for, else the suite's own; the first of them when in a hurry."""
        return self.lengths or (lengths[:1] if self.quick else lengths)

    def shapes(self, lengths: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pair lengths and widths: those asked for, else the suite's own; few when in a hurry."""
        if self.quick:
            lengths, widths = [n for n in lengths if n in (128, 1024)], (64,)
        return product(self.lengths or lengths, self.widths or widths)


def _row(suite: str, label: str, case: Case, peers: Iterable[str], limit: str = "flops") -> Row:
    contestants = [Contestant(name, name, case) for name in ("selfattn", *peers)]
    return Row(suite, label, tuple(contestants), limit)


def _forward(choice: Choice) -> Iterator[Row]:
    for length, width in choice.shapes(LENGTHS, WIDTHS):
        yield _row("forward", f"{length} x {width}", Case(length, width), choice.peers)


def _causal(choice: Choice) -> Iterator[Row]:
    for length, width in choice.shapes(LENGTHS, WIDTHS):
        yield _row("causal", f"causal {length} x {width}", Case(length, width, causal=True), choice.peers)


def _mask(choice: Choice) -> Iterator[Row]:
    kinds = {"float": "float mask", "float per head": "float mask per head", "bool": "boolean mask"}
    for kind, title in kinds.items():
        for length, width in choice.shapes((128, 512, 1024), (32, 64, 128)):
            yield _row("mask", f"{title} {length} x {width}", Case(length, width, mask=kind), choice.peers)


def _float64(choice: Choice) -> Iterator[Row]:
    for length, width in choice.shapes((128, 512, 1024), (32, 64, 128)):
        yield _row(
            "float64", f"float64 {length} x {width}", Case(length, width, dtype="float64"), choice.peers
        )


def _16bit(choice: Choice) -> Iterator[Row]:
    peers = [name for name in choice.peers if name in ("torch", "openvino")]
    for dtype in ("bfloat16", "float16") if find_spec("ml_dtypes") else ("float16",):
        for length, width in choice.shapes((512, 1024, 4096), (64, 128)):
            case = Case(length, width, dtype=dtype)
            yield _row("16bit", f"{dtype} {length} x {width}", case, peers)
        for length, width in choice.shapes((1024,), (64, 128)):
            case = Case(length, width, dtype=dtype)
            yield _row("16bit", f"{dtype}, causal {length} x {width}", replace(case, causal=True), peers)
            backward = replace(case, gradients=BACKWARD)
            yield _row("16bit", f"{dtype}, backward {length} x {width}", backward, peers)
        yield from _decode(replace(choice, lengths=choice.sizes((4096, 32768)), peers=peers), "16bit", dtype)


def _decode(choice: Choice, suite: str = "decode", dtype: str = "float32") -> Iterator[Row]:
    for keys in choice.sizes((4096, 8192, 16384, 32768)):
        case = Case(1, 128, keys=keys, heads=32, kv_heads=8, dtype=dtype)
        title = f"1 query, {keys} keys, 32/8 heads" + (f", {dtype}" if dtype != "float32" else "")
        yield _row(suite, title, case, choice.peers, "bytes")


def _small(choice: Choice) -> Iterator[Row]:
    peers = [name for name in choice.peers if name in ("numpy", "torch")]
    sizes = [(3, 4)] + [(n, n) for n in choice.sizes((1, 2, 4, 8, 16, 32, 64, 128))]
    for dtype, (length, width) in product(("float32", "float64"), sizes):
        case = Case(length, width, heads=1, dtype=dtype, layout="LD")
        yield _row("small", f"2-D call {length} x {width}, {dtype}", case, peers, "")


def _strided(choice: Choice) -> Iterator[Row]:
    peers = [name for name in choice.peers if name in ("numpy", "torch")]
    for length, width in choice.shapes((128, 512, 1024, 4096), (64, 128)):
        case = Case(length, width)
        row = _row("strided", f"(B, L, H, D) {length} x {width}", replace(case, layout="BLHD"), peers)
        contiguous = Contestant("contiguous", "selfattn", case)
        yield replace(row, contestants=(row.contestants[0], contiguous, *row.contestants[1:]))


def _isa(choice: Choice) -> Iterator[Row]:
    for isa, (length, width) in product(choice.other_isas, choice.shapes((128, 512, 1024), (32, 64, 128))):
        row = _row("isa", f"{isa} {length} x {width}", Case(length, width), choice.peers)
        first = replace(row.contestants[0], environment={"SELFATTN_ISA": isa})
        yield replace(row, contestants=(first, *row.contestants[1:]))


def _gradient_rows(choice: Choice, kind: str) -> Iterator[Row]:
    peers = [name for name in choice.peers if name == "torch"]
    lengths, widths = (LENGTHS, WIDTHS) if choice.full else ((128, 512, 1024, 4096), (64,))
    plain = [Case(*shape, gradients=kind) for shape in choice.shapes(lengths, widths)]
    for title, cases in {
        kind: plain,
        f"{kind}, causal": [replace(case, causal=True) for case in plain],
        f"{kind}, float mask": [replace(case, mask="float") for case in plain if case.length <= 1024],
        f"{kind}, one head": [
            replace(case, heads=1, kv_heads=1) for case in plain if case.length == max(lengths)
        ],
    }.items():
        for case in cases:
            yield _row("backward", f"{title} {case.length} x {case.width}", case, peers)


def _backward(choice: Choice) -> Iterator[Row]:
    for kind in (BACKWARD, BOTH):
        yield from _gradient_rows(choice, kind)


def _ragged(choice: Choice) -> Iterator[Row]:
    sequences = 16 if choice.quick else 64
    for longest, width in product(choice.sizes((2048,)), choice.widths or (64,)):
        for kind, causal in product(("", BACKWARD), (False, True)):
            case = Case(longest, width, causal=causal, gradients=kind, ragged=sequences)
            title = f"{sequences} of {SHORTEST} to {longest} x {width}"
            label = ", ".join(filter(None, [kind, "causal" if causal else "", title]))
            one = Case(min(longest, 1024), width, causal=causal, gradients=kind)
            equal = replace(one, batch=max(1, round(case.flops / one.flops)))
            apart = replace(case, split=True)
            rivals = [
                Contestant("equal lengths", "selfattn", equal, yardstick=True),
                Contestant("one by one", "selfattn", apart),
            ]
            if "torch" in choice.peers:
                rivals += [
                    Contestant("torch", "torch", case),
                    Contestant("PyTorch in parts", "torch", apart),
                ]
            yield Row("ragged", label, (Contestant("selfattn", "selfattn", case), *rivals))


def _blocks(choice: Choice) -> Iterator[Row]:
    """Take block masks and a window beside the same call without: work for work they should be as fast."""
    cases = [
        Case(length, width, blocks=blocks, block_length=length // part, gradients=gradients)
        for gradients in ("", BACKWARD)
        for length, width in product(choice.sizes((4096,)), choice.widths or (64,))
        for blocks, part in (("documents", 8), ("prefix", 4))
    ]
    if not choice.quick:
        length = max(choice.lengths or (32768,))
        cases.append(Case(length, 64, heads=1, blocks="window", block_length=min(256, length)))
    for case in cases:
        title = f"{case.blocks} of {case.block_length} in {case.length} x {case.width}"
        title = f"{case.gradients}, {title}" if case.gradients else title
        dense = replace(case, blocks="", block_length=0)
        contestants = (
            Contestant("selfattn", "selfattn", case),
            Contestant("dense", "selfattn", dense, yardstick=True),
        )
        yield Row("blocks", title, contestants)


def _summary(choice: Choice) -> Iterator[Row]:
    """Take a line or two of each suite: the table of docs/guide/benchmarks.md."""
    shapes = [(128, 64), (512, 64), (1024, 32), (1024, 64), (1024, 128), (4096, 64)]
    if choice.quick or choice.lengths or choice.widths:
        shapes = list(choice.shapes((128, 1024), (64,)))
    for length, width in shapes:
        yield from _forward(replace(choice, lengths=[length], widths=[width]))
    one_shape = replace(choice, lengths=choice.lengths or [1024], widths=choice.widths or [64])
    for suite in (_causal, _mask, _float64, _strided):
        yield from suite(one_shape)
    yield from _decode(replace(choice, lengths=choice.sizes((4096, 32768))))
    yield from _gradient_rows(one_shape, BACKWARD)
    yield next(_small(choice))


SUITES: dict[str, Callable[[Choice], Iterator[Row]]] = {
    "summary": _summary,
    "forward": _forward,
    "causal": _causal,
    "mask": _mask,
    "float64": _float64,
    "16bit": _16bit,
    "decode": _decode,
    "small": _small,
    "strided": _strided,
    "isa": _isa,
    "backward": _backward,
    "ragged": _ragged,
    "blocks": _blocks,
}


def rows_of(suites: Sequence[str], choice: Choice) -> list[Row]:
    """List the rows of the named suites; "all" is every suite but the summary, which repeats some rows."""
    names: list[str] = []
    for suite in suites:
        names += [name for name in SUITES if name != "summary"] if suite == "all" else [suite]
    return [row for name in dict.fromkeys(names) for row in SUITES[name](choice)]
