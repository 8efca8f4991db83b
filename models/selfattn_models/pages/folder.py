"""The pages that `selfattn pages` writes next to the core's: its entry-point group ``selfattn.pages`` names `pages`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from selfattn import tutorials
from selfattn.views import texts
from selfattn.views.document import Document
from selfattn.views.language import fill, in_language
from selfattn.views.live_pages import Kernels
from selfattn_models.pages.explore import explorer
from selfattn_models.pages.live_pages import live_pages, pack_page
from selfattn_models.pages.texts import PACKAGE, START


def pages(
    lang: str, kernels: Kernels | None, packs: Mapping[str, bytes]
) -> Iterator[tuple[str, Document, str]]:
    """Yield the name of each page's file, the page, and what the start page says of it; also of each pack's page."""
    about = in_language(texts.START | START, lang, PACKAGE)
    model = tutorials.embedding_model("two_heads")
    sentences = tutorials.load("sentence_embeddings")["sentences"]
    first, second = ((model.steps(each), each.split()) for each in sentences)
    yield "explorer", explorer(*first, compare=second, word="bank", lang=lang), about["explorer"]
    if kernels is not None:
        for name, page in live_pages(kernels, lang):
            yield name, page, about[name]
        for name, pack in packs.items():
            yield name, pack_page(kernels, lang, name, pack), fill(about["a model"], lang, name=name)
