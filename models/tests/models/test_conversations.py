"""Conversations keep their cache: the answers of chats that compute all anew, of new tokens alone; several together;
what is refused.
"""

import numpy as np
import pytest
from language_folders import save_language_model

import selfattn_models as models
from selfattn import _core

QUESTIONS = ["the sea", "not the end?", "é 😀"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_language_model(tmp_path_factory.mktemp("chats"), ends=False, max_position_embeddings=512)


@pytest.fixture
def model(folder):
    return models.load(folder)


@pytest.fixture
def entered(monkeypatch):
    """Return a list of how many ids enter each call of the core."""
    found, real = [], _core._transformer_forward

    def forward(model, ids, *rest):
        found.append(len(ids))
        return real(model, ids, *rest)

    monkeypatch.setattr(_core, "_transformer_forward", forward)
    return found


def ids_of(model, messages):
    text = model.chat_prompt(messages)
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_answers_are_those_of_chats_and_only_new_tokens_enter(model, entered):
    conversation, messages, known = model.conversation("a b"), [{"role": "system", "content": "a b"}], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = ids_of(model, messages)
        new = model.generate(prompt, 9).tolist()
        entered.clear()
        answer = conversation.ask(question, 9)
        assert entered == [len(prompt) - common(prompt, known), *[1] * 8]
        assert model.chat(messages, 9, details=True)[:2] == (answer, pytest.approx(new))
        messages.append({"role": "assistant", "content": answer})
        assert conversation.messages == messages
        known = prompt + new[:-1]  # the last token does not enter
        assert conversation.cached_tokens == len(known)
    assert (
        0 < conversation.cached_bytes < 512 * 2 * 2 * 2 * 6 * 4 + 1
    )  # layers, keys and values, heads, width, float32


def test_changed_messages_and_weights(model, entered):
    conversation = model.conversation()
    for question in QUESTIONS[:2]:
        conversation.ask(question, 9)
    conversation.messages[1]["content"] = "b"
    messages = [*conversation.messages, {"role": "user", "content": "c"}]
    entered.clear()
    assert conversation.ask("c", 3) == model.chat(messages, 3)
    begin = len(ids_of(model, messages[:1])) + 1  # "…<|assistant|>", and what the answer began with
    assert len(ids_of(model, messages)) - begin <= entered[0] < len(ids_of(model, messages))
    model.arrays["model.norm.weight"][0] += 1
    messages = [*conversation.messages, {"role": "user", "content": "d"}]
    entered.clear()
    assert conversation.ask("d", 3) == model.chat(messages, 3)
    assert entered[0] == len(ids_of(model, messages))


def test_together_as_alone_to_the_bit(model, threads_restored):
    together, alone = ([model.conversation(system) for system in (None, "a", "b" * 40)] for _ in range(2))
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for turn in range(2):
        how = {"temperature": 0.9, "stop": ["the"]}
        _core.set_num_threads(2)
        answers = model.ask(together, QUESTIONS, 40, **how, rng=7)
        _core.set_num_threads(1)
        assert answers == [
            one.ask(question, 40, **how, rng=7 + n)
            for n, (one, question) in enumerate(zip(alone, QUESTIONS, strict=True))
        ]
        if turn == 0:
            assert model.chat(chats, 40, **how, rng=7)[0] == answers[0]
    assert len(set(answers)) == 3
    for one, other in zip(together, alone, strict=True):
        assert one.messages == other.messages
        n = one.cached_tokens
        np.testing.assert_array_equal(one._prefix.ids, other._prefix.ids)
        for of in ("keys", "values"):
            ours, theirs = (getattr(each._prefix.cache, of)[:, 0, :, :n] for each in (one, other))
            np.testing.assert_array_equal(ours, theirs)
    *pieces, details = model.ask(together, QUESTIONS, 3, stream=True, details=True)
    assert [each.text for each in details] == list(map("".join, zip(*pieces, strict=True)))
    assert [one.messages[-1]["content"] for one in together] == [each.text for each in details]


def test_a_stream_that_is_closed(model):
    conversation = model.conversation()
    whole = model.chat("the sea", 30)
    stream = conversation.ask("the sea", 30, stream=True)
    again = conversation.ask("x", stream=True)
    assert conversation.messages == []
    begun = next(stream)
    with pytest.raises(RuntimeError, match="has not ended"):
        conversation.ask("b")
    with pytest.raises(RuntimeError, match="has not ended"):
        next(again)
    stream.close()
    assert conversation.messages[1] == {"role": "assistant", "content": begun}
    assert whole.startswith(begun)
    late = conversation.ask("x", stream=True)
    conversation.ask("y", 2)
    with pytest.raises(RuntimeError, match="messages of this conversation have changed"):
        next(late)
    assert len(conversation.messages) == 4


def test_a_conversation_beyond_the_context_loses_its_oldest_turns(model):
    conversation = model.conversation("s")
    conversation.ask("a" * 200, 40)
    with pytest.warns(UserWarning, match="its oldest 2 messages are left out"):
        answer = conversation.ask("b" * 270, 40)
    kept = [conversation.messages[0], *conversation.messages[3:4]]
    assert answer == model.chat(kept, 40)
    assert len(conversation.messages) == 5


def test_refusals_leave_messages_as_they_were(model):
    conversation, other = model.conversation(), models.load(model._folder).conversation()
    conversation.ask("a", 2)
    before = list(conversation.messages)
    for call, error, message in [
        (lambda: conversation.ask(5), TypeError, "message 2 must be a dict"),
        (lambda: conversation.ask("a", warm=1), TypeError, r"^ask\(\) got an unexpected keyword .*'warm'"),
        (lambda: conversation.ask("a" * 600), ValueError, "tokens; this model takes 512 at most"),
        (lambda: model.ask([conversation], []), ValueError, "1 conversations and 0 messages"),
        (lambda: model.ask([], []), ValueError, "0 conversations and 0 messages"),
        (lambda: model.ask([conversation] * 2, ["a"] * 2), ValueError, "conversation 1 is given twice"),
        (lambda: model.ask([conversation], "a"), TypeError, "messages must be a list with one for each"),
        (lambda: model.ask([conversation, other], ["a"] * 2), ValueError, "conversation 1 is one of another"),
        (lambda: model.ask(["a"], ["a"]), TypeError, "conversation 0 is 'a'"),
        (lambda: model.chat([[], []]), ValueError, "messages must not be empty"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert conversation.messages == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_caches_of_16_bits(folder, model, dtype, entered):
    conversation = model.conversation()
    conversation.ask("the sea", 9)
    size = conversation.cached_bytes
    model.cache_dtype = dtype
    entered.clear()
    conversation.ask("not", 9)
    assert entered[0] == len(ids_of(model, conversation.messages[:-1]))  # anew, in 16 bits
    assert 2 * conversation.cached_bytes == size
    again = models.load(folder, cache_dtype=dtype).conversation()
    again.ask("the sea", 9)
    assert 2 * again.cached_bytes == size
    with pytest.raises(ValueError, match="cache_dtype must be float32 or float16 or bfloat16, not 'int8'"):
        models.load(folder, cache_dtype="int8")
