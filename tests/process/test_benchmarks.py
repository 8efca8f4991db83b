"""The benchmarks: tiny runs of each program, what they count, and libraries that fail or differ."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import attention, layers, memory, models, peers, table
from benchmarks.__main__ import main


def run(tmp_path, capsys, command):
    """Run a program with NumPy and PyTorch, if it is installed; return its rows and what it prints."""
    saved = tmp_path / "saved.json"
    given = f"{command} --rounds 1 --seconds 0 --threads 1 --json {saved}"
    assert main(given.split()) == 0
    return json.loads(saved.read_text())["rows"], capsys.readouterr().out


def test_work_that_is_counted():
    def work(*shape, **more):
        return attention.Case(*shape, **more).work

    assert work(10, 4, heads=6) == 4 * 6 * 10 * 10 * 4
    assert work(10, 4, causal=True, gradients=attention.BOTH) == 7 * 8 * 10 * 10 * 4
    assert work(1, 4, keys=20, heads=6, kv_heads=3, dtype="bfloat16") == 2 * 3 * 20 * 4 * 2
    for mask in attention.BLOCKS:
        case = attention.Case(600, 4, mask=mask)
        assert case.work / work(600, 4) == pytest.approx(case.dense()["mask"].mean())
    forward = 2 * (2 * 5 * 3 * (4 * 32**2 + 2 * 32 * 128) + 4 * 3 * 5**2 * 32)  # products; scores and sums
    assert [layers.Case(kind, 32, 5, 3).work for kind in ("forward", "train")] == [forward, 3 * forward]


@pytest.mark.parametrize(
    ("command", "labels"),
    [
        (
            "attention --suite masks backward decoding --lengths 16 --head-dims 8",
            "documents|window|backward causal|16 keys",
        ),
        (
            "attention --suite ragged --lengths 20 --head-dims 4",
            "64 sequences backward causal 20 x 4",
        ),
        ("layers --sizes 64x4x2 --suite train forward linear gpt ESM", "train 64 wide, 2 x 4|gpt|ESM"),
        ("models --suite quants", "quants Q4_0|quants Q6_K"),
        ("search --vectors 5000", "float32, 32 queries|int8, 1 queries, 1% open"),
    ],
)
def test_a_run(command, labels, tmp_path, capsys, monkeypatch):
    """Every library that is installed computes what selfattn does; the exit code would say if one did not."""
    monkeypatch.setattr(models, "MEGABYTES", 1)
    rows, printed = run(tmp_path, capsys, command)
    assert all(label in printed for label in (*labels.split("|"), "ISA", "of limit", "not installed"))
    for row in rows:
        assert all(peer["times"] for peer in row["peers"].values()), row["notes"]
        assert bool(row["limit"]) == bool(row["peers"]["selfattn"]["limits"])


def test_pretrained_models(tmp_path, capsys, monkeypatch):
    for name in ("selfattn_models", "tokenizers"):
        pytest.importorskip(name, reason=f"needs the package {name}")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "models" / "tests" / "support")
    from language_folders import save_language_model
    from text_folders import add_pipeline, old_pooling, save_bert

    save_bert(tmp_path)
    add_pipeline(tmp_path, old_pooling("mean"), normalize=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    (tmp_path / "corpus.txt").write_text("the sea was calm. a ship sailed over!\n")
    save_language_model(tmp_path / "lm")
    given = f"--encoder {tmp_path} --lm {tmp_path}/lm --corpus {tmp_path}/corpus.txt --peers --dtype int8"
    rows, printed = run(tmp_path, capsys, f"models {given} --answer 2 --suite sentences one prompt answer")
    assert "sentences: 2 x " in printed and "texts/s" in printed and "tokens/s" in printed and len(rows) == 4


@pytest.mark.skipif(not memory.AVAILABLE, reason="VmHWM is Linux's")
def test_memory_of_65536_tokens_forward_and_backward():
    """The window reduces the arithmetic; the memory would be the same without it."""
    case = attention.Case(65536, 64, heads=1, mask="window", gradients=attention.BOTH)
    with peers.Turns(2, 1, 0.0) as turns:
        needed = turns.measure(attention.row_of("long", case, []))["peers"]["selfattn"]["memory"]
    assert 16 << 20 < needed < 32 << 20  # half of the memory is the output, which the pullback holds


def _fails(case, threads):
    if case == "dies":
        os._exit(3)
    return peers.calling(lambda: np.arange(case))


def test_libraries_that_fail_or_differ():
    few, other, dies = (peers.Peer(_fails, case) for case in (2, 3, "dies"))
    row = peers.Row("a", {"selfattn": few, "other": other, "dies": dies}, count=(6, "texts"))
    with peers.Turns(1, 2, 0.0) as turns:
        found = turns.measure(row)
        assert not turns.measure(peers.Row("b", {"selfattn": dies}))["sound"]
    assert not found["sound"]
    assert ["differs" in note for note in found["notes"]] == [False, True]
    assert [len(rounds) for rounds in found["peers"]["other"]["times"].values()] == [2]
    found["peers"]["selfattn"]["times"], found["peers"]["other"]["times"] = (
        {"a": [[3.0, 2.0], [4.0]]},
        {"b": [[9.0], [6.0]]},
    )
    assert table.cells(found, ["other", "dies"]) == [
        "a",
        "2 s",
        "3.25 s",
        "3 texts/s",
        "-",
        "-",
        "3.00x",
        "-",
    ]
