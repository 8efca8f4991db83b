"""The benchmarks: their logic, counts and comparisons, and whole runs of tiny sizes, most with NumPy as the only peer."""

import importlib
import json
import re
import time
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import selfattn as sa
from benchmarks import blocks, encoder, generation, layers, long, memory, ragged, shares, weights
from benchmarks.__main__ import COMMANDS, main
from selfattn import _core, models, reference
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


BRIEF = ["--rounds", "1", "--seconds", "0"]


def run(tmp_path, command, *given):
    """Run a command with selfattn alone or with PyTorch; return the rows that it saves."""
    saved = tmp_path / "saved.json"
    assert main([*command.split(), *BRIEF, *given, "--json", str(saved)]) == 0
    return json.loads(saved.read_text())["rows"]


def test_work_of_a_model():
    forward = 2 * (2 * 5 * 3 * (4 * 32**2 + 2 * 32 * 128) + 4 * 3 * 5**2 * 32)  # products; scores and sums
    assert layers.Case("forward", 32, 5, 3).flops == forward
    assert layers.Case("train", 32, 5, 3).flops == 3 * forward
    assert layers.Case("linear", 8, 5, out=4).flops == 2 * 5 * 8 * 4
    dense = blocks.Case(8, 4).facts()["flops"]
    of_each = {"documents": 8 * 2, "prefix": 2 + sum(range(2, 9)), "window": 1 + 2 + 6 * 3}
    for kind, open_pairs in of_each.items():
        share = blocks.Case(8, 4, blocks=kind, block_length=2).facts()["flops"] / dense
        assert share == pytest.approx(open_pairs / 64)
    case = ragged.Case(40, 4, heads=2, ragged=5, causal=True, gradients=BACKWARD)
    assert case.facts()["flops"] == sum(10 * 2 * n * n * 4 / 2 for n in case.lengths)


def test_shares_of_the_limit(tmp_path, monkeypatch):
    rows = run(tmp_path, "shares --quick --threads 2")
    assert [part for part in shares.PARTS if any(row["part"] == part for row in rows)] == [*shares.PARTS[:-1]]
    found = {row["job"]: row["seconds_and_limit"] for row in rows}
    assert all(
        limit > 0 and list(counts) == ["1", "2"] for counts in found.values() for _, limit in counts.values()
    )
    assert all(0 < row["team"] < 1 for row in rows)
    monkeypatch.setattr(_core, "_fma_peak", lambda dtype, threads, milliseconds: 1e9 * threads)
    monkeypatch.setattr(_core, "_read_bandwidth", lambda size, threads, milliseconds: size / threads)
    monkeypatch.setattr(shares, "_least", lambda call, duration: call())
    jobs = {job.label: job for job in shares.jobs_of(shares.PARTS, quick=True)}
    step = jobs["training step d=64, 16 x 64"]
    assert step.bound(2, 0) == layers.Case("train", 64, 64, 16).flops / 2e9
    forward, backward = (jobs[f"attention{way} 8 x 64 x 32"].bound(1, 0) for way in ("", " backward,"))
    assert backward == 2.5 * forward
    assert jobs["gelu 1024 x 64"].bound(2, 0) == 2
    assert shares.team_call(2) == 2
    assert jobs["gelu 1024 x 64"].work == 2 * 4 * 1024 * 64
    # q, k, v and out; the network's two of 4 d
    assert jobs["packing, forward d=64"].work == 4 * 2 * (4 + 8) * 64 * 64
    packing = shares.Job("packing", "", lambda: 5.0, 1, "bytes", lambda: 7.0)
    assert packing.seconds(1, 0) == 3  # 3 + 2, 3 + 2 * 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m benchmarks {command} [-h] [--peers A,B]" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["selfattn", "torch"])
@pytest.mark.parametrize("kind", ["", BACKWARD])
@pytest.mark.parametrize("split", [False, True])
def test_ragged_batches_are_computed(split, kind, engine):
    pytest.importorskip(engine, reason=f"needs the package {engine}")
    case = ragged.Case(40, 4, heads=2, gradients=kind, ragged=5, split=split)
    query, key, value, grad_out = case.packed()
    at = case.offsets
    out, pullback = reference.varlen_attention_vjp(query, key, value, at, at)
    expected = np.concatenate([np.ravel(x) for x in (pullback(grad_out)[:3] if kind else [out])])
    for spelling in ragged.open_engine(engine, 1)(case):
        for _ in range(2):  # a timed statement runs again and again
            got = spelling.to_array(eval(spelling.statement, dict(spelling.names)))
            np.testing.assert_allclose(got.ravel(), expected, atol=1e-5)


def test_a_run_of_ragged_batches_and_of_blocks(tmp_path):
    rows = run(tmp_path, "ragged --quick --peers none --lengths 40 --dims 4")
    assert [row["label"] for row in rows] == [
        f"{kind}{causal}16 of 16 to 40 x 4" for kind in ("", "backward, ") for causal in ("", "causal, ")
    ]
    rows += run(tmp_path, "blocks --quick --lengths 16 --dims 4")
    assert [row["label"] for row in rows[4:]] == [
        f"{kind}{part} in 16 x 4" for kind in ("", "backward, ") for part in ("documents of 2", "prefix of 4")
    ]
    for row in rows:
        for contestant in row["contestants"]:
            assert contestant["times"]
            assert contestant.get("agrees", contestant["name"] in ("dense", "equal lengths"))


def test_a_run_of_layers(tmp_path, capsys):
    tiny = "layers --quick --sizes 64x4x2 --peers numpy --threads 2"
    rows = run(tmp_path, tiny)
    assert [row["label"].split()[0] for row in rows] == ["train", "eval", "forward", "linear", "linear"]
    names = [[contestant["name"] for contestant in row["contestants"]] for row in rows]
    assert names == [["selfattn", "1 thread"]] * 3 + [["selfattn", "numpy", "1 thread"]] * 2
    assert "train d=64, 2 x 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    ["layers --quick --sizes 64x4x2 --threads 1", "gpt --sizes 8x4x2", "embedding --quick --kinds step"],
)
def test_pytorch_computes_the_same(command, tmp_path):
    """Losses of the first steps are compared, which would show a library that trains differently."""
    pytest.importorskip("torch", reason="needs the package torch")
    for row in run(tmp_path, command):
        assert len(row["contestants"]) > 1
        assert all(contestant["agrees"] for contestant in row["contestants"])


def test_peers_that_are_not_installed_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("selfattn.benchmarks.app.find_spec", lambda name: None)
    (row,) = run(tmp_path, "gpt --sizes 8x4x2 --threads 1")
    assert [contestant["name"] for contestant in row["contestants"]] == ["selfattn"]
    printed = capsys.readouterr().out
    assert "not installed: torch-modules, torch-fused" in printed
    assert re.search(r"C=8, T=4, B=2 .* steps/s", printed)


def test_texts_in_batches_keep_their_order():
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    shapes = []

    def infer(ids, mask):
        shapes.append(ids.shape)
        return np.stack([(ids * mask).sum(1), mask.sum(1)], axis=1)

    texts = ["c c c c", "a", "b b b", "c a"]
    found = encoder.in_batches(tokenizer, infer, texts, 2)
    assert found.tolist() == [[12, 4], [1, 1], [6, 3], [4, 2]]
    assert shapes == [(2, 2), (2, 4)]


def test_the_package_that_rounds_must_be_installed(monkeypatch):
    monkeypatch.setattr(
        "selfattn.benchmarks.app.find_spec", lambda name: None if name == "nncf" else object()
    )
    peers = [encoder._parser("", [f"--dtype={dtype}"]).get_default("peers") for dtype in encoder.DTYPES]
    assert ["openvino" in names for names in peers] == [True, True, False]
    assert all("onnxruntime" in names for names in peers)


def test_cosines_are_compared():
    vectors, whole = np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([[1.0, 0.0], [1.0, 0.0]])
    assert encoder.cosine_missing(vectors.ravel(), vectors.ravel(), whole) == pytest.approx(0.4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_run_of_an_encoder(dtype, tmp_path, capfd):
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    from text_folders import add_pipeline, old_pooling, save_bert

    save_bert(tmp_path)
    add_pipeline(tmp_path, old_pooling("mean"), normalize=True)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the sea was calm. a ship sailed over!\n" * 90)
    given = f"--corpus {corpus} --cases mixed,one --scale 0.02 --peers none --dtype {dtype} --threads 1"
    rows = run(tmp_path, f"encoder {tmp_path} {given}")
    assert [row["contestants"][0]["case"]["texts"] for row in rows] == [20, 1]
    shown = capfd.readouterr().out
    assert "texts/s" in shown
    assert ("least cosine with float32" in shown) == (dtype == "int8")
    assert re.search(r"selfattn: [\d.]+ s from the start of a process to the first embedding, \d+ MB", shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing", "invalid choice: 'nothing'"), ("layers --kinds x", "no kind 'x'"),
        ("layers --sizes 33x4x2", "multiples of 32"), ("layers --sizes 32x4", "must be WIDTHxTOKENSxBATCH"),
        ("layers --threads 0", "at least 1"), ("long --kinds nonsense", "no kind 'nonsense'"),
        ("long --lengths 0", "at least 1"), ("gpt --sizes 9x4x2", "multiples of 4"), ("gpt --peers x", "no peer 'x'"),
        ("gpt --rounds 0", "at least 1"), ("encoder . --cases x", "no case 'x'"), ("encoder . --peers x", "no peer 'x'"),
        ("encoder . --peers none", "has no config.json"),
        ("generation nothing --peers none", "there is no file nothing"),
        ("generation . --cases x", "no case 'x'"), ("weights --kinds IQ1_S", "no kind 'IQ1_S'"),
        ("weights --columns 100", "multiple of 256"), ("shares --gguf nothing", "there is no file nothing"),
    ],
)  # fmt: skip
def test_wrong_usage_of_other_benchmarks(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_gradients_are_compared_by_their_median():
    expected = np.zeros(20)
    outlier, wrong, output = np.zeros(20), np.zeros(20), np.zeros(20)
    outlier[12], wrong[10:], output[3] = 1.0, 1.0, 1.0
    assert [layers.output_and_gradient(result, expected) for result in (outlier, wrong, output)] == [0, 1, 1]


def test_generation_of_a_tiny_file(tmp_path, capfd):
    """A whole run with selfattn alone: the other libraries take seconds to import."""
    pytest.importorskip("gguf", reason="it writes the file")
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    from gguf_files import byte_level, write
    from language_folders import SPECIAL, make_tokenizer

    config = {
        "model_type": "llama", "vocab_size": make_tokenizer().get_vocab_size(), "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    file, corpus = tmp_path / "model.gguf", tmp_path / "corpus.txt"
    state = {name: 4 * array for name, array in models.LlamaForCausalLM(config, rng=0).state_dict().items()}
    write(file, config, state, "Q4_1", byte_level(SPECIAL))
    corpus.write_text("the sea was calm. " * 90)
    given = f"--corpus {corpus} --peers none --precision int8 --threads 1"
    rows = run(tmp_path, f"generation {file} {given} --prompt 20 --answer 5")
    labels = ["prompt, 20 tokens after 0", "answer, 5 tokens after 16", "later, 5 tokens after 20"]
    assert [row["label"] for row in rows] == [*labels, "turn, 32 tokens after 25"]
    assert [each["name"] for each in rows[0]["contestants"]] == ["selfattn", "selfattn int8"]
    out = 32 + 16 + 16 + 32 + 3 * 32  # rows of the matrices
    assert rows[0]["contestants"][0]["flops"] == 2 * 20 * 32 * out
    shown = capfd.readouterr().out
    assert "tokens/s" in shown
    assert re.search(
        r"selfattn int8: loading [\d.]+ s; .* to the first token [\d.]+ s\nreading the .* takes .* ms; a",
        shown,
    )
    assert re.search("answer takes .* times that; a token of later takes", shown)
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert saved["bytes"] == generation.work_of_a_token(file)[0] > 0

    peers = ["float32"] + ["llama.cpp"] * (find_spec("llama_cpp") is not None)
    given = f"--peers {','.join(peers)} --threads 1 --tokens 70 --window 32"
    assert main(f"perplexity {file} --corpus {corpus} {given} --json -".split()) == 0
    (found,) = json.loads(capfd.readouterr().out).values()
    model = models.load(file)
    ids = model.tokenizer.encode(corpus.read_text()).ids[:70]
    means = [model.evaluate(ids[at : at + 32])["mean_nll"] for at in (0, 32, 64)]
    assert list(found) == ["selfattn", *peers]
    expected = np.exp(np.average(means, weights=[31, 31, 5]))
    assert list(found.values()) == pytest.approx([expected] * len(found), rel=5e-3)


def test_long_sequences_and_their_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(long, "in_a_process", lambda function, *given: function(*given))  # next test has it
    rows = run(tmp_path, "long --lengths 64,1024 --threads 1")
    assert [(row["kind"], row["length"]) for row in rows] == [(k, n) for n in (64, 1024) for k in long.KINDS]
    shown = capsys.readouterr().out
    for row in rows:
        assert min(row["forward"], row["backward"]) > 0 and row["calls"] == 1
        assert f"{row['kind']:8s}{row['length']:8d}" in shown
    assert long.measure("window", 256, 1, 0.05)["calls"] > 1
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "figures")
    module, saved = importlib.import_module("long"), json.loads((tmp_path / "saved.json").read_text())
    text = "".join(ElementTree.fromstring(module.draw(saved)).itertext())
    assert all(word in text for word in ("forward", "backward", *long.KINDS, "1k", "64"))
    with pytest.raises(SystemExit, match="no rows"):
        module.draw({**saved, "rows": []})


@pytest.mark.skipif(not memory.AVAILABLE, reason="VmHWM is Linux's")
def test_memory_of_65536_tokens_forward_and_backward():
    """The window reduces the arithmetic; the memory would be the same without it."""
    result = long.in_a_process(long.measure, "window", 65536, 2, 0.0)
    output = 65536 * long.HEADS * long.WIDTH * 4
    assert output < result["memory"] < 128 << 20  # half of the memory is the output, which the pullback holds


def test_weights(capsys, threads_restored):
    tiny = "weights --columns 256 --megabytes 1 --rounds 1 --threads 1 --json -"
    assert main(tiny.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(weights.KINDS)
    assert all(figure > 0 for row in found.values() for figure in row.values())
