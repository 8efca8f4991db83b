"""KVCache: decoding step by step is attention over everything at once."""

import copy
import functools
import itertools
import pickle
import re

import numpy as np
import pytest
from before_tests import examples
from hypothesis import given
from hypothesis import strategies as st
from inputs import FLOAT_IDS, FLOATS
from leaks import peak_memory

import selfattn as sa
from selfattn import _core, reference

EPS = float(np.finfo(np.float64).eps)
dense = functools.partial(reference.scaled_dot_product_attention, causal="lower_right", enable_gqa=True)


def arrays(seed=0, batch=2, heads=4, kv_heads=2, length=12, width=8, value_width=5):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, heads, length, width))
    return query, *(rng.standard_normal((batch, kv_heads, length, w)) for w in (width, value_width))


def new_cache(k, v, **options):
    return sa.KVCache(k.shape[0], k.shape[1], k.shape[3], value_dim=v.shape[3], dtype=k.dtype, **options)


@st.composite
def histories(draw):
    batch = draw(st.integers(1, 3))
    counts = st.lists(st.integers(0, 3), min_size=batch, max_size=batch)
    options = {
        "window": st.sampled_from([(0, 0), (2, 0), (None, 0), (3, None)]),
        "softcap": st.just(1.5),
        "alibi_slopes": st.sampled_from([[0.5, 1.0, 0.25, 2.0], np.linspace(0, 1, 12).reshape(3, 4)]),
        "sinks": st.sampled_from([[0.0, 1.0, -1.0, -np.inf], np.linspace(-1, 1, 12).reshape(3, 4)]),
        "scale": st.just(0.7),
    }
    steps = draw(st.lists(counts, min_size=1, max_size=5))
    return batch, np.array(steps), draw(st.fixed_dictionaries({}, optional=options))


@examples(150)
@given(histories(), st.integers(0, 2**32 - 1))
def test_sequences_of_different_lengths_are_as_if_each_were_alone(history, seed):
    batch, steps, options = history
    options = {n: x[:batch] if isinstance(x, np.ndarray) else x for n, x in options.items()}
    total = int(steps.sum(axis=0).max())
    q, k, v = arrays(seed, batch=batch, length=max(total, 1))
    cache, at = new_cache(k, v), np.zeros(batch, int)
    for counts in steps:
        most = int(counts.max())
        new = [np.full((batch, x.shape[1], most, x.shape[3]), np.nan) for x in (q, k, v)]
        for b, count in enumerate(counts):
            for x, y in zip(new, (q, k, v), strict=True):
                x[b, :, :count] = y[b, :, at[b] : at[b] + count]
        out, lse = cache.attend(*new, lengths=counts, return_lse=True, **options)
        for b, count in enumerate(counts):
            end = at[b] + count
            own = {n: x[b] if isinstance(x, np.ndarray) else x for n, x in options.items()}
            past = q[b, :, at[b] : end], k[b, :, :end], v[b, :, :end]
            expected, expected_lse = dense(*past, return_lse=True, **own)
            np.testing.assert_allclose(out[b, :, :count], expected, rtol=0, atol=60 * EPS)
            np.testing.assert_allclose(lse[b, :, :count], expected_lse, rtol=0, atol=60 * EPS)
            assert (out[b, :, count:] == 0).all()
            assert (lse[b, :, count:] == -np.inf).all()
        at += counts
    np.testing.assert_array_equal(cache.lengths, at)


@pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
def test_dtypes(dtype):
    q, k, v = (x.astype(dtype) for x in arrays())
    cache = new_cache(k, v)
    cache.append(k, v)
    assert cache.attend(q).dtype == dtype
    np.testing.assert_array_equal(
        cache.attend(q), sa.scaled_dot_product_attention(q, k, v, causal="lower_right", enable_gqa=True)
    )


@pytest.mark.parametrize(
    ("lengths", "queries"), [([5000], [1]), ([300, 120, 200], [90, 7, 0])], ids=["one long", "ragged"]
)
def test_the_same_bits_for_any_number_of_threads(lengths, queries):
    q, k, v = arrays(batch=len(lengths), length=lengths[0], width=16, value_width=16)
    cache = new_cache(k, v)
    cache.append(k, v, lengths=lengths)
    calls = [cache.attend(q[:, :, : queries[0]], lengths=queries, num_threads=n) for n in (1, 2, 3, 7)]
    np.testing.assert_equal(calls, [calls[0]] * 4)


def test_the_core_refuses_wrong_lengths():
    q, k, v = arrays()
    call = {"causal": "lower_right", "enable_gqa": True, "key_lengths": [[12], [3]]}
    for lengths, error in {(13, 1): ValueError, (-1, 1): ValueError, (0.5, 1): TypeError}.items():
        with pytest.raises(error, match="query_lengths"):
            _core._cached_attention(q, k, v, query_lengths=np.array(lengths)[:, None], **call)
    with pytest.raises(ValueError, match="query_lengths"):
        _core._cached_attention(q, k, v, query_lengths=[1, 2], **call)
    with pytest.raises(TypeError, match="query_lengths"):
        _core._cached_attention(q, k, v, **call)
    out = _core._cached_attention(q, k, v, query_lengths=[[0], [12]], **call)  # more queries than keys
    assert not out[0].any() and not out[1, :, :9].any() and out[1, :, 9:].all()


@pytest.mark.parametrize("options", [{}, {"sinks": np.array([0.5, -1.0])}], ids=str)
def test_queries_before_the_first_key_of_their_sequence(options):
    """By the lower-right diagonal these queries see no key: more queries than keys are not an error."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 2, 4, 8))
    q = rng.standard_normal((2, 2, 6, 8))
    cache = sa.KVCache(2, 2, 8, dtype=np.float64)
    cache.append(k, v, lengths=[4, 1])
    out, lse = cache.attend(q, return_lse=True, **options)
    for b, n in enumerate((4, 1)):
        expected, expected_lse = dense(q[b], k[b, :, :n], v[b, :, :n], return_lse=True, **options)
        np.testing.assert_allclose(out[b], expected, rtol=0, atol=40 * EPS)
        np.testing.assert_allclose(lse[b], expected_lse, rtol=0, atol=40 * EPS)
        assert not out[b, :, : 6 - n].any()


def test_appending_copies_little():
    """The room doubles, so appending 4096 tokens one by one copies fewer than 4096 tokens."""
    k = np.zeros((1, 1, 1, 64))
    cache = sa.KVCache(1, 1, 64, dtype=np.float64)
    grown = 0
    for _ in range(4096):
        before = cache.capacity
        cache.append(k, k)
        if cache.capacity != before:
            grown += before
    assert grown < 4096
    assert cache.capacity <= 2 * 4096
    cache = sa.KVCache(1, 1, 64, dtype=np.float64, capacity=8193)
    assert peak_memory(lambda: [cache.append(k, k) for _ in range(4096)]) < cache.nbytes / 20


@pytest.mark.parametrize("capacity", [2**50, 2**62])
def test_more_room_than_there_is(capacity):
    with pytest.raises(
        MemoryError, match=rf"{64 * capacity} bytes for float64 of shape \(1, 2, {capacity}, 4\)"
    ):
        sa.KVCache(1, 2, 4, dtype=np.float64, capacity=capacity)


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("method", ["append", "attend", "reorder"])
def test_no_memory_leaves_the_cache_as_it_was(monkeypatch, method, failing):
    """Keys and values grow or are reordered together, even if there is memory for only one of them."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1, 17, 4), dtype=np.float32)
    cache = sa.KVCache(2, 1, 4)
    cache.append(k[:, :, :16], v[:, :, :16])
    more = [x[:, :, 16:] for x in (q, k, v)]
    make, calls = sa.functional.kv_cache._aligned, itertools.count(1)

    def aligned(shape, dtype):
        if next(calls) == failing:
            raise MemoryError("none left")
        return make(shape, dtype)

    monkeypatch.setattr(sa.functional.kv_cache, "_aligned", aligned)
    with pytest.raises(MemoryError, match="none left"):
        getattr(cache, method)(*{"append": more[1:], "attend": more, "reorder": [[1, 0]]}[method])
    assert cache.lengths.tolist() == [16, 16] and cache.capacity == 16
    cache.append(*more[1:])
    cache.reorder([1, 0])
    np.testing.assert_array_equal(cache.key, k[::-1])
    np.testing.assert_array_equal(cache.value, v[::-1])


def test_appending_writes_the_new_tokens_and_nothing_else():
    """Appending neither moves the arrays nor changes other numbers in them."""
    _, k, v = arrays(length=12)
    cache = new_cache(k, v, capacity=12)
    addresses = cache.key.ctypes.data, cache.value.ctypes.data
    for step, counts in enumerate([[3, 3], [1, 2], [4, 0], [2, 2]]):
        start, most = cache.lengths, max(counts)
        held = [x.copy() for x in (cache._key, cache._value)]
        cache.append(k[:, :, :most] + step, v[:, :, :most] + step, lengths=counts)
        assert (cache.key.ctypes.data, cache.value.ctypes.data) == addresses
        for mine, old, new in zip((cache._key, cache._value), held, (k, v), strict=True):
            for b, count in enumerate(counts):
                own = slice(start[b], start[b] + count)
                np.testing.assert_array_equal(mine[b, :, own], new[b, :, :count] + step)
                old[b, :, own] = mine[b, :, own]
            assert mine.tobytes() == old.tobytes()


def test_ragged_steps_are_one_call(monkeypatch):
    q, k, v = arrays(batch=3)
    cache, calls, real = new_cache(k, v), [], sa.functional.kv_cache._cached_attention
    monkeypatch.setattr(
        sa.functional.kv_cache, "_cached_attention", lambda *a, **o: calls.append(1) or real(*a, **o)
    )
    cache.append(k[:, :, :6], v[:, :, :6], lengths=[6, 2, 0])
    cache.attend(*(x[:, :, 6:9] for x in (q, k, v)), lengths=[3, 1, 2], window=(2, 0))
    assert calls == [1]


def test_a_mask_closes_more():
    q, k, v = arrays()
    cache = new_cache(k, v)
    cache.append(k[:, :, :8], v[:, :, :8], lengths=[8, 3])
    mask = np.random.default_rng(1).random((2, 1, 4, 12)) < 0.6
    out = cache.attend(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:], attn_mask=mask)
    for b, past in enumerate((8, 3)):
        keys, values = (np.concatenate([x[b, :, :past], x[b, :, 8:]], axis=1) for x in (k, v))
        expected = dense(q[b, :, 8:], keys, values, mask[b, :, :, : past + 4])
        np.testing.assert_allclose(out[b], expected, rtol=0, atol=40 * EPS)


def test_truncate_and_reorder():
    q, k, v = arrays(length=6)
    cache = new_cache(k, v)
    cache.append(k, v, lengths=[6, 4])
    cache.reorder([1, 1])
    np.testing.assert_array_equal(cache.lengths, [4, 4])
    np.testing.assert_array_equal(cache.key[0], k[1, :, :4])
    cache.truncate([3, 0])
    np.testing.assert_array_equal(cache.lengths, [3, 0])
    out = cache.attend(q[:, :, :2], k[:, :, :2], v[:, :, :2])
    keys = np.concatenate([k[1, :, :3], k[0, :, :2]], axis=1)
    values = np.concatenate([v[1, :, :3], v[0, :, :2]], axis=1)
    np.testing.assert_allclose(out[0], dense(q[0, :, :2], keys, values), rtol=0, atol=40 * EPS)
    cache.truncate(0)
    assert cache.key.shape == (2, 2, 0, 8)
    assert not cache.key.flags.writeable


K, V = np.zeros((2, 2, 3, 8), np.float32), np.zeros((2, 2, 3, 5), np.float32)
Q = np.zeros((2, 4, 3, 8), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: sa.KVCache(0, 1, 1), ValueError, "batch_size must be at least 1, not 0"),
        (lambda c: sa.KVCache(1, True, 1), TypeError, "num_kv_heads must be an int, not True"),
        (lambda c: sa.KVCache(1, 1, 8.0), TypeError, "head_dim must be an int, not 8.0"),
        (
            lambda c: sa.KVCache(1, 1, 8, dtype=int),
            TypeError,
            "dtype must be float16, bfloat16, float32 or float64",
        ),
        (
            lambda c: sa.KVCache(1, 1, 8, dtype=None),
            TypeError,
            "dtype must be float16, bfloat16, float32 or float64, got None",
        ),
        (
            lambda c: sa.KVCache(1, 1, 8, dtype="(2,"),
            TypeError,
            "dtype must be float16, bfloat16, float32 or float64, got '(2,'",
        ),
        (
            lambda c: sa.KVCache(1, 1, 8, dtype=[1]),
            TypeError,
            "dtype must be float16, bfloat16, float32 or float64, got [1]",
        ),
        (
            lambda c: sa.KVCache(2**70, 1, 8),
            MemoryError,
            "cannot allocate 9444732965739290427392 bytes for int64 of shape",
        ),
        (
            lambda c: sa.KVCache(1, 2**40, 2**40),
            MemoryError,
            "cannot allocate 0 bytes for float32 of shape (1, 1099511627776, 0,",
        ),
        (
            lambda c: sa.KVCache(1, 1, 8, dtype=">f4"),
            TypeError,
            "dtype must be in native byte order, got >f4",
        ),
        (
            lambda c: sa.KVCache(2, 2, 8, dtype="bfloat16").append(K.astype(np.float16), K),
            TypeError,
            "key is float16, which a cache of bfloat16 does not hold without loss",
        ),
        (lambda c: c.append(K[:1], V), ValueError, "key must have shape (2, 2, n, 8), got (1, 2, 3, 8)"),
        (lambda c: c.append(K, K), ValueError, "value must have shape (2, 2, n, 5), got (2, 2, 3, 8)"),
        (lambda c: c.append(K, V[:, :, :1]), ValueError, "differ in how many tokens they bring"),
        (lambda c: c.append(K.astype(float), V), TypeError, "key is float64, which a cache of float32"),
        (lambda c: c.append(K, V.astype(bool)), TypeError, "value is bool, which a cache of float32"),
        (lambda c: c.append(np.ma.array(K), V), TypeError, "key is a MaskedArray"),
        (lambda c: c.append(K, V, lengths=[1.0, 2.0]), TypeError, "lengths must be integers, got float64"),
        (
            lambda c: c.append(K, V, lengths=[4, 0]),
            ValueError,
            "lengths must be between 0 and n = 3, got [4, 0]",
        ),
        (lambda c: c.append(K, V, lengths=[1]), ValueError, "lengths must have shape (2,) or (), got (1,)"),
        (lambda c: c.attend(Q, K), ValueError, "one of them is missing"),
        (
            lambda c: c.attend(Q[:, :3], K, V),
            ValueError,
            "query must have shape (2, a multiple of 2, n, 8), got (2, 3, 3, 8)",
        ),
        (lambda c: c.attend(Q[:, :, :2], K, V), ValueError, "differ in how many tokens they bring"),
        (lambda c: c.attend(Q, K, V, softcap=-1), ValueError, "softcap"),
        (lambda c: c.attend(Q, K, V, window=3), TypeError, "window"),
        (lambda c: c.truncate([4, 0]), ValueError, "lengths must be between 0 and [3, 2], got [4, 0]"),
        (lambda c: c.reorder([0, 2]), ValueError, "indices must be between 0 and 1, got [0, 2]"),
    ],
)
def test_bad_input_says_what_is_wrong_and_changes_nothing(call, error, message):
    cache = sa.KVCache(2, 2, 8, value_dim=5)
    cache.append(K + 1, V + 1, lengths=[3, 2])
    with pytest.raises(error, match=re.escape(message)):
        call(cache)
    np.testing.assert_array_equal(cache.lengths, [3, 2])
    assert (cache.key[0] == 1).all()
    assert (cache.key[1, :, :2] == 1).all()


def test_the_arrays_begin_with_a_cache_line():
    cache = sa.KVCache(2, 3, 16, dtype=np.float16, capacity=5)
    rng = np.random.default_rng(0)
    for step in range(3):
        new = rng.standard_normal((2, 3, 7, 16)).astype(np.float16)
        cache.append(new, -new)
        if step == 2:
            cache.reorder([1, 0])
        assert cache.key.ctypes.data % 64 == 0 and cache.value.ctypes.data % 64 == 0
    np.testing.assert_array_equal(cache.key[:, :, 14:], new[::-1])


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_has_tokens_of_its_own(again):
    """Keys that two caches shared would be overwritten without an error."""
    cache = sa.KVCache(2, 1, 3, capacity=8)
    cache.append(*np.zeros((2, 2, 1, 3, 3), np.float32), lengths=[3, 1])
    other = again(cache)
    cache.append(*np.full((2, 2, 1, 1, 3), 1, np.float32))
    other.append(*np.full((2, 2, 1, 1, 3), 2, np.float32))
    assert [float(cache.key[0, 0, 3, 0]), float(cache.value[1, 0, 1, 0])] == [1, 1]
    assert [float(other.key[0, 0, 3, 0]), float(other.value[1, 0, 1, 0])] == [2, 2]
