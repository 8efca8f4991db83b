"""A graph of matrices as HTML: static tables that hold every number, and a script that only enhances them.

In a notebook the page is a fragment without ids, so that one document can hold any number of views. As a file it is a
document of its own, whose stages and rows have ids for links.
"""

from __future__ import annotations

import re
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

_ID = re.compile(r' id="(?:view=\d+&amp;)?stage=[^"]*"')  # text has escaped quotes
_CONTENTS = re.compile(r'<ol class="sa-contents">.*?</ol>\n')  # its links need ids
_START = re.compile(r' id="((?:view=\d+&amp;)?stage=[^"&]*)"')


@dataclass(frozen=True, repr=False)
class Page(Document):
    """A page of steps, as :func:`steps_page` makes it: shows itself in a notebook.

    ``page.save(path)`` writes a file.
    """

    views: tuple[str, ...] = ()  # HTML of each view, with ids
    titles: tuple[str, ...] = ()  # titles of the views, if there are several
    tour: tuple[Stop, ...] = ()
    homes: tuple[tuple[int, str], ...] = ()  # joined pages: the first view of each, and its title

    styles: ClassVar[tuple[str, ...]] = ("first_screen.css", "steps.css")
    scripts: ClassVar[tuple[str, ...]] = ("lesson.js",)

    def plain_body(self) -> str:
        """Return the views without ids."""
        return _ID.sub("", _CONTENTS.sub("", self.body))


def assemble(
    title: str,
    views: tuple[str, ...],
    svg: str,
    lang: str,
    titles: tuple[str, ...] = (),
    tour: tuple[Stop, ...] = (),
    opens: int = 0,
    homes: tuple[tuple[int, str], ...] = (),
    known: Sequence[Mapping[str, Any]] = (),
) -> Page:
    """Put views into one page; several views get a common title and a list. ``opens`` is the view that is shown first.

    ``known`` has, for each view, numbers of words that a reader may write: for each given matrix rows by word, or by
    place.
    """
    head, shown = "", views
    if titles:
        shown = tuple(
            view if n == 1 else view.replace(' id="stage=', f' id="view={n}&amp;stage=')
            for n, view in enumerate(views, 1)
        )
        links = "".join(
            f'<li><a href="#{start[1]}">{text(each)}</a></li>'
            for each, view in zip(titles, shown, strict=True)
            if (start := _START.search(view))
        )
        head = f'<h1 class="sa-title">{text(title)}</h1>\n<ol class="sa-contents">{links}</ol>\n'
    data, joined = tour_data(tour, homes) if tour or homes else "", "\n".join(shown)
    data += script_data(known, "sa-known") if known else ""
    name = text(say(CAPTIONS["tab of steps"], lang if lang in PLURALS else "en"))
    body = (
        f'<div class="sa-view sa-lesson" data-alone="" data-opens="{opens}" data-name="{name}">\n'
        f"{head}{joined}\n{data}</div>"
    )
    return Page(title, body, svg, lang, views, titles, tour, homes)


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
    """Put several pages into one document, each in a tab; without scripts they follow one another.

    Tours and second halves come with their pages.

    Links to the second page are ``#view=2&stage=scores&row=0`` and so on; links to the first do not change.

    Examples
    --------
    >>> import selfattn as sa
    >>> pages = [steps_page(sa.attention_steps([[x]], [[x]], [[x]])) for x in (1.0, 2.0)]
    >>> 'id="view=2&amp;stage=scores"' in join_pages(pages, "One and two").html
    True
    """
    given = list(pages) if isinstance(pages, Iterable) else []
    if not given or not all(isinstance(page, Page) for page in given):
        raise TypeError(f"pages must be a list of pages of steps, one at least, not {pages!r:.80}")
    title, pages = storable(title), given
    views = tuple(view for page in pages for view in page.views)
    titles = tuple(each for page in pages for each in (page.titles or (page.title,)))
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
    joined = assemble(title, views, picture, pages[0].lang, titles, tour, homes=homes)
    return replace(joined, below=below)


def render(
    graph: Graph,
    sides: list[str],
    texts: dict[str, str],
    exercise: bool = False,
    precision: int = 4,
    max_side: int = 16,
) -> Page:
    """Draw a graph."""
    drawing = Drawing(graph, sides, texts, exercise, precision, max_side)
    return assemble(texts["title"], (drawing.html(),), drawing.picture, texts["lang"])
