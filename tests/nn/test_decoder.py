"""Language models: a pass with a cache of keys and values, against the reference and itself; generation from any
decoder.

Probabilities are compared with those of Transformers' processors. The decoder whose generation is tested is a
function of all tokens so far, so that a cache that keeps the wrong sequences shows.
"""

import itertools

import numpy as np
import pytest
from before_tests import examples
from drawn_transformers import drawn
from hypothesis import given
from hypothesis import strategies as st
from inputs import read_only
from refusals import refusals

from selfattn import _core, reference
from selfattn.engine import transformer
from selfattn.engine.decoder import Decoder, shared_beginnings
from selfattn.engine.sampling import Sampler, generate, log_probabilities, probabilities, sampling
from selfattn.engine.weights import Compact, to_kind

LONGEST = 90  # more than a tile of keys, and than the cache's first capacity


def decoder(seed, dtype=np.float32, **sizes):
    """Return a decoder with drawn settings; a layer's settings differ between seeds."""
    model, *_ = drawn(seed, dtype, lengths=(LONGEST,), **sizes)
    layer = model.layers[0]._replace(causal=True)
    rng = np.random.default_rng(seed)
    d = layer.query.weight.shape[1]
    model = model._replace(
        layers=(layer, layer),
        table=rng.standard_normal((11, d)).astype(dtype),
        positions=rng.standard_normal((LONGEST, d)).astype(dtype) if seed % 3 == 0 else None,
        token_type_row=None,
        table_factor=1.5 if seed % 3 == 1 else None,
        position_bias=None,
    )
    return Decoder(model, model.table, max_seq_len=LONGEST)


def drawn_ids(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, 11, n) for n in lengths]


def in_pieces(model, ids, cuts, prompt=False):
    """Return the hidden rows of sequences that enter a cache piece by piece, all sequences at once."""
    cache = model.new_cache(len(ids))
    rows = [[] for _ in ids]
    for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
        at = [[round(cut * len(own)) for cut in (begin, 1 if end is None else end)] for own in ids]
        pieces = [own[a:b] for own, (a, b) in zip(ids, at, strict=True)]
        for own, new in zip(rows, model.hidden(pieces, cache, prompt=prompt), strict=True):
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


@examples(25)
@given(
    seed=st.integers(0, 11),
    window=st.sampled_from([None, 5, 66]),
    length=st.sampled_from([33, 64, 65, LONGEST]),
    cuts=st.lists(st.integers(1, LONGEST - 1), min_size=1, max_size=5),
    kind=st.sampled_from([None, "float64", "int8", "one"]),
)
def test_bits_of_a_prompt_do_not_depend_on_how_it_is_cut(seed, window, length, cuts, kind):
    model = decoder(seed, np.float64 if kind == "float64" else np.float32)
    layer = model.model.layers[0]._replace(window=(window, None))
    model = Decoder(model.model._replace(layers=(layer,) * 2), model.model.table, max_seq_len=LONGEST)
    model = compact(model, "int8") if kind == "int8" else model
    ids = drawn_ids(length)
    cuts = range(1, length) if kind == "one" else sorted({n for n in cuts if n < length})
    got = in_pieces(model, ids, [n / length for n in cuts], prompt=True)
    np.testing.assert_equal(got, in_pieces(model, ids, []))


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_caches_of_16_bits(dtype, isa, threads_restored):
    """Attention reads rounded keys and values: those of float32 in the first layer; all else is as with a cache of
    float32."""
    model = decoder(6, d=12)
    ids = drawn_ids(70, 4, LONGEST - 1, 33)
    caches, rows = [], []
    for model.cache_dtype in (np.dtype(np.float32), np.dtype(dtype)):
        caches.append(model.new_cache(len(ids)))
        rows.append(model.hidden(ids, caches[-1], prompt=True))
    wide, narrow = caches
    assert 2 * narrow.bytes == wide.bytes
    for of in ("keys", "values"):
        for n, length in enumerate(wide.lengths):
            exact, got = (getattr(each, of)[0, n, :, :length] for each in caches)
            if dtype == np.float16:
                np.testing.assert_array_equal(got, exact.astype(np.float16))
            else:  # to nearest even
                bits = exact.view(np.uint32)
                np.testing.assert_array_equal(got, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    # Keys and values are off by eps / 2 of themselves, in each of two layers.
    eps = 2**-11 if dtype == np.float16 else 2**-8
    for exact, got in zip(*rows, strict=True):
        assert 0 < np.abs(got - exact).max() < 64 * eps * np.abs(exact).max()
    _core.set_num_threads(1)
    for n, own in enumerate(ids):
        np.testing.assert_array_equal(in_pieces(model, [own], [0.2, 0.6], prompt=True)[0], rows[1][n])
    before = [model.next_logits([[5]] * len(ids), each) for each in (narrow, wide)]
    assert np.abs(before[0] - before[1]).max() < 64 * eps * np.abs(before[1]).max()


@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_common_beginning_is_computed_once(kind, monkeypatch):
    model = decoder(6, d=12)
    model = compact(model, kind) if kind else model
    first, second, *rest = drawn_ids(50, 40, 20, 9, 30, 1)
    prompts = [np.append(first, rest[0]), np.append(second, rest[1]), first, np.append(first, rest[2])]
    prompts += [second[:33], rest[0], np.append(second, [1, 2]), first]
    calls, real = [], model._run
    monkeypatch.setattr(model, "_run", lambda *given: calls.append(list(map(len, given[1]))) or real(*given))
    cache = model.new_cache(len(prompts))
    got = [model.next_logits(prompts, cache), model.next_logits([[3]] * len(prompts), cache)]
    assert sorted(calls[0]) == [32, 49]  # one token of the shortest is left
    assert calls[1] == [21, 17, 1, 31, 1, 20, 10, 1]
    assert shared_beginnings([np.zeros(0, int), *[second[:32]] * 3]) == []
    for n, prompt in enumerate(prompts):
        alone = model.new_cache(1)
        expected = [model.next_logits([prompt], alone)[0], model.next_logits([[3]], alone)[0]]
        np.testing.assert_array_equal([own[n] for own in got], expected)
    same = model.next_logits([first] * 3, model.new_cache(3))  # each has one token left, which is no decoding
    np.testing.assert_array_equal(same, [got[0][2]] * 3)


def compact(model, kind):
    """Round all weights of products, and the table."""

    def of(weight):
        return Compact(*to_kind("a weight", np.ascontiguousarray(weight), kind))

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
        expected = rows.astype(np.float64) @ model.model.table.T.astype(np.float64)
        # Sums of up to 12 terms.
        size = np.abs(rows) @ np.abs(model.model.table).T
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

    def run(keys=cache.keys, values=cache.values, past=cache.lengths, core=model.model, keep=False):
        _core._transformer_forward(core, ids, starts, transformer.PLAIN, keep, (keys, values, past))

    run()
    sizes = cache.keys[:, :, :, :32], np.zeros(cache.keys.shape), cache.keys[:1].copy()
    for bad in (*sizes, read_only(cache.keys.copy()), None):
        with pytest.raises(ValueError, match="keys and values must be writable"):
            run(keys=bad)
    for dtype in (np.float16, np.uint16, np.int16):  # both have 16 bits, or neither has
        with pytest.raises(ValueError, match="keys and values must be writable"):
            run(keys=np.zeros(cache.keys.shape, dtype))
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
        run(core=looks_ahead)
    with pytest.raises(TypeError, match="a cache must be a tuple"):
        _core._transformer_forward(model.model, ids, starts, transformer.PLAIN, False, (cache.keys,))


def wrong_arrays(array, any_length=False):
    """Yield what an array, or rounded weights, must not be: a row or a column too few."""
    whole = np.asarray(array)
    for wrong in [np.ascontiguousarray(whole[..., :-1])] + [whole[:-1].copy()] * (not any_length):
        if isinstance(array, np.ndarray):
            yield wrong
        elif wrong.ndim == 2:
            yield Compact(*to_kind("a weight", wrong, "int8"))


def wrong_fields(record, any_length=()):
    """Yield a record with one wrong array at a time, of those that it or its projections, norms and angles have."""
    for name, value in record._asdict().items():
        if isinstance(value, np.ndarray | Compact):
            yield from (record._replace(**{name: x}) for x in wrong_arrays(value, name in any_length))
        elif isinstance(value, transformer.Projection | transformer.Norm | transformer.Rotary):
            yield from (record._replace(**{name: own}) for own in wrong_fields(value))


@pytest.mark.parametrize("seed", range(6))
def test_the_core_refuses_weights_that_do_not_fit_with_a_cache(seed):
    model = decoder(seed)
    model = compact(model, "int8") if seed % 3 == 2 else model
    cache = model.new_cache(1)
    model.next_logits([[1, 2]], cache)
    first, *others = model.model.layers
    wrong = list(wrong_fields(model.model, any_length=("table", "positions")))
    wrong += [model.model._replace(layers=(own, *others)) for own in wrong_fields(first)]
    assert len(wrong) > 10
    for own in wrong:
        given = own, np.array([1]), np.array([0, 1]), transformer.PLAIN, False
        with pytest.raises(ValueError, match=r"must have|must divide|have one shape|need cosines and sines"):
            _core._transformer_forward(*given, (cache.keys, cache.values, cache.lengths))


VOCABULARY = 40


class Hashing:
    """A decoder whose logits depend on the whole sequence; its cache holds the tokens themselves."""

    class Cache(list):
        def keep(self, indices):
            self[:] = [self[i] for i in indices]

    def new_cache(self, sequences):
        return self.Cache([] for _ in range(sequences))

    def next_logits(self, ids, cache):
        assert len(ids) == len(cache)
        for own, new in zip(cache, ids, strict=True):
            own.extend(new.tolist())
        return np.stack([self.logits(own) for own in cache])

    @staticmethod
    def logits(ids):
        return np.random.default_rng(ids).standard_normal(VOCABULARY).astype(np.float32) * 3


PROMPTS = [np.array([3, 1, 4]), np.array([1]), np.array([5, 9, 2, 6, 5])]


def tokens(steps):
    """The new tokens of each prompt."""
    return [[i for i in column if i is not None] for column in zip(*steps, strict=True)]


def ids(most, least=0):
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=least, max_size=most)


SETTINGS = {
    "top_k": st.sampled_from([1, 2, 7, 39, 40, 100]),
    "top_p": st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
    "min_new_tokens": st.integers(0, 6),
}


@examples(150)
@given(
    how=st.fixed_dictionaries({"temperature": st.sampled_from([0.1, 0.7, 1.0, 3.0])}, optional=SETTINGS),
    seed=st.integers(0, 1000),
    ties=st.booleans(),
    prompt=st.integers(1, 6),
    new=st.integers(0, 5),
    stop_ids=ids(2),
)
def test_what_may_be_drawn_is_what_transformers_leaves(how, seed, ties, prompt, new, stop_ids):
    """Probabilities equal those after Transformers' processors with the same settings. The text so far repeats a few
    ids."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(VOCABULARY) * 4
    x = (np.round(x) if ties else x).astype(np.float32)
    seen = rng.choice(rng.integers(0, VOCABULARY, 3), prompt + new)
    said = {"max_length": prompt + 6, "do_sample": True, "top_k": None} | how
    if "min_new_tokens" in how:
        said["min_length"] = prompt + how["min_new_tokens"]  # as `generate` says
    config = transformers.GenerationConfig(**said)
    config._eos_token_tensor = torch.tensor(stop_ids) if stop_ids else None
    owner = transformers.GenerationMixin()
    owner.config = transformers.PretrainedConfig()
    tokens = torch.tensor(seen)[None]
    chain = owner._get_logits_processor(config, prompt, tokens[:, :prompt], device="cpu")
    expected = torch.softmax(chain(tokens, torch.tensor(x, dtype=torch.float64)[None]), -1)[0].numpy()

    sampler = Sampler(sampling(**how), seen[:prompt], seed, stop_ids)
    sampler.ids += seen[prompt:].tolist()
    processed = sampler.process(x.astype(np.float64))
    if not np.isfinite(processed.max()):  # nothing can be drawn
        assert np.isnan(expected).any()
        return
    found = probabilities(processed, sampler.how)
    # Among equal logits at the edge of the nucleus any may be left out, so sums are compared. Whether a sum of
    # some terms equals 1 - p is a matter of their rounding, so a token of that size may differ.
    np.testing.assert_allclose(np.sort(found), np.sort(expected), atol=1e-6 if not ties else 0.05)
    if not ties:
        np.testing.assert_array_equal(found > 0, expected > 0)
    assert found[sampler.draw(x)] > 0


@examples(60)
@given(
    presence=st.sampled_from([0, -2, 0.5, 1.3]),
    frequency=st.sampled_from([0, -0.7, 0.25, 2]),
    repetition=st.sampled_from([1, 1.5]),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100, 2.5, -np.inf])),
    seed=st.integers(0, 1000),
    new=st.integers(0, 6),
)
def test_penalties_and_biases_are_those_that_openai_defines(presence, frequency, repetition, bias, seed, new):
    """A penalty counts new tokens only. Repetition, which counts those of the prompt too, comes after biases."""
    rng = np.random.default_rng(seed)
    x, seen = rng.standard_normal(VOCABULARY), rng.choice(rng.integers(0, VOCABULARY, 3), 2 + new).tolist()
    expected = x + [bias.get(n, 0) for n in range(VOCABULARY)]
    for n in set(seen):
        expected[n] *= repetition if expected[n] < 0 else 1 / repetition
        times = seen[2:].count(n)
        expected[n] -= times * frequency + (times > 0) * presence
    how = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    sampler = Sampler(sampling(logit_bias=bias, **how), np.array(seen[:2]), 0)
    sampler.ids += seen[2:]
    np.testing.assert_allclose(sampler.process(x.copy()), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("size", "most"), [(1, 1), (7, 0), (256, 7), (257, 2), (3000, 5), (3000, 3000)])
def test_log_probabilities(size, most):
    """Logits are quarters, so some are equal; a log-softmax of float64 has an error of a few eps of 30, the largest."""
    x = (np.random.default_rng(size).integers(-40, 40, size) / 4).astype(np.float32)
    x[size // 2] = -np.inf if size > 1 else 3
    wide = x.astype(np.longdouble)
    expected = wide - np.log(np.exp(wide).sum())
    order = sorted(range(size), key=lambda n: (-x[n], n))[:most]
    for new in (0, size // 2):
        p, ids, top = log_probabilities(x, new, most)
        assert ids.tolist() == order
        np.testing.assert_allclose([p, *top], expected[[new, *order]].astype(float), rtol=0, atol=1e-13)


def test_tokens_come_as_often_as_their_probability_says():
    """The counts in 20,000 draws are within 5 standard deviations of a binomial distribution."""
    logits = np.array([0.0, 1.0, 2.0, -np.inf, 0.5], np.float32)
    p = np.exp(logits) / np.exp(logits).sum()
    sampler = Sampler(sampling(1.0), np.array([0]), 7)
    n = 20_000
    counts = np.bincount([sampler.draw(logits) for _ in range(n)], minlength=5)
    assert counts[3] == 0
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "frequency_penalty": 1}])
def test_a_sequence_is_the_same_alone(how):
    together = tokens(generate(Hashing(), PROMPTS, max_new_tokens=12, rng=11, stop_ids=(7, 8), **how))
    assert len({len(each) for each in together}) > 1  # prompts end at different steps
    for i, prompt in enumerate(PROMPTS):
        for rng in (11 + i, [11 + i]):
            alone = generate(Hashing(), [prompt], max_new_tokens=12, rng=rng, stop_ids=(7, 8), **how)
            assert tokens(alone) == [together[i]]
    again = generate(Hashing(), PROMPTS[::-1], max_new_tokens=12, rng=[13, 12, 11], stop_ids=(7, 8), **how)
    assert tokens(again) == together[::-1]


def test_generators_give_other_tokens_each_time_and_seeds_the_same():
    def draw(rng):
        return tokens(generate(Hashing(), PROMPTS, max_new_tokens=8, temperature=2.0, rng=rng))

    generator = np.random.default_rng(0)
    assert draw(generator) != draw(generator)
    assert draw(np.random.default_rng(0)) == draw(np.random.default_rng(0))
    assert draw(None) != draw(None)
    assert draw(2**64 - 1)[1] == draw([5, 0, 5])[1]  # seeds are modulo 2**64


def test_a_sequence_ends_at_a_stop_id_or_when_asked():
    whole = tokens(generate(Hashing(), PROMPTS, max_new_tokens=10))
    stop = whole[0][4]
    found = tokens(generate(Hashing(), PROMPTS, max_new_tokens=10, stop_ids=[stop]))
    assert found[0] == whole[0][: whole[0].index(stop) + 1]
    seen, counted = [], itertools.count()

    def stops(i, new, _):
        seen.append((i, new))
        return i == 1 and next(counted) == 2

    steps = list(generate(Hashing(), PROMPTS, max_new_tokens=10, stop_when=stops))
    assert tokens(steps) == [whole[0], whole[1][:3], whole[2]]
    assert [new for i, new in seen if i == 1] == whole[1][:3]
    assert all(step[1] is None for step in steps[3:])
    assert len(list(generate(Hashing(), PROMPTS[:1], max_new_tokens=10, stop_when=lambda *_: True))) == 1


def test_the_context_ends_a_sequence_with_a_warning():
    """The last token is not fed back, so it needs no place: of 5 tokens and 4 new ones the cache holds 8."""
    whole = tokens(generate(Hashing(), PROMPTS, max_new_tokens=9))
    steps = generate(Hashing(), PROMPTS, max_new_tokens=4, context=8)
    assert tokens(steps) == [each[:4] for each in whole]
    with pytest.warns(UserWarning, match="the context of 8 tokens is full") as told:
        found = tokens(generate(Hashing(), PROMPTS, max_new_tokens=9, context=8))
    assert found == [whole[0][:6], whole[1][:8], whole[2][:4]]
    assert len(told) == 3


class Fixed(Hashing):
    def __init__(self, logits):
        self.fixed = np.array(logits, np.float32)

    def next_logits(self, ids, cache):
        return np.stack([self.fixed] * len(ids))


@pytest.mark.parametrize("logits", [[0, np.nan, 1], [0, np.inf, 1], [-np.inf] * 3, [np.nan, np.inf, 0]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_an_error(logits, temperature):
    with pytest.raises(ValueError, match=r"prompt 0, new token 1: no token can be drawn"):
        list(generate(Fixed(logits), [np.array([1])], temperature=temperature, repetition_penalty=1.2))


def test_temperatures_near_zero_are_greedy():
    for temperature in (1e-300, 5e-324):
        steps = generate(Fixed([1, 3, 2]), [np.array([0])], temperature=temperature, rng=0, max_new_tokens=5)
        assert tokens(steps) == [[1] * 5]


def started(prompts=PROMPTS[:1], **arguments):
    """The call itself raises the error, before anything is computed."""
    return lambda: generate(Hashing(), prompts, **arguments)


test_bad_arguments = refusals(
    (started(temperature=-0.1), ValueError, "temperature must be at least 0 and finite, not -0.1"),
    (started(temperature=float("inf")), ValueError, "temperature .* not inf"),
    (started(temperature=float("nan")), ValueError, "temperature .* not nan"),
    (started(temperature="1"), TypeError, "temperature must be a real number, not '1'"),
    (started(presence_penalty=float("nan")), ValueError, "presence_penalty must be from -2 to 2, not nan"),
    (started(logit_bias=[[1, 2]]), TypeError, "logit_bias must be a dict of a number for each token"),
    (started(logit_bias={1: float("inf")}), ValueError, "logit_bias must have numbers below inf"),
    (started(logit_bias={True: 1}), TypeError, "a token of logit_bias must be an int, not True"),
    (started(top_k=0), ValueError, "top_k must be at least 1, not 0"),
    (started(top_k=2.0), TypeError, "top_k must be an int"),
    (started(top_p=1.1), ValueError, "top_p must be from 0 to 1, not 1.1"),
    (started(top_p=float("nan")), ValueError, "top_p must be from 0 to 1"),
    (started(repetition_penalty=0), ValueError, "repetition_penalty must be positive and finite, not 0"),
    (started(max_new_tokens=0), ValueError, "max_new_tokens must be at least 1, not 0"),
    (started(rng=-1), ValueError, "rng must not be negative"),
    (started(rng=[1, 2]), ValueError, "rng has 2 seeds for 1 prompts"),
    (started(rng="0"), TypeError, "rng must be"),
    (started(context=2), ValueError, "prompt 0 has 3 tokens; the context of this model has 2"),
    (started([]), ValueError, "there are no prompts"),
    (started([np.array([1]), np.array([], int)]), ValueError, "prompt 1 is empty"),
    (started([np.array([1.0])]), TypeError, r"prompt 0 must be a vector of ids, not float64 of shape \(1,\)"),
)


def test_top_k_of_greedy_generation_is_a_warning():
    with pytest.warns(UserWarning, match="top_k changes nothing at temperature 0"):
        generate(Hashing(), PROMPTS, top_k=3)
