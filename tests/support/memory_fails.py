"""A script: has each allocation of each operation fail in turn. `tests/process/test_failing_memory.py` starts it.

It runs with failing_malloc.c preloaded. An operation either succeeds with the same result or raises MemoryError; then all that
is the user's is as it was, and nothing stays allocated.
"""

import ctypes
import gc
import os
import sys

import ml_dtypes
import numpy as np

import selfattn as sa
from selfattn import nn, optim

shim = ctypes.CDLL(None)
shim.fail_at.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
shim.allocations.restype = shim.live_blocks.restype = ctypes.c_long

RNG = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What works in place is tried with failures of Python and NumPy outside the core too.
IN_PLACE = {"cache", "SGD", "Adam", "first step"}
MOST, TIMES = 3000, 25  # allocations of an operation


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape, dtype=np.float32).astype(dtype)


def arrays(dtype=np.float32, length=40, keys=48):
    """Larger than the blocks that NumPy keeps for itself."""
    return (
        normal(2, 3, length, 16, dtype=dtype),
        normal(2, 3, keys, 16, dtype=dtype),
        normal(2, 3, keys, 16, dtype=dtype),
    )


# ----------------------------------------------------------------------------------------------------- operations
# Each returns a call and the arrays that it may not change when it fails.


def attention(dtype=np.float32, keys=48, **options):
    def prepare():
        given = arrays(dtype, keys=keys)
        more = {name: make() if callable(make) else make for name, make in options.items()}
        if more.pop("into", False):
            more["out"] = np.full((2, 3, 40, 16), 7, dtype)
        return lambda: sa.scaled_dot_product_attention(*given, **more), [*given, *more.values()]

    return prepare


def gradients(dtype=np.float32, keys=48, wrt=("query", "key", "value"), **options):
    def prepare():
        given = arrays(dtype, keys=keys)
        more = {name: make() if callable(make) else make for name, make in options.items()}

        def call():
            out, pullback = sa.scaled_dot_product_attention_vjp(*given, wrt=wrt, **more)
            return out, pullback(out)

        return call, [*given, *more.values()]

    return prepare


def into_gradients():
    given = arrays()
    out, statistics = sa.scaled_dot_product_attention_forward(*given)
    kept = sa.AttentionGradients(*(np.full_like(x, 7) for x in given))

    def call():
        return sa.scaled_dot_product_attention_backward(out, out, statistics, *given, gradients=kept)

    return call, [*given, out, statistics, *kept]


def packed(masks=False):
    def prepare():
        q, k, v = (x[0].swapaxes(0, 1) for x in arrays())
        rows, keys = np.array([0, 10, 40]), np.array([0, 20, 48])
        options = {"attn_mask": [normal(10, 20), None]} if masks else {"is_causal": True}
        wrt = {"wrt": ("query", "key", "value", "attn_mask")} if masks else {}

        def call():
            out = sa.varlen_attention(q, k, v, rows, keys, **options)
            y, pullback = sa.varlen_attention_vjp(q, k, v, rows, keys, **options, **wrt)
            return out, y, pullback(y)

        return call, [q, k, v, rows, keys]

    return prepare


def rows(name, *arguments, dtype=np.float32):
    def prepare():
        x = normal(30, 64, dtype=dtype)

        def call():
            y, pullback = getattr(sa, f"{name}_vjp")(x, *arguments)
            return getattr(sa, name)(x, *arguments), y, pullback(y)

        return call, [x, *arguments]

    return prepare


def cache():
    q, k, v = (normal(1, 2, 20, 64) for _ in range(3))
    kept = sa.KVCache(1, 2, 64)
    kept.append(k[:, :, :10], v[:, :, :10])
    before = kept.key.copy(), kept.value.copy()

    def call():
        return kept.attend(q[:, :, 10:], k[:, :, 10:], v[:, :, 10:])

    def unchanged():
        assert kept.lengths.tolist() == [10], "the cache grew"
        assert all(np.array_equal(a, b) for a, b in zip(before, (kept.key, kept.value), strict=True))

    return call, [q, k, v, unchanged]


def step(make, dtype=np.float32, plain=True):
    def prepare():
        grown = {"w": normal(40, 20, dtype=dtype), "v": normal(300, dtype=dtype)}
        parameters = {name: x if plain else x[::-1] for name, x in grown.items()}
        grads = {name: normal(*x.shape, dtype=dtype) for name, x in parameters.items()}
        optimizer = make(parameters)
        optimizer.step(grads)
        before = optimizer.state_dict()

        def call():
            optimizer.step(grads)

        def unchanged():
            assert same(optimizer.state_dict(), before), "the optimiser's state changed"

        return call, [*parameters.values(), *grads.values(), unchanged]

    return prepare


def first_step():
    parameters = {"w": normal(40, 20)}
    grads, optimizer = {"w": normal(40, 20)}, optim.Adam(parameters)

    def call():
        optimizer.step(grads)

    def unchanged():
        assert optimizer.state_dict()["state"] == {}, "the optimiser's state changed"

    return call, [*parameters.values(), *grads.values(), unchanged]


def layer(module, *inputs):
    def prepare():
        def call():
            y, pullback = module.vjp(*inputs)
            return y, pullback(y)

        return call, [*inputs, *module.parameters().values()]

    return prepare


def linear():
    module = nn.Linear(32, 48, rng=0)
    return layer(module, normal(40, 32))()


OPERATIONS = {
    "attention": attention(),
    "attention of two threads": attention(keys=5000, num_threads=2),
    "attention into out": attention(into=True),
    "float16 with weights and lse": attention(np.float16, return_weights=True, return_lse=True),
    "bfloat16": attention(BFLOAT16, is_causal=True),
    "every option": attention(
        attn_mask=lambda: normal(40, 48), window=(9, 9), softcap=5.0, alibi_slopes=lambda: normal(3), sinks=lambda: normal(3),
        key_lengths=lambda: np.array([[40], [48]]), dropout_p=0.2, rng=3,
    ),
    "lists": attention(key_lengths=[[40], [48]], window=[9, 9]),
    "dropout of a generator": attention(dropout_p=0.2, rng=lambda: sa.torch_rng(0)),
    "blocks": attention(block_mask=lambda: sa.BlockMask.from_blocks(RNG.random((5, 6)) < 0.6, (8, 8))),
    "documents": attention(keys=40, block_mask=lambda: sa.BlockMask.from_documents(np.sort(RNG.integers(0, 3, 40)))),
    "prefix": attention(block_mask=lambda: sa.BlockMask.prefix_lm(np.array([7]))),
    "gradients": gradients(),
    "gradients of two threads": gradients(keys=5000, num_threads=2),
    "gradients of a mask": gradients(attn_mask=lambda: normal(2, 1, 40, 48), wrt=("query", "key", "value", "attn_mask")),
    "gradients of slopes and sinks": gradients(
        alibi_slopes=lambda: normal(3), sinks=lambda: normal(3), wrt=("query", "alibi_slopes", "sinks")
    ),
    "gradients of bfloat16": gradients(BFLOAT16, is_causal=True),
    "gradients into arrays": into_gradients,
    "packed": packed(),
    "packed with masks": packed(masks=True),
    "softmax": rows("softmax"),
    "log_softmax": rows("log_softmax", dtype=np.float16),
    "layer_norm": rows("layer_norm", 64, normal(64), normal(64)),
    "rms_norm": rows("rms_norm", 64, normal(64)),
    "gelu": rows("gelu"),
    "rotary": lambda: ((lambda x, c, s: (lambda: sa.apply_rotary_emb(x, c, s), [x, c, s]))(
        normal(2, 3, 20, 16), normal(20, 8), normal(20, 8)
    )),
    "cache": cache,
    "SGD": step(lambda p: optim.SGD(p, momentum=0.9)),
    "Adam": step(optim.Adam),
    "AdamW of float16": step(optim.AdamW, np.float16),
    "Adam of strides": step(optim.Adam, plain=False),
    "first step": first_step,
    "linear": linear,
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------- checks


def same(a, b):
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.shape == b.shape
            and a.dtype == b.dtype
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def copied(x):
    if isinstance(x, np.ndarray):
        return x.copy()
    return tuple(map(copied, x)) if isinstance(x, list | tuple) else x


def attempt(call, n, for_good, core):
    """Call with the n-th allocation failing: what was raised, and how many allocations there were."""
    raised = None
    switch = os.getppid  # see failing_malloc.c
    shim.fail_at(n, for_good, core)
    try:
        switch()
        call()
    except BaseException as error:
        raised = error
    finally:
        switch()
    seen = shim.allocations()
    if raised is not None:
        raised.__traceback__ = raised.__context__ = None
    return raised, seen


def stays(prepare, n, for_good, core):
    """Fail many times more: how many blocks stay of each failure. Caches fill; a leak shows every time."""
    for _ in range(10):
        gc.collect()
        before = shim.live_blocks()
        for _ in range(TIMES):
            call, state = prepare()
            attempt(call, n, for_good, core)
            call = state = None  # noqa: F841
        gc.collect()
        grew = (shim.live_blocks() - before) // TIMES
        if grew <= 0:
            break
    return grew


def sweep(name, prepare, for_good, core):
    """Fail at every allocation in turn, until the call gets by with fewer; return how many there were."""
    for n in range(1, MOST):
        call, state = prepare()
        before = [copied(x) for x in state if isinstance(x, np.ndarray)]
        live = shim.live_blocks()
        raised, seen = attempt(call, n, for_good, core)
        where = f"{name}, allocation {n}{' and all behind it' if for_good else ''}"
        if raised is None:
            if seen < n:
                return n - 1
        else:
            # NumPy sets no exception at places.
            allowed = (MemoryError, SystemError) if not core else MemoryError
            assert isinstance(raised, allowed), f"{where}: {raised!r}"
            after = [x for x in state if isinstance(x, np.ndarray)]
            assert all(map(same, before, after)), f"{where}: an array changed"
            for check in state:
                if callable(check):
                    check()
        raised = after = None
        if core and shim.live_blocks() > live:
            grew = stays(prepare, n, for_good, core)
            assert grew <= 0, f"{where}: {grew} blocks stay"
    raise AssertionError(f"{name}: no end of allocations")


def check(name, prepare):
    everywhere = [(False, False)] if name in IN_PLACE else []
    for _ in range(2):  # caches fill
        prepare()[0]()
    counts = [
        sweep(name, prepare, for_good, core) for core, for_good in [(True, False), (True, True), *everywhere]
    ]
    print(counts[0], "allocations", flush=True)


if __name__ == "__main__":
    sa.set_num_threads(1)
    chosen = sys.argv[1:] or OPERATIONS
    failed = 0
    for name in chosen:
        print(name, end=" ... ", flush=True)
        try:
            check(name, OPERATIONS[name])
        except Exception as error:
            failed += 1
            print("FAILED", type(error).__name__, str(error)[:400], flush=True)
    sys.exit(failed > 0)
