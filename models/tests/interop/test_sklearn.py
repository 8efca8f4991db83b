"""scikit-learn through selfattn_models.interop.sklearn: its own checks, forms of a column, searches in processes,
refusals."""

import os
import pickle

import numpy as np
import pytest
from text_folders import WORDS, save_bert

import selfattn as sa
import selfattn_models as models
from selfattn_models import _encoders

pytest.importorskip("sklearn")
joblib, pd, pl = (pytest.importorskip(name) for name in ("joblib", "pandas", "polars"))
from sklearn import compose, linear_model, model_selection, pipeline  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from selfattn.interop import sklearn as door  # noqa: E402

TEXTS = [
    f"{noun} {verb}"
    for noun in ("the sea", "a ship", "old stones")
    for verb in ("was", "sailed", "near .", "over")
]
# Checks of scikit-learn that ask for what texts do not have.
OF_NUMBERS = [
    "n_features_in_after_fitting",
    "complex_data",
    "estimators_empty_data_messages",
    "estimators_nan_inf",
    "n_features_in",
    "estimator_sparse_tag",
    "estimator_sparse_array",
    "estimator_sparse_matrix",
    "fit1d",
    "fit2d_predict1d",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("bert"))


class OfNumbers(door.SentenceEncoder):
    """Rows of numbers, which scikit-learn's checks draw, become texts."""

    def fit(self, X, y=None):
        return super().fit(self.texts(X))

    def transform(self, X):
        return super().transform(self.texts(X))

    def texts(self, X):
        return [" ".join(WORDS[int(abs(x) * 7) % len(WORDS)] for x in row) for row in np.asarray(X, float)]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.one_d_array = True, False
        return tags


def test_check_estimator(folder):
    expected = {
        f"check_{name}": "texts are one column, without numbers or sparse forms" for name in OF_NUMBERS
    }
    ran = check_estimator(OfNumbers(folder), expected_failed_checks=expected, on_skip=None)
    assert sum(each["status"] == "passed" for each in ran) >= 30
    with pytest.warns(UserWarning, match="Can't test estimator SentenceEncoder"):  # as for CountVectorizer
        check_estimator(door.SentenceEncoder(folder))


def test_columns_outputs_and_copies(folder, monkeypatch):
    loads, options = [], {"normalize": True, "prompt": "query : "}
    expected = models.load(folder).encode(TEXTS, **options)
    monkeypatch.setattr(_encoders, "load", lambda *given: loads.append(given) or models.load(*given))
    encoder = door.SentenceEncoder(folder, **options)
    table = pd.DataFrame({"text": TEXTS, "n": range(len(TEXTS))})
    columns = [TEXTS, np.array(TEXTS), np.array(TEXTS)[:, None], [[text] for text in TEXTS], table[["text"]]]
    columns += [
        table["text"],
        pl.Series(TEXTS),
        pl.DataFrame({"text": TEXTS}),
        table["text"].astype("category"),
    ]
    for column in columns:
        np.testing.assert_array_equal(encoder.transform(column), expected)
    both = compose.make_column_transformer((encoder, "text"), ("passthrough", ["n"])).fit_transform(table)
    np.testing.assert_array_equal(both[:, :-1].astype(np.float32), expected)
    for kind, frame in ("pandas", pd.DataFrame), ("polars", pl.DataFrame):
        found = pickle.loads(pickle.dumps(clone(encoder).set_output(transform=kind))).fit_transform(TEXTS)
        assert isinstance(found, frame) and list(found.columns) == list(encoder.get_feature_names_out())
        np.testing.assert_array_equal(found.to_numpy(), expected)
    assert len(loads) <= 1
    rounded = door.SentenceEncoder(folder, dtype="int8", **options).transform(TEXTS)
    np.testing.assert_array_equal(rounded, models.load(folder, "int8").encode(TEXTS, **options))
    os.utime(folder / "config.json", ns=(0, 0))  # a change of the folder
    loads.clear()
    np.testing.assert_array_equal(encoder.transform(TEXTS), expected)
    assert len(loads) == 1


def test_searches_in_processes(folder):
    kinds, rows = ["a", "b", "c", "d"] * 3, models.load(folder).encode(TEXTS)
    classifier = pipeline.make_pipeline(door.SentenceEncoder(folder), linear_model.LogisticRegression())
    by_hand = linear_model.LogisticRegression().fit(rows, kinds).predict_proba(rows)
    np.testing.assert_array_equal(classifier.fit(TEXTS, kinds).predict_proba(TEXTS), by_hand)
    grid = {"sentenceencoder__normalize": [False, True]}
    search = model_selection.GridSearchCV(classifier, grid, cv=2, n_jobs=2).fit(TEXTS, kinds)
    scores = model_selection.cross_val_score(search.best_estimator_, TEXTS, kinds, cv=2)
    assert scores.mean() == search.best_score_
    threads = joblib.Parallel(n_jobs=2)(joblib.delayed(sa.get_num_threads)() for _ in range(2))
    assert max(threads) <= max(1, joblib.cpu_count() // 2)


def test_refusals(folder, tmp_path):
    config = {"vocab_size": 5, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 1}
    models.save(models.GPT2LMHeadModel({"model_type": "gpt2", **config}, rng=0), tmp_path)
    for texts, said in (
        ("the sea", "column of texts, not 'the sea'"),
        (iter(["a"]), "not <list_iterator"),
        (["a", None], "text 1 is None, not a str; a text is missing: fill"),
        (pd.Series(["a", np.nan]), "text 1 is nan"),
        (pd.DataFrame({"a": TEXTS, "b": TEXTS}), r"not of shape \(12, 2\)"),
    ):
        with pytest.raises(ValueError, match=said):
            door.SentenceEncoder(folder).transform(texts)
    with pytest.raises(TypeError, match="GPT2LMHeadModel, which makes no embeddings"):
        door.SentenceEncoder(tmp_path).fit(TEXTS)
