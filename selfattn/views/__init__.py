"""Attention made visible: pages that show every number of every step, and heat maps.

Pure functions from steps to HTML and figures; what is computed is in :mod:`selfattn.steps`.
"""

from selfattn.views.explore import Explorer, explorer
from selfattn.views.gpt import GPTPage, gpt_page, page_gpt
from selfattn.views.graph import PageError
from selfattn.views.map import CorpusMap, corpus_map
from selfattn.views.page import Page, join_pages, notebook_html, notebook_svg, steps_page
from selfattn.views.plot import plot_attention
from selfattn.views.start import write_pages
from selfattn.views.texts import CAPTIONS
from selfattn.views.tutorial_pages import TUTORIAL_PAGES, tutorial_page
from selfattn.views.way_back import WayBack, way_back_page

__all__ = [
    "CAPTIONS", "TUTORIAL_PAGES", "CorpusMap", "Explorer", "GPTPage", "Page", "PageError", "WayBack", "corpus_map", "explorer",
    "gpt_page", "join_pages", "notebook_html", "notebook_svg", "page_gpt", "plot_attention", "steps_page",
    "tutorial_page", "way_back_page", "write_pages",
]  # fmt: skip
