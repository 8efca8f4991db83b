"""The languages of the pages of models: every sentence has a translation with the same places, pages say no English."""

from pathlib import Path

from sentences import (
    assert_names_are_used,
    assert_no_sentence_but,
    assert_of_one_language,
    assert_of_terms,
    assert_translated,
    said,
)

from selfattn import views
from selfattn.views import language
from selfattn_models import pages
from selfattn_models.pages.texts import PACKAGE

PAGES = Path(pages.__file__).parent
# Names in files of models.
NAMES = r"|^[\w.]*(Norm|Pooling|Dropout|Tokenizer|Piece|Processing)\w*$"
NAMES += (
    r"|^(Fault|True|Sequence|Split|Isolated|Digits|ByteLevel|Lowercase|\w*Bert|MPNet|Bart|Roberta|Qwen2)$"
)


def test_files_have_each_sentence_with_its_places_and_no_other():
    assert_translated(
        said(PAGES, PACKAGE) - set(language.entries("de")), PACKAGE
    )  # which the core has translated


def test_sentences_have_the_words_of_the_table_of_terms():
    assert_of_terms(PACKAGE)


def test_scripts_and_markup_have_every_sentence_by_its_name_and_none_of_their_own():
    assert_names_are_used(PACKAGE)
    both = (language.read("en", package) for package in (language.VIEWS, PACKAGE))
    assert_no_sentence_but({name for file in both for part in file.values() for name in part}, PAGES, NAMES)


def test_pages_of_a_language_say_no_english_and_link_to_the_other(tmp_path):
    views.write_pages(tmp_path, lang=("fr", "de"))
    assert (tmp_path / "explorer.de.html").exists()
    assert_of_one_language(tmp_path, language.VIEWS, PACKAGE)
