"""The command line, and the tutorials that it shows.

Streams are closed, full, minimal or no terminal; ``-`` is a file.
"""

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
from cli_checks import (
    ASCII_ONLY,
    Minimal,
    assert_refused,
    closed,
    gone,
    written_by_name,
    written_without_descriptors,
)
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


def test_only_printed_tensors_are_called_so():
    sources = [[each.source for each in tutorial.comparisons] for tutorial in tutorials.compute_all()]
    assert [found.count(tutorials.PRINTED) for found in sources] == [12, 0, 9, 7, 0]
    assert [found.count(tutorials.REFERENCE) for found in sources] == [0, 18, 0, 1, 4]
    by_hand = tutorials.load("illustrated")["computed_not_printed"]["outputs_2_and_3_rounded"]
    np.testing.assert_allclose(tutorials.illustrated().comparisons[-1].computed, by_hand, rtol=1e-15)


def test_hints_work_where_the_environment_is_not_activated(monkeypatch, run):
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "selfattn"])
    assert "; .venv/bin/python -m selfattn steps 3 --open opens a page" in run("--no-timing").out
    own = Path(sys.executable).with_name("selfattn")
    monkeypatch.setattr("shutil.which", lambda _: str(own))
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "samefile", lambda path, other: str(path) == other)
    assert "; selfattn steps 3 --open opens a page" in run("--no-timing").out


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
    printed, others = (
        "28 of 28 tensors are as tutorials 1, 3 and 4 print them",
        "23 of 23 others as sa.reference",
    )
    does = f"selfattn {sa.__version__}: {printed}, and {others} computes them"
    assert lines[0] == f"✓ agrees  {does}"
    assert re.match(r"✓ agrees  [\d.]+ × as fast as five lines of NumPy", lines[1])
    assert run_command("--no-timing").stdout.splitlines() == [lines[0], lines[-1]]


def test_main_job_in_a_pipe():
    done = run_command("--no-timing", "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert ESCAPE not in done.stdout
    assert re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE) == list("12345")
    total = sum(len(tutorial.comparisons) for tutorial in tutorials.compute_all())
    assert done.stdout.count("✓") == total + 1
    assert "✗" not in done.stdout
    # A printed row next to the computed one, in three precisions.
    assert re.search(r"0\.992  0\.221  0\.261 +0\.992  0\.221  0\.261", done.stdout)
    assert re.search(r"0\.2809  0\.3595  0\.3595 +0\.2809  0\.3595  0\.3595", done.stdout)
    assert re.search(r"6\.0337e-06 +0\.98201 +0\.017986 +6\.0337e-06 +0\.98201 +0\.017986", done.stdout)


def test_ascii_output():
    done = run_command(
        "--no-timing", "--verbose", environment={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    )
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
        (["--help"], "examples:"),
        (["info", "--help"], "--json"),
        (["--version"], f"selfattn {sa.__version__}"),
    ],
)
def test_help(arguments, text, run):
    out, error = run(*arguments)
    assert text in out
    assert error == ""


TRAIN = shlex.split("train t.txt --epochs 1 --dim 8 --tokenizer whitespace")
X = np.eye(3)

# These commands print their result to standard output, or write it into a file.
PRINTING = [
    ["info"],
    ["info", "--json"],
    ["--no-timing"],
    ["steps", "1", "--out", "-"],
]
WRITING = [["steps", "1"], [*TRAIN, "--out", "m2"]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    folder = tmp_path_factory.mktemp("streams")
    with contextlib.chdir(folder):
        Path("t.txt").write_text("\n".join(f"line {i} of the sea" for i in range(40)))
        assert cli.main([*TRAIN, "--out", "m", "--quiet"]) == 0
        np.savez("mine.npz", query=X, key=X, value=X)
    return folder


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize("stream", [lambda: None, closed], ids=["none", "closed"])
@pytest.mark.parametrize("arguments", [*PRINTING, ["--help"]], ids=" ".join)
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
    assert out.text


def test_descriptors_that_are_closed(here):
    """The next opened file must not become standard output, or it would get the printed text."""
    text = written_without_descriptors(["steps", "1"], here / "1.html")
    assert text.startswith("<!DOCTYPE html>") and "lost" not in text.rpartition("</html>")[2]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_descriptor_is_closed(number, here, tmp_path):
    arguments = [*TRAIN, "--out", tmp_path / "m"]
    done = finish(start([*COMMAND, *arguments], preexec_fn=lambda: os.close(number)))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "m" / "config.json").exists()


@pytest.mark.parametrize("arguments", [["--bogus"], ["steps", "no/arrays.npz"]])
def test_messages_that_cannot_be_written(arguments, here):
    with open("/dev/full", "w") as full:
        done = run_command(*arguments, stderr=full)
    assert (done.returncode, done.stdout) == (2 if arguments == ["--bogus"] else 1, "")


def test_a_reader_that_goes_away(here):
    with gone("unread") as stdout:
        done = run_command("--no-timing", stdout=stdout)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [
        *((each, "") for each in PRINTING[1:4]),
        (["--help"], ""),
        (["--version"], "1"),
    ],
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


def test_text_where_the_locale_is_ascii(here):
    arguments = ["steps", "mine.npz", "--text", "die Möwe ruft", "--out", "-"]
    done = finish(start([*COMMAND, *arguments], ASCII_ONLY))
    assert done.returncode == 0, done.stderr
    assert "\\udc" not in done.stdout


# The messages of commands that refuse to start; the exit code is 1 if the system refuses, else 2.
REFUSED = {
    "must be UTF-8, not ": ["steps 1 --text \udcff"],
    "argument --out: must be the name of a folder, not ''": ["train t.txt --out ''"],
    "argument --out: must be the name of a file": ["steps 1 --out ''"],
    "argument --out: must be a file": ["steps 1 --out new/"],
    "usage:": [
        "--bogus",
        "bogus",
        "info a b",
    ],
    "; did you mean 'search'?\n": ["serch m t.txt sea"],
    "; did you mean 'train'?\n": ["Train"],
    "; did you mean '--no-timing'?\n": ["--no-timming"],
    "; did you mean '--json'?\n": ["info --jason"],
    "; did you mean '--out'?\n": ["train t.txt --oot m"],
    "; did you mean '--open'?\n": ["steps 1 --opne"],
}


@pytest.mark.parametrize(
    ("command", "message"), [(each, message) for message, commands in REFUSED.items() for each in commands]
)
def test_wrong_arguments(command, message, here, run):
    assert_refused(run, command, message)
    assert not (here / "new").exists()


def test_an_error_without_a_message_has_a_name(here, monkeypatch, run):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("selfattn.cli.pages._page", fail)
    assert run("steps", "1", code=1).err.endswith("error: MemoryError\n")


def test_a_dash_is_a_stream_everywhere(here, run):
    arrays = (here / "mine.npz").read_bytes()
    done = finish(start([*COMMAND, "steps", "-", "--out", "-"], stdin=-1, text=False), arrays)
    assert b'<body class="sa-page">' in done.stdout, done.stderr
    assert not (here / "-").exists()


@pytest.mark.parametrize("mode", ["w", "a"])
def test_the_name_of_standard_output(mode, here, tmp_path):
    written = written_by_name(["steps", "1"], mode, here, tmp_path / "log")
    assert written.count("<!DOCTYPE html>") == (2 if mode == "a" else 1)
    assert written.startswith("begun" if mode == "a" else "<!DOCTYPE")


@pytest.mark.parametrize("content", [b"words", b"", b"\x80\x04]", b"PK", b"\x93NUMPY"])
def test_files_that_hold_no_arrays(content, tmp_path, run):
    """The error mentions pickles only if there is one."""
    (tmp_path / "a.npz").write_bytes(content)
    out, error = run("steps", tmp_path / "a.npz", code=1)
    assert (out, "pickle" in error) == ("", False)
    assert error.startswith("selfattn steps: ")


@pytest.mark.parametrize(
    ("place", "message"), [("no/such/x.json", "no such folder"), ("m", "a folder has the name of the file")]
)
def test_a_place_is_checked_before_the_work(place, message, here):
    with pytest.raises(OSError, match=message):
        streams.check(place)


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


@pytest.mark.parametrize("arguments", [["xyzzy"], ["--xyzzy"], ["neve"]])
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


def test_control_characters_are_visible():
    """A terminal would obey them; a text that they turn could hide what it says."""
    hostile = "x\x1b]0;title\x07\u202egpj.\x9b31m\ry"
    seen = r"x\x1b]0;title\x07\u202egpj.\x9b31m\ry"
    done = run_command("steps", hostile, environment={"PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 2 and "\x1b" not in done.stderr and seen in done.stderr.replace("\\\\", "\\")
    for stream, terminal, expected in ((io.StringIO(), True, seen), (io.StringIO(), False, hostile)):
        stream.isatty = lambda answer=terminal: answer
        with contextlib.redirect_stdout(stream), streams.made_visible():
            print(hostile)
        assert stream.getvalue() == expected + "\n"
