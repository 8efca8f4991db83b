"""What the files of a folder may say: each key is obeyed, of no effect here, or refused; all others are in one warning.

Obeyed are the keys that code reads. The others that Transformers, sentence-transformers or llama.cpp act on are listed here, by
file: those of no effect by their reason, and those that are refused with the value that switches them off.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class FolderWarning(UserWarning):
    """A folder or a file of a model has settings that are not known here."""


class Rows(NamedTuple):
    """What a file may say beyond what is obeyed."""

    # Reasons, each with the keys that have no effect for it, separated by spaces; * stands for any characters.
    no_effect: Mapping[str, str] = MappingProxyType({})
    # Keys that would change results, with the value that switches them off, or a tuple of such values. * is any other key.
    refused: Mapping[str, Any] = MappingProxyType({})

    def without_effect(self, key: str) -> bool:
        """Tell whether a key changes nothing here."""
        patterns = " ".join(self.no_effect.values()).split()
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)

    def with_more(self, other: Rows) -> Rows:
        """Return the rows of both."""
        return Rows({**self.no_effect, **other.no_effect}, {**self.refused, **other.refused})


NOTES = "names, versions and notes"
TRAINING = "training, and how new parameters are drawn"
OUTPUTS = "how results are computed, kept and returned"
TASKS = "other tasks and their heads"
SIZES = "sizes and kinds that the weights show"
TEXT = "said by the tokenizer's files, or by generation_config.json"

CONFIG = Rows(
    {
        NOTES: "_* auto_map finetuning_task gradient_checkpointing_kwargs transformers_version transformers.js_config "
        "sentence_transformers tokenizer_class",
        TRAINING: "attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout drop_path_rate dropout embd_pdrop "
        "embedding_dropout gradient_checkpointing hidden_dropout_prob initializer_cutoff_factor initializer_factor "
        "initializer_range layerscale_value mlp_dropout pretraining_tp qa_dropout resid_pdrop seq_classif_dropout "
        "sinusoidal_pos_embds summary_first_dropout",
        OUTPUTS: "attn_implementation chunk_size_feed_forward deterministic_flash_attn dtype output_attentions output_hidden_states "
        "output_past reference_compile reorder_and_upcast_attn repad_logits_with_grad return_dict torch_dtype torchscript use_cache",
        TASKS: "apply_layernorm decoder_bias encoder_stride is_encoder_decoder label2id out_features out_indices pooler_act "
        "pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_output_size pooler_size_per_head pooler_type "
        "problem_type reshape_hidden_states sbert_ce_default_activation_function sparse_pred_ignore_index sparse_prediction "
        "stage_names summary_activation summary_proj_to_labels summary_type summary_use_proj task_specific_params use_mask_token "
        "classifier_activation classifier_bias classifier_pooling id2label num_labels",
        SIZES: "directionality n_ctx tie_weights_ tie_word_embeddings",
        TEXT: "bos_token_id cls_token_id eos_token_id mask_token_id pad_token_id prefix sep_token_id unk_token_id",
    },
    {"add_cross_attention": False, "is_decoder": False, "pruned_heads": {}, "seq_classif_activation": None},
)
BERT = Rows({}, {"position_embedding_type": "absolute"})

# What GGUF has for other architectures, and changes results: numbers that are 1 without an effect, and 0.
FACTORS = "attention.output_scale embedding_scale expert_weights_scale logit_scale residual_scale"
ABSENT = (
    "activation_sparsity_scale altup.active_idx altup.num_inputs attention.clamp_kqv attention.key_length_mla "
    "attention.key_length_swa attention.kv_lora_rank attention.max_alibi_bias attention.q_lora_rank attention.scale "
    "attention.shared_kv_layers attention.sliding_window_pattern attention.temperature_length attention.temperature_scale "
    "attention.value_length_mla attention.value_length_swa attn_logit_softcapping embedding_length_out "
    "embedding_length_per_layer_input expert_chunk_feed_forward_length expert_count expert_feed_forward_length "
    "expert_gating_func expert_group_count expert_group_scale expert_group_used_count expert_shared_count "
    "expert_shared_feed_forward_length expert_used_count expert_weights_norm experts_per_group final_logit_softcapping "
    "full_attention_interval interleave_moe_layer_step leading_dense_block_count moe_every_n_layers moe_latent_size "
    "n_deepstack_layers nextn_predict_layers pooling_type rescale_every_n_layers rope.dimension_sections rope.freq_base_swa "
    "rope.scaling.alpha rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
    "rope.scaling.yarn_ext_factor router_logit_softcapping swiglu_clamp_exp swiglu_clamp_shexp swin_norm "
    "use_parallel_residual"
)

TABLE: dict[str, Rows] = {
    "config.json": CONFIG,
    "config.json of bert": BERT,
    "config.json of camembert": BERT,
    "config.json of roberta": BERT,
    "config.json of xlm-roberta": BERT,
    "config.json of modernbert": Rows({"older versions wrote it without reading it": "layer_norm_eps position_embedding_type"}),
    "config.json of mpnet": Rows({}, {"relative_attention_num_buckets": 32}),
    "config.json of dinov2": Rows({}, {"use_swiglu_ffn": False}),
    "generation_config.json": Rows(),
    "tokenizer_config.json": Rows(),
    "special_tokens_map.json": Rows(),
    "sentence_bert_config.json": Rows(),
    "arguments of sentence_bert_config.json": Rows(
        {
            OUTPUTS: "add_pooling_layer attn_implementation dtype torch_dtype unpad_inputs",
            "code of a folder is never run": "trust_remote_code",
        },
        {"*": (False, "", {}, [])},
    ),
    "config_sentence_transformers.json": Rows(),
    "Pooling": Rows({SIZES: "embedding_dimension word_embedding_dimension"}),
    "Dense": Rows(),
    "Normalize": Rows(),
    "adapter_config.json": Rows(),
    "GGUF": Rows(  # entries that belong to neither of the next two
        {
            NOTES: "general.* imatrix.* quantize.* split.*",
            "one template is used, tokenizer.chat_template": "tokenizer.chat_template tokenizer.chat_template.* tokenizer.chat_templates",
            "the tokens and merges say the same": "tokenizer.huggingface.json tokenizer.rwkv.world",
            "of models of images and of other architectures": "clip.* xielu.* diffusion.*",
            "of adapters, which are refused": "adapter.*",
        }
    ),
    "GGUF: tokenizer.ggml": Rows(
        {
            "marks for filling in a middle, which a prompt may hold": "fim_*_token_id middle_token_id prefix_token_id suffix_token_id",
            "of tokenizers that are not supported": "precompiled_charsmap remove_extra_whitespaces token_type_count",
        },
        {"add_sep_token": False},
    ),
    "GGUF: architecture": Rows(
        {
            SIZES: "rope.dimension_count_swa rope.scaling.finetuned rope.scaling.yarn_log_multiplier tensor_data_layout vocab_size",
            "of other architectures": "attention.decay_lora_rank attention.gate_lora_rank attention.group_norm_* attention.iclr_lora_rank "
            "attention.indexer.* attention.relative_buckets_count attention.value_residual_mix_lora_rank classifier.* convnext.* decoder_* "
            "features_length kda.* posnet.* shortconv.* ssm.* time_* token_shift_count wkv.* xielu.*",
        },
        {"attention.causal": True} | dict.fromkeys(FACTORS.split(), 1) | dict.fromkeys(ABSENT.split(), 0),
    ),
}  # fmt: skip


def rows(name: str, kind: str = "") -> Rows:
    """Return the rows of a file by its name, or of one kind of its contents."""
    return TABLE.get(name, Rows()).with_more(TABLE.get(f"{name} of {kind}", Rows()))
