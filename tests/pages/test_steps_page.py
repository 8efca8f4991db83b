"""The data of a steps page, and its still picture; in every page hostile text stays text."""

from xml.etree import ElementTree

import numpy as np
import pytest
from pages import (
    NASTY,
    PAGES,
    Reader,
    additive,
    assert_harmless,
    bank,
    data_of,
    dead_row,
    everything,
    illustrated,
    large,
    matrices,
    model,
    numbers_by_node,
    tags,
)
from refusals import refusals

import selfattn as sa
from selfattn import nn, views
from selfattn.steps.layers import layer_steps, model_steps
from selfattn.views.tours import Stop, tour_data


@pytest.mark.parametrize("make", [illustrated, everything, additive, model, lambda: (dead_row(), None)])
def test_every_number_of_every_step_is_in_the_data_to_the_last_bit(make):
    steps, tokens = make()
    found, expected = matrices(views.steps_page(steps, tokens).html), numbers_by_node(steps)
    assert expected.keys() <= found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)


def run_lines(steps, page):
    """Run the lines of NumPy on a page of one head with the given arrays; return all names."""
    p = steps.parameters
    names = {"np": np, "x": steps.inputs, "scale": steps._call.scale, "mask": steps._call.allowed}
    names |= {name: array for name, array in vars(p).items() if array is not None}
    names |= {"softcap": steps._call.softcap, "sink": steps._call.sinks, "ln_weight": 1.0, "ln_bias": 0.0}
    if p.norm is not None:
        x = steps.residual
        names |= {"mean": x.mean(-1, keepdims=True), "variance": x.var(-1, keepdims=True), "eps": p.norm[2]}
    if steps._call.bias is not None:
        names["added"] = steps._call.bias
    if steps._call.keep is not None:
        names["keep"] = steps._call.keep / (1 - steps._call.dropout_p)
    for stage in data_of(page.html)["stages"]:
        exec(stage["numpy"], names)
    return names


def test_the_lines_of_numpy_compute_the_steps():
    rng = np.random.default_rng(1)
    x, *weights = rng.standard_normal((4, 4, 4))
    options = [
        {},
        {"is_causal": True, "b_query": x[0], "residual": True, "norm": (None, None, 1e-5), "W_out": x.T},
        {"softcap": 1.5, "sinks": np.array(0.3), "attn_mask": rng.standard_normal((4, 4)), "b_key": x[1]},
        {"dropout_p": 0.4, "rng": 0},
    ]
    for chosen in options:
        steps = layer_steps(x, *weights, **chosen)
        names = run_lines(steps, views.steps_page(steps))
        for name, array in steps.to_dict().items():
            if name in names:
                # sums of at most 4 terms of size 10, softmaxed and normalised
                np.testing.assert_allclose(names[name], array, rtol=1e-13, atol=1e-13, err_msg=name)
        assert {"query", "weights", "output"} <= names.keys()


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (2, 3, 2, 0), (1, 1, 1, 1)])
def test_sizes_of_zero_and_one(shape):
    L, S, E, Ev = shape
    steps = sa.attention_steps(np.ones((L, E)), np.ones((S, E)), np.ones((S, Ev)))
    found = matrices(views.steps_page(steps, exercise=True).html)
    np.testing.assert_array_equal(found["scores"], np.full((L, S), E))
    np.testing.assert_array_equal(found["output"], np.full((L, Ev), min(S, 1)))


def test_sizes_of_pages():
    for name in views.TUTORIAL_PAGES:  # up to five tokens, two sentences and three views
        assert len(views.tutorial_page(name).html.encode()) < 500_000, name
    assert len(views.steps_page(*large()).html.encode()) < 1_500_000


def test_steps_without_a_page_are_an_error_and_a_notebook_shows_text():
    long, batch, no_heads = [(10_000, 1), (50, 1), (50, 1)], np.ones((2, 3, 4)), np.ones((3, 0, 2, 2))
    for steps, message in (
        (sa.attention_steps(*map(np.ones, long)), r"at most 200000 numbers.*\(10000, 50\)"),
        (layer_steps(batch, *np.ones((3, 4, 4))), r"one sentence.*\(2, 3, 4\)"),
        (sa.attention_steps(*no_heads), r"no heads to show: the scores have shape \(0, 2, 2\)"),
    ):
        with pytest.raises(views.PageError, match=message):
            views.steps_page(steps)
        assert steps._repr_html_() is None and steps._repr_svg_() is None


test_errors_quote_the_argument = refusals(
    ({"tokens": ["a", "b"]}, ValueError, "2 tokens do not fit the 3 rows"),
    ({"tokens": "abc"}, ValueError, "1 tokens do not fit the 3 rows"),
    ({"tokens": [1, 2, 3]}, TypeError, r"sequence of strings.*\[1, 2, 3\]"),
    ({"key_tokens": ["a"]}, ValueError, "1 key_tokens do not fit the 3 rows"),
    ({"captions": {"score": "x"}}, ValueError, "captions has no 'score'; there are .*scores"),
    ({"captions": {"scores": 1}}, TypeError, r"captions\['scores'\] is a int"),
    ({"captions": ["scores"]}, TypeError, "captions maps names to sentences; it is not a list"),
    ({"precision": 0}, ValueError, "precision must be an integer from 1 to 12, not 0"),
    ({"max_side": 1000}, ValueError, "max_side must be an integer from 4 to 256, not 1000"),
    ({"compare": illustrated()[0]}, TypeError, r"compare is \(steps, tokens\), not LayerSteps"),
    ({"compare": (illustrated()[0],)}, TypeError, r"compare is .*, not tuple \(LayerSteps"),
    ({"compare": ("steps", ["a"])}, TypeError, "compare: steps is a str"),
    ({"compare": (illustrated()[0], ["a"])}, ValueError, "compare: 1 tokens do not fit the 3 rows"),
    ({"compare": (dead_row(), None)}, ValueError, "compare= has other steps"),
    call=lambda arguments: views.steps_page(illustrated()[0], **arguments),
)


def test_captions_replace_every_sentence():
    german = {name: f"«{name}»" for name in views.CAPTIONS} | {"lang": "de"}
    steps, tokens = everything()
    page = views.steps_page(steps, tokens, captions=german, exercise=True)
    assert '<html lang="de">' in page.html
    data = data_of(page.html)
    said = {
        *data["texts"].values(),
        *(stage[key] for stage in data["stages"] for key in ("heading", "sentence")),
    }
    assert "«biased_scores»" in said and not said & {
        sentence for sentence in views.CAPTIONS.values() if len(sentence) > 12
    }


def picture_of(page):
    """The texts of the picture with their places."""
    svg = "{http://www.w3.org/2000/svg}"
    groups = ElementTree.fromstring(page.svg).iter(f"{svg}g")
    return [[(t.text, float(t.get("x")), t.get("text-anchor")) for t in g.iter(f"{svg}text")] for g in groups]


def test_the_picture_has_the_weights():
    steps, tokens = bank("river")
    (texts,) = picture_of(views.steps_page(steps, tokens))
    names = [name for name, *_ in texts]
    assert names[:3] == tokens
    assert [float(t) for t in names if t not in tokens] == [float(f"{w:.2f}") for w in steps.weights.ravel()]


def test_the_picture_names_heads_and_sentences_and_says_what_it_leaves_out():
    river, finance = bank("river"), bank("finance")
    names = [group[0][0] for group in picture_of(views.steps_page(*river, compare=finance))]
    assert names == ["stream bank mud", "money bank loan"]
    assert [group[0][0] for group in picture_of(views.steps_page(*everything()))] == ["head 0", "head 1"]
    rng = np.random.default_rng(0)
    page = views.steps_page(sa.attention_steps(*rng.standard_normal((3, 6, 40, 2))))
    assert len(picture_of(page)) == 4
    assert "Abridged: 4 of 6 heads" in page.svg and "Abridged: 32 of 40 rows" in page.svg
    assert "Abridged" not in views.steps_page(*river).svg


def test_joined_pages_keep_tours_and_second_halves():
    pages = [views.tutorial_page(name) for name in ("basics_notebook", "illustrated")]
    joined = views.join_pages(pages, "Two")
    assert [stop.view for stop in joined.tour] == [stop.view for stop in pages[0].tour] + [2] * 6
    assert views.join_pages([joined, pages[0]], "Three").homes == (
        *((n, page.title) for n, page in zip((0, 2), pages, strict=True)),
        (3, pages[0].title),
    )
    assert all(f'data-name="{page.title}: The way back"' in joined.html for page in pages)


def test_what_can_be_joined():
    pages = [views.steps_page(sa.attention_steps([[x]], [[x]], [[x]])) for x in (1.0, 2.0)]
    expected = views.join_pages(pages, "both").html
    assert views.join_pages(iter(pages), "both").html == expected
    assert views.join_pages(dict(enumerate(pages)).values(), "both").html == expected
    for none in ([], None, pages[0], ["a"], [pages[0], pages[1].html]):
        with pytest.raises(TypeError, match="pages must be a list of pages of steps, one at least, not"):
            views.join_pages(none, "both")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["max", "min", "tiny", "smallest_subnormal"])
def test_numbers_at_the_ends_of_the_range(dtype, name):
    """Numbers as large as finfo.min in a mask are on the page, in its picture and in a notebook."""
    end, x = getattr(np.finfo(dtype), name), np.eye(2, dtype=dtype)
    steps = sa.attention_steps(x, x, x, attn_mask=np.array([[0, end], [0, 0]], dtype))
    page = views.steps_page(steps, ["x", "y"], compare=(steps, ["a", "b"]))
    np.testing.assert_array_equal(matrices(page.html)["masked_scores"], steps.masked_scores)
    assert "<svg" in page.svg
    assert steps._repr_html_()
    views.steps_page(layer_steps(np.array([[end, 1], [0, end]], dtype), x, x, x))


def test_steps_of_a_model_have_their_tokens():
    words = ["tom", "<i>", "jerry"]
    model = nn.EmbeddingModel(
        lambda sentence: [words.index(w) for w in sentence.split()], 3, 4, max_seq_len=8, rng=0
    )
    steps = model.steps("jerry <i>")
    assert steps.tokens == ("jerry", "<i>")
    for html, tokens in (
        (views.steps_page(steps).html, ["jerry", "<i>"]),
        (steps._repr_html_(), ["jerry", "<i>"]),
        (views.steps_page(steps, ["a", "b"]).html, ["a", "b"]),
    ):
        assert data_of(html)["labels"]["t0"] == tokens
    assert model.steps([0, 1]).tokens is None
    with pytest.raises(ValueError, match="1 tokens do not fit the 2 rows"):
        model_steps(steps.embeddings, steps.positions, steps.blocks, ["a"])


@pytest.mark.parametrize("name", PAGES)
def test_hostile_text_adds_and_removes_no_element(name):
    assert_harmless(PAGES[name], lambda data: data["labels"]["t0"], said=False)


def test_the_stops_of_a_tour():
    element = tour_data([Stop(token, token, (token, "no"), 0, token) for token in NASTY])
    assert tags(Reader(element)) == [("script", ["type", "class"])]
    (tour,) = data_of(element, "sa-tour-data")
    assert [stop["name"] for stop in tour["stops"]] == NASTY
