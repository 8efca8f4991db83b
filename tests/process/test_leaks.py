"""References and memory: every way through the binding, good and bad, leaves everything as it was."""

import weakref

import numpy as np
import pytest
from bad_calls import BAD
from inputs import BFLOAT16, FLOATS, LAYOUTS, OPTIONS, options_together, random_inputs
from leaks import assert_nothing_stays, fails

import selfattn as sa
from benchmarks import memory
from selfattn import models, nn, optim

attend = sa.scaled_dot_product_attention
NAMES = ("query", "key", "value")


def good_calls():
    rng = np.random.default_rng(0)
    for name in OPTIONS:
        yield name, random_inputs((2, 3, 8), 5), OPTIONS[name]((2,), 3, 5, rng)
    everything = options_together(OPTIONS, (2,), 3, 70, rng)
    for dtype in [*FLOATS, np.dtype(np.int8)]:
        arrays = random_inputs((2, 3, 8), 70, dtype=dtype)
        yield f"all options {dtype.name}", arrays, everything | {"return_lse": True, "return_weights": True}
    for name, layout in LAYOUTS.items():
        yield name, tuple(layout(x) for x in random_inputs((2, 3, 8), 70, dtype=BFLOAT16)), {}
    arrays = random_inputs((2, 3, 8), 70)
    yield (
        "lists",
        tuple(x.tolist() for x in arrays),
        {"window": [1, 2], "key_lengths": [3, 4], "sinks": [0.5, 0.25]},
    )
    yield "out", arrays, {"out": np.zeros((2, 3, 8), np.float32), "return_lse": True}
    yield "entropy", arrays, {"dropout_p": 0.5}
    yield "generator", arrays, {"dropout_p": 0.5, "rng": np.random.default_rng(0)}
    yield (
        "huge numbers",
        arrays,
        {"window": (2**70, np.int64(3)), "dropout_p": 0.5, "rng": 2**100, "num_threads": 2},
    )
    yield "heap", random_inputs((2, 50, 64), 3000), {"num_threads": 2}
    yield "empty", random_inputs((0, 3, 8)), {"return_weights": True}


GOOD = list(good_calls())


def differentiate(*arrays, wrt=None, pulls=1, **options):
    """Call attention with gradients, as users do: everything that has a gradient, and the lse too."""
    floats = (np.asarray(options[name]).dtype.kind == "f" if name in options else False
              for name in ("attn_mask", "alibi_slopes", "sinks"))  # fmt: skip
    others = [n for n, given in zip(("attn_mask", "alibi_slopes", "sinks"), floats, strict=True) if given]
    options = {name: x for name, x in options.items() if name != "return_weights"} | {"return_lse": True}
    (out, lse), pullback = sa.scaled_dot_product_attention_vjp(
        *arrays, **options, wrt=wrt or ("query", "key", "value", *others)
    )
    for _ in range(pulls):
        pullback(out, lse)


@pytest.mark.parametrize(("name", "arrays", "options"), GOOD, ids=[name for name, *_ in GOOD])
def test_calls_that_succeed(name, arrays, options):
    """Forward and, unless the arrays are large, with all gradients."""

    def call():
        attend(*arrays, **options)
        if name != "heap":
            differentiate(*arrays, **options)

    assert_nothing_stays(call, [*arrays, *options.values()])


def assert_failures_leave_nothing(function, calls):
    """Make all calls, each of which must raise: one that leaks shows as often as one alone."""

    def call():
        for arguments in calls:
            fails(**arguments, function=function)

    assert_nothing_stays(call, [x for arguments in calls for x in arguments.values()])


def test_calls_that_fail():
    assert_failures_leave_nothing(attend, [bad.arguments() for bad in BAD])


def test_errors_late_in_a_call():
    """All arrays are held by then: the last argument is wrong."""
    arrays = random_inputs((2, 3, 8), 70, dtype=BFLOAT16)
    options = options_together(OPTIONS, (2,), 3, 70, np.random.default_rng(0))
    good = options | dict(zip(NAMES, arrays, strict=True)) | {"return_lse": True, "return_weights": True}
    out = np.zeros((2, 3, 8), np.float32)
    wrong = ({"rng": "x"}, {"out": out}, {"out": arrays[0]}, {"key_lengths": 71}, {"window": (1, "x")})
    assert_failures_leave_nothing(attend, [good | change for change in wrong])


def test_gradients_that_fail():
    """One argument after the other is wrong, the last ones when everything else has been made."""
    arrays = random_inputs((2, 3, 8), 70, dtype=BFLOAT16)
    options = options_together(OPTIONS, (2,), 3, 70, np.random.default_rng(0))
    out, statistics, lse = sa.scaled_dot_product_attention_forward(*arrays, **options, return_lse=True)
    good = options | dict(zip(NAMES, arrays, strict=True))
    good |= {"grad_out": out, "out": out, "statistics": statistics, "grad_lse": lse}
    sa.scaled_dot_product_attention_backward(**good)
    bools = np.ones((2, 3, 70), bool)
    wrong = (
        {"query": arrays[0][:, :2]}, {"key": arrays[1][..., 1:]}, {"window": (1, "x")}, {"key_lengths": 71},
        {"out": out[:1]}, {"out": out.astype(np.float64)}, {"out": None}, {"grad_out": out[:, 1:]},
        {"grad_out": out.astype(np.float64)}, {"grad_out": bools}, {"grad_lse": out},
        {"grad_lse": lse.astype(np.float64)}, {"statistics": statistics[..., :1]},
        {"statistics": statistics.astype(np.float64)}, {"attn_mask": bools, "wrt": (*NAMES, "attn_mask")},
        {"alibi_slopes": None, "wrt": (*NAMES, "alibi_slopes")}, {"sinks": None, "wrt": (*NAMES, "sinks")},
        {"rng": None}, {"rng": np.random.default_rng(0)}, {"rng": "x"}, {"wrt": ("keys",)},
        {"gradients": sa.AttentionGradients(arrays[0], None, None)}, {"gradients": (1, 2, 3)},
    )  # fmt: skip
    assert_failures_leave_nothing(
        sa.scaled_dot_product_attention_backward, [good | change for change in wrong]
    )


def test_the_core_of_the_backward_pass_checks_for_itself():
    arrays = random_inputs((2, 3, 8), 5)
    out, statistics = sa.scaled_dot_product_attention_forward(*arrays)
    good = {"out": out, "grad_out": out, "statistics": statistics} | dict(zip(NAMES, arrays, strict=True))
    wrong = ({"wrt": "x"}, {"wrt": 2**80}, {"wrt": 8}, {"wrt": 16}, {"wrt": 32}, {"out": None})
    assert_failures_leave_nothing(sa._core._attention_backward, [good | change for change in wrong])


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float64), np.dtype(np.int8)], ids=str)
def test_gradients_of_row_operations(dtype):
    x, weight, bias = random_inputs((3, 40, 8), dtype=dtype)[0], np.ones(8, dtype), np.zeros(8, dtype)
    dy = np.ones(x.shape, np.float32)
    calls = (
        (sa._core._softmax_backward, (x, dy, 1), (x, dy[..., :3], 1), (x, dy, 3), (x, dy > 0, 1), (x, dy)),
        (sa._core._log_softmax_backward, (x, dy, -1), (x, dy, "x")),
        (sa._core._layer_norm_backward, (x, dy, 8, weight, bias, 0.1), (x, dy, 8, weight, bias, "x"),
         (x, dy, 7, weight, bias, 0.1), (x, dy, (8,), weight[1:], bias, 0.1), (x, dy, 8, weight, bias > 0, 0.1)),
        (sa._core._rms_norm_backward, (x, dy, 8, weight, None, None), (x, dy, 8, weight, None, True)),
        (sa._core._gelu_backward, (x, dy, "tanh"), (x, dy, "soft"), (x, dy[0], "none"), (x, dy, None)),
    )  # fmt: skip

    def call():
        for function, good, *bad in calls:
            function(*good)
            for arguments in bad:
                fails(*arguments, function=function)

    assert_nothing_stays(call, [x, dy, weight, bias])


def test_a_pullback_frees_what_it_holds():
    arrays = random_inputs((2, 3, 8), 70)
    assert_nothing_stays(lambda: differentiate(*arrays, pulls=2), list(arrays))
    references = [weakref.ref(x) for x in arrays]
    out, pullback = sa.scaled_dot_product_attention_vjp(*arrays)
    references.append(weakref.ref(out))
    arrays = out = None
    assert all(reference() is not None for reference in references)
    del pullback
    assert all(reference() is None for reference in references)


def test_steps_of_optimisers():
    w, grad = np.ones((100, 100), np.float32), np.ones((100, 100), np.float32)
    adam, sgd = optim.Adam({"w": w}), optim.SGD({"w": w}, momentum=0.9)

    def call():
        adam.step({"w": grad})
        sgd.step({"w": grad})
        for wrong in ([w], [grad, None], [w[::2]], 3):
            fails([w], wrong, [w], [w], [0], 0.1, 0.9, 0.9, 0.1, 0.1, False, function=sa._core._adam_step)
        fails([w], [grad], [w], [w], [1], np.nan, 0.9, 0.9, 0.1, 0.1, False, function=sa._core._adam_step)

    assert_nothing_stays(call, [w, grad])


def encoder(width):
    layer = nn.TransformerEncoderLayer(
        width, 2, 4 * width, dropout=0.1, activation="gelu", batch_first=True, rng=0
    )
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width))


def bert():
    config = {
        "model_type": "bert", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    return models.BertModel(config, rng=0)


def sentences(n):
    """Ids in place of words, one to 64 a sentence."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, length).tolist() for length in rng.integers(1, 65, n)]


# Python keeps up to 2000 tuples of each size, and tuple(generator) takes one of one size and leaves one of another.
FILLS_TUPLES = 2100


def test_steps_of_an_encoder():
    model, x = encoder(8), np.ones((2, 5, 8), np.float32)
    mask = np.zeros((5, 5), np.float32)

    def call():
        y, pullback = model.vjp(x, mask=mask)
        pullback(y)
        fails(x[..., :7], function=model.vjp)
        fails(y[:, :4], function=pullback)
        fails(x, mask=mask[:4], function=model)

    assert_nothing_stays(call, [x, mask, *model.parameters().values()], first=FILLS_TUPLES)


def test_pretrained_models():
    model, few = bert(), sentences(3)

    def call():
        y, pullback = model.vjp(few)
        pullback(y)
        model.encode(few)
        model.hidden_states(few[0])
        fails([[40]], function=model.encode)
        fails(y[:2], function=pullback)

    assert_nothing_stays(call, [few, *model.parameters().values()], first=FILLS_TUPLES)


@pytest.mark.skipif(not memory.AVAILABLE, reason="the size of a process is read as on Linux")
@pytest.mark.parametrize("what", ["steps of an encoder", "2000 sentences"])
def test_repeated_work_does_not_grow(what):
    """Resident memory, which sees what tracemalloc does not."""
    if what == "2000 sentences":
        model, texts, times = bert(), sentences(2000), 3

        def call():
            model.encode(texts)
    else:
        model, x, times = encoder(32), np.ones((16, 40, 32), np.float32), 50

        def call():
            y, pullback = model.vjp(x)
            pullback(y)

    for _ in range(3):
        call()
    before = memory.status("VmRSS")
    for _ in range(times):
        call()
    assert memory.status("VmRSS") - before < 4 << 20


@pytest.mark.skipif(not memory.AVAILABLE, reason="the size of a process is read as on Linux")
def test_the_scratch_of_large_calls_is_given_back():
    """Resident memory, which sees what tracemalloc does not."""
    arrays = random_inputs((2, 300, 128), 5000)
    attend(*arrays, is_causal=True)
    before = memory.status("VmRSS")
    for _ in range(30):
        attend(*arrays, is_causal=True)
    assert memory.status("VmRSS") - before < 4 << 20
