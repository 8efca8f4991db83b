"""selfattn.training: the order of the data, losses, lines, checkpoints to the bit, errors."""

import errno
import io
import itertools
import os
import re
import signal
import sys

import numpy as np
import pytest
from refusals import refusals

import selfattn as sa
from selfattn import nn, optim, training
from selfattn.text import WhitespaceTokenizer

pytest.importorskip("safetensors", reason="the extra 'text' is not installed")

WORDS = ["tom", "chase", "jerry", "likes", "cheese", "harry", "killed", "voldemort", "bank", "river", "money"]
SENTENCES = [" ".join(np.random.default_rng(n).choice(WORDS, n % 5 + 2)) for n in range(40)]
TRIPLETS = training.make_triplets(SENTENCES, rng=0)[:25]


def make_task(rng=0, dtype=np.float32, **sizes):
    model = nn.EmbeddingModel(
        WhitespaceTokenizer(WORDS), len(WORDS), 8, max_seq_len=16, rng=rng, dtype=dtype, **sizes
    )
    return nn.ProxyTask(model)


class Recorder(nn.Module):
    """A task that records its calls. The confidence is minus the triplet's first number; its derivative with respect
    to w is 1."""

    def __init__(self):
        self.register_parameter("w", np.zeros(()))
        self.seen, self.cotangents = [], []

    def vjp(self, main, similar, non_similar):
        self.seen += main if isinstance(main, list) else [main]

        def pullback(d_confidence):
            self.cotangents.append(d_confidence)
            return {"w": d_confidence * np.ones(np.shape(main)).sum()}

        return -np.array(main, float), pullback


def numbered(n):
    return [(i, 0, 0) for i in range(n)]


def fit(task, triplets=TRIPLETS, epochs=1, **options):
    return training.fit(task, triplets, epochs=epochs, **{"log_every": None, **options})


def test_the_order_of_a_seed():
    """Two epochs equal PyTorch 2.13's shuffles of range(8) after manual_seed(0)."""
    task = Recorder()
    fit(task, numbered(8), 2, rng=sa.torch_rng(0))
    assert task.seen == [2, 0, 5, 3, 1, 4, 7, 6, 0, 3, 7, 1, 6, 2, 5, 4]


def test_without_shuffling_nothing_is_drawn():
    task, rng = Recorder(), np.random.default_rng(0)
    fit(task, numbered(5), 2, shuffle=False, rng=rng)
    assert task.seen == [*range(5), *range(5)]
    assert rng.random() == np.random.default_rng(0).random()


def test_the_loss_of_a_batch_is_the_mean_and_the_short_one_is_kept():
    task = Recorder()
    optimizer = optim.SGD(task.parameters(), lr=1.0)
    history = fit(task, numbered(7), lr=1.0, batch_size=3, shuffle=False, optimizer=optimizer)
    assert history.step_losses == [1, 4, 6]  # losses of the batches 0 1 2, 3 4 5, and 6
    assert history.epoch_losses == [3]  # the mean of all seven
    assert task.cotangents == [-1 / 3, -1 / 3, -1]
    # the gradient of each batch is -1: one step of 1 for each
    np.testing.assert_allclose(task.w, 3, rtol=1e-15)


@pytest.mark.parametrize(("kind", "batch_size"), [(list, 1), (tuple, 4), (np.array, 4)])
def test_sentences_may_be_ids(kind, batch_size):
    tokenizer = WhitespaceTokenizer(WORDS)
    ids = [tuple(kind(tokenizer.encode(sentence)) for sentence in triplet) for triplet in TRIPLETS]
    first, second = (fit(make_task(), given, batch_size=batch_size, rng=0) for given in (TRIPLETS, ids))
    assert first.step_losses == second.step_losses


def test_the_tutorials_lines(capsys):
    history = fit(make_task(), epochs=2, rng=0, log_every=10)
    lines = capsys.readouterr().out.splitlines()
    expected = []
    for epoch in (1, 2):
        for step in (10, 20):
            loss = history.step_losses[25 * (epoch - 1) + step - 1]
            expected.append(f"Epoch [{epoch}/2], Step [{step}/25], Loss: {loss:.4f}")
        average = np.mean(history.step_losses[25 * (epoch - 1) : 25 * epoch])
        expected.append(f"--- Epoch {epoch} completed. Average Loss: {average:.4f} ---")
    assert lines == expected


def test_the_bar_shows_loss_and_rate(capsys):
    pytest.importorskip("tqdm", reason="the extra 'text' is not installed")
    history = fit(make_task(), epochs=2, rng=0, log_every=25, progress=True)
    out, err = capsys.readouterr()
    last = err.replace("\n", "\r").rstrip("\r").split("\r")[-1]
    assert re.search(
        rf"train: 50 of 50 steps, .*steps/s, 00:00 left, loss {history.step_losses[-1]:.4f}$", last
    )
    assert out.count("Average Loss") == 2


def test_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    training.fit(make_task(), TRIPLETS, epochs=1)
    assert "Epoch 1 completed" in capsys.readouterr().out
    with pytest.raises(ImportError, match=r"pip install 'selfattn\[text\]'"):
        training.fit(make_task(), TRIPLETS, epochs=1, progress=True)


@pytest.mark.parametrize("answer", [1, 1.0, "yes", np.ones(3), np.ones(1), False, np.False_], ids=repr)
def test_a_callback_may_return_anything_but_true(answer):
    """Examples: append returns None, and write the number of letters that it wrote."""
    history = fit(make_task(), callbacks=[lambda step: answer])
    assert len(history.step_losses) == len(TRIPLETS)


def run(optimizer, rng, checkpoint=None, task=None, epochs=3, **options):
    task = task or make_task()
    momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
    optimizer = getattr(optim, optimizer)(task.parameters(), lr=1e-2, **momentum)
    options = {"batch_size": 4, "lr": 1e-2, **options}
    history = fit(task, epochs=epochs, rng=rng, optimizer=optimizer, checkpoint=checkpoint, **options)
    return task.parameters(), optimizer.state_dict(), history


def assert_same_bits(one, other):
    (parameters, optimizer, history), (parameters2, optimizer2, history2) = one, other
    assert history == history2
    np.testing.assert_equal(parameters2, parameters)
    np.testing.assert_equal(optimizer2, optimizer)


def stop_after(steps):
    """Make a callback that ends a training after a number of steps."""
    count = itertools.count(1)
    return lambda step: next(count) == steps


def test_the_cached_normal_is_part_of_a_checkpoint(tmp_path):
    rng, other = sa.torch_rng(0), sa.torch_rng(1)
    rng.normal(size=1)  # the generator keeps the second normal number
    run("Adam", rng, tmp_path / "c", epochs=1)
    run("Adam", other, tmp_path / "c", epochs=1, resume=True)
    assert other.get_state() == rng.get_state()
    assert other.get_state()["next_normal"] is not None


def test_a_checkpoint_is_not_overwritten_unasked(tmp_path):
    file = tmp_path / "checkpoint"
    file.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="resume=True continues from it"):
        run("Adam", 3, file)
    assert file.read_bytes() == b"precious"


def test_ctrl_c_keeps_the_last_state(tmp_path):
    file, told = tmp_path / "checkpoint", []

    def press(step):
        told.append(step)
        if len(told) == 9:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    task = make_task()
    with pytest.raises(training.Interrupted) as interrupted:
        run("Adam", 3, file, task=task, callbacks=[press])
    assert interrupted.value.history.step_losses == [step.loss for step in told]
    assert len(told) == 9
    assert signal.getsignal(signal.SIGINT) is before
    nine = make_task()
    run("Adam", 3, task=nine, callbacks=[stop_after(9)])
    np.testing.assert_equal(task.parameters(), nine.parameters())  # the state after a whole step
    assert_same_bits(run("Adam", 3), run("Adam", 3, file, resume=True))


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    file = tmp_path / "checkpoint"
    run("Adam", 3, file, epochs=1)
    before, real = file.read_bytes(), os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device while writing"):
        run("Adam", 3, file, resume=True)
    monkeypatch.setattr(os, "fsync", real)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert file.read_bytes() == before
    assert_same_bits(run("Adam", 3), run("Adam", 3, file, resume=True))


def test_a_checkpoint_of_other_triplets(tmp_path):
    """A space has moved to the next sentence: joined, both texts would be the same."""
    fit(make_task(), [("tom ", "chase", "jerry")], checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match="digest of the triplets"):
        fit(make_task(), [("tom", " chase", "jerry")], checkpoint=tmp_path / "c", resume=True)


def test_damaged_checkpoints(tmp_path):
    from safetensors.numpy import save

    from selfattn import _disk
    from selfattn.training import checkpoint

    def written(arrays, tree):
        digest = checkpoint._digest_of_parts(tree, arrays)
        return save(arrays, {"format": checkpoint.FORMAT, "tree": tree, "digest": digest})

    file = tmp_path / "checkpoint"
    run("Adam", 3, file, callbacks=[stop_after(9)])
    content = file.read_bytes()
    arrays, metadata = _disk.read_safetensors(file)
    tree = metadata["tree"]
    wrong = [
        *(content[:length] for length in (0, 8, 100, len(content) // 2, len(content) - 1)),
        b"\x80\x04\x95 a pickle",
        save(arrays),
        save(arrays, {**metadata, "format": "other"}),
        *(
            written(arrays, text)
            for text in (
                "{",
                "[" * 10**5,
                "[]",
                '{"dict": []}',
                '{"dict": {}}',
                '{"a": 1, "b": 2}',
                tree.replace("place", "palace"),
                tree.replace("has_uint32", "has"),
                *(
                    tree.replace('"place": [1, 8', f'"place": [{place}')
                    for place in ("1, 9", "-1, 8", '"1", "8"')
                ),
            )
        ),
        written({**arrays, "/place/2": np.zeros(25, np.int64)}, tree),
        written({**arrays, "/place/2": np.arange(25.0) + 0.5}, tree),
        written({name: array for name, array in arrays.items() if "exp_avg_sq" not in name}, tree),
        written({**arrays, "/parameters/embedding_layer.weight": np.zeros((2, 2))}, tree),
    ]
    task = make_task()
    before = {name: array.copy() for name, array in task.parameters().items()}
    for damaged in wrong:
        assert damaged != content
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="checkpoint"):
            run("Adam", 3, file, task=task, resume=True)
    np.testing.assert_equal(task.parameters(), before)
    file.write_bytes(content)
    run("Adam", 3, file, task=task, resume=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"triplets": []}, ValueError, "triplets is empty"),
        ({"triplets": "tom"}, TypeError, "not a str"),
        ({"triplets": ["tom"]}, ValueError, r"\[0\] must be \(main, similar, non_similar\), not 'tom'"),
        ({"triplets": [{"tom": 1, "chase": 2, "jerry": 3}]}, ValueError, r"\[0\] must be \(main, .*, not {'"),
        ({"triplets": [set(TRIPLETS[0])]}, ValueError, r"\[0\] must be \(main, similar, .*, not {'"),
        ({"triplets": [("a", "b")]}, ValueError, r"triplets\[0\] must be .* not \('a', 'b'\)"),
        ({"lr": float("nan")}, ValueError, "lr must be at least 0 and finite, not nan"),
        ({"epochs": -1}, ValueError, "epochs must be at least 0, not -1"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, not 0"),
        ({"log_every": 0}, ValueError, "log_every must be at least 1"),
        ({"rng": "seed"}, TypeError, "rng must be"),
        ({"resume": True}, ValueError, "need checkpoint="),
        ({"optimizer": "Adam"}, TypeError, "optimizer must be one of selfattn.optim, not str"),
        ({"optimizer": optim.Adam(make_task().parameters())}, ValueError, "moves other arrays"),
        ({"checkpoint": "nowhere/checkpoint"}, OSError, "nowhere"),
    ],
)
def test_wrong_calls_change_nothing(options, error, message):
    task = make_task()
    before = {name: array.copy() for name, array in task.parameters().items()}
    with pytest.raises(error, match=message):
        fit(task, **options)
    np.testing.assert_equal(task.parameters(), before)


test_what_is_no_task = refusals(
    (
        lambda: fit(make_task().model),
        TypeError,
        r"vjp\(main, .*\); that of EmbeddingModel .* wrap .* nn.ProxyTask",
    ),
    (lambda: fit(nn.Linear(3, 3)), TypeError, "that of Linear takes other arguments$"),
    (lambda: fit(make_task().parameters()), TypeError, "task must be a ProxyTask, .*, which dict lacks"),
)


def test_an_lr_and_an_optimizer_that_has_another():
    task = make_task()
    with pytest.raises(ValueError, match=r"lr=0.5 and an optimizer with lr=0.001"):
        fit(task, lr=0.5, optimizer=optim.Adam(task.parameters()))


def test_a_second_ctrl_c_does_not_wait():
    def press(step):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt) as interrupted:
        run("Adam", 3, callbacks=[press])
    assert interrupted.type is KeyboardInterrupt


def test_a_sentence_that_will_not_do_is_found_before_the_first_step(tmp_path):
    """The last of 20 triplets is bad; no parameter has changed, and there is no checkpoint."""
    task = make_task()
    before = {name: array.copy() for name, array in task.parameters().items()}
    for sentence, error, message in [
        ("\u2003", ValueError, r"triplets\[20\] has an empty sentence"),
        ([], ValueError, r"triplets\[20\]: \[\] has no tokens"),
        ([99], ValueError, r"triplets\[20\]: ids must be in 0...10"),
        ([0.5], TypeError, r"triplets\[20\]: expected a str or a sequence of integers"),
        ("alien", ValueError, r"triplets\[20\]: 'alien' is not in the vocabulary"),
    ]:
        with pytest.raises(error, match=message):
            triplets = [*TRIPLETS[:20], ("tom", sentence, "chase")]
            fit(task, triplets, lr=0.1, shuffle=False, checkpoint=tmp_path / "c", checkpoint_every=1)
        assert all((array == before[name]).all() for name, array in task.parameters().items())
        assert list(tmp_path.iterdir()) == []


def test_what_a_checkpoint_cannot_hold_is_found_before_the_first_step(tmp_path):
    task = Recorder()
    optimizer = optim.SGD(task.parameters(), lr=1.0)
    optimizer._fixed = {"of mine": object()}
    with pytest.raises(TypeError, match="not JSON serializable"):
        fit(task, numbered(4), optimizer=optimizer, lr=1.0, checkpoint=tmp_path / "c")
    assert task.seen == []


class Full(io.StringIO):
    """A stream that fails, as if the log's disk were full or its reader had ended."""

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        self.write("")


CLOSED = io.StringIO()
CLOSED.close()


@pytest.mark.parametrize(
    ("name", "stream"),
    [("stdout", None), ("stderr", None), ("stderr", object()), ("stderr", CLOSED), ("stderr", Full())],
)
@pytest.mark.parametrize("progress", [False, True])
def test_no_stream_ends_a_training(name, stream, progress, monkeypatch):
    """Without standard error, as in a daemon, no bar is drawn; without standard output no lines are printed."""
    if progress:
        pytest.importorskip("tqdm", reason="the extra 'text' is not installed")
    monkeypatch.setattr(sys, name, stream)
    log_every = 1 if name == "stdout" else None
    history = fit(make_task(), TRIPLETS[:4], rng=0, log_every=log_every, progress=progress)
    assert len(history.step_losses) == 4
    make_task().model.encode(["tom", "jerry"], progress=progress)
