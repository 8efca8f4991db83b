"""Small models of every architecture: configurations, with the family's name in Transformers."""

import selfattn_models as models

VOCABULARY = 53
SIZES = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 40}
IMAGES = {
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
}
CONFIGS = {
    "bert": ("Bert", SIZES | TEXT),
    "bert, other activation": (
        "Bert",
        SIZES | TEXT | {"hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-3},
    ),
    "roberta": ("Roberta", SIZES | TEXT | {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": (
        "XLMRoberta",
        SIZES | TEXT | {"type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "relu"},
    ),
    "distilbert": ("DistilBert", TEXT | {"n_layers": 2, "dim": 24, "n_heads": 3, "hidden_dim": 40}),
    "mpnet": (
        "MPNet",
        SIZES | TEXT | {"max_position_embeddings": 302},
    ),  # buckets grow up to a distance of 128
    "modernbert": (
        "ModernBert",
        SIZES | TEXT | {"num_hidden_layers": 4, "local_attention": 6, "pad_token_id": 0},
    ),
    "modernbert with biases": (
        "ModernBert",
        SIZES
        | TEXT
        | {"num_hidden_layers": 3, "local_attention": 4, "pad_token_id": 0}
        | dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), True),
    ),
    "vit": ("ViT", IMAGES | {"intermediate_size": 24}),
    "vit without biases": ("ViT", IMAGES | {"intermediate_size": 24, "qkv_bias": False}),
    "dinov2": ("Dinov2", IMAGES | {"mlp_ratio": 3}),
}
CLASSIFIERS = ["bert", "roberta", "xlm-roberta", "distilbert"]
CONTEXT = 64
SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
GPT2 = SPECIAL | {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT}
LLAMA = SPECIAL | {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": CONTEXT,
}
CONFIGS |= {  # decoders that make embeddings
    "llama as an encoder": ("Llama", LLAMA | {"is_causal": False}),
    "qwen3 as an encoder": ("Qwen3", LLAMA | {"head_dim": 10}),
    "qwen3 with windows on both sides": (
        "Qwen3",
        LLAMA
        | {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "is_causal": False,
        },
    ),
    "gemma3 that sees both ways": (
        "Gemma3",
        LLAMA
        | {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
            "use_bidirectional_attention": True,
        },
    ),
}
TEXTS = [name for name in CONFIGS if "vit" not in name and "dino" not in name]
PICTURES = [name for name in CONFIGS if name not in TEXTS]
LANGUAGE = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", LLAMA),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen3 with windows": (
        "Qwen3",
        LLAMA
        | {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        LLAMA
        | {
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
    "smollm3": ("SmolLM3", LLAMA | {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3 with windows": (
        "SmolLM3",
        LLAMA
        | {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 4, "pad_token_id": 0}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "phi3": (
        "Phi3",
        LLAMA
        | {
            "pad_token_id": 0,
            "sliding_window": 5,
            "rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.75},
        },
    ),
    "qwen2 with windows": (
        "Qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
}


def their_name(family, kind):
    """The name of a class of Transformers; Gemma3Config and Gemma3Model are of images and text."""
    return f"{family}Text{kind}" if family == "Gemma3" and kind in ("Config", "Model") else family + kind


def class_of(name, kind="Model"):
    """The class that an encoder has here."""
    family = CONFIGS[name][0]
    return getattr(models, their_name({"XLMRoberta": "Roberta", "Dinov2": "ViT"}.get(family, family), kind))
