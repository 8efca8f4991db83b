"""How many threads a call uses; calls from many Python threads; fork; other packages with threads of their own.

A call here is large enough for two threads and small enough for a hundred calls.
"""

import hashlib
import importlib.util
import os
import re
import sysconfig
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import PYTHON, finish, run_script, start

import selfattn as sa

# Every script begins with this. `attend` has far more work than a second thread needs to be useful.
PRELUDE = """
import os, sys, threading, time
import numpy as np
import selfattn as sa

x = np.random.default_rng(0).standard_normal((2, 4, 256, 32), dtype=np.float32)
def attend(**options):
    return sa.scaled_dot_product_attention(x, x, x, **options)
def tasks():
    return len(os.listdir("/proc/self/task"))
def wait(pid):
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid
"""


def run(script, *arguments, prelude=PRELUDE, **environment):
    """Run a script with four threads, and one for NumPy, unless the environment sets others; return its output."""
    ours = {name: None for name in os.environ if name.startswith(("OMP_", "GOMP_", "KMP_"))}
    ours |= {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}
    return run_script(script, *arguments, prelude=prelude, **(ours | environment))


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs the package {module}")


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
OPENMP = sa.show_config("dicts")["build"]["team"] == "OpenMP"
needs_openmp = pytest.mark.skipif(not OPENMP, reason="this build has no OpenMP")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(autouse=True)
def _threads_set_back():
    sa.set_num_threads(None)
    yield
    sa.set_num_threads(None)


def test_set_and_get():
    default = sa.get_num_threads()
    assert default >= 1
    sa.set_num_threads(3)
    assert sa.get_num_threads() == 3
    sa.set_num_threads(np.int64(2))
    assert sa.get_num_threads() == 2
    sa.set_num_threads(None)
    assert sa.get_num_threads() == default


def test_more_threads_than_cpus_are_a_warning():
    """As an error it changes nothing."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    sa.set_num_threads(1)
    with pytest.raises(UserWarning, match=f"^{cpus + 1} threads on [0-9]+ CPUs"), warnings.catch_warnings():
        warnings.simplefilter("error")
        sa.set_num_threads(cpus + 1)
    assert sa.get_num_threads() == 1
    with pytest.warns(UserWarning, match=r"set_num_threads\(None\) sets as many as there are"):
        sa.set_num_threads(cpus + 1)
    assert sa.get_num_threads() == cpus + 1


def test_a_bad_number_changes_nothing():
    sa.set_num_threads(2)
    for error, numbers in ((ValueError, (0, -1, 1025, 2**70, -(2**70))), (TypeError, (True, 2.0, "2", [2]))):
        for number in numbers:
            with pytest.raises(error, match=re.escape(f"from 1 to 1024 or None, got {number!r}")):
                sa.set_num_threads(number)
    assert sa.get_num_threads() == 2


@needs_proc
def test_the_argument_rules_over_the_setting_and_small_calls_use_one():
    """Threads stay after a call, so the process has as many as the largest call used."""
    script = """
    y = np.ones((3, 4), np.float32)
    before = tasks()
    sa.scaled_dot_product_attention(y, y, y, num_threads=8)
    sa.set_num_threads(1)
    attend()
    print(tasks() - before)
    attend(num_threads=2)
    print(tasks() - before)
    sa.set_num_threads(None)
    attend()
    print(sa.get_num_threads(), tasks() - before)
    """
    assert run(script, OMP_NUM_THREADS="3").split("\n") == ["0", "1", "3 2"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot choose CPUs")
@needs_fork
def test_omp_num_threads_as_it_was_at_import():
    """Without a number in OMP_NUM_THREADS, the number is that of the CPUs that this process may use: one here.

    Each setting is that of a child that is forked before anything is imported that knows OpenMP.
    """
    numbers = {"3": 3, "5,2": 5, " 7": 7, "4096": 1024, str(2**63 - 1): 1024}
    numbers |= dict.fromkeys(("", "none", "0", "-2", "4x", "9" * 30), 1)
    script = """
    import os, sys, numpy
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    for setting in [*sys.argv[1:], None]:
        if os.fork() == 0:
            if setting is not None: os.environ["OMP_NUM_THREADS"] = setting
            import selfattn
            os.environ["OMP_NUM_THREADS"] = "2"
            print(selfattn.get_num_threads(), flush=True)
            os._exit(0)
        os.wait()
    """
    found = run(script, *numbers, prelude="", OMP_NUM_THREADS=None)
    assert found.split() == [str(number) for number in (*numbers.values(), 1)]


@needs_proc
def test_python_threads_that_come_and_go_leave_no_helpers():
    """POSIX helpers help any computing thread; OpenMP's threads belong to one thread and end with it."""
    script = """
    for _ in range(40):
        thread = threading.Thread(target=attend); thread.start(); thread.join()
    for _ in range(200):
        if tasks() == int(sys.argv[1]): break # a thread that has ended may still be listed
        time.sleep(0.05)
    print(tasks())
    """
    expected = "1" if OPENMP else "4"
    assert run(script, expected) == expected


@needs_proc
def test_python_threads_that_compute_at_once_have_no_more_helpers_than_cpus():
    script = """
    sa.set_num_threads(None)
    stop, python = threading.Event(), {os.getpid()}
    def compute():
        python.add(threading.get_native_id())
        while not stop.is_set(): attend()
    threads = [threading.Thread(target=compute) for _ in range(16)]
    for thread in threads: thread.start()
    def running(task):
        try:
            with open(f"/proc/self/task/{task}/stat") as stat: return stat.read().rpartition(")")[2].split()[0] == "R"
        except OSError: return False
    found = []
    for _ in range(50):
        found.append(sum(running(task) for task in os.listdir("/proc/self/task") if int(task) not in python))
        time.sleep(0.01)
    stop.set()
    for thread in threads: thread.join()
    print(sum(found) / len(found) <= len(os.sched_getaffinity(0)))
    """
    assert run(script, OMP_NUM_THREADS=None) == "True"


@needs_proc
def test_calls_of_many_sizes_have_the_same_threads():
    """OpenMP would end threads that a smaller team does not need; selfattn's threads end only after many such calls."""
    script = """
    def helpers(): return set(os.listdir("/proc/self/task"))
    small = x[:, :, :60] # two threads
    attend(num_threads=6)
    before = helpers()
    for _ in range(5):
        sa.scaled_dot_product_attention(small, small, small)
        attend(num_threads=6)
    print(len(before), helpers() == before)
    for _ in range(300): attend(num_threads=2)
    print(tasks())
    """
    assert run(script, OMP_NUM_THREADS="6").split("\n") == ["6 True", "2" if OPENMP else "6"]


@needs_proc
def test_helpers_block_signals():
    script = """
    import signal
    attend()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as status:
            mask = int(next(line for line in status if line.startswith("SigBlk")).split()[1], 16)
        print(task == str(os.getpid()), mask >> (signal.SIGINT - 1) & 1)
    """
    lines = run(script).split("\n")
    assert sorted(lines) == ["False 1"] * 3 + ["True 0"]


@needs_openmp
@needs("threadpoolctl")
def test_threadpoolctl_limits_all_calls():
    script = """
    from threadpoolctl import threadpool_info, threadpool_limits
    names = [pool["filepath"] for pool in threadpool_info() if pool["user_api"] == "openmp"]
    assert any(os.path.samefile(name, sa.show_config("dicts")["build"]["team_library"]) for name in names), names
    numbers = [sa.get_num_threads()]
    with threadpool_limits(1, user_api="openmp"):
        numbers.append(sa.get_num_threads())
        sa.set_num_threads(3)
        numbers.append(sa.get_num_threads())
        attend(); attend(num_threads=4)
        numbers.append(tasks())
    numbers.append(sa.get_num_threads())
    with threadpool_limits(2, user_api="openmp"):
        numbers.append(sa.get_num_threads())
        attend(num_threads=4)
        numbers.append(tasks())
    attend()
    print(*numbers, tasks())
    """
    assert run(script) == "4 1 1 1 3 2 2 3"


@needs_openmp
def test_openmps_other_variables_count():
    numbers = "print(sa.get_num_threads()); attend(num_threads=8); print(tasks())"
    assert run(numbers).split("\n") == ["4", "8"]
    assert run(numbers, OMP_THREAD_LIMIT="2").split("\n") == ["2", "2"]
    assert run(numbers, OMP_MAX_ACTIVE_LEVELS="0").split("\n") == ["4", "1"]
    most = sa.config.usable_cpus()
    if most < 8:  # OpenMP uses no more threads than idle CPUs
        assert int(run(numbers, OMP_DYNAMIC="true").split("\n")[1]) <= most
    # Measures how long helpers wait actively for work after a call, in seconds of CPU time.
    script = """
    attend(num_threads=2)
    before = time.process_time()
    for _ in range(20):
        attend(num_threads=2)
        time.sleep(0.02)
    print(time.process_time() - before)
    """
    active, passive = (float(run(script, OMP_WAIT_POLICY=policy)) for policy in ("active", "passive"))
    assert passive < 0.5 * active


@needs_proc
def test_a_helper_without_work_sleeps():
    script = """
    def naps():
        found = 0
        for task in os.listdir("/proc/self/task"):
            if task != str(os.getpid()):
                with open(f"/proc/self/task/{task}/status") as status:
                    found += int(next(line for line in status if line.startswith("voluntary_ctxt")).split()[1])
        return found
    for _ in range(5): attend()
    before = naps()
    time.sleep(0.4)
    print(naps() - before < 40)
    """
    assert run(script) == "True"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot choose CPUs")
def test_on_one_cpu_calls_with_eight_threads_have_the_same_bits():
    script = """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    rows, weight = np.random.default_rng(0).standard_normal((4000, 200), dtype=np.float32), np.ones(200, np.float32)
    layer = sa.nn.Linear(200, 200, rng=0)
    calls = [attend, lambda **_: sa.layer_norm(rows, 200, weight), lambda **_: layer(rows)]
    sa.set_num_threads(1)
    expected = [call() for call in calls]
    sa.set_num_threads(8)
    for turn in range(30):
        for call, right in zip(calls, expected):
            assert np.array_equal(call(), right)
    assert np.array_equal(attend(num_threads=1024), expected[0])
    """
    run(script)


def test_other_python_threads_run_during_a_long_call():
    """Only short calls keep the GIL: a thread that counts must continue during this long call."""
    x = np.random.default_rng(2).standard_normal((16, 6000, 64), dtype=np.float32)
    count = 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sa.scaled_dot_product_attention, x, x, x, num_threads=1)
        while not future.done():
            time.sleep(0.0005)
            count += 1
    # If only checks for signals released the GIL, others would run twenty times a second; the call takes less than a
    # second.
    assert count > 20


@needs_fork
def test_children_and_theirs_compute_with_threads_of_their_own():
    """Children compute even while their parents do. A child has none of its parent's threads."""
    script = """
    counted = os.path.isdir("/proc/self/task")
    expected = attend()
    def descend(generations):
        assert not counted or tasks() == 1
        assert (attend() == expected).all()
        assert not counted or tasks() == 4
        for number in (1, 3):
            assert (attend(num_threads=number) == expected).all()
        if generations:
            pids = [child(lambda: descend(generations - 1)) for _ in range(2)]
            assert (attend(num_threads=3) == expected).all()
            for pid in pids:
                wait(pid)
    for _ in range(3):
        pid = child(lambda: descend(2))
        assert (attend() == expected).all()
        wait(pid)
    """
    run(script)


@needs_fork
def test_fork_while_other_threads_compute():
    """The fork may come at any moment of a parallel region; it waits only for the calls that compute."""
    script = """
    expected = attend()
    stop = threading.Event()
    calls = [0]
    def compute():
        while not stop.is_set():
            assert (attend(num_threads=2) == expected).all()
            calls[0] += 1
    def work():
        assert (attend() == expected).all()
    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads: thread.start()
    longest = 0
    for turn in range(25):
        start = time.perf_counter()
        pid = child(work)
        longest = max(longest, time.perf_counter() - start)
        wait(pid)
        time.sleep(0.0003 * (turn % 5))
    before = calls[0]
    while calls[0] == before: time.sleep(0.01)  # they continue
    stop.set()
    for thread in threads: thread.join()
    print(longest)
    """
    assert float(run(script)) < 10  # on an idle machine some milliseconds


@needs_fork
def test_weights_are_packed_once_and_a_fork_waits_for_it():
    script = """
    from selfattn.engine.weights import Quants
    made, begun = [], threading.Event()
    class Slow(Quants):
        def _pack(self):
            begun.set()
            time.sleep(0.3)
            made.append(super()._pack())
            return made[-1]
    def new(kind=Quants):
        return kind(np.zeros((16, 34), np.uint8), "Q8_0", (16, 32))
    slow = new(Slow)
    threads = [threading.Thread(target=lambda: slow.packed) for _ in range(4)]
    for thread in threads: thread.start()
    begun.wait()
    pid = child(lambda: (signal.alarm(5), new().packed, slow.packed))
    for thread in threads: thread.join()
    wait(pid)
    assert made == [slow.packed]
    """
    run(script, prelude=PRELUDE + "import signal\n")


@needs_fork
@pytest.mark.parametrize("turns", ["forking, computing", "computing, forking"])
def test_fork_while_a_long_call_looks_for_signals(turns):
    """Checking for signals needs the GIL, which the forking thread holds while that thread waits for the call."""
    script = f"""
    y = np.random.default_rng(0).standard_normal((8, 2000, 64), dtype=np.float32)
    out, pullback = sa.scaled_dot_product_attention_vjp(y, y, y, num_threads=2)
    expected = pullback(out).query
    begun, done, amid = threading.Event(), threading.Event(), [0]
    def computing():
        for _ in range(2):
            begun.set()
            assert (pullback(out).query == expected).all()
        done.set()
    def forking():
        begun.wait()
        while not done.is_set():
            time.sleep(0.02)
            pid = child(lambda: attend(num_threads=2))
            amid[0] += not done.is_set()
            wait(pid)
    first, second = {turns}
    thread = threading.Thread(target=second)
    thread.start()
    first()
    thread.join()
    assert done.is_set() and amid[0] > 0
    """
    run(script)


IN_TURNS = """
expected = None
def both(turns=6):
    for _ in range(turns):
        assert (attend() == expected).all()
        other()
def in_turn_and_at_once():
    global expected
    expected = attend(num_threads=1)
    both()
    threads = [threading.Thread(target=both) for _ in range(3)]
    for thread in threads: thread.start()
    both()
    for thread in threads: thread.join()
    both()
"""

torch_imported = pytest.mark.parametrize(
    "prelude", ["import torch\n" + PRELUDE, PRELUDE + "attend()\nimport torch\n"], ids=["first", "last"]
)
TORCH = """
def other():
    y = torch.from_numpy(x)
    got = torch.nn.functional.scaled_dot_product_attention(y, y, y)
    assert abs(got.numpy() - expected).max() < 1e-5
    (y @ y.transpose(-1, -2)).sum().item()
"""


@needs("torch")
@torch_imported
def test_calls_in_turns_with_torch(prelude):
    """PyTorch's pool may hang in a child; the parent, and a child that only calls selfattn, must not."""
    script = """
    in_turn_and_at_once()
    for _ in range(3):
        other()
        wait(child(lambda: attend()))
        assert (attend() == expected).all()
    torch.set_num_threads(2)
    sa.set_num_threads(3)
    attend(); attend(num_threads=4)
    sa.set_num_threads(None)
    print(torch.get_num_threads())
    """
    assert run(script, prelude=prelude + TORCH + IN_TURNS) == "2"


@needs("torch")
@needs_openmp
@torch_imported
def test_torch_has_the_same_pool(prelude):
    script = """
    expected = attend()
    other()
    before = tasks()
    for _ in range(5):
        assert (attend() == expected).all()
        other()
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "libgomp" in line}
    print(tasks() - before, len(libraries))
    torch.set_num_threads(1)
    print(sa.get_num_threads())
    """
    lines = run(script, prelude=prelude + TORCH).split("\n")
    assert lines == ["0 1", "1"]


@needs("torch")
@needs_fork
def test_fork_while_torch_computes():
    script = """
    expected = attend()
    stop = threading.Event()
    def compute():
        while not stop.is_set(): other()
    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads: thread.start()
    for _ in range(20):
        other()
        wait(child(lambda: (attend(), attend(num_threads=3))))
        assert (attend() == expected).all()
    stop.set()
    for thread in threads: thread.join()
    """
    run(script, prelude="import torch\n" + PRELUDE + TORCH)


def test_all_operations_in_many_threads():
    """The script that tools/check_threads.sh runs under ThreadSanitizer, once."""
    script = Path(__file__).parents[1] / "support" / "races.py"
    done = finish(start([*PYTHON, script], {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "0 failures" in done.stdout


def test_the_module_says_that_it_needs_no_gil():
    source = Path(__file__).parents[2] / "csrc" / "python" / "module.c"
    if not source.exists():
        pytest.skip("the sources are not here")
    assert "{Py_mod_gil, Py_MOD_GIL_NOT_USED}" in source.read_text(encoding="utf-8")


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"),
    reason="only a free-threaded Python can leave its GIL off; this one always has it",
)
def test_importing_leaves_the_gil_off():
    """The test imports all modules: one extension that does not declare support would turn the GIL on, with a
    warning."""
    script = """
    import sys, selfattn, selfattn.nn, selfattn.optim, selfattn.training, selfattn.views, selfattn.text, selfattn.files
    print(sys._is_gil_enabled())
    """
    assert run_script(script) == "False"


# MiB; a thread's stack usually takes 8, and a thread's arena in the C library 64.
@pytest.mark.parametrize("room", [4, 30, 56, 100])
def test_where_no_more_threads_can_be_started(room):
    """A call uses fewer threads, with the same bits; later calls use all threads again."""
    script = """
    import resource
    query = np.random.default_rng(0).standard_normal((4, 8, 300, 64), dtype=np.float32)
    layer = sa.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, rng=0)
    rows = query.reshape(-1, 64)
    calls = [
        lambda: sa.scaled_dot_product_attention(query, query, query),
        lambda: sa.scaled_dot_product_attention_vjp(query, query, query)[1](query)[0],
        lambda: sa.layer_norm(query, 64),
        lambda: sa.layer_norm_vjp(query, 64)[1](query)[0],
        lambda: layer(query[:, 0]),
        lambda: layer.linear1(rows),
    ]
    sa.set_num_threads(1)
    expected = [call() for call in calls]
    sa.set_num_threads(4)
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + int(sys.argv[1]) * 2**20, limit[1]))
    sa.set_num_threads(64)
    for _ in range(2):
        for n, call in enumerate(calls):
            try:
                assert (call() == expected[n]).all(), n
            except MemoryError:
                pass
    few = tasks()
    resource.setrlimit(resource.RLIMIT_AS, limit)
    assert (calls[0]() == expected[0]).all()
    print(few < 64 <= tasks())
    """
    assert run(script, str(room)) == "True"


def test_where_other_libraries_have_taken_all_keys():
    """Without a key a thread cannot store its team, so each call uses one thread, with the same bits."""
    script = """
    import ctypes, hashlib, ssl, numpy as np, numpy.random, sys
    if sys.argv[1]: ctypes.CDLL(sys.argv[1]) # OpenMP's own library needs a key as it is loaded
    while ctypes.CDLL(None).pthread_key_create(ctypes.byref(ctypes.c_uint()), None) == 0: pass
    import selfattn as sa
    x = np.random.default_rng(0).standard_normal((2, 4, 256, 32), dtype=np.float32)
    print(hashlib.sha256(sa.scaled_dot_product_attention(x, x, x, num_threads=4)).hexdigest())
    """
    x = np.random.default_rng(0).standard_normal((2, 4, 256, 32), dtype=np.float32)
    expected = sa.scaled_dot_product_attention(x, x, x)
    library = sa.show_config("dicts")["build"]["team_library"] or ""
    assert run_script(script, library) == hashlib.sha256(expected).hexdigest()


def test_a_program_ends_while_its_threads_compute():
    """At exit Python ends a thread that asks for the GIL, so the thread's team must not be on its stack."""
    script = """
    x = np.ones((16, 2048, 64), np.float32)
    def compute():
        while True: attend(num_threads=4)
    for _ in range(2): threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.2)
    print("end")
    """
    assert run(script) == "end"
