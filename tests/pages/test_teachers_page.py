"""The page for teachers: every page of the folder, and every question of its tours with the answer."""

import pytest
from pages import Reader

from selfattn import views


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return views.write_pages(tmp_path_factory.mktemp("pages"), lang=("en", "de")).parent


@pytest.mark.parametrize(("lang", "end"), [("en", ".html"), ("de", ".de.html")])
def test_it_has_all_pages_questions_and_answers(folder, lang, end):
    path = folder / f"teacher{end}"
    page = Reader(path.read_text(encoding="utf-8"))
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    pages = {
        found.name for found in folder.glob("*.html") if found.name.endswith(".de.html") == (lang == "de")
    }
    other = {"teacher.html", "teacher.de.html"} - {path.name}
    assert set(links) == pages - {path.name} | other and path.name in (folder / f"index{end}").read_text()
    assert "script" not in dict(page.elements)
    said, right = "".join(page.text), 0
    for name in views.TUTORIAL_PAGES:
        made = views.tutorial_page(name, lang=lang)
        for stop in (*made.tour, *made.below[0].tour):
            for sentence in (stop.ask, *stop.options, stop.reveal):
                assert sentence.replace("*", "") in said, (name, stop.name)
            right += 1
    assert sum(attributes.get("class") == "sa-right" for _, attributes in page.elements) == right
