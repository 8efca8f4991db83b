"""Memory grows with the length, not with its square: this measures the peak RSS of calls beyond inputs and outputs.

This file is also a script: `python test_memory.py CASE...` prints what each case's call needed. Each case runs in a
child that the script forks before any call, so nothing that an earlier call left can be used unseen.
"""

import gc
import json
import os
import platform
import sys

import numpy as np
import pytest
from inputs import BFLOAT16, OTHERS, options_together
from processes import PYTHON, TO_THE_SYSTEM, finish, start

import selfattn as sa
from benchmarks import memory
from selfattn import nn, reference

MIB = 2**20
LIMIT = 40 * MIB

pytestmark = pytest.mark.skipif(not memory.AVAILABLE, reason="VmHWM is Linux's")


# 131,072 tokens, with gradients
VERY_LONG = ("all_pairs", "many_queries_of_few_keys", "many_keys_of_few_queries")
NEAR = {"window": (64, 64)}  # keeps the arithmetic small if inputs are large


def normal(*shape):
    """Repeat a million normal numbers: to draw all of them would take longer than the call."""
    return np.resize(np.random.default_rng(len(shape)).standard_normal(1 << 20, dtype=np.float32), shape)


TOKENS = 2400  # of 8 heads: a byte for each pair would be 44 MiB


def inputs(length=TOKENS, heads=8, width=64):
    return tuple(normal(1, heads, length, width) for _ in range(3))


def swapped(x):
    return x.byteswap().view(x.dtype.newbyteorder())


def wide():
    """48 MiB each."""
    return inputs(length=8192, heads=24)


HALVES = (np.float16, np.float32, np.float16)
EVERY_OPTION = {
    **options_together(sorted({*OTHERS} - {"bias"}), (1, 8), TOKENS, TOKENS, np.random.default_rng(0)),
    "key_lengths": np.full((1, 1), TOKENS - 50),
    "causal": "lower_right",
    "window": (2000, 0),
    "return_lse": True,
}

CASES = {
    "causal": lambda: (inputs(), {"is_causal": True}),
    "by_offset": lambda: (inputs(), {"offset_bias": normal(8, 2 * TOKENS - 1)}),
    "dropout": lambda: (inputs(), {"dropout_p": 0.1, "rng": 0}),
    "d_v_differs_from_d_k": lambda: ((*inputs()[:2], normal(1, 8, TOKENS, 80)), {}),
    "causal_bfloat16": lambda: (tuple(x.astype(BFLOAT16) for x in inputs()), {"is_causal": True}),
    "every_option_at_once": lambda: (
        (*inputs(), np.linspace(-1.0, 0.0, TOKENS, dtype=np.float16)),
        EVERY_OPTION,
    ),
    # 131,072 tokens of four heads of 64 take minutes, 65,536 with a window are in test_benchmarks.py. Without one,
    # all pairs of a narrow head show what grows with L·S; many queries of few keys, and the reverse, what grows with
    # either.
    "all_pairs": lambda: (inputs(length=131072, heads=1, width=8), {"is_causal": True}),
    "many_queries_of_few_keys": lambda: (tuple(normal(1, 8, n, 16) for n in (131072, 64, 64)), {}),
    "many_keys_of_few_queries": lambda: (tuple(normal(1, 8, n, 16) for n in (64, 131072, 131072)), {}),
    # Arguments that would be large if they were copied, converted or broadcast.
    "float_mask_of_b11s": lambda: (
        (*inputs(length=8192), np.linspace(-4.0, 4.0, 8192).reshape(1, 1, 1, -1)),
        NEAR,
    ),
    "mask_that_numpy_broadcast": lambda: (
        (*inputs(length=8192), np.broadcast_to(np.linspace(-4.0, 4.0, 8192), (1, 8, 8192, 8192))),
        NEAR,
    ),
    "full_mask_of_float64_for_float32": lambda: ((*inputs(length=4096), np.zeros((4096, 4096))), NEAR),
    "full_mask_transposed": lambda: ((*inputs(length=8192, heads=1), np.ones((8192, 8192), bool).T), NEAR),
    "heads_after_length": lambda: (tuple(normal(1, 8192, 24, 64).swapaxes(1, 2) for _ in range(3)), NEAR),
    "last_axis_not_contiguous": lambda: (
        tuple(normal(1, 24, 64, 8192).swapaxes(2, 3) for _ in range(3)),
        NEAR,
    ),
    "other_byte_order": lambda: (tuple(map(swapped, wide())), NEAR),
    "integers": lambda: (tuple((8 * x).astype(np.int32) for x in wide()), NEAR),
    "dtypes_that_differ": lambda: (tuple(x.astype(t) for x, t in zip(wide(), HALVES, strict=True)), NEAR),
    "heads_that_numpy_broadcast": lambda: (
        (wide()[0], *(np.broadcast_to(x, (1, 24, 8192, 64)) for x in inputs(length=8192, heads=1)[1:])),
        NEAR,
    ),
    # The keys are split among threads here; the parts' memory counts too.
    "few_queries_and_many_keys": lambda: (
        (normal(1, 32, 4, 128), normal(1, 8, 16384, 128), normal(1, 8, 16384, 128)),
        {"enable_gqa": True},
    ),
}


def memory_beyond(call):
    """Return the bytes that the call needed at its peak, beyond existing memory and its result."""
    peak, result = memory.peak_beyond(call)
    arrays = result if isinstance(result, tuple) else (result,)
    return peak - sum(array.nbytes for array in arrays), arrays


def forward_and_backward(arguments, options, grad_out):
    """Return only the gradients, so that the output and other memory of the pullback count as needed."""
    _, pullback = sa.scaled_dot_product_attention_vjp(*arguments, **options)
    return tuple(gradient for gradient in pullback(grad_out) if gradient is not None)


def tangents_of(arguments, options):
    """Return gradients and their tangents; the output and its tangent count as needed."""
    grads, moved = sa.functional.scaled_dot_product_attention_hvp(*arguments, **options)
    return *grads, *moved


def encoder_step(tokens):
    """Return the forward pass of a training step, whose pullback holds about 19 KiB for each token."""
    layer = nn.TransformerEncoderLayer(128, 2, 512, dropout=0.0, batch_first=True, rng=0)
    model, x = nn.TransformerEncoder(layer, num_layers=2), normal(tokens // 32, 32, 128)
    return lambda: model.vjp(x)[1]


def kept_blocks():
    """Return the memory that each pullback holds, and the memory that is kept after all are freed, in MiB."""
    sa.set_num_threads(1)
    encoder_step(tokens=32)()
    forward = encoder_step(tokens=5120)
    before = memory.status("VmRSS")
    pullbacks = [forward() for _ in range(5)]
    each = (memory.status("VmRSS") - before) / 5
    pullbacks.clear()
    gc.collect()
    return {"each": each / MIB, "kept": (memory.status("VmRSS") - before) / MIB}


def fresh_pages():
    """Return the pages that each repeated call takes from the system, with its results and without."""
    import resource

    query, key, value = inputs(length=512)
    packed = [x[0].swapaxes(0, 1) for x in (query, key, value)]
    offsets = np.array([0, 200, 512])
    _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value)
    _, packed_pullback = sa.varlen_attention_vjp(*packed, offsets, offsets)
    larger = [normal(1, 8, 1024, 128) for _ in range(3)]  # with the mask's, its gradients are 16 MiB
    _, larger_pullback = sa.scaled_dot_product_attention_vjp(
        *larger, normal(1024, 1024), wrt=("query", "key", "value", "attn_mask")
    )
    step, dy = encoder_step(tokens=4096), normal(128, 32, 128)  # takes two blocks of 30 to 80 MiB
    calls = {
        "attention": lambda: sa.scaled_dot_product_attention(query, key, value),
        "its gradients": lambda: pullback(query),
        "packed sequences": lambda: sa.varlen_attention(*packed, offsets, offsets),
        "their gradients": lambda: packed_pullback(packed[0]),
        "larger gradients": lambda: larger_pullback(larger[0]),
        "a training step": lambda: step()(dy),
    }
    pages = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(3):
            call()
        pages[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 3
    return pages


def script(name):
    if name in ("fresh pages", "kept blocks"):
        return fresh_pages() if name == "fresh pages" else kept_blocks()
    case = name.removeprefix("backward of ").removeprefix("tangents of ")
    arguments, options = CASES[case]() if case in CASES else (inputs(length=1536, heads=5), {})
    options |= {"num_threads": 2}  # each thread has scratch memory, 12 MiB on a matrix unit
    if name == "reference":
        needed, arrays = memory_beyond(lambda: reference.scaled_dot_product_attention(*arguments))
    elif name.startswith("tangents"):
        call = arguments, options | {"tangents": arguments[:3], "grad_out": arguments[0]}
        needed, arrays = memory_beyond(lambda: tangents_of(*call))
    elif case != name:
        if len(arguments) == 4 and arguments[3].dtype.kind == "f":
            options |= {"wrt": ("query", "key", "value", "attn_mask")}
        grad_out = normal(*arguments[0].shape[:-1], arguments[2].shape[-1])
        needed, arrays = memory_beyond(lambda: forward_and_backward(arguments, options, grad_out))
    else:
        needed, arrays = memory_beyond(lambda: sa.scaled_dot_product_attention(*arguments, **options))
    finite = all(bool(np.isfinite(array[..., ::97].astype(np.float32)).all()) for array in arrays)
    return {"bytes": needed, "finite": finite}


def in_children(names, **settings):
    """Run cases in two processes at once; return what each prints, by name."""
    found = {}
    for process in [start([*PYTHON, __file__, *names[n::2]], settings) for n in range(min(2, len(names)))]:
        done = finish(process)
        assert done.returncode == 0, done.stderr
        found |= dict(map(json.loads, done.stdout.splitlines()))
    return found


BACKWARD = [f"backward of {x}" for x in ("causal", "dropout", "d_v_differs_from_d_k", "float_mask_of_b11s")]
SHORTER = [*(name for name in CASES if name not in VERY_LONG), *BACKWARD, "tangents of by_offset"]


class Measured(dict):
    def __missing__(self, name):  # the case that takes minutes
        return in_children([name], **TO_THE_SYSTEM)[name]


@pytest.fixture(scope="module")
def measured():
    """What all other cases needed."""
    names = ["reference", "kept blocks", *(f"backward of {name}" for name in VERY_LONG[1:]), *SHORTER]
    return Measured(in_children(names, **TO_THE_SYSTEM))


def test_the_measurement_sees_what_the_formula_needs(measured):
    """The reference needs at least its scores, at a length half as long as below."""
    assert measured["reference"]["bytes"] > 5 * 1536 * 1536 * 4 > LIMIT


@pytest.mark.parametrize("name", SHORTER)
def test_nothing_large_is_made_or_copied(name, measured):
    """For gradients the output and the pullback's memory count, up to 16 MiB; the mask's gradient is as small as the
    mask."""
    assert measured[name]["finite"] and measured[name]["bytes"] < LIMIT


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name == "all_pairs" else ()) for name in VERY_LONG],
)
def test_gradients_of_131072_tokens(name, measured):
    """A byte for each pair of a head would be 16 GiB, for each pair of many with few 64 MiB, as is a copy of what is
    long."""
    (query, _, value), _ = CASES[name]()
    output = query[..., 0].size * value.shape[-1] * 4  # the pullback holds it
    found = measured[f"backward of {name}"]
    assert found["finite"] and output < found["bytes"] < output + LIMIT


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_repeated_calls_live_on_the_same_pages():
    """Fresh pages cost more than the arithmetic: a call's 256 to 768 for its results, and as many to work in."""
    assert all(pages < 16 for pages in in_children(["fresh pages"])["fresh pages"].values())


def test_few_large_blocks_are_kept(measured):
    """Of five pullbacks' memory that of two is kept for the next calls."""
    mib = measured["kept blocks"]
    assert mib["each"] > 64
    assert 1.8 * mib["each"] < mib["kept"] < 2.2 * mib["each"]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            print(json.dumps([name, script(name)]), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, name
