"""training.fit of any model: what a batch is, where batches come from, schedules, validation, continuing to the bit."""

import itertools
import re

import numpy as np
import pytest
from inputs import covering

import selfattn as sa
from selfattn import nn, optim, training
from selfattn.optim import lr_scheduler
from selfattn.training import progress

RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 3)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int64)
EXAMPLES = list(zip(X, Y, strict=True))
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)]
CE = nn.CrossEntropyLoss()


def make_model(dropout=0.0, seed=0):
    rng = np.random.default_rng(seed)
    first, dropped, last = nn.Linear(3, 8, rng=rng), nn.Dropout(dropout, rng=rng), nn.Linear(8, 2, rng=rng)
    return nn.Sequential(first, nn.Tanh(), dropped, last)


def fit(model, batches, loss=CE, epochs=None, **options):
    return training.fit(model, batches, loss, epochs, log_every=None, **options)


def by_hand(model, batches, optimizer=None):
    optimizer, losses = optimizer or optim.AdamW(model.parameters()), []
    for x, target in batches:
        y, pullback = model.vjp(x)
        value, loss_pullback = CE.vjp(y, target)
        optimizer.step(pullback(loss_pullback(1.0))[1])
        losses.append(float(value))
    return losses


def test_a_training_is_what_one_writes_by_hand():
    ours, theirs = make_model(), make_model()
    history = fit(ours, BATCHES, epochs=2, shuffle=False)
    expected = by_hand(theirs, BATCHES * 2)
    assert history.step_losses == expected
    np.testing.assert_equal(ours.parameters(), theirs.parameters())
    means = np.reshape(expected, (2, 6)).mean(axis=1)
    np.testing.assert_allclose(history.epoch_losses, means, rtol=1e-15)


def test_examples_are_stacked_in_the_order_of_the_seed():
    ours, theirs = make_model(), make_model()
    history = fit(ours, EXAMPLES, epochs=2, lr=0.1, batch_size=7, rng=3)
    rng = np.random.default_rng(3)
    orders = [rng.permutation(24) for _ in range(2)]
    batches = [(X[order[i : i + 7]], Y[order[i : i + 7]]) for order in orders for i in range(0, 24, 7)]
    expected = by_hand(theirs, batches, optim.AdamW(theirs.parameters(), lr=0.1))
    assert history.step_losses == expected
    mean = np.average(expected[:4], weights=[7, 7, 7, 3])
    assert history.epoch_losses[0] == pytest.approx(mean, rel=1e-15)


class Weighted(nn.Module):
    """The model w · x + v · y: it has two inputs, an option and its own loss, and records batches."""

    def __init__(self):
        self.register_parameter("w", np.ones(()))
        self.register_parameter("v", np.ones(()))
        self.seen = []

    def forward(self, x, y, *, sign=1.0):
        return sign * (self.w * x + self.v * y)

    def vjp(self, x, y, *, sign=1.0):
        self.seen.append((x, y, sign))

        def pullback(dz):
            return (dz, dz), {"w": np.sum(sign * dz * x), "v": np.sum(sign * dz * y)}

        return self(x, y, sign=sign), pullback

    def loss_vjp(self, x, y=0.0):
        self.seen.append(np.asarray(x).tolist())
        return np.float64(self.w * np.sum(x)), lambda d: {"w": d * np.sum(x), "v": np.zeros(())}


def test_several_inputs_and_options_of_the_model():
    model = Weighted()
    one = np.ones(2)
    batches = [((one, 2 * one), one, {"sign": -1.0}), [(one, one), one]]
    fit(model, batches, nn.MSELoss(), shuffle=False)
    assert [(x[0], y[0], sign) for x, y, sign in model.seen] == [(1, 2, -1), (1, 1, 1)]


def test_a_loss_of_the_model_itself():
    model = Weighted()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    history = fit(model, np.arange(8.0).reshape(4, 2), None, optimizer=optimizer, shuffle=False)
    assert model.seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
    w = 1 - 0.5 * np.cumsum([0, 1, 5, 9])  # the gradient is the sum of x
    assert history.step_losses == (w * [1, 5, 9, 13]).tolist()


def test_a_function_as_loss():
    model = Weighted()
    seen = []

    def loss(given, batch):
        assert given is model
        seen.append(batch)
        return batch, {"w": np.array(1.0)}

    history = fit(model, [3.0, 1.0, 2.0], loss, shuffle=False, validation=iter([5.0]))
    assert history.step_losses == [3, 1, 2] and history.validation_losses == [(3, 5.0)]
    assert seen == [3, 1, 2, 5] and model.v == 1


def draw(rng):
    chosen = rng.integers(0, 24, 4)
    return X[chosen], Y[chosen]


class Loader:
    """An iterable of batches with a length, like PyTorch's DataLoader."""

    def __iter__(self):
        return iter(BATCHES)

    def __len__(self):
        return len(BATCHES)


class Unknown(Loader):
    __len__ = None


@pytest.mark.parametrize(
    ("source", "known"), [(Loader(), 6), (iter(BATCHES), None), ((b for b in BATCHES), None)]
)
def test_iterables_give_their_batches_in_their_order(source, known):
    told = []
    history = fit(make_model(), source, callbacks=[told.append])
    assert history.step_losses == by_hand(make_model(), BATCHES)
    assert [step.steps for step in told] == [known] * 6
    assert [step.average_loss is None for step in told] == [True] * 5 + [False]


def test_a_function_draws_batches_with_the_generator():
    told = []
    history = fit(make_model(), draw, rng=5, steps=9, callbacks=[told.append])
    rng = np.random.default_rng(5)
    assert history.step_losses == by_hand(make_model(), [draw(rng) for _ in range(9)])
    assert history.epoch_losses == []
    found = [(step.epoch, step.epochs, step.step, step.steps, step.number) for step in told]
    assert found == [(1, None, n, None, n) for n in range(1, 10)]


@pytest.mark.parametrize(
    ("source", "options", "steps", "epochs"),
    [
        (BATCHES, {}, 6, 1),
        (BATCHES, {"epochs": 3}, 18, 3),
        (BATCHES, {"steps": 8}, 8, 1),
        (BATCHES, {"steps": 12}, 12, 2),
        (BATCHES, {"steps": 8, "epochs": 1}, 6, 1),
        (Unknown(), {"steps": 8}, 8, 1),
        (BATCHES, {"epochs": 0}, 0, 0),
        (BATCHES, {"epochs": 2, "accumulate": 4}, 4, 2),
        (EXAMPLES, {"epochs": 2, "accumulate": 2, "batch_size": 5}, 6, 2),
        (draw, {"steps": 3, "accumulate": 2}, 3, 0),
    ],
)
def test_when_it_ends(source, options, steps, epochs):
    told = []
    history = fit(make_model(), source, callbacks=[told.append], **options)
    assert len(history.step_losses) == len(told) == steps and len(history.epoch_losses) == epochs
    assert [step.number for step in told] == list(range(1, steps + 1))


def test_accumulated_gradients_are_those_of_one_batch():
    """The result is the mean over items, also of batches of different sizes: 24 terms summed in another order."""
    losses = []
    for batch_size, accumulate in [(24, 1), (8, 3), (4, 6), (10, 3), (7, 4)]:
        model = make_model()
        options = {"batch_size": batch_size, "accumulate": accumulate, "epochs": 5, "rng": 0}
        history = fit(model, EXAMPLES, optimizer=optim.SGD(model.parameters(), lr=0.5), **options)
        losses.append(history.step_losses)
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)


WEIGHTED = nn.CrossEntropyLoss(weight=[1.0, 3.0])
NO_TARGET = np.where(np.arange(24) % 12 < 11, -100, Y)  # most batches of 4 have none, among them the first
WORDS = [np.arange(n) % 7 for n in (3, 3, 14, 15)]


def counting(model, batch):
    """MSE of what is not NaN, as a function of model and batch."""
    x, target = batch
    y, pullback = model.vjp(x)
    kept = ~np.isnan(target)
    value, back = nn.MSELoss().vjp(y[kept], target[kept]) if kept.any() else (np.nan, lambda _: np.nan)
    dy = np.zeros_like(y)
    dy[kept] = back(1.0)
    return value, pullback(dy)[1], np.count_nonzero(kept)


@pytest.mark.parametrize(
    ("make", "whole", "parts", "loss"),
    [
        (make_model, [(X, Y)], BATCHES, WEIGHTED),
        (make_model, [(X, NO_TARGET)], [(X[i : i + 4], NO_TARGET[i : i + 4]) for i in range(0, 24, 4)], CE),
        (make_model, [(X, Y)], [(X[:3], Y[:3]), (X[3:], Y[3:])], nn.CrossEntropyLoss(reduction="sum")),
        (
            lambda: nn.Linear(3, 1, rng=0),
            [(X, np.where(NO_TARGET < 0, np.nan, X[:, 0])[:, None])],
            [(X[i : i + 8], np.where(NO_TARGET < 0, np.nan, X[:, 0])[i : i + 8, None]) for i in (0, 8, 16)],
            counting,
        ),
        (lambda: nn.GPT(7, 8, 1, 2, 16, rng=0), [(WORDS,)], [(WORDS[:2],), (WORDS[2:],)], None),
    ],
    ids=["classes of a weight", "ignored targets", "sums", "a function", "texts of other lengths"],
)
def test_accumulation_is_one_batch_of_all_that_counts(make, whole, parts, loss):
    """So is validation in several batches. 24 terms of float32 are summed in another order."""
    found = []
    for batches, accumulate in ((whole, 1), (parts, len(parts))):
        model = make()
        options = {
            "accumulate": accumulate,
            "shuffle": False,
            "validation": parts if accumulate == 1 else whole,
        }
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        history = fit(model, batches, loss, optimizer=optimizer, **options)
        found.append(
            (model.parameters(), history.step_losses, history.epoch_losses, history.validation_losses)
        )
    of_one, of_all = found
    for name, array in of_one[0].items():
        np.testing.assert_allclose(of_all[0][name], array, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_all[1:2], of_one[1:2], rtol=1e-5)
    if getattr(loss, "reduction", None) != "sum":
        np.testing.assert_allclose(of_all[2], of_one[2], rtol=1e-5)
        np.testing.assert_allclose(of_all[3], of_one[3], rtol=1e-5)


def test_a_training_ends_when_it_no_longer_gets_better(tmp_path):
    scores = [3.0, 5.0, 5.05, 4.0, 9.0]

    def trained(patience, steps=None, resume=False, **more):
        model = make_model()
        rest = iter(scores[2:] if resume else scores)
        options = {"epochs": 9, "validate_every": 1, "checkpoint": tmp_path / f"{patience}", "resume": resume}
        stop = training.EarlyStopping(patience, 0.1)
        options["evaluator"] = lambda _: next(rest)
        return fit(model, BATCHES, shuffle=False, callbacks=[stop], steps=steps, **options, **more)

    assert [score for _, score in trained(2).evaluations] == scores[:4]
    trained(1, steps=1)
    assert [score for _, score in trained(1, resume=True).evaluations] == scores[:3]
    told, model = [], make_model()
    stop = training.EarlyStopping(1)
    for _ in range(2):  # each training begins anew; with a rate of 0 nothing gets better
        history = fit(model, BATCHES, epochs=5, lr=0.0, validation=BATCHES, callbacks=[stop, told.append])
        assert len(history.epoch_losses) == 2
    with pytest.raises(ValueError, match="EarlyStopping needs validation= or evaluator="):
        fit(model, BATCHES, callbacks=[stop])
    with pytest.raises(ValueError, match="min_delta must be at least 0"):
        training.EarlyStopping(1, -0.1)


def test_a_history_is_short_in_print_and_whole_as_a_dict(capsys, caplog):
    caplog.set_level("INFO", "selfattn.training")
    history = training.fit(
        make_model(), BATCHES, CE, epochs=2, lr=0.0, shuffle=False, validation=BATCHES, log_every=4
    )
    mean = f"{history.epoch_losses[-1]:.4g}"
    assert re.fullmatch(
        rf"History\(12 steps, loss=[\d.]+, epoch_loss={mean}, validation_loss={mean}\)", repr(history)
    )
    assert repr(training.History()) == "History(0 steps)"
    assert history.to_dict() == vars(history) and history.to_dict()["step_losses"] is not history.step_losses
    printed = capsys.readouterr().out.splitlines()
    assert [record.getMessage() for record in caplog.records] == printed and len(printed) == 6


def test_a_plot_of_a_history():
    pytest.importorskip("matplotlib").use("agg")
    lines = training.History([3.0, 2.0], [], [(2, 2.5)]).plot().lines
    assert [line.get_xydata().tolist() for line in lines] == [[[1, 3], [2, 2]], [[2, 2.5]]]


GRADIENTS = {
    "list": [3.0, 4.0],
    "integers": np.array([3, 4]),
    "read-only": np.broadcast_to(np.array([3.0, 4.0]), (2,)),
    "half": np.array([3, 4], np.float16),
}


def module_of(w):
    model = nn.Module()
    model.register_parameter("w", w)
    return model


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize(
    ("options", "moves"), [({}, [9, 12]), ({"accumulate": 3}, [3, 4]), ({"max_norm": 0.5}, [0.9, 1.2])]
)
def test_gradients_of_a_function_as_an_optimizer_takes_them(gradient, options, moves):
    """Gradients of integers must become floats, and lists must be added, not joined."""
    model = module_of(np.zeros(2))
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    fit(model, [0] * 3, lambda *_: (1.0, {"w": gradient}), optimizer=optimizer, **options)
    np.testing.assert_allclose(model.w, -np.array(moves), rtol=1e-3)  # float16 has few digits


def test_a_mean_of_gradients_whose_sum_is_beyond_float16():
    model = module_of(np.zeros(1, np.float16))
    optimizer = optim.SGD(model.parameters(), lr=2.0**-10)
    gradient = np.array([2.0**15], np.float16)
    fit(model, [0] * 4, lambda *_: (1.0, {"w": gradient}), accumulate=4, optimizer=optimizer)
    assert model.w == -32


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"max_norm": 0.5}], ids=str)
def test_gradients_that_a_loss_keeps_are_not_written_to(options):
    """The gradient of w·x is x, the data itself."""
    batches = [np.array([3.0, 4.0]), np.array([30.0, 40.0])]
    kept = {"w": batches[0]}

    def loss(given, batch):
        kept["w"] = batch
        return batch @ given.w, kept

    fit(module_of(np.zeros(2)), batches, loss, epochs=3, shuffle=False, **options)
    np.testing.assert_array_equal(batches, [[3, 4], [30, 40]])
    assert kept["w"] is batches[1]


def test_schedule_and_clipping():
    ours, theirs, told = make_model(), make_model(), []

    def one_cycle(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)

    fit(ours, BATCHES, epochs=2, scheduler=one_cycle, max_norm=0.1, shuffle=False, callbacks=[told.append])
    optimizer = optim.AdamW(theirs.parameters())
    scheduler = one_cycle(optimizer)
    for step, (x, target) in zip(told, BATCHES * 2, strict=True):
        y, pullback = theirs.vjp(x)
        value, loss_pullback = CE.vjp(y, target)
        _, grads = pullback(loss_pullback(1.0))
        assert step.grad_norm == optim.clip_grad_norm_(grads, 0.1)
        assert step.lr == optimizer.lr and step.loss == value
        optimizer.step(grads)
        scheduler.step()
    np.testing.assert_equal(ours.parameters(), theirs.parameters())


def test_a_scheduler_brings_its_optimizer():
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.LinearLR(optimizer)
    fit(model, BATCHES, scheduler=scheduler)
    assert scheduler.last_epoch == 6 and optimizer.lr == pytest.approx(0.5)
    with pytest.raises(ValueError, match="scheduler is of another optimizer"):
        fit(model, BATCHES, scheduler=scheduler, optimizer=optim.SGD(model.parameters()))


@pytest.mark.parametrize("validation", [BATCHES[:2], iter(BATCHES[:2]), Loader(), EXAMPLES[:8]])
def test_validation_is_a_mean_without_dropout(validation):
    model = make_model(dropout=0.5)
    model[2].train(False)
    model[2].training = True
    model[0].training = False
    found = []

    def check(step):
        if step.validation_loss is not None:
            model.eval()
            rows = slice(None) if isinstance(validation, Loader) else slice(8)
            found.append((step.number, float(CE(model(X[rows]), Y[rows]))))
            model.train()
            model[0].training = False
        assert [module.training for module in model] == [False, True, True, True]

    options = {"batch_size": 4} if validation == EXAMPLES[:8] else {}
    source = EXAMPLES if options else BATCHES
    options |= {"validation": validation, "validate_every": 5, "callbacks": [check]}
    history = fit(model, source, epochs=2, **options)
    # batches have one size, so the loss is the mean of their means
    assert [n for n, _ in history.validation_losses] == [5, 10]
    np.testing.assert_allclose(history.validation_losses, found, rtol=1e-6)


def test_validation_after_each_epoch_and_at_the_end():
    history = fit(make_model(), BATCHES, steps=15, validation=BATCHES)
    assert [n for n, _ in history.validation_losses] == [6, 12, 15]


def test_validation_changes_nothing():
    options = {"epochs": 2, "batch_size": 4, "rng": 0}
    plain = fit(make_model(0.5), EXAMPLES, **options)
    validated = fit(make_model(0.5), EXAMPLES, **options, validation=EXAMPLES, validate_every=1)
    assert plain.step_losses == validated.step_losses


SCHEDULERS = {
    "none": None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 15),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.OneCycleLR(optimizer, 0.1, 20)], [4]
    ),
}
SOURCES = {
    "batches": (BATCHES, {"epochs": 3}),
    "examples": (EXAMPLES, {"epochs": 3, "batch_size": 5}),
    "loader": (Loader(), {"epochs": 3}),
    "unknown": (Unknown(), {"steps": 17}),
    "draws": (draw, {"steps": 17}),
}
GENERATORS = {
    "seed": lambda: 3,
    "PCG64": lambda: np.random.default_rng(3),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "Philox": lambda: np.random.Generator(np.random.Philox(3)),
    "torch_rng": lambda: sa.torch_rng(3),
}
RESUMED = covering(
    source=list(SOURCES),
    scheduler=list(SCHEDULERS),
    accumulate=[1, 2],
    validate_every=[None, 2],
    dropout=[0.0, 0.5],
    optimizer=["SGD", "Adam", "AdamW"],
    rng=list(GENERATORS),
)


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: "-".join(map(str, case.values())))
def test_resumed_training_has_the_same_bits(case, tmp_path):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    source, ends = SOURCES[case["source"]]

    def run(seed=0, rng=None, **options):
        model = make_model(case["dropout"], seed)
        momentum = {"momentum": 0.9} if case["optimizer"] == "SGD" else {}
        optimizer = getattr(optim, case["optimizer"])(model.parameters(), lr=0.05, **momentum)
        history = fit(
            model,
            source,
            optimizer=optimizer,
            scheduler=SCHEDULERS[case["scheduler"]],
            accumulate=case["accumulate"],
            validation=source if source is EXAMPLES else BATCHES,
            validate_every=case["validate_every"],
            rng=GENERATORS[case["rng"]]() if rng is None else rng,
            max_norm=0.5,
            **ends,
            **options,
        )
        return model.parameters(), optimizer.state_dict(), history

    whole = run()
    file = tmp_path / "checkpoint"
    for steps in (2, 1, 3):
        count = itertools.count(1)
        run(checkpoint=file, resume=True, callbacks=[lambda step, n=count, end=steps: next(n) == end])
    # Another seed and other weights: all come from the checkpoint.
    again = run(1, 99 if case["rng"] == "seed" else None, checkpoint=file, resume=True)
    np.testing.assert_equal(again[0], whole[0])
    np.testing.assert_equal(again[1], whole[1])
    if case["validate_every"] is None:  # validation also ran where the training stopped
        assert set(again[2].validation_losses) >= set(whole[2].validation_losses)
        again[2].validation_losses = whole[2].validation_losses
    assert again[2] == whole[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": EXAMPLES[:20]}, "batches: 24 in the checkpoint, 20 in this training"),
        ({"batches": [*EXAMPLES[:23], (X[0], Y[23])]}, "digest of the batches"),
        ({"batches": draw, "epochs": None, "steps": 20}, "batches: 24 in the checkpoint, a function in this"),
        ({"batches": Loader()}, "batches: 24 in the checkpoint, an iterable in this"),
        ({"batch_size": 5}, "batch_size: 4 in the checkpoint, 5 in this training"),
        ({"accumulate": 2}, "accumulate: None in the checkpoint, 2"),
        ({"shuffle": False}, "shuffle: True in the checkpoint, False"),
        ({"scheduler": None}, "scheduler: CosineAnnealingLR in the checkpoint, None"),
        (
            {"scheduler": SCHEDULERS["sequence"]},
            "scheduler: CosineAnnealingLR in the checkpoint, SequentialLR",
        ),
        ({"optimizer": optim.SGD}, "optimizer: AdamW in the checkpoint, SGD"),
        ({"rng": GENERATORS["torch_rng"]()}, "a generator PCG64, rng is|torch_rng"),
        ({"rng": GENERATORS["MT19937"]()}, "state of a generator PCG64, rng is a MT19937"),
        ({"model": nn.Sequential(make_model(), nn.Linear(2, 2))}, "0.0.weight: None in the checkpoint"),
        (
            {
                "model": nn.Sequential(
                    nn.Linear(3, 8, dtype=np.float64), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2)
                )
            },
            r"of float32 in the checkpoint, \(8, 3\) of float64",
        ),
    ],
)
def test_a_checkpoint_of_another_training(tmp_path, change, message):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    options = {
        "batches": EXAMPLES,
        "epochs": 2,
        "scheduler": SCHEDULERS["cosine"],
        "rng": 3,
        "checkpoint": tmp_path / "c",
        "batch_size": 4,
    }
    fit(make_model(), callbacks=[lambda step: step.number == 4], **options)
    options = {"model": make_model(), **options, **change}
    if "optimizer" in change:
        options["optimizer"] = change["optimizer"](options["model"].parameters())
    if not isinstance(options["batches"], list):
        del options["batch_size"]
    before = options["model"].state_dict()
    with pytest.raises(ValueError, match=message):
        fit(**options, resume=True)
    np.testing.assert_equal(options["model"].state_dict(), before)


def test_a_file_of_what_a_digest_is_of():
    """The digest depends on every part and on where parts end."""
    from selfattn.training.checkpoint import digest

    things = [
        1,
        1.0,
        True,
        None,
        "1",
        b"1",
        [1],
        [[1]],
        [1, 1],
        ["ab", "c"],
        ["a", "bc"],
        {"a": 1},
        {"b": 1},
        [],
        np.ones(2),
        np.ones(2, np.float32),
        np.ones((2, 1)),
        np.zeros(2),
        (np.ones(1), np.ones(1)),
        object(),
    ]
    assert len({digest(thing) for thing in things}) == len(things)
    for kind in (object, np.dtypes.StringDType()):  # arrays whose memory holds addresses
        one, other = (np.array(["a" * 40, letter * 40], kind) for letter in "bc")
        assert digest(one) == digest(one.copy()) != digest(other)
    assert digest([np.ones(2), "a"]) == digest((np.ones(2), "a"))
    assert digest(np.ones((4, 2))[::2]) == digest(np.ones((2, 2)))


def lines(capsys, monkeypatch, source, **options):
    """Return the printed lines if a step takes half a second."""
    clock = itertools.count(0, 0.5)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    training.fit(make_model(), source, CE, lr=0.125, log_every=1, **options)
    return [re.sub(r"Loss: \d\.\d{4}", "Loss: #", line) for line in capsys.readouterr().out.splitlines()]


def test_lines_have_the_rate_and_the_time_that_remains(capsys, monkeypatch):
    found = lines(capsys, monkeypatch, BATCHES[:2], epochs=2, validation=BATCHES)
    assert found == [
        "Epoch [1/2], Step [1/2], Loss: #, LR: 0.125, 2 steps/s, 0:02 left",
        "Epoch [1/2], Step [2/2], Loss: #, LR: 0.125, 2 steps/s, 0:01 left",
        "--- Epoch 1 completed. Average Loss: # ---",
        "--- Validation after 2 steps. Loss: # ---",
        "Epoch [2/2], Step [1/2], Loss: #, LR: 0.125, 2 steps/s, 0:00 left",
        "Epoch [2/2], Step [2/2], Loss: #, LR: 0.125, 2 steps/s, 0:00 left",
        "--- Epoch 2 completed. Average Loss: # ---",
        "--- Validation after 4 steps. Loss: # ---",
    ]
    found = lines(capsys, monkeypatch, draw, steps=2)
    assert found == [
        "Step [1/2], Loss: #, LR: 0.125, 2 steps/s, 0:00 left",
        "Step [2/2], Loss: #, LR: 0.125, 2 steps/s, 0:00 left",
    ]
    found = lines(capsys, monkeypatch, Unknown())
    assert found[0] == "Epoch [1/1], Step 1, Loss: #, LR: 0.125, 2 steps/s"
    found = lines(capsys, monkeypatch, BATCHES, steps=7)
    assert found[-1] == "Epoch 2, Step [1/6], Loss: #, LR: 0.125, 2 steps/s, 0:00 left"


def test_a_resumed_training_says_where_it_goes_on(tmp_path, capsys):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    for source, ends, said in [
        (draw, {"steps": 5}, "Continuing after step 3"),
        (BATCHES[:2], {"epochs": 3}, "Continuing after epoch 1, step 1"),
    ]:
        file = tmp_path / said
        options = {**ends, "checkpoint": file, "log_every": 100}
        training.fit(make_model(), source, CE, callbacks=[lambda s: s.number == 3], **options)
        capsys.readouterr()
        training.fit(make_model(), source, CE, resume=True, **options)
        assert capsys.readouterr().out.splitlines()[0] == said


@pytest.mark.parametrize(
    ("seconds", "written"), [(0, "0:00"), (59.6, "1:00"), (65, "1:05"), (3599, "59:59"), (7265, "2:01:05")]
)
def test_durations(seconds, written):
    assert progress.duration(seconds) == written


BAD = [
    ({"batches": []}, ValueError, "batches is empty"),
    ({"batches": iter([])}, ValueError, "batches has ended after 0"),
    (
        {"batches": 3},
        TypeError,
        "batches must be a sequence or an iterable of batches, or a function .* not int",
    ),
    ({"batches": {"a": 1}}, TypeError, "batches must be .* not dict"),
    ({"batches": "text"}, TypeError, "batches must be .* not str"),
    ({"batches": np.array(1.0)}, TypeError, "without dimensions"),
    ({"batches": lambda: BATCHES[0], "steps": 1}, TypeError, "must take one argument, the generator"),
    ({"batches": draw}, ValueError, "give steps, not epochs"),
    ({"batches": draw, "steps": 3, "epochs": 1}, ValueError, "give steps, not epochs"),
    ({"batches": draw, "steps": 3, "batch_size": 2}, ValueError, "batch_size=2 needs batches in a sequence"),
    (
        {"batches": Loader(), "shuffle": True},
        ValueError,
        "shuffle=True needs batches in a sequence.* not Loader",
    ),
    (
        {"batches": iter(BATCHES), "epochs": 2},
        ValueError,
        "an iterator, which ends after one epoch; epochs=2",
    ),
    ({"batches": [X]}, TypeError, r"a batch must be \(inputs, target\).* not ndarray"),
    ({"batches": [(X,)]}, TypeError, r"a batch must be \(inputs, target\).* not 1 things"),
    ({"batches": [(X, Y, 3)]}, TypeError, "must be a dict of the model's options, not int"),
    (
        {"batches": [(np.ma.ones(3), 0)] * 2, "batch_size": 2},
        TypeError,
        "an example is a MaskedArray; pass a plain array",
    ),
    (
        {"batches": [(X[0], 0), (X[0, :2], 0)], "batch_size": 2},
        ValueError,
        r"differ in shape: \[\(2,\), \(3,\)\]",
    ),
    ({"loss": 0.5}, TypeError, "loss must be one of selfattn.nn, such as nn.CrossEntropyLoss"),
    ({"loss": nn.CrossEntropyLoss}, TypeError, r"loss is a class; make one: CrossEntropyLoss\(\)"),
    (
        {"loss": None},
        TypeError,
        "without a loss, task must be a ProxyTask, .* that of Sequential takes other arguments",
    ),
    ({"loss": nn.CrossEntropyLoss(reduction="none")}, TypeError, r"one number, not an array of shape \(4,\)"),
    (
        {"loss": lambda model, batch: 1.0},
        TypeError,
        "must return the loss and the dict of gradients.* not float",
    ),
    (
        {"loss": lambda model, batch: (1.0, {"x": np.ones(1)})},
        ValueError,
        "grads has 'x', which is not one of",
    ),
    (
        {"loss": lambda model, batch: (np.nan, {})},
        FloatingPointError,
        "the loss is nan in epoch 1, step 1, with a learning rate of 0.001",
    ),
    (
        {"loss": lambda model, batch: (1.0, {"0.bias": np.full(8, np.inf)}), "max_norm": 1.0},
        FloatingPointError,
        "the norm of the gradients is inf in epoch 1, step 1",
    ),
    ({"model": 3}, TypeError, r"model must be a Module, or have parameters\(\), which int lacks"),
    ({"validate_every": 2}, ValueError, "validate_every needs validation="),
    ({"validation": draw}, TypeError, "validation must be a sequence or an iterable .* not a function"),
    ({"validation": []}, ValueError, "validation is empty"),
    ({"steps": 0}, ValueError, "steps must be at least 1, not 0"),
    ({"accumulate": 0}, ValueError, "accumulate must be at least 1, not 0"),
    ({"max_norm": -1.0}, ValueError, "max_norm must be at least 0"),
    ({"callbacks": [3]}, TypeError, r"callbacks must be a list of functions, not \[3\]"),
    ({"callbacks": "ab"}, TypeError, "callbacks must be a list of functions, not 'ab'"),
    ({"callbacks": len}, TypeError, "callbacks must be a list of functions, not <built-in function len>"),
    ({"reduce": "mean"}, TypeError, r"reduce must be a function \(model, loss, batch\), not a str"),
    ({"scheduler": 3}, TypeError, "scheduler must be one of selfattn.optim.lr_scheduler, .* not int"),
    ({"scheduler": lambda optimizer: None}, TypeError, "scheduler must be one of .* not NoneType"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_wrong_calls_change_nothing(options, error, message):
    model = options.get("model", make_model())
    with pytest.raises(error, match=message):
        fit(**{"model": model, "batches": BATCHES, **options})
    if isinstance(model, nn.Module):
        np.testing.assert_equal(model.parameters(), make_model().parameters())
