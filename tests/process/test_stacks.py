"""Small stacks, and calls nested in the reading of arguments: results, or a RecursionError, never a crash."""

import sys

from processes import finish, start

NESTED = """
import numpy as np, selfattn as sa
q = np.ones((2, 3, 4), np.float32)

class Nested:
    def __init__(self, call):
        self.call = call
    def __array__(self, dtype=None, copy=None):
        return self.call(self)

for call in (
    lambda x: sa.scaled_dot_product_attention(x, x, x),
    lambda x: sa.functional.scaled_dot_product_attention_vjp(x, q, q)[0],
    lambda x: sa.gelu(x),
    lambda x: sa.layer_norm(q, (4,), x),
):
    try:
        call(Nested(call))
    except RecursionError:
        continue
    raise SystemExit("no RecursionError")
"""
SMALL = """
import threading
import numpy as np, selfattn as sa
x = np.random.default_rng(0).standard_normal((2, 90, 32), dtype=np.float32)
model = sa.nn.TransformerEncoderLayer(32, 2, 64, rng=0).eval()

def results():
    found = []
    for vjp in (
        lambda: sa.functional.scaled_dot_product_attention_vjp(x, x, x, is_causal=True),
        lambda: sa.functional.gelu_vjp(x),
        lambda: sa.functional.layer_norm_vjp(x, (32,)),
        lambda: model.vjp(x),
    ):
        try:
            y, pullback = vjp()
            found.append((y, pullback(y)))
        except RecursionError as error:
            assert "stack" in str(error), error
            found.append(None)
    return found

expected = results()
assert None not in expected
for size in (64, 80, 96, 128, 256):
    threading.stack_size(size * 1024)
    found = []
    thread = threading.Thread(target=lambda: found.extend(results()))
    thread.start()
    thread.join()
    assert len(found) == len(expected)
    for own, other in zip(found, expected):
        assert own is None or str(own) == str(other)
    assert size < 256 or None not in found, found
"""


TEAM = """
import numpy as np, selfattn as sa
x = np.random.default_rng(0).standard_normal((8, 200, 32), dtype=np.float32)
out, pullback = sa.functional.scaled_dot_product_attention_vjp(x, x, x)
print(repr((out, *pullback(out))))
"""


def test_stacks_of_openmp_that_are_too_small():
    sizes = {"OMP_STACKSIZE": ("16k", "16384B", "64"), "GOMP_STACKSIZE": (" 20 K ", "1M")}
    environments = [{}, *({name: size} for name, of_name in sizes.items() for size in of_name)]
    done = [
        finish(start([sys.executable, "-c", TEAM], {"OMP_NUM_THREADS": "2"} | each)) for each in environments
    ]
    assert {(each.returncode, each.stdout) for each in done} == {(0, done[0].stdout)}, done


def test_a_call_that_calls_itself_ends_in_a_recursion_error():
    done = finish(start([sys.executable, "-c", NESTED]))
    assert done.returncode == 0, done.stderr


def test_threads_with_small_stacks():
    done = finish(start([sys.executable, "-c", SMALL]))
    assert done.returncode == 0, done.stderr
