"""Pretrained models in many Python threads, and a Python without a GIL."""

import sysconfig
from pathlib import Path

import pytest
from processes import PYTHON, finish, run_script, start


def test_all_operations_in_many_threads():
    """The script that tools/check_threads.sh runs under ThreadSanitizer, once."""
    script = Path(__file__).parents[1] / "support" / "model_races.py"
    done = finish(start([*PYTHON, script], {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "0 failures" in done.stdout


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"),
    reason="only a free-threaded Python can leave its GIL off; this one always has it",
)
def test_importing_leaves_the_gil_off():
    script = "import sys, selfattn_models, selfattn_models.loading; print(sys._is_gil_enabled())"
    assert run_script(script) == "False"
