"""``selfattn train gpt``: a GPT that is trained on the command line, and loaded as GPT-2; test_cli_models.py has its errors."""

import json

import numpy as np
import pytest
from processes import run_command

from selfattn import cli, models, nn
from selfattn.models.gpt2 import as_gpt2, character_tokenizer
from selfattn.training import checkpoint

pytest.importorskip("tokenizers", reason="the extra 'models' is not installed")
pytest.importorskip("safetensors", reason="the extra 'models' is not installed")

TINY = "--dim 8 --heads 1 --layers 1 --context 8 --steps 1 --quiet"
TEXT = "the sea was calm.\nthe ship sailed on.\n" * 40
SMALL = "--dim 32 --layers 2 --heads 2 --context 24 --batch-size 8 --lr 0.01 --steps 150"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a text and a GPT that the command has trained on it."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "text.txt").write_text(TEXT)
    done = run_command("train", "gpt", "text.txt", "--out", "model", *SMALL.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(TEXT)} characters, {len(set(TEXT))} different; ")
    assert "saved in model after" in done.stdout.splitlines()[-1]
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_it_writes_what_it_has_read(folder, capsys):
    assert {path.name for path in (folder / "model").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert cli.main(["generate", str(folder / "model"), "the sea", "--max-new-tokens", "16"]) == 0
    assert capsys.readouterr().out == " was calm.\nthe s\n"
    assert cli.main(["evaluate", str(folder / "model"), str(folder / "text.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_nll"] < 0.5
    model = models.load(folder / "model")
    assert isinstance(model, models.GPT2LMHeadModel)
    assert model.tokens("sea\n") == ["s", "e", "a", "\n"]
    assert model.tokens("é") == ["\ufffd"]


def test_transformers_loads_the_folder(folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ours = models.load(folder / "model")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder / "model").eval()
    ids = ours.tokenizer.encode("the ship was").ids
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)[None]).logits[0].numpy()
    # A trained model's logits are near 10, and come from sums of up to 128 terms in two layers.
    np.testing.assert_allclose(ours.logits(ids), expected, atol=2e-4)
    theirs_too = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert theirs_too("the ship was")["input_ids"] == ids


def test_training_again_gives_the_same_weights_and_replaces_only_by_force(here, folder, capsys):
    command = ["train", "gpt", "text.txt", "--out", "model", *SMALL.split(), "--quiet"]
    before = (folder / "model" / "model.safetensors").read_bytes()
    assert cli.main(command) == 1
    assert "holds a model: --force replaces it" in capsys.readouterr().err
    assert cli.main([*command, "--force"]) == 0
    assert capsys.readouterr().out == ""
    assert (folder / "model" / "model.safetensors").read_bytes() == before


def test_what_the_loop_refuses_leaves_no_folder(here, tmp_path, capsys, monkeypatch):
    def fit(*args, **options):
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr("selfattn.training.fit", fit)
    assert cli.main(["train", "gpt", "text.txt", "--out", str(tmp_path / "out")]) == 1
    assert "the loss is nan" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_force_begins_anew_only_with_a_text(here, tmp_path, capsys):
    """An unfinished training may be hours of work, so it is deleted only if a new one can begin."""
    unfinished = tmp_path / "unfinished.safetensors"
    checkpoint.save(unfinished, {"a": np.ones(2)})
    for text in ("nothing.txt", "."):
        assert cli.main(["train", "gpt", text, "--out", str(tmp_path), "--force"]) == 1
    assert unfinished.exists()
    assert cli.main(["train", "gpt", "text.txt", "--out", str(tmp_path), "--force", *TINY.split()]) == 0
    assert not unfinished.exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_gpt_is_a_gpt2(tied, activation):
    options = {"dim_feedforward": 20, "activation": activation, "tie_word_embeddings": tied, "rng": 0}
    gpt = nn.GPT(20, 12, 2, 3, 16, **options).eval()
    rng = np.random.default_rng(1)
    for array in gpt.parameters().values():
        array[...] += 0.3 * rng.standard_normal(array.shape).astype(np.float32)
    found, ids = as_gpt2(gpt), rng.integers(0, 20, 16)
    np.testing.assert_array_equal(found.logits(ids), gpt(ids))
    np.testing.assert_array_equal(found.generate(ids[:4], 8), gpt.generate(ids[:4], 8))
    for other in ({"positions": "rotary"}, {"norm_first": False}, {"bias": False}):
        with pytest.raises(ValueError, match="is a GPT-2"):
            as_gpt2(nn.GPT(20, 12, 1, 3, 16, rng=0, **other))


def test_characters():
    tokenizer = character_tokenizer("\n ab\ufffdé😀")
    assert tokenizer.get_vocab_size() == 7
    text = "ab 😀\né"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(text).ids) == 6
