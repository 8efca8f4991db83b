"""Hostile text in every page: it stays text in the HTML, in the picture, and in the data that the script reads."""

from xml.etree import ElementTree

import pytest
from pages import NASTY, PAGES, Reader, data_of

from selfattn.views.tours import Stop, tour_data
from selfattn.views.writing import visible

PLAIN = [f"word{n}" for n in range(len(NASTY))]


def tags(page):
    """Return all elements with the names of their attributes, except bdi, which encloses words in other scripts."""
    return [(tag, [*attributes]) for tag, attributes in page.elements if tag != "bdi"]


@pytest.mark.parametrize("name", PAGES)
def test_hostile_text_adds_and_removes_no_element(name):
    page, plain = PAGES[name](NASTY), PAGES[name](PLAIN)
    for made, expected in ((page.html, plain.html), (page.fragment, plain.fragment)):
        made.encode("utf-8")
        read = Reader(made)
        assert tags(read) == tags(Reader(expected))
        assert name == "gpt" or all(visible(token) in "".join(read.text) for token in NASTY)
        for script in read.scripts:
            if script.startswith("{"):
                assert not set("<>&\u2028\u2029\x00") & set(script)
    ElementTree.fromstring(page.svg)
    data = data_of(page.html)
    tokens = {
        "explorer": lambda: data["texts"][0]["queries"],
        "way back": lambda: data["queries"],
        "gpt": lambda: data["shown"],
    }.get(name, lambda: data["labels"]["t0"])()
    assert tokens == [visible(token) for token in NASTY]


def test_the_stops_of_a_tour():
    element = tour_data([Stop(token, token, (token, "no"), 0, token) for token in NASTY])
    assert tags(Reader(element)) == [("script", ["type", "class"])]
    assert [stop["name"] for stop in data_of(element, "sa-tour-data")] == NASTY
