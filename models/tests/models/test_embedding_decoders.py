"""Decoders that make embeddings, in folders as they are published: what sentence-transformers makes of them, and
refusals.
"""

import json
import warnings

import numpy as np
import pytest
import tokenizers
from architectures import LLAMA
from language_folders import make_tokenizer
from refusals import refusals
from text_folders import add_pipeline, old_pooling, random_dense, write_json

import selfattn_models as models

TEXTS = ["the sea", "", "not the calm é 😀 sea but the other, longer than the rest of them", "x = 1;"]
END = "<|end|>"
CONFIG = LLAMA | {"vocab_size": 266, "initializer_range": 0.3, "head_dim": 8, "eos_token_id": None}
PROMPTS = {"query": "Instruct: find the sea\nQuery:", "document": ""}


def save(
    folder, kind="Qwen3Model", begin="", named=(), prompts=PROMPTS, mode="lasttoken", dense=None, **more
):
    """Write a folder whose tokenizer puts an end after each text, and which has Transformers' names without a
    prefix.
    """
    models.save(getattr(models, kind)(CONFIG | more, rng=0), folder)
    change(folder, "config.json", **dict(named))
    tokenizer = make_tokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        f"{begin}$A {END}", None, [(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"eos_token": END, "pad_token": END, "padding_side": "left"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | own)
    pooling = old_pooling(mode, width=24, include_prompt=True)
    lengths = {"max_seq_length": 30, "do_lower_case": False}
    sentence = {"prompts": prompts}
    return add_pipeline(folder, pooling, dense=dense, normalize=True, sentence=sentence, transformer=lengths)


def change(folder, name, **more):
    write_json(folder / name, json.loads((folder / name).read_text()) | more)


FOLDERS = {
    "Qwen3-Embedding": {"named": {"architectures": ["Qwen3ForCausalLM"]}, "tie_word_embeddings": True},
    "E5-Mistral": {
        "kind": "LlamaModel",
        "model_type": "mistral",
        "begin": f"{END} ",
        "sliding_window": 6,
        "prompts": {},
    },
    "EmbeddingGemma": {
        "kind": "Gemma3TextModel",
        "begin": f"{END} ",
        "mode": "mean",
        "use_bidirectional_attention": True,
        "sliding_window": 8,
        "dense": [random_dense(40, 24, "Identity", bias=False), random_dense(24, 40, "Identity", bias=False)],
    },
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.filterwarnings("ignore:.*longer than .* tokens")
def test_embeddings_of_texts_queries_and_cut_texts(name, tmp_path):
    """The same bits alone and in company, also from a folder that was saved here; int8 is near; sentence-transformers
    agrees.
    """
    folder = save(tmp_path / "model", **FOLDERS[name])
    ours, rounded = models.load(folder), models.load(folder, dtype="int8")
    models.save(ours, tmp_path / "again")

    def embeddings(model):
        return np.concatenate([model.encode(TEXTS, prompt="so: "), model.encode_query(TEXTS)])

    y = embeddings(ours)
    np.testing.assert_array_equal(embeddings(models.load(tmp_path / "again")), y)
    np.testing.assert_array_equal(list(map(ours.encode_query, TEXTS)), y[len(TEXTS) :])
    np.testing.assert_array_equal(list(map(rounded.encode, TEXTS)), rounded.encode(TEXTS))
    assert (embeddings(rounded) * y).sum(1).min() > 0.98
    for length in 30, 5:
        ours.max_seq_length = length
        assert len(ours.tokens(TEXTS[2])) == length and ours.tokens(TEXTS[2])[-1] == END
    library = pytest.importorskip("sentence_transformers")
    for each in folder, tmp_path / "again":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = embeddings(library.SentenceTransformer(str(each), device="cpu"))
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def modules(*kinds):
    each = [
        {"path": kind[:n], "type": f"sentence_transformers.models.{kind}"} for n, kind in enumerate(kinds)
    ]
    return lambda folder: write_json(folder / "modules.json", each)


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path)


CHATS = {"message": {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}}
test_what_is_not_supported_is_refused_by_name = refusals(
    (
        lambda f: change(f, "config.json", model_type="gpt2"),
        "makes embeddings or scores with a decoder, gpt2.*supported are llama, .*gemma3",
    ),
    (
        lambda f: change(f, "config.json", model_type="gemma2"),
        "a model of type 'gemma2'; supported are bert, .*qwen3",
    ),
    (lambda f: change(f, "sentence_bert_config.json", modality_config=CHATS), "modality_config of message"),
    (modules("Transformer"), "has no Pooling"),
    (modules("Transformer", "LogitScore"), "LogitScore is not supported"),
    (lambda f: models.load(f, precision="int8"), "precision='int8' is for weights in quants"),
    (lambda f: change(f, "config.json", is_causal="no"), "is_causal must be true or false, not 'no'"),
    (
        lambda f: models.Gemma3TextModel(CONFIG | {"use_bidirectional_attention": "no"}, rng=0),
        "attention must be true or false, not 'no'",
    ),
    (
        lambda f: models.Qwen3ForCausalLM(CONFIG | {"is_causal": False}, rng=0),
        "is_causal=False is not supported",
    ),
    given="folder",
    call=lambda folder, damage: (damage(folder), models.load(folder)),
)


def test_the_name_of_a_bare_model_makes_an_encoder(tmp_path):
    """As sentence-transformers does, with the mean; where it would put texts into a chat template, a warning says
    so.
    """
    models.save(models.LlamaModel(CONFIG, rng=0), tmp_path)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    with pytest.warns(models.FolderWarning, match="put each text into the chat template"):
        ours = models.load(tmp_path)
    assert type(ours) is models.LlamaModel and ours.pipeline.modes == ("mean",)
    assert next(iter(ours.parameters())) == "embed_tokens.weight"
