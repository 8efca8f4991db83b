"""The losses of embeddings: their definitions in plain Python, finite differences, sentence-transformers, errors."""

import math

import numpy as np
import pytest
from inputs import covering
from refusals import refusals

import selfattn as sa
from selfattn import nn

N, D = 4, 3
CASES = covering(
    kind=["ranking", "cosine", "triplet"],
    columns=[2, 3, 4],
    scale=[20.0, 0.5],
    similarity=["cosine", "dot"],
    metric=["euclidean", "cosine", "manhattan"],
    margin=[5.0, 0.3],
)


def drawn(case, dtype=np.float64):
    """A loss, its columns and its labels."""
    rng = np.random.default_rng(3)
    kind = case["kind"]
    number = {"ranking": case["columns"], "cosine": 2, "triplet": 3}[kind]
    columns = list(rng.standard_normal((number, N, D)).astype(dtype))
    if kind == "ranking":
        return nn.MultipleNegativesRankingLoss(case["scale"], case["similarity"]), columns, None
    if kind == "cosine":
        return nn.CosineSimilarityLoss(), columns, rng.random(N).astype(dtype)
    return nn.TripletLoss(case["metric"], case["margin"]), columns, None


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def cosine(a, b):
    return dot(a, b) / (math.hypot(*a) * math.hypot(*b))


def by_definition(case, columns, labels):
    columns = [[list(map(float, row)) for row in column] for column in columns]
    if case["kind"] == "cosine":
        return sum((cosine(a, b) - y) ** 2 for a, b, y in zip(*columns, labels, strict=True)) / N
    if case["kind"] == "triplet":
        distance = {
            "euclidean": math.dist,
            "cosine": lambda a, b: 1 - cosine(a, b),
            "manhattan": lambda a, b: sum(abs(x - y) for x, y in zip(a, b, strict=True)),
        }[case["metric"]]
        gaps = (distance(a, b) - distance(a, c) for a, b, c in zip(*columns, strict=True))
        return sum(max(gap + case["margin"], 0) for gap in gaps) / N
    similarity = {"cosine": cosine, "dot": dot}[case["similarity"]]
    candidates = [row for column in columns[1:] for row in column]
    total = 0.0
    for n, anchor in enumerate(columns[0]):
        scores = [case["scale"] * similarity(anchor, each) for each in candidates]
        total += math.log(sum(math.exp(score - scores[n]) for score in scores))
    return total / N


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_by_definition_and_finite_differences(case):
    loss, columns, labels = drawn(case)
    value, pullback = loss.vjp(columns, labels)
    # A few sums of at most a dozen terms of about the scale.
    np.testing.assert_allclose(value, by_definition(case, columns, labels), rtol=1e-13, atol=1e-12)
    assert loss(columns, labels) == value and value.dtype == np.float64
    sizes = [4 * d for d in pullback(1.0)]
    np.testing.assert_allclose(pullback(4.0), sizes, rtol=1e-15)

    def of_all(stacked):
        y, back = loss.vjp(list(stacked), labels)
        return y, lambda d: np.stack(back(float(d)))

    sa.check_vjp(of_all, np.stack(columns))


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: "-".join(map(str, case.values())))
def test_sentence_transformers(case):
    torch, losses = pytest.importorskip("torch"), pytest.importorskip("sentence_transformers.losses")
    from sentence_transformers import util

    loss, columns, labels = drawn(case, np.float32)
    theirs = {
        "ranking": lambda: losses.MultipleNegativesRankingLoss(
            None, case["scale"], {"cosine": util.cos_sim, "dot": util.dot_score}[case["similarity"]]
        ),
        "cosine": lambda: losses.CosineSimilarityLoss(None),
        "triplet": lambda: losses.TripletLoss(
            None, getattr(losses.TripletDistanceMetric, case["metric"].upper()), case["margin"]
        ),
    }[case["kind"]]()
    tensors = [torch.tensor(column, requires_grad=True) for column in columns]
    expected = theirs.compute_loss_from_embeddings(tensors, None if labels is None else torch.tensor(labels))
    expected.backward()
    value, pullback = loss.vjp(columns, labels)
    # 32 eps, for sums of a dozen terms in float32; gradients are multiplied by the scale.
    np.testing.assert_allclose(value, expected.item(), rtol=4e-6)
    for ours, tensor in zip(pullback(1.0), tensors, strict=True):
        np.testing.assert_allclose(ours, tensor.grad, rtol=4e-6, atol=4e-6 * float(tensor.grad.abs().max()))


def test_edges():
    """Equal rows and rows of zeros have finite gradients; 16-bit columns give float32; no other row is a loss of 0."""
    same = np.ones((2, 3), np.float32)
    for metric in ("euclidean", "manhattan", "cosine"):
        value, pullback = nn.TripletLoss(metric).vjp([same, same, 2 * same])
        assert np.isfinite([value, *np.ravel(pullback(1.0))]).all()
    np.testing.assert_array_equal(nn.TripletLoss().vjp([same, same, same])[1](1.0), 0)
    value, pullback = nn.CosineSimilarityLoss().vjp([np.zeros((1, 3)), [[1, 2, 3]]], [0])
    assert value == 0 and np.isfinite(pullback(1.0)).all()
    value, pullback = nn.MultipleNegativesRankingLoss().vjp([same[:1].astype(np.float16)] * 2)
    assert (value, value.dtype, pullback(1.0)[0].dtype) == (0, np.float32, np.float32)
    assert "scale=20.0, similarity_fct='cosine'" in repr(nn.MultipleNegativesRankingLoss())


PAIR = [np.ones((2, 3)), np.ones((2, 3))]


test_refused = refusals(
    (lambda: nn.MultipleNegativesRankingLoss(0), ValueError, "scale must be above 0, not 0"),
    (
        lambda: nn.MultipleNegativesRankingLoss(similarity_fct="cos"),
        ValueError,
        'must be "cosine" or "dot", not \'cos\'',
    ),
    (
        lambda: nn.TripletLoss("angle"),
        ValueError,
        'distance_metric must be "euclidean", "cosine" or "manhattan"',
    ),
    (lambda: nn.TripletLoss(mini_batch_size=0), ValueError, "mini_batch_size"),
    (lambda: nn.TripletLoss()(PAIR), ValueError, "TripletLoss takes 3 columns of embeddings, not 2"),
    (
        lambda: nn.MultipleNegativesRankingLoss()(PAIR[:1]),
        ValueError,
        "takes at least 2 columns of embeddings, not 1",
    ),
    (lambda: nn.CosineSimilarityLoss()(PAIR), ValueError, "needs labels, a number for each pair"),
    (
        lambda: nn.CosineSimilarityLoss()(PAIR, [1.0]),
        ValueError,
        r"labels must have shape \(2,\).*not \(1,\)",
    ),
    (lambda: nn.MultipleNegativesRankingLoss()(PAIR, [0, 1]), ValueError, "takes no labels"),
    (
        lambda: nn.MultipleNegativesRankingLoss()([PAIR[0], np.ones((3, 3))]),
        ValueError,
        r"one shape.*\(2, 3\), \(3, 3\)",
    ),
    (lambda: nn.MultipleNegativesRankingLoss()([np.ones((0, 3))] * 2), ValueError, "n of at least 1"),
    (lambda: nn.CosineSimilarityLoss().vjp(PAIR, [0, 1])[1]([1.0, 2.0]), TypeError, "d_value"),
)
