"""The benchmarks of layers, GPTs and encoders: their counts, their pairing, and whole runs of tiny sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from selfattn.benchmarks import app, encoder, generation, layers, weights
from selfattn.benchmarks.turns import Contestant, Measured, Prepared, Turns


def open_constant(engine: str, threads: int) -> object:
    """Give each engine a result of its own, in the worker."""
    value = {"selfattn": 1.0, "near": 1.001, "far": 2.0}[engine]
    return lambda case: Prepared(lambda: None, np.full(case, value))


def test_work_of_a_case() -> None:
    forward = 2 * (2 * 5 * 3 * (4 * 32**2 + 2 * 32 * 128) + 4 * 3 * 5**2 * 32)  # products; scores and sums
    assert layers.Case("forward", 32, 5, 3).flops == forward
    assert layers.Case("train", 32, 5, 3).flops == 3 * forward
    assert layers.Case("linear", 8, 5, out=4).flops == 2 * 5 * 8 * 4


def test_ratios_are_paired() -> None:
    own, peer, slow = Contestant("selfattn", 2), Contestant("a", 2), Contestant("b", 2)
    measured = Measured({own: [1.0, 10.0, 2.0], peer: [2.0, 30.0, 2.0], slow: []}, {}, {}, {})
    assert measured.ratio(peer, own) == 2.0
    assert measured.ratio(slow, own) is None


def test_results_that_differ_are_not_timed() -> None:
    contestants = [Contestant(name, 1) for name in ("selfattn", "near", "far")]
    with Turns(open_constant, contestants) as turns:
        measured = turns.measure(3, rounds=2, seconds=0.0, tolerance=0.01)
    assert [len(times) for times in measured.times.values()] == [2, 2]
    assert list(measured.errors) == [contestants[2]]
    assert "differs" in measured.errors[contestants[2]]
    assert measured.peaks[1] > 0


def test_a_run_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="needs the package torch")
    saved = tmp_path / "layers.json"
    tiny = "--sizes 64x4x2 --kinds train,forward --peers torch --threads 2,1 --rounds 1 --seconds 0"
    assert app.main(["layers", *tiny.split(), "--json", str(saved)]) == 0
    cases = json.loads(saved.read_text())
    assert [case["kind"] for case in cases] == ["train", "forward"]
    assert [len(case["results"]) for case in cases] == [4, 4]
    printed = capsys.readouterr().out
    assert "vs torch" in printed
    assert "train d=64, 2 x 4" in printed


def test_a_run_of_training_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses of the first steps are compared: a library that trains otherwise would be told."""
    pytest.importorskip("torch", reason="needs the package torch")
    saved = tmp_path / "gpt.json"
    assert (
        app.main(
            [
                "gpt",
                *["--sizes", "8x4x2", "--threads", "1", "--rounds", "1", "--seconds", "0"],
                "--json",
                str(saved),
            ]
        )
        == 0
    )
    (case,) = json.loads(saved.read_text())
    assert [row["engine"] for row in case["results"]] == ["selfattn", "torch-modules", "torch-fused"]
    printed = capsys.readouterr().out
    assert "vs torch-fused" in printed
    assert "C=8, T=4, B=2" in printed


def test_texts_in_batches_keep_their_order() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    shapes = []

    def infer(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        shapes.append(ids.shape)
        return np.stack([(ids * mask).sum(1), mask.sum(1)], axis=1)

    texts = ["c c c c", "a", "b b b", "c a"]
    found = encoder.in_batches(tokenizer, infer, texts, 2)
    assert found.tolist() == [[12, 4], [1, 1], [6, 3], [4, 2]]
    assert shapes == [(2, 2), (2, 4)]


def test_what_rounds_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "find_spec", lambda name: None if name == "nncf" else object())
    assert [encoder.is_installed("openvino", dtype) for dtype in encoder.DTYPES] == [True, True, False]
    assert encoder.is_installed("onnxruntime", "int8")


def test_cosines_are_told() -> None:
    own = Contestant("selfattn", 1)
    vectors = np.array([[1.0, 0.0], [0.6, 0.8]])
    measured = Measured({}, {}, {}, {own: vectors})
    assert "least 0.6000, mean 0.8000" in encoder.cosines_of(measured, np.array([[1.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("layers --kinds x", "no cases of kind x"),
        ("layers --sizes 33x4x2", "multiples of 32"),
        ("layers --threads 0", "at least 1"),
        ("gpt --sizes 9x4x2", "multiples of 4"),
        ("gpt --peers x", "no peer x"),
        ("gpt --rounds 0", "at least 1"),
        ("encoder . --cases x", "no cases of kind x"),
        ("encoder . --engines x", "no engine x"),
        ("encoder . --engines transformers --dtype int8", "transformers is not compared in int8"),
        ("generation nothing --engines selfattn", "there is no file nothing"),
        ("generation . --cases x", "no cases of kind x"),
        ("generation . --engines x", "no engine x"),
    ],
)
def test_wrong_usage(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        app.main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_gradients_are_compared_by_their_median() -> None:
    distance = layers.distance_of(layers.Case("eval", 32, 5))
    expected = np.zeros(20)
    outlier, wrong, output = np.zeros(20), np.zeros(20), np.zeros(20)
    outlier[12], wrong[10:], output[3] = 1.0, 1.0, 1.0
    assert [distance(result, expected) for result in (outlier, wrong, output)] == [0, 1, 1]
    assert layers.distance_of(layers.Case("forward", 32, 5))(outlier, expected) == 1


def test_generation_of_a_tiny_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A whole run with selfattn alone: the other libraries take seconds to import."""
    pytest.importorskip("gguf", reason="it writes the file")
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    from gguf_files import byte_level, write
    from language_folders import SPECIAL, make_tokenizer

    from selfattn import models

    config = {
        "model_type": "llama", "vocab_size": make_tokenizer().get_vocab_size(), "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    file, corpus = tmp_path / "model.gguf", tmp_path / "corpus.txt"
    write(file, config, models.LlamaForCausalLM(config, rng=0).state_dict(), "Q4_1", byte_level(SPECIAL))
    corpus.write_text("the sea was calm. " * 90)
    given = f"generation {file} --corpus {corpus} --engines selfattn --prompt 20 --answer 5 --rounds 1 --seconds 0 --threads 1"
    assert app.main([*given.split(), "--json", str(tmp_path / "times.json")]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"prompt +20 tokens +1 +selfattn +[\d.]+ +[\d.]+ +1\.00x", shown)
    assert re.search(r"answer +5 tokens +1 +selfattn", shown)
    assert "a token takes" in shown
    assert "to the first token" in shown
    saved = json.loads((tmp_path / "times.json").read_text())
    assert [each.get("case") for each in saved] == ["prompt", "answer", None, None]
    assert saved[2]["bytes"] == generation.bytes_of_a_token(file)


def test_weights(capsys: pytest.CaptureFixture[str], threads_restored: None) -> None:
    tiny = ["--columns", "256", "--megabytes", "1", "--rounds", "1", "--threads", "1"]
    assert app.main(["weights", *tiny, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(weights.KINDS)
    assert all(figure > 0 for row in found.values() for figure in row.values())
    for wrong in (["--kinds", "Q2_K"], ["--columns", "100"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            app.main(["weights", *wrong])
