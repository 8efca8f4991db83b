"""The languages of pages: translations have the places of their sentences, pages say no English, plurals are CLDR's."""

import runpy
from pathlib import Path

import pytest
from pages import data_of
from sentences import (
    assert_names_are_used,
    assert_no_sentence_but,
    assert_of_one_language,
    assert_of_terms,
    assert_translated,
    said,
)

import selfattn as sa
from selfattn import views
from selfattn.diagnosis import rules, search
from selfattn.views import language

VIEWS = Path(views.__file__).parent


def test_files_have_each_sentence_with_its_places_and_no_other():
    assert_translated(said(VIEWS, language.VIEWS), language.VIEWS)


@pytest.mark.parametrize("package", [language.VIEWS, "selfattn.diagnosis"])
def test_sentences_have_the_words_of_the_table_of_terms(package):
    assert_of_terms(package)


def test_each_fault_that_is_diagnosed_has_its_sentence_in_each_language():
    own = runpy.run_path(rules.__file__)["RULES"]  # without those that a test has added
    sentences = {rule.sentence for rule in own} | {*search.FOUND.values(), "right {n}", "yours {n}"}
    assert_translated(sentences, "selfattn.diagnosis")


def test_a_page_of_a_fault_says_it_in_its_language():
    def attention(q, k, v):
        weights = sa.softmax(q @ k.T / q.shape[1] ** 0.5, axis=0)
        return weights @ v

    verdict = sa.diagnose(attention)
    assert verdict.faults[0].endswith("rows of weights sum to 0.74 … 1.21.")
    for lang, sentence, whose in (
        ("de", "Die Softmax geht über die Queries (Achse −2)", "Ihre 0"),
        ("fr", "Le softmax porte sur les requêtes (axe −2)", "la vôtre 0"),
    ):
        said = str(data_of(verdict.page(lang=lang).html))
        assert f"{sentence} " in said and "0.74" in said and whose in said
        assert "The softmax" not in said and "yours" not in said


def test_scripts_and_markup_have_every_sentence_by_its_name_and_none_of_their_own():
    assert_names_are_used(language.VIEWS)
    names = {name for part in language.read("en").values() for name in part}
    assert_no_sentence_but(names, VIEWS)


def test_pages_of_a_language_say_no_english_and_link_to_the_other(tmp_path):
    views.write_pages(tmp_path, lang=("fr", "de"))
    assert_of_one_language(tmp_path, language.VIEWS)


def test_plurals_are_those_of_cldr_and_what_a_file_lacks_is_english():
    sentence = "{n, plural, one {one} many {many} other {other}} of {n}"
    for lang, forms in {"de": "other one other other", "fr": "one one other many"}.items():  # CLDR 48
        found = [language.say(sentence, lang, n=n) for n in (0, 1, 2, 1_000_000)]
        assert [line.split()[0] for line in found] == forms.split() and found[-1].endswith(" of 1000000")
    with pytest.raises(ValueError, match='lang must be "en", "de" or "fr", not '):
        language.say("Reset", "nl")
