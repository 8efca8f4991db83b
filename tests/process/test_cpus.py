"""A quota of a control group bounds the default number of threads: in trees of files, and in a group made here."""

import math
import os
import time
from pathlib import Path

import pytest
from processes import PYTHON, finish, run_script, start

from selfattn import _cpus

V2 = "30 20 0:26 {} /cg rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 20 0:30 {} /cg rw,relatime - cgroup cgroup rw,{}"


def tree(root, cgroup, mounts, files):
    """Make a folder with the two files of proc and those of groups, by their paths."""
    listed = {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "\n".join(["22 1 8:1 / / rw - ext4 /dev/a rw", *mounts]),
    }
    for path, text in (listed | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(root)


def v1(folder, quota, period=100000):
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        ("0::/a/b\n", [V2.format("/")], {"cg/a/b/cpu.max": "150000 100000\n"}, (1.5, "/a/b")),
        # The smallest is that of a group above, which may be the mount's own.
        (
            "0::/a/b\n",
            [V2.format("/")],
            {
                "cg/a/b/cpu.max": "300000 100000\n",
                "cg/a/cpu.max": "20000 10000\n",
                "cg/cpu.max": "max 100000\n",
            },
            (2, "/a"),
        ),
        (
            "0::/a\n",
            [V2.format("/")],
            {"cg/a/cpu.max": "max 100000", "cg/cpu.max": "250000 100000"},
            (2.5, "/"),
        ),
        ("0::/a\n", [V2.format("/")], {"cg/a/cpu.max": "max 100000\n", "cg/cpu.max": "max 100000\n"}, None),
        # A namespace of groups; a mount that shows only a part; a mount that begins above the namespace's root.
        ("0::/\n", [V2.format("/")], {"cg/cpu.max": "50000 100000\n"}, (0.5, "/")),
        (
            "0::/box/a\n",
            [V2.format("/box")],
            {"cg/a/cpu.max": "max 100000", "cg/cpu.max": "1000 1000"},
            (1, "/box"),
        ),
        (
            "0::/box\n",
            [V2.format("/box")],
            {"cg/cpu.max": "1000 1000", "cg/box/cpu.max": "1 1000"},
            (1, "/box"),
        ),
        ("0::/\n", [V2.format("/..")], {"cg/cpu.max": "1000 1000"}, (1, "/..")),
        (
            "0::/a\n",
            [V2.format("/../..")],
            {"cg/cpu.max": "1000 1000", "cg/a/cpu.max": "1 1000"},
            (1, "/../.."),
        ),
        ("0::/../b\n", [V2.format("/..")], {"cg/b/cpu.max": "1000 1000"}, (1, "/../b")),
        # Mounts that do not show the group.
        ("0::/../b\n", [V2.format("/")], {"cg/cpu.max": "1 1000", "b/cpu.max": "1 1000"}, None),
        ("0::/../../b\n", [V2.format("/..")], {"cg/cpu.max": "1 1000", "b/cpu.max": "1 1000"}, None),
        ("0::/boxes\n", [V2.format("/box")], {"cg/cpu.max": "1 1000", "cges/cpu.max": "1 1000"}, None),
        # Version 1: alone, with another controller, and without a quota; other controllers do not count.
        ("3:cpu:/a\n", [V1.format("/", "cpu")], v1("cg/a", 250000), (2.5, "/a")),
        ("3:cpu,cpuacct:/a\n", [V1.format("/a", "cpu,cpuacct")], v1("cg", 50000), (0.5, "/a")),
        (
            "3:cpu:/a:b/c\n",
            [V1.format("/", "cpu")],
            v1("cg/a:b/c", 9000, 3000) | v1("cg/a:b", -1),
            (3, "/a:b/c"),
        ),
        ("3:cpu:/a\n", [V1.format("/", "cpu")], v1("cg/a", -1) | v1("cg", -1), None),
        ("3:cpuset:/a\n", [V1.format("/", "cpuset")], v1("cg/a", 1), None),
        ("3:cpu:/a\n4:cpuset:/b\n", [V1.format("/", "cpuset")], v1("cg/a", 1), None),
        # Both versions: each may have the controller, and the smaller quota counts.
        (
            "3:cpu:/a\n0::/b\n",
            [V1.format("/", "cpu"), V2.format("/").replace("/cg ", "/cg/v2 ")],
            v1("cg/a", 300000) | {"cg/v2/b/cgroup.procs": "1\n"},
            (3, "/a"),
        ),
        (
            "3:cpu:/a\n0::/b\n",
            [V1.format("/", "cpu"), V2.format("/").replace("/cg ", "/cg/v2 ")],
            v1("cg/a", 300000) | {"cg/v2/b/cpu.max": "2000 1000\n"},
            (2, "/b"),
        ),
        # Blanks and backslashes in names, and a mount over another.
        (
            "0::/my box\\\n",
            [r"30 20 0:26 /my\040box\134 /c\040g rw - cgroup2 cgroup2 rw"],
            {"c g/cpu.max": "1000 1000"},
            (1, "/my box\\"),
        ),
        (
            "0::/a\n",
            [V2.format("/a"), V2.format("/")],
            {"cg/cpu.max": "9 1", "cg/a/cpu.max": "2 1"},
            (2, "/a"),
        ),
        ("0::/a\n", [V2.format("/"), "31 30 0:9 / /cg rw - tmpfs tmpfs rw"], {"cg/a/cpu.max": "2 1"}, None),
        # A group that was removed still has groups above it.
        ("0::/a/b (deleted)\n", [V2.format("/")], {"cg/a/cpu.max": "2 1"}, (2, "/a")),
    ],
)
def test_the_smallest_quota(tmp_path, cgroup, mounts, files, expected):
    assert _cpus.read_quota(tree(tmp_path, cgroup, mounts, files)) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0\xff\n",
        b"9" * 5000 + b" 1",
        b"1" * 4000 + b" 1",
        b"1 0",
        b"0 1",
        b"-5 1",
        b"1",
        b"1 1 1",
        b"1.5 1",
        b"nan 1",
    ],
)
def test_odd_quotas_are_none(tmp_path, text):
    assert _cpus.read_quota(tree(tmp_path, "0::/\n", [V2.format("/")], {"cg/cpu.max": text})) is None


@pytest.mark.parametrize("name", ["proc/self/cgroup", "proc/self/mountinfo", "cg/a/cpu.max"])
def test_files_that_are_missing_odd_or_endless_end_at_once(tmp_path, name):
    root = tree(tmp_path, "0::/a\n", [V2.format("/")], {"cg/a/cpu.max": "1 1"})
    assert _cpus.read_quota(root) == (1, "/a")
    path, began = tmp_path / name, time.perf_counter()
    deep = b"0::" + b"/a" * 2_000_000
    for text in (
        b"\0" * 999,
        b"::: - \n - \n0:\n:",
        b"\\777 \\0 - " * 9,
        deep,
        (V2.format("/") + "\n").encode() * 40_000,
    ):
        path.write_bytes(text)
        _cpus.read_quota(root)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert _cpus.read_quota(root) is None
    path.unlink()
    assert _cpus.read_quota(root) is None
    for make in (
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path),
    ):
        make()
        assert _cpus.read_quota(root) is None
        path.rmdir() if path.is_dir() else path.unlink()
    assert time.perf_counter() - began < 30  # a second on an idle machine


def test_without_a_tree(tmp_path):
    assert _cpus.read_quota(str(tmp_path)) is None
    assert _cpus.read_quota(str(tmp_path / "none")) is None


# Prints the number of threads with and without choices, and its reason. What reads the quota has a root of its own.
NUMBERS = """
import os, sys
import selfattn as sa
from selfattn import _core, _cpus
if sys.argv[1] != "/":
    os.sched_getaffinity = lambda _: range(8) # as a machine with eight CPUs has it
    _core.get_num_threads = lambda: 8
    _cpus.REASON = _cpus.limit_threads(_cpus.read_quota(sys.argv[1]))
numbers = [sa.get_num_threads()]
sa.set_num_threads(7)
numbers.append(sa.get_num_threads())
sa.set_num_threads(None)
numbers.append(sa.get_num_threads())
print(*numbers, _cpus.REASON, sep="; ")
"""


def numbers(root, **environment):
    ours = {name: None for name in os.environ if name.startswith(("OMP_", "GOMP_", "KMP_"))}
    return run_script(NUMBERS, root, **(ours | environment)).split("; ")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot choose CPUs")
def test_the_quota_is_the_default_and_choices_win(tmp_path):
    root = tree(tmp_path, "0::/x\n", [V2.format("/")], {"cg/x/cpu.max": "20000 100000"})
    assert numbers(root) == ["1", "7", "1", "of 8 CPUs the group /x may use 0.2"]
    assert numbers(root, OMP_NUM_THREADS="3") == ["3", "7", "3", "OMP_NUM_THREADS"]
    assert numbers(root, OMP_NUM_THREADS="3,2")[0] == "3"
    assert numbers(root, OMP_NUM_THREADS="none")[::3] == ["1", "of 8 CPUs the group /x may use 0.2"]
    (tmp_path / "cg/x/cpu.max").write_text("max 100000")
    assert numbers(root)[3] == "one for each usable CPU"


@pytest.fixture
def group():
    """Make a control group below the root of a hierarchy: return its folder, and the file and the words of a quota."""
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"):
        made = Path(folder, f"selfattn-{os.getpid()}")
        for name, quota in (("cpu.max", "{} 100000"), ("cpu.cfs_quota_us", "{}")):
            try:
                made.mkdir()
            except OSError:
                continue
            try:
                if (made / name).exists():
                    yield made, made / name, quota
                    return
            finally:
                made.rmdir()
    pytest.skip("this process may make no control group with a quota of CPU time")


def test_in_a_real_group(group):
    folder, file, quota = group
    enter = f"echo $$ > '{folder}/cgroup.procs' && exec \"$@\""
    cpus = len(os.sched_getaffinity(0))
    for share in (0.5, cpus - 0.5, cpus):
        file.write_text(quota.format(int(100_000 * share)))
        done = finish(
            start(["sh", "-c", enter, "sh", *PYTHON, "-m", "selfattn", "info"], {"OMP_NUM_THREADS": None})
        )
        line = next(line for line in done.stdout.split("\n") if line.startswith("threads"))
        reason = (
            f"of {cpus} CPUs the group /{folder.name} may use {share:g}"
            if share < cpus
            else "one for each usable CPU"
        )
        assert line.split(maxsplit=1)[1] == f"{math.ceil(share)}: {reason}"
