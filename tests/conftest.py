"""What all tests share: a fixture of instruction sets, Hypothesis profiles, the path of tests/support."""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine, threads that spin while they wait take the time of those that work: of selfattn, and of NumPy's products in the
# reference. (Read when the libraries are loaded.)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from selfattn import _core

sys.path.insert(0, str(Path(__file__).parent / "support"))  # importlib mode does not find its modules
sys.path.append(str(Path(__file__).parents[1]))  # benchmarks

# A shell starts background processes with Ctrl-C ignored, and nohup ignores hang-ups; tests of these signals would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# `HYPOTHESIS_PROFILE=thorough` looks longer; in CI the examples are the same ones every time.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture(params=_core.available_isas())
def isa(request):
    """Every instruction set that this build has and this CPU runs, one after the other: its name."""
    before = _core.get_isa()
    _core._set_isa(request.param)
    assert _core.get_isa() == request.param
    yield request.param
    assert _core.get_isa() == request.param  # the test chose no other set
    _core._set_isa(before)


@pytest.fixture
def run(capsys):
    """Run the command `selfattn` in this process, check its exit code, and return what it printed."""
    from selfattn import cli

    def run(*arguments, code=0):
        assert cli.main([*map(str, arguments)]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def threads_restored():
    before = _core.get_num_threads()
    yield
    _core.set_num_threads(before)


@pytest.fixture
def openmp_restored():
    """PyTorch's number of threads is OpenMP's, which limits ours."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with threadpoolctl.threadpool_limits():
        yield


@pytest.fixture
def one_thread():
    """Use one thread: tests make many small calls, for which starting threads takes longer than the calls."""
    _core.set_num_threads(1)
    yield
    _core.set_num_threads(None)
