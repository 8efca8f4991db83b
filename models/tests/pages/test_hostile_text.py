"""In pages of models hostile text stays text."""

import pytest
from model_pages import PAGES
from pages import assert_harmless


@pytest.mark.parametrize("name", PAGES)
def test_hostile_text_adds_and_removes_no_element(name):
    places = {"explorer": lambda data: data["texts"][0]["queries"], "map": lambda data: data["texts"]}
    assert_harmless(PAGES[name], places[name], said=name != "map")
