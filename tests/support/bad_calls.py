"""Every kind of bad argument to scaled_dot_product_attention and varlen_attention, with the expected error and its
message.

The arguments are query (2, 3, 4), key (2, 5, 4) and value (2, 5, 6) in float32, changed as the entry says.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from inputs import read_only

from selfattn import BlockMask

Q, K, V = (2, 3, 4), (2, 5, 4), (2, 5, 6)


def array(shape, dtype=np.float32):
    return (np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)


def huge(*shape, dtype=np.float32):
    """An array of any size that has one element in memory."""
    return np.broadcast_to(np.ones((), dtype), shape)


def with_tables(given):
    """A block mask with any tables for the core, as a class derived from BlockMask may have them."""
    derived = type("WithTables", (BlockMask,), {"_tables": lambda *_: given})
    return derived(BlockMask.prefix_lm(0)._parts)


def undecided_overlaps():
    """Pairs of arrays for which NumPy cannot decide whether they overlap.

    Whether two sets of strides hit one address is a knapsack problem: the work spent on it has a limit.
    """
    as_strided, rng = np.lib.stride_tricks.as_strided, np.random.default_rng(0)
    memory = np.zeros(2**20, np.uint8)
    first = np.frombuffer(memory, np.float64, count=1, offset=1)
    while True:
        one = as_strided(memory[4:], (2,) * 12, [int(2 * n) for n in rng.integers(1000, 40000, 12)])
        strides = [9]
        while len(strides) < 12:
            strides.insert(0, int(strides[0] * 2 + rng.integers(2) * strides[0]))
        if sum(strides) > 2**19:
            continue
        other = as_strided(first, (2,) * 12, strides)
        try:
            np.shares_memory(other, one, 10_000)
        except np.exceptions.TooHardError:
            yield one, other


class Raises:
    """An argument that raises when it is converted to a bool, a float, an index or an array."""

    def __bool__(self, dtype=None, copy=None):
        raise ZeroDivisionError("asked")

    __float__ = __index__ = __array__ = __bool__


@dataclass
class Bad:
    name: str
    error: type[Exception] | tuple[type[Exception], ...]
    match: str | None
    change: dict[str, Any]
    without: tuple[str, ...] = ()

    def arguments(self):
        given = {"query": array(Q), "key": array(K), "value": array(V)} | self.change
        return {name: x for name, x in given.items() if name not in self.without}


T, VE, M = TypeError, ValueError, MemoryError
SIZE = (ValueError, MemoryError)  # NumPy or the core may notice first
LONGDOUBLE_IS_WIDER = np.dtype(np.longdouble).itemsize > 8

BAD = [
    # the call itself
    Bad("no query", T, "missing required argument: 'query'", {}, without=("query", "key", "value")),
    Bad("no value", T, "missing required argument: 'value'", {}, without=("value",)),
    Bad("unknown keyword", T, "unexpected keyword argument 'masks'", {"masks": None}),
    Bad("empty keyword", T, "unexpected keyword", {"": None}),
    # ranks and shapes
    Bad("query 0-D", VE, r"query.*2 dim.*\(\)", {"query": 1.0}),
    Bad("query 1-D", VE, r"query.*2 dim.*\(4,\)", {"query": array((4,))}),
    Bad("key 1-D", VE, r"key.*2 dim.*\(4,\)", {"key": array((4,))}),
    Bad("value 1-D", VE, r"value.*2 dim.*\(5,\)", {"value": array((5,))}),
    Bad("ragged list", VE, "inhomogeneous", {"query": [[1.0, 2.0], [3.0]]}),
    Bad("widths", VE, r"\(2, 3, 4\).*\(2, 5, 3\)", {"key": array((2, 5, 3))}),
    Bad("lengths", VE, r"\(2, 5, 4\).*\(2, 4, 6\)", {"value": array((2, 4, 6))}),
    Bad("more values than keys", VE, r"\(2, 5, 4\).*\(2, 6, 6\)", {"value": array((2, 6, 6))}),
    Bad("leading dims of key", VE, r"\(2, 3, 4\).*\(3, 5, 4\)", {"key": array((3, 5, 4))}),
    Bad("leading dims of value", VE, r"\(2, 3, 4\).*\(3, 5, 6\)", {"value": array((3, 5, 6))}),
    Bad(
        "key and value against each other",
        VE,
        r"\(2, 5, 4\).*\(3, 5, 6\)",
        {"query": array((3, 4)), "value": array((3, 5, 6))},
    ),
    Bad("leading dim 0 against 2", VE, "broadcast", {"key": array((0, 5, 4))}),
    Bad("heads without GQA", VE, "enable_gqa", {"query": array((4, 3, 4))}),
    Bad(
        "heads not a multiple",
        VE,
        r"multiple.*\(3, 3, 4\).*\(2, 5, 4\)",
        {"query": array((3, 3, 4)), "enable_gqa": True},
    ),
    Bad("fewer query heads", VE, "multiple", {"query": array((1, 3, 4)), "enable_gqa": True}),
    Bad(
        "GQA with no key heads",
        VE,
        "multiple",
        {"key": array((0, 5, 4)), "value": array((0, 5, 6)), "enable_gqa": True},
    ),
    Bad("GQA in 2-D", VE, r"head axis.*\(3, 4\)", {"query": array((3, 4)), "enable_gqa": True}),
    Bad(
        "GQA key and value heads",
        VE,
        r"\(2, 5, 4\).*\(1, 5, 6\)",
        {"value": array((1, 5, 6)), "enable_gqa": True},
    ),
    Bad(
        "GQA batches",
        VE,
        "broadcast",
        {
            "query": array((2, 4, 3, 4)),
            "key": array((3, 2, 5, 4)),
            "value": array((3, 2, 5, 6)),
            "enable_gqa": True,
        },
    ),
    # dtypes and kinds of arrays
    *(
        Bad(
            f"{name} {np.dtype(dtype).name}",
            T,
            f"{name}.*{re.escape(np.dtype(dtype).name)}",
            {name: array(shape, dtype)},
        )
        for name, shape in (("query", Q), ("key", K), ("value", V))
        for dtype in (
            np.bool_,
            np.complex64,
            np.complex128,
            object,
            "m8[s]",
            *([np.longdouble] if LONGDOUBLE_IS_WIDER else []),
        )
    ),
    Bad("query of text", T, "query.*<U1", {"query": np.full(Q, "a")}),
    Bad("query of bytes", T, "query", {"query": np.full(Q, b"a")}),
    Bad("query structured", T, "query", {"query": np.zeros(Q, [("x", np.float32)])}),
    Bad("query None", T, "query.*object", {"query": None}),
    Bad("key a str", T, "key", {"key": "abc"}),
    Bad("value a dict", T, "value", {"value": {1: 2}}),
    *(
        Bad(f"{name} masked", T, f"{name}.*MaskedArray", {name: np.ma.masked_array(array(shape))})
        for name, shape in (("query", Q), ("key", K), ("value", V), ("attn_mask", (3, 5)))
    ),
    *(
        Bad(f"{name} matrix", T, f"{name}.*matrix", {name: array(shape).view(np.matrix)})
        for name, shape in (("query", (3, 4)), ("key", (5, 4)), ("value", (5, 6)), ("attn_mask", (3, 5)))
    ),
    Bad("__array__ raises", ZeroDivisionError, "asked", {"key": Raises()}),
    # masks
    Bad(
        "integer mask",
        T,
        r"(?s)int64.*astype\(bool\).*astype\(numpy.float32\)",
        {"attn_mask": np.ones((3, 5), np.int64)},
    ),
    Bad("uint8 mask", T, "uint8", {"attn_mask": np.ones((3, 5), np.uint8)}),
    Bad(
        "complex mask",
        T,
        "attn_mask must be of dtype bool, float16, bfloat16, float32 or float64, got complex64",
        {"attn_mask": np.ones((3, 5), np.complex64)},
    ),
    Bad("object mask", T, "attn_mask.*object", {"attn_mask": np.ones((3, 5), object)}),
    Bad("mask columns", VE, r"attn_mask.*\(2, 3, 5\).*\(3, 4\)", {"attn_mask": np.ones((3, 4), bool)}),
    Bad("mask rows", VE, r"attn_mask.*\(2, 3, 5\).*\(2, 5\)", {"attn_mask": np.ones((2, 5), bool)}),
    Bad("mask heads", VE, r"attn_mask.*\(2, 3, 5\).*\(3, 3, 5\)", {"attn_mask": np.ones((3, 3, 5), bool)}),
    Bad("mask too many dims", VE, r"attn_mask.*\(1, 2, 3, 5\)", {"attn_mask": np.ones((1, 2, 3, 5), bool)}),
    Bad("mask without columns", VE, r"attn_mask.*\(3, 0\)", {"attn_mask": np.ones((3, 0), bool)}),
    Bad(
        "mask enlarges the batch",
        VE,
        r"attn_mask.*\(4, 3, 5\)",
        {
            "query": array((1, 3, 4)),
            "key": array((1, 5, 4)),
            "value": array((1, 5, 6)),
            "attn_mask": np.ones((4, 3, 5), bool),
        },
    ),
    Bad(
        "mask enlarges the queries",
        VE,
        r"attn_mask.*\(3, 5\)",
        {"query": array((2, 1, 4)), "attn_mask": np.ones((3, 5), bool)},
    ),
    # numbers
    *(
        Bad(f"dropout_p {p}", VE, f"dropout_p.*{p}", {"dropout_p": p})
        for p in (-0.1, 1.5, np.nan, np.inf, -1)
    ),
    *(
        Bad(f"dropout_p {p!r}", T, "dropout_p", {"dropout_p": p})
        for p in ("0.5", None, 1j, True, np.True_, np.array(True), [0.5])
    ),
    Bad("dropout_p too large for a float", VE, "dropout_p", {"dropout_p": 10**400}),
    Bad("dropout_p raises", ZeroDivisionError, "asked", {"dropout_p": Raises()}),
    *(Bad(f"scale {x!r}", T, "scale", {"scale": x}) for x in ("1", True, 1j, (1.0,))),
    Bad("scale nan", VE, "scale must be a number, not NaN", {"scale": np.nan}),
    Bad("scale of an array", T, "scale .*ndarray.*multiply the query by it", {"scale": np.ones(4)}),
    Bad("scale too large for a float", VE, "scale", {"scale": -(10**400)}),
    *(Bad(f"softcap {x!r}", VE, "softcap", {"softcap": x}) for x in (0, -1.0, np.nan, np.inf)),
    *(Bad(f"softcap {x!r}", T, "softcap", {"softcap": x}) for x in ("30", True)),
    # causal, window
    *(
        Bad(f"causal {x!r}", VE, "causal.*upper_left.*lower_right", {"causal": x})
        for x in ("left", "", "UPPER_LEFT", "\udc80")
    ),
    *(Bad(f"causal {x!r}", T, "causal", {"causal": x}) for x in (1, b"upper_left", ["upper_left"])),
    Bad("causal True", T, "causal must be .* got True .is_causal=True is", {"causal": True}),
    Bad(
        "mask by another name",
        T,
        "argument 'mask'; here its name is attn_mask",
        {"mask": np.ones((3, 5), bool)},
    ),
    Bad("causal twice", VE, "upper_left.*lower_right", {"is_causal": True, "causal": "lower_right"}),
    Bad("is_causal raises", ZeroDivisionError, "asked", {"is_causal": Raises()}),
    Bad(
        "is_causal a kind of causal",
        T,
        "is_causal must be a bool, got 'lower_right'.*causal='lower_right'",
        {"is_causal": "lower_right"},
    ),
    *(
        Bad(f"{name} {x!r}", T, f"{name} must be a bool, got", {name: x})
        for name in ("is_causal", "enable_gqa", "return_lse", "return_weights")
        for x in ("False", b"yes", 2.5)
    ),
    *(
        Bad(f"mask {x}", T, f"attn_mask must be an array, got {x} .*is_causal=True", {"attn_mask": x})
        for x in (True, False)
    ),
    Bad(
        "lengths of batch entries",
        VE,
        r"key_lengths must broadcast .*\(2, 4\).*got shape \(2,\) .*has shape \(B, 1\)",
        {
            "query": array((2, 4, 3, 4)),
            "key": array((2, 4, 5, 4)),
            "value": array((2, 4, 5, 6)),
            "key_lengths": [1, 2],
        },
    ),
    Bad(
        "mask of batch entries",
        VE,
        r"attn_mask must broadcast .*\(2, 4, 3, 5\).*got shape \(2, 5\) .*mask\[:, None, None, :\]",
        {
            "query": array((2, 4, 3, 4)),
            "key": array((2, 4, 5, 4)),
            "value": array((2, 4, 5, 6)),
            "attn_mask": np.ones((2, 5), bool),
        },
    ),
    Bad("is_causal an array", VE, "ambiguous", {"is_causal": np.array([True, False])}),
    Bad("mask in the place of is_causal", VE, "ambiguous", {"is_causal": np.ones((3, 5), bool)}),
    *(
        Bad(f"window {x!r}", VE, "window", {"window": x})
        for x in ((), (1,), (1, 2, 3), [1], (-1, 0), (0, -(2**70)))
    ),
    *(
        Bad(f"window {x!r}", T, "window", {"window": x})
        for x in (
            3,
            "12",
            {1: 2, 3: 4},
            {1, 2},
            2.5,
            (1.0, 2.0),
            (True, 1),
            ("1", 2),
            ((1,), 2),
            (np.True_, 1),
        )
    ),
    # numbers per head
    *(
        Bad(
            f"{name} {shape}",
            VE,
            rf"{name}.*\(2,\).*{shape}".replace("(3", r"\(3").replace("3,)", r"3,\)"),
            {name: x},
        )
        for name in ("alibi_slopes", "sinks", "key_lengths")
        for shape, x in (("(3,)", [1, 2, 3]),)
    ),
    *(
        Bad(f"{name} 2-D", VE, rf"{name}.*\(1, 2\)", {name: [[1, 2]]})
        for name in ("alibi_slopes", "sinks", "key_lengths")
    ),
    *(
        Bad(f"{name} {dtype}", T, f"{name}", {name: np.ones(2, dtype)})
        for name in ("alibi_slopes", "sinks", "key_lengths")
        for dtype in ("?", "c8", "O", "U1")
    ),
    *(
        Bad(f"{name} masked", T, f"{name}.*MaskedArray", {name: np.ma.ones(2)})
        for name in ("alibi_slopes", "sinks")
    ),
    *(
        Bad(f"key_lengths {x!r}", VE, r"key_lengths.*0 and S = 5", {"key_lengths": x})
        for x in (6, -1, [0, 6], np.array([2**64 - 1, 0], np.uint64), np.array([2**63, 0], np.uint64))
    ),
    Bad(
        "key_lengths beyond int64",
        VE,
        r"key_lengths must be between 0 and S = 5, got 18446744073709551615",
        {"key_lengths": np.array([0, 2**64 - 1], np.uint64)},
    ),
    *(
        Bad(f"key_lengths {x!r}", T, "key_lengths must be of an integer dtype.*float", {"key_lengths": x})
        for x in (2.0, np.float32(3), [1.0, 2.0])
    ),
    # rng, with dropout and without
    *(
        Bad(f"rng {x!r} {p}", e, "rng", {"rng": x, "dropout_p": p})
        for p in (0.0, 0.5)
        for e, x in ((VE, -1), (VE, -(2**80)), (T, 0.5), (T, True), (T, "1"), (T, np.random), (T, [1]))
    ),
    # num_threads
    *(
        Bad(f"num_threads {x!r}", VE, f"num_threads.*1024.*{x}", {"num_threads": x})
        for x in (0, -1, 1025, 2**31, 10**30)
    ),
    *(Bad(f"num_threads {x!r}", T, "num_threads", {"num_threads": x}) for x in (1.0, "1", True, [1])),
    # out
    *(Bad(f"out {x!r}", T, "out", {"out": x}) for x in (3, [[1.0]], "out")),
    Bad("out shape", VE, r"out.*\(2, 3, 6\).*\(2, 3, 5\)", {"out": np.zeros((2, 3, 5), np.float32)}),
    Bad("out rank", VE, r"out.*\(2, 3, 6\).*\(3, 6\)", {"out": np.zeros((3, 6), np.float32)}),
    Bad(
        "out one more dim",
        VE,
        r"out.*\(2, 3, 6\).*\(1, 2, 3, 6\)",
        {"out": np.zeros((1, 2, 3, 6), np.float32)},
    ),
    Bad("out dtype", T, "out.*float32.*float64", {"out": np.zeros((2, 3, 6))}),
    Bad("out integer", T, "out.*float32.*int64", {"out": np.zeros((2, 3, 6), np.int64)}),
    Bad("out object", T, "out.*object", {"out": np.zeros((2, 3, 6), object)}),
    Bad(
        "out byte order",
        T,
        "out.*byte order",
        {"out": np.zeros((2, 3, 6), np.dtype(np.float32).newbyteorder())},
    ),
    Bad("out read-only", VE, "out is read-only", {"out": read_only(array((2, 3, 6)))}),
    Bad("out masked", T, "out.*MaskedArray", {"out": np.ma.zeros((2, 3, 6), np.float32)}),
    Bad("out broadcast", VE, "out", {"out": np.broadcast_to(np.zeros(6, np.float32), (2, 3, 6))}),
    Bad(
        "out overlaps itself",
        VE,
        "out overlaps itself",
        {"out": np.lib.stride_tricks.as_strided(np.zeros(40, np.float32), (2, 3, 6), (24, 8, 4))},
    ),
    # sizes: NumPy allows no input of 2**63 bytes, but the call would need that many
    Bad(
        "output of 2**63 elements",
        SIZE,
        None,
        {"query": huge(2**31, 2**28, 1), "key": huge(5, 1), "value": huge(5, 16)},
    ),
    Bad(
        "output of 2**79 elements",
        SIZE,
        None,
        {"query": huge(2**40, 2**19, 1), "key": huge(1, 1), "value": huge(1, 2**20)},
    ),
    Bad(
        "product of leading dims",
        SIZE,
        None,
        {"query": huge(2**40, 1, 1, 1), "key": huge(1, 2**40, 1, 1), "value": huge(1, 1)},
    ),
    Bad(
        "number of rows, with no columns",
        SIZE,
        None,
        {"query": huge(2**40, 1, 2**19, 1), "key": huge(2**20, 1, 1), "value": huge(1, 0)},
    ),
    Bad(
        "weights of 2**62 elements",
        SIZE,
        None,
        {"query": huge(2**31, 1), "key": huge(2**31, 1), "value": huge(2**31, 0), "return_weights": True},
    ),
    Bad(
        "lse of 1 PiB",
        M,
        None,
        {"query": huge(2**48, 1), "key": huge(1, 1), "value": huge(1, 0), "return_lse": True},
    ),
    Bad("output of 8 PiB", M, None, {"query": huge(2**40, 1), "key": huge(1, 1), "value": huge(1, 2**11)}),
    Bad(
        "width beyond any", SIZE, None, {"query": huge(2, 2**48), "key": huge(1, 2**48), "value": huge(1, 1)}
    ),
    Bad(
        "scratch of 1 PiB",
        SIZE,
        None,
        {"query": huge(200, 2**40), "key": huge(1, 2**40), "value": huge(1, 1)},
    ),
    Bad(
        "length beyond any", SIZE, None, {"query": huge(1, 1), "key": huge(2**50, 1), "value": huge(2**50, 1)}
    ),
]


PACKED = {
    "query": array((5, 4, 4)),
    "key": array((7, 4, 4)),
    "value": array((7, 4, 4)),
    "cu_seqlens_q": np.array([0, 2, 5]),
    "cu_seqlens_k": np.array([0, 3, 7]),
}
SHARED = np.zeros((5, 4, 4), np.float32)  # an output whose memory also holds the offsets
SHARED.view(np.int64).reshape(-1)[:3] = PACKED["cu_seqlens_q"]
SHARED.view(np.int32).reshape(-1)[6:9] = PACKED["cu_seqlens_k"]
# The changed arguments, the expected error, its message.
BAD_PACKED = {
    "query is 2-D": (
        {"query": PACKED["query"][:, 0]},
        ValueError,
        r"query must have 3 dimensions, \(total_q, H, E\), got",
    ),
    "widths": ({"key": PACKED["key"][..., :3]}, ValueError, "same last dimension: query has shape"),
    "rows of value": (
        {"value": PACKED["value"][1:]},
        ValueError,
        "key and value must have the same rows and heads",
    ),
    "heads": (
        {"key": PACKED["key"][:, :2], "value": PACKED["value"][:, :2]},
        ValueError,
        "pass enable_gqa=True",
    ),
    "gqa": (
        {"key": PACKED["key"][:, :3], "value": PACKED["value"][:, :3], "enable_gqa": True},
        ValueError,
        "must be a multiple",
    ),
    "bool": (
        {"query": PACKED["query"] > 0},
        TypeError,
        "query must be of dtype float16, .* integer type, got bool",
    ),
    "masked array": (
        {"query": np.ma.masked_array(PACKED["query"])},
        TypeError,
        "query is a MaskedArray; pass a plain array",
    ),
    "float offsets": (
        {"cu_seqlens_q": PACKED["cu_seqlens_q"] * 1.0},
        TypeError,
        "cu_seqlens_q must be of an integer dtype, got float64",
    ),
    "no offsets": ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be an array of integers, got None"),
    "huge offsets": (
        {"cu_seqlens_k": np.array([0, 2**63 + 7], np.uint64)},
        ValueError,
        "of key, 7, got 9223372036854775815",
    ),
    "2-D offsets": (
        {"cu_seqlens_k": PACKED["cu_seqlens_k"][None]},
        ValueError,
        r"must have shape \(n \+ 1,\).* got \(1, 3\)",
    ),
    "empty offsets": (
        {"cu_seqlens_k": PACKED["cu_seqlens_k"][:0]},
        ValueError,
        r"must have shape \(n \+ 1,\).* got \(0,\)",
    ),
    "begin": ({"cu_seqlens_q": [1, 2, 5]}, ValueError, "cu_seqlens_q must begin with 0, got 1"),
    "end": ({"cu_seqlens_q": [0, 2, 6]}, ValueError, "number of rows of query, 5, got 6"),
    "end of keys": ({"cu_seqlens_k": [0, 2, 6]}, ValueError, "number of rows of key, 7, got 6"),
    "falls": (
        {"cu_seqlens_k": [0, 9, 7]},
        ValueError,
        "cu_seqlens_k must not fall, but offset 2 is 7 after 9",
    ),
    "lengths": (
        {"cu_seqlens_k": [0, 7]},
        ValueError,
        r"cu_seqlens_q has shape \(3,\), cu_seqlens_k has shape \(2,\)",
    ),
    "one mask": (
        {"attn_mask": np.ones((5, 7), bool)},
        TypeError,
        "a list with a mask or None for each of the 2 seq",
    ),
    "few masks": ({"attn_mask": [None]}, ValueError, "each of the 2 sequences, got 1"),
    "shape of a mask": (
        {"attn_mask": [None, np.ones((2, 4), bool)]},
        ValueError,
        r"attn_mask\[1\] must broadcast",
    ),
    "integer mask": (
        {"attn_mask": [np.ones((2, 3), int), None]},
        TypeError,
        r"attn_mask\[0\] must be boolean",
    ),
    "slopes": ({"alibi_slopes": np.ones((3, 4))}, ValueError, "alibi_slopes must broadcast"),
    "causal": ({"causal": "lower"}, ValueError, "causal must be None"),
    "dropout": ({"dropout_p": 2}, ValueError, "dropout_p must be between 0 and 1"),
    "boolean dropout": ({"dropout_p": np.True_}, TypeError, "dropout_p must be a real number, got a bool"),
    "rng": ({"rng": "x"}, TypeError, "rng must be an int"),
    "out": ({"out": np.zeros((5, 4, 5), np.float32)}, ValueError, r"out must have shape \(5, 4, 4\)"),
    "out dtype": ({"out": np.zeros((5, 4, 4))}, TypeError, "out must be of dtype float32"),
    "out is query": ({"out": PACKED["query"]}, ValueError, "out overlaps query"),
    "out is offsets": (
        {"out": SHARED, "cu_seqlens_q": SHARED.view(np.int64).reshape(-1)[:3]},
        ValueError,
        "out overlaps cu_seqlens_q",
    ),
    "out is other offsets": (
        {"out": SHARED, "cu_seqlens_k": SHARED.view(np.int32).reshape(-1)[6:9]},
        ValueError,
        "out overlaps cu_seqlens_k",
    ),
}
