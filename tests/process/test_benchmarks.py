"""The benchmark's own logic, on tiny cases and with NumPy as the only peer."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import selfattn as sa
from selfattn import reference
from selfattn._timing import sample_times, wait_until_quiet
from selfattn.benchmarks import app, engines, measure, report
from selfattn.benchmarks.cases import BACKWARD, BOTH, SUITES, Case, Choice, Contestant, Row, rows_of
from selfattn.benchmarks.worker import Library, serve

TINY = ["--lengths", "8", "--dims", "4", "--peers", "numpy", "--rounds", "1", "--seconds", "0.001"]


def test_work_of_a_case() -> None:
    case = Case(10, 4, keys=20, batch=2, heads=6, kv_heads=3)
    assert case.flops == 4 * 2 * 6 * 10 * 20 * 4
    assert Case(10, 4, causal=True).flops == Case(10, 4).flops / 2
    assert case.key_value_bytes == 2 * 2 * 3 * 20 * 4 * 4
    assert Case(**case.to_dict()) == case
    assert Case(10, 4, gradients=BACKWARD).flops == 10 * 8 * 10 * 10 * 4
    assert Case(10, 4, gradients=BOTH, causal=True).flops == 7 * 8 * 10 * 10 * 4
    for blocks, open_pairs in {
        "documents": 8 * 2,
        "prefix": 2 + 2 + 3 + 4 + 5 + 6 + 7 + 8,
        "window": 1 + 2 + 6 * 3,
    }.items():
        case = Case(8, 4, blocks=blocks, block_length=2)
        assert case.flops == pytest.approx(Case(8, 4).flops * open_pairs / 64)


def test_suites() -> None:
    choice = Choice(["numpy", "torch"], other_isas=["avx2"])
    rows = {name: rows_of([name], choice) for name in SUITES}
    assert len(rows["forward"]) == len(rows["causal"]) == 7 * 4
    for name, members in rows.items():
        assert members, name
        assert len({row.label for row in members}) == len(members), name
        for row in members:
            assert row.contestants[0].engine == "selfattn"
    everything = rows_of(["all"], choice)
    assert len(everything) == sum(len(members) for name, members in rows.items() if name != "summary")
    assert rows_of(["forward", "forward"], choice) == rows["forward"]
    assert rows["isa"][0].contestants[0].environment == {"SELFATTN_ISA": "avx2"}
    assert [c.name for c in rows["strided"][0].contestants][:2] == ["selfattn", "contiguous"]
    for row in rows["blocks"]:
        assert [(c.name, c.yardstick) for c in row.contestants] == [("selfattn", False), ("dense", True)]
    assert "documents of 512 in 4096 x 64" in [row.label for row in rows["blocks"]]


def test_sample_times() -> None:
    calls: list[int] = []
    samples = sample_times("calls.append(1)", {"calls": calls}, seconds=0.005)
    assert samples
    assert 0 < min(samples) < 1e-3
    assert len(calls) > len(samples)
    slow = sample_times("sleep(0.002)", {"sleep": __import__("time").sleep}, seconds=0)
    assert len(slow) == 1
    assert slow[0] >= 0.002
    wait_until_quiet(0.1)


@pytest.mark.parametrize("engine", ["selfattn", "torch"])
@pytest.mark.parametrize("kind", ["", BACKWARD, BOTH])
@pytest.mark.parametrize("ragged", [0, 5])
def test_spellings_compute_the_case(ragged: int, kind: str, engine: str) -> None:
    """All that only PyTorch computes too: the other libraries are compared whenever they are timed."""
    pytest.importorskip(engine, reason=f"needs the package {engine}")
    for split in (False, True):
        case = Case(
            40, 4, heads=2, mask="" if ragged else "float", gradients=kind, ragged=ragged, split=split
        )
        query, key, value, mask = inputs = case.inputs()
        if ragged:
            at = case.offsets
            out, pullback = reference.varlen_attention_vjp(query, key, value, at, at)
        else:
            out, pullback = reference.scaled_dot_product_attention_vjp(query, key, value, mask)
        grads = pullback(case.grad_out())[: 3 if ragged else 4] if kind else [out]
        expected = np.concatenate([np.ravel(x) for x in grads])
        for spelling in engines.ENGINES[engine].spell(case, inputs, 1):
            for _ in range(2):  # a timed statement runs again and again
                got = spelling.to_array(eval(spelling.statement, spelling.names))
                np.testing.assert_allclose(np.ravel(got), expected, atol=1e-5)


def test_worker_protocol() -> None:
    requests: list[dict[str, Any]] = [
        {"do": "prepare", "id": 3, "case": Case(4, 2).to_dict()},
        {"do": "run", "id": 3, "seconds": 0.001},
        {"do": "run", "id": 4, "seconds": 0.001},
        {"do": "forget"},
        {"do": "run", "id": 3, "seconds": 0.001},
        {"do": "something"},
    ]
    answers = io.StringIO()
    serve(Library("numpy", 1), map(json.dumps, requests), answers)
    prepared, timed, unknown, forgotten, gone, nonsense = map(json.loads, answers.getvalue().splitlines())
    assert list(prepared["samples"]) == list(timed["times"]) == ["attention(q, k, v)"]
    assert timed["times"]["attention(q, k, v)"]
    assert timed["limits"] == []
    assert forgotten == {}
    assert all("error" in answer for answer in (unknown, gone, nonsense))


def test_a_worker_that_dies_is_reported() -> None:
    worker = measure.Worker("numpy", 1, {})
    try:
        assert worker.ask(do="forget") == {}
        worker.process.kill()
        with pytest.raises(measure.WorkerError, match="numpy"):
            worker.ask(do="forget")
    finally:
        worker.close()


def test_one_process_for_each_environment() -> None:
    case = Case(4, 2)
    contestants = [
        Contestant("selfattn", "selfattn", case),
        Contestant("again", "selfattn", case),
        Contestant("other", "selfattn", case, {"SELFATTN_ISA": sa.get_isa()}),
    ]
    yardstick = Contestant("larger", "selfattn", Case(5, 2), yardstick=True)
    with measure.Bench(threads=1, rounds=2, seconds=0.0) as bench:
        row = bench.measure(Row("forward", "tiny", (*contestants, yardstick)))
        assert len(bench.workers) == 2
    last = row["contestants"].pop()
    assert last["times"]
    assert "agrees" not in last
    assert "samples" not in last
    for contestant in row["contestants"]:
        assert contestant["agrees"]
        assert "samples" not in contestant
        assert [len(rounds) for rounds in contestant["times"].values()] == [2]
        assert len(contestant["limits"]) == 4


def make_contestant(name: str, times: dict[str, list[list[float]]], **more: Any) -> dict[str, Any]:
    case = Case(100, 10)
    return {
        "name": name,
        "engine": name,
        "environment": {},
        "case": case.to_dict(),
        "flops": case.flops,
        "key_value_bytes": case.key_value_bytes,
        "times": times,
        "limits": [],
        **more,
    }


def make_row() -> dict[str, Any]:
    flops = Case(100, 10).flops
    own = make_contestant(
        "selfattn", {"a": [[3.0, 2.0], [4.0, 5.0]]}, limits=[flops, 0.9 * flops], agrees=True
    )
    peer = make_contestant("numpy", {"b": [[9.0], [9.0]], "c": [[6.0], [10.0]]}, agrees=False, difference=1.0)
    absent = make_contestant("torch", {}, unsupported="nothing")
    return {"suite": "forward", "label": "100 x 10", "limit": "flops", "contestants": [own, peer, absent]}


def test_figures_of_a_row() -> None:
    row = make_row()
    own, peer, absent = row["contestants"]
    assert report.best_time(own) == 2
    assert report.median_time(own) == 3.5
    assert report.median_time(peer) == 8
    assert report.best_time(absent) is report.median_time(absent) is None
    assert report.rate(row, own) == own["flops"] / 2
    assert report.share_of_limit(row, own) == 0.5
    assert report.rate({**row, "limit": "bytes"}, own) == own["key_value_bytes"] / 2
    assert report.rate({**row, "limit": ""}, own) is None
    assert report.ratio(row, "numpy") == 3
    assert report.ratio(row, "torch") is report.ratio(row, "nobody") is None


def test_problems_of_a_run() -> None:
    row = make_row()
    assert not report.is_sound([row])
    text = "\n".join(report.problems([row]))
    assert "NumPy differs" in text
    assert "not possible with PyTorch: nothing" in text
    row["contestants"][1]["agrees"] = True
    assert report.is_sound([row])
    row["contestants"][0]["times"] = {}
    assert not report.is_sound([row])


def test_results_that_differ_are_noted() -> None:
    results: list[dict[str, Any]] = [
        {"case": {"dtype": "float32"}, "samples": {"f": values}} for values in ([1.0, 2.0], [1.0, 2.5], [1.0])
    ]
    results.append({"case": {"dtype": "float32"}, "unsupported": "no"})
    measure.compare(results)
    assert [result.get("agrees") for result in results] == [True, False, False, None]
    assert results[1]["difference"] == 0.5


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "results.json"
    suites = "forward,causal,mask,float64,16bit,decode,small,strided,backward,ragged,blocks,isa"
    assert app.main(["--suite", suites, *TINY, "--json", str(saved)]) == 0
    printed = capsys.readouterr().out
    run = json.loads(saved.read_text())
    assert {row["suite"] for row in run["rows"]} == set(suites.split(","))
    for row in run["rows"]:
        assert row["label"] in printed
        assert all(contestant.get("agrees", True) for contestant in row["contestants"]), row["label"]
        assert bool(row["contestants"][0]["limits"]) == bool(row["limit"])
    for text in (run["config"]["cpu"], run["config"]["isa"], f"NumPy {np.__version__}", "vs NumPy"):
        assert text in printed

    assert app.main(["--load", str(saved)]) == 0
    assert capsys.readouterr().out == printed
    assert app.main(["--load", str(saved), "--markdown"]) == 0
    assert "| 8 x 4 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", ["--suite x", "--peers x", "--peers torch", "--lengths 0", "--load x --json y"]
)
def test_wrong_usage(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "is_installed", lambda name: name == "numpy")
    with pytest.raises(SystemExit) as stop:
        app.main(arguments.split())
    assert stop.value.code == 2
    assert ("not installed" if "torch" in arguments else "usage:") in capsys.readouterr().err


def test_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "figures")
    module = importlib.import_module("speed")
    run = {"config": {"cpu": "A & B", "isa": "avx2"}, "settings": {"threads": 2}, "rows": [make_row()]}
    picture = ElementTree.fromstring(module.draw(run))
    assert {"100 x 10", "selfattn", "NumPy"} <= set(picture.itertext())
    assert "A & B, avx2, 2 threads" in "".join(picture.itertext())
    with pytest.raises(SystemExit, match="no row"):
        module.draw({**run, "rows": []})
