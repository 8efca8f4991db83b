"""The explorer: numbers are those of the steps, habits those of weights, bad input is an error. A folder of a GPT."""

import base64
import re
import zlib

import numpy as np
import pytest
from pages import data_of
from refusals import refusals

import selfattn as sa
import selfattn_models as models
from selfattn import nn, views
from selfattn.steps import Change
from selfattn.text import WhitespaceTokenizer
from selfattn.views import live_pages
from selfattn_models.pages import heads

RNG = np.random.default_rng(0)
WORDS = ["[CLS]", "he", "sat", "on", "the", "bank", ".", "[SEP]"]


def steps_of(rows, width=4, heads=2, seed=0, **options):
    rng = np.random.default_rng(seed)
    return sa.attention_steps(*rng.standard_normal((3, heads, rows, width)).astype(np.float32), **options)


def stored(page):
    """Header and arrays, read as the script reads them."""
    packed = zlib.decompress(base64.b64decode(re.search(r'class="sa-bytes">(.*?)</script>', page.html)[1]))

    def array(place):
        count = int(np.prod(place["shape"]))
        return np.frombuffer(packed, f"<{place['type']}", count, place["at"]).reshape(place["shape"])

    return data_of(page.html), array


def weights_of(layer, array):
    """Compute the weights of a layer, (H, L, S), from the page's data."""
    if "weights" in layer:
        return array(layer["weights"]) / 65535
    query, key = (
        array(layer[name]["values"]) * array(layer[name]["size"])[..., None].astype(np.float64)
        for name in ("query", "key")
    )
    key = np.repeat(key, len(query) // len(key), axis=0)
    scores = query @ key.swapaxes(1, 2)
    left, right = layer["band"]
    distance = np.arange(scores.shape[2])[None, :] - np.arange(scores.shape[1])[:, None]
    if left is not None:
        scores[:, (distance < -left) | (distance > right)] = -np.inf
    return sa.softmax(scores)


@pytest.mark.parametrize(
    ("rows", "options", "as_products"),
    [
        (8, {}, False),  # short texts have fewer weights than queries and keys
        (40, {}, True),
        (40, {"is_causal": True}, True),
        (40, {"window": (3, 2)}, True),
        (40, {"scale": 0.3}, True),
        (40, {"softcap": 2.0}, False),  # the script does not compute a softcap
        (40, {"alibi_slopes": np.float32([0.5, 0.25])}, False),
        (40, {"attn_mask": RNG.random((40, 40)) < 0.7}, False),
    ],
)
def test_the_page_holds_the_weights_of_the_steps(rows, options, as_products):
    steps = steps_of(rows, **options)
    header, array = stored(views.explorer(steps, [f"w{n}" for n in range(rows)]))
    (layer,) = header["texts"][0]["layers"]
    assert ("query" in layer) == as_products
    # Weights of 16 bits are off by half a step; products of rounded rows by at most heads.CLOSE.
    limit = heads.CLOSE if as_products else 0.51 / 65535
    np.testing.assert_allclose(weights_of(layer, array), steps.weights, rtol=0, atol=limit)


def test_keys_that_heads_share_are_stored_once():
    rng = np.random.default_rng(1)
    query, (key, value) = rng.standard_normal((4, 60, 4)), rng.standard_normal((2, 2, 60, 4))
    steps = sa.attention_steps(query, key, value, enable_gqa=True)
    header, array = stored(views.explorer(steps, [str(n) for n in range(60)]))
    (layer,) = header["texts"][0]["layers"]
    assert layer["key"]["values"]["shape"] == [2, 60, 4]
    np.testing.assert_allclose(weights_of(layer, array), steps.weights, rtol=0, atol=heads.CLOSE)


def test_small_maps_hold_the_largest_weight_of_each_pixel():
    steps = steps_of(100)
    header, array = stored(views.explorer(steps, [str(n) for n in range(100)]))
    small = array(header["texts"][0]["small"])
    assert small.shape == (2, heads.SMALL, heads.SMALL)
    first, second = (slice(100 * n // heads.SMALL, 100 * (n + 1) // heads.SMALL) for n in (7, 30))
    root = np.sqrt(steps.weights[1, first, second].max()) * 255
    assert abs(small[1, 7, 30] - root) <= 0.51


def weights_where(rule):
    """Return weights of one head over WORDS, where each row has weight 1 at the place that the rule returns."""
    rows = len(WORDS)
    return np.array([[[float(rule(i, j)) for j in range(rows)] for i in range(rows)]])


def habit_of(weights):
    ((head,),) = heads.habits([heads.TextHeads(WORDS, WORDS, (weights,), (None,), (None,), False)])
    return head


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (lambda i, j: j == i, "itself"),
        (lambda i, j: j == max(i - 1, 0), "before"),
        (lambda i, j: j == min(i + 1, 7), "after"),
        (lambda i, j: j == 0, "first"),
        (lambda i, j: j == 7, "separators"),
        (lambda i, j: j == 6, "marks"),
        (lambda i, j: j == (i + 2 if i < 4 else i - 2), "words"),
        (lambda i, j: 1 / 8, "broad"),
    ],
)
def test_habits(rule, kind):
    head = habit_of(weights_where(rule))
    assert head.kind == kind and head.clear
    np.testing.assert_allclose(sum(head.shares.values()), 1)
    assert head.entropy == pytest.approx(1.0 if kind == "broad" else 0.0, abs=1e-6)


def test_words_next_to_a_mark_do_not_count():
    # "he" and "bank", next to [CLS] and the full stop, attend to themselves; words between them to the word before.
    def taken(first):
        weights = weights_where(lambda i, j: j == (i if i in (1, 5) else i - 1 if i else first))
        return habit_of(weights).shares

    assert taken(first=1)["before"] == 1
    # If no word sees the next one, the full stop after "bank" does not matter, so "bank" counts: one word of four.
    assert (taken(first=0)["before"], taken(first=0)["itself"]) == (0.75, 0.25)


def test_a_weak_habit_and_no_habit():
    def blend(share):
        return weights_where(lambda i, j: share * (j == i) + (1 - share) / 2 * (j in (0, 7)))

    for share, kind, clear in ((0.6, "itself", True), (0.4, "itself", False), (0.34, "mixed", True)):
        head = habit_of(blend(share))
        assert (head.kind, head.clear) == (kind, clear)


def test_two_texts_count_alike_and_the_common_word_is_chosen():
    first, second = steps_of(4), steps_of(3, seed=1)
    page = views.explorer(first, ["the", "river", "bank", "."], compare=(second, ["a", "bank", "loan"]))
    header, _ = stored(page)
    assert page.title == "What 2 heads do with bank"
    assert [text["chosen"] for text in header["texts"]] == [2, 1]
    with pytest.raises(ValueError, match=r"layers of \[2\] and \[3\] heads; they must be of one model"):
        views.explorer(first, list("abcd"), compare=(steps_of(3, heads=3), list("abc")))


def test_the_last_given_token_of_causal_attention_is_chosen():
    for options, chosen in (({"is_causal": True}, 2), ({}, 0)):
        steps = sa.attention_steps(np.random.default_rng(0).standard_normal((3, 4)), **options)
        header, _ = stored(views.explorer(steps, "capital of France"))
        assert header["texts"][0]["chosen"] == chosen


def test_attention_from_one_text_to_another():
    rng = np.random.default_rng(3)
    steps = sa.attention_steps(rng.standard_normal((1, 3, 4)), *rng.standard_normal((2, 1, 5, 4)))
    header, _ = stored(views.explorer(steps, list("abc"), key_tokens=list("vwxyz")))
    assert stored(views.explorer(steps, "a b c", key_tokens="v w x y z"))[0] == header  # split at spaces
    (text,) = header["texts"]
    assert text["crossed"] and text["keys"] == list("vwxyz") and "means" not in text
    assert [header["habits"][0][0]["shares"][n] for n in (0, 4, 5)] == [0.0] * 3  # itself, before, after


STEPS, ABC, BATCH = steps_of(3), list("abc"), sa.attention_steps(*np.zeros((3, 2, 2, 3, 4)))
test_bad_calls = refusals(
    (((STEPS, "abc"), {}), ValueError, "1 tokens do not fit the 3 rows"),
    (((STEPS, None), {}), TypeError, "text is a sequence of strings, .*, not None"),
    (((STEPS, ["a"]), {}), ValueError, "1 tokens do not fit the 3 rows"),
    (((STEPS, ABC), {"compare": ["x"]}), TypeError, r"compare is \(steps, tokens\), not list"),
    (((STEPS, ABC), {"word": "z"}), ValueError, "the token 'z' is not among"),
    (((STEPS, ABC), {"new_tokens": -1}), ValueError, "from 0 to 256, not -1"),
    (((object(), ABC), {}), TypeError, "object has no attention"),
    (((BATCH, ABC), {}), ValueError, r"one text: weights \(heads, L, S\)"),
    call=lambda given: views.explorer(*given[0], **given[1]),
)


@pytest.mark.parametrize("compare", [False, True])
def test_a_page_beyond_the_limit_is_an_error_before_the_work(compare, monkeypatch):
    model = nn.EmbeddingModel(
        WhitespaceTokenizer(["he"]), 2, 8, num_layers=2, num_heads=2, max_seq_len=64, rng=0
    )
    monkeypatch.setattr("selfattn_models.pages.explore.MOST_BYTES", 10_000)

    def page_of(count):
        return views.explorer(model, "he " * count, compare="he " * count if compare else None)

    computed = []
    model.steps = computed.append
    with pytest.raises(
        ValueError, match=r"64 tokens.* make a page with .* MB of numbers; the limit is 0 MB: give"
    ) as caught:
        page_of(64)
    assert not computed
    most = int(re.search(r"at most (\d+) tokens", str(caught.value))[1])
    del model.steps
    found = re.search(r'class="sa-bytes">(.*?)</script>', page_of(most).html)[1]
    # parts of the numbers are aligned to eight bytes
    assert 8_500 < len(zlib.decompress(base64.b64decode(found))) < 10_000 + 200
    with pytest.raises(ValueError, match=f"at most {most} tokens"):
        page_of(most + 1)
    with pytest.raises(ValueError, match=r"40 tokens make a page .* give at most 3\d tokens"):
        views.explorer(steps_of(40, heads=3), [str(n) for n in range(40)])


def test_the_folder_of_a_gpt(tmp_path, kernels, monkeypatch):
    from selfattn_models.gpt2 import as_gpt2, character_tokenizer

    monkeypatch.setattr(live_pages, "KERNELS", kernels)
    own = nn.GPT(5, 8, 2, 2, 16, rng=0, tie_word_embeddings=False)
    tied = nn.GPT(5, 8, 2, 2, 16, rng=0)  # as `selfattn train gpt` makes it
    for model in (own, tied):
        models.save(as_gpt2(model, character_tokenizer("abc ")), tmp_path)
        page = views.gpt_page(tmp_path, prompt="AB c")  # small letters, as the alphabet has them
        assert page.svg == views.gpt_page(model, "\ufffdabc ", "ab c").svg
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 4)
    models.save(
        models.LlamaForCausalLM(sizes | {"num_hidden_layers": 1, "num_attention_heads": 2}, rng=0), tmp_path
    )
    with pytest.raises(TypeError, match=r"LlamaForCausalLM; views\.explorer"):
        views.gpt_page(tmp_path)


def test_heads_that_are_off():
    """What the page says of a head is what a changed run says; models without a pooling, and steps, have none."""
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "vocab_size": 11,
    }
    encoder = models.BertModel(config, rng=0)
    encoder.pipeline.modes, encoder.tokenizer = ("mean",), None
    encoder.tokens = lambda ids: [str(n) for n in ids]
    texts = [1, 2, 3, 4], [5, 2, 6]
    header, array = stored(views.explorer(encoder, texts[0], compare=texts[1]))
    rows = [[encoder.hidden_states(x, Change.off(1, h))[-1].mean(axis=0) for x in texts] for h in (0, 1)]
    expected = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in rows]
    np.testing.assert_allclose(array(header["off"]["after"])[2:], expected, rtol=1e-5)
    assert [max(map(abs, words)) for words in header["off"]["words"]] == [1, 1]
    decoder = models.LlamaForCausalLM(config | {"max_position_embeddings": 16}, rng=0)
    decoder.tokens = lambda ids: [str(n) for n in ids]
    header, array = stored(views.explorer(decoder, texts[0], new_tokens=2))
    off, ids = header["off"], texts[0]
    last = decoder.hidden_states(ids, Change.off(0, 1))[-1][-1] @ decoder.parameters()["lm_head.weight"].T
    chances, best = sa.softmax(last), int(decoder.logits(ids)[-1].argmax())
    assert (off["name"], off["place"]) == (str(best), 3)
    np.testing.assert_allclose(array(off["after"])[1], chances[best], rtol=1e-4)
    np.testing.assert_allclose(array(off["likely"])[1], np.sort(chances)[::-1][:5], rtol=1e-4)
    assert [off["names"][n] for n in off["tokens"][1]] == [str(n) for n in np.argsort(-chances)[:5]]
    assert off["names"][off["lens"][-1][0]] == str(best)
    assert stored(views.explorer(encoder, texts[0], heads_off=False))[0]["off"] is None
    assert stored(views.explorer(encoder.steps(texts[0]), list("abcd")))[0]["off"] is None
