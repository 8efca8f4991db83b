"""Measures against ir-measures; what an index, BM25, a mean of words and chance find of known texts."""

import numpy as np
import pytest

from selfattn_models import search
from selfattn_models.search._evaluate import evaluate, measures
from selfattn_models.search._ranking import words


@pytest.mark.parametrize("k", [1, 3, 10])
def test_measures_are_those_of_ir_measures(k):
    library = pytest.importorskip("ir_measures")
    rng = np.random.default_rng(k)
    found = [rng.permutation(30)[: rng.integers(0, 15)].tolist() for _ in range(40)]
    answers = [set(rng.permutation(30)[: rng.integers(1, 13)].tolist()) for _ in range(40)]
    judged = [library.Qrel(str(n), str(each), 1) for n, row in enumerate(answers) for each in row]
    places = [(n, place, each) for n, row in enumerate(found) for place, each in enumerate(row)]
    run = [library.ScoredDoc(str(n), str(each), -place) for n, place, each in places]
    ours = measures(found, answers, k)
    for name, theirs in {"MRR": library.RR @ k, "recall": library.R @ k, "nDCG": library.nDCG @ k}.items():
        expected = {each.query_id: each.value for each in library.iter_calc([theirs], judged, run)}
        got = {str(n): value for n, value in enumerate(ours[f"{name}@{k}"])}
        assert got == pytest.approx(dict.fromkeys(got, 0.0) | expected, abs=1e-12)
        assert 0 < np.mean(list(got.values())) < 1


def test_words_of_scripts_with_marks_and_without_spaces():
    assert words("Café, RÉSUMÉ x2") == ["café", "résumé", "x2"]
    assert words("मेज पर किताब") == ["मेज", "पर", "किताब"]
    assert words("打印机 in 日本 雨") == ["打印", "印机", "in", "日本", "雨"]
    assert words("พิมพ์") == ["พิม", "มพ์"]


def test_a_hit_that_occurs_twice_counts_once():
    assert measures([["a", "a", "b"]], [{"b"}])["MRR@10"] == 0.5


TABLE = np.random.default_rng(0).standard_normal((40, 48)).astype(np.float32)


def topics(texts):
    """A model for which words of a topic are one: w000 to w009, w010 to w019 and so on."""
    return np.array([sum(TABLE[int(word[1:]) // 10] for word in text.split()) for text in texts])


def digits(texts):
    """A poor model."""
    return np.array([[text.count(str(digit)) + 1.0 for digit in range(10)] for text in texts])


def indexed(folder, model, same_words):
    """An index of texts of one topic each, whose halves share words, or the topic alone."""
    rng, texts = np.random.default_rng(1), []
    for _ in range(300):
        words = rng.permutation(10).reshape(2, 5) + 10 * rng.integers(40)
        second = rng.permutation(words[0 if same_words else 1])[:4]
        texts.append(" ".join(f"w{word:03}" for word in [*words[0], *second, 390 + rng.integers(10)]))
    index = search.Index.create(folder, model)
    index.add(texts, ids=[f"t{n}" for n in range(300)])
    return index


def test_the_better_ranking_is_named(tmp_path):
    found = evaluate(indexed(tmp_path / "a", topics, same_words=False))
    assert found["verdict"] == "the index is better than BM25"
    assert list(found["measures"]) == ["index", "BM25", "chance"]  # a function has no table of words
    assert found["task"] == "first halves of 300 texts must find the second among 300 texts"
    found = evaluate(indexed(tmp_path / "b", digits, same_words=True))
    assert found["verdict"] == "BM25 is better than the index"
    # Chance finds 1 of 300 texts in 10 draws; three standard errors of 300 such shares are 0.031.
    assert found["measures"]["chance"]["recall@10"] == pytest.approx(1 - (1 - 1 / 300) ** 10, abs=0.031)


def test_pairs_are_searched_with_the_options(tmp_path):
    index = indexed(tmp_path / "a", topics, same_words=True)
    pairs = [(text, name) for name, text in zip(index.ids, index.texts, strict=True)]
    assert evaluate(index, [*pairs, (pairs[0][0], "t1")], hybrid=True)["measures"]["index"]["recall@10"] > 0.9
    queries, names = zip(*pairs, strict=True)
    assert search.evaluate(index, queries, [{name} for name in names]) == search.evaluate(index, pairs)
    assert evaluate(index, pairs[:1] * 2)["verdict"] == "neither the index nor BM25 is clearly better"
    with pytest.raises(ValueError, match="the index has no texts"):
        evaluate(search.Index.create(tmp_path / "b", topics))
    for options, given, message in (
        ({}, [("a", 3)], "no text with the id 3"),
        ({}, [("a", ["t1"])], r"no text with the id \['t1'\]"),
        ({}, [], "there are no queries with ids"),
        ({}, ["ab"], r"pair 0 must be \(query, id\), not 'ab'"),
        ({"hybrid": True}, None, "hybrid need"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(index, given, **options)
