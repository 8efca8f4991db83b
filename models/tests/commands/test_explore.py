"""`selfattn explore`: what it writes, where, and what it refuses."""

import pytest
from pages import data_of

from selfattn import files, nn
from selfattn.text import WhitespaceTokenizer


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(tmp_path):
    tokenizer = WhitespaceTokenizer(["the", "river", "bank", "loan"])
    model = nn.EmbeddingModel(tokenizer, 5, 8, num_layers=2, num_heads=2, max_seq_len=8, rng=0)
    files.save_model(model, tmp_path / "model")
    return tmp_path / "model"


def test_two_texts_and_a_word(trained, tmp_path, run):
    out = tmp_path / "page.html"
    arguments = ["explore", str(trained), "the river bank", "--compare", "the bank loan", "--word", "river"]
    assert run(*arguments, "--out", out).out.strip() == str(out)
    data = data_of(out.read_text(encoding="utf-8"))
    assert [text["queries"] for text in data["texts"]] == [["the", "river", "bank"], ["the", "bank", "loan"]]
    assert data["texts"][0]["chosen"] == 1 and data["heads"] == [2, 2]
    assert run(*arguments, "--out", "-").out.startswith("<!DOCTYPE html>")


def test_a_pair_of_sentences(tmp_path, run):
    from text_folders import add_pipeline, save_bert

    save_bert(tmp_path)
    add_pipeline(tmp_path, {"pooling_mode_mean_tokens": True})
    (text,) = data_of(run("explore", tmp_path, "a b", "--second", "c", "--out", "-").out)["texts"]
    assert text["queries"].count("[SEP]") == 2 and text["queries"][0] == "[CLS]"


def test_errors_of_explore(trained, tmp_path, run):
    (tmp_path / "explorer.html").write_text("mine", encoding="utf-8")
    for arguments, message in (
        (["the bank"], "explorer.html exists and is not an explorer page; --out chooses another file"),
        (["the bank", "--word", "sea"], "the token 'sea' is not among ['the', 'bank']"),
        (["the bank", "--new-tokens", "3"], "new_tokens is for language models; EmbeddingModel is not one"),
        (["the bank", "--out", "no/such/place.html"], "no/such"),
    ):
        assert message in run("explore", trained, *arguments, code=1).err
    assert (tmp_path / "explorer.html").read_text(encoding="utf-8") == "mine"
    run("explore", trained, "the bank", "--open", "--out", "-", code=2)
