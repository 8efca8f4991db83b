"""Inputs for the tests: random arrays of every dtype, in every memory layout, and each option and block mask by
name."""

import itertools

import ml_dtypes
import numpy as np

from selfattn import BlockMask

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
FLOAT_IDS = [dtype.name for dtype in FLOATS]


def normal(rng, shape, dtype=np.float64):
    """Draw standard normal numbers, or small integers for an integer dtype."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.asarray(rng.integers(0 if dtype.kind == "u" else -3, 4, size=shape)).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def random_inputs(shape, n_keys=None, *, dtype=np.float32, key_heads=None, v_width=None, seed=0):
    """Query, key and value: `shape` is (..., L, E); keys and values may differ in S, Ev and heads (axis -3)."""
    rng = np.random.default_rng(seed)
    *lead, n_queries, width = shape
    n_keys = n_queries if n_keys is None else n_keys
    key_lead = list(lead) if key_heads is None else [*lead[:-1], key_heads]
    return (
        normal(rng, (*lead, n_queries, width), dtype),
        normal(rng, (*key_lead, n_keys, width), dtype),
        normal(rng, (*key_lead, n_keys, width if v_width is None else v_width), dtype),
    )


def random_mask(rng, shape, dtype):
    """Draw a mask that is open for two thirds of the pairs, but closed for some whole rows and ranges of keys."""
    closed = rng.random(shape) < 1 / 3
    if len(shape) >= 2:
        closed |= rng.random((*shape[:-1], 1)) < 0.05
    if len(shape) >= 1 and shape[-1] > 128:
        closed[..., 64:128] = True
    if dtype == np.bool_:
        return np.asarray(~closed)
    return np.asarray(np.where(closed, -np.inf, rng.standard_normal(shape))).astype(dtype)


# Each takes an array and returns an array of equal values with another layout in memory.


def heads_inside(x):
    """(..., H, L, D) as a view of (..., L, H, D)."""
    return x.swapaxes(-2, -3).copy().swapaxes(-2, -3) if x.ndim >= 3 else x.copy()


def negative(x):
    backwards = (slice(None, None, -1),) * x.ndim
    return x[backwards].copy()[backwards]


def last_axis_strided(x):
    wide = np.zeros((*x.shape, 3), x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def long_rows(x):
    """Return rows that are as far apart in memory as in a large batch of many heads."""
    if x.ndim < 2:
        return x.copy()
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 16 * 1024 // x.dtype.itemsize), x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def unaligned(x):
    y = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def record_field(x):
    """A field of packed records: the first element may be aligned, the others are not."""
    records = np.zeros(x.shape, np.dtype([("x", x.dtype), ("more", np.uint8)]))
    records["x"] = x
    return records["x"]


def byte_swapped(x):
    return x.byteswap().view(x.dtype.newbyteorder())


def read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


OWN = [heads_inside, negative, last_axis_strided, long_rows, unaligned, record_field, byte_swapped, read_only]
LAYOUTS = {"fortran": np.asfortranarray} | {layout.__name__: layout for layout in OWN}


# Name -> a function of (lead, L, S, rng) that gives keyword arguments.

OPTIONS = {
    "plain": lambda lead, L, S, rng: {},
    "bool_mask": lambda lead, L, S, rng: {"attn_mask": random_mask(rng, (*lead, L, S), np.bool_)},
    "float_mask": lambda lead, L, S, rng: {"attn_mask": random_mask(rng, (*lead, L, S), np.float32)},
    "is_causal": lambda lead, L, S, rng: {"is_causal": True},
    "lower_right": lambda lead, L, S, rng: {"causal": "lower_right"},
    "window": lambda lead, L, S, rng: {"window": (3, 2)},
    "left_window": lambda lead, L, S, rng: {"window": (17, None)},
    "softcap": lambda lead, L, S, rng: {"softcap": 1.5},
    "alibi_slopes": lambda lead, L, S, rng: {"alibi_slopes": rng.random(lead[-1:]) / 4},
    "bias": lambda lead, L, S, rng: {"bias": random_mask(rng, (*lead[-1:], L, S), np.float32)},
    "offset_bias": lambda lead, L, S, rng: {
        "offset_bias": random_mask(rng, (*lead[-1:], L + S - 1 if L and S else 0), np.float64)
    },
    "sinks": lambda lead, L, S, rng: {"sinks": rng.standard_normal(lead[-1:])},
    "key_lengths": lambda lead, L, S, rng: {"key_lengths": rng.integers(0, S + 1, size=lead)},
    "scale": lambda lead, L, S, rng: {"scale": -0.7},
    "dropout": lambda lead, L, S, rng: {"dropout_p": 0.3, "rng": 12345678901234567890},
}


def options_together(names, lead, L, S, rng):
    """Return the keyword arguments of several options; if two set the same argument, the first wins."""
    together = {}
    for name in names:
        together = OPTIONS[name](lead, L, S, rng) | together
    if "bias" in together and together.get("attn_mask", np.True_).dtype != np.bool_:
        together["attn_mask"] = together["attn_mask"] > 0
    if together.get("causal") == "lower_right":
        together.pop("is_causal", None)
    return together


def blocks(lead, L, S, rng):
    """A pattern of blocks of any size."""
    sizes = tuple(rng.choice([1, 3, 7, 16, 64, 65, 100, 2**62], 2).tolist())
    return BlockMask.from_blocks(rng.random((*lead, -(-L // sizes[0]), -(-S // sizes[1]))) < 0.5, sizes)


# Name -> a function of (lead, L, S, rng) that gives a block mask; `lead` broadcasts to that of the call.
BLOCK_MASKS = {
    "documents": lambda lead, L, S, rng: BlockMask.from_documents(
        np.sort(rng.integers(0, 4, (*lead, L))),
        np.sort(rng.integers(0, 4, (*lead[:1], *(1 for _ in lead[1:]), S))),
    ),
    "scattered": lambda lead, L, S, rng: BlockMask.from_documents(
        *(np.repeat(rng.integers(-2, 2, (*lead, n)), rng.integers(1, 9), axis=-1)[..., :n] for n in (L, S))
    ),
    "prefix": lambda lead, L, S, rng: BlockMask.prefix_lm(rng.integers(0, S + 1, lead)),
    "prefix, lower right": lambda lead, L, S, rng: BlockMask.prefix_lm(
        rng.integers(0, S + 1, lead), causal="lower_right"
    ),
    "blocks": blocks,
}


def laid_out():
    """Parameters that the core cannot read without a copy: with 16 bits, other strides or another byte order."""
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((6, 8, 600)).astype(np.float32)
    unaligned = np.zeros(4 * 30 + 1, np.uint8)[1:].view(np.float32)
    unaligned[:] = whole[0, 0, :30]
    return {
        "float16": whole[0].astype(np.float16),
        "bfloat16": whole[1].astype(BFLOAT16),
        "float16, strided": whole[2].astype(np.float16)[::-2, 5::3],
        "bfloat16, turned": whole.astype(BFLOAT16).transpose(2, 0, 1),
        "turned": whole.transpose(1, 2, 0),
        "float64, strided": whole[3].astype(np.float64)[:, ::-1],
        "swapped": whole[4].astype(np.dtype(np.float32).newbyteorder()),
        "float16, swapped": whole[5].astype(np.dtype(np.float16).newbyteorder())[::2],
        "unaligned": unaligned,
        "one number": np.array(0.5, np.float16),
        "none": np.zeros((3, 0, 2), np.float16),
        "every second": np.arange(2000, dtype=np.float32)[::2],
    }


def covering(**axes):
    """Return dicts with one value of each axis; any two values of two axes occur together in one dict."""
    rng = np.random.default_rng(0)
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }

    def newly_met(one, chosen):
        pairs = (sorted((one, other), key=lambda place: names.index(place[0])) for other in chosen.items())
        return sum(tuple(pair) in missing for pair in pairs)

    found = []
    while missing:
        chosen = dict(min(missing))
        for name in rng.permutation([name for name in names if name not in chosen]).tolist():
            most = rng.permutation(len(axes[name])).tolist()
            chosen[name] = max(most, key=lambda i, name=name: newly_met((name, i), chosen))
        missing -= set(itertools.combinations([(name, chosen[name]) for name in names], 2))
        found.append({name: axes[name][chosen[name]] for name in names})
    return found


ALONE = [(name,) for name in OPTIONS]
CHOICES = {
    "mask": ("bool_mask", "float_mask"),
    "diagonal": ("is_causal", "lower_right"),
    "window": ("window", "left_window"),
}
OTHERS = tuple(
    name for name in OPTIONS if name not in {"plain"}.union(*CHOICES.values())
)  # each may go with any other
TOGETHER = [
    tuple(name for name in case.values() if name is not None)
    for case in covering(
        **{axis: [None, *names] for axis, names in CHOICES.items()},
        **{name: [None, name] for name in OTHERS},
    )
]
SETS_OF_OPTIONS = ALONE + TOGETHER  # each option alone, and sets in which any two occur together
