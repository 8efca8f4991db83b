"""A script: Python threads that call the package at once, on arrays of their own and on shared ones. `tools/check_threads` starts it
under ThreadSanitizer, `tests/process/test_threads.py` without.

Everything must have the bits that one thread alone computes. `planted` in place of a number of rounds has two threads write into
one array: the sanitizer must report that.
"""

import contextlib
import functools
import os
import random
import sys
import sysconfig
import threading
from collections import Counter

import numpy as np

import selfattn as sa
from selfattn import models, nn, optim, training

THREADS = 4
DRAWS = 500  # of each thread
RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


# ----------------------------------------------------------------------------------------------------- operations
# Each makes what a call reads, and returns the call. Threads make their own, or share one.


def attention(dtype=np.float32, **options):
    def prepare():
        q, k, v = (
            normal(2, 3, 60, 16, dtype=dtype),
            normal(2, 3, 70, 16, dtype=dtype),
            normal(2, 3, 70, 16, dtype=dtype),
        )
        return lambda: sa.scaled_dot_product_attention(q, k, v, **options)

    return prepare


def gradients(wrt=("query", "key", "value"), **options):
    def prepare():
        q, k, v = normal(2, 3, 60, 16), normal(2, 3, 70, 16), normal(2, 3, 70, 16)

        def call():
            y, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, wrt=wrt, **options)
            return y, pullback(y)

        return call

    return prepare


def packed():
    q, k, v = normal(90, 2, 16), normal(90, 2, 16), normal(90, 2, 16)
    offsets = np.array([0, 20, 20, 90])
    masks = [normal(20, 20), None, normal(70, 70)]
    wrt = ("query", "key", "value", "attn_mask")

    def call():
        y, pullback = sa.varlen_attention_vjp(q, k, v, offsets, offsets, attn_mask=masks, wrt=wrt)
        return sa.varlen_attention(q, k, v, offsets, offsets, is_causal=True), y, pullback(y)

    return call


def rows(name, *arguments, dtype=np.float32):
    def prepare():
        x = normal(100, 64, dtype=dtype)

        def call():
            y, pullback = getattr(sa, f"{name}_vjp")(x, *arguments)
            return getattr(sa, name)(x, *arguments), y, pullback(y)

        return call

    return prepare


def rotary():
    x, cos, sin = normal(2, 3, 40, 16), normal(40, 8), normal(40, 8)
    return lambda: sa.apply_rotary_emb(x, cos, sin)


def layer(make, *shape):
    def prepare():
        module, x = make(), normal(*shape)

        def call():
            y, pullback = module.vjp(x)
            return module(x), y, pullback(y)

        return call

    return prepare


def gpt():
    model = nn.GPT(50, 32, 2, 4, 64, positions="rotary", rng=0)
    ids = RNG.integers(0, 50, (3, 20))

    def call():
        y, pullback = model.vjp(ids)
        return y, pullback(y), model.generate(ids[0], 8)

    return call


def sentences():
    model = nn.EmbeddingModel(str.split, 50, 32, max_seq_len=40, num_layers=2, num_heads=4, rng=0)
    ids = [RNG.integers(0, 50, n).tolist() for n in (5, 1, 30)]

    def call():
        y, pullback = model.vjp(ids)
        return model(ids), y, pullback(y)

    return call


def rounded(kind):
    """Each time a model that has not computed yet: threads that share it all pack its weights at first."""

    def prepare():
        config = {
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        }
        model = models.LlamaForCausalLM(config | {"max_position_embeddings": 64}, rng=0).quantize(kind)
        ids = RNG.integers(0, 50, 20)
        return lambda: (model.logits(ids), model.generate(ids, 4))

    return prepare


def cache():
    q, k, v = normal(1, 4, 30, 16), normal(1, 2, 30, 16), normal(1, 2, 30, 16)

    def call():
        own = sa.KVCache(1, 2, 16)
        return [own.attend(q[:, :, :10], k[:, :, :10], v[:, :, :10])] + [
            own.attend(q[:, :, [t]], k[:, :, [t]], v[:, :, [t]]) for t in range(10, 30)
        ]

    return call


def steps(make):
    """The parameters are each call's own, the gradients may be shared."""

    def prepare():
        start, grads = {"w": normal(40, 60), "v": normal(60)}, {"w": normal(40, 60), "v": normal(60)}

        def call():
            own = {name: x.copy() for name, x in start.items()}
            optimizer = make(own)
            for _ in range(3):
                optimizer.step(grads)
            return own

        return call

    return prepare


def fitted():
    x, y = normal(20, 16), normal(20, 8)

    def call():
        model = nn.Linear(16, 8, rng=0)
        training.fit(
            model,
            [(x, y)] * 3,
            nn.MSELoss(),
            1,
            optimizer=optim.Adam(model.parameters(), 1e-2),
            log_every=None,
            progress=False,
        )
        return model.parameters()

    return call


OPERATIONS = {
    "attention": attention(),
    "attention of two threads": attention(num_threads=2),
    "every option": attention(
        attn_mask=normal(60, 70), window=(9, 9), softcap=5.0, alibi_slopes=normal(3), sinks=normal(3),
        key_lengths=np.array([[40], [70]]), dropout_p=0.2, rng=3, num_threads=3,
    ),
    "float16": attention(np.float16, return_weights=True, return_lse=True),
    "float64": attention(np.float64, is_causal=True),
    "blocks": attention(block_mask=sa.BlockMask.from_blocks(RNG.random((8, 9)) < 0.6, (8, 8))),
    "gradients": gradients(num_threads=2),
    "gradients of options": gradients(
        ("query", "attn_mask", "alibi_slopes", "sinks"), attn_mask=normal(2, 1, 60, 70), alibi_slopes=normal(3), sinks=normal(3),
    ),
    "packed": packed,
    "softmax": rows("softmax"),
    "log_softmax": rows("log_softmax", dtype=np.float16),
    "layer_norm": rows("layer_norm", 64, normal(64), normal(64)),
    "rms_norm": rows("rms_norm", 64, normal(64)),
    "gelu": rows("gelu"),
    "rotary": rotary,
    "linear": layer(lambda: nn.Linear(64, 48, rng=0), 100, 64),
    "encoder": layer(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, rng=0), 3, 30, 32),
    "GPT": gpt,
    "sentences": sentences,
    "int8": rounded("int8"),
    "cache": cache,
    "SGD": steps(lambda p: optim.SGD(p, 0.1, momentum=0.9)),
    "Adam": steps(lambda p: optim.Adam(p, 0.1)),
    "fit": fitted,
}  # fmt: skip
if sa._core._compact_unit(False) is not None:
    OPERATIONS["bfloat16"] = rounded("bfloat16")


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


# -------------------------------------------------------------------------------------------------------- threads

failures = []


def at_once(*works):
    """Run each in a thread, all beginning together."""
    start = threading.Barrier(len(works))

    def run(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compute(calls, expected, seed):
    """All calls, in an order of this thread's own."""

    def work():
        for name in random.Random(seed).sample(list(calls), len(calls)):
            got = calls[name]()
            assert same(got, expected[name]), f"{name} has other bits"
            del got

    return work


def settings(done):
    """What is of the whole process, read and set all the while."""
    numbers = 0
    while not done.is_set():
        sa.set_num_threads((1, 2, 3, None)[numbers % 4])
        assert sa.get_num_threads() >= 1
        assert sa.get_isa() in sa.show_config("dicts")["available_isas"]
        numbers += 1
    sa.set_num_threads(None)


def seeded():
    """The same arrays each time."""
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state
    return {name: prepare() for name, prepare in OPERATIONS.items()}


def operations(turn):
    """All operations in all threads: two share what they read, of the others each has its own."""
    expected = {name: call() for name, call in seeded().items()}
    calls = [seeded() for _ in range(THREADS - 1)]
    done = threading.Event()
    setting = threading.Thread(target=settings, args=[done])
    setting.start()
    at_once(*(compute(calls[max(n - 1, 0)], expected, 10 * turn + n) for n in range(THREADS)))
    done.set()
    setting.join()


def first_calls():
    """Packed weights, angles and pieces are made when they are first wanted: here by all threads at once."""
    for name in ("int8", "bfloat16", "GPT", "sentences", "fit"):
        if name in OPERATIONS:
            expected, call = seeded()[name](), seeded()[name]
            at_once(*[compute({name: call}, {name: expected}, 0)] * THREADS)


def handed_over():
    """What one thread makes, another uses and drops; then the blocks of memory behind it are a third's."""
    x, y = normal(3, 30, 32), normal(2, 3, 60, 16)
    module = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, rng=0)
    out, pullback = module.vjp(x)
    expected = pullback(out)
    made, lock = [], threading.Lock()

    def make():
        for _ in range(8):
            got = module.vjp(x)[1], sa.scaled_dot_product_attention_vjp(y, y, y)[1]
            with lock:
                made.append(got)

    def use():
        for _ in range(8):
            with lock:
                got = made.pop() if made else None
            if got is not None:
                assert same(got[0](out), expected)
                got[1](y)

    at_once(make, use, make, use)
    made.clear()


def generators():
    """Shared ones: a number is drawn once, whoever draws it."""
    shared, drawn = sa.torch_rng(3), [[] for _ in range(THREADS)]
    at_once(*(functools.partial(draw, shared, own) for own in drawn))
    in_turn, together = sa.torch_rng(3), Counter(x for own in drawn for x in own)
    first = Counter(float(in_turn.standard_normal()) for _ in range(THREADS * DRAWS + 2 * THREADS))
    assert together.total() == THREADS * DRAWS
    assert together <= first, "a number was drawn twice"
    source, y = np.random.default_rng(0), normal(2, 3, 20, 16)
    at_once(*[lambda: sa.scaled_dot_product_attention(y, y, y, dropout_p=0.5, rng=source)] * THREADS)


def draw(generator, own):
    own.extend(float(generator.standard_normal()) for _ in range(DRAWS))


def lists_that_change():
    """What the core reads of a list another thread makes longer and shorter: it takes what it saw, or refuses."""
    ids, done = [1] * 20, threading.Event()
    x = [normal(40, 60) for _ in range(4)]
    arrays = [[array.copy()] for array in x]

    def change():
        while not done.is_set():
            ids.extend([2] * 500)
            del ids[20:]
            for of_one, array in zip(arrays, x, strict=True):
                of_one.clear()
                of_one.append(array.copy())

    def read():
        try:
            for _ in range(300):
                packed = sa._core._pack_ids([ids], 50)
                assert packed is None or set(packed[0].tolist()) <= {1, 2}
                with contextlib.suppress(TypeError):  # a list was empty
                    sa._core._adam_step(*arrays, [1], 0.1, 0.9, 0.999, 1e-8, 0.0, False)
        finally:
            done.set()

    at_once(change, read)


def forks():
    """From one thread while others compute; the children compute as well."""
    x = normal(2, 4, 100, 16)
    expected = sa.scaled_dot_product_attention(x, x, x, num_threads=1)

    def attend():
        for _ in range(10):
            assert same(sa.scaled_dot_product_attention(x, x, x, num_threads=2), expected)

    def fork():
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if same(sa.scaled_dot_product_attention(x, x, x, num_threads=1), expected) else 1)
            assert os.waitpid(pid, 0)[1] == 0, "a child failed"

    at_once(attend, fork, attend)


def planted():
    x, out = normal(4, 8, 100, 64), np.empty((4, 8, 100, 64), np.float32)

    def write():
        for _ in range(20):  # on a busy machine one thread might be done before the other begins
            sa.scaled_dot_product_attention(x, x, x, out=out, num_threads=1)

    at_once(write, write)


if __name__ == "__main__":
    if sys.argv[1:] == ["planted"]:
        planted()
        sys.exit()
    sys.setswitchinterval(1e-5)  # seconds: with a GIL threads change often
    for turn in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        for part in (
            functools.partial(operations, turn),
            first_calls,
            handed_over,
            generators,
            lists_that_change,
            forks,
        ):
            part()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    assert gil != bool(sysconfig.get_config_var("Py_GIL_DISABLED")), (
        "a free-threaded Python has a GIL: an extension asked for it"
    )
    print(
        f"{len(OPERATIONS)} operations in {THREADS} threads, {sa.get_isa()}, {'with' if gil else 'without'} a GIL: ",
        end="",
    )
    print(f"{len(failures)} failures", flush=True)
    sys.exit(bool(failures))
