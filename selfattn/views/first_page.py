"""A folder of all pages and a start page, for a web server or a USB stick: every link is relative."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar

from selfattn import _disk
from selfattn.views.document import Document
from selfattn.views.language import OWN_NAMES, PLURALS, fill, in_language, say
from selfattn.views.live_pages import live_pages, packaged_kernels, read_kernels
from selfattn.views.packs import MARK, MOST_INSIDE, SUFFIX
from selfattn.views.texts import START
from selfattn.views.tours import Stop
from selfattn.views.tutorial_pages import TUTORIAL_PAGES, tutorial_page
from selfattn.views.writing import text

EXERCISE = "_exercise"  # after the name of a lesson


@dataclass(frozen=True, repr=False)
class _FirstPage(Document):
    styles: ClassVar[tuple[str, ...]] = ("first_page.css",)


def write_pages(
    folder: str | os.PathLike[str],
    *,
    lang: str | Sequence[str] = "en",
    kernels: str | os.PathLike[str] | None = None,
    packs: Mapping[str, bytes] | None = None,
) -> Path:
    """Write all pages, a start page, and one for teachers: lessons, their exercises, live pages such as a GPT.

    Other packages add pages, as the entry-point group ``selfattn.pages`` names them: selfattn-models adds those of
    models.

    Parameters
    ----------
    folder : path
        Made if it does not exist. Pages of the same names are replaced, other files stay.
    lang : {"en", "de", "fr"}, or several
        The pages of each language; those of the second one and of later ones have its name in theirs: ``gpt.de.html``.
    kernels : path, optional
        The core in WebAssembly, which ``make -C csrc wasm-library`` builds, for the live pages; by default that of the
        package. A build without it writes no live pages. Another file is a ValueError.
    packs : mapping of str to bytes, optional
        Models by the names of their pages, as ``selfattn_models.pack`` writes them. A page has a small pack inside,
        and fetches one of more than 4 MB, which is written next to it, from its own web server.

    Returns
    -------
    Path
        Of the start page. A file that has the name of a page, but is none, is a FileExistsError, and nothing is
        written.
    """
    langs = [lang] if isinstance(lang, str) else list(dict.fromkeys(lang))
    if not langs:
        raise ValueError(f"lang is empty; the languages are {', '.join(PLURALS)}")
    ends = {each: f".{each}.html" if n else ".html" for n, each in enumerate(langs)}
    pages = {each: dict(_pages(each)) for each in langs}
    about = {each: in_language(START, each) for each in langs}
    kernels = packaged_kernels() if kernels is None else kernels
    core, packs = None if kernels is None else read_kernels(kernels), packs or {}
    if packs and core is None:
        raise ValueError(
            "pages of packs need the core in WebAssembly, which this build of selfattn does not have"
        )
    for each in langs:
        if core is not None:
            pages[each] |= live_pages(core, each)
        for further in entry_points(group="selfattn.pages"):
            for name, page, sentence in further.load()(each, core, packs):
                if name in packs and name in pages[each]:
                    raise ValueError(f"a page has the name {name!r} already; give the model another one")
                pages[each][name], about[each][name] = page, sentence
    for own in langs:
        pages[own]["teacher"] = _teachers_page(pages[own], about[own], own, ends)
        pages[own]["index"] = _start_page(pages[own], about[own], own, ends)
    paths = {(name, own): Path(folder, name + ends[own]) for own in langs for name in pages[own]}
    for path in paths.values():
        if os.path.lexists(path) and not _disk.has_mark(path, b'<body class="sa-page">'):
            raise FileExistsError(f"{path} exists and is not a page of selfattn's")
    fetched = {Path(folder, n + SUFFIX): pack for n, pack in packs.items() if len(pack) > MOST_INSIDE}
    for path in fetched:
        if os.path.lexists(path) and not _disk.has_mark(path, MARK):
            raise FileExistsError(f"{path} exists and is not a pack of selfattn's")
    paths["index", langs[0]].parent.mkdir(parents=True, exist_ok=True)
    for path, pack in fetched.items():
        _disk.write_file(path, pack)
    for (name, own), path in paths.items():
        up = ("up", own, "index" + ends[own], say(START["all pages"], own))
        others = [
            ("alternate", each, name + end, OWN_NAMES[each]) for each, end in ends.items() if each != own
        ]
        replace(pages[own][name], links=(up, *others)).save(path)
    return paths["index", langs[0]]


def _pages(lang: str) -> Iterator[tuple[str, Document]]:
    """Yield the pages by the names of their files, in the order of the start page."""
    for name in TUTORIAL_PAGES:
        yield name, tutorial_page(name, lang=lang)
        yield name + EXERCISE, tutorial_page(name, exercise=True, lang=lang)


def _start_page(
    pages: dict[str, Document], texts: Mapping[str, str], lang: str, ends: Mapping[str, str]
) -> Document:
    """Return the start page: a link to each lesson, and to its exercise."""
    lessons = ""
    for name in (name for name in pages if name in texts):
        about = _about(pages, texts, name, lang)
        more = ""
        if name + EXERCISE in pages:
            more = f'<a href="{name}{EXERCISE}{ends[lang]}">{text(texts["exercise"])}</a>'
        lessons += f'<li><a class="sa-card" href="{name}{ends[lang]}">{about}</a>{more}</li>\n'
    head = f"<h1>{text(texts['title'])}</h1>\n<p>{text(texts['look'])} {_others('index', lang, ends)}</p>"
    body = f'<main class="sa-view sa-start" data-alone="">{head}\n<ol>\n{lessons}</ol></main>'
    return _FirstPage(texts["title"], body, "", lang)


def _teachers_page(
    pages: dict[str, Document], texts: Mapping[str, str], lang: str, ends: Mapping[str, str]
) -> Document:
    """Return the page for teachers: for each lesson its minutes, what its tours ask, the answers, what prints."""
    lessons = ""
    for name in (name for name in pages if name in texts):
        page, asked, n = pages[name], "", 0
        for each in (page, *page.below):
            stops: Sequence[Stop] = getattr(each, "tour", ())
            n += len(stops)
            asked += (
                f"<h2>{text(each.title)}</h2>\n<ol>{''.join(map(_question, stops))}</ol>\n" if stops else ""
            )
        minutes = text(fill(texts["minutes"], lang, n=2 * n or 10))
        more = ""
        if name + EXERCISE in pages:
            more = f'<p><a href="{name}{EXERCISE}{ends[lang]}">{text(texts["prints"])}</a></p>\n'
        about = _about(pages, texts, name, lang)
        lessons += f'<li><a href="{name}{ends[lang]}">{about}</a> {minutes}.\n{more}{asked}</li>\n'
    _, title, look = texts["teacher"].split("*")
    up = f'<a href="index{ends[lang]}">{text(texts["all pages"])}</a> {_others("teacher", lang, ends)}'
    head = f"<h1>{text(title)}</h1>\n<p>{text(look)} {up}</p>"
    body = f'<main class="sa-view sa-teacher" data-alone="">{head}\n<ol>\n{lessons}</ol></main>'
    return _FirstPage(title, body, "", lang)


def _question(stop: Stop) -> str:
    """Return a question, what to choose from, and the answer."""
    options = "".join(
        f"<li{' class=sa-right' if n == stop.right else ''}>{_bold(each)}</li>"
        for n, each in enumerate(stop.options)
    )
    return f"<li>{_bold(stop.ask)}<ul>{options}</ul>{_bold(stop.reveal)}</li>\n"


def _about(pages: dict[str, Document], texts: Mapping[str, str], name: str, lang: str) -> str:
    """Return what a lesson is about, with its number of questions."""
    return _bold(fill(texts[name], lang, n=len(getattr(pages[name], "tour", ()))))


def _bold(sentence: str) -> str:
    """Escape a sentence, and make its *words* bold."""
    return re.sub(r"\*(.+?)\*", r"<strong>\1</strong>", text(sentence))


def _others(name: str, lang: str, ends: Mapping[str, str]) -> str:
    """Return links to a page in other languages."""
    return " ".join(
        f'<a hreflang="{each}" lang="{each}" href="{name}{end}">{OWN_NAMES[each]}</a>'
        for each, end in ends.items()
        if each != lang
    )
