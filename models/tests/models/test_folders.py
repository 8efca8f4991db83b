"""Folders that are not what they should be: each a clear error that names what is wrong."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy as safetensors
from hostile import HOSTILE, entry, safetensors_file
from refusals import refusals

import selfattn_models as models

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 9,
}
DISTILBERT = {
    "model_type": "distilbert",
    "vocab_size": 11,
    "dim": 8,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 12,
    "max_position_embeddings": 9,
}
MODERNBERT = BERT | {"model_type": "modernbert", "architectures": ["ModernBertModel"]}
MPNET = BERT | {"model_type": "mpnet", "architectures": ["MPNetModel"]}
ROBERTA = BERT | {"model_type": "roberta", "architectures": ["RobertaModel"]}
VIT = {
    "model_type": "vit",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "image_size": 8,
    "patch_size": 4,
}
DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"} | {"model_type": "dinov2"}
WEIGHTS = "model.safetensors"
NAME = "encoder.layer.0.attention.self.query.weight"


@pytest.fixture
def folder(tmp_path):
    models.save(models.BertModel(BERT, rng=0), tmp_path)
    return tmp_path


# A configuration, what is wrong in it, and words of the error if these are not the key and a plain value.
WRONG = [
    (BERT, {"position_embedding_type": "relative_key"}),
    (BERT, {"hidden_act": "mish"}),
    (BERT, {"hidden_act": ["gelu"]}),
    (BERT, {"is_decoder": True}),
    (BERT, {"transformers_weights": "other.safetensors"}),
    (BERT, {"quantization_config": {"quant_method": "fp8"}}, "fp8", "16 or 32 bits"),
    (DISTILBERT, {"hidden_size": 16}, "hidden_size=16", "dim"),
    (MODERNBERT, {"sliding_window": 4}),
    (VIT, {"head_dim": 2}),
    (BERT, {"add_cross_attention": True}),
    (BERT, {"num_attention_heads": 3}, "num_attention_heads", "3", "hidden_size", "8"),
    (BERT, {"hidden_size": "8"}),
    (BERT, {"hidden_size": -8}),
    (BERT, {"num_hidden_layers": True}),
    (BERT, {"vocab_size": None}),
    (BERT, {"vocab_size": 2**40}),
    (BERT, {"num_hidden_layers": 10**6}, "layer"),
    (BERT, {"layer_norm_eps": "tiny"}),
    (BERT, {"layer_norm_eps": float("nan")}),
    (BERT, {"model_type": "gemma3"}, "gemma3", "bert"),
    (BERT, {"model_type": 3}, "model_type"),
    (BERT, {"model_type": None}),
    (BERT, {"architectures": 3}),
    (BERT, {"architectures": [["BertModel"]]}),
    (BERT, {"architectures": ["BertForMultipleChoice", "BertForSequenceClassification"]}, "classifier"),
    (ROBERTA, {"max_position_embeddings": 2}),
    (ROBERTA, {"pad_token_id": -5}),
    (ROBERTA, {"pad_token_id": "1"}),
    (DISTILBERT, {"activation": "tanh"}),
    (DISTILBERT, {"n_heads": 3}),
    (MPNET, {"relative_attention_num_buckets": 16}),
    (MODERNBERT, {"layer_types": ["full_attention", "chunked_attention"]}),
    (MODERNBERT, {"layer_types": ["chunked_attention"]}, "layer_types", "chunked_attention"),
    (
        MODERNBERT,
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
        "rope_parameters",
        "yarn",
    ),
    (MODERNBERT, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters", "yarn"),
    (
        MODERNBERT,
        {"rope_parameters": {"full_attention": {"rope_theta": "big"}}},
        "full_attention",
        "rope_theta",
        "big",
    ),
    (MODERNBERT, {"rope_scaling": {"type": "linear", "factor": 2}}),
    (MODERNBERT, {"global_rope_theta": 0}),
    (MODERNBERT, {"local_rope_theta": "big"}),
    (VIT, {"image_size": 9}, "image_size", "9", "patch_size", "4"),
    (VIT, {"image_size": [8, 8]}),
    (DINO, {"use_swiglu_ffn": True}),
]


def words_of(change):
    ((key, value),) = change.items()
    return [key, *([str(value)] if isinstance(value, str | int | float) else [])]


def load_with(folder, config):
    values = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    models.load(folder)


test_configurations_that_are_not_understood = refusals(
    *((config | change, words or words_of(change)) for config, change, *words in WRONG),
    given="folder",
    call=load_with,
    ids=[f"{config['model_type']}-{next(iter(change))}-{n}" for n, (config, change, *_) in enumerate(WRONG)],
)


def load_after(folder, damage):
    damage(folder)
    models.load(folder)


def written(name, content):
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def with_arrays(change):
    def damage(folder):
        arrays = safetensors.load_file(folder / WEIGHTS)
        change(arrays)
        safetensors.save_file(arrays, folder / WEIGHTS)

    return damage


def cut_off(folder, keep):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])


def in_a_shard(index):
    def damage(folder):
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 133\n"
)
PAGE = "\n<!DOCTYPE html><html><title>404</title></html>"
ADAPTER = '{"peft_type": "LORA", "base_model_name_or_path": "some/model"}'
FLOATS8 = safetensors_file({"x": entry(0, 1, (1,), "F8_E4M3")}, b"0")
INTEGERS = safetensors_file({"a.weight": entry(0, 8, (1,), "I64")}, bytes(8))

test_files_that_are_damaged_or_lacking_or_not_what_they_seem = refusals(
    (lambda f: (f / "config.json").unlink(), FileNotFoundError, r"config\.json"),
    (lambda f: (f / WEIGHTS).unlink(), FileNotFoundError, r"model\.safetensors"),
    (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        FileNotFoundError,
        r"pytorch_model\.bin.*save_pretrained",
    ),
    (
        lambda f: (f / WEIGHTS).rename(f / "model-00001-of-00002.safetensors"),
        FileNotFoundError,
        r"it has model-00001-of-00002\.safetensors, but no model\.safetensors\.index\.json",
    ),
    *(
        (written("config.json", text), r"config\.json|vocab_size")
        for text in ("", "{", "[]", "3", '{"model_type": "bert"}', "\x00")
    ),
    *((written(WEIGHTS, content), "cut off, damaged or no safetensors") for content in HOSTILE),
    *((lambda f, keep=keep: cut_off(f, keep), "cut off") for keep in (0, 7, 8, 100, 0.5, -1)),
    (written(WEIGHTS, POINTER), "git lfs pull"),
    (written(WEIGHTS, PAGE), "HTML.*download the file again"),
    (written("tokenizer.json", POINTER), "git lfs pull"),
    (written("config.json", PAGE), "config.json is not JSON: it is HTML"),
    (written("adapter_config.json", ADAPTER), "an adapter, LORA for 'some/model'.*merge_and_unload"),
    (written(WEIGHTS, FLOATS8), "x is stored in F8_E4M3.*16 or 32 bits"),
    (written(WEIGHTS, INTEGERS), "a.weight is stored in I64; weights are floats"),
    given="folder",
    call=load_after,
)
test_weights_that_do_not_fit = refusals(
    (with_arrays(lambda a: a.pop(NAME)), [f"missing: {NAME}", "(8, 8)"]),
    (with_arrays(lambda a: a.update({NAME: a[NAME][:, :4].copy()})), [NAME, "(8, 4)", "(8, 8)"]),
    (with_arrays(lambda a: a.update({NAME: a[NAME].ravel()})), [NAME, "(64,)", "(8, 8)"]),
    (with_arrays(lambda a: a.update({NAME: a[NAME].astype(np.int8)})), [NAME]),
    (with_arrays(lambda a: a.update(surprise=np.zeros(3, np.float32))), ["unexpected: surprise", "(3,)"]),
    (
        with_arrays(lambda a: a.update({"encoder.layer.1.output.dense.bias": np.zeros(8, np.float32)})),
        ["encoder.layer.1"],
    ),
    (with_arrays(lambda a: a.clear()), ["missing", NAME]),
    *((in_a_shard(index), "weight_map") for index in ({}, [], {"weight_map": {NAME: 3}})),
    (in_a_shard({"weight_map": {NAME: "../model.safetensors"}}), "not a file of that folder"),
    (in_a_shard({"weight_map": {NAME: "/etc/passwd"}}), "not a file of that folder"),
    (in_a_shard({"weight_map": {NAME: "gone.safetensors"}}), FileNotFoundError, "gone.safetensors"),
    (in_a_shard({"weight_map": {"nobody": "part.safetensors"}}), "nobody"),
    (in_a_shard({"weight_map": {NAME: "part.safetensors"}}), "missing"),
    (lambda f: models.load(f / "nothing"), FileNotFoundError, "does not exist|is not a folder"),
    (lambda f: models.load(f / WEIGHTS), FileNotFoundError, "does not exist|is not a folder"),
    (lambda f: models.load(f, dtype="float16"), "dtype"),
    given="folder",
    call=load_after,
)


def test_a_file_or_folder_that_holds_no_model_says_what_it_is(tmp_path):
    (tmp_path / "model.gguf").write_text(POINTER)
    with pytest.raises(ValueError, match=r"model\.gguf is no model: it is a pointer of Git LFS"):
        models.load(tmp_path / "model.gguf")
    with pytest.raises(
        FileNotFoundError, match=r"no config\.json; to load model\.gguf, give the path of that file"
    ):
        models.load(tmp_path)


@pytest.mark.parametrize("bare", [False, True])
def test_a_head_that_was_trained_apart_from_the_table_is_kept(bare, tmp_path):
    """As Transformers does, whatever the configuration says; equal ones are one."""
    config = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = models.GPT2LMHeadModel(config | {"tie_word_embeddings": False}, rng=0)
    arrays = model.state_dict()
    if bare:
        arrays = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    found = models.GPT2LMHeadModel(config | {"tie_word_embeddings": True}, arrays)
    np.testing.assert_array_equal(found.logits([1, 2, 3]), model.logits([1, 2, 3]))
    models.save(found, tmp_path)
    np.testing.assert_array_equal(models.load(tmp_path).logits([1, 2, 3]), model.logits([1, 2, 3]))
    table = arrays[("" if bare else "transformer.") + "wte.weight"]
    assert models.GPT2LMHeadModel(config, arrays | {"lm_head.weight": table.copy()}).tied


def test_a_tensor_between_two_words_is_copied(folder):
    """A header may have any length, so that numbers are not aligned."""
    content = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size].rstrip(), content[8 + size :]
    expected = models.load(folder).state_dict()
    for more in range(4):
        (folder / WEIGHTS).write_bytes(safetensors_file(header + b" " * more, data))
        for name, array in models.load(folder).parameters().items():
            assert array.flags.aligned
            np.testing.assert_array_equal(array, expected[name])


def test_no_pixels():
    assert models.ViTModel(VIT, rng=0)(np.zeros((0, 3, 8, 8), np.float32)).shape == (0, 5, 8)


test_pixels_that_do_not_fit = refusals(
    (lambda m: m(np.zeros((2, 3, 8, 9), np.float32)), ValueError, r"\(n, 3, 8, 8\).*\(2, 3, 8, 9\)"),
    (lambda m: m(np.zeros((8, 8), np.float32)), ValueError, "shape"),
    (lambda m: m(np.zeros((2, 3, 8, 8), np.uint8)), TypeError, "uint8"),
    (lambda m: m(np.ma.zeros((2, 3, 8, 8), np.float32)), TypeError, "pixels is a MaskedArray"),
    given=lambda: models.ViTModel(VIT, rng=0),
)


def test_saving_what_is_no_model(tmp_path):
    with pytest.raises(TypeError, match="dict"):
        models.save({}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_saving_over_the_folder_that_is_mapped(folder):
    model = models.load(folder)
    model.parameters()[NAME][...] = 3
    models.save(model, folder)
    np.testing.assert_array_equal(models.load(str(folder)).parameters()[NAME], model.parameters()[NAME])
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == set()


def test_a_model_keeps_the_arrays_that_the_core_can_read():
    arrays = models.BertModel(BERT, rng=0).state_dict()
    arrays[NAME] = arrays[NAME].T.copy().T  # not contiguous
    bias = "encoder.layer.0.output.dense.bias"
    arrays[bias] = arrays[bias].astype(np.float16)
    model = models.BertModel(BERT, arrays)
    assert model.parameters()["pooler.dense.weight"] is arrays["pooler.dense.weight"]
    expected = models.BertModel(BERT, rng=0).encode([[1, 2, 3]])
    np.testing.assert_array_equal(model.encode([[1, 2, 3]]), expected)


test_arguments_that_make_no_model = refusals(
    (lambda: models.BertModel(None), TypeError, "config must be a mapping, not NoneType"),
    (lambda: models.BertModel("bert"), TypeError, "config must be a mapping, not str"),
    (lambda: models.BertModel(BERT, [(NAME, np.ones(2))]), TypeError, "arrays must be a mapping, not list"),
    (
        lambda: models.BertModel(BERT, {NAME: np.ma.ones((2, 2))}),
        TypeError,
        "is a MaskedArray; pass a plain array",
    ),
    (lambda: models.BertModel(BERT, {"a": 3}), TypeError, "a must be an ndarray, not int"),
    (
        lambda: models.RobertaModel(BERT, rng=0),
        ValueError,
        "'bert'; RobertaModel takes roberta, xlm-roberta, camembert",
    ),
)


def test_a_configuration_is_copied_with_the_objects_in_it():
    config = BERT | {"id2label": {"0": "no", "1": "yes"}}
    model = models.BertForSequenceClassification(config, rng=0)
    model.config["id2label"]["1"] = "perhaps"
    assert config["id2label"] == {"0": "no", "1": "yes"}


@pytest.mark.parametrize(
    ("kind", "config", "architecture"),
    [
        (models.BertModel, BERT | {"architectures": ["BertForMaskedLM"]}, "BertModel"),
        (models.BertForSequenceClassification, BERT | {"num_labels": 3}, "BertForSequenceClassification"),
        (models.RobertaModel, ROBERTA | {"model_type": "xlm-roberta"}, "XLMRobertaModel"),
        (models.ViTModel, DINO, "Dinov2Model"),
        (models.ViTModel, VIT, "ViTModel"),
    ],
)
def test_a_saved_model_names_its_class(kind, config, architecture, tmp_path):
    models.save(kind(config, rng=0), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [architecture]
    assert type(models.load(tmp_path)) is kind


def test_a_configuration_without_a_type_gets_the_models():
    without = {key: value for key, value in BERT.items() if key != "model_type"}
    assert models.RobertaModel(without, rng=0).config["model_type"] == "roberta"
