"""LangChain's vector store and retriever on the embeddings of a folder."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("langchain_core")
from langchain_core.vectorstores import InMemoryVectorStore
from text_folders import add_pipeline, old_pooling, save_bert

import selfattn_models as models
from selfattn import nn
from selfattn_models.interop.langchain import Embeddings

TEXTS = ["the sea was calm", "a ship sailed over dark water", "near old stones .", "the dark ship"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    prompts = {"prompts": {"query": "query: ", "document": "the ", "passage": "old "}}
    return add_pipeline(save_bert(tmp_path_factory.mktemp("bert")), old_pooling("mean"), sentence=prompts)


@pytest.mark.parametrize("question", ["calm water", "stones"])
def test_a_retriever(folder, question):
    """Its order is that of the cosines, with the folder's prompts for queries and documents."""
    embeddings, model = Embeddings(folder), models.load(folder)
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    found = store.as_retriever(search_kwargs={"k": 3}).invoke(question)
    a, b = model.encode(question, prompt="query: "), model.encode(TEXTS, prompt="the ")
    cosines = b @ a / np.linalg.norm(b, axis=1) / np.linalg.norm(a)
    assert [each.page_content for each in found] == [TEXTS[n] for n in np.argsort(-cosines)[:3]]
    assert embeddings.embed_documents(TEXTS) == asyncio.run(embeddings.aembed_documents(TEXTS)) == b.tolist()
    assert embeddings.embed_query(question) == a.tolist()
    assert embeddings.embed_documents([]) == []


def test_keywords(folder):
    model = models.load(folder)
    for given, expected in ({}, "old "), ({"query_encode_kwargs": {"prompt": "a "}}, "a "):
        embeddings = Embeddings(model_name=model, encode_kwargs={"prompt_name": "passage"}, **given)
        assert embeddings.embed_documents(TEXTS) == model.encode(TEXTS, prompt="old ").tolist()
        assert embeddings.embed_query("sea") == model.encode("sea", prompt=expected).tolist()
    own = nn.EmbeddingModel(lambda text: [len(text)], 40, 4, max_seq_len=8, rng=0)
    assert Embeddings(own).embed_documents(TEXTS) == own.encode(TEXTS).tolist()
    assert Embeddings(own).embed_query("sea") == own("sea").tolist()
    with pytest.raises(ValueError, match="a list or a column of texts, not 'abc'"):
        Embeddings(own).embed_documents("abc")
    with pytest.raises(TypeError, match="is a Linear, which makes no embeddings of texts"):
        Embeddings(nn.Linear(2, 2, rng=0))
