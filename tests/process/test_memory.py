"""Memory grows with the length, not with its square: peak RSS of calls beyond their inputs and outputs.

Every case runs in a process of its own, this file as a script: `python test_memory.py CASE` prints what one
call needed.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import selfattn as sa
from selfattn.benchmarks import memory

MIB = 2**20
LIMIT = 64 * MIB

pytestmark = pytest.mark.skipif(not memory.AVAILABLE, reason="VmHWM is Linux's")


# -------------------------------------------------------------------------------------- the cases: in the child

CASES: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {}
LONG: list[str] = []  # those that the project promises by name: L = S = 16384, H = 8
VERY_LONG: list[str] = []  # 131,072 tokens, with gradients


def case(function):
    CASES[function.__name__] = function
    return function


def long_case(function):
    LONG.append(function.__name__)
    return case(function)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def inputs(length: int = 16384, heads: int = 8, width: int = 64) -> tuple[np.ndarray, ...]:
    """Query, key and value of one shape; each is what `normal` gives, so they are equal but apart."""
    return tuple(normal(1, heads, length, width) for _ in range(3))


def very_long_case(function):
    VERY_LONG.append(function.__name__)
    return case(function)


@long_case
def causal():
    return inputs(), {"is_causal": True}


@long_case
def dropout():
    return inputs(), {"dropout_p": 0.1, "rng": 0}


@long_case
def three_dimensions():
    return tuple(x[0] for x in inputs()), {}


@long_case
def d_v_differs_from_d_k():
    query, key, _ = inputs()
    return (query, key, normal(1, 8, 16384, 80)), {}


@long_case
def mask_of_b11s():
    mask = np.arange(16384) % 5 != 0
    return (*inputs(), mask.reshape(1, 1, 1, -1)), {}


@long_case
def key_lengths():
    return inputs(), {"key_lengths": np.arange(16384, 8192, -1024).reshape(1, 8)}


@long_case
def grouped_queries():
    return (normal(1, 8, 16384, 64), normal(1, 2, 16384, 64), normal(1, 2, 16384, 64)), {"enable_gqa": True}


@long_case
def causal_bfloat16():
    import ml_dtypes

    return tuple(x.astype(ml_dtypes.bfloat16) for x in inputs()), {"is_causal": True}


# 131,072 tokens of four heads of 64 take minutes, with a window they are in test_long.py. Without one, all pairs of a narrow head
# show what grows with L·S; many queries of few keys, and many keys of few queries, what grows with the width and with either.


@very_long_case
def all_pairs():
    return inputs(length=131072, heads=1, width=8), {"is_causal": True}


@very_long_case
def many_queries_of_few_keys():
    return (normal(1, 4, 131072, 64), normal(1, 4, 64, 64), normal(1, 4, 64, 64)), {}


@very_long_case
def many_keys_of_few_queries():
    return (normal(1, 4, 64, 64), normal(1, 4, 131072, 64), normal(1, 4, 131072, 64)), {}


# Below: what would be large if it were copied, converted or broadcast. Windows keep the arithmetic small.


@case
def every_option_at_once():
    per_head = np.linspace(0.1, 1.0, 8)
    options = {
        "softcap": 20.0,
        "alibi_slopes": per_head,
        "sinks": per_head,
        "key_lengths": np.full((1, 1), 16000),
    }
    mask = np.linspace(-1.0, 0.0, 16384, dtype=np.float16)
    return (*inputs(), mask), {
        **options,
        "dropout_p": 0.5,
        "rng": 1,
        "causal": "lower_right",
        "window": (2048, 0),
    }


@case
def float_mask_of_b11s():
    return (*inputs(), np.linspace(-4.0, 4.0, 16384).reshape(1, 1, 1, -1)), {"window": (512, 512)}


@case
def mask_of_1h11():
    return (*inputs(), np.linspace(-4.0, 4.0, 8).reshape(1, 8, 1, 1)), {"window": (512, 512)}


@case
def mask_of_l1():
    return (*inputs(), (np.arange(16384) % 7 != 0)[:, None]), {"window": (512, 512)}


@case
def mask_that_numpy_broadcast():
    # 8 * 16384² elements to look at, 128 KiB in memory
    mask = np.broadcast_to(np.linspace(-4.0, 4.0, 16384), (1, 8, 16384, 16384))
    return (*inputs(), mask), {"window": (512, 512)}


@case
def full_mask_of_float64_for_float32():
    # 288 MiB: 144 MiB if it were converted whole
    return (*inputs(length=6144), np.zeros((6144, 6144))), {"window": (512, 512)}


@case
def full_mask_transposed():
    # 144 MiB if it were copied
    return (*inputs(length=12288, heads=1), np.ones((12288, 12288), bool).T), {"window": (512, 512)}


@case
def heads_after_length():
    # (B, L, H, D) in memory: 128 MiB each if they were copied
    strided = tuple(normal(1, 8192, 64, 64).swapaxes(1, 2) for _ in range(3))
    return strided, {"window": (512, 512)}


@case
def last_axis_not_contiguous():
    strided = tuple(normal(1, 64, 64, 8192).swapaxes(2, 3) for _ in range(3))
    return strided, {"window": (512, 512)}


@case
def other_byte_order():
    swapped = tuple(x.byteswap().view(x.dtype.newbyteorder()) for x in inputs(length=8192, heads=64))
    return swapped, {"window": (512, 512)}


@case
def integers():
    # 128 MiB each; 256 MiB each if they were converted to float64 whole
    return tuple((8 * x).astype(np.int32) for x in inputs(length=8192, heads=64)), {"window": (512, 512)}


@case
def dtypes_that_differ():
    query, key, value = inputs(length=8192, heads=64)
    return (query.astype(np.float16), key, value.astype(np.float16)), {"window": (512, 512)}


@case
def heads_that_numpy_broadcast():
    key, value = (np.broadcast_to(x, (1, 64, 8192, 64)) for x in inputs(length=8192, heads=1)[1:])
    return (normal(1, 64, 8192, 64), key, value), {"window": (512, 512)}


@case
def few_queries_and_many_keys():
    # the keys are split among threads here: what the parts leave behind is counted too
    return (normal(1, 32, 4, 128), normal(1, 8, 65536, 128), normal(1, 8, 65536, 128)), {"enable_gqa": True}


@case
def lse_as_well():
    return inputs(), {"window": (512, 512), "return_lse": True}


# --------------------------------------------------------------------------------------------------- measuring


def memory_beyond(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that the call needed at its peak, on top of what was there and of what it returned."""
    peak, result = memory.peak_beyond(call)
    arrays = result if isinstance(result, tuple) else (result,)
    return peak - sum(array.nbytes for array in arrays), result


def five_lines(query, key, value):
    scores = query @ key.swapaxes(-1, -2) / np.float32(np.sqrt(query.shape[-1]))
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value


def forward_and_backward(arguments, options, grad_out):
    """Give the gradients alone: the output and what else the pullback holds count as memory needed."""
    _, pullback = sa.scaled_dot_product_attention_vjp(*arguments, **options)
    return tuple(gradient for gradient in pullback(grad_out) if gradient is not None)


def fresh_pages() -> dict[str, float]:
    """Give the pages that each of repeated calls takes from the system, with its results and without."""
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
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: sa.scaled_dot_product_attention(query, key, value),
        "its gradients": lambda: pullback(query),
        "packed sequences": lambda: sa.varlen_attention(*packed, offsets, offsets),
        "their gradients": lambda: packed_pullback(packed[0]),
        "larger gradients": lambda: larger_pullback(larger[0]),
    }
    pages = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            call()
        pages[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 8
    return pages


def script(name: str) -> None:
    if name == "fresh pages":
        print(json.dumps(fresh_pages()))
        return
    if name == "numpy":
        arrays = inputs(length=2048)
        needed, result = memory_beyond(lambda: five_lines(*arrays))
    elif name.startswith("backward of "):
        arguments, options = CASES[name.removeprefix("backward of ")]()
        if len(arguments) == 4 and arguments[3].dtype.kind == "f":
            options |= {"wrt": ("query", "key", "value", "attn_mask")}
        grad_out = normal(*arguments[0].shape[:-1], arguments[2].shape[-1])
        options |= {"num_threads": 2}  # each has some to work in, 12 MiB on a matrix unit
        needed, result = memory_beyond(lambda: forward_and_backward(arguments, options, grad_out))
    else:
        arguments, options = CASES[name]()
        needed, result = memory_beyond(lambda: sa.scaled_dot_product_attention(*arguments, **options))
    arrays = result if isinstance(result, tuple) else (result,)
    finite = all(bool(np.isfinite(array[..., ::97].astype(np.float32)).all()) for array in arrays)
    print(json.dumps({"bytes": needed, "finite": finite}))


def in_a_fresh_process(name: str, **settings: str) -> dict[str, Any]:
    """Run `script`, importing from where the tests do."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", __file__, name],
        capture_output=True, text=True, env=environment | settings, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def measure(name: str) -> int:
    # freed arrays go back to the system at once: none is left for the call to use unseen
    settings = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    answer = in_a_fresh_process(name, **settings)
    assert answer["finite"]
    print(f"{name}: {answer['bytes'] / MIB:.1f} MiB")
    return int(answer["bytes"])


# --------------------------------------------------------------------------------------------------- the tests


def test_the_measurement_sees_what_the_formula_needs():
    scores = 8 * 2048 * 2048 * 4
    assert measure("numpy") > scores > LIMIT  # at least the scores, at a length 8 times shorter than below


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_sixteen_thousand_tokens(name):
    if "bfloat16" in name:
        pytest.importorskip("ml_dtypes", reason="bfloat16 comes from the package ml_dtypes")
    assert measure(name) < LIMIT


@pytest.mark.parametrize("name", [name for name in CASES if name not in LONG + VERY_LONG])
def test_nothing_large_is_copied(name):
    assert measure(name) < LIMIT


# Forward and backward, without the inputs and the gradients; the output and the statistics are in it.
BACKWARD_LIMIT = 256 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "dropout", "d_v_differs_from_d_k"])
def test_gradients_of_sixteen_thousand_tokens(name):
    assert measure(f"backward of {name}") < BACKWARD_LIMIT


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "all_pairs" else ()) for name in VERY_LONG]
)
def test_gradients_of_131072_tokens(name):
    """A byte for each pair of a head would be 16 GiB, for each pair of many with few 32 MiB; a copy of what is long 128 MiB."""
    (query, _, value), _ = CASES[name]()
    output = query[..., 0].size * value.shape[-1] * 4  # the pullback holds it
    assert output < measure(f"backward of {name}") < output + 32 * MIB


@pytest.mark.parametrize("name", ["float_mask_of_b11s"])
def test_nothing_large_is_copied_for_gradients(name):
    """With the gradient of the mask, which is as small as the mask; 32 MiB of it are the output."""
    assert measure(f"backward of {name}") < LIMIT


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_repeated_calls_live_on_the_same_pages():
    """Fresh pages cost more than the arithmetic: a call's 256 to 768 for its results, and as many to work in."""
    assert all(pages < 16 for pages in in_a_fresh_process("fresh pages").values())


if __name__ == "__main__":
    script(sys.argv[1])
