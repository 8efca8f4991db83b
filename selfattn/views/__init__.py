"""Attention made visible: pages that show every number of every step, and heat maps.

Pure functions from steps to HTML and figures; what is computed is in :mod:`selfattn.steps`. ``views.explorer`` and
``views.corpus_map`` are in the package selfattn-models.
"""

from typing import TYPE_CHECKING, Any

from selfattn._extras import named_in_models
from selfattn.views.first_page import write_pages
from selfattn.views.gpt import page_gpt
from selfattn.views.graph import PageError
from selfattn.views.live_pages import GPTPage, gpt_page
from selfattn.views.page import Page, join_pages, notebook_html, notebook_svg, steps_page
from selfattn.views.plot import plot_attention
from selfattn.views.texts import CAPTIONS
from selfattn.views.tutorial_pages import TUTORIAL_PAGES, tutorial_page
from selfattn.views.way_back import WayBack, way_back_page

__all__ = [
    "CAPTIONS",
    "TUTORIAL_PAGES",
    "GPTPage",
    "Page",
    "PageError",
    "WayBack",
    "gpt_page",
    "join_pages",
    "notebook_html",
    "notebook_svg",
    "page_gpt",
    "plot_attention",
    "steps_page",
    "tutorial_page",
    "way_back_page",
    "write_pages",
]

if not TYPE_CHECKING:
    _MOVED = dict.fromkeys(("CorpusMap", "Explorer", "corpus_map", "explorer"), "selfattn_models.pages")

    def __getattr__(name: str) -> Any:
        return named_in_models(__name__, name, _MOVED)
