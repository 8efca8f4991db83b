"""Generation from any decoder: probabilities compared with Transformers' processors, batches, ends, bad input.

The decoder here is a function of all tokens so far, so that a cache that keeps the wrong sequences shows.
"""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refusals

from selfattn.engine.sampling import Sampler, generate, probabilities, sampling

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
    "top_k": st.sampled_from([1, 2, 7, 39, 40, 100]), "top_p": st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.03, 0.3, 1.0]), "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
    "no_repeat_ngram_size": st.integers(0, 3), "bad_words_ids": st.lists(ids(3, 1), min_size=1, max_size=9),
    "sequence_bias": st.lists(
        st.tuples(ids(3, 1), st.sampled_from([-2.5, 4.0])), min_size=1, max_size=9, unique_by=lambda x: tuple(x[0]),
    ).map(lambda pairs: [list(pair) for pair in pairs]),
    "min_length": st.integers(0, 12), "min_new_tokens": st.integers(0, 6),
    "forced_bos_token_id": st.integers(0, VOCABULARY - 1),
    "forced_eos_token_id": st.one_of(st.integers(0, VOCABULARY - 1), ids(1, 1)),
    "suppress_tokens": st.lists(st.integers(-1, VOCABULARY + 2), max_size=9),
    "begin_suppress_tokens": st.lists(st.integers(-1, VOCABULARY + 2), max_size=9),
}  # fmt: skip


@settings(max_examples=150)
@given(
    how=st.fixed_dictionaries({"temperature": st.sampled_from([0.1, 0.7, 1.0, 3.0])}, optional=SETTINGS),
    seed=st.integers(0, 1000), ties=st.booleans(), prompt=st.integers(1, 6), new=st.integers(0, 5), ends=ids(2),
)  # fmt: skip
def test_what_may_be_drawn_is_what_transformers_leaves(how, seed, ties, prompt, new, ends):
    """Probabilities equal those after Transformers' processors with the same settings. The text so far repeats a few ids."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(VOCABULARY) * 4
    x = (np.round(x) if ties else x).astype(np.float32)
    seen = rng.choice(rng.integers(0, VOCABULARY, 3), prompt + new)
    forced = np.hstack([how.get(name, []) for name in ("forced_bos_token_id", "forced_eos_token_id")])
    assume(not set(forced.tolist()) & set(how.get("suppress_tokens", [])))  # Transformers refuses it
    said = {"max_length": prompt + 6, "do_sample": True, "top_k": None} | how
    if "min_new_tokens" in how:
        said["min_length"] = prompt + how["min_new_tokens"]  # as `generate` says
    config = transformers.GenerationConfig(**said)
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    owner = transformers.GenerationMixin()
    owner.config = transformers.PretrainedConfig()
    tokens = torch.tensor(seen)[None]
    chain = owner._get_logits_processor(config, prompt, tokens[:, :prompt], device="cpu")
    expected = torch.softmax(chain(tokens, torch.tensor(x, dtype=torch.float64)[None]), -1)[0].numpy()

    sampler = Sampler(sampling(**how), seen[:prompt], seed, 6, ends)
    sampler.ids += seen[prompt:].tolist()
    processed = sampler.processed(x.astype(np.float64))
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


def test_tokens_come_as_often_as_their_probability_says():
    """The counts in 20,000 draws are within 5 standard deviations of a binomial distribution."""
    logits = np.array([0.0, 1.0, 2.0, -np.inf, 0.5], np.float32)
    p = np.exp(logits) / np.exp(logits).sum()
    sampler = Sampler(sampling(1.0), np.array([0]), 7)
    n = 20_000
    counts = np.bincount([sampler.draw(logits) for _ in range(n)], minlength=5)
    assert counts[3] == 0
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}]
)
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

    def ends(i, new):
        seen.append((i, new))
        return i == 1 and next(counted) == 2

    steps = list(generate(Hashing(), PROMPTS, max_new_tokens=10, ends=ends))
    assert tokens(steps) == [whole[0], whole[1][:3], whole[2]]
    assert [new for i, new in seen if i == 1] == whole[1][:3]
    assert all(step[1] is None for step in steps[3:])
    assert len(list(generate(Hashing(), PROMPTS[:1], max_new_tokens=10, ends=lambda *_: True))) == 1


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
