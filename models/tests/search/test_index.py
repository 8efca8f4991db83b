"""An index of texts: what it finds against scores in float64, what is embedded, which states are refused."""

import json
import operator
import pickle
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from hostile import contents
from refusals import refusals
from text_folders import add_pipeline, old_pooling, save_bert

import selfattn_models as models
from selfattn_models import search
from selfattn_models.search import _ranking, _store, _windows

WORDS = [f"w{n}" for n in range(60)]
WIDTH = 24


class Words:
    """A model that adds up a random vector for each word, and keeps the texts that it was given."""

    def __init__(self, seed=0, width=WIDTH):
        rng = np.random.default_rng(seed)
        self.table = {word: rng.standard_normal(width) for word in WORDS}
        self.given = []

    def __call__(self, texts):
        self.given += texts
        return np.array([sum(self.table[word] for word in text.split()) for text in texts], np.float32)


def drawn(n, seed=1, most=6):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(2, most + 1))) for _ in range(n)]


@pytest.fixture
def model():
    return Words()


@pytest.fixture
def index(tmp_path, model):
    return search.Index.create(tmp_path / "index", model)


def exact(metric, query, vectors):
    """Scores in float64."""
    q, x = query.astype(np.float64), vectors.astype(np.float64)
    if metric == "cosine":
        return x @ q / np.linalg.norm(x, axis=1) / np.linalg.norm(q)
    return x @ q if metric == "dot" else -np.linalg.norm(x - q, 1 if metric == "manhattan" else 2, axis=1)


KINDS = [(metric, "float32") for metric in ("cosine", "dot", "euclidean", "manhattan")] + [
    ("cosine", "int8"),
    ("dot", "int8"),
]


@pytest.mark.parametrize(("metric", "dtype"), KINDS)
def test_hits_are_those_of_exact_scores(tmp_path, model, metric, dtype):
    texts = drawn(700)
    index = search.Index.create(tmp_path / "index", model, dtype, metric)
    index.add(texts[:300], metadata=[{"n": n % 3} for n in range(300)])
    index.add(texts[300:], metadata=[{"n": n % 3} for n in range(300, 700)])
    gone = list(range(0, 700, 7))
    index.delete(gone)
    rows, queries = model(texts), drawn(5, seed=2)
    for where in (None, {"n": 2}, {"n": [0, 1]}):
        may = [n for n in range(700) if n not in gone and (where is None or n % 3 in np.ravel(where["n"]))]
        found = index.search(queries, 9, where)
        for query, hits in zip(model(queries), found, strict=True):
            scores = exact(metric, query, rows)
            # A sum of d products in float32, of rows that were rounded when they were scaled to length 1.
            error = 2 * WIDTH * np.finfo(np.float32).eps * max(1, np.abs(scores).max())
            got = [scores[hit.id] for hit in hits]
            np.testing.assert_allclose([hit.score for hit in hits], got, rtol=0, atol=error)
            np.testing.assert_allclose(got, np.sort(scores[may])[::-1][:9], rtol=0, atol=error)
            assert all(hit.id in may and hit.text == texts[hit.id] for hit in hits)
        for each in (list(queries), [*model(queries)]):  # scores too, to the bit
            assert [index.search(query, 9, where) for query in each] == found
        assert index.search(model(queries), 9, where) == found


def test_a_text_is_embedded_once(index, model):
    texts = drawn(50)
    assert index.add(texts) == list(range(50))
    assert model.given == list(dict.fromkeys(texts))
    model.given.clear()
    index.add([texts[3], "w0 w0 w0", texts[3]], ids=["a", "b", "c"])
    index.delete(["a", 3])
    index.add([texts[3]])  # a deleted text's embedding is still here
    assert model.given == ["w0 w0 w0"]
    assert index.ids == [*(n for n in range(50) if n != 3), "b", "c", 50]
    assert np.array_equal(index.vectors[-1], index.vectors[-2])


# What differs for JSON: 1 is 1.0, and neither "1" nor True.
VALUES = [
    1,
    "1",
    True,
    1.0,
    None,
    False,
    0,
    1.5,
    -2,
    "é",
    "b",
    "",
    10**300,
    [1, "b"],
    [True],
    [],
    {"x": 1},
]
FIELDS = ("a", 'q"\\', "é b")
COMPARES = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def kind(value):
    return bool if isinstance(value, bool) else float if isinstance(value, int | float) else type(value)


def drawn_condition(draw):
    values = draw.sample(VALUES[:13], draw.randrange(4))
    comparable = [each for each in VALUES[:13] if kind(each) in (float, str)]
    bounds = [(draw.choice([*COMPARES]), draw.choice(comparable)) for _ in range(draw.choice([1, 2, 2]))]
    return draw.choice([values, {*values}, *values[:1], ("!=", values), ("==", values), bounds, bounds[0]])


def meets(value, condition):
    """Tell what `where` means, for one value."""
    if isinstance(condition, list) and condition and isinstance(condition[0], tuple):
        return all(meets(value, each) for each in condition)
    how, wanted = condition if isinstance(condition, tuple) else ("==", condition)
    if how in COMPARES:
        return kind(value) is kind(wanted) and COMPARES[how](value, wanted)
    has, among = ([*each] if isinstance(each, list | set) else [each] for each in (value, wanted))
    return (how == "==") is any(kind(a) is kind(b) and a == b for a in has for b in among)


@pytest.mark.filterwarnings("ignore:.* new ids are here as another type")
def test_drawn_operations_equal_a_list(tmp_path, monkeypatch, n=100, seed=0):
    """Embeddings are small whole numbers, so that scores are exact."""
    monkeypatch.setattr(_store, "INDEXED", 9)
    monkeypatch.setattr(_store, "BLOCK", 4)
    often = [*VALUES, *[1] * 60]  # a value that most texts have
    draw, table = random.Random(seed), np.random.default_rng(seed).integers(-9, 10, (len(WORDS), 8))

    def embed(texts):
        return np.array(
            [table[[int(word[1:]) for word in text.split()]].sum(axis=0) for text in texts], float
        )

    index, rows, next_id = search.Index.create(tmp_path / "index", embed, metric="dot"), {}, 0
    index.add(["w1"], ["first"], [dict.fromkeys(FIELDS)])
    rows["first"] = "w1", dict.fromkeys(FIELDS)
    for turn in range(n):
        change = draw.choice(["add", "add", "add", "delete", "vacuum", "open"])
        if change == "add":
            texts = drawn(draw.randrange(1, 9), turn, 3)
            fields = [{name: draw.choice(often) for name in FIELDS if draw.random() < 0.9} for _ in texts]
            ids = (
                draw.sample([*range(-2, 9), *map(str, range(9))], len(texts)) if draw.random() < 0.5 else None
            )
            found = index.add(texts, ids, fields)
            assert found == (ids or [*range(next_id, next_id + len(texts))])
            next_id = max(next_id, *(name + 1 for name in found if isinstance(name, int)), 0)
            for name, row in zip(found, zip(texts, fields, strict=True), strict=True):
                if repr(rows.get(name)) != repr(row):
                    rows.pop(name, None)  # what is replaced comes last
                    rows[name] = row
            before = contents(index.folder)
            index.add(texts, found, fields)
            assert contents(index.folder) == before  # nothing has changed
        elif change == "delete":
            gone = draw.sample([*rows], len(rows) // 4)
            index.delete(gone)
            rows = {name: row for name, row in rows.items() if name not in gone}
        elif change == "vacuum":
            index.vacuum()
            assert len(index) == index._seen.rows == len(rows) and len(contents(index.folder)) == 3
        else:
            index = search.Index.open(index.folder, embed)
        texts, fields = map(list, zip(*rows.values(), strict=True))
        assert index.ids == [*rows] and index.texts == texts and repr(index.metadata) == repr(fields)
        vectors = embed(texts)
        assert np.array_equal(index.vectors, vectors)
        for k in (3, 10**9):
            where = {name: drawn_condition(draw) for name in draw.sample(FIELDS, draw.randrange(3))}
            (query,) = drawn(1, turn + n)
            may = [n for n, own in enumerate(fields) if all(meets(own.get(f), c) for f, c in where.items())]
            scores = (vectors @ embed([query])[0]).tolist()
            expected = sorted((-scores[n], n) for n in may)[:k]
            expected = [([*rows][n], -score, texts[n], fields[n]) for score, n in expected]
            assert repr([tuple(hit) for hit in index.search(query, k, where)]) == repr(expected), where
        name = draw.choice([*rows])
        assert index.get(name).text == rows[name][0] and name in index and "none" not in index
        like = [
            hit.id for hit in index.search(embed([rows[name][0]])[0], 10**9) if repr(hit.id) != repr(name)
        ]
        assert [hit.id for hit in index.similar(name, 5)] == like[:5]


def test_tiny_embeddings_keep_their_order(tmp_path):
    rows = {f"text {n}": [1e-30 * (n + 1), 1e-30] for n in range(9)}
    for metric, dtype in KINDS:
        place, model = tmp_path / metric / dtype, lambda texts: np.array([rows[text] for text in texts])
        index = search.Index.create(place, model, dtype, metric)
        index.add(list(rows))
        scores = exact(metric, np.array(rows["text 4"]), np.array(list(rows.values())))
        assert [hit.id for hit in index.search("text 4")] == np.argsort(-scores, kind="stable").tolist()


def test_vectors_may_be_given(index, model):
    texts = drawn(20)
    index.add(texts, vectors=model(texts)[:, ::-1])
    model.given.clear()
    index.add(["w1"], ids=[0], vectors=[[1.0] * WIDTH])
    assert not model.given and np.allclose(index.vectors[-1], WIDTH**-0.5)
    for wrong in (
        np.ones((2, WIDTH)),
        np.full((1, WIDTH), np.nan),
        np.ones((1, 3)),
        np.ones((1, WIDTH), int),
    ):
        with pytest.raises(ValueError, match=r"vectors must be|of width 3; the index has 24"):
            index.add(["w2"], vectors=wrong)
    index.add(texts[1:2], ids=["embedded"])
    assert model.given == texts[1:2]  # what was given is not what the model makes
    assert search.Index.open(index.folder, model).search(texts[1])[0].id == "embedded"


def add_nothing(index, what):
    index.add(["w1"], ids=["old"])
    try:
        index.add(**({"texts": ["w1"]} | what))
    finally:
        assert index.ids == ["old"]


test_wrong_texts_change_nothing = refusals(
    ({"texts": "w1"}, "texts must be a list"),
    ({"texts": ["w1", None]}, "text 1 is None, not a str; a text is missing"),
    ({"texts": ["w1 \ud800"]}, "text 0, .* is not Unicode"),
    ({"texts": b"w1"}, "texts must be a list"),
    ({"ids": "a"}, TypeError, "ids must be a sequence"),
    ({"ids": 5}, TypeError, "ids must be a sequence of str or int, not 5"),
    ({"ids": [2**62]}, "id 0 is 4611686018427387904; a number must be below"),
    ({"ids": [1.5]}, TypeError, "id 0 must be a str or an int, not 1.5"),
    ({"ids": [True]}, TypeError, "id 0 must be a str or an int, not True"),
    ({"texts": ["w1", "w2"], "ids": [1, 1]}, "ids 0 and 1 are both 1"),
    ({"texts": ["w1", "w2"], "ids": [1]}, "1 ids for 2 texts"),
    ({"metadata": [{"a": float("nan")}]}, "metadata 0: 'a' is nan, which JSON"),
    ({"metadata": [{"a": {1}}]}, TypeError, r"metadata 0: 'a' is \{1\}, which JSON"),
    ({"metadata": [{"a": {1: 2}}]}, r"metadata 0: 'a' is \{1: 2\}, which JSON"),
    ({"metadata": 5}, TypeError, "metadata must be a sequence of mappings, not 5"),
    ({"metadata": [{1: 2}]}, TypeError, "metadata 0 must be a mapping of names"),
    ({"metadata": {"a": 1}}, TypeError, "metadata is a dict"),
    given="index",
    call=add_nothing,
)


def delete_nothing(index, ids):
    index.add(["w1", "w2", "w3"], ids=["old", np.int64(1), 2])
    try:
        index.delete(ids)
    finally:
        index.delete(np.array([1, 2]))
        assert index.ids == ["old"]


test_wrong_ids_delete_nothing = refusals(
    (["old", "new"], 'there is no id "new"; 1 of 2 are missing'),
    (b"old", TypeError, "ids must be a sequence of str or int, not b'old'"),
    (1.0, TypeError, "ids must be a sequence of str or int, not 1.0"),
    ({"old": 1}, TypeError, "ids is a dict, whose keys would be read"),
    given="index",
    call=delete_nothing,
)


def test_an_embedding_that_is_wrong_changes_nothing(tmp_path):
    made = [np.ones((2, 3))]
    index = search.Index.create(tmp_path / "index", lambda texts: made[-1])
    index.add(["a", "b"])
    nan = np.array([[1, np.nan, 1], [1, 1, 1]])
    for rows in (nan, np.ones((2, 4)), np.ones((3, 3)), np.ones((2, 3), int)):
        made.append(rows)
        for method in (index.add, index.search):
            with pytest.raises(ValueError, match=r"not finite, of 'c'|of width 4|must return 2 rows of fl"):
                method(["c", "d"])
    assert index.texts == ["a", "b"]


def test_only_the_same_model_opens_it(tmp_path, index):
    with pytest.raises(ValueError, match=r"Words made this index, and is not a folder: Index.open\(path, m"):
        search.Index.open(index.folder)
    search.Index.open(index.folder, Words(seed=1))  # it is empty
    index.add(drawn(5))
    again = search.Index.open(index.folder, Words())
    assert again.search("w1 w2") == index.search("w1 w2")
    with pytest.raises(ValueError, match=r"Words is another model than the one that made .*index: it embeds"):
        search.Index.open(index.folder, Words(seed=1))
    with pytest.raises(ValueError, match="makes embeddings of width 5; the index has 24"):
        search.Index.open(index.folder, Words(width=5))
    for use in (
        search.Index.open,
        lambda path: search.Index.delete(SimpleNamespace(folder=path, _seen=None), "a"),
    ):
        with pytest.raises(FileNotFoundError, match="no index is here"):
            use(tmp_path)
    with pytest.raises(FileExistsError, match="the folder is not empty"):
        search.Index.create(index.folder, Words())
    with pytest.raises(ValueError, match="int8 works with cosine and dot, not euclidean"):
        search.Index.create(tmp_path / "other", Words(), "int8", "euclidean")
    with pytest.raises(TypeError, match="model must be a folder"):
        search.Index.create(tmp_path / "other", 5)
    sizes = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 4, "n_head": 1, "n_layer": 1}
    with pytest.raises(TypeError, match="GPT2LMHeadModel, which makes no embeddings of texts"):
        search.Index.create(tmp_path / "other", models.GPT2LMHeadModel(sizes))


@pytest.fixture
def searched(index):
    index.add(["w1", "w2"], metadata=[{"v": 1}, {"w": 1}])
    assert len(index.search("w1", 10**30)) == 2 and index.search([]) == []
    return index


test_wrong_queries_are_named = refusals(
    ({"query": 5}, ValueError, "queries must be a list or a column of texts, not 5"),
    ({"query": b"w1"}, ValueError, "queries must be a list or a column of texts, not b'w1'"),
    ({"query": ["w1", None]}, ValueError, "query 1 is None, not a str"),
    ({"k": 0}, ValueError, "k must be at least 1, not 0"),
    ({"where": [1]}, TypeError, "where must be a mapping of fields"),
    ({"where": {"V": 1}}, ValueError, "no text has the field 'V'; the fields are 'v', 'w'"),
    ({"where": {"v": {"x": 1}}}, TypeError, r"where: 'v' must be a text.* not \{'x': 1\}"),
    ({"where": {"v": [1, np.nan]}}, TypeError, "where: 'v' must be a text.* not nan"),
    ({"where": {"v": (">", None)}}, TypeError, "where: 'v' > needs a number or a text, not None"),
    ({"where": {"v": ("<", [1])}}, TypeError, "where: 'v' < needs a number or a text"),
    ({"where": {"v": (">", True)}}, TypeError, "where: 'v' > needs a number or a text"),
    ({"query": np.ones(3)}, ValueError, "the query has embeddings of width 3; the index has 24"),
    ({"query": np.ones(WIDTH), "hybrid": True}, TypeError, "rerank and hybrid need a query of words"),
    ({"hybrid": 0.5}, TypeError, "hybrid must be True or False, not 0.5"),
    ({"rerank": True}, TypeError, "rerank must be a cross-encoder"),
    (
        {"rerank": SimpleNamespace(rank=lambda query, texts: [0.5, 1])},
        TypeError,
        r"rank\(\) of SimpleNamespace must return",
    ),
    given="searched",
    call=lambda index, what: index.search(**{"query": "w1"} | what),
)


def test_an_index_may_be_emptied(index):
    index.add(drawn(9))
    with pytest.warns(
        UserWarning, match="2 new ids are here as another type: '3' was added, and 3 is another"
    ):
        index.add(["w1"] * 3, ids=["3", "é", "08"])
    index.delete(index.ids)
    index.vacuum()
    assert index.search("w1") == index.duplicates(0.5) == [] and index.ids == []
    assert index.add(["w1"]) == [9]
    for call in (index.get, index.similar):
        with pytest.raises(KeyError, match="there is no id '9'"):
            call("9")


def test_near_texts_are_grouped(index, model, monkeypatch):
    # The first is near to the second alone.
    texts = ["w1 w2", "w2 w1 w1", *drawn(118, most=3), *drawn(20, most=3)]
    index.add(texts)
    index.delete([5, 6])
    monkeypatch.setattr(_ranking, "BLOCK", 32)
    rows = model(texts)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for threshold in (1.0, 0.95, 0.6):
        alive = [n for n in range(140) if n not in (5, 6)]
        groups = {n: {n} for n in alive}
        for a in alive:
            for b in alive:
                same = texts[a] == texts[b] or (threshold < 1 and rows[a] @ rows[b] >= threshold)
                if same and groups[a] is not groups[b]:
                    groups[a] |= groups[b]
                    for n in groups[b]:
                        groups[n] = groups[a]
        expected = {tuple(sorted(group)) for group in groups.values() if len(group) > 1}
        assert index.duplicates(threshold) == sorted(map(list, expected)) != []
    monkeypatch.setattr(_ranking, "MOST_NEAR", 100)
    with pytest.raises(ValueError, match="100 texts are compared at most; 138 would take some 0 minutes"):
        index.duplicates(0.9)
    assert index.duplicates()
    with pytest.raises(ValueError, match="threshold must be above 0 and at most 1, not 95"):
        index.duplicates(95)


def test_words_are_joined_by_reciprocal_ranks(index):
    texts = ["w1 w2 w3", "w4 w5", "w1 w6 w6", "w7", "w1 w1"]
    index.add(texts, metadata=[{"n": n % 2} for n in range(5)])
    query, k = "w1", 60
    model = [hit.id for hit in index.search(query, k)]
    # By hand: the text that has only the word is before the two that have it once in three words, which tie.
    words = {4: 1 / 61, 0: 1 / 62, 2: 1 / 63}
    sums = {n: 1 / (61 + model.index(n)) + words.get(n, 0) for n in range(5)}
    found = index.search(query, k, hybrid=True)
    assert [hit.id for hit in found] == sorted(sums, key=lambda n: (-sums[n], n))
    assert [hit.score for hit in found] == sorted(sums.values(), reverse=True)
    assert {hit.id for hit in index.search(query, k, {"n": 1}, hybrid=True)} == {1, 3}
    index.delete([4])
    assert 4 not in [hit.id for hit in index.search(query, k, hybrid=True)]
    assert len(index.search(["w59", "w1"], 2, hybrid=True)[0]) == 2  # a word that no text has


def test_a_cross_encoder_sorts_the_best(index):
    class Shortest:
        def rank(self, query, documents):
            self.given = query, documents
            order = sorted(range(len(documents)), key=lambda n: len(documents[n]))
            return [{"corpus_id": n, "score": -len(documents[n])} for n in order]

    texts, model = drawn(200), Shortest()
    index.add(texts)
    best = [hit.text for hit in index.search("w1", 50)]
    found = index.search("w1", 3, rerank=model)
    assert model.given == ("w1", best)
    assert [hit.score for hit in found] == sorted((-len(text) for text in best), reverse=True)[:3]
    assert all(hit.text == texts[hit.id] and -len(hit.text) == hit.score for hit in found)


# ------------------------------------------------------------------------------------------------- a folder's model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = save_bert(tmp_path_factory.mktemp("made") / "model")
    sentence = {"prompts": {"query": "query : ", "document": "a "}, "similarity_fn_name": "dot"}
    return add_pipeline(made, old_pooling("mean"), sentence=sentence)


def test_a_folders_settings_are_used(tmp_path, folder):
    model, texts = models.load(folder), ["the sea was calm", "old stones", "a ship sailed"]
    index = search.Index.create(tmp_path / "index", folder)
    index.add(texts)
    assert index.metric == "dot" and np.array_equal(index.vectors, model.encode_document(texts))
    scores = model.similarity(model.encode_query("dark water"), model.encode_document(texts))[0]
    again = search.Index.open(index.folder).search("dark water")
    assert [hit.id for hit in again] == np.argsort(-scores).tolist()
    np.testing.assert_allclose([hit.score for hit in again], np.sort(scores)[::-1], rtol=1e-5)
    index.model.pipeline.prompts["document"] = "the "
    index.add(texts[:1], ids=["other prompt"])  # is embedded again
    assert np.array_equal(index.vectors[-1], model.encode(texts[0], prompt="the "))


def test_a_loaded_models_settings_are_kept(tmp_path, folder):
    model = models.load(folder, dtype="int8")
    model.pipeline.prompts["query"] = "old "
    index = search.Index.create(tmp_path / "index", model)
    index.add(["the sea was calm", "old stones"])
    assert search.Index.open(index.folder).search("water") == index.search("water")
    with pytest.raises(ValueError, match="BertModel is another model than the one that made"):
        search.Index.open(index.folder, models.load(folder))


def test_a_long_text_is_found_by_a_window(tmp_path, folder):
    model = models.load(folder)
    long = "The sea was calm. A ship sailed over the dark water near old stones. The old ship was near. Dark"
    long += " dark" * 40
    index = search.Index.create(tmp_path / "index", model)
    index.add(["old stones", long, "the sea"])
    with index._reading() as reader:
        now_vectors = reader.now.vectors
        windows = [reader.passage(row) for row in range(reader.now.rows) if reader.entry(row).id == 1]
    assert windows[:2] == ["The sea was calm.", "A ship sailed over the dark water near old stones."]
    assert " ".join(windows).split() == long.split()
    assert all(len(model.tokenizer.encode("a " + window).ids) <= model.max_seq_length for window in windows)
    queries = ["the sea was calm .", "a ship sailed over the dark water near old stones .", "dark dark dark"]
    for query, hits in zip(queries, index.search(queries, k=3), strict=True):
        assert sorted(hit.id for hit in hits) == [0, 1, 2]
        hit = next(hit for hit in hits if hit.id == 1)
        scores = model.similarity(model.encode_query(query), model.encode_document(windows))[0]
        assert hit.text[slice(*hit.span)] == windows[int(np.argmax(scores))]
        assert all(other.span is None for other in hits if other.id != 1)
    means = [index.vectors[0], now_vectors[1:-1].mean(axis=0), index.vectors[2]]
    np.testing.assert_allclose(index.means, means, rtol=1e-5)
    words = _ranking.Words(np.array([1]), [long]).best("ship", 9, None)
    with index._reading() as reader:
        for by_model in ([], [(0, 0.9), (1, 0.8)]):  # words have the long text first
            found = _ranking.joined(reader, "ship sailed", by_model, words, 9)
            assert ["ship sailed" in reader.passage(row) for row, _ in found] == [True, False][: len(found)]
        ((row, _),) = _ranking.joined(reader, "ship sailed", [(1, 0.8)], words, 9)
        assert row == 1  # both have it first
    index.add([long], ids=["again"])
    first, second, *_ = index.search(queries[0], 9)
    assert first.span == second.span
    index.delete(0)
    before = [(hit, hit.span) for hit in index.search(queries[1], 9)]
    index.vacuum()
    assert [(hit, hit.span) for hit in index.search(queries[1], 9)] == before


def test_a_word_counts_with_the_white_space_before_it():
    """As byte-level tokenizers and SentencePiece count: here each character is a token."""
    for text, most, first in (("aa bb cc dd", 5, (0, 5)), ("aa    bb cc", 6, (0, 2))):
        assert _windows._cut(text, lambda texts: [*map(len, texts)], most) == [first, (6, 8), (9, 11)]


def test_a_folder_that_moved_or_changed_is_refused(tmp_path, folder):
    model = shutil.copytree(folder, tmp_path / "model")
    index = search.Index.create(tmp_path / "index", model)
    index.add(["the sea"])
    (model / "config.json").touch()  # another time, but the same bytes
    assert search.Index.open(index.folder).search("the sea")[0].id == 0
    moved = shutil.move(model, tmp_path / "moved")
    moved_away = r"the model that made this index has moved; Index.open\(path, model=…\)"
    with pytest.raises(FileNotFoundError, match=moved_away):
        search.Index.open(index.folder)
    again = search.Index.open(index.folder, moved)
    again.add(["old stones"])
    assert search.Index.open(index.folder).ids == [0, 1]  # the new place is kept
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-6}))
    with pytest.raises(ValueError, match="moved has changed since it made this index"):
        search.Index.open(index.folder)
    with pytest.raises(ValueError, match="moved is another model than the one that made this index"):
        search.Index.open(index.folder, moved)


def test_an_index_moves_with_its_model_and_pickles(tmp_path, folder):
    model = models.load(shutil.copytree(folder, tmp_path / "a" / "model"))
    model.pipeline.truncate_dim, model.max_seq_length = 8, 6
    index = search.Index.create(tmp_path / "a" / "index", model)
    index.add([f"the sea was calm {'near old stones ' * n}" for n in range(9)])
    assert len(repr(index.add(["a ship"] * 900))) < 40
    found = index.search("the stones")
    assert found == pickle.loads(pickle.dumps(index)).search("the stones")
    shutil.move(tmp_path / "a", tmp_path / "b")
    again = search.Index.open(tmp_path / "b" / "index")
    assert (
        again.search("the stones") == found
        and again.vectors.shape[1] == 8
        and again.model.max_seq_length == 6
    )
