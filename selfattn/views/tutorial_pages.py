"""The pages of the five tutorials: their inputs, from the data of `selfattn.steps.tutorials`, step by step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from selfattn.steps import tutorials
from selfattn.steps.attention import AttentionSteps, attention_steps
from selfattn.steps.layers import LayerSteps, layer_steps
from selfattn.views.graph import linear
from selfattn.views.page import Page, join_pages, render, steps_page
from selfattn.views.texts import merged
from selfattn.views.writing import Array

__all__ = ["TUTORIAL_PAGES", "tutorial_page"]


def _first_principles() -> Page:
    data = tutorials.load("first_principles")
    sentences = {
        name: (tokens, np.array([data["vocab"][t] for t in tokens]))
        for name, tokens in data["tokens"].items()
    }
    (river, x), (finance, y) = sentences["river"], sentences["finance"]

    def pair(title: str, steps: Callable[[Array], AttentionSteps]) -> Page:
        return steps_page(
            steps(x), river, compare=(steps(y), finance), captions={"title": title}, precision=3
        )

    def projected(weights: list[Array]) -> Callable[[Array], LayerSteps]:
        return lambda x: layer_steps(x, *weights)

    weight = np.array(data["linear_layer"]["W"])
    texts = merged({"title": "A linear layer: no word sees another"})
    alone = linear(y, weight, finance, linear(x, weight, river))
    given = data["projected_attention"]
    return join_pages(
        [
            render(alone, [" ".join(river), " ".join(finance)], texts, precision=3),
            pair("Attention on the embeddings themselves", lambda x: attention_steps(x, x, x, scale=1.0)),
            pair("Attention with projections", projected([np.array(given[f"W_{n}"]) for n in ("query", "key", "value")])),
            pair("The class SelfAttention", projected(list(tutorials.class_weights().astype(np.float64)))),
        ],
        f"{data['tutorial']}: bank, by a river and in finance",
    )  # fmt: skip


def _sentence_embeddings() -> Page:
    rng = np.random.RandomState(2)
    x = rng.standard_normal((3, 4))
    weights, biases = [], []
    for _ in range(3):
        weights.append(rng.uniform(-0.5, 0.5, (4, 4)))
        biases.append(rng.uniform(-0.5, 0.5, 4))
    names = dict(zip(("b_query", "b_key", "b_value"), biases, strict=True))
    blocks = {
        title: layer_steps(x, *weights, **names, num_heads=heads, residual=True, norm=(None, None, 1e-5))
        for title, heads in (("A block with one head", 1), ("The same block with two heads", 2))
    }
    tokens = ["tom", "chase", "jerry"]
    pages = [steps_page(steps, tokens, captions={"title": title}) for title, steps in blocks.items()]
    return join_pages(pages, "LLMs: Self Attention")


def _basics_notebook() -> Page:
    data = tutorials.load("basics_notebook")
    x, *weights = (np.array(data[name]) for name in ("embedded_tokens", "WQ", "WK", "WV"))
    return steps_page(layer_steps(x, *weights), data["tokens"], captions={"title": data["tutorial"]})


def _illustrated() -> Page:
    data = tutorials.load("illustrated")
    x, *weights = (np.array(data[name]) for name in ("x", "w_query", "w_key", "w_value"))
    steps = layer_steps(x, *weights, scale=1.0).with_weights(data["printed"]["attn_scores_softmax_rounded"])
    return steps_page(
        steps,
        ["input 1", "input 2", "input 3"],
        captions={
            "title": data["tutorial"],
            "replaced_weights": "The author goes on with these weights, rounded by hand, instead of the softmax.",
        },
        precision=6,
    )


def _attention_module() -> Page:
    rng = np.random.RandomState(5)
    query, key, value = (rng.standard_normal((1, 2, 4, 3)) for _ in range(3))
    masks = {"Without a mask": None, "The last word masked": np.array([True, True, True, False])}
    tokens = ["Hello", "I", "love", "you"]
    pages = [
        steps_page(attention_steps(query, key, value, mask), tokens, captions={"title": title})
        for title, mask in masks.items()
    ]
    return join_pages(pages, "Self-Attention: ScaledDotProductAttention module")


TUTORIAL_PAGES: dict[str, Callable[[], Page]] = {
    "first_principles": _first_principles,
    "sentence_embeddings": _sentence_embeddings,
    "basics_notebook": _basics_notebook,
    "illustrated": _illustrated,
    "attention_module": _attention_module,
}


def tutorial_page(name: str) -> Page:
    """Show a tutorial step by step, from its own inputs.

    Parameters
    ----------
    name : {"first_principles", "sentence_embeddings", "basics_notebook", "illustrated", "attention_module"}

    Returns
    -------
    Page
        Every tensor that the tutorial prints is on it.

    Raises
    ------
    ValueError
        Another name.

    Examples
    --------
    >>> tutorial_page("illustrated").title
    'Illustrated: Self-Attention'
    """
    if name not in TUTORIAL_PAGES:
        raise ValueError(f"there is no tutorial {name!r}; there are {', '.join(TUTORIAL_PAGES)}")
    return TUTORIAL_PAGES[name]()
