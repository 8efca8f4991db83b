"""The documentation of the package of models runs: examples of its modules, code in Markdown files, links."""

from pathlib import Path

import numpy as np
import pytest
import text_folders
from doc_checks import (
    check_code,
    check_examples_of_module,
    check_links,
    modules_with_examples,
    names_of_no_file,
)

import selfattn as sa

MODELS = Path(__file__).parents[2]
ROOT = MODELS.parent
# Folders that pages load, as their readers would: tiny models with random weights, under these names.
MODELS_OF_PAGES = {"all-MiniLM-L6-v2": "BertModel", "ms-marco-MiniLM-L6-v2": "BertForSequenceClassification"}
MODULES = modules_with_examples(MODELS, "selfattn_models")
MARKDOWN = sorted([MODELS / "README.md", *MODELS.glob("docs/**/*.md")])
ARCHITECTURE = MODELS / "docs/guide/adding_an_architecture.md"
LOADING = ("README.md", "search.md", "fine_tuning.md")  # pages beyond "coming from" that load a folder


@pytest.fixture(autouse=True)
def _as_it_was():
    """Examples may set threads and print options."""
    with np.printoptions():
        yield
    sa.set_num_threads(None)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_modules(name):
    check_examples_of_module(name)


def small_tickets(day):
    """A table of forty texts, some of them alike."""
    words = ["the printer", "a screen", "no sound", "old water", "the sea", "a dark ship", "stones"]
    rows = [
        (f"{day}{n}", words[n % 7] + " burns" * (n % 3), "ab"[n % 2], "open" if n % 5 else "closed")
        for n in range(40)
    ]
    return "\n".join(map(",".join, [("id", "text", "product", "status"), *rows])) + "\n"


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_in_markdown(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path.name == "search.md":
        pytest.importorskip("pandas")
        for day in ("tickets", "tomorrow"):
            (tmp_path / f"{day}.csv").write_text(small_tickets(day))
    if path.parent.name == "coming_from" or path.name in LOADING:
        for name, kind in MODELS_OF_PAGES.items():
            text_folders.save_bert(tmp_path / name, 512, kind, num_labels=1)
    check_code(path)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_markdown_lead_somewhere(path):
    check_links(path)


def test_files_that_the_page_of_an_architecture_names_exist():
    assert names_of_no_file(ROOT, ARCHITECTURE) == []


def test_the_page_of_an_architecture_shows_its_file():
    shown = (MODELS / "selfattn_models/qwen3.py").read_text()
    assert f"```py\n{shown}```\n" in ARCHITECTURE.read_text()
