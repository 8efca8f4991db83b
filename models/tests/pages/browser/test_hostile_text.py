"""In Chromium, hostile text in pages of models stays text."""

import pytest
from model_pages import PAGES
from page_driver import assert_nothing_runs
from pages import NASTY


@pytest.mark.parametrize("name", PAGES)
def test_nasty_tokens_run_nothing(visit, name):
    assert_nothing_runs(visit(PAGES[name](NASTY).html), NASTY[0])
