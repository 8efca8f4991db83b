"""The choice of kernels: the best by default, another by SELFATTN_ISA, a clear error for an impossible choice."""

import itertools
import re

import numpy as np
import pytest
from instruction_sets import ISAS
from processes import PYTHON, finish, run_script, start

import selfattn as sa
from selfattn import _core


def chosen(**environment):
    """Return what a new process uses, and what it says that it uses."""
    script = "import selfattn as sa; print(sa.get_isa(), sa.show_config('dicts')['isa'])"
    return run_script(script, **({"SELFATTN_ISA": None} | environment)).split()


def test_get_isa_and_what_is_available():
    assert sa.get_isa() in ISAS
    assert ISAS[-1] == "generic"  # plain C runs everywhere
    assert len(set(ISAS)) == len(ISAS)
    known = ["amx", "avx512bf16", "avx512", "avx2", "baseline", "neon", "generic"]
    assert list(ISAS) == [name for name in known if name in ISAS]  # best first


def test_the_flags_of_the_cpu_agree():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = set(re.search(r"^flags\s*:(.*)$", file.read(), re.MULTILINE)[1].split())
    except (OSError, TypeError):
        pytest.skip("no flags in /proc/cpuinfo")
    assert ("avx2" in ISAS) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx512" in ISAS) == ({"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"} <= flags)
    if "avx512bf16" in ISAS:  # not the default on every CPU that has it: see csrc/runtime/cpu.c
        assert {"avx512f", "avx512_bf16"} <= flags


def test_the_environment_chooses_and_the_default_is_the_best():
    for environment in ({}, {"SELFATTN_ISA": ""}):
        assert chosen(**environment) == [ISAS[0]] * 2
    for name in ISAS:
        assert chosen(SELFATTN_ISA=name) == [name] * 2


@pytest.mark.parametrize(
    "name", ["avx1024", "AVX2", " generic", "generic,avx2", "neon" if "neon" not in ISAS else "avx2", "é"]
)
def test_an_impossible_one_is_an_import_error_that_says_what_is_possible(name):
    done = finish(start([*PYTHON, "-c", "import selfattn"], {"SELFATTN_ISA": name}))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: SELFATTN_ISA='")
    assert name in last or not name.isascii()
    assert repr(tuple(ISAS)) in last


def test_the_variable_is_read_at_import_only():
    script = f"""
import os
os.environ["SELFATTN_ISA"] = "generic"
import numpy as np
import selfattn as sa
assert sa.get_isa() == "generic"
os.environ["SELFATTN_ISA"] = {ISAS[0]!r}
x = np.ones((3, 4), np.float32)
sa.scaled_dot_product_attention(x, x, x)
assert sa.get_isa() == "generic"
del os.environ["SELFATTN_ISA"]
sa.scaled_dot_product_attention(x, x, x)
assert sa.get_isa() == "generic"
"""
    run_script(script, SELFATTN_ISA=None)


def test_after_a_failed_import_another_one_works():
    script = """
import os
os.environ["SELFATTN_ISA"] = "nonsense"
try:
    import selfattn
except ImportError as error:
    assert "nonsense" in str(error)
else:
    raise SystemExit("no error")
os.environ["SELFATTN_ISA"] = "generic"
import selfattn
assert selfattn.get_isa() == "generic"
"""
    run_script(script, SELFATTN_ISA=None)


def test_the_private_setter():
    before = sa.get_isa()
    try:
        for name in ISAS:
            _core._set_isa(name)
            assert sa.get_isa() == name
        with pytest.raises((TypeError, UnicodeEncodeError)):
            _core._set_isa("\udc80")
        assert sa.get_isa() == ISAS[-1]
    finally:
        _core._set_isa(before)


def test_longdouble_is_left_alone(isa):
    """GCC may move eight bytes through an MMX register, and x87 arithmetic of that thread would be NaN from then on."""
    rng = np.random.default_rng(0)
    for dtype, rows, keys in itertools.product((np.float32, np.float64), (1, 3, 40), (7, 70)):
        query, key, value = (rng.standard_normal((2, n, 10)).astype(dtype) for n in (rows, keys, keys))
        for mask in (None, rng.standard_normal((rows, keys)).astype(dtype)):
            wrt = ("query", "key", "value") + (() if mask is None else ("attn_mask",))
            out, pullback = sa.scaled_dot_product_attention_vjp(
                query, key, value, attn_mask=mask, wrt=wrt, num_threads=1
            )
            pullback(out)
            with np.errstate(all="raise"):
                assert np.sqrt(np.longdouble(rows * rows)) == rows
