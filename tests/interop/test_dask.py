"""Dask: attention over chunks is attention, whatever the chunks, the scheduler and the number of workers."""

import numpy as np
import pytest
from dask_workers import die_once, distributed, started_workers  # noqa: F401 the fixture
from operations import HEADS, Draw, block_mask_of, mask_of, of_heads, positions
from refusals import refusals

import selfattn as sa
from selfattn import nn, training
from selfattn.training.objectives import objective_of

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
interop = pytest.importorskip("selfattn.interop.dask")

pytestmark = pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")  # of another cluster on this machine
HERE = {"processes": False, "dashboard_address": None}
EPS = {"float64": 1e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def chunked(d, x):
    """An array of Dask, cut at random places."""
    cuts = [np.sort(d.rng.integers(0, n + 1, d.rng.integers(0, 4))) for n in x.shape]
    ends = [np.unique([0, *cut, n]) for cut, n in zip(cuts, x.shape, strict=True)]
    return da.from_array(x, chunks=tuple(tuple(np.diff(end).tolist()) or (0,) for end in ends))


def drawn(d):
    """Query, key, value and options of a call."""
    heads, key_heads = d.one_of(HEADS)
    batch, n, s, width = d.one_of((1, 2)), *d.rng.integers(1, 50, 2), d.one_of((1, 3, 16))
    arrays = d.normal(batch, heads, n, width), *d.normal(2, batch, key_heads, s, width)
    options = {"enable_gqa": heads != key_heads, "attn_mask": mask_of(d, (batch, heads), n, s)}
    positions(d, options)
    of_heads(d, options, heads)
    if d.chance(0.3):
        options["key_lengths"] = d.rng.integers(0, s + 1, (batch, 1))
    return arrays, options | block_mask_of(d, int(n), int(s))


@pytest.mark.parametrize("seed", range(10))
def test_chunks_change_nothing(seed):
    for case in range(10):
        d = Draw(seed, case, most=100)
        arrays, options = drawn(d)
        (out, lse), pullback = sa.scaled_dot_product_attention_vjp(*arrays, return_lse=True, **options)
        grads = d.normal(*out.shape), np.where(lse == -np.inf, 0, d.normal(*lse.shape, dtype=lse.dtype))
        wanted = [out, lse, *pullback(*grads)[:3]]
        cut = [chunked(d, x) for x in arrays]
        (out, lse), pullback = interop.scaled_dot_product_attention_vjp(*cut, return_lse=True, **options)
        lazy = [out, lse, *pullback(*grads)[:3]]
        found = dask.compute(*lazy, scheduler="sync")
        for own, shape, expected in zip(found, lazy, wanted, strict=True):
            assert (own.dtype, own.shape, shape.dtype, shape.shape) == (expected.dtype, expected.shape) * 2
            size = np.abs(expected[expected != -np.inf]).max(initial=1)
            np.testing.assert_allclose(
                own.astype(float), expected.astype(float), rtol=0, atol=EPS[d.name] * float(size)
            )


def test_closed_chunks_are_not_sent():
    x = da.zeros((1024, 8), chunks=(64, 8), dtype=np.float32)
    documents = sa.BlockMask.from_documents(np.arange(1024) // 128)
    for options, tiles in (
        ({}, 256),
        ({"is_causal": True}, 136),
        ({"is_causal": True, "window": (64, 0)}, 31),
        ({"block_mask": documents}, 32),
        ({"key_lengths": 100}, 32),
    ):
        graph = interop.scaled_dot_product_attention(x, x, x, **options).__dask_graph__()
        assert sum("attend" in str(key) for key in graph) == tiles, options


REFUSALS = [
    (lambda x: (np.ones((4, 2)), x, x), {}, TypeError, "query must be a dask.array.Array, got ndarray"),
    (lambda x: (x, x[:3], x), {}, ValueError, "key and value must have the same length"),
    (lambda x: (x[0], x, x), {}, ValueError, "query must have"),
    (lambda x: (x, x[:, :1], x), {}, ValueError, "the same last dimension"),
    (lambda x: (x[x[:, 0] > 0], x, x), {}, ValueError, "query.compute_chunk_sizes()"),
    (lambda x: (x, x, x), {"key_lengths": 9}, ValueError, "between 0 and S = 6, got 9"),
    (lambda x: (x, x, x), {"key_lengths": da.ones(1)}, TypeError, "give key_lengths.compute()"),
    (
        lambda x: (x, x, x),
        {"attn_mask": np.ones((5, 6))},
        ValueError,
        r"broadcast to .* = \(6, 6\), got shape \(5, 6\)",
    ),
    (
        lambda x: (x, x, x),
        {"attn_mask": np.ones((6, 6), int)},
        TypeError,
        "boolean .* or float .*, got int64",
    ),
    (lambda x: (x, x, x), {"softcap": -1}, ValueError, "softcap must be"),
    (lambda x: (x, x, x), {"out": 1}, TypeError, "unexpected keyword argument 'out'"),
]


test_refusals_come_before_the_work = refusals(
    *(((arrays, options), error, said) for arrays, options, error, said in REFUSALS),
    given=lambda: da.ones((6, 2), chunks=(4, 2)),
    call=lambda x, what: interop.scaled_dot_product_attention(*what[0](x), **what[1]),
)


# ------------------------------------------------------------------------------------------------------ workers


class Dies:
    """A loss during whose computation the first worker that computes it dies, once."""

    def __init__(self, marker):
        self.marker = marker

    def __call__(self, model, batch):
        die_once(self.marker)
        y, pullback = model.vjp(batch)
        return float((y**2).mean()), pullback(2 * y / y.size)[1]


def fitted(loss, **options):
    model = nn.Sequential(nn.Linear(4, 8, rng=0), nn.Dropout(0.3, rng=1), nn.Linear(8, 4, rng=2))
    batches = list(np.random.default_rng(0).standard_normal((50, 13, 4)).astype(np.float32))
    history = training.fit(model, batches, loss, rng=3, log_every=None, **options)
    return [*model.parameters().values(), np.array(history.step_losses)]


@pytest.mark.parametrize("workers", [2], indirect=True)
def test_a_worker_that_dies_changes_nothing(workers, tmp_path):
    x = np.random.default_rng(0).standard_normal((256, 8)).astype(np.float32)
    dying = da.from_array(x, chunks=(64, 8)).map_blocks(
        lambda block: die_once(str(tmp_path / "attention")) or block, dtype=x.dtype
    )
    whole = da.from_array(x, chunks=(64, 8))
    expected = interop.scaled_dot_product_attention(whole, whole, whole).compute(scheduler="sync")
    np.testing.assert_array_equal(interop.scaled_dot_product_attention(dying, whole, whole), expected)

    assert (tmp_path / "attention").exists()

    kept = fitted(Dies(str(tmp_path / "fit")), reduce=interop.reducer(workers, shares=3))
    assert (tmp_path / "fit").exists()
    again = fitted(Dies(str(tmp_path / "fit")), reduce=interop.reducer(workers, shares=3))
    for a, b in zip(kept, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("workers", [1], indirect=True)
def test_the_only_worker_dies(workers, tmp_path):
    """Dask keeps what was placed on it for its address."""
    model, loss, x = nn.Linear(4, 4, rng=0), Dies(str(tmp_path / "fit")), np.ones((6, 4), np.float32)
    (kept, grads), (again, others) = (interop.reducer(workers, 2)(model, loss, x) for _ in range(2))
    assert (tmp_path / "fit").exists() and kept == again
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, others[name])


def test_training_is_the_same_for_any_number_of_workers(tmp_path):
    loss, found = Dies(str(tmp_path)), []
    for n in (1, 2, 3):
        with distributed.Client(n_workers=n, threads_per_worker=1, **HERE) as client:
            found.append(fitted(loss, reduce=interop.reducer(client, shares=4)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_shares_are_the_batch():
    with distributed.Client(n_workers=1, **HERE) as client:
        batch = tuple(np.random.default_rng(0).standard_normal((2, 7, 3, 4)))
        model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, rng=0, dtype=np.float64)
        loss, grads = interop.reducer(client, shares=3)(model, nn.MSELoss(), batch)
        y, pullback = model.vjp(batch[0])
        expected, of_loss = nn.MSELoss().vjp(y, batch[1])
        assert loss == pytest.approx(float(expected), rel=1e-14)
        for name, grad in pullback(of_loss(1.0))[1].items():
            np.testing.assert_allclose(grads[name], grad, rtol=0, atol=1e-14 * max(1, abs(grad).max()))
        linear, targets = nn.Linear(4, 2, rng=0, dtype=np.float64), np.array([-100] * 5 + [0, 1])
        found = interop.reducer(client, shares=3)(linear, nn.CrossEntropyLoss(), (batch[0][:, 0], targets))
        y, pullback = linear.vjp(batch[0][:, 0])
        expected, of_loss = nn.CrossEntropyLoss().vjp(y, targets)  # only one share has targets
        np.testing.assert_allclose(found[1]["weight"], pullback(of_loss(1.0))[1]["weight"], rtol=1e-13)
        assert found[0] == pytest.approx(float(expected), rel=1e-14)
        texts = [*"abcdefg"], [*"ABCDEFG"], [*"hijklmn"]
        model = nn.EmbeddingModel(lambda text: [ord(text)], 128, 4, max_seq_len=8, dtype=np.float64, rng=0)
        ranking = nn.MultipleNegativesRankingLoss()  # each text is a wrong answer to those of all pieces
        found = interop.reducer(client)(model, ranking, texts)
        expected = objective_of(model, ranking).gradients(texts)
        assert found[0] == pytest.approx(expected[0], rel=1e-12) and found[0] > 1
        for name, grad in expected[1].items():
            np.testing.assert_allclose(found[1][name], grad, rtol=0, atol=1e-12 * max(1, abs(grad).max()))
        with pytest.raises(ValueError, match=r"lengths differ: \[2, 3\]"):
            interop.reducer(client)(model, nn.MSELoss(), (np.ones((2, 1)), np.ones((3, 1))))


def test_another_version_is_refused(monkeypatch):
    x = da.ones((4, 2), chunks=(2, 2))
    out = interop.scaled_dot_product_attention(x, x, x)
    monkeypatch.setattr("selfattn.interop.dask.workers.__version__", "0.0.9")
    with pytest.raises(RuntimeError, match=r"a worker has selfattn 0.0.9, and the client 0.1.0"):
        out.compute(scheduler="sync")
