"""Hypothesis: any shapes, layouts, dtypes and options together against the reference; and any arguments at all.

`HYPOTHESIS_PROFILE=thorough pytest tests/attention/test_fuzz.py` tries many more.
"""

import inspect
from functools import reduce
from itertools import pairwise
from operator import and_

import numpy as np
import pytest
from bad_calls import with_tables
from before_tests import examples
from gradients import FIELDS, PER_HEAD, assert_gradients, everything, gradients
from hypothesis import event, given
from hypothesis import strategies as st
from inputs import (
    BFLOAT16,
    BLOCK_MASKS,
    FLOATS,
    LAYOUTS,
    OPTIONS,
    OTHERS,
    normal,
    random_mask,
    unaligned,
)
from instruction_sets import using
from tolerances import assert_results, truth

import selfattn as sa
from selfattn import _core

attend = sa.scaled_dot_product_attention
DRAWN = {
    "scale",
    "softcap",
    *PER_HEAD,
    "key_lengths",
    "dropout",
}  # options of which `problems` draws more values
SIZES = st.one_of(
    st.integers(0, 9), st.sampled_from([15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 127, 129, 200])
)


@st.composite
def sub_shapes(draw, shape, *, least=0):
    """A shape that broadcasts to `shape` without enlarging it; its last `least` axes stay."""
    kept = draw(st.integers(least, len(shape)))
    tail = shape[len(shape) - kept :]
    return tuple(
        n if m < least or draw(st.booleans()) else 1 for m, n in zip(range(kept)[::-1], tail, strict=True)
    )


@st.composite
def layouts(draw, x):
    """Draw x, an array of the same values with another layout, or an array that is broadcast along an axis."""
    if x.ndim and x.size and draw(st.integers(0, 7)) == 0:
        axis = draw(st.integers(0, x.ndim - 1))
        x = np.broadcast_to(np.take(x, [0], axis=axis), x.shape)
    name = draw(st.sampled_from(["plain", "plain", *LAYOUTS]))
    return x if name == "plain" else LAYOUTS[name](x)


@st.composite
def block_masks(draw, lead, n_queries, n_keys):
    """One to four block masks, combined, for a call of this shape."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.lists(st.sampled_from([*BLOCK_MASKS]), min_size=1, max_size=4))
    return reduce(and_, (BLOCK_MASKS[kind](draw(sub_shapes(lead)), n_queries, n_keys, rng) for kind in kinds))


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lead = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 0, 5]), max_size=4)))
    n_queries, n_keys = draw(SIZES), draw(SIZES)
    if draw(st.integers(0, 15)) == 0:  # keys in chunks
        lead, n_queries, n_keys = lead[-1:], n_queries % 6, 2048 + n_keys
    width, v_width = draw(SIZES), draw(SIZES)
    q_lead, k_lead, v_lead = lead, draw(sub_shapes(lead)), draw(sub_shapes(lead))
    enable_gqa = False
    if lead and draw(st.booleans()):
        enable_gqa, kv_heads = True, draw(st.sampled_from([1, 2, 3]))
        q_lead = lead = (*lead[:-1], kv_heads * draw(st.integers(0, 3)))
        k_lead, v_lead = (*k_lead[:-1], kv_heads), (*v_lead[:-1], kv_heads)
    elif draw(st.booleans()):
        q_lead = draw(sub_shapes(lead))
        lead = np.broadcast_shapes(q_lead, k_lead, v_lead)
    dtypes = [draw(st.sampled_from([*FLOATS, *FLOATS, *map(np.dtype, "bhilqBHILQ")]))] * 3
    if draw(st.integers(0, 3)) == 0:
        dtypes = [draw(st.sampled_from([*FLOATS, np.dtype(np.int8)])) for _ in range(3)]
    shapes = (*q_lead, n_queries, width), (*k_lead, n_keys, width), (*v_lead, n_keys, v_width)
    each = zip(dtypes, shapes, strict=True)
    arrays = [draw(layouts(normal(rng, shape, dtype))) for dtype, shape in each]

    options = {"enable_gqa": enable_gqa, "is_causal": draw(st.booleans())}
    options["causal"] = draw(st.sampled_from([None, "upper_left", "lower_right"]))
    if options["causal"] == "lower_right":
        options["is_causal"] = False
    if draw(st.booleans()):
        mask = random_mask(
            rng, draw(sub_shapes((*lead, n_queries, n_keys))), draw(st.sampled_from([np.bool_, *FLOATS]))
        )
        options["attn_mask"] = draw(layouts(mask))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, 1, -0.5, 3.0, 0.01, 1e-30, np.float32(0.5)]))
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 20) | st.sampled_from([100, 2**63, 10**30, np.uint64(2**64 - 1)])
        options["window"] = draw(st.tuples(side, side) | st.lists(side, min_size=2, max_size=2))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([1e-3, 0.1, 1.0, 50, 1e6, 1e30]))
    for name in PER_HEAD:
        if draw(st.integers(0, 2)) == 0:
            per_head = np.asarray(normal(rng, draw(sub_shapes(lead)), draw(st.sampled_from(FLOATS))))
            options[name] = draw(layouts(np.asarray(per_head / per_head.dtype.type(4))))
    if draw(st.integers(0, 2)) == 0:
        lengths = rng.integers(
            0, n_keys + 1, size=draw(sub_shapes(lead)), dtype=draw(st.sampled_from(["i8", "u4", "i2"]))
        )
        options["key_lengths"] = draw(layouts(np.asarray(lengths)))
    if draw(st.integers(0, 3)) == 0:
        options["block_mask"] = draw(block_masks(lead, n_queries, n_keys))
    if draw(st.integers(0, 2)) == 0:
        options |= {
            "dropout_p": draw(st.sampled_from([0, 0.0, 0.1, 0.5, 0.999, 1, np.float32(1)])),
            "rng": draw(st.integers(0, 2**70)),
        }
    for name in sorted({*OTHERS} - DRAWN):
        if draw(st.integers(0, 2)) == 0:
            options |= OPTIONS[name](lead, n_queries, n_keys, rng)
    if "bias" in options and options.get("attn_mask", np.True_).dtype != np.bool_:
        del options["attn_mask"]
    return arrays, options


@examples(200)
@given(problems(), st.sampled_from(_core.available_isas()), st.sampled_from([None, 1, 2, 5]), st.data())
def test_good_arguments_agree_with_the_reference(problem, isa, num_threads, data):
    arrays, options = problem
    given_arrays = [x for x in (*arrays, *options.values()) if isinstance(x, np.ndarray)]
    before = [x.copy() for x in given_arrays]
    expected = truth(*arrays, **options)
    with using(isa):
        results = attend(*arrays, **options, return_lse=True, return_weights=True, num_threads=num_threads)
        assert_results(results, expected)
        around = np.zeros(results[0].shape, results[0].dtype)
        layout = data.draw(st.sampled_from(sorted({*LAYOUTS} - {"byte_swapped", "read_only"})))
        out = LAYOUTS[layout](around)
        assert attend(*arrays, **options, out=out) is out
        np.testing.assert_array_equal(out, results[0])
    np.testing.assert_equal(given_arrays, before)


@examples(100)
@given(problems(), st.sampled_from(_core.available_isas()), st.sampled_from([None, 1, 2, 5]), st.data())
def test_gradients_agree_with_the_reference(problem, isa, num_threads, data):
    arrays, options = problem
    rng = np.random.default_rng(len(options))
    with using(isa):
        out, lse = attend(*arrays, **options, return_lse=True)
        grad_out = data.draw(layouts(normal(rng, out.shape, out.dtype)))
        grad_lse = data.draw(st.none() | layouts(normal(rng, lse.shape, lse.dtype)))
        wrt = data.draw(st.sets(st.sampled_from(everything(options))))
        call = {"grad_out": grad_out, "grad_lse": grad_lse}
        whole = assert_gradients(arrays, options, num_threads=num_threads, **call)
        some, _ = gradients(arrays, options, num_threads=1, wrt=tuple(wrt), **call)
        same, _ = gradients(arrays, options, num_threads=num_threads, wrt=tuple(wrt), **call)
    assert all((getattr(some, name) is None) == (name not in wrt) for name in FIELDS)
    for name in wrt:  # neither threads nor other names in wrt change a bit
        np.testing.assert_array_equal(getattr(same, name), getattr(some, name), err_msg=name)
        np.testing.assert_array_equal(getattr(some, name), getattr(whole, name), err_msg=name)


# ----------------------------------------------------------------------------------------- anything whatever


NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, 5e-324]),
    st.floats(),
    st.complex_numbers(),
    st.booleans(),
    st.sampled_from(
        [np.float32(0.5), np.int8(2), np.True_, np.array(3.0), np.array([1.0]), np.datetime64("nat")]
    ),
)
DTYPES = [
    *["f2", "f4", "f8", "i1", "u8", "?", "c8", "O", "U2", "S3", "M8[s]", "m8[s]", "g", "V4", ">f4", ">i2"],
    BFLOAT16,
]
BASE = np.zeros(4096, np.uint8)
HUGE = [(2**33, 2**20), (2**20, 2**33), (2**50, 1), (2**40, 2**9, 3), (2**40, 0), (0, 2**50, 4)]


@st.composite
def any_arrays(draw):
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 7]), max_size=6)))
    kind = draw(st.integers(0, 9))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    if kind <= 4:
        x = np.zeros(shape, dtype)
        if dtype.kind == "f":
            x[...] = np.random.default_rng(0).random(shape)
    elif kind == 5:  # zero strides of huge lengths, over which a loop would never end
        x = np.broadcast_to(np.zeros((), dtype), draw(st.sampled_from(HUGE)))
    elif kind == 6 and dtype.kind in "fiu":  # any strides within memory
        strides = tuple(draw(st.integers(-9, 9)) for _ in shape)
        x = np.lib.stride_tricks.as_strided(BASE[2000:2016].view(dtype)[:1], shape, strides, writeable=False)
    elif kind == 7:
        x = np.ma.zeros(shape, np.float32)
    elif kind == 8:
        return np.zeros(shape).tolist()
    else:
        x = draw(layouts(np.zeros(shape, np.float32)))
    return x


@st.composite
def arrays_that_nearly_fit(draw):
    """Query, key and value that fit, except that sometimes one size of one of them is wrong."""
    shapes = [[2, 3, 4], [2, 5, 4], [2, 5, 6]]
    if draw(st.booleans()):
        shapes[draw(st.integers(0, 2))][draw(st.integers(0, 2))] = draw(st.integers(0, 6))
    if draw(st.booleans()):
        shapes[draw(st.integers(0, 2))] = shapes[0][: draw(st.integers(0, 3))]
    return [np.ones(shape, draw(st.sampled_from(["f4", "f8", "f2", "i4", "?"]))) for shape in shapes]


ANYTHING = st.one_of(
    any_arrays(),
    NUMBERS,
    st.none(),
    st.text(max_size=3),
    st.sampled_from(["upper_left", "lower_right", object(), ()]),
    st.binary(max_size=2),
    st.lists(NUMBERS, max_size=3),
    st.tuples(NUMBERS, NUMBERS),
    st.builds(np.random.default_rng),
)


# ----------------------------------------------------------------------------------------- tables of block masks

L, S = 70, 130  # two blocks of queries, three tiles of keys


def prefix_table(rng):
    lead = [(), (2,), (1,)][rng.integers(3)]
    return [rng.integers(0, S + 1, lead), int(rng.integers(-S, S)), rng.random()]


def table_of_runs(rng):
    """Classes of rows, and rising runs of keys for each class."""
    n_classes, rows = rng.integers(1, 5), int(rng.choice([1, 1, 7, 64, 69, 70, 71, 2**62]))
    starts, runs = [0], []
    for _ in range(n_classes):
        runs += np.sort(rng.permutation(S + 9)[: 2 * rng.integers(4)]).reshape(-1, 2).tolist()
        starts.append(len(runs))
    lead = [(), (2,), (1,)][rng.integers(3)]
    classes = rng.integers(n_classes, size=(*lead, -(-L // rows)))
    return [classes, rows, np.array(starts), np.array(runs, np.int64).reshape(-1, 2), rng.random()]


FAR = [-(2**63), -1, 0, 1, S + 1, 2**40, 2**60, 2**60 + 1, 2**62, 2**63 - 1]
WRONG = [np.nan, -0.1, 1.1, np.inf, None, (), [3], "x", 2**63, np.int64(1), np.zeros(3, np.int64)]
OTHERWISE = [
    lambda x: x[..., :-1],
    lambda x: x[:-1],
    lambda x: x[::-1],
    lambda x: x[None],
    lambda x: np.concatenate([x, x], axis=-1),
    lambda x: np.concatenate([x, x], axis=0),
    lambda x: np.broadcast_to(x, (2, *x.shape)),
    lambda x: x.astype(np.int32),
    lambda x: x.astype(">i8"),
    lambda x: x.astype("M8[s]"),
    unaligned,
    np.ndarray.tolist,
]


def spoil(draw, table):
    """Change a number, or a whole array; the table may still be valid."""
    at = draw(st.integers(0, len(table) - 1))
    x, by = table[at], draw(st.sampled_from(["a number", "a number", "the whole", "anything"]))
    if by == "anything":
        table[at] = draw(st.sampled_from(WRONG))
    elif not isinstance(x, np.ndarray):
        table[at] = draw(st.sampled_from([x - 1, x + 1, *FAR]))
    elif by == "a number" and x.size and x.dtype == np.int64:
        table[at] = x = x.copy()
        index = draw(st.integers(0, x.size - 1))
        n = int(x.flat[index])
        x.flat[index] = draw(st.sampled_from([max(n - 1, -(2**63)), min(n + 1, 2**63 - 1), *FAR]))
    elif x.ndim:
        table[at] = draw(st.sampled_from(OTHERWISE))(x)


@st.composite
def any_tables(draw):
    """Draw tables as BlockMask makes them, with up to two changes, or with any content."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = [
        draw(st.sampled_from([prefix_table, table_of_runs]))(rng) for _ in range(draw(st.integers(0, 4)))
    ]
    for _ in range(draw(st.integers(0, 2)) if tables else 0):
        table = draw(st.sampled_from(tables))
        if all(isinstance(x, np.ndarray | int | float) and np.asarray(x).dtype.kind in "if" for x in table):
            spoil(draw, table)
    given = tuple(map(tuple, tables))
    if draw(st.integers(0, 19)) == 0:
        return draw(
            st.sampled_from([list(given), None, (None,), ((),), given * 5, (*given, (1, 2)), (tables,)])
        )
    return given


def meaning(tables):
    """Return the dense mask of tables that the core accepted."""
    opened = np.ones((2, L, S), bool)
    j = np.arange(S)
    for table in tables:
        if len(table) == 3:
            lengths, diagonal, _ = table
            mine = (j < lengths[..., None, None]) | (j <= np.arange(L)[:, None] + diagonal)
        else:
            classes, rows, starts, runs, _ = table
            of_class = [
                np.any([(j >= lo) & (j < hi) for lo, hi in runs[start:end]] or [j < 0], axis=0)
                for start, end in pairwise(starts)
            ]
            mine = np.array(of_class)[classes[..., np.arange(L) // rows]]
        opened &= mine
    return opened


@examples(300)
@given(any_tables(), st.sampled_from(_core.available_isas()), st.sampled_from([1, 2]))
def test_tables_of_block_masks_are_refused_or_mean_what_they_say(tables, isa, num_threads):
    """The core does not read beyond tables: accepted tables act as the dense mask of the same keys, forward and
    backward.
    """
    arrays = np.random.default_rng(0).standard_normal((3, 2, L, 8))
    query, key, value = arrays[0], *np.random.default_rng(1).standard_normal((2, 2, S, 8))
    call = {"block_mask": with_tables(tables), "num_threads": num_threads}
    with using(isa):
        try:
            out, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, **call)
        except (TypeError, ValueError, OverflowError) as error:
            event("refused")
            assert str(error)
            return
        event("let through")
        mask = meaning(tables)
        assert_results(
            attend(query, key, value, **call, return_lse=True, return_weights=True),
            truth(query, key, value, mask),
        )
        dense, of_dense = sa.scaled_dot_product_attention_vjp(query, key, value, mask)
        np.testing.assert_allclose(out, dense, rtol=0, atol=1e-12)
        for got, expected in zip(pullback(arrays[1])[:3], of_dense(arrays[1])[:3], strict=True):
            # sums of up to 130 terms below 100, with a rounding each, in another order
            np.testing.assert_allclose(got, expected, rtol=0, atol=130 * 100 * 2.0**-52)


OPTION_NAMES = list(inspect.signature(attend).parameters)[3:]
MASK_SIZES = st.tuples(st.sampled_from([(), (2,), (3,)]), st.integers(2, 4), st.integers(4, 6))  # some fit
LIKELY = {
    "dropout_p": NUMBERS,
    "scale": NUMBERS,
    "softcap": NUMBERS,
    "num_threads": NUMBERS,
    "rng": NUMBERS,
    "block_mask": st.one_of(
        MASK_SIZES.flatmap(lambda sizes: block_masks(*sizes)), st.builds(with_tables, any_tables())
    ),
    "window": st.tuples(NUMBERS, NUMBERS),
    "key_lengths": st.lists(st.integers(-1, 6), max_size=3),
    "out": st.sampled_from(
        [np.zeros((2, 3, 6), np.float32), np.zeros((2, 3, 6)), np.zeros((3, 6), np.float16)]
    ),
}


@pytest.mark.filterwarnings("ignore")
@examples(400)
@given(
    st.one_of(arrays_that_nearly_fit(), arrays_that_nearly_fit(), st.lists(ANYTHING, max_size=7)),
    st.dictionaries(st.sampled_from(OPTION_NAMES), st.none(), max_size=4),
    st.data(),
)
def test_no_arguments_crash(positional, options, data):
    options = {name: data.draw(LIKELY.get(name, ANYTHING) | ANYTHING, label=name) for name in options}
    out = options.get("out")
    watched = isinstance(out, np.ndarray) and not out.dtype.hasobject and out.size < 2**16
    before = out.tobytes() if watched else None
    try:
        result = attend(*positional, **options)
    except (TypeError, ValueError, MemoryError) as error:
        assert str(error)
        if watched:
            assert out.tobytes() == before
    else:
        first = result[0] if isinstance(result, tuple) else result
        assert isinstance(first, np.ndarray)
