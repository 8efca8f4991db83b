"""What language models share: a pass with a cache of keys and values, against the reference and against itself."""

import numpy as np
import pytest
from drawn_transformers import drawn
from inputs import read_only

from selfattn import _core, reference
from selfattn.engine import transformer
from selfattn.engine.decoder import Decoder
from selfattn.engine.weights import Compact, rounded

LONGEST = 90  # more than a tile of keys, and than the cache's first capacity


def decoder(seed, dtype=np.float32, **sizes):
    """Return a decoder with drawn settings; a layer's settings differ between seeds."""
    model, _, _ = drawn(seed, dtype, lengths=(LONGEST,), **sizes)
    layer = model.layers[0]._replace(causal=True)
    rng = np.random.default_rng(seed)
    d = layer.query.weight.shape[1]
    model = model._replace(
        layers=(layer, layer), table=rng.standard_normal((11, d)).astype(dtype),
        positions=rng.standard_normal((LONGEST, d)).astype(dtype) if seed % 3 == 0 else None,
        mask=None, key_bias=None, pooling=None,
    )  # fmt: skip
    bias = rng.standard_normal(11).astype(dtype) if seed % 2 else None
    return Decoder(model, model.table, bias, max_seq_len=LONGEST)


def drawn_ids(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, 11, n) for n in lengths]


def in_pieces(model, ids, cuts):
    """Return the hidden rows of sequences that enter a cache piece by piece, all sequences at once."""
    cache = model.new_cache(len(ids))
    rows = [[] for _ in ids]
    for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
        at = [[round(cut * len(own)) for cut in (begin, 1 if end is None else end)] for own in ids]
        pieces = [own[a:b] for own, (a, b) in zip(ids, at, strict=True)]
        for own, new in zip(rows, model.hidden(pieces, cache), strict=True):
            own.append(new)
    assert cache.lengths.tolist() == [len(own) for own in ids]
    return [np.concatenate(own) for own in rows]


@pytest.mark.parametrize(("seed", "dtype"), [(n, (np.float32, np.float64)[n % 5 == 4]) for n in range(12)])
def test_with_a_cache_and_without(seed, dtype, isa):
    model = decoder(seed, dtype)
    ids = drawn_ids(LONGEST, 4, 33)
    whole = model.hidden(ids)
    for own, rows in zip(ids, whole, strict=True):
        truth = reference.transformer(model.model, own, [0, len(own)], np.float64)
        # Up to 90 terms, in up to eight products one after the other, in each of two layers.
        atol = 2048 * np.finfo(dtype).eps * max(1, np.abs(truth).max())
        np.testing.assert_allclose(rows, truth, rtol=0, atol=atol)
    for got, expected in zip(in_pieces(model, ids, [0.3, 0.75]), whole, strict=True):
        # The same products; attention sums the same terms in another order.
        atol = 256 * np.finfo(dtype).eps * max(1, np.abs(expected).max())
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [None, "int8", "bfloat16"])
def test_bits_do_not_depend_on_company_or_threads(seed, kind, threads_restored):
    model = decoder(seed, d=12)
    if kind is not None:
        if _core._compact_unit(kind == "int8") is None:
            pytest.skip("this CPU has no products of bfloat16")
        model = compact(model, kind)
    ids = drawn_ids(70, 4, LONGEST, 9, 33)
    _core.set_num_threads(2)
    together = in_pieces(model, ids, [0.3, 0.75])
    _core.set_num_threads(1)
    np.testing.assert_equal([in_pieces(model, [own], [0.3, 0.75])[0] for own in ids], together)


def compact(model, kind):
    """Round all weights of products, and the table."""

    def of(weight):
        return Compact(*rounded("a weight", np.ascontiguousarray(weight), kind))

    def layer(one):
        if one.key is None:  # one projection for query, key and value
            heads = np.array([one.num_heads, one.num_key_heads, one.num_key_heads])
            cuts = np.cumsum(heads * (len(one.query.weight) // heads.sum()))[:2]
            bias = one.query.bias
            biases = [None] * 3 if bias is None else [own.copy() for own in np.split(bias, cuts)]
            made = map(transformer.Projection, np.split(one.query.weight, cuts), biases)
            one = one._replace(**dict(zip(("query", "key", "value"), made, strict=True)))
        return transformer.Layer(
            *(x._replace(weight=of(x.weight)) if isinstance(x, transformer.Projection) else x for x in one)
        )

    own = model.model
    own = own._replace(layers=tuple(map(layer, own.layers)), table=of(own.table))
    return Decoder(own, own.table, max_seq_len=LONGEST)


def test_logits_of_the_next_token():
    model = decoder(1)
    ids = drawn_ids(30, 2)
    cache = model.new_cache(2)
    first = model.next_logits([own[:-1] for own in ids], cache)
    last = model.next_logits([own[-1:] for own in ids], cache)
    for n, own in enumerate(ids):
        logits = model.logits(own)
        assert (logits.shape, logits.dtype) == ((len(own), 11), np.float32)
        rows = model.hidden([own])[0]
        expected = rows.astype(np.float64) @ model.model.table.T.astype(np.float64) + model._head_bias
        # Sums of up to 12 terms.
        size = np.abs(rows) @ np.abs(model.model.table).T + np.abs(model._head_bias)
        assert (np.abs(logits - expected) <= 8 * np.finfo(np.float32).eps * size).all()
        atol = 256 * np.finfo(np.float32).eps * size.max()
        np.testing.assert_allclose([first[n], last[n]], logits[-2:], rtol=0, atol=atol)


def test_sequences_leave_and_change_places():
    model = decoder(2)
    ids = drawn_ids(20, 7, LONGEST, 50)
    cache = model.new_cache(4)
    model.next_logits([own[:-3] for own in ids], cache)
    cache.keep([3, 0, 0])
    assert cache.lengths.tolist() == [47, 17, 17]
    got = model.next_logits([ids[3][-3:], ids[0][-3:], ids[0][-3:]], cache)
    for row, n in zip(got, (3, 0, 0), strict=True):
        alone = model.new_cache(1)
        model.next_logits([ids[n][:-3]], alone)
        np.testing.assert_array_equal(row, model.next_logits([ids[n][-3:]], alone)[0])
    cache.keep([])
    assert len(cache) == 0
    assert model.next_logits([], cache).shape == (0, 11)


def test_a_cache_grows_up_to_the_longest_sequence():
    model = decoder(3)
    cache = model.new_cache(2)
    assert cache.bytes == 0
    (own,) = drawn_ids(LONGEST)
    sizes = []
    for token in own:
        model.next_logits([[token], [token]], cache)
        sizes.append(cache.keys.shape[3])
    assert sorted(set(sizes)) == [64, LONGEST]
    assert cache.bytes == 2 * cache.keys.nbytes
    with pytest.raises(
        ValueError, match="0 would have 91 tokens, 90 of them in the cache; max_seq_len is 90"
    ):
        model.next_logits([[1], [1]], cache)
    assert cache.lengths.tolist() == [LONGEST] * 2


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[1], []], ValueError, "sequence 1 is empty"),
        ([[1], [[1]]], ValueError, r"ids of sequence 1 must have shape \(L,\), not \(1, 1\)"),
        ([[1], [1.5]], TypeError, "ids of sequence 1 must be integers, got float64"),
        ([[1], [11]], ValueError, r"ids must be in 0\.\.\.10, sequence 1 has 11"),
        ([[1], [-1]], ValueError, r"ids must be in 0\.\.\.10, sequence 1 has -1"),
        ([[1]], ValueError, "the cache has 2 sequences, and there are ids of 1"),
        ([[1], [1] * 91], ValueError, "sequence 1 would have 92 tokens, 1 of them in the cache; max_seq_len"),
    ],
)
def test_bad_ids_leave_the_cache_as_it_was(ids, error, message):
    model = decoder(0)
    cache = model.new_cache(2)
    model.next_logits([[1, 2], [3]], cache)
    with pytest.raises(error, match=message):
        model.next_logits(ids, cache)
    assert cache.lengths.tolist() == [2, 1]


def test_bad_indices():
    cache = decoder(0).new_cache(2)
    for indices in ([2], [-1], [[0]]):
        with pytest.raises(ValueError, match="indices must be those of 2 sequences"):
            cache.keep(indices)


def test_the_core_refuses_caches_that_do_not_fit():
    """The Python code passes no such cache."""
    model = decoder(0)
    cache = model.new_cache(1)
    model.next_logits([[1, 2]], cache)
    ids, starts = np.array([1]), np.array([0, 1])

    def run(keys=cache.keys, values=cache.values, past=cache.lengths, core=model._core_model, keep=False):
        _core._transformer_forward(ids, starts, core, keep, (keys, values, past))

    run()
    sizes = cache.keys[:, :, :, :32], np.zeros(cache.keys.shape), cache.keys[:1].copy()
    for bad in (*sizes, read_only(cache.keys.copy()), None):
        with pytest.raises(ValueError, match="keys and values must be writable"):
            run(keys=bad)
    with pytest.raises(ValueError, match="keys and values must be writable"):
        run(values=np.zeros((*cache.keys.shape[:3], 65, cache.keys.shape[4]), np.float32))
    for past in (np.array([-1]), np.array([64]), np.array([2**63 - 1])):
        with pytest.raises(ValueError, match="there is room for 64"):
            run(past=past)
    for past in (np.array([0, 1]), np.array([1.0]), None):
        with pytest.raises(ValueError, match="past must be"):
            run(past=past)
    with pytest.raises(ValueError, match="has no gradients"):
        run(keep=True)
    looks_ahead = model.model._replace(layers=(model.model.layers[0]._replace(causal=False),) * 2)
    with pytest.raises(ValueError, match="layers with a cache are causal"):
        run(core=transformer.as_core(looks_ahead))
    with pytest.raises(TypeError, match="a cache must be a tuple"):
        _core._transformer_forward(ids, starts, model._core_model, False, (cache.keys,))
