"""A folder of a tiny random language model with a byte-level tokenizer and a chat template, made without a network."""

import json

import numpy as np
import pytest

import selfattn_models as models

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MERGES = ["Ġ t", "h e", "Ġt he", "o t", "Ã ©", "ð Ł", "ĺ Ģ"]


def make_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + list(map("".join, pairs))
    vocabulary = {token: n for n, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def save_language_model(folder, ends=True, **more):
    """Save a random Llama, the same each time; without an end token it continues until the context is full."""
    pytest.importorskip("safetensors")
    tokenizer = make_tokenizer()
    size = tokenizer.get_vocab_size()
    config = {
        "vocab_size": size,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.4,
        "eos_token_id": tokenizer.token_to_id("<|end|>") if ends else None,
    }
    models.save(models.LlamaForCausalLM(config | more, rng=0), folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    template = TEMPLATE if ends else TEMPLATE.replace("<|end|>", "")  # which would end an answer too
    settings = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings["eos_token"] = "<|end|>" if ends else None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


class Script:
    """A decoder that answers every prompt with given tokens."""

    def __init__(self, model, *texts):
        self.model = model._built(1)[0]
        self.size = model.vocab_size
        self.lines = [model.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    class Cache(list):
        @property
        def lengths(self):
            return np.zeros(len(self), int)

        def keep(self, indices):
            self[:] = [self[i] for i in indices]

    def new_cache(self, sequences):
        return self.Cache(self.lines[n % len(self.lines)] for n in range(sequences))

    def next_logits(self, ids, cache, prompt=False):
        logits = np.zeros((len(ids), self.size), np.float32)
        for row, line in enumerate(cache):
            logits[row, line[0]] = 1
        cache[:] = [line[1:] for line in cache]
        return logits


def scripted(model, *texts):
    """Make a model answer with these texts, token by token."""
    model._decoder = lambda length: Script(model, *texts)
    return model
