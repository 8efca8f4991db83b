"""Long sequences: the benchmark of them, its figure, and their memory at the full length, with a window."""

import importlib
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import long, memory

MIB = 2**20


@pytest.mark.skipif(not memory.AVAILABLE, reason="VmHWM is Linux's")
def test_memory_of_131072_tokens_forward_and_backward():
    """The window keeps the arithmetic small; what is allocated is the same without it."""
    result = long.in_a_process(long.measure, "window", 131072, 2, 0.0)
    output = 131072 * long.HEADS * long.WIDTH * 4
    assert output < result["memory"] < 256 * MIB  # the output, which the pullback holds, is half of that


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    saved = tmp_path_factory.mktemp("long") / "long.json"
    assert long.main(["--lengths", "64,1024", "--seconds", "0", "--threads", "1", "--json", str(saved)]) == 0
    return json.loads(saved.read_text())


def test_a_run(run, capsys):
    found = [(row["kind"], row["length"]) for row in run["rows"]]
    assert found == [(kind, length) for length in (64, 1024) for kind in ("plain", "causal", "window")]
    for row in run["rows"]:
        assert min(row["forward"], row["backward"]) > 0
        assert row["calls"] == 1
        assert f"{row['kind']:8s}{row['length']:8d}" in long.line(row)


def test_more_calls_when_there_is_time():
    assert long.measure("window", 256, 1, 0.05)["calls"] > 1


@pytest.mark.parametrize(
    "arguments", [["--kinds", "nonsense"], ["--lengths", "0"], ["--lengths", "x"], ["--threads", "0"]]
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        long.main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_the_figure(run, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "figures")
    module = importlib.import_module("long")
    picture = ElementTree.fromstring(module.draw(run))
    text = "".join(picture.itertext())
    assert all(word in text for word in ("forward", "backward", "plain", "causal", "window", "1k", "64"))
    with pytest.raises(SystemExit, match="no rows"):
        module.draw({**run, "rows": []})
