"""What the files of a folder may say: each key is obeyed, of no effect here, or refused; all others are in one warning.

Obeyed are the keys that code reads. The others that Transformers, sentence-transformers or llama.cpp act on are
listed here, by file: those of no effect by their reason, and those that are refused with the value that switches them
off.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from selfattn.engine.sampling import TRANSFORMERS


class FolderWarning(UserWarning):
    """A folder or a file of a model has settings that are not known here."""


class Rows(NamedTuple):
    """What a file may say beyond what is obeyed."""

    # Reasons, each with the keys that have no effect for it, separated by spaces; * stands for any characters.
    no_effect: Mapping[str, str] = MappingProxyType({})
    # Keys that would change results, with the value that switches them off, or a tuple of such values. * is any other
    # key.
    refused: Mapping[str, Any] = MappingProxyType({})
    aliases: Mapping[str, str] = MappingProxyType({})  # other names of keys

    def without_effect(self, key: str) -> bool:
        """Tell whether a key changes nothing here."""
        patterns = " ".join(self.no_effect.values()).split()
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


NOTES = "names, versions and notes"
TRAINING = "training, and how new parameters are drawn"
OUTPUTS = "how results are computed, kept and returned"
TASKS = "other tasks and their heads, and labels"
SIZES = "sizes and kinds that the weights show"
TEXT = "the tokenizer's files or generation_config.json say it; eos_token_id counts where neither does"
GENERATION = "language models obey it if there is no generation_config.json, as in Transformers"
UNREAD = "Transformers does not read it"
SCORES = "predict returns logits; rank applies it"

# Settings of generation: those that are obeyed, and those that are not done, with the value that switches them off:
# others are in a warning. Those of `REMOVED` were obeyed once: answers would not be the folder's, so that it is also
# refused under sampling="folder". Then those of searches with beams, of an assistant, with which the same answers
# come faster, and about results.
SETTINGS = (*TRANSFORMERS, "do_sample", "max_length", "max_new_tokens", "stop_strings")
REMOVED = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "suppress_tokens": None,
}
NOT_DONE = {
    **REMOVED,
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1,
    "max_time": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "remove_invalid_values": False,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}
BEAMS = "diversity_penalty early_stopping length_penalty num_beam_groups"
ASSISTANT = (
    "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind "
    "is_assistant max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
    "prompt_lookup_num_tokens speculation_type target_lookbehind use_mtp"
)
ANSWERS = "output_logits output_scores renormalize_logits return_dict_in_generate"

CONFIG = Rows(
    {
        NOTES: "_* auto_map finetuning_task name_or_path tokenizer_class transformers.js_config "
        "transformers_version unsloth_*",
        TRAINING: "*dropout* *_pdrop drop_path_rate gradient_checkpointing gradient_checkpointing_kwargs "
        "initializer_cutoff_factor initializer_factor initializer_range layerscale_value pretraining_tp "
        "sinusoidal_pos_embds",
        OUTPUTS: "attn_implementation base_model_*_plan chunk_size_feed_forward deterministic_flash_attn "
        "distributed_config dtype experts_implementation fusion_config output_attentions "
        "output_hidden_states output_past reference_compile reorder_and_upcast_attn "
        "repad_logits_with_grad return_dict torch_dtype torchscript use_bfloat16 use_cache",
        TASKS: "apply_layernorm classifier_activation classifier_bias classifier_pooling decoder_bias "
        "encoder_stride id2label is_encoder_decoder label2id num_labels out_features out_indices "
        "pooler_act pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_output_size "
        "pooler_size_per_head pooler_type problem_type reshape_hidden_states sparse_pred_ignore_index "
        "sparse_prediction stage_names summary_activation summary_proj_to_labels summary_type "
        "summary_use_proj task_specific_params tie_encoder_decoder use_mask_token",
        SIZES: "directionality embedding_size n_ctx tie_weights_ tie_word_embeddings",
        SCORES: "sbert_ce_default_activation_function sentence_transformers",
        TEXT: "bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id "
        "prefix sep_token_id unk_token_id",
        GENERATION: " ".join((*SETTINGS, *NOT_DONE, BEAMS, ASSISTANT, ANSWERS)),
        UNREAD: "cross_attention_hidden_size is_llama_config tf_legacy_loss",
    },
    {
        "add_cross_attention": False,
        "is_decoder": False,
        "per_layer_config": {},
        "pruned_heads": {},
        "seq_classif_activation": None,
        "transformers_weights": None,
    },
)
BERT = Rows({}, {"position_embedding_type": "absolute"})
CAUSAL = {"is_causal": True}
VIT = Rows({}, {"head_dim": None, "use_swiglu_ffn": False})
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
FEATURES = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}

# What GGUF has for other architectures, and changes results: numbers that are 1 without an effect, and 0.
FACTORS = "attention.output_scale embedding_scale expert_weights_scale logit_scale residual_scale"
ABSENT = (
    "activation_sparsity_scale altup.active_idx altup.num_inputs attention.clamp_kqv "
    "attention.key_length_mla attention.key_length_swa attention.kv_lora_rank attention.max_alibi_bias "
    "attention.q_lora_rank attention.scale attention.shared_kv_layers attention.sliding_window_pattern "
    "attention.temperature_length attention.temperature_scale attention.value_length_mla "
    "attention.value_length_swa attn_logit_softcapping embedding_length_out "
    "embedding_length_per_layer_input expert_chunk_feed_forward_length expert_count "
    "expert_feed_forward_length expert_gating_func expert_group_count expert_group_scale "
    "expert_group_used_count expert_shared_count expert_shared_feed_forward_length expert_used_count "
    "expert_weights_norm experts_per_group final_logit_softcapping full_attention_interval "
    "interleave_moe_layer_step leading_dense_block_count moe_every_n_layers moe_latent_size "
    "n_deepstack_layers nextn_predict_layers pooling_type rescale_every_n_layers rope.dimension_sections "
    "rope.freq_base_swa rope.scaling.alpha rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast "
    "rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor router_logit_softcapping swiglu_clamp_exp "
    "swiglu_clamp_shexp swin_norm use_parallel_residual"
)

TABLE: dict[str, Rows] = {
    "config.json": CONFIG,
    **{f"config.json of {kind}": BERT for kind in ("bert", "camembert", "roberta", "xlm-roberta")},
    **{f"config.json of {kind}": VIT for kind in ("dinov2", "vit")},
    "config.json of distilbert": Rows(
        aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    ),
    "config.json of gemma3_text": Rows(
        {OUTPUTS: "cache_implementation"},
        {
            **CAUSAL,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
    "config.json of gpt2": Rows({}, CAUSAL, GPT2_ALIASES),
    "config.json of llama": Rows({}, {**CAUSAL, "rope_interleaved": False}),
    "config.json of mistral": Rows({}, CAUSAL),
    "config.json of modernbert": Rows(
        {UNREAD: "layer_norm_eps position_embedding_type"}, {"head_dim": None, "sliding_window": None}
    ),
    "config.json of mpnet": Rows({}, {"relative_attention_num_buckets": 32}),
    "config.json of phi3": Rows(
        {UNREAD: "attention_bias full_attn_mod interpolate_factor lm_head_bias mlp_bias"}, {**CAUSAL}
    ),
    "config.json of qwen2": Rows({}, {**CAUSAL, "use_mrope": False}),
    "config.json of qwen3": Rows({}, CAUSAL),
    "config.json of smollm3": Rows({}, CAUSAL),
    "generation_config.json": Rows(
        {
            NOTES: "_* transformers_version",
            OUTPUTS: f"{ANSWERS} cache_config cache_implementation compile_config "
            "continuous_batching_config disable_compile low_memory max_cache_len output_attentions "
            "output_hidden_states prefill_chunk_size use_cache",
            TEXT: "bos_token_id decoder_start_token_id pad_token_id",
            "there are no searches with beams": BEAMS,
            "there are no assistants, which only make answers faster": ASSISTANT,
            "it is not done, and a warning says so": " ".join(NOT_DONE),
        }
    ),
    "tokenizer_config.json": Rows(
        {
            NOTES: "_* auto_map backend device_map files_loaded is_local language local_files_only "
            "name_or_path processor_class special_tokens_map_file tokenizer_file tokenizer_type "
            "transformers_version use_fast verbose",
            "texts are packed, not padded": "max_length pad_to_multiple_of pad_token_type_id padding padding_side",
            "texts are cut at model_max_length only": "stride truncation truncation_strategy",
            "Transformers leaves it out, as tokenizer.json says it": "add_bos_token add_eos_token "
            "sp_model_kwargs trim_offsets",
            "of tokenizers in Python, before tokenizer.json": "do_basic_tokenize errors keep_accents "
            "never_split remove_space split_by_punct tokenize_chinese_chars_ use_default_system_prompt "
            "use_legacy vocab_file merges_file vocab_type wordpieces_prefix",
            "another class's setting": "add_prefix_space do_lower_case legacy strip_accents tokenize_chinese_chars",
            "of chats that call tools": "chat_control_tokens response_schema response_template",
            "tokenizer.json says it": "gguf_file merges post_processor tokenizer tokenizer_object "
            "tokenizer_padding tokenizer_truncation unk_id vocab",
        },
        {
            "fast_tokenizer_files": [],
            "fix_mistral_regex": False,
            "init_inputs": [],
            "model_specific_special_tokens": {},
        },
        {"max_len": "model_max_length"},
    ),
    "special_tokens_map.json": Rows(),
    "modules.json": Rows({NOTES: "idx name", OUTPUTS: "kwargs"}),
    "sentence_bert_config.json": Rows(
        {OUTPUTS: "unpad_inputs"},
        {
            "document_length": None,
            "module_output_name": ("token_embeddings", "scores"),
            "processing_kwargs": {},
            "query_expansion": None,
            "query_length": None,
            "tokenizer_name_or_path": None,
            "transformer_task": ("feature-extraction", "sequence-classification"),
        },
    ),
    "arguments of sentence_bert_config.json": Rows(
        {
            NOTES: "cache_dir local_files_only revision subfolder token use_fast",
            OUTPUTS: "add_pooling_layer attn_implementation dtype padding_side torch_dtype unpad_inputs",
            "code of a folder is never run": "trust_remote_code",
        },
        {"*": (False, "", {}, [])},
    ),
    "config_sentence_transformers.json": Rows(
        {
            NOTES: "__version__ requirements",
            OUTPUTS: "keep_in_fp32_modules",
            SCORES: "activation_fn",
        },
        {"model_type": ("SentenceTransformer", "CrossEncoder")},
    ),
    "Pooling": Rows({SIZES: "embedding_dimension word_embedding_dimension"}),
    "Dense": Rows({}, {**FEATURES, "use_residual": False}),
    "Dropout": Rows({TRAINING: "dropout"}),
    "Normalize": Rows({}, FEATURES),
    "GGUF": Rows(  # entries that belong to neither of the next two
        {
            NOTES: "general.* imatrix.* quantize.* split.*",
            'sampling="folder" obeys temp, top_k, top_p and min_p; a warning names others': "general.sampling.*",
            "one template is used, tokenizer.chat_template": "tokenizer.chat_template "
            "tokenizer.chat_template.* tokenizer.chat_templates",
            "the tokens and merges say the same": "tokenizer.huggingface.json tokenizer.rwkv.world",
            "of models of images and of other architectures": "clip.* xielu.* diffusion.*",
            "of adapters, which are refused": "adapter.*",
        }
    ),
    "GGUF: tokenizer.ggml": Rows(
        {
            "marks for filling in a middle, which a prompt may hold": "fim_*_token_id middle_token_id "
            "prefix_token_id suffix_token_id",
            "byte-level tokenizers do not read it": "add_space_prefix scores",
            "of tokenizers that are not supported": "precompiled_charsmap remove_extra_whitespaces token_type_count",
        },
        {"add_sep_token": False},
    ),
    "GGUF: architecture": Rows(
        {
            SIZES: "rope.dimension_count_swa rope.scaling.finetuned rope.scaling.yarn_log_multiplier "
            "tensor_data_layout vocab_size",
            "of other architectures": "attention.decay_lora_rank attention.gate_lora_rank "
            "attention.group_norm_* attention.iclr_lora_rank attention.indexer.* "
            "attention.relative_buckets_count attention.value_residual_mix_lora_rank classifier.* "
            "convnext.* decoder_* features_length kda.* posnet.* shortconv.* ssm.* time_* "
            "token_shift_count wkv.* xielu.*",
        },
        {"attention.causal": True} | dict.fromkeys(FACTORS.split(), 1) | dict.fromkeys(ABSENT.split(), 0),
    ),
}


def rows(name: str) -> Rows:
    """Return the rows of a file, and of ``file of kind`` those of all files of that name too."""
    all_files, own = TABLE.get(name.partition(" of ")[0], Rows()), TABLE.get(name, Rows())
    keys = " ".join((*all_files.no_effect.values(), *own.no_effect.values()))
    return Rows({"": keys}, {**all_files.refused, **own.refused}, {**all_files.aliases, **own.aliases})
