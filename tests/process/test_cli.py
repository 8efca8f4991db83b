"""The command line, and the tutorials that it shows."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess

import numpy as np
import pytest
from processes import COMMAND, run_command, start

import selfattn as sa
from selfattn import cli, config, tutorials

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


def test_timing(capsys):
    assert cli.main(["--verbose"]) == 0
    first, _, last = capsys.readouterr().out.partition("One forward pass")
    assert len(re.findall(r"^  (selfattn|NumPy) +[\d.]+ ms .* GFLOP/s", last, re.MULTILINE)) == 2
    assert re.search(r"[\d.]+ (×|x) as fast", first)
    assert sa.get_isa() in last


def test_exit_code_when_a_tensor_differs(monkeypatch, capsys):
    everything = tutorials.compute_all()
    comparison = everything[2].comparisons[5]
    wrong = dataclasses.replace(comparison, computed=comparison.computed + 0.25)
    everything[2] = dataclasses.replace(everything[2], comparisons=(wrong,))
    monkeypatch.setattr(tutorials, "compute_all", lambda: everything)
    assert cli.main(["--no-timing"]) == 1
    output = capsys.readouterr().out
    assert f"tutorial 3, {wrong.name}: largest difference: 0.25" in output
    assert "differs" in output.lower()
    assert len(output.splitlines()) <= 5
    assert cli.main(["--no-timing", "--verbose"]) == 1
    assert "    largest difference: 0.25" in capsys.readouterr().out


def test_info(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for text in (sa.__version__, np.__version__, sa.get_isa(), config.cpu_model(), "threads"):
        assert text in printed
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
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
        sa.show_config("yaml")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--help"], "examples:"), (["info", "--help"], "--json"), (["bench", "--help"], "--suite"),
        (["--version"], f"selfattn {sa.__version__}"),
    ],
)  # fmt: skip
def test_help(arguments, text, capsys):
    assert cli.main(arguments) == 0
    out, error = capsys.readouterr()
    assert text in out
    assert error == ""
