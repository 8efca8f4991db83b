"""Language models as text: streams, stops, chats, Ctrl-C, what a folder says; tokenizers that contradict themselves;
ids one by one.
"""

import copy
import itertools
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from language_folders import TEMPLATE, save_language_model, scripted
from refusals import refusals

import selfattn_models as models
from selfattn import views
from selfattn.text import TextStream, spelled
from selfattn_models._tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_language_model(tmp_path_factory.mktemp("language"))


@pytest.fixture
def model(folder):
    return models.load(folder)


ANSWER = "not the é 😀!<|end|>"


def test_texts_ids_and_tokens(model):
    assert model.tokens("not the é") == ["n", "ot", "Ġthe", "Ġ", "Ã©"]
    ids = model.tokenizer.encode("not the é").ids
    np.testing.assert_array_equal(model.logits("not the é"), model.logits(ids))
    np.testing.assert_array_equal(model.hidden_states("not the é")[-1], model.hidden_states(ids)[-1])
    assert model.perplexity("not the é") == model.perplexity(ids)
    assert len(model.steps("not the é").layers) == 2
    text, new = model.generate("not the é", 9), model.generate(ids, 9)
    assert text == model.tokenizer.decode(new.tolist())
    assert model.generate(["not the é", ids], 9)[0] == text
    np.testing.assert_array_equal(model.generate(["not the é", ids], 9)[1], new)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_padding_of_the_tokenizer_does_not_count(model, folder, direction):
    padded = models.load(folder)
    padded.tokenizer.enable_padding(length=20, direction=direction, pad_id=3)
    text = "not the é"
    assert padded.tokens(text) == model.tokens(text)
    np.testing.assert_array_equal(padded.logits(text), model.logits(text))
    assert padded.generate(text, 9) == model.generate(text, 9)
    assert padded.perplexity(text) == model.perplexity(text)
    assert padded.chat("hi", 5) == model.chat("hi", 5)


def test_tokens_of_more_ids_than_the_model_takes(model):
    """A text may be of any length too; a page asks for the tokens of all ids that may come next."""
    assert model.max_positions < len(model.tokens("a" * 300)) == 300
    ids = model.tokenizer.encode("a" * 300).ids
    assert model.tokens(ids) == ["a"] * 300
    assert "Ġ" not in views.explorer(model, "the sea").title


def test_a_text_that_the_tokenizer_cuts_is_a_warning(folder):
    """The tokenizer was set to cut after the model was loaded."""
    model = models.load(folder)
    expected = model.perplexity("not")
    model.tokenizer.enable_truncation(2)
    assert model.perplexity("not") == expected
    said = r"text 0 was cut: .* model.tokenizer.no_truncation\(\) switches it off"
    for name in ("perplexity", "tokens", "logits", "generate", "chat"):
        given = ("not the sea", 1) if name in ("generate", "chat") else ("not the sea",)
        with pytest.warns(UserWarning, match=said):
            getattr(model, name)(*given)


def test_an_answer_ends_at_the_end_token(model):
    scripted(model, ANSWER)
    assert model.generate("x") == "not the é 😀!"
    ids = model.generate([5])
    assert ids[-1] == model.tokenizer.token_to_id("<|end|>")
    assert model.generate("x", 2) == "not"


def test_a_stream_never_splits_a_character(model):
    """The smiley has four bytes in two tokens and two more; é is one token after a space."""
    scripted(model, ANSWER)
    pieces = list(model.generate("x", stream=True))
    assert pieces == ["n", "ot", " the", " ", "é", " ", "😀", "!"]
    scripted(model, ANSWER, "é<|end|>")
    steps = list(model.generate(["x", "y"], stream=True))
    assert steps[0] == ["n", "é"]
    assert ["".join(parts) for parts in zip(*steps, strict=True)] == ["not the é 😀!", "é"]
    scripted(model, ANSWER)
    ids = list(model.generate([5], stream=True))
    assert ids == model.tokenizer.encode(ANSWER).ids
    assert list(model.generate([[5]], stream=True)) == [[[n]] for n in ids]


def test_bytes_that_make_no_character_are_decoded_as_by_the_tokenizer(model):
    for count in range(1, 40):
        text = model.generate("a", count, temperature=5.0, rng=3)  # nearly random bytes
        assert text == "".join(model.generate("a", count, temperature=5.0, rng=3, stream=True))
        ids = model.generate(model.tokenizer.encode("a").ids, count, temperature=5.0, rng=3)
        assert text == model.tokenizer.decode(ids.tolist())


SPECIAL = "ab<|user|>cé<|user|><|user|>d<|end|>"  # such tokens are searched where they are, and never shown
STOPS = [
    (ANSWER, "é", "not the "),
    (ANSWER, ["😀", " 😀"], "not the é"),
    (ANSWER, "t th", "no"),
    (ANSWER, "the é 😁", "not the é 😀!"),
    (ANSWER, ("zz", "!"), "not the é 😀"),
    (ANSWER, "<|end|>", "not the é 😀!"),
    (ANSWER, "n", ""),
    (SPECIAL, "<|user|>", "ab"),
    (SPECIAL, "<|user|>c", "ab"),
    (SPECIAL, "b<|user|>", "a"),
    (SPECIAL, ["<|user|>d", "<|user|><|user|>"], "abcé"),
    (SPECIAL, "é<|user|><|user|>d", "abc"),
    (SPECIAL, "<|user|>x", "abcéd"),
    (SPECIAL, "c<|end|>", "abcéd"),
]


@pytest.mark.parametrize(("answer", "stop", "expected"), STOPS)
def test_stops(model, answer, stop, expected):
    scripted(model, answer)
    assert model.generate("x", stop=stop) == expected
    pieces = list(model.generate("x", stop=stop, stream=True))
    assert "".join(pieces) == expected  # no piece held the begin of a stop
    told = model.generate("x", stop=stop, details=True)
    assert (told.text, told.finish_reason) == (expected, "stop")
    assert type(told.stop_reason) is int or told.stop_reason in stop
    assert all(pieces)


test_texts_that_are_refused = refusals(
    (lambda m: m.generate(""), ValueError, "text 0, '', has no tokens"),
    (lambda m: m.generate(["a", "b\ud800"]), ValueError, r"text 1, .*, is not Unicode: character 1 is"),
    (lambda m: m.logits("a" * 129), ValueError, "text 0 has 129 tokens; this model takes 128 at most"),
    (lambda m: m.generate("a", stop=""), ValueError, "stop must not be empty"),
    (lambda m: m.generate("a", stop=[1]), TypeError, "stop must be a str"),
    (lambda m: m.generate("a", stop=3), TypeError, "stop must be a str or a sequence of str, not 3"),
    (lambda m: m.generate(b"a"), TypeError, "prompt must be a str"),
    (lambda m: m.chat("a" * 129), ValueError, "the chat has 132 tokens"),
    (lambda m: m.chat("a", warm=1), TypeError, "unexpected keyword argument 'warm'"),
    (lambda m: m.chat("a", max_tokens=1), TypeError, "'max_tokens'; its name here is max_new_tokens"),
    (lambda m: m.generate("a", seed=1), TypeError, "'seed'; its name here is rng"),
    (
        lambda m: m.generate("a", suppress_tokens=[1]),
        TypeError,
        "unexpected keyword argument 'suppress_tokens'",
    ),
    (lambda m: m.generate("a", min_length=1), TypeError, "'min_length'; its name here is min_new_tokens"),
    (
        lambda m: m.generate("a", logit_bias=dict.fromkeys(range(266), -np.inf)),
        ValueError,
        "all are -inf; .* do settings forbid every",
    ),
    (lambda m: m.generate("a", logprobs=1), ValueError, "logprobs needs details=True"),
    (
        lambda m: m.generate("a", details=True, logprobs=999),
        ValueError,
        "logprobs needs .* at most 266 tokens, not 999",
    ),
    (lambda m: m.chat("a", details="yes"), TypeError, "details must be True or False, not 'yes'"),
    (lambda m: m.chat("a", top_logprobs=2), TypeError, "'top_logprobs'; its name here is logprobs"),
    (
        lambda m: m.generate("a", logit_bias={" the": 1}),
        ValueError,
        r"has ' the', which is no token; as a text it is \['Ġthe'\]",
    ),
    (
        lambda m: m.generate("a", logit_bias={266: 1}),
        ValueError,
        "logit_bias must have each token below 266, not 266",
    ),
    (
        lambda m: m.generate("a", logit_bias={"a": 1, m.tokenizer.token_to_id("a"): 2}),
        ValueError,
        "each token once",
    ),
    (lambda m: m.generate("a", sampling="yes"), ValueError, "sampling must be 'folder' or None, not 'yes'"),
    (
        lambda m: m.chat([{"role": "user", "content": 3}]),
        TypeError,
        "message 0 has the content 3, neither a str",
    ),
    (
        lambda m: m.generate("abc", max_length=3),
        ValueError,
        "prompt 0 has 3 tokens: max_length, 3, leaves nothing",
    ),
    given="model",
)


def test_sampled_texts_are_the_same_alone(model):
    prompts = ["not", "the end of the", "é"]
    together = model.generate(prompts, 12, temperature=1.0, top_p=0.9, rng=5)
    for i, prompt in enumerate(prompts):
        assert model.generate(prompt, 12, temperature=1.0, top_p=0.9, rng=5 + i) == together[i]
    first, second = (model.generate("not", 12, temperature=1.0, rng=seed) for seed in (1, 2))
    assert first != second


def test_ctrl_c_ends_between_two_tokens(model):
    scripted(model, ANSWER)
    script = model._decoder(1)
    calls, honest = [], script.next_logits

    def interrupted(ids, cache):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return honest(ids, cache)

    script.next_logits = interrupted
    model._decoder = lambda length: script
    with pytest.warns(UserWarning, match="interrupted after 3 new tokens"):
        assert model.generate("x") == "not the"
    calls.clear()
    with pytest.warns(UserWarning, match="interrupted after 3 new tokens"):
        *pieces, told = model.generate("x", stream=True, details=True)
    assert (pieces, told.text, told.finish_reason) == (["n", "ot", " the"], "not the", "abort")
    calls[:] = [1] * 3
    with pytest.warns(models.AnswerInterrupted):
        told = model.generate("x", details=True, logprobs=2)
    assert (told.text, told.logprobs.shape, told.top_token_ids.shape) == ("", (0,), (0, 2))


def test_why_an_answer_ended_and_how_many_tokens_it_took(model):
    ids, end = model.tokenizer.encode(ANSWER).ids, model.tokenizer.token_to_id("<|end|>")
    assert model.generate([5, 6], 2, details=True).text is not None
    scripted(model, ANSWER, "é<|end|>")
    for prompt in ("xyz", [5, 6, 7]):
        told = model.generate(prompt, details=True)
        assert told[:1] + told[2:] == ("not the é 😀!", "stop", end, 3, len(ids), None, None, None)
        assert told.token_ids.tolist() == ids
        assert model.generate(prompt, 2, details=True)[2:6] == ("length", None, 3, 2)
    before = len(model.tokens(model.chat_prompt("hi")))
    assert model.chat("hi", details=True)[2:6] == ("stop", end, before, len(ids))
    with pytest.warns(UserWarning, match="the context of 128 tokens is full"):
        assert model.generate("x" * 127, details=True)[2:6] == ("length", None, 127, 2)
    plain, details = (list(model.generate(["x", [5]], stream=True, details=each)) for each in (False, True))
    assert (details[:-1], [each.text for each in details[-1]]) == (plain, ["not the é 😀!", "é"])
    *pieces, told = model.generate([5], stream=True, details=True)
    assert pieces == told.token_ids.tolist()


def test_log_p_is_that_of_the_logits(model):
    """Whatever chooses the tokens. A row after a cache and one of a whole text differ by the rounding of float32 in two
    layers.
    """
    the, *ids = model.tokenizer.encode(" the end of the").ids
    prompts = ["not", ids, "é"]
    how = {"temperature": 1.5, "presence_penalty": 1, "details": True, "logprobs": 4}
    together = model.generate(prompts, 12, rng=5, logit_bias={"Ġthe": 3}, **how)
    for i, (prompt, told) in enumerate(zip(prompts, together, strict=True)):
        ids = [*(model.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt), *told.token_ids]
        x = model.logits(ids)[len(ids) - len(told.token_ids) - 1 : -1].astype(np.float64)
        log_p = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(told.logprobs, log_p[np.arange(len(x)), told.token_ids], atol=1e-4)
        np.testing.assert_allclose(told.top_logprobs, -np.sort(-log_p)[:, :4], atol=1e-4)
        np.testing.assert_array_equal(told.top_token_ids, np.argsort(-log_p)[:, :4])
        alone = model.generate(prompt, 12, rng=5 + i, logit_bias={the: 3}, **how)
        assert all(np.array_equal(own, other) for own, other in zip(told, alone, strict=True))


def test_a_chat(model):
    prompt = "<|user|>hi<|end|><|assistant|>not<|end|><|user|>why?<|end|><|assistant|>"
    said = ("user", "hi"), ("assistant", "not"), ("user", "why?")
    messages = [{"role": role, "content": content} for role, content in said]
    assert model.chat_prompt(messages) == prompt
    ids = model.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert model.chat(messages, 7) == model.tokenizer.decode(model.generate(ids, 7).tolist())
    assert model.chat_prompt("hi") == "<|user|>hi<|end|><|assistant|>"
    scripted(model, ANSWER)
    assert model.chat("hi") == "not the é 😀!"
    found = json.loads(json.dumps(model.chat("hi", details=True, logprobs=2).to_dict()))
    assert found["text"] == "not the é 😀!" and len(found["token_ids"]) == found["completion_tokens"]
    assert np.shape(found["top_logprobs"]) == (len(found["token_ids"]), 2)
    model.chat_template = "{{ note }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    given = {"chat_template_kwargs": {"note": "not the"}}
    assert model.chat_prompt("hi", **given) == "not the<|user|>hi<|end|>"
    more = (
        model.chat("hi", details=True, **given).prompt_tokens - model.chat("hi", details=True).prompt_tokens
    )
    conversation = model.conversation(**given)
    assert (
        conversation.ask("hi", details=True).prompt_tokens - model.chat("hi", details=True).prompt_tokens
        == more
        > 0
    )
    model.chat_template = TEMPLATE
    assert "".join(model.chat("hi", stream=True, stop="!")) == "not the é 😀"


def test_a_chat_without_room_loses_its_oldest_turns(model):
    said = [{"role": role, "content": f"{n}"} for n in range(500) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "be kind"}, *said, {"role": "user", "content": "why?"}]
    kept = model.chat_prompt([messages[0], *messages[987:]])
    # With 31 of 32 new ones that is 128; with one turn more it would be 136.
    assert len(model.tokens(kept)) == 18 + 7 * 10 + 7
    seen, honest = [], model._encoded
    model._encoded = lambda text, **how: seen.append(text) or honest(text, **how)
    with pytest.warns(UserWarning, match="the chat has 4805 tokens, .* its oldest 986 messages are left out"):
        model.chat(messages, 32)
    assert seen[-2] == kept  # the last is the end of a turn
    with pytest.raises(ValueError, match="the chat has 162 tokens; this model takes 128"):
        model.chat([*messages[:-1], {"role": "user", "content": "a" * 141}])


def test_a_chat_ends_where_its_template_ends_a_turn(model):
    """The end of Qwen's chats is not that of its texts, and some folders name only the latter."""
    scripted(model, "not<|user|>the<|end|>")
    model.chat_template = TEMPLATE.replace("<|end|>", "<|user|>")
    assert model.chat("hi") == "not"
    assert model.generate("hi") == "notthe"
    model.chat_template = model.chat_template.replace("'<|user|>' }}{% endfor", "' <|user|>' }}{% endfor")
    assert model.chat("hi") == "not"
    for template in ("{{ messages[0].content }}", "{{ raise_exception('one at a time') if messages[1] }}a"):
        model.chat_template = template
        assert model.chat("hi") == "notthe"


def test_roles_and_parts_of_messages(model):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert model.chat_prompt([{"role": "user", "content": parts}]) == model.chat_prompt("a\nb")
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ValueError, match=r"message 0 has a part .*image_url.*; this model takes text alone"):
        model.chat([{"role": "user", "content": [*parts, picture]}])
    narrated = [{"role": "narrator", "content": "x"}]
    with pytest.raises(ValueError, match="message 0 has the role 'narrator'; usual roles are system, user"):
        model.chat(narrated)
    model.chat_template += "{# 'narrator' #}"
    assert model.chat_prompt(narrated).startswith("<|narrator|>x")


def test_a_text_that_begins_twice_is_a_warning(model):
    model.special_tokens = {"bos_token": "<|user|>"}
    with pytest.warns(UserWarning, match=r"text 1 begins with <\|user\|> twice"):
        model.generate(["a", "<|user|><|user|>a"], 1)
    model.chat_template = "{{ bos_token }}" + TEMPLATE
    with pytest.warns(UserWarning, match="the chat begins with"):
        model.chat("a", 1)


def told(path, **settings):
    """The folder with a file of generation."""
    (path / "generation_config.json").write_text(json.dumps(settings))
    return models.load(path)


def test_generation_as_the_folder_says(folder, tmp_path):
    """Transformers' arithmetic is tested with the processors and with drawn folders; here is which setting wins."""
    usual = models.load(folder)
    models.save(usual, tmp_path)
    end, how = sorted(usual.stop_ids), {"temperature": 0.7, "top_p": 0.9}
    said = {"do_sample": True, "top_k": 0, "max_new_tokens": 7, "repetition_penalty": 1.5}
    model = told(tmp_path, eos_token_id=end, **said, **how)
    with pytest.warns(UserWarning, match=r"would draw tokens with .*temperature=0.7, .*top_p=0.9"):
        greedy = model.generate("a")
    assert greedy == usual.generate("a", 7, repetition_penalty=1.5) == model.generate("a")  # warned of once
    assert model.generate("a", 9, repetition_penalty=1.0, temperature=0) == usual.generate("a", 9)
    drawn = model.generate("a", sampling="folder", rng=3)
    assert drawn == usual.generate("a", 7, repetition_penalty=1.5, rng=3, **how)
    drawn = model.generate("a", sampling="folder", rng=3, top_p=0.5)
    assert drawn == usual.generate("a", 7, repetition_penalty=1.5, rng=3, **how | {"top_p": 0.5})
    model.generation_config["repetition_penalty"] = 1.2
    models.save(model, tmp_path / "again")
    again = models.load(tmp_path / "again")
    assert (again.generation_config, again.stop_ids) == (model.generation_config, model.stop_ids)
    again.tokenizer = None
    models.save(again, tmp_path / "ids")
    assert models.load(tmp_path / "ids").generation_config == model.generation_config

    model = told(tmp_path, eos_token_id=end, max_length=5, stop_strings=["zz", "a"])
    assert model.generate("a", stop="zz") == usual.generate("a", 4)
    assert model.generate("a") == usual.generate("a", 4, stop="a")
    with pytest.warns(models.FolderWarning, match=r"num_beams=2, penalty_alpha=0.6 is not done here"):
        told(tmp_path, eos_token_id=end, num_beams=2, penalty_alpha=0.6, num_return_sequences=1)
    with pytest.warns(models.FolderWarning, match=r"min_length=2, suppress_tokens=\[3\] is not done here"):
        model = told(tmp_path, eos_token_id=end, suppress_tokens=[3], min_length=2, bad_words_ids=[], **said)
    with pytest.warns(UserWarning, match="would draw"):
        assert model.generate("a") == greedy
    with pytest.raises(
        ValueError, match="the folder sets min_length, suppress_tokens, which is not supported"
    ):
        model.generate("a", sampling="folder")
    models.save(model, tmp_path / "again")
    with pytest.warns(models.FolderWarning, match="suppress_tokens"):
        assert models.load(tmp_path / "again").generation_config == model.generation_config
    with pytest.warns(models.FolderWarning, match="has no eos_token_id; answers end at"):
        assert told(tmp_path, top_k=3).stop_ids == usual.stop_ids
    for wrong in ({"min_p": 3}, {"do_sample": 1}, {"stop_strings": [3]}):
        with pytest.raises(ValueError, match=f"generation_config.json.*{next(iter(wrong)).split('_')[0]}"):
            told(tmp_path, eos_token_id=end, **wrong)


def test_a_template_and_ends_that_were_set_are_saved(folder, tmp_path):
    model = models.load(folder)
    for template, ends in (("new {{ messages[0].content }}", {5, 2}), (None, set()), ("again", {7})):
        model.chat_template, model.stop_ids = template, frozenset(ends)
        models.save(model, tmp_path / "saved")
        again = models.load(tmp_path / "saved")
        assert again.chat_template == template
        assert again.stop_ids == ends
        before = json.loads((folder / "tokenizer_config.json").read_text())
        after = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
        assert before | {"chat_template": 0} == after | {"chat_template": 0}


def test_where_folders_keep_templates_and_ends(folder, tmp_path):
    found = models.load(folder)
    models.save(found, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert models.load(tmp_path).chat_template == TEMPLATE
    settings["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert models.load(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    model = models.load(tmp_path)
    assert model.chat_prompt("hi") == "file <|end|>"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8"):
        models.load(tmp_path)
    assert model.stop_ids == {3, 4}
    for name, content, message in (
        ("generation_config.json", '{"eos_token_id": "3"}', "eos_token_id must be an int"),
        ("generation_config.json", "[1]", "must hold an object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be a text"),
    ):
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path)
        (tmp_path / name).write_text(before)


decoders = tokenizers.decoders
WORDS = ["<unk>", *(f"<0x{n:02X}>" for n in "é中".encode()), "▁", "▁▁", "▁a", "a", "▁é", ".", ""]
PIECES = ["[UNK]", "a", "##b", ".", "'", "s", "n't"]
BYTES = ["a", "Ġ", "Ġa", "Ã", "©", "Ġä", "¸Ń", "Ċ"]
SPACES, STRIP = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
DECODERS = {
    "byte-level": (BYTES, decoders.ByteLevel()),
    "SentencePiece": (WORDS, [SPACES, decoders.ByteFallback(), decoders.Fuse(), STRIP]),
    "SentencePiece without a space first": (WORDS, [SPACES, decoders.ByteFallback(), decoders.Fuse()]),
    "Metaspace": (WORDS, decoders.Metaspace()),
    "WordPiece": (PIECES, decoders.WordPiece()),
    "suffixes": (["a", "a</w>", "b</w>"], decoders.BPEDecoder()),
    "none": (PIECES, None),
}


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data())
@settings(max_examples=150)
def test_texts_of_a_stream_join_to_the_text_of_all_ids(kind, data):
    words, decoder = DECODERS[kind]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}))
    if decoder is not None:
        tokenizer.decoder = decoders.Sequence(decoder) if isinstance(decoder, list) else decoder
    tokenizer.add_special_tokens(["<x>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    one = st.integers(0, tokenizer.get_vocab_size())  # the last has no token
    # "é", "中" in SentencePiece's bytes.
    some = st.one_of(one.map(lambda n: [n]), st.sampled_from([[1, 2], [3, 4, 5]]))
    ids = st.lists(some, max_size=8).map(lambda lists: list(itertools.chain(*lists)))
    before, new, special = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    first = tokenizer.decode(before, skip_special_tokens=not special)
    whole = tokenizer.decode(before + new, skip_special_tokens=not special)
    stream = TextStream(tokenizer, before, skip_special_tokens=not special)
    pieces = [stream.add(n) for n in new]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    if whole.startswith(first) and not first.endswith("\ufffd"):  # no character is half in the prompt
        assert first + "".join(pieces) + stream.finish() == whole


MARKS = ["<s>", "</s>", "<pad>", "<unk>", "<mask>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
LETTERS = ["the", "sea", "Sea", "é", "e", "a", "s", "t", "h", "日"]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def make(kind):
    kinds, steps = tokenizers.models, tokenizers.pre_tokenizers
    words = (
        MARKS
        + LETTERS
        + ["▁"]
        + [f"{'▁' if kind in ('spaces', 'unigram') else '##'}{word}" for word in LETTERS]
    )
    if kind == "bytes":
        words = MARKS + sorted(steps.ByteLevel.alphabet()) + ["Ġs"]
    ids = {word: n for n, word in enumerate(words)}
    if kind == "unigram":
        tokenizer = tokenizers.Tokenizer(kinds.Unigram([(w, -1.0 - 1 / len(w)) for w in words], 3, False))
    elif kind == "pieces":
        tokenizer = tokenizers.Tokenizer(kinds.WordPiece(ids, unk_token="[UNK]"))
        tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    else:
        pair = ("Ġ", "s") if kind == "bytes" else ("s", "▁s")
        tokenizer = tokenizers.Tokenizer(kinds.BPE(ids | {"s▁s": len(ids)}, [pair], unk_token=None))
    own = {"pieces": steps.BertPreTokenizer(), "bytes": steps.ByteLevel()}
    tokenizer.pre_tokenizer = own.get(kind, steps.Metaspace())
    tokenizer.add_special_tokens(MARKS[:4])
    return tokenizer


def test_a_token_that_has_another_id_beside_the_tokenizer_is_an_error(tmp_path):
    tokenizer = make("bytes")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<z>": size + 1}))
    with pytest.raises(ValueError, match=f"the token '<z>' has the id {size + 1} .* and {size} after"):
        load_tokenizer(tmp_path)


def test_a_class_that_makes_another_kind_of_model_is_an_error(tmp_path):
    make("pieces").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ValueError, match=r"a WordPiece model, .* GPT2Tokenizer makes a BPE .* 'PreTrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # nobody names the class
    with pytest.warns(models.FolderWarning, match=r"tokenizer_config.json.*: tokenizer_class$"):
        tokenizer, _ = load_tokenizer(tmp_path)
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["the"]


def test_a_qwen2_folder_has_qwen2s_steps_whatever_class_it_names(tmp_path):
    make("bytes").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert "NFC" in str(load_tokenizer(tmp_path)[0].normalizer)


@pytest.mark.parametrize("name", ["bert", "qwen2", "roberta"])
def test_a_tokenizer_that_its_class_would_change_is_saved_as_it_is(name, tmp_path):
    tokenizer = make("pieces")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = {"bert": models.BertModel, "qwen2": models.LlamaForCausalLM, "roberta": models.RobertaModel}[name]
    model = made(SIZES | {"model_type": name}, rng=0)
    model.tokenizer = tokenizer
    models.save(model, tmp_path)
    assert models.load(tmp_path).tokens("the Sea") == ["the", "Sea"]


def test_steps_and_pages_show_characters():
    model = models.RobertaModel(SIZES | {"vocab_size": 300}, rng=0)
    model.tokenizer = make("bytes")
    tokens = [" s", "e", "<0xC3>", "<0xA9>", "<s>"]
    assert model.tokens("seé<s>") == ["Ġs", "e", "Ã", "©", "<s>"]
    assert list(model.steps("seé<s>").tokens) == tokens
    page = views.explorer(model, "seé<s>", word="<0xA9>").html
    assert "␣s" in page and "Ã" not in page
    assert spelled(make("pieces"), [10, 11 + len(LETTERS)]) == ["the", "##the"]
    assert spelled(make("spaces"), [10, 11 + len(LETTERS), 0]) == ["the", " the", "<s>"]


def test_marks_that_are_cut_are_cut_in_copies_too(tmp_path):
    models.save(models.BertModel(SIZES, rng=0), tmp_path)
    make("pieces").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    model = models.load(tmp_path)
    models.save(copy.deepcopy(model), tmp_path / "again")
    for each in (model, copy.deepcopy(model), models.load(tmp_path / "again")):
        assert "</s>" not in each.tokens("</s>")
