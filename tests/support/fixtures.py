"""Fixtures of all tests, of the core and of the package of models: instruction sets, commands, threads."""

import pytest

from selfattn import _core


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
