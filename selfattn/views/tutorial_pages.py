"""The pages of the five tutorials: their inputs, from the data of `selfattn.tutorials`, step by step, with a tour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from selfattn import tutorials
from selfattn.steps.attention import AttentionSteps, attention_steps
from selfattn.steps.layers import LayerSteps, layer_steps
from selfattn.views import own_words, tours
from selfattn.views.graph import Steps, linear
from selfattn.views.language import say
from selfattn.views.page import Page, assemble, join_pages, render, steps_page
from selfattn.views.texts import CAPTIONS, merged
from selfattn.views.tours import Stop
from selfattn.views.way_back import way_back_page
from selfattn.views.writing import Array

__all__ = ["TUTORIAL_PAGES", "tutorial_page"]

MADE = (
    "Made for this page: 4 numbers for each of {n} words, trained on 68 short sentences; chosen from "
    "forty trained models, because bank attends to the word that shows the topic."
)
Texts: TypeAlias = list[list[str]]  # the words of one sentence, or of two


def _page(
    steps: Callable[[list[str]], Steps],
    texts: Texts,
    exercise: bool,
    lang: str,
    precision: int = 4,
    **captions: str,
) -> Page:
    """Make the page of one sentence, or of two with their differences."""
    compare = (steps(texts[1]), texts[1]) if len(texts) > 1 else None
    named = _captions(lang, **captions)
    return steps_page(
        steps(texts[0]),
        texts[0],
        compare=compare,
        captions=named,
        exercise=exercise,
        precision=precision,
        lang=lang,
    )


def _captions(lang: str, word: str = "", **captions: str) -> dict[str, str]:
    """Return a tutorial's captions by their names, in a language except the word."""
    names = [name if name in CAPTIONS else name.replace("_", " ") for name in captions]
    return {"word": word} | {name: say(captions[name.replace(" ", "_")], lang) for name in names}


def _finish(
    pages: Sequence[Page],
    title: str,
    opens: int,
    tour: Callable[[], Sequence[Stop]] | None,
    exercise: bool,
    lang: str,
    steps: AttentionSteps,
    words: list[str],
    row: int,
    *known: Mapping[str, Any],
) -> Page:
    """Join pages under a title, with a tour; ``known`` are numbers of words for each page, or for all.

    The second half shows the gradients of the first number of a word's output; an exercise has none, since it would
    show the answers.
    """
    page = join_pages(pages, title) if len(pages) > 1 else pages[0]
    stops = () if tour is None or exercise else tuple(tour())
    tables = known if len(known) == len(pages) else known * len(pages)
    page = assemble(page.title, page.views, page.svg, page.lang, stops, opens, known=tables)
    if exercise:
        return page
    wish = np.zeros(steps.output.shape[-2:])
    wish[row, 0] = 1
    return replace(page, below=(way_back_page(steps, words, grad_output=wish, lang=lang),))


def _first_principles(texts: Texts | None, exercise: bool, lang: str) -> Page:
    data = tutorials.load("first_principles")
    vocab, given = data["vocab"], data["projected_attention"]
    names: dict[str, Any] = {"first": "By the river", "second": "In finance"} if texts is None else {}
    shown = list(data["tokens"].values()) if texts is None else texts
    weight = np.array(data["linear_layer"]["W"])
    projections = [np.array(given[f"W_{n}"]) for n in ("query", "key", "value")]
    drawn = list(tutorials.class_weights().astype(np.float64))
    made, own = own_words.note(shown, vocab, lang), CAPTIONS["look"] if texts else ""

    def known(words: list[str]) -> Array:
        return own_words.rows(words, vocab, "inputs")

    def raw(words: list[str]) -> AttentionSteps:
        return attention_steps(known(words), scale=1.0)

    def layer(weights: list[Array]) -> Callable[[list[str]], LayerSteps]:
        return lambda words: layer_steps(known(words), *weights)

    alone = linear(known(shown[0]), weight, shown[0])
    if len(shown) > 1:
        alone = linear(known(shown[1]), weight, shown[1], alone)
    captions = merged(
        _captions(
            lang,
            title="A linear layer: no word sees another",
            tab="Linear",
            made_up=made,
            look="*Look for this:* every ribbon runs straight across. A linear layer sees one word at a "
            "time, so a word has the same output in any sentence.",
            **names,
        ),
        lang,
    )
    both = (
        "*Look for this:* the same *bank* goes into both sentences, but its outputs differ: it attends "
        "to its neighbours. Thickness = weight."
    )
    look: dict[str, Any] = {} if texts is not None else {"look": both}
    pages = [
        render(alone, [" ".join(words) for words in shown], captions, exercise, precision=3),
        _page(
            raw,
            shown,
            exercise,
            lang,
            3,
            title="Attention on the embeddings themselves",
            tab="Words as they are",
            made_up=made,
            **names,
            **look,
        ),
        _page(
            layer(projections),
            shown,
            exercise,
            lang,
            3,
            title="Attention with projections",
            tab="Query, key, value",
            made_up=made,
            **names,
            **look,
        ),
        _page(
            layer(drawn),
            shown,
            exercise,
            lang,
            3,
            title="The class SelfAttention",
            tab="Random",
            made_up=made,
            **names,
            look=own
            or "*Look for this:* the matrices are random, from the tutorial's seed. They are not trained, "
            "so the ribbons mean nothing.",
        ),
    ]

    def tour() -> Sequence[Stop]:
        return tours.first_principles(raw, layer(projections), layer(drawn), weight, shown, lang)

    title = say("{tutorial}: bank, by a river and in finance", lang, tutorial=data["tutorial"])
    steps, row = layer(projections)(shown[0]), min(1, len(shown[0]) - 1)
    return _finish(
        pages, title, 2, None if texts else tour, exercise, lang, steps, shown[0], row, {"inputs": vocab}
    )


def _sentence_embeddings(texts: Texts | None, exercise: bool, lang: str) -> Page:
    data = tutorials.load("sentence_embeddings")
    shown = [sentence.split() for sentence in data["sentences"]] if texts is None else texts
    unknown = list(dict.fromkeys(word for words in shown for word in words if word not in data["words"]))
    models, tables = {}, []
    for name, given in data["models"].items():
        table = dict(zip(data["words"], given["parameters"]["embedding_layer.weight"], strict=True))
        tables.append({"embeddings": table})
        more = {word: own_words.numbers_of(word, table, "embeddings") for word in unknown}
        models[name] = tutorials.embedding_model(name, more=more)
    own = CAPTIONS["look"] if texts else ""
    steps = {
        name: (lambda words, model=model: model.steps(" ".join(words))) for name, model in models.items()
    }
    words_made = own_words.note(shown, dict.fromkeys(data["words"]), lang)
    made = f"{say(MADE, lang, n=len(data['words']))} {words_made}".strip()
    drawn = f"{say('Random numbers.', lang)} {words_made}".strip()
    names: dict[str, Any] = {"first": "A stream", "second": "Money", "word": "bank"} if texts is None else {}
    pages = [
        _page(
            steps["untrained"],
            shown,
            exercise,
            lang,
            title="Before training",
            tab="Before training",
            made_up=drawn,
            look=own
            or "*Look for this:* before training every word attends about equally to all words, in both sentences.",
            **names,
        ),
        _page(
            steps["trained"],
            shown,
            exercise,
            lang,
            title="A trained block",
            tab="Trained",
            made_up=made,
            look=own
            or "*Look for this:* after training *bank* attends most to the word that shows which bank is "
            "meant. The training data never marked that word.",
            **names,
        ),
        _page(
            steps["two_heads"],
            shown,
            exercise,
            lang,
            title="A trained block with two heads",
            tab="Trained, two heads",
            made_up=made,
            look=own or "*Look for this:* head 0 has learned to find money, head 1 to find water.",
            **names,
        ),
    ]
    tour = None if texts else lambda: tours.sentence_embeddings(steps, shown, lang)
    block, row = steps["trained"](shown[0]).blocks[0], shown[0].index("bank") if "bank" in shown[0] else 0
    return _finish(pages, data["tutorial"], 1, tour, exercise, lang, block, shown[0], row, *tables)


def _basics_notebook(texts: Texts | None, exercise: bool, lang: str) -> Page:
    data = tutorials.load("basics_notebook")
    table = dict(zip(data["tokens"], data["embedded_tokens"], strict=True))
    weights = [np.array(data[name]) for name in ("WQ", "WK", "WV")]
    shown = [data["tokens"]] if texts is None else texts
    made, own = own_words.note(shown, table, lang), CAPTIONS["look"] if texts else ""

    def steps(words: list[str], num_heads: int = 1) -> LayerSteps:
        return layer_steps(own_words.rows(words, table, "inputs"), *weights, num_heads=num_heads)

    pages = [
        _page(
            steps,
            shown,
            exercise,
            lang,
            title=data["tutorial"],
            word="sky",
            tab="One head",
            made_up=made,
            look=own
            or "*Look for this:* *is* and *blue* have the same numbers, so they have the same weights. "
            "Thickness = weight.",
        ),
        _page(
            lambda words: steps(words, 2),
            shown,
            exercise,
            lang,
            title="The same, with two heads",
            word="sky",
            tab="Two heads",
            made_up=made,
            look=own or "*Look for this:* each head sees one column, and their weights for *sky* differ.",
        ),
    ]
    tour = None if texts else lambda: tours.basics_notebook(steps, shown[0], lang)
    return _finish(
        pages, data["tutorial"], 0, tour, exercise, lang, steps(shown[0]), shown[0], 0, {"inputs": table}
    )


def _illustrated(texts: Texts | None, exercise: bool, lang: str) -> Page:
    data = tutorials.load("illustrated")
    x, *weights = (np.array(data[name]) for name in ("x", "w_query", "w_key", "w_value"))
    shown = [["input 1", "input 2", "input 3"]] if texts is None else texts
    own = CAPTIONS["look"] if texts else ""

    def steps(words: Sequence[str] = shown[0], **options: Any) -> LayerSteps:
        more = [
            own_words.numbers_of(word, dict(zip("qkv", x, strict=True)), "inputs") for word in words[len(x) :]
        ]
        given = [*x[: len(words)], *more]
        return layer_steps(np.array(given), *weights, **{"scale": 1.0} | options)

    def rounded(words: Sequence[str] = shown[0]) -> LayerSteps:
        printed, real = data["printed"]["attn_scores_softmax_rounded"], steps(words)
        return real.with_weights(
            printed if np.shape(printed) == real.weights.shape else real.weights.round(1)
        )

    page = _page(
        rounded,
        shown,
        exercise,
        lang,
        6,
        title=data["tutorial"],
        tab="Whole numbers",
        look=own
        or "*Look for this:* all inputs attend most to *input 2*, whose key is the longest. The tutorial "
        "rounds the weights by hand.",
        replaced_weights="The author continues with these weights, rounded by hand, instead of the "
        "softmax. use_given switches between the two: 1 or 0.",
        as_given="rounded as printed",
        word=shown[0][0],
        made_up=own_words.note([words[len(x) :] for words in shown], {}, lang),
    )
    tour = None if texts else lambda: tours.illustrated(steps, rounded(), lang)
    return _finish(
        [page], data["tutorial"], 0, tour, exercise, lang, steps(), shown[0], 0, {"inputs": x.tolist()}
    )


def _attention_module(texts: Texts | None, exercise: bool, lang: str) -> Page:
    tokens = tutorials.load("attention_module")["tokens"]
    tables = {
        f"{name}.{h}": dict(zip(tokens, head.tolist(), strict=True))
        for name, array in zip(("query", "key", "value"), tutorials.module_inputs(), strict=True)
        for h, head in enumerate(array[0])
    }
    shown = [tokens] if texts is None else texts

    def steps(words: list[str], masked: bool = False) -> AttentionSteps:
        mask = np.arange(len(words)) < len(words) - 1 if masked else None
        query, key, value = (
            np.stack([own_words.rows(words, tables[f"{name}.{h}"], f"{name}.{h}") for h in range(2)])
            for name in ("query", "key", "value")
        )
        return attention_steps(query, key, value, mask)

    by_hand = say(
        "Made by hand, since the tutorial gives no numbers: columns mean person, feeling, greeting.", lang
    )
    made = f"{by_hand} {own_words.note(shown, dict.fromkeys(tokens), lang)}".strip()
    own = CAPTIONS["look"] if texts else ""
    love = (
        "*Look for this:* *love* attends to *I* and *you*, hardly to *Hello*, as the tutorial says. "
        "Thickness = weight."
    )
    look: dict[str, Any] = {"look": love} if texts is None else {}
    pages = [
        _page(
            steps,
            shown,
            exercise,
            lang,
            title="Without a mask",
            word="love",
            tab="Without a mask",
            made_up=made,
            **look,
        ),
        _page(
            lambda words: steps(words, True),
            shown,
            exercise,
            lang,
            title="The last word masked",
            word="love",
            tab="The last word masked",
            made_up=made,
            look=own
            or "*Look for this:* no word attends to the last word, and the other weights have grown: a "
            "row still adds up to 1.",
        ),
    ]
    tour = None if texts else lambda: tours.attention_module(steps, tokens, lang)
    title, row = "Self-Attention: ScaledDotProductAttention module", min(1, len(shown[0]) - 1)
    return _finish(pages, title, 0, tour, exercise, lang, steps(shown[0]), shown[0], row, tables)


TUTORIAL_PAGES: dict[str, Callable[[Texts | None, bool, str], Page]] = {
    "first_principles": _first_principles,
    "sentence_embeddings": _sentence_embeddings,
    "basics_notebook": _basics_notebook,
    "illustrated": _illustrated,
    "attention_module": _attention_module,
}
NUMBERED = {str(n): name for n, name in enumerate(TUTORIAL_PAGES, 1)}


def tutorial_page(
    name: str | int,
    *,
    exercise: bool = False,
    text: str | None = None,
    compare: str | None = None,
    lang: str = "en",
) -> Page:
    """Show a tutorial step by step, from its own inputs.

    Parameters
    ----------
    name : {"first_principles", "sentence_embeddings", "basics_notebook", "illustrated", "attention_module"}
        Or its number, 1 to 5.
    exercise : bool, default False
        Leave one number of each row blank, as :func:`steps_page` does; such a page has no tour.
    text : str, optional
        Other words than the tutorial's, with spaces in between. Words that it has no numbers for get made ones, and
        the page says so; for "illustrated" the first three words are its three inputs. The tour, which speaks of the
        tutorial's words, is left out.
    compare : str, optional
        A second text, compared with `text`.
    lang : {"en", "de", "fr"}
        The language of the page; the tutorial's words stay.

    Returns
    -------
    Page
        Every tensor that the tutorial prints is on it.

    Raises
    ------
    ValueError
        Another name, `compare` without `text`, a text of more than 16 words in "sentence_embeddings".

    Examples
    --------
    >>> tutorial_page("illustrated").title
    'Illustrated: Self-Attention'
    >>> page = tutorial_page("first_principles", text="money bank mud")
    """
    if str(name) in NUMBERED:
        name = NUMBERED[str(name)]
    if not isinstance(name, str) or name not in TUTORIAL_PAGES:
        raise ValueError(f"there is no tutorial {name!r}; there are 1 to 5, or {', '.join(TUTORIAL_PAGES)}")
    if text is None and compare is not None:
        raise ValueError("compare is a second text: it needs text")
    texts = None if text is None else [each.split() for each in (text, compare) if each is not None]
    if texts is not None and not all(texts):
        raise ValueError("a text must have at least one word")
    return TUTORIAL_PAGES[name](texts, exercise, lang)
