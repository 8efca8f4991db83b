"""What is set before any test, of the core and of the package of models, runs: threads that wait, signals,
Hypothesis."""

import atexit
import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

# On a busy machine, threads that spin while they wait take the time of those that work: of selfattn, and of NumPy's
# products in the reference. (Read when the libraries are loaded.)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts background processes with Ctrl-C ignored, and nohup ignores hang-ups; tests of these signals would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# If Python may not write what it compiles, each of more than a hundred children would compile the whole package:
# processes.py lets them write to this folder, which goes with the run. Workers of pytest-xdist share it.
if os.environ.get("PYTHONDONTWRITEBYTECODE") and "SELFATTN_TEST_BYTECODE" not in os.environ:
    os.environ["SELFATTN_TEST_BYTECODE"] = tempfile.mkdtemp(prefix="selfattn-tests-")
    atexit.register(shutil.rmtree, os.environ["SELFATTN_TEST_BYTECODE"], ignore_errors=True)

# In CI the examples are the same ones every time. `HYPOTHESIS_PROFILE=thorough` tries 30 times as many as usual, `few`
# a fifth, for sanitizers; `examples` is for tests that need more or fewer than others.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=3000)
settings.register_profile("few", settings.get_profile("ci"), max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def examples(usual):
    """Return settings for a test that tries this number of examples, in a profile in which most try 100."""
    return settings(max_examples=max(1, usual * settings().max_examples // 100))
