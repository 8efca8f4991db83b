"""Configurations of pretrained models: what is understood, and an error for anything else that would change results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from selfattn._check import Entries
from selfattn._disk import read_json
from selfattn.engine.weights import GROUP

# Keys that change nothing here: how a model was trained, made or is generated from, and what a tokenizer knows.
HARMLESS = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "architectures", "attn_implementation", "auto_map",
    "attention_dropout", "attention_probs_dropout_prob", "bos_token_id", "classifier_dropout", "cls_token_id",
    "decoder_bias", "deterministic_flash_attn", "directionality", "dropout", "dtype", "embedding_dropout",
    "encoder_stride", "eos_token_id", "finetuning_task", "gradient_checkpointing", "hidden_dropout_prob", "id2label",
    "initializer_cutoff_factor", "initializer_factor", "initializer_range", "label2id", "mask_token_id", "mlp_dropout",
    "model_type", "num_labels", "output_past", "pad_token_id", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "problem_type", "qa_dropout", "reference_compile",
    "repad_logits_with_grad", "return_dict", "sbert_ce_default_activation_function", "sentence_transformers",
    "sep_token_id", "seq_classif_dropout", "sparse_pred_ignore_index", "sparse_prediction", "task_specific_params",
    "tie_word_embeddings", "tie_weights_", "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id",
    "use_cache", "gradient_checkpointing_kwargs", "chunk_size_feed_forward", "output_attentions", "output_hidden_states",
    "is_encoder_decoder", "torchscript", "prefix",
}  # fmt: skip

ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip

# Rounded weights, as the library compressed-tensors describes them; and its keys that change nothing here: which tensors are
# rounded shows from the tensors.
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
}
BY_GROUPS = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP}
QUANTIZED_WEIGHTS = BY_GROUPS | {"symmetric": True, "dynamic": False}
QUANTIZED_INPUTS = BY_GROUPS | {"symmetric": False, "dynamic": True}
QUANTIZATION_KEYS = {
    "config_groups", "ignore", "version", "global_compression_ratio", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
}  # fmt: skip

MOST_LAYERS = 10_000  # of models that list something for each layer
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers


class Config(Entries):
    """The configuration of one model."""

    harmless = HARMLESS

    def activation(self, name: str, default: str = "gelu") -> Any:
        """Read the name of an activation."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ValueError(f"{self.where}: {name} must be one of {', '.join(ACTIVATIONS)}, not {value!r}")
        return ACTIVATIONS[value]


def quantization_config(tables: list[str], whole: list[str]) -> dict[str, Any]:
    """Describe int8 weights as the library compressed-tensors does: those of all linear layers but some, and of tables.

    A weight has a scale for each group of a row. What enters a linear layer is rounded to 8 bits with a least number and a step for
    each group of a token; rows of tables are not.
    """
    groups: dict[str, Any] = {
        "group_0": {
            "targets": ["Linear"],
            "weights": QUANTIZED_WEIGHTS,
            "input_activations": QUANTIZED_INPUTS,
        }
    }
    if tables:
        groups["group_1"] = {"targets": tables, "weights": QUANTIZED_WEIGHTS, "input_activations": None}
    return QUANTIZATION | {"config_groups": groups, "ignore": whole}


def check_quantization(config: Config) -> None:
    """Refuse weights that are rounded in another way than :func:`quantization_config` says.

    Raises
    ------
    ValueError
        It names what is not supported.
    """
    found = config.raw("quantization_config")
    if found is None:
        return
    where = f"{config.where}: quantization_config"
    _check(found, QUANTIZATION, where)
    groups = found.get("config_groups")
    _check(groups, {}, where + ".config_groups", groups)
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        _check(group, {}, at, ("targets", "weights", "input_activations", "format"))
        _check(group.get("weights"), QUANTIZED_WEIGHTS, at + ".weights")
        if group.get("input_activations") is not None or "Linear" in (group.get("targets") or ()):
            _check(group.get("input_activations"), QUANTIZED_INPUTS, at + ".input_activations")


def _check(
    found: Any, supported: Mapping[str, Any], where: str, known: Collection[str] = QUANTIZATION_KEYS
) -> None:
    """Refuse other values than these, and other keys that are not known, unless they switch something off."""
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be an object, not {found!r}")
    for name, value in (dict.fromkeys(supported) | found).items():
        if name in supported and value != supported[name]:
            raise ValueError(f"{where}.{name}={value!r} is not supported; only {supported[name]!r} is")
        if name not in supported and name not in known and value not in (None, False, {}, []):
            raise ValueError(f"{where}.{name}={value!r} is not understood here")


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{folder / 'config.json'} does not describe a model: it has no model_type")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{folder / 'config.json'}: architectures must be a list of names, not {names!r}")
    return config
