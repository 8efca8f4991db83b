"""The commands generate, chat and evaluate, as a user would type them, and ``train gpt``, whose GPT is loaded as
GPT-2.
"""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from language_folders import save_language_model, scripted
from processes import COMMAND, finish, run_command, start

import selfattn_models as models
from selfattn import nn
from selfattn.cli import streams
from selfattn.training import checkpoint
from selfattn_models.cli import language
from selfattn_models.gpt2 import as_gpt2, character_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_language_model(tmp_path_factory.mktemp("language"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


def test_generate(folder, model, monkeypatch, run):
    command = ["generate", folder, "not the", "--max-new-tokens", "9"]
    assert run(*command) == (model.generate("not the", 9) + "\n", "")
    how = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2}
    options = [text for name, value in how.items() for text in (f"--{name.replace('_', '-')}", value)]
    expected = model.generate("not the", 9, rng=5, **how)
    assert run(*command, "--seed", "5", *options) == (expected + "\n", "")
    seen, real = [], models.load
    monkeypatch.setattr(models, "load", lambda *given, **how: seen.append(real(*given, **how)) or seen[0])
    run(*command, "--cache-dtype", "bfloat16")
    assert seen[0].cache_dtype == "bfloat16"


def test_generate_from_standard_input_and_with_stops(folder, model):
    for end in ("\n", "\r\n"):  # the last one is the pipe's
        done = run_command("generate", folder, "-", "--max-new-tokens", "5", given=f"the é\n{end}")
        assert (done.returncode, done.stdout, done.stderr) == (0, model.generate("the é\n", 5) + "\n", "")
    whole = model.generate("a", 30)
    at = whole.index(whole[10])
    stops = "--stop", whole[10], "--stop", "zzz"
    done = run_command("generate", folder, "a", "--max-new-tokens", "30", *stops)
    assert done.stdout == whole[:at] + "\n"


def test_answers_as_lines_of_json(folder, model, run):
    end = model.tokenizer.token_to_id("<|end|>")
    how = {"min_p": 0.1, "presence_penalty": -0.5, "frequency_penalty": 0.25, "temperature": 2.0}
    options = [text for name, value in how.items() for text in (f"--{name.replace('_', '-')}", value)]
    options += f"--logit-bias {end}=-inf --logit-bias Ġthe=9 --seed 3 --max-new-tokens 6 --json".split()
    how |= {"logit_bias": {end: -math.inf, "Ġthe": 9}, "max_new_tokens": 6, "details": True}
    told = json.loads(run("generate", folder, "not", *options, "--logprobs", 2).out)
    expected = model.generate("not", rng=3, logprobs=2, **how)
    for name, value in expected._asdict().items():
        np.testing.assert_array_equal(told[name], value)
    done = run_command("chat", folder, *options, given="hi\nand?\n")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["text"] == model.chat("hi", rng=3, **how).text
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]  # which is before it


def test_chat_lines(folder, model, monkeypatch, tmp_path):
    """Each line of a pipe is a message, and the chat contains the previous answers."""
    first = model.chat("hi", 6)
    said = ("user", "hi"), ("assistant", first), ("user", "and?")
    messages = [{"role": role, "content": content} for role, content in said]
    whole = model.chat("hi", 30)
    options = "--max-new-tokens", "30", "--stop", whole[5], "--seed", "4"
    done = run_command("chat", folder, *options, given="hi\n")
    assert done.stdout == whole[: whole.index(whole[5])] + "\n"
    done = run_command("chat", folder, "--max-new-tokens", "6", given="hi\n\nand?\n")
    assert (done.returncode, done.stdout) == (0, first + "\n" + model.chat(messages, 6) + "\n")


def test_a_program_may_chat_line_by_line(folder, model):
    """The program waits for an answer before it writes its next message, so the command must not read input to its
    end.
    """
    process = start([*COMMAND, "chat", folder, "--max-new-tokens", "6"], stdin=subprocess.PIPE, text=True)
    process.stdin.write("\ufeffhi\n")
    process.stdin.flush()
    answer = model.chat("hi", 6) + "\n"
    found = "".join(process.stdout.readline() for _ in range(answer.count("\n")))
    assert found == answer
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()
    process.stderr.close()


def test_chat_on_a_terminal(folder, monkeypatch, run):
    typed = iter(["hello", "   ", "x" * 3000, "again", EOFError()])

    def typing(prompt):
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, Exception):
            raise line
        return line

    answering = scripted(models.load(folder), "not the é<|end|>")
    seen, honest = [], answering.chat_prompt
    answering.chat_prompt = lambda messages: seen.append(list(messages)) or honest(messages)
    monkeypatch.setattr(language, "load", lambda *_: answering)
    monkeypatch.setattr("builtins.input", typing)
    monkeypatch.setattr(streams, "is_terminal", lambda stream: True)
    out, err = run("chat", folder, "--system", "be kind")
    assert out == "not the é\nnot the é\n\n"
    assert "the chat has 30" in err  # a message that is too long is reported and left out; the chat continues
    assert [message["content"] for message in seen[-1]] == ["be kind", "hello", "not the é", "again"]
    how = []
    ask = lambda self, _, **given: how.append(given["sampling"]) or iter(["a"])  # noqa: E731
    monkeypatch.setattr(models.Conversation, "ask", ask)
    # A person gets what the folder says; programs get the same answer each time.
    for terminal in (True, False):
        monkeypatch.setattr(streams, "is_terminal", lambda stream, terminal=terminal: terminal)
        monkeypatch.setattr(language, "_lines", lambda: iter(["hello"]))
        run("chat", folder)
    assert how == ["folder", None]


def test_the_prompt_of_a_chat_is_not_among_the_answers(folder, model, tmp_path):
    """``selfattn chat MODEL > answers.txt``, with somebody at the keyboard."""
    ours, theirs = os.openpty()
    with (tmp_path / "answers.txt").open("w") as answers:
        command = [*COMMAND, "chat", folder, "--max-new-tokens", "6"]
        process = start(command, stdin=theirs, stdout=answers, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"hi\n\x04")
    assert process.wait(60) == 0
    assert os.read(ours, 100).count(b"> ") == 2
    os.close(ours)
    assert (tmp_path / "answers.txt").read_text() == model.chat("hi", 6) + "\n"


def test_evaluate(folder, model, tmp_path, run):
    path = tmp_path / "text.txt"
    path.write_text("the sea was not calm é", encoding="utf-8")
    expected = model.evaluate("the sea was not calm é")
    out = run("evaluate", folder, path).out
    assert out.startswith(f"perplexity {expected['perplexity']:.6g} ")
    assert f"{expected['mean_nll']:.4f} nats   {expected['tokens']} tokens" in out
    windows = "--tokens", "9", "--window", "6", "--stride", "2", "--json"
    found = json.loads(run("evaluate", folder, path, *windows).out)
    assert found == model.evaluate("the sea was not calm é", window=6, stride=2, most_tokens=9)
    assert math.log(found["perplexity"]) == pytest.approx(found["mean_nll"])
    assert found["tokens"] == 8


def interrupted(folder, *command, given=""):
    """Press Ctrl-C when there is some output; the answer is longer than a pipe holds, so the command has not ended."""
    folder = save_language_model(folder, ends=False, max_position_embeddings=2**18)
    command = [*COMMAND, command[0], folder, *command[1:], "--max-new-tokens", "200000", "--temperature", "1"]
    process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(given)
    process.stdin.flush()
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    return done.stderr


def test_ctrl_c_prints_what_there_is(tmp_path):
    assert "selfattn generate: interrupted" in interrupted(tmp_path, "generate", "a")


def test_ctrl_c_ends_a_chat_of_lines(tmp_path):
    """With lines from a pipe, nobody can continue: each later line would have to be stopped too."""
    assert interrupted(tmp_path, "chat", given="one\ntwo\nthree\n").count("interrupted") == 1


def test_a_chat_without_readline(folder, monkeypatch, run):
    """Some builds of Python lack readline."""
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr(streams, "is_terminal", lambda stream: True)
    monkeypatch.setattr("builtins.input", lambda _: (_ for _ in ()).throw(EOFError))
    assert run("chat", folder) == ("\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "MODEL", "a", "--temperature", "inf"), 1, "temperature must be"),
        (("generate", "MODEL", "a", "--top-p", "2"), 1, "top_p must be"),
        (("generate", "MODEL", "a", "--seed", "-1"), 1, "--seed must not be negative"),
        (("generate", "MODEL", ""), 1, "has no tokens"),
        (("generate", "MODEL", "a", "--stop", ""), 1, "stop must not be empty"),
        (("generate", "MODEL", "a", "--top-k", "0"), 2, "must be at least 1"),
        (("generate", "MODEL", "a", "--logprobs", "1"), 2, "--logprobs needs --json"),
        (("generate", "MODEL", "a", "--logit-bias", "5"), 2, "must be a token, = and a number, not '5'"),
        (("generate", "nothing", "a"), 1, "nothing does not exist; expected a folder"),
        (("info", "MODEL"), 1, "selfattn info: error: [Errno 21] Is a directory"),
        (("evaluate", "MODEL", "nothing.txt"), 1, "there is no file nothing.txt"),
        (("evaluate", "MODEL", "MODEL/model.safetensors"), 1, "is not UTF-8"),
        (("evaluate", "MODEL", "MODEL/config.json", "--window", "99999"), 1, "window must be at most"),
        (("generate", "MODEL", "a", "--dtype", "int4"), 2, "invalid choice"),
        (("generate", "MODEL", "a", "--precision", "int8"), 1, "precision='int8' is for weights in quants"),
    ],
)
def test_errors_are_one_line(folder, arguments, code, message, monkeypatch, tmp_path, run):
    monkeypatch.chdir(tmp_path)
    out, err = run(*(each.replace("MODEL", str(folder)) for each in arguments), code=code)
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_other_models_are_none(tmp_path, run):
    config = {
        "model_type": "bert",
        "vocab_size": 9,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
    }
    models.save(models.BertModel(config, rng=0), tmp_path)
    err = run("generate", tmp_path, "a", code=1).err
    assert "holds a BertModel, which is not a language model" in err


TINY = "--dim 8 --heads 1 --layers 1 --context 8 --steps 1 --quiet"
TEXT = "the sea was calm.\nthe ship sailed on.\n" * 40
SMALL = "--dim 32 --layers 2 --heads 2 --context 24 --batch-size 8 --lr 0.01 --steps 150"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a trained with a text and a GPT that the command has trained on it."""
    trained = tmp_path_factory.mktemp("gpt")
    (trained / "text.txt").write_text(TEXT)
    done = run_command("train", "gpt", "text.txt", "--out", "model", *SMALL.split(), cwd=trained)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(TEXT)} characters, {len(set(TEXT))} different; ")
    assert "saved in model after" in done.stdout.splitlines()[-1]
    return trained


@pytest.fixture
def beside(trained, monkeypatch):
    monkeypatch.chdir(trained)


def test_it_writes_what_it_has_read(trained, run):
    assert {path.name for path in (trained / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    written = run("generate", trained / "model", "the sea", "--max-new-tokens", "16").out
    assert written == " was calm.\nthe s\n"
    told = run("evaluate", trained / "model", trained / "text.txt", "--json").out
    assert json.loads(told)["mean_nll"] < 0.5
    model = models.load(trained / "model")
    assert isinstance(model, models.GPT2LMHeadModel)
    assert model.tokens("sea\n") == ["s", "e", "a", "\n"]
    assert model.tokens("é") == ["\ufffd"]


def test_transformers_loads_the_folder(trained):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ours = models.load(trained / "model")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(trained / "model").eval()
    ids = ours.tokenizer.encode("the ship was").ids
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)[None]).logits[0].numpy()
    # A trained model's logits are near 10, and come from sums of up to 128 terms in two layers.
    np.testing.assert_allclose(ours.logits(ids), expected, atol=2e-4)
    theirs_too = transformers.AutoTokenizer.from_pretrained(trained / "model")
    assert theirs_too("the ship was")["input_ids"] == ids


def test_training_again_gives_the_same_weights_and_replaces_only_by_force(beside, trained, run):
    command = ["train", "gpt", "text.txt", "--out", "model", *SMALL.split(), "--quiet"]
    before = (trained / "model" / "model.safetensors").read_bytes()
    assert "holds a model: --force replaces it" in run(*command, code=1).err
    assert run(*command, "--force").out == ""
    assert (trained / "model" / "model.safetensors").read_bytes() == before


def test_what_the_loop_refuses_leaves_no_folder(beside, tmp_path, monkeypatch, run):
    def fit(*args, **options):
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr("selfattn.training.fit", fit)
    assert "the loss is nan" in run("train", "gpt", "text.txt", "--out", tmp_path / "out", code=1).err
    assert not (tmp_path / "out").exists()


def test_force_begins_anew_only_with_a_text(beside, tmp_path, run):
    """An unfinished training may be hours of work, so it is deleted only if a new one can begin."""
    unfinished = tmp_path / "unfinished.safetensors"
    checkpoint.save(unfinished, {"a": np.ones(2)})
    for text in ("nothing.txt", "."):
        run("train", "gpt", text, "--out", tmp_path, "--force", code=1)
    assert unfinished.exists()
    run("train", "gpt", "text.txt", "--out", tmp_path, "--force", *TINY.split())
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


def test_a_gpt_is_saved_as_a_folder(tmp_path):
    """And so is an EmbeddingModel; what Transformers has no model of is refused by what it lacks."""
    gpt, ids = nn.GPT(5, 12, 1, 3, 16, dropout=0.25, rng=0).eval(), [1, 2, 3]
    models.save(gpt, tmp_path / "gpt", character_tokenizer("abcd"))
    found = models.load(tmp_path / "gpt")
    np.testing.assert_array_equal(found.logits(ids), gpt(ids))
    assert found.tokenizer.encode("ab").ids == [1, 2]
    for other, lacks in (
        ({"positions": "rotary"}, r'positions="learned"'),
        ({"norm_first": False}, "norm_first=True"),
        ({"bias": False, "positions": "rotary"}, r'positions="learned", bias=True'),
    ):
        with pytest.raises(ValueError, match=f"it lacks {lacks}$"):
            models.save(nn.GPT(5, 12, 1, 3, 16, rng=0, **other), tmp_path / "other")
    with pytest.raises(ValueError, match="it lacks weights of floats"):
        models.save(gpt.quantize("int8"), tmp_path / "other")
    with pytest.raises(TypeError, match="tokenizer is for a GPT"):
        models.save(found, tmp_path / "other", character_tokenizer("abcd"))
    assert not (tmp_path / "other").exists()
    model = nn.EmbeddingModel(str.split, 5, 4, max_seq_len=8, rng=0)
    models.save(model, tmp_path / "own")
    assert (tmp_path / "own" / "model.safetensors").exists()


def test_transformers_opens_the_folder_of_a_gpt(tmp_path):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    gpt, ids = nn.GPT(5, 12, 1, 3, 16, dropout=0.25, rng=0).eval(), [1, 2, 3]
    models.save(
        gpt, tmp_path, transformers.PreTrainedTokenizerFast(tokenizer_object=character_tokenizer("abcd"))
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    # logits below 1, of sums of 12 products
    np.testing.assert_allclose(theirs(torch.tensor([ids])).logits[0].detach(), gpt(ids), rtol=0, atol=1e-5)
    assert theirs.config.resid_pdrop == theirs.config.attn_pdrop == 0.25


def test_characters():
    tokenizer = character_tokenizer("\n ab\ufffdé😀")
    assert tokenizer.get_vocab_size() == 7
    text = "ab 😀\né"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(text).ids) == 6
