"""The five tutorials without a browser: all printed tensors are on the pages; the tours' form, and their answers by
plain NumPy."""

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
    for without in ({"exercise": True}, {"text": {"illustrated": "a b c"}.get(name, "bank")}):
        if without.get("text") == "bank" and name not in ("first_principles", "sentence_embeddings"):
            continue
        assert views.tutorial_page(name, **without).tour == ()


def answers(name):
    return {stop.name: (stop.options[stop.right], stop.reveal) for stop in views.tutorial_page(name).tour}


def test_answers_of_tutorial_1():
    data = tutorials.load("first_principles")
    x, y = (np.array([data["vocab"][word] for word in words]) for words in data["tokens"].values())
    found = answers("first_principles")
    for number in x[1] @ np.array(data["linear_layer"]["W"]):
        assert f"{number:.2f}" in found["Same going in"][1]
    weights = softmax(x @ x.T)
    assert found["Attention"][0] == "bank itself" and weights[1].argmax() == 1
    assert all(f"{w:.2f}" in found["Attention"][1] for w in weights[1])
    a, b = weights @ x, softmax(y @ y.T) @ y
    assert found["Two banks"][0] == "number 1" and np.abs(a[1] - b[1]).argmax() == 1 and b[1, 1] > a[1, 1]
    assert f"{a[1, 1]:.2f} became {b[1, 1]:.2f}" in found["Two banks"][1]
    q, k = (x @ np.array(data["projected_attention"][f"W_{part}"]) for part in ("query", "key"))
    kept = [softmax(q @ k.T * scale)[1, 1] for scale in (1 / np.sqrt(2), 1)]
    assert found["Take the scale away"][0] == ("more" if kept[1] > kept[0] else "less")
    assert f"{kept[0]:.2f} became {kept[1]:.2f}" in found["Take the scale away"][1]
    q, k, v = (x @ w for w in tutorials.class_weights().astype(float))
    assert all(f"{o:.3f}" in found["Without training"][1] for o in (softmax(q @ k.T / np.sqrt(3)) @ v)[:, 0])


def test_answers_of_tutorial_2():
    data = tutorials.load("sentence_embeddings")

    def block(name, sentence):
        given = data["models"][name]
        p = {key: np.array(value) for key, value in given["parameters"].items()}
        ids = [data["words"].index(word) for word in sentence.split()]
        angle = np.arange(len(ids))[:, None] / 10000 ** (np.arange(0, 4, 2) / 4)
        x = p["embedding_layer.weight"][ids] + np.stack([np.sin(angle), np.cos(angle)], -1).reshape(-1, 4)
        part = "attention_layers.0."
        q, k, v = (x @ p[f"{part}{n}.weight"].T + p[f"{part}{n}.bias"] for n in ("query", "key", "value"))
        n = given["num_heads"]
        heads = [
            softmax(a @ b.T / np.sqrt(4 / n))
            for a, b in zip(np.split(q, n, 1), np.split(k, n, 1), strict=True)
        ]
        y = x + np.concatenate([w @ c for w, c in zip(heads, np.split(v, n, 1), strict=True)], 1)
        y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
        return heads, y * p[f"{part}ln.weight"] + p[f"{part}ln.bias"]

    (a, out_a), (b, out_b) = (block("trained", sentence) for sentence in data["sentences"])
    found = answers("sentence_embeddings")
    assert found["After training"][0] == "stream" and a[0][1].argmax() == 4
    assert (
        f"{a[0][1, 4]:.2f}" in found["After training"][1]
        and f"{b[0][1, 4]:.2f}" in found["After training"][1]
    )
    before = [block("untrained", sentence)[0][0][1] for sentence in data["sentences"]]
    assert all(f"{row[4]:.2f}" in found["Before training"][1] and row.max() < 0.35 for row in before)
    cosine = out_a[1] @ out_b[1] / np.linalg.norm(out_a[1]) / np.linalg.norm(out_b[1])
    assert found["Two banks"][0] == "in opposite ways" and cosine < -0.5
    assert f"{cosine:.2f}".replace("-", "−") in found["Two banks"][1]
    heads = [block("two_heads", sentence)[0] for sentence in data["sentences"]]
    assert heads[1][0][1].argmax() == 4 and heads[0][0][1].argmax() != 4  # head 0 finds money alone
    assert heads[0][1][1].argmax() == 4 and found["The other head"][0] == "stream"


def test_answers_of_tutorial_3():
    data = tutorials.load("basics_notebook")
    x, *weights = (np.array(data[name]) for name in ("embedded_tokens", "WQ", "WK", "WV"))
    q, k, _ = (x @ w for w in weights)
    found = answers("basics_notebook")
    row = softmax(q @ k.T / np.sqrt(2))[0]
    assert f"{row[0]:.2f}" in found["Below zero"][1] and found["Below zero"][0] == "no"
    assert f"{row[0]:.2f} became {row[0] / (row[0] + row[1]):.2f}" in found["The sum stays 1"][1]
    assert ", ".join(f"{w:.2f}" for w in softmax(8 * q @ k.T)[0]) in found["Nearly equal"][1]
    kept = [softmax(q[:, [h]] @ k[:, [h]].T)[0, 0] for h in range(2)]
    assert all(f"{w:.2f}" in found["Two heads"][1] for w in kept) and found["Two heads"][0] == "no"


def test_answers_of_tutorial_4():
    data = tutorials.load("illustrated")
    printed, found = data["printed"], answers("illustrated")
    assert found["By hand"][0] == ", ".join(map(str, printed["attn_scores"][0]))
    assert found["Four more"][0] == str(round(np.exp(16 - 12)))
    scores, values = (np.array(printed[name], float) for name in ("attn_scores", "values"))
    assert found["Scale"][0] == f"{softmax(scores / np.sqrt(3))[1, 1]:.2f}"
    rounded = np.array(printed["attn_scores_softmax_rounded"]) @ values
    off = np.abs(softmax(scores) @ values - rounded)
    assert found["Rounded by hand"][0] == f"input {off.max(axis=1).argmax() + 1}"
    assert "6.68 became 7.0" in found["Rounded by hand"][1]


def test_answers_of_tutorial_5():
    data = tutorials.load("attention_module")
    q, k = np.array(data["query"]), np.array(data["key"])
    row = softmax(q @ k.T / np.sqrt(3))[2]
    found = answers("attention_module")
    assert found["What does love attend to?"][0] == "I and you" and row[1] + row[3] > 0.9
    assert all(f"{row[j]:.2f}" in found["What does love attend to?"][1] for j in (0, 1, 3))
    other = softmax(np.roll(q, 1, axis=1) @ k.T / np.sqrt(3))[2]
    assert found["Another head"][0] == data["tokens"][other.argmax()]
    assert f"{row[1]:.2f} for *I* became {row[1] / row[:3].sum():.2f}" in found["Still 1"][1]


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
