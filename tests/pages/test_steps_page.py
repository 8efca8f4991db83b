"""HTML of a steps page: numbers, tokens, sizes, errors; in every page hostile text stays text."""

import base64
import itertools
import re
from decimal import Decimal
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
    model,
    numbers_by_node,
    tags,
)
from refusals import refusals

import selfattn as sa
from selfattn import nn, views
from selfattn.steps.layers import layer_steps, model_steps
from selfattn.views.tours import Stop, tour_data
from selfattn.views.writing import letters

NAMES = ["illustrated", "bank", "everything", "additive", "model"]


@pytest.mark.parametrize("make", [illustrated, lambda: bank("river"), everything, additive, model], ids=NAMES)
@pytest.mark.parametrize("precision", [2, 4, 12])
def test_every_number_of_every_step_is_in_the_static_tables(make, precision):
    steps, tokens = make()
    page = Reader(views.steps_page(steps, tokens, precision=precision).html)
    expected = numbers_by_node(steps)
    assert expected.keys() <= {table.node for table in page.tables}
    for name, array in expected.items():
        size = np.where(np.isfinite(array), np.abs(array), 0.0)
        # half a unit of the last decimal, or for small numbers of the last significant digit
        unit = np.where(size < 1e-3, np.maximum(10.0 ** (1 - precision) * size, 1e-12), 10.0**-precision)
        got = page.numbers(name)
        assert got.shape == array.shape, name
        same = (got == array) | (np.isnan(got) & np.isnan(array))
        with np.errstate(invalid="ignore"):
            assert np.all(same | (np.abs(got - array) <= 0.5 * unit + 1e-15 * (1 + size))), name


def test_rows_and_columns_are_labelled_with_the_tokens():
    steps, tokens = bank("river")
    page = Reader(views.steps_page(steps, tokens).html)
    for name, columns in (("query", ["0", "1"]), ("scores", tokens), ("output", ["0", "1", "2"])):
        assert page.of(name).rows == tokens
        assert page.of(name).columns == columns
    transposed = next(t for t in page.tables if t.node == "key" and "data-t" in t.attributes)
    assert transposed.columns == tokens
    np.testing.assert_array_equal(transposed.numbers, page.of("key").numbers.T)


def test_stages_come_in_order_with_formula_numpy_and_sentence():
    html = views.steps_page(*illustrated()).html
    assert re.findall(r'<section[^>]* data-stage="(\w+)"', html) == [
        "inputs",
        "query",
        "key",
        "value",
        "scores",
        "scaled_scores",
        "masked_scores",
        "weights",
        "weighted_values",
        "output",
    ]
    scores = re.search(r'data-stage="scores".*?</section>', html, re.DOTALL)[0]
    assert "scores = query @ key.T" in scores
    assert "s<sub>ij</sub>" in scores
    assert views.CAPTIONS["scores"] in scores


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
    for line in re.findall(r"<pre><code>(.*?)</code></pre>", page.html):
        exec(line.replace("&lt;", "<"), names)
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


def test_nan_and_infinity_are_written():
    page = Reader(views.steps_page(dead_row()).html)
    assert page.of("key").cells == [["1", "2"], ["nan", "0"], ["inf", "1"]]
    assert page.of("masked_scores").cells[1] == ["-inf"] * 3
    assert page.of("weights").cells == [["nan", "nan", "0"], ["0", "0", "0"]]
    assert page.of("output").cells == [["nan", "nan"], ["0", "0"]]


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (2, 3, 2, 0), (1, 1, 1, 1)])
def test_sizes_of_zero_and_one(shape):
    L, S, E, Ev = shape
    steps = sa.attention_steps(np.ones((L, E)), np.ones((S, E)), np.ones((S, Ev)))
    page = Reader(views.steps_page(steps).html)
    assert page.of("scores").cells == [[str(E)] * S] * L
    assert page.of("output").cells == [["1" if S else "0"] * Ev] * L


def test_captions_and_titles_are_text_whatever_they_hold():
    steps, tokens = everything()
    captions = {name: NASTY[n % len(NASTY)] + "\n" for n, name in enumerate(views.CAPTIONS)}
    page = views.steps_page(steps, tokens, captions=captions, exercise=True)
    same = {"look": "one line", "made up": "another"}  # in these two captions, *words* are bold
    plain = Reader(views.steps_page(steps, tokens, captions=same, exercise=True).html).elements
    for some in (page, views.join_pages([page, page], "".join(NASTY))):
        for html in (some.html, some.fragment, some.svg):
            html.encode("utf-8")
            assert not {"\u2028", "\x00", "\ud800"} & set(html)
        ElementTree.fromstring(some.svg)
        assert Reader(some.html).scripts  # and all tags are closed
    tags = [[tag for tag, _ in each] for each in (Reader(page.html).elements, plain)]
    assert tags[0] == tags[1]  # no element is added or lost
    assert "\n" not in page.title
    assert NASTY[0] in "".join(Reader(page.html).text)


def test_the_page_fetches_nothing_and_the_fragment_has_no_ids():
    page = views.steps_page(*illustrated())
    for tag, attributes in Reader(page.html).elements:
        assert "src" not in attributes
        assert tag not in ("iframe", "img", "object", "embed")
        if tag == "link":
            assert attributes["href"] == "data:,"
    ids = [a["id"] for _, a in Reader(page.html).elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert "stage=scores&row=2" in ids
    assert not [a for _, a in Reader(page.fragment).elements if "id" in a]
    assert page.html == views.steps_page(*illustrated()).html


def test_an_untrusted_notebook_has_a_picture_and_says_how_to_start_the_page():
    page = views.steps_page(*illustrated())
    (picture,) = [attributes for tag, attributes in Reader(page.fragment).elements if tag == "img"]
    kind, _, data = picture["src"].partition(";base64,")
    assert kind == "data:image/svg+xml" and base64.b64decode(data).decode() == page.svg
    assert "Trust Notebook starts the page" in page.fragment
    assert ".sa-untrusted { display: none }" in page.fragment  # removed with the scripts


def test_pages_in_one_document_have_ids_once():
    pages = [views.steps_page(*illustrated()), views.steps_page(*bank("river"))]
    page = views.join_pages(pages, "Two")
    ids = [a["id"] for _, a in Reader(page.html).elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert {"stage=scores", "view=2&stage=scores", "view=2&stage=scores&row=2"} <= set(ids)
    assert "id=" not in re.sub(r"<script>.*?</script>", "", page.fragment, flags=re.DOTALL)


def test_sizes_of_pages():
    assert len(views.steps_page(*illustrated()).html.encode()) < 250_000
    assert len(views.steps_page(*bank("river"), compare=bank("finance")).html.encode()) < 250_000
    for name in views.TUTORIAL_PAGES:  # up to five tokens, two sentences and three views
        assert len(views.tutorial_page(name).html.encode()) < 750_000, name
    page = views.steps_page(*large())
    assert len(page.html.encode()) < 2_000_000
    assert "Abridged: 16 of 64 rows and columns are shown" in page.html
    assert "Abridged: shown for 8 of 64 queries" in page.html


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
    ({"tokens": [b"a", b"b", b"c"]}, TypeError, "tokens is a sequence of strings"),
    ({"precision": 0}, ValueError, "precision must be an integer from 1 to 12, not 0"),
    ({"max_side": 1000}, ValueError, "max_side must be an integer from 4 to 256, not 1000"),
    ({"compare": illustrated()[0]}, TypeError, r"compare is \(steps, tokens\), not LayerSteps"),
    ({"compare": (illustrated()[0],)}, TypeError, r"compare is .*, not tuple \(LayerSteps"),
    ({"compare": ("steps", ["a"])}, TypeError, "compare: steps is a str"),
    ({"compare": (illustrated()[0], "abc")}, ValueError, "compare: 1 tokens do not fit the 3 rows"),
    ({"compare": (illustrated()[0], ["a"])}, ValueError, "compare: 1 tokens do not fit the 3 rows"),
    ({"compare": (dead_row(), None)}, ValueError, "compare= has other steps"),
    call=lambda arguments: views.steps_page(illustrated()[0], **arguments),
)


def test_every_stage_says_what_is_left_out():
    rng = np.random.default_rng(6)
    x, *weights = rng.standard_normal((4, 3, 12, 12))[:, 0]
    steps = layer_steps(x, *weights, num_heads=6, dropout_p=0.5, rng=1)
    html = views.steps_page(steps).html
    for name in list(steps.to_dict())[4:]:
        stage = re.search(rf'data-stage="{name}".*?</section>', html, re.DOTALL)[0]
        assert "Abridged: 4 of 6 heads are shown." in stage, name
    given = views.steps_page(sa.attention_steps(*rng.standard_normal((3, 6, 2, 2)))).html
    assert "Abridged: 4 of 6 heads" in re.search(r'data-stage="given".*?</section>', given, re.DOTALL)[0]


def test_the_legend_names_each_matrix_and_its_range():
    html = views.steps_page(*illustrated()).html
    for name, ends in (("query", "0.00 1.50 3.00"), ("scores", "0 8 16"), ("weights", "0.00 0.49 0.98")):
        stage = re.search(rf'data-stage="{name}".*?</section>', html, re.DOTALL)[0]
        legend = re.sub("<.*?>", "", re.search(r'<p class="sa-legend">.*?</p>', stage)[0])
        assert legend == f"Colours of {name}: {ends}"


def test_captions_replace_every_sentence():
    german = {name: f"«{name}»" for name in views.CAPTIONS} | {"lang": "de"}
    steps, tokens = everything()
    page = views.steps_page(steps, tokens, captions=german, exercise=True)
    assert '<html lang="de">' in page.html
    text = " ".join(Reader(page.html).text)
    for name, sentence in views.CAPTIONS.items():
        if len(sentence) > 12:
            assert sentence not in text, name
    assert "«biased_scores»" in text


def test_an_exercise_hides_its_blanks_everywhere_but_in_the_answers():
    steps, tokens = illustrated()
    page = Reader(views.steps_page(steps, tokens, exercise=True).html)
    open_page = Reader(views.steps_page(steps, tokens).html)
    blanks = 0
    for table, shown in zip(page.tables, open_page.tables, strict=True):
        for row, full in zip(table.cells, shown.cells, strict=True):
            blanks += row.count("____")
            assert all(x in (y, "____") for x, y in zip(row, full, strict=True))
    assert page.of("scores").cells == [["2", "____", "4"], ["____", "16", "12"], ["4", "12", "____"]]
    assert blanks > 30
    text = " ".join("".join(page.text).split())
    assert "scores[one, two] = 4" in text
    assert "scores[three, three] = 10" in text


def test_two_sentences_have_their_differences():
    (river, tokens), (finance, others) = bank("river"), bank("finance")
    page = Reader(views.steps_page(river, tokens, compare=(finance, others)).html)
    difference = next(t for t in page.tables if t.attributes.get("data-a") == "output")
    np.testing.assert_allclose(difference.numbers, finance.output - river.output, rtol=0, atol=0.5e-4 + 1e-12)
    assert difference.rows == [x if x == y else f"{x} → {y}" for x, y in zip(tokens, others, strict=True)]
    assert len([t for t in page.tables if t.node == "W_query~1"]) == 0  # shared


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


def test_sentences_of_different_lengths_are_compared_where_both_have_rows():
    rng = np.random.default_rng(2)
    short, long = rng.standard_normal((2, 3)), rng.standard_normal((4, 3))
    a, b = (sa.attention_steps(x, x, x) for x in (short, long))
    page = Reader(views.steps_page(a, ["a", "b"], compare=(b, ["a", "c", "d", "e"])).html)
    difference = next(t for t in page.tables if t.attributes.get("data-a") == "weights")
    np.testing.assert_allclose(difference.numbers, b.weights[:2, :2] - a.weights, rtol=0, atol=0.51e-4)
    assert difference.rows == ["a", "b → c"]
    assert {"weighted_values[1]", "weighted_values[3]~1"} <= {t.node for t in page.tables}


def test_steps_show_themselves_in_a_notebook():
    for steps, _ in (illustrated(), everything(), model()):
        assert Reader(steps._repr_html_()).tables
        ElementTree.fromstring(steps._repr_svg_())
        assert "data-alone" not in steps._repr_html_().split("<script>")[0].split("</style>")[1]


def test_the_note_of_an_open_mask_is_there_when_all_masks_are_open():
    x = np.eye(3)
    for options, said in (({}, True), ({"is_causal": True}, False)):
        html = views.steps_page(sa.attention_steps(x, x, x, **options)).html
        assert (views.CAPTIONS["open mask"] in Reader(html).text) is said
    closed = sa.attention_steps(x, x, x, is_causal=True)
    html = views.steps_page(sa.attention_steps(x, x, x), compare=(closed, None)).html
    assert views.CAPTIONS["open mask"] not in Reader(html).text


def test_joined_pages_have_the_pictures_of_all_that_have_weights():
    counts = {"first_principles": 3, "attention_module": 2, "sentence_embeddings": 3}
    for name, views_with_weights in counts.items():
        page = views.tutorial_page(name)
        root = ElementTree.fromstring(page.svg)
        inner = [e for e in root if e.tag.endswith("svg")]
        assert len(inner) == views_with_weights
        places = [(float(e.get("y")), float(e.get("height"))) for e in inner]
        assert all(y + high <= below for (y, high), (below, _) in itertools.pairwise(places))
        assert sum(places[-1]) <= float(root.get("height"))
        headings = [e.text for e in root if e.tag.endswith("text")]
        assert len(headings) == len(inner)
        assert set(headings) <= set(re.findall(r'<h2 class="sa-head">(.*?)</h2>', page.html))


def test_joined_pages_keep_tours_and_second_halves():
    pages = [views.tutorial_page(name) for name in ("basics_notebook", "illustrated")]
    joined = views.join_pages(pages, "Two")
    assert [stop.view for stop in joined.tour] == [stop.view for stop in pages[0].tour] + [2] * 6
    assert joined.homes == ((0, pages[0].title), (2, pages[1].title))
    assert len(joined.below) == 2
    for page in pages:
        assert f'data-name="{page.title}: The way back"' in joined.html
    assert views.join_pages([joined, pages[0]], "Three").homes[2] == (3, pages[0].title)


def test_what_can_be_joined():
    pages = [views.steps_page(sa.attention_steps([[x]], [[x]], [[x]])) for x in (1.0, 2.0)]
    expected = views.join_pages(pages, "both").html
    assert views.join_pages(iter(pages), "both").html == expected
    assert views.join_pages(dict(enumerate(pages)).values(), "both").html == expected
    for none in ([], None, pages[0], ["a"], [pages[0], pages[1].html]):
        with pytest.raises(TypeError, match="pages must be a list of pages of steps, one at least, not"):
            views.join_pages(none, "both")


def test_the_picture_has_room_for_long_tokens():
    tokens = ["television", "天気天気天気天気", "a" * 40]
    (texts,) = picture_of(views.steps_page(illustrated()[0], tokens))
    columns = [(name, x) for name, x, anchor in texts[:3]]
    assert [name for name, _ in columns] == [tokens[0], tokens[1], "a" * 11 + "…"]
    for (name, x), (after, y) in itertools.pairwise(columns):
        assert y - x >= 7 * (letters(name) + letters(after)) / 2  # at 12 pixels a letter is about 7 wide
    assert all(x >= 7 * letters(name) for name, x, anchor in texts if anchor == "end")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["max", "min", "tiny", "smallest_subnormal"])
def test_numbers_at_the_ends_of_the_range(dtype, name):
    """Numbers as large as finfo.min in a mask are written on the page, in its picture and in a notebook."""
    end, x = getattr(np.finfo(dtype), name), np.eye(2, dtype=dtype)
    steps = sa.attention_steps(x, x, x, attn_mask=np.array([[0, end], [0, 0]], dtype))
    page = views.steps_page(steps, ["x", "y"], compare=(steps, ["a", "b"]))
    cell = Reader(page.html).of("masked_scores").cells[0][1]
    written, exact = Decimal(cell), Decimal(float(end))  # finfo.max may be rounded up, beyond float64
    assert abs(written - exact) <= Decimal("5e-4") * abs(exact) + Decimal("1e-12")
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
    assert Reader(views.steps_page(steps).html).of("embeddings").rows == ["jerry", "<i>"]
    assert Reader(steps._repr_html_()).of("scores").columns == ["jerry", "<i>"]
    assert Reader(views.steps_page(steps, ["a", "b"]).html).of("embeddings").rows == ["a", "b"]
    assert model.steps([0, 1]).tokens is None
    with pytest.raises(ValueError, match="1 tokens do not fit the 2 rows"):
        model_steps(steps.embeddings, steps.positions, steps.blocks, ["a"])


@pytest.mark.parametrize("name", PAGES)
def test_hostile_text_adds_and_removes_no_element(name):
    assert_harmless(PAGES[name], lambda data: data["labels"]["t0"], said=name in ("steps", "joined"))


def test_the_stops_of_a_tour():
    element = tour_data([Stop(token, token, (token, "no"), 0, token) for token in NASTY])
    assert tags(Reader(element)) == [("script", ["type", "class"])]
    (tour,) = data_of(element, "sa-tour-data")
    assert [stop["name"] for stop in tour["stops"]] == NASTY
