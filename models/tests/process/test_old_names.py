"""The names that models and search had in selfattn: they give the same objects."""

import importlib
import inspect
import sys

import pytest

import selfattn
import selfattn_models

# Modules, by the names that they had.
MODULES = {
    "selfattn.models": "selfattn_models",
    "selfattn.models.readings": "selfattn_models.readings",
    "selfattn.search": "selfattn_models.search",
    "selfattn.search.index": "selfattn_models.search.index",
    "selfattn.interop.sentence_transformers": "selfattn_models.interop.sentence_transformers",
    "selfattn.interop.sklearn": "selfattn_models.interop.sklearn",
    "selfattn.interop.langchain": "selfattn_models.interop.langchain",
    "selfattn.interop.bertopic": "selfattn_models.interop.bertopic",
}


@pytest.mark.parametrize("old", MODULES)
def test_an_old_name_is_the_same_module(old):
    try:
        new = importlib.import_module(MODULES[old])
    except ImportError as error:  # of a library that is not installed
        with pytest.raises(ImportError, match=str(error)[:20]):
            importlib.import_module(old)
        pytest.skip(str(error))
    assert importlib.import_module(old) is new is sys.modules[old]


def test_old_names_in_modules():
    assert selfattn.models.load is selfattn_models.load
    assert selfattn.models.readings is selfattn_models.readings
    assert selfattn.search.Index is importlib.import_module("selfattn_models.search").Index
    from selfattn.models import BertModel
    from selfattn.search import evaluate

    assert BertModel is selfattn_models.BertModel
    assert evaluate is importlib.import_module("selfattn_models.search").evaluate


@pytest.mark.parametrize("name", ["CorpusMap", "Explorer", "corpus_map", "explorer"])
def test_old_names_of_pages(name):
    assert getattr(selfattn.views, name) is getattr(importlib.import_module("selfattn_models.pages"), name)


def test_the_old_name_of_encoding_with_dask():
    pytest.importorskip("dask.array")
    pytest.importorskip("distributed")
    from selfattn.interop.dask import encode

    assert encode is importlib.import_module("selfattn_models.interop.dask").encode


def test_old_names_are_listed():
    assert {"models", "search"} <= set(dir(selfattn))
    assert dict(inspect.getmembers(selfattn))["models"] is selfattn_models
