"""A graph of matrices as a page: the data of its views, which scripts draw, and a still picture of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from selfattn.views.document import Document, stacked
from selfattn.views.draw import Drawing
from selfattn.views.graph import Graph, PageError, Steps, build
from selfattn.views.language import PLURALS, say
from selfattn.views.texts import CAPTIONS, merged
from selfattn.views.tours import Stop, tour_data
from selfattn.views.writing import as_whole, script_data, storable, text, token_list


@dataclass(frozen=True, repr=False)
class Page(Document):
    """A page of steps, as :func:`steps_page` makes it: shows itself in a notebook.

    ``page.save(path)`` writes a file.
    """

    views: tuple[str, ...] = ()  # the data of each view, as an element
    tour: tuple[Stop, ...] = ()
    homes: tuple[tuple[int, str], ...] = ()  # joined pages: the first view of each, and its title

    styles: ClassVar[tuple[str, ...]] = ("first_screen.css", "steps.css")
    about: ClassVar[str] = (
        "Each row has the weights with which its word attends to the words of the columns: darker is more."
    )
    scripts: ClassVar[tuple[str, ...]] = ("lesson.js",)


def assemble(
    title: str,
    views: tuple[str, ...],
    svg: str,
    lang: str,
    tour: tuple[Stop, ...] = (),
    opens: int = 0,
    homes: tuple[tuple[int, str], ...] = (),
    known: Sequence[Mapping[str, Any]] = (),
) -> Page:
    """Put views into one page. ``opens`` is the view that is shown first.

    ``known`` has, for each view, numbers of words that a reader may write: for each given matrix rows by word, or by
    place.
    """
    data = "".join(f'<div class="sa-steps">{view}</div>\n' for view in views)
    data += tour_data(tour, homes) if tour or homes else ""
    data += script_data(known, "sa-known") if known else ""
    name = text(say(CAPTIONS["tab of steps"], lang if lang in PLURALS else "en"))
    body = (
        f'<div class="sa-view sa-lesson" data-alone="" data-opens="{opens}" data-title="{text(title)}" '
        f'data-name="{name}">\n{data}</div>'
    )
    return Page(title, body, svg, lang, views, tour, homes)


def steps_page(
    steps: Steps,
    tokens: str | Iterable[str] | None = None,
    *,
    compare: tuple[Steps, str | Iterable[str]] | None = None,
    captions: Mapping[str, str] | None = None,
    exercise: bool = False,
    key_tokens: str | Iterable[str] | None = None,
    precision: int = 4,
    max_side: int = 16,
    lang: str = "en",
) -> Page:
    """Show every number of every step of attention, what it is computed from, and what changes with it.

    Parameters
    ----------
    steps : AttentionSteps, LayerSteps or ModelSteps
    tokens : str or iterable of str, one for each query, optional
        Shown as text, whatever they hold; one string is split at spaces. By default the tokens of the steps, such as
        a model's, or numbers.
    compare : (steps, tokens), optional
        A second sentence with the same steps, aligned with the first by row, and the difference: second minus
        first, for the rows and columns that both have.
    captions : mapping of str to str, optional
        Replaces sentences and labels; the names are those of :data:`selfattn.views.CAPTIONS`.
    exercise : bool, default False
        Leave one number of each row blank, to be predicted and revealed; a sheet at the end has the answers.
    key_tokens : str or iterable of str, one for each key, optional
        By default ``tokens``, if there are as many keys as queries.
    precision : int, default 4
        The most decimals, 1 to 12; matrices that need fewer show fewer.
    max_side : int, default 16
        Matrices with more rows or columns are abridged, and say so.
    lang : {"en", "de", "fr"}
        The language of what is not in ``captions``.

    Returns
    -------
    Page
        Shows itself in a notebook; ``page.save(path)`` writes a file.

    Raises
    ------
    TypeError
        Steps of another class, tokens that are not a sequence of strings, captions that are not a mapping.
    ValueError
        A number of tokens that does not fit the rows, unknown captions, ``compare`` with other steps;
        :class:`PageError`, a ValueError, if there are more than 200,000 numbers, a batch of sentences, or no
        heads.

    Examples
    --------
    >>> import selfattn as sa
    >>> page = steps_page(sa.attention_steps([[1.0, 0.0], [0.0, 1.0]]), "river bank")
    >>> "bank" in page.html
    True
    """
    texts = merged(captions, lang)
    for name, value, low, high in (("precision", precision, 1, 12), ("max_side", max_side, 4, 256)):
        if not low <= as_whole(value) <= high:
            raise ValueError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    precision, max_side = as_whole(precision), as_whole(max_side)
    names = check_tokens(steps, tokens, key_tokens)
    graph = build(steps, *names)
    sides = [" ".join(names[0])]
    if compare is not None:
        if not isinstance(compare, tuple) or len(compare) != 2:
            raise TypeError(f"compare is (steps, tokens), not {type(compare).__name__} {compare!r:.60}")
        other = check_tokens(*compare, None, "compare: ")
        graph = build(compare[0], *other, graph)
        sides.append(" ".join(other[0]))
    return render(graph, sides, texts, exercise, precision, max_side)


def notebook_html(steps: Steps) -> str | None:
    """Return the HTML of steps in a notebook, or None if a page cannot show them.

    With None the notebook shows their text.
    """
    try:
        return steps_page(steps).fragment
    except PageError:
        return None


def notebook_svg(steps: Steps) -> str | None:
    """Return a picture to go with :func:`notebook_html`, or None if that returns None."""
    try:
        graph = build(steps, *check_tokens(steps, None, None))
    except PageError:
        return None
    return Drawing(graph, [""], CAPTIONS, False, 4, 16).picture


def check_tokens(
    steps: Steps, tokens: Iterable[str] | None, key_tokens: Iterable[str] | None, where: str = ""
) -> tuple[list[str], list[str]]:
    """Return the labels of queries and keys; tokens that do not fit are an error."""
    from selfattn.steps.attention import AttentionSteps
    from selfattn.steps.layers import ModelSteps

    if not isinstance(steps, AttentionSteps | ModelSteps):
        raise TypeError(
            f"{where}steps is a {type(steps).__name__}; pass what attention_steps or layer.steps returned; "
            "views.explorer(model, text) shows a whole model"
        )
    n_queries, n_keys = (
        steps.scores.shape[-2:] if isinstance(steps, AttentionSteps) else (len(steps.inputs),) * 2
    )
    if tokens is None and steps.tokens is not None and len(steps.tokens) == n_queries:
        tokens = steps.tokens
    if isinstance(tokens, Iterator):  # it may be read twice: for queries and keys
        tokens = list(tokens)
    if key_tokens is None and n_queries == n_keys:
        key_tokens = tokens
    labels = []
    for name, given, count in (("tokens", tokens, n_queries), ("key_tokens", key_tokens, n_keys)):
        if given is None:
            labels.append([str(n) for n in range(count)])
            continue
        each = token_list(where + name, given)
        if len(each) != count:
            raise ValueError(f"{where}{len(each)} {name} do not fit the {count} rows of the steps")
        labels.append(each)
    return labels[0], labels[1]


def join_pages(pages: Iterable[Page], title: str) -> Page:
    """Put several pages into one document, each in a tab.

    Tours and second halves come with their pages.

    Links to the second page are ``#view=2&stage=scores&row=0`` and so on; links to the first do not change.

    Examples
    --------
    >>> import selfattn as sa
    >>> pages = [steps_page(sa.attention_steps([[x]], [[x]], [[x]])) for x in (1.0, 2.0)]
    >>> len(join_pages(pages, "One and two").views)
    2
    """
    given = list(pages) if isinstance(pages, Iterable) else []
    if not given or not all(isinstance(page, Page) for page in given):
        raise TypeError(f"pages must be a list of pages of steps, one at least, not {pages!r:.80}")
    title, pages = storable(title), given
    views = tuple(view for page in pages for view in page.views)
    picture = stacked([(page.title, page.svg) for page in pages], title)
    firsts = [sum(len(page.views) for page in pages[:n]) for n in range(len(pages))]
    homes = tuple(
        (first + start, name)
        for first, page in zip(firsts, pages, strict=True)
        for start, name in page.homes or ((0, page.title),)
    )
    tour = tuple(
        replace(stop, view=first + stop.view)
        for first, page in zip(firsts, pages, strict=True)
        for stop in page.tour
    )
    below = tuple(
        replace(each, body=each.body.replace(' data-name="', f' data-name="{text(page.title)}: ', 1))
        for page in pages
        for each in page.below
    )
    joined = assemble(title, views, picture, pages[0].lang, tour, homes=homes)
    return replace(joined, below=below)


def render(
    graph: Graph,
    sides: list[str],
    texts: dict[str, str],
    exercise: bool = False,
    precision: int = 4,
    max_side: int = 16,
) -> Page:
    """Make the page of a graph."""
    drawing = Drawing(graph, sides, texts, exercise, precision, max_side)
    return assemble(texts["title"], (script_data(drawing.data()),), drawing.picture, texts["lang"])
