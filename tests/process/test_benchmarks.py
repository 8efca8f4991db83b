"""The benchmark's own logic, on tiny cases and with NumPy as the only peer."""

import importlib
import json
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import selfattn as sa
from selfattn import _core, reference
from selfattn._timing import sample_times, wait_until_quiet
from selfattn.benchmarks import app, report
from selfattn.benchmarks.attention import BACKWARD, BOTH, ENGINES, SUITES, Case, Choice, open_engine, rows_of
from selfattn.benchmarks.turns import Contestant, Library, Row, Turns, Worker, compare

pytestmark = pytest.mark.usefixtures("openmp_restored")
TINY = ["--lengths", "8", "--dims", "4", "--peers", "numpy", "--rounds", "1", "--seconds", "0.001"]


def flops(*shape, **options):
    return Case(*shape, **options).facts()["flops"]


def test_work_of_a_case():
    facts = Case(10, 4, keys=20, batch=2, heads=6, kv_heads=3).facts()
    assert facts["flops"] == 4 * 2 * 6 * 10 * 20 * 4
    assert facts["key_value_bytes"] == 2 * 2 * 3 * 20 * 4 * 4
    assert Case(**facts["case"]).facts() == facts
    assert flops(10, 4, causal=True) == flops(10, 4) / 2
    assert flops(10, 4, gradients=BACKWARD) == 10 * 8 * 10 * 10 * 4
    assert flops(10, 4, gradients=BOTH, causal=True) == 7 * 8 * 10 * 10 * 4


def test_suites():
    choice = Choice(["numpy", "torch", "openvino"], other_isas=["avx2"])
    rows = {name: rows_of([name], choice) for name in ("summary", *SUITES)}
    assert len(rows["forward"]) == len(rows["causal"]) == 7 * 4
    for name, members in rows.items():
        assert members, name
        assert len({row.label for row in members}) == len(members), name
        for row in members:
            assert row.contestants[0].engine.startswith("selfattn")
    everything = rows_of(["all"], choice)
    assert len(everything) == sum(len(members) for name, members in rows.items() if name != "summary")
    assert rows_of(["forward", "forward"], choice) == rows["forward"]
    assert rows["isa"][0].contestants[0].engine == "selfattn avx2"
    assert rows["isa"][0].label == "avx2 128 x 32"
    names = {name: [c.name for c in members[0].contestants[1:]] for name, members in rows.items()}
    assert names["forward"] == ["numpy", "torch", "openvino"]
    assert names["strided"] == ["contiguous", "numpy", "torch"]
    assert names["16bit"] == ["torch", "openvino"]
    assert names["backward"] == ["torch"]


def test_labels():
    cases = {
        "128 x 64": Case(128, 64),
        "bfloat16, backward, causal 128 x 64": Case(128, 64, dtype="bfloat16", gradients=BACKWARD, causal=True),
        "float mask per head 8 x 4": Case(8, 4, mask="float per head"), "one head 8 x 4": Case(8, 4, heads=1),
        "(B, L, H, D) 8 x 4": Case(8, 4, layout="BLHD"),
        "1 query, 9 keys, 4/2 heads, float16": Case(1, 8, keys=9, heads=4, kv_heads=2, dtype="float16"),
        "2-D call 3 x 4, float32": Case(3, 4, heads=1, layout="LD"),
    }  # fmt: skip
    assert list(cases) == [case.label for case in cases.values()]
    assert [case.limit for case in cases.values()] == ["flops"] * 5 + ["bytes", ""]


def test_sample_times():
    calls = []
    samples = sample_times("calls.append(1)", {"calls": calls}, seconds=0.005)
    assert samples
    assert 0 < min(samples) < 1e-3
    assert len(calls) > len(samples)
    slow = sample_times("sleep(0.002)", {"sleep": time.sleep}, seconds=0)
    assert len(slow) == 1
    assert slow[0] >= 0.002
    wait_until_quiet(0.1)


@pytest.mark.parametrize("engine", ["selfattn", "torch"])
@pytest.mark.parametrize("kind", ["", BACKWARD, BOTH])
def test_spellings_compute_the_case(kind, engine):
    """This includes cases that only PyTorch among the peers computes; other libraries are compared when they are timed."""
    pytest.importorskip(engine, reason=f"needs the package {engine}")
    case = Case(40, 4, heads=2, mask="float", gradients=kind)
    arrays = case.inputs()
    out, pullback = reference.scaled_dot_product_attention_vjp(*arrays.values())
    expected = np.concatenate([np.ravel(x) for x in (pullback(case.grad_out())[:4] if kind else [out])])
    for spelling in ENGINES[engine].spell(case, arrays, 1):
        for _ in range(2):  # a timed statement runs again and again
            got = spelling.to_array(eval(spelling.statement, dict(spelling.names)))
            np.testing.assert_allclose(np.ravel(got), expected, atol=1e-5)


@pytest.mark.parametrize("isa", _core.available_isas(), indirect=True)
def test_an_engine_of_an_instruction_set(isa):
    other = _core.available_isas()[0]
    open_engine(f"selfattn {other}", 1)
    assert sa.get_isa() == other
    open_engine(f"selfattn {isa}", 1)
    assert sa.get_isa() == isa


def test_the_answers_of_a_worker():
    library = Library("numpy", 1)
    expected = reference.scaled_dot_product_attention(*Case(4, 2).inputs().values())
    (sample,) = library.prepare(3, Case(4, 2), open_engine)["samples"]
    np.testing.assert_allclose(sample, expected.ravel(), atol=1e-6)
    timed = library.run(3, 0.001, "")
    assert timed["times"]["attention(q, k, v)"]
    assert timed["limits"] == []
    for limit in ("flops", "bytes"):
        assert min(library.run(3, 0.0, limit)["limits"]) > 0


@pytest.mark.parametrize("engine", ["numpy", "nobody"])
def test_a_worker_that_fails_and_one_that_dies(engine):
    worker, case = Worker(engine, 1), {"number": 0, "case": Case(4, 2), "opened": open_engine}
    try:
        assert "KeyError" in worker.ask("run", number=4, seconds=0.0, limit="")["error"]
        answer = worker.ask("prepare", **case)
        assert answer["error"] == "KeyError: 'nobody'" if engine == "nobody" else answer["samples"]
        worker.process.kill()
        with pytest.raises(ChildProcessError, match=f"the {engine} worker ended"):
            worker.ask("prepare", **case)
    finally:
        worker.close()


def test_one_process_for_each_engine_and_number_of_threads():
    case = Case(4, 2)
    contestants = [
        Contestant(name, "selfattn", case, threads=n) for name, n in (("selfattn", 0), ("two", 2), ("b", 1))
    ]
    yardstick = Contestant("larger", "selfattn", Case(5, 2), yardstick=True)
    with Turns(open_engine, threads=1, rounds=2, seconds=0.0) as turns:
        row = turns.measure(Row("forward", "tiny", (*contestants, yardstick), count=(3, "things")))
        assert list(turns.workers) == [("selfattn", 1), ("selfattn", 2)]
        processes = [worker.process for worker in turns.workers.values()]
    assert all(process.returncode is not None for process in processes)
    assert row["count"] == (3, "things")
    last = row["contestants"].pop()
    assert last["times"]
    assert "agrees" not in last
    for contestant in row["contestants"]:
        assert contestant["agrees"]
        assert "samples" not in contestant
        assert [len(rounds) for rounds in contestant["times"].values()] == [2]
        assert len(contestant["limits"]) == 4


def make_contestant(name, times, **more):
    return {"name": name, "engine": name, **Case(100, 10).facts(), "times": times, "limits": [], **more}


def make_row():
    work = flops(100, 10)
    own = make_contestant("selfattn", {"a": [[3.0, 2.0], [4.0, 5.0]]}, limits=[work, 0.9 * work], agrees=True)
    peer = make_contestant("numpy", {"b": [[9.0], [9.0]], "c": [[6.0], [10.0]]}, agrees=False, difference=1.0)
    absent = make_contestant("torch", {}, error="nothing")
    return {"suite": "forward", "label": "100 x 10", "limit": "flops", "contestants": [own, peer, absent]}


def test_figures_of_a_row():
    row = make_row()
    own, peer, absent = row["contestants"]
    assert report.best_time(own) == 2
    assert report.median_time(own) == 3.5
    assert report.median_time(peer) == 8
    assert report.best_time(absent) is report.median_time(absent) is None
    assert report.rate(row, own) == own["flops"] / 2
    head, rule, line = report.table([("100 x 10", ["selfattn", "numpy", "torch"])], [row], markdown=False)
    assert head.split() == ["case", "best", "median", "rate", "of", "peak", "vs", "NumPy", "vs", "PyTorch"]
    assert set(rule) == {"-", " "}
    assert line.split() == ["100", "x", "10", "2", "s", "3.5", "s", "0", "GFLOP/s", "50%", "3.00x!", "-"]
    (*_, line) = report.table([("", ["selfattn"])], [{**row, "count": (5, "texts")}], markdown=True)
    assert "|  2.5 texts/s |" in line
    assert report.rate({**row, "limit": "bytes"}, own) == own["key_value_bytes"] / 2
    assert report.rate({**row, "limit": ""}, own) is None
    assert report.ratio(row, "numpy") == 3
    assert report.ratio(row, "torch") is report.ratio(row, "nobody") is None


def test_problems_of_a_run():
    row = make_row()
    assert not report.is_sound([row])
    text = "\n".join(report.problems([row]))
    assert "NumPy differs" in text
    assert "error in 100 x 10, PyTorch: nothing" in text
    row["contestants"][1]["agrees"] = True
    assert report.is_sound([row])
    row["contestants"][0]["times"] = {}
    assert not report.is_sound([row])


def test_results_that_differ_are_noted():
    samples = [[np.array(x) for x in found] for found in ([[1.0, 2.0]], [[1.0, 2.0], [1.0, 2.5]], [[1.0]])]
    results = [{"samples": found} for found in samples] + [{"error": "no"}]
    contestants = [Contestant(str(n), "selfattn", Case(4, 2)) for n in range(4)]
    compare(Row("forward", "", tuple(contestants), tolerance=0.1), results)
    assert [result.get("agrees") for result in results] == [True, False, False, None]
    assert results[1]["difference"] == 0.5


def test_a_whole_run(tmp_path, capsys):
    saved = tmp_path / "results.json"
    suites = "forward,causal,mask,float64,16bit,decode,small,strided,backward,isa"
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
def test_wrong_usage(arguments, monkeypatch, capsys):
    monkeypatch.setattr(app, "find_spec", lambda name: object() if name == "numpy" else None)
    with pytest.raises(SystemExit) as stop:
        app.main(arguments.split())
    assert stop.value.code == 2
    assert ("not installed" if "torch" in arguments else "usage:") in capsys.readouterr().err


def test_the_figure(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "figures")
    module = importlib.import_module("speed")
    run = {"config": {"cpu": "A & B", "isa": "avx2"}, "settings": {"threads": 2}, "rows": [make_row()]}
    picture = ElementTree.fromstring(module.draw(run))
    assert {"100 x 10", "selfattn", "NumPy"} <= set(picture.itertext())
    assert "A & B, avx2, 2 threads" in "".join(picture.itertext())
    with pytest.raises(SystemExit, match="no row"):
        module.draw({**run, "rows": []})
