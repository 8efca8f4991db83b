"""The command line, and the tutorials that it shows; streams that are closed, full, minimal or no terminal, and ``-`` for a file."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from processes import COMMAND, PYTHON, finish, run_command, start

import selfattn as sa
from selfattn import cli, config, tutorials
from selfattn.cli import streams

ESCAPE = "\x1b["


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("compute", tutorials.TUTORIALS, ids=lambda compute: compute.__name__)
def test_tutorial_agrees(compute, dtype):
    tutorial = compute(dtype)
    assert tutorial.comparisons
    assert [comparison.name for comparison in tutorial.comparisons if not comparison.agrees] == []


def test_no_printed_tensor_is_forgotten():
    first, _, basics, illustrated, _ = tutorials.compute_all()
    data = tutorials.load("first_principles").items()
    steps = [name for name, step in data if isinstance(step, dict) and "printed" in step]
    names = {f"{step}, {sentence}" for step in steps for sentence in ("river", "finance")}
    assert names == {comparison.name for comparison in first.comparisons}
    assert set(tutorials.load("basics_notebook")["printed"]) <= {c.name for c in basics.comparisons}
    given = {"attn_scores_softmax_rounded"}  # made by hand, so it is an input
    expected = set(tutorials.load("illustrated")["printed"]) - given
    assert expected <= {c.name.partition(" [")[0] for c in illustrated.comparisons}


@pytest.mark.parametrize("change", [1e-3, np.nan, np.inf])
def test_a_wrong_digit_is_seen(change):
    for tutorial in tutorials.compute_all():
        for comparison in tutorial.comparisons:
            computed = comparison.computed.astype(np.float64)
            computed.flat[-1] += change
            wrong = dataclasses.replace(comparison, computed=computed)
            assert not wrong.agrees, comparison.name


def test_significant_digits():
    printed = [6.0337e-06, 0.98201, 0.0]
    close = tutorials._to_digits("", printed, np.array([6.03374e-06, 0.982014, 0.0]), 5)
    assert close.agrees
    for wrong in ([6.0338e-06, 0.98201, 0.0], [6.0337e-06, 0.98202, 0.0], [6.0337e-06, 0.98201, 1e-9]):
        assert not tutorials._to_digits("", printed, np.array(wrong), 5).agrees


def test_by_default_only_the_verdict_is_printed():
    done = run_command()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 5
    total = sum(len(tutorial.comparisons) for tutorial in tutorials.compute_all())
    tensors = f"{total} of {total} tensors as 5 tutorials print them"
    assert lines[0] == f"✓ agrees  selfattn {sa.__version__} computes {tensors}"
    assert re.match(r"✓ agrees  [\d.]+ × as fast as five lines of NumPy", lines[1])
    assert run_command("--no-timing").stdout.splitlines() == [lines[0], lines[-1]]


def test_main_job_in_a_pipe():
    done = run_command("--no-timing", "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert ESCAPE not in done.stdout
    assert re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE) == list("12345")
    total = sum(len(tutorial.comparisons) for tutorial in tutorials.compute_all())
    assert f"{total} of {total} tensors" in done.stdout.splitlines()[0]
    assert done.stdout.count("✓") == total + 1
    assert "✗" not in done.stdout
    # A printed row next to the computed one, in three precisions.
    assert re.search(r"0\.992  0\.221  0\.261 +0\.992  0\.221  0\.261", done.stdout)
    assert re.search(r"0\.2809  0\.3595  0\.3595 +0\.2809  0\.3595  0\.3595", done.stdout)
    assert re.search(r"6\.0337e-06 +0\.98201 +0\.017986 +6\.0337e-06 +0\.98201 +0\.017986", done.stdout)


def test_ascii_output():
    done = run_command("--verbose", environment={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "agrees" in done.stdout


@pytest.mark.parametrize(("no_color", "colored"), [(None, True), ("1", False)])
def test_colour_on_a_terminal(no_color, colored):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {"NO_COLOR": no_color, "TERM": "xterm"}
    process = start([*COMMAND, "--no-timing"], environment, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # Linux raises it if the other side is closed
        while part := os.read(ours, 65536):
            output += part
    os.close(ours)
    assert process.wait(60) == 0
    assert (ESCAPE.encode() in output) == colored


def test_timing(run):
    first, _, last = run("--verbose").out.partition("One forward pass")
    assert len(re.findall(r"^  (selfattn|NumPy) +[\d.]+ ms .* GFLOP/s", last, re.MULTILINE)) == 2
    assert re.search(r"[\d.]+ (×|x) as fast", first)
    assert sa.get_isa() in last


def test_exit_code_when_a_tensor_differs(monkeypatch, run):
    everything = tutorials.compute_all()
    comparison = everything[2].comparisons[5]
    wrong = dataclasses.replace(comparison, computed=comparison.computed + 0.25)
    everything[2] = dataclasses.replace(everything[2], comparisons=(wrong,))
    monkeypatch.setattr(tutorials, "compute_all", lambda: everything)
    output = run("--no-timing", code=1).out
    assert f"tutorial 3, {wrong.name}: largest difference: 0.25" in output
    assert "differs" in output.lower()
    assert len(output.splitlines()) <= 5
    assert "    largest difference: 0.25" in run("--no-timing", "--verbose", code=1).out


def test_info(run):
    printed = run("info").out
    for text in (sa.__version__, np.__version__, sa.get_isa(), config.cpu_model(), "threads"):
        assert text in printed
    facts = json.loads(run("info", "--json").out)
    assert facts["selfattn"] == sa.__version__
    assert facts["isa"] in facts["available_isas"]
    assert facts["threads"] >= 1
    assert facts["build"]["compiler"] and facts["build"]["team"] in ("OpenMP", "POSIX threads")


def test_show_config(capsys):
    facts = sa.show_config("dicts")
    assert json.loads(json.dumps(facts)) == facts
    assert sa.show_config() is None
    assert capsys.readouterr().out == config.format_config(facts) + "\n"
    with pytest.raises(ValueError, match="mode"):
        sa.show_config("yaml")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--help"], "examples:"), (["info", "--help"], "--json"), (["bench", "--help"], "--suite"),
        (["--version"], f"selfattn {sa.__version__}"),
    ],
)  # fmt: skip
def test_help(arguments, text, run):
    out, error = run(*arguments)
    assert text in out
    assert error == ""


TRAIN = shlex.split("train t.txt --epochs 1 --dim 8 --tokenizer whitespace")
TINY = shlex.split(
    "bench --suite forward --lengths 8 --dims 4 --peers none --rounds 1 --seconds 0.001 --threads 1"
)
X = np.eye(3)

# These commands print their result to standard output, or write it into a file.
PRINTING = [
    ["info"], ["info", "--json"], ["--no-timing"], ["steps", "1", "--out", "-"], ["embed", "m", "sea"],
    ["embed", "m", "sea", "--out", "-"], ["search", "m", "t.txt", "sea"], ["bench", "--load", "r.json"],
]  # fmt: skip
WRITING = [["steps", "1"], ["embed", "m", "sea", "--out", "v.npy"], [*TRAIN, "--out", "m2"]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    folder = tmp_path_factory.mktemp("streams")
    with contextlib.chdir(folder):
        Path("t.txt").write_text("\n".join(f"line {i} of the sea" for i in range(40)))
        assert cli.main([*TRAIN, "--out", "m", "--quiet"]) == 0
        np.savez("mine.npz", query=X, key=X, value=X)
        assert cli.main([*TINY, "--json", "r.json"]) == 0
    return folder


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


class Minimal:
    """A stream that has what `print` needs and no more."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [lambda: None, closed], ids=["none", "closed"])
@pytest.mark.parametrize("arguments", [*PRINTING, ["--help"], TINY, ["bench"]], ids=" ".join)
def test_a_result_that_cannot_be_written_is_an_error(arguments, stream, here, monkeypatch, run):
    monkeypatch.setattr(sys, "stdout", stream())
    assert "standard output is closed, and the result would be lost" in run(*arguments, code=1).err


@pytest.mark.parametrize("arguments", WRITING, ids=" ".join)
def test_a_file_is_written_without_standard_output(arguments, here, monkeypatch, run):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdin", None)
    run(*arguments)


@pytest.mark.parametrize("arguments", PRINTING + WRITING, ids=" ".join)
def test_streams_may_be_minimal(arguments, here, monkeypatch, tmp_path, run):
    out = Minimal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", Minimal())
    monkeypatch.setattr(sys, "stdin", Minimal())
    arguments = [str(tmp_path / "m") if each == "m2" else each for each in arguments]
    run(*arguments)
    assert out.text or "v.npy" in arguments


def test_descriptors_that_are_closed(here):
    """The next opened file must not become standard output, or it would get the printed text."""
    script = """
import os, sys
from selfattn import cli
code = cli.main(["embed", "m", "sea", "--out", "v.json"])
os.write(1, b"lost"), os.write(2, b"lost")
sys.exit(code)
"""
    done = finish(start([sys.executable, "-c", script], preexec_fn=lambda: [os.close(n) for n in (0, 1, 2)]))
    assert done.returncode == 0
    assert json.loads((here / "v.json").read_bytes())["sentence"] == "sea"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_descriptor_is_closed(number, here, tmp_path):
    arguments = [*TRAIN, "--out", tmp_path / "m"]
    done = finish(start([*COMMAND, *arguments], preexec_fn=lambda: os.close(number)))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "m" / "config.json").exists()


@pytest.mark.parametrize("arguments", [["--bogus"], ["embed", "no/model", "sea"]])
def test_messages_that_cannot_be_written(arguments, here):
    with open("/dev/full", "w") as full:
        done = run_command(*arguments, stderr=full)
    assert (done.returncode, done.stdout) == (2 if arguments == ["--bogus"] else 1, "")


@contextlib.contextmanager
def gone(how):
    """A file on a full disk, or a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread, open("/dev/full", "w") as full:
        yield full if how == "full" else unread


@pytest.mark.parametrize("how", ["full", "unread"])
def test_a_remark_that_cannot_be_written_is_no_failure(how, here):
    """If text remained in the buffer of standard error, Python would exit with code 120."""
    with gone(how) as stderr:
        # The command reports that empty lines have no embedding.
        done = run_command("embed", "m", given="the sea\n\n\na line\n", stderr=stderr)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4)


@pytest.mark.parametrize(
    "arguments", [["--no-timing"], ["embed", "m", "--file", "t.txt"], ["search", "m", "t.txt", "sea"]]
)
def test_a_reader_that_goes_away(arguments, here):
    with gone("unread") as stdout:
        done = run_command(*arguments, stdout=stdout)
    assert (done.returncode, done.stderr) == (141, "")


HELP = [["--version"], ["--help"], ["bench", "--help"]]


@pytest.mark.parametrize(
    ("arguments", "buffered"), [(each, "") for each in PRINTING[:4] + HELP] + [(each, "1") for each in HELP]
)
def test_what_a_full_disk_cannot_hold_is_an_error(arguments, buffered, here):
    with gone("full") as stdout:
        done = run_command(*arguments, environment={"PYTHONUNBUFFERED": buffered}, stdout=stdout)
    assert done.returncode == 1
    assert re.fullmatch(r"selfattn( \w+)?: error: .*No space left on device.*\n", done.stderr)


@pytest.mark.parametrize("way", ["standard output", "a pipe with a name"])
def test_a_reader_that_stops_amid_a_page(way, here, tmp_path):
    """A write without a buffer may write only a part of the text."""
    os.mkfifo(tmp_path / "pipe")
    out = "-" if way == "standard output" else tmp_path / "pipe"
    process = start([*COMMAND, "steps", "1", "--out", out], {"PYTHONUNBUFFERED": "1"}, text=False)
    with process.stdout if out == "-" else open(out, "rb") as pipe:
        assert pipe.read(9) == b"<!DOCTYPE"
    assert process.wait(60) == (141 if out == "-" else 1)
    process.stderr.close()
    if out != "-":
        process.stdout.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["embed", "m", "die Möwe"], ["search", "m", "t.txt", "die Möwe", "-k", "1"], ["explore", "m", "die Möwe", "--out", "-"],
        ["steps", "mine.npz", "--text", "die Möwe ruft", "--out", "-"],
    ],
)  # fmt: skip
def test_text_where_the_locale_is_ascii(arguments, here):
    ascii_only = {
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None
    }  # fmt: skip
    done = finish(start([*COMMAND, *arguments], ascii_only))
    assert done.returncode == 0, done.stderr
    assert "\\udc" not in done.stdout


# The messages of commands that refuse to start; the exit code is 1 if the system refuses, else 2.
REFUSED = {
    "must be UTF-8, not ": [
        "explore m sea --compare \udcff", "steps 1 --text \udcff", "generate m \udcff", "embed m \ud800",
    ],
    "argument --out: must be the name of a folder, not ''": ["train t.txt --out ''", "train gpt t.txt --out ''"],
    "argument --out: must be the name of a file": [
        "embed m sea --out ''", "steps 1 --out ''", "explore m sea --out ''",
    ],
    "argument --out: must be a file": ["embed m sea --out new/", "steps 1 --out new/", "explore m sea --out new/"],
    "selfattn bench: error: [Errno": ["bench --load missing.json", "bench --load .", "bench --load t.txt/r.json"],
    "usage:": [
        "--bogus", "bogus", "info a b", "bench --suite bogus", "bench --suite ''", "bench --rounds 3,5",
        "bench --rounds 0", "bench --seconds nan", "bench --seconds -1", "bench --seconds 1e400", "bench --lengths 0x10",
        "bench --load '' --json x",
    ],
    "; did you mean 'search'?\n": ["serch m t.txt sea"],
    "; did you mean 'train'?\n": ["Train"],
    "; did you mean '--no-timing'?\n": ["--no-timming"],
    "; did you mean '--json'?\n": ["info --jason"],
    "; did you mean '--split'?\n": ["search m t.txt sea --splt=lines"],
    "; did you mean 'lines'?\n": ["search m t.txt sea --split line"],
    "; did you mean '--out'?\n": ["train t.txt --oot m"],
    "; did you mean '--open'?\n": ["steps 1 --opne"],
    "; did you mean '--quick'?\n": ["bench --quik"],
    "; did you mean '--seconds'?\n": ["bench --secnods 1"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "message"), [(each, message) for message, commands in REFUSED.items() for each in commands]
)
def test_wrong_arguments(command, message, here, run):
    out, error = run(*shlex.split(command), code=1 if "[Errno" in message else 2)
    assert out == ""
    assert message in error and (not message.endswith("\n") or error.endswith(message))
    assert "invalid" not in error.replace("invalid choice", "")
    assert not (here / "new").exists()


def test_an_error_without_a_message_has_a_name(here, monkeypatch, run):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("selfattn.cli.models._load", fail)
    monkeypatch.setattr("selfattn.cli.pages._page", fail)
    monkeypatch.setattr("selfattn.benchmarks.app.measure", fail)
    for command in (["embed", "m", "sea"], ["steps", "1"], ["bench"]):
        assert run(*command, code=1).err.endswith("error: MemoryError\n")


def test_a_worker_that_dies_is_an_error(monkeypatch, run):
    def die(*_):
        raise ChildProcessError("the selfattn worker ended on its own")

    monkeypatch.setattr("selfattn.benchmarks.app.measure", die)
    assert run("bench", code=1) == ("", "selfattn bench: error: the selfattn worker ended on its own\n")


def test_standard_input_that_is_no_file(here):
    """A socket cannot be opened as /dev/stdin, and a file would be read from its beginning."""
    import socket

    ours, theirs = socket.socketpair()
    ours.sendall(b"the sea\n")
    ours.close()
    done = finish(start([*COMMAND, "embed", "m"], stdin=theirs))
    theirs.close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sentence"] == "the sea"
    with (here / "t.txt").open() as text:
        text.readline()
        os.lseek(text.fileno(), len("line 0 of the sea\n"), os.SEEK_SET)
        done = finish(start([*COMMAND, "search", "m", "-", "line 1 of the sea", "-k", "1"], stdin=text))
    assert done.stdout.split("\t")[1:] == ["1", "line 1 of the sea\n"], done.stderr


def test_a_dash_is_a_stream_everywhere(here, run):
    arrays = (here / "mine.npz").read_bytes()
    done = finish(start([*COMMAND, "steps", "-", "--out", "-"], stdin=-1, text=False), arrays)
    assert b'<body class="sa-page">' in done.stdout, done.stderr
    done = run_command("bench", "--load", "-", given=(here / "r.json").read_text(), cwd=here)
    assert "8 x 4" in done.stdout, done.stderr
    out, table = run(*TINY, "--json", "-")
    assert json.loads(out)["rows"][0]["label"] in table
    assert not (here / "-").exists()


def test_a_pipe_is_written_into(here, capfd):
    """The shell's >(...) makes a pipe; a rename would replace it by a file."""
    reading, writing = os.pipe()
    assert cli.main(["embed", "m", "sea", "--out", f"/dev/fd/{writing}"]) == 0
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert json.load(pipe)["sentence"] == "sea"


@pytest.mark.parametrize("mode", ["w", "a"])
@pytest.mark.parametrize("arguments", [["embed", "m", "sea"], ["steps", "1"]])
def test_the_name_of_standard_output(arguments, mode, here, tmp_path):
    """The result goes into the file that the shell has opened; a rename by root would replace the name itself."""
    before = os.readlink("/dev/stdout")
    path = tmp_path / "log"
    path.write_text("begun\n")
    for name in ("/dev/stdout", "/dev/fd/1"):
        with path.open(mode) as out:
            done = finish(start([*COMMAND, *arguments, "--out", name], stdout=out, cwd=here))
        assert done.returncode == 0, done.stderr
    assert os.readlink("/dev/stdout") == before
    written = path.read_text()
    mark = '"sentence"' if arguments[0] == "embed" else "<!DOCTYPE html>"
    assert written.count(mark) == (2 if mode == "a" else 1)
    assert written.startswith("begun" if mode == "a" else ("{", "<!DOCTYPE"))
    assert "/dev/" not in written.splitlines()[-1]


@pytest.mark.parametrize("command", ["embed", "explore"])
@pytest.mark.parametrize("name", ["m/model.safetensors", "m/config.json", "link/vocabulary.json"])
def test_the_model_is_not_replaced(command, name, here, tmp_path, run):
    (tmp_path / "m").symlink_to(here / "m")
    place = tmp_path / name.replace("link", "m")
    before = place.read_bytes()
    assert "would replace a part of the model" in run(command, "m", "sea", "--out", place, code=1).err
    assert place.read_bytes() == before


def test_other_files_in_a_models_folder_are_written(here, run):
    for _ in range(2):
        run("embed", "m", "sea", "--out", "m/vectors.json")
    (here / "m" / "vectors.json").unlink()


NO_RESULTS = [b"words", b"{}", b"[]", b"3", b'{"rows": [1]}', b"\xff", b"[" * 100_000]
NO_ARRAYS = [b"words", b"", b"\x80\x04]", b"PK", b"\x93NUMPY"]


@pytest.mark.parametrize(
    ("command", "content"), [("bench --load", x) for x in NO_RESULTS] + [("steps", x) for x in NO_ARRAYS]
)
def test_files_that_hold_no_results_or_arrays(command, content, tmp_path, run):
    """The error mentions pickles only if there is one."""
    (tmp_path / "a.npz").write_bytes(content)
    out, error = run(*command.split(), tmp_path / "a.npz", code=1)
    assert (out, "pickle" in error) == ("", False)
    assert error.startswith(f"selfattn {command.split()[0]}: ")
    assert ("holds no results of this benchmark" in error) == (command != "steps")


@pytest.mark.parametrize("arguments", [[*TINY, "--json"], ["embed", "m", "sea", "--out"]])
@pytest.mark.parametrize("place", ["no/such/x.json", "m"])
def test_a_place_is_checked_before_the_work(arguments, place, here, monkeypatch, run):
    def work(*_, **__):
        raise AssertionError("it began to work")

    monkeypatch.setattr("selfattn.benchmarks.app.Turns", work)
    monkeypatch.setattr("selfattn.cli.models._load", work)
    out, error = run(*arguments, place, code=1)
    assert out == ""
    assert ("no such folder" if "/" in place else "a folder has the name of the file") in error


def test_the_input_is_not_replaced(here, run):
    before = (here / "t.txt").read_bytes()
    assert (
        "would replace the sentences" in run("embed", "m", "--file", "t.txt", "--out", "./t.txt", code=1).err
    )
    assert (here / "t.txt").read_bytes() == before


def test_a_page_replaces_pages_only(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    long = "é" * 125 + "x"  # 251 bytes
    for name in ("mine", "MINE", long):
        np.savez(tmp_path / f"{name}.{'NPZ' if name == 'MINE' else 'npz'}", query=X, key=X, value=X)
    Path("MINE.NPZ.npz").rename("MINE.NPZ")
    Path("mine.html").write_text("<p>a letter</p>")
    assert "mine.html exists and is not a page of selfattn's" in run("steps", "mine.npz", code=1).err
    assert Path("mine.html").read_text() == "<p>a letter</p>"
    run("steps", "mine.npz", "--out", "mine.html")
    run("steps", "mine.npz")
    run("steps", "MINE.NPZ")
    run("steps", f"{long}.npz")
    assert Path(f"{long[:-1]}.html").is_file()


@pytest.mark.parametrize("arguments", [["xyzzy"], ["--xyzzy"], ["neve"], ["embed", "m", "--", "--flie"]])
def test_no_suggestion_where_nothing_is_near(arguments, capsys, here):
    cli.main(arguments)
    assert "did you mean" not in capsys.readouterr().err


def test_a_stream_that_knows_no_terminals_is_none():
    assert not any(streams.is_terminal(each) for each in (None, Minimal(), closed(), io.StringIO()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_file(number, tmp_path):
    """Such a signal comes from a time limit, or from closing the terminal."""
    script = """
        import pathlib
        import numpy as np
        from selfattn import _disk
        from selfattn.cli import app
        def parts():
            print("writing", flush=True)
            while True:
                yield np.ones((1, 3))
        app._run = lambda arguments: _disk.write_rows(pathlib.Path(arguments[0]), parts(), 3, np.float32)
        raise SystemExit(app.main())
    """
    process = start([*PYTHON, "-c", textwrap.dedent(script), tmp_path / "rows.npy"])
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == 128 + number, done.stderr
    assert list(tmp_path.iterdir()) == []
