"""A folder of all pages and a start page, for a web server or a USB stick: every link is relative."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from selfattn import tutorials
from selfattn.views.document import Document
from selfattn.views.explore import explorer
from selfattn.views.gpt import gpt_page
from selfattn.views.language import fill
from selfattn.views.texts import START
from selfattn.views.tutorial_pages import TUTORIAL_PAGES, tutorial_page
from selfattn.views.writing import text

EXERCISE = "_exercise"  # after the name of a lesson


@dataclass(frozen=True, repr=False)
class _StartPage(Document):
    styles: ClassVar[tuple[str, ...]] = ("start.css",)


def write_pages(folder: str | os.PathLike[str]) -> Path:
    """Write all pages and a start page: the lessons, their exercises, all heads of a small model, a GPT.

    Parameters
    ----------
    folder : path
        Made if it does not exist. Pages of the same names are replaced, other files stay.

    Returns
    -------
    Path
        Of the start page. A file that has the name of a page, but is none, is a FileExistsError, and nothing is written.
    """
    pages = dict(_pages())
    paths = {name: Path(folder, f"{name}.html") for name in (*pages, "index")}
    for path in paths.values():
        if os.path.lexists(path) and not (path.is_file() and b'<body class="sa-page">' in path.read_bytes()):
            raise FileExistsError(f"{path} exists and is not a page of selfattn's")
    paths["index"].parent.mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        replace(page, links=(("up", "en", "index.html", START["all pages"]),)).save(paths[name])
    return _start_page(pages).save(paths["index"])


def _pages() -> Iterator[tuple[str, Document]]:
    """Yield the pages by the names of their files, in the order of the start page."""
    for name in TUTORIAL_PAGES:
        yield name, tutorial_page(name)
        yield name + EXERCISE, tutorial_page(name, exercise=True)
    model, sentences = (
        tutorials.embedding_model("two_heads"),
        tutorials.load("sentence_embeddings")["sentences"],
    )
    first, second = ((model.steps(each), each.split()) for each in sentences)
    yield "explorer", explorer(*first, compare=second, word="bank")
    yield "gpt", gpt_page()


def _start_page(pages: dict[str, Document]) -> Document:
    """Return the start page: a link to each lesson, and to its exercise."""
    lessons = ""
    for name in (name for name in pages if name in START):
        about = text(fill(START[name], n=len(getattr(pages[name], "tour", ()))))
        about = re.sub(r"\*(.+?)\*", r"<strong>\1</strong>", about)
        more = (
            f'<a href="{name}{EXERCISE}.html">{text(START["exercise"])}</a>'
            if name + EXERCISE in pages
            else ""
        )
        lessons += f'<li><a class="sa-card" href="{name}.html">{about}</a>{more}</li>\n'
    head = f"<h1>{text(START['title'])}</h1>\n<p>{text(START['look'])}</p>"
    body = f'<main class="sa-view sa-start" data-alone="">{head}\n<ol>\n{lessons}</ol></main>'
    return _StartPage(START["title"], body, "")
