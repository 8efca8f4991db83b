"""The command `selfattn explore`: pages from a trained model and a pretrained one, and errors."""

import pytest
from pages import data_of
from text_folders import add_pipeline, save_bert

from selfattn import files, nn
from selfattn.cli import main
from selfattn.text import WhitespaceTokenizer

pytest.importorskip("safetensors", reason="models are read from safetensors")
pytest.importorskip("tokenizers", reason="pretrained models need tokenizers")


@pytest.fixture
def trained(tmp_path):
    tokenizer = WhitespaceTokenizer(["the", "river", "bank", "loan"])
    model = nn.EmbeddingModel(tokenizer, 5, 8, num_layers=2, num_heads=2, max_seq_len=8, rng=0)
    files.save_model(model, tmp_path / "model")
    return tmp_path / "model"


def test_two_texts_and_a_word(trained, tmp_path, capsys):
    out = tmp_path / "page.html"
    arguments = ["explore", str(trained), "the river bank", "--compare", "the bank loan", "--word", "river"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    data = data_of(out.read_text(encoding="utf-8"))
    assert [text["queries"] for text in data["texts"]] == [["the", "river", "bank"], ["the", "bank", "loan"]]
    assert data["texts"][0]["chosen"] == 1 and data["heads"] == [2, 2]
    assert main([*arguments, "--out", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")


def test_a_pair_of_sentences(tmp_path, capsys):
    save_bert(tmp_path)
    add_pipeline(tmp_path, {"pooling_mode_mean_tokens": True})
    assert main(["explore", str(tmp_path), "a b", "--second", "c", "--out", "-"]) == 0
    (text,) = data_of(capsys.readouterr().out)["texts"]
    assert text["queries"].count("[SEP]") == 2 and text["queries"][0] == "[CLS]"


def test_errors(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explorer.html").write_text("mine", encoding="utf-8")
    for arguments, message in (
        (["the bank"], "explorer.html exists and is not an explorer page; --out chooses another file"),
        (["the bank", "--word", "sea"], "the token 'sea' is not among ['the', 'bank']"),
        (["the bank", "--new-tokens", "3"], "new_tokens is for language models; EmbeddingModel is not one"),
        (["the bank", "--out", "no/such/place.html"], "no/such"),
    ):
        assert main(["explore", str(trained), *arguments]) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "explorer.html").read_text(encoding="utf-8") == "mine"
    assert main(["explore", str(trained), "the bank", "--open", "--out", "-"]) == 2
