"""BERTopic from texts to topics, on the embeddings of a folder."""

import numpy as np
import pytest

pytest.importorskip("bertopic")
from bertopic import BERTopic
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from text_folders import save_bert

import selfattn_models as models
from selfattn_models.interop.bertopic import Embedder

OF_SEA = ["sea calm sea", "calm sea calm", "sea sea calm"]
OF_STONES = ["old stones near stones", "near old stones stones"]


def test_topics(tmp_path):
    folder, texts = save_bert(tmp_path), (OF_SEA + OF_STONES) * 4
    embedder = Embedder(folder)
    np.testing.assert_array_equal(embedder.embed(texts), y := models.load(folder).encode(texts))
    of_words = embedder.embed_words(np.array(["sea", "ship"]))
    np.testing.assert_array_equal(of_words, Embedder(folder, progress=False).embed(["sea", "ship"]))
    topics = BERTopic(
        embedding_model=embedder, umap_model=PCA(2, random_state=0), hdbscan_model=KMeans(2, random_state=0)
    )
    found, _ = topics.fit_transform(texts)
    sea, stones = found[0], found[3]
    assert found == [sea, sea, sea, stones, stones] * 4
    assert {sea, stones} == {0, 1}
    for topic, words in (sea, {"sea", "calm"}), (stones, {"old", "stones", "near"}):
        assert words <= {word for word, _ in topics.get_topic(topic)[:3]}
    assert topics.transform(["sea calm calm", "old near stones stones"])[0] == [sea, stones]
    assert topics.find_topics("sea calm sea", top_n=1)[0] == [sea]
    again = topics.fit_transform(texts, embeddings=y)[0]
    assert (np.equal.outer(again, again) == np.equal.outer(found, found)).all()
