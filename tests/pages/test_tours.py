"""The five tutorials without a browser: all printed tensors are on the pages; the tours' form, and their answers."""

import re

import numpy as np
import pytest
from pages import matrices

import selfattn as sa
from selfattn import nn, tutorials, views
from selfattn.steps.layers import layer_steps
from selfattn.text import WhitespaceTokenizer
from selfattn.views import tours


def softmax(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# The right answer of each stop: the data of tutorials does not change.
ANSWERS = {
    "first_principles": "no, they are the same|bank itself|number 1|Q and K|more|hardly",
    "sentence_embeddings": "no|stream|from the similarity of sentences|in opposite ways|nearly 1|"
    "attends to “the”|stream",
    "basics_notebook": "nowhere|no|both, in proportion|only the twins together|its rows are swapped too|no",
    "illustrated": "2, 4, 4|55|its key is long|0.91|input 1|no",
    "attention_module": "I and you|its query and their keys|love|none|to the others, in proportion|zeros",
}


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_five_to_seven_stops_each_with_a_guess(name):
    page = views.tutorial_page(name)
    assert 5 <= len(page.tour) <= 7
    for stop in page.tour:
        assert 2 <= len(stop.options) <= 4 and len(set(stop.options)) == len(stop.options)
        assert stop.options[stop.right] and stop.ask.endswith("?") and stop.reveal
        for node, *_ in (*stop.before, *stop.after):
            assert f'"id":"{node}"' in page.views[stop.view]
        assert stop.hide in ("", "scores", "weights", "output")
    assert [stop.options[stop.right] for stop in page.tour] == ANSWERS[name].split("|")


def holds(table, matrix):
    """Whether rows of a table, one after the other, are this matrix to the three decimals that every page shows."""
    starts = range(len(table) - len(matrix) + 1) if table.shape[1:] == matrix.shape[1:] else ()
    # Numbers below a thousandth have two digits.
    return any(np.allclose(table[i : i + len(matrix)], matrix, rtol=5e-3, atol=0.51e-3) for i in starts)


@pytest.mark.parametrize("compute", tutorials.TUTORIALS, ids=lambda compute: compute.__name__)
def test_what_is_compared_is_on_the_page(compute):
    """The kernels compute these tensors, head by head."""
    views_of = views.tutorial_page(compute.__name__).views
    tables = [matrix for view in views_of for matrix in matrices(view).values()]
    tables += [table.T for table in tables]
    for comparison in compute(np.float64).comparisons:
        if comparison.name.startswith("sentence embedding"):
            continue  # the mean of a block's output: only a model has it
        computed = np.atleast_2d(comparison.computed)
        if "[key][query]" in comparison.name:
            computed = computed.swapaxes(0, 1)
        for matrix in computed.reshape(-1, *computed.shape[-2:]):
            assert any(holds(table, matrix) for table in tables), comparison.name


N = r"(−?\d+\.\d+)"
# What a sentence says of the numbers in it.
CLAIMS = [
    (rf"More: {N} became {N}", lambda a, b: a < b),
    (rf"fell from {N} to {N}", lambda a, b: a > b),
    (rf"Hardly: their first numbers are {N}, {N} and {N}", lambda *x: max(x) - min(x) < 0.06),
    (rf"it is {N} at the output: roughly opp", lambda x: x < -0.3),
    (rf"Nearly 1: {N}", lambda x: x >= 0.9),
    (rf"” is {N}, and for .* only {N}:", lambda a, b: a >= b),
    (rf"in head 0 it is {N}, in head 1 only {N}", lambda a, b: a > b),
    (rf"with itself is {N}: below zero", lambda x: x < 0),
    (rf"are {N}, {N}, {N}: nearly equal", lambda *x: max(x) - min(x) < 0.11),
    (rf"they are {N}, {N}, {N}: the weight of \*sky\* falls", lambda *x: x[1] == x[2]),
    (rf"Its small weight of {N}", lambda x: x < 0.11),
    (rf"{N} to \*I\*, {N} to \*you\* and {N} to \*Hello\*", lambda a, b, c: min(a, b) >= c),
    (rf"To itself, with weight {N}", lambda x: x > 0.3),
]


@pytest.mark.parametrize("seed", range(20))
def test_what_a_tour_says_is_so_for_drawn_inputs(seed):
    """Numbers in sentences are among those of the steps, and comparisons of them are true; other stops are left out."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.choice([0.2, 1, 3]) * rng.standard_normal(shape)

    table = dict(zip(("stream", "bank", "mud", "money", "loan"), draw(5, 4), strict=True))
    weights = [[draw(4, n) for n in (2, 2, 3)] for _ in range(2)]
    layers = [lambda w, ws=ws: layer_steps(np.array([table[x] for x in w]), *ws) for ws in weights]

    def raw(words):
        return sa.attention_steps([table[word] for word in words], scale=1.0)

    texts, matrix = [["stream", "bank", "mud"], ["money", "bank", "loan"]], draw(4, 3)
    stops = tours.first_principles(raw, *layers, matrix, texts, "en")
    sharp = softmax(8 * layers[0](texts[0]).scores)
    bare = softmax(layers[0](texts[0]).scores)
    known = {
        f"{x:.{d}f}"
        for w in texts
        for make in (raw, *layers)
        for s in [make(w)]
        for a in (s.weights, s.output, sharp, bare, table["bank"] @ matrix)
        for x in np.abs(a).ravel()
        for d in (2, 3)
    }
    embedded, three = rng.choice([0.1, 1]) * draw(3, 2), [draw(2, 2) for _ in range(3)]
    embedded[2] = embedded[1] if seed % 2 else embedded[2]

    def steps(_, heads=1):
        return layer_steps(embedded, *three, num_heads=heads)

    stops += tours.basics_notebook(steps, ["sky", "is", "blue"], "en")
    one, two = steps(0), steps(0, 2)
    row = one.weights[0]
    shown = [one.weights, one.scaled_scores, one.output, two.weights, softmax(8 * one.scores)]
    for a in (*shown, row[:2] / row[:2].sum()):
        known |= {f"{x:.{d}f}" for x in np.abs(a).ravel() for d in (2, 4)}
    # Tutorial 4, in whole numbers; tutorial 5; tutorial 2 with drawn models.
    whole = [rng.integers(0, 3, shape) for shape in ((3, 4), (4, 3), (4, 3), (4, 3))]
    real, scaled = (layer_steps(*whole, scale=scale) for scale in (1.0, 1 / np.sqrt(3)))
    rounded = real.with_weights(real.weights.round(1))
    stops += tours.illustrated(lambda scale=1.0: layer_steps(*whole, scale=scale), rounded, "en")
    heads, mask = draw(3, 2, 4, 3), np.arange(4) < 3
    both = [sa.attention_steps(*heads, given) for given in (None, mask)]
    stops += tours.attention_module(lambda _, masked=False: both[masked], ["Hello", "I", "love", "you"], "en")
    sentences = [["the", "bank", "of", "the", "stream"], ["the", "bank", "and", "the", "money"]]
    models = {
        name: nn.EmbeddingModel(
            WhitespaceTokenizer(sorted({*sentences[0], *sentences[1]})),
            7,
            4,
            max_seq_len=8,
            num_heads=h,
            rng=seed + h,
        )
        for name, h in (("untrained", 1), ("trained", 1), ("two_heads", 2))
    }
    blocks = [[model.steps(" ".join(words)).blocks[0] for words in sentences] for model in models.values()]
    stops += tours.sentence_embeddings(
        {name: (lambda w, m=model: m.steps(" ".join(w))) for name, model in models.items()}, sentences, "en"
    )
    cosines = [
        a[1] @ b[1] / np.linalg.norm(a[1]) / np.linalg.norm(b[1])
        for a, b in ([getattr(x, n) for x in blocks[1]] for n in ("inputs", "result"))
    ]
    shown = [real.weights, scaled.weights, real.output, rounded.output]
    shown += [x.weights for pair in (both, *blocks) for x in pair]
    for a in (
        *shown,
        softmax(8 * blocks[1][0].scores),
        np.array([*cosines, 0.5, real.scores[1, 1] / max(1, real.scores[1, 2])]),
    ):
        known |= {f"{x:.{d}f}" for x in np.abs(a).ravel() for d in (1, 2, 3)}
    so = {
        "Attention": raw(texts[0]).weights[1].argmax() == 1,
        "Before training": max(b.weights[1, 4] for b in blocks[0]) < 0.31,
        "After training": all(b.weights[1].argmax() == 4 for b in blocks[1]),
        "The other head": blocks[2][0].weights[1, 1].argmax() == 4,
        "Four more": real.weights[1, 1] > 2 * real.weights[1, 2],
        "Long keys": (real.weights.argmax(axis=1) == 1).all(),
        "Scale": scaled.weights[1, 1] < real.weights[1, 1],
    }
    for stop in stops:
        said = f"{stop.ask} {stop.reveal}"
        assert all(number.strip("−") in known for number in re.findall(N, said)), stop
        assert so.get(stop.name, True) and len(set(stop.options)) == len(stop.options), stop
        for pattern, holds in CLAIMS:
            for found in re.finditer(pattern, said):
                assert holds(*(float(x.replace("−", "-")) for x in found.groups())), (stop.name, found[0])
        equal = "equal rows" in said or "equal words" in said
        assert not equal or np.array_equal(embedded[1], embedded[2])
