"""The choice of kernels: the best by default, another by SELFATTN_ISA, a clear error for an impossible choice."""

import itertools
import json
import re

import numpy as np
import pytest
from instruction_sets import ISAS
from processes import PYTHON, finish, run_script, start

import selfattn as sa
from selfattn import _core

SCRIPT = """
import json, sys
import numpy as np
import selfattn as sa
rng = np.random.default_rng(0)
results = {}
for dtype in ("float32", "float64"):
    q, k, v = (rng.standard_normal((2, 70, 33)).astype(dtype) for _ in range(3))
    for name, options in (("plain", {}), ("options", {"is_causal": True, "softcap": 5.0, "dropout_p": 0.2, "rng": 1})):
        results[dtype + " " + name] = sa.scaled_dot_product_attention(q, k, v, **options).tolist()
json.dump({"isa": sa.get_isa(), "shown": sa.show_config("dicts")["isa"], "results": results}, sys.stdout)
"""


def answer(**environment):
    return json.loads(run_script(SCRIPT, **({"SELFATTN_ISA": None} | environment)))


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


@pytest.mark.parametrize("environment", [{}, {"SELFATTN_ISA": ""}], ids=["unset", "empty"])
def test_the_default_is_the_best(environment):
    assert answer(**environment)["isa"] == ISAS[0]


@pytest.fixture(scope="module")
def expected():
    return answer(SELFATTN_ISA="generic")["results"]


@pytest.mark.parametrize("name", ISAS)
def test_the_environment_chooses(name, expected):
    got = answer(SELFATTN_ISA=name)
    assert got["isa"] == got["shown"] == name
    for case, numbers in got["results"].items():
        eps = float(np.finfo(case.split()[0]).eps)
        # Scores below 6 as sums of 33 products in another order, 70 weights likewise, values below 5; dropout
        # divides by 0.8. Rounding errors of both signs add up to less than the square roots of the lengths.
        atol = (6 * np.sqrt(33) + np.sqrt(70)) * eps * 5 / 0.8
        np.testing.assert_allclose(numbers, expected[case], rtol=0, atol=atol, err_msg=case)


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
        with pytest.raises(
            ValueError,
            match=re.escape(f"'nonsense': this build on this CPU and operating system can run {ISAS!r}"),
        ):
            _core._set_isa("nonsense")
        with pytest.raises(TypeError, match="must be a str, got int"):
            _core._set_isa(3)
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
