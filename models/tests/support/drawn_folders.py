"""Folders of small random models with random settings, as Transformers and sentence-transformers write them, compared
with both.

``python tests/support/drawn_folders.py 20000 --first 300`` draws more of them than the test does, and prints each
that differs.
"""

import collections
import contextlib
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import ClassVar

import gguf_files
import numpy as np
import sentence_transformers
import tokenizers
import torch
import transformers
from architectures import their_name
from safetensors.numpy import load_file
from sentence_transformers import models as modules
from text_folders import with_drawn_parameters

import selfattn_models as models

LETTERS = "abcdefghilmnoprstuvwyTSEAé"
WORDS = ["the", "sea", "was", "calm", "ship", "tea", "don", "stop", "hello", "world", "query"]
TEXTS = [
    "the sea was calm",
    "The SEA, Café",
    "  two  spaces\tand a tab ",
    "hello<x>world <x> tea<y>the <z>",
    "日本 ship",
    "don't stop.  É",
    "tea",
    "[SEP] <s> the </s> [MASK]<mask>",
    "a<pad>[PAD] the",
    "the sea was calm and the ship stops near the old tea world . the end",
]
PAIRS = [("the sea", "tea <x>"), ("a ship", "the sea was calm and the ship stops"), ("Café", "")]
ENCODERS = ["Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "MPNet", "ModernBert"]
LANGUAGE = ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "SmolLM3", "Phi3"]
BRACKETS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
MARKS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}

YES_NO = [True, False]
TOKEN = {"content": "<y>", "lstrip": True, "__type": "AddedToken"}
FLAGS = (
    "do_lower_case tokenize_chinese_chars add_prefix_space split_special_tokens add_bos_token add_eos_token "
    "clean_up_tokenization_spaces legacy trim_offsets do_basic_tokenize keep_accents remove_space use_fast"
)
TOKENIZER_SETTINGS = dict.fromkeys(FLAGS.split(), YES_NO) | {
    "strip_accents": [True, False, None],
    "truncation_side": ["left", "right"],
    "model_max_length": [6, 9, 10**30],
    "padding_side": ["left", "right"],
    "bos_token": ["<x>", "tea"],
    "eos_token": ["<x>"],
    "cls_token": ["<x>"],
    "sep_token": ["<x>", TOKEN],
    "unk_token": ["<x>"],
    "pad_token": ["tea", TOKEN],
    "mask_token": ["sea"],
    "additional_special_tokens": [["<x>"], ["tea", "sea"]],
    "extra_special_tokens": [["tea"], {"image_token": "<x>"}],
    "model_input_names": [["input_ids", "attention_mask"]],
    "never_split": [["the"]],
    "wordpieces_prefix": ["##", "@@"],
    "errors": ["replace", "ignore"],
    "sp_model_kwargs": [{}, {"nbest_size": 0}],
    "max_length": [5],
    "image_token": ["<x>", "sea", TOKEN],
    "added_tokens_decoder": [{"2": {"content": "<pad>", "special": True}}, {}],
    "stride": [2],
    "truncation_strategy": ["longest_first"],
    "pad_to_multiple_of": [8],
    "unheard_of": [1],
    "language": ["en"],
    "tokenizer_class": [
        "BertTokenizer",
        "PreTrainedTokenizerFast",
        "RobertaTokenizer",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
    ],
}
BESIDE = {  # files that older versions wrote
    "added_tokens.json": lambda size: {"<z>": size},
    "special_tokens_map.json": lambda size: {"sep_token": "<x>", "additional_special_tokens": ["<y>"]},
}
GENERATION_SETTINGS = {
    "repetition_penalty": [1.5, 0.7],
    "no_repeat_ngram_size": [0, 2],
    "suppress_tokens": [[], [-1], [7, 8, 9]],
    "min_new_tokens": [6],
    "max_length": [14],
    "max_new_tokens": [3],
    "eos_token_id": [7, [7, 8, 9, 10, 11]],
    "do_sample": YES_NO,
    "temperature": [0.5],
    "top_k": [3],
    "top_p": [0.4],
    "min_p": [0.2],
    "typical_p": [0.5],
    "exponential_decay_length_penalty": [[2, 1.9]],
    "num_beams": [2],
    "penalty_alpha": [0.6],
    "guidance_scale": [1.5],
    "renormalize_logits": YES_NO,
    "remove_invalid_values": YES_NO,
    "use_cache": YES_NO,
    "length_penalty": [2.0],
    "early_stopping": YES_NO,
    "stop_strings": [["e"]],
    "pad_token_id": [1],
    "bos_token_id": [7],
    "epsilon_cutoff": [3e-4],
    "diversity_penalty": [0.5],
    "unheard_of": [1],
    "token_healing": YES_NO,
    "num_return_sequences": [1],
    "encoder_repetition_penalty": [1.2],
    "prompt_lookup_num_tokens": [2],
    "watermarking_config": [{"bias": 2.5}],
}
SENTENCE_SETTINGS = {
    "modules.json": {},
    "sentence_bert_config.json": {"max_seq_length": [5, 8, None], "do_lower_case": YES_NO, "unheard_of": [1]},
    "config_sentence_transformers.json": {
        "default_prompt_name": ["query", "document", None],
        "similarity_fn_name": ["dot", "euclidean", "manhattan", None],
        "prompts": [{"query": "tea ", "document": "sea: "}],
        "truncate_dim": [7],
        "unheard_of": [1],
    },
    "1_Pooling/config.json": {
        "include_prompt": YES_NO,
        "pooling_mode": ["mean", "cls", "max", "lasttoken", "weightedmean", ["cls", "max"]],
        "unheard_of": [1],
        "pooling_mode_cls_token": YES_NO,
        "pooling_mode_max_tokens": YES_NO,
    },
    "2_Dense/config.json": {
        "activation_function": ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.ReLU"]
    },
}
SIZES = {
    **dict.fromkeys(["hidden_size", "dim", "n_embd", "intermediate_size", "hidden_dim"], 32),
    **dict.fromkeys(["num_attention_heads", "n_heads", "n_head"], 4),
    **dict.fromkeys(["num_hidden_layers", "n_layers", "n_layer"], 2),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 64),
    "vocab_size": 0,
}
# Settings that make Transformers return something else, or make no model.
LEFT_OUT = (
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "add_cross_attention",
    "is_encoder_decoder",
    "problem_type",
)
ROPE = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": 2.5,
        "long_factor": 2.5,
    },
]
NAMED = {
    "activation": ["relu", "gelu_new", "silu", "tanh"],
    "act": ["relu", "gelu_pytorch_tanh", "swish", "quick_gelu"],
}


class Draw:
    """One folder: its family, what was changed after it was written, and how to compare it."""

    number = 47
    spare = 3  # the table has fewer rows than this without a token
    heads = (4, 8, 10)  # widths
    shards, ends = ("1GB", "20KB"), ("ForCausalLM",)
    often, scales = 0.12, 0.4  # how often a setting has another value, and how often angles are scaled
    own: ClassVar = {
        "Gemma3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
        "MPNet": {"max_position_embeddings": 70},
        "ModernBert": {"layer_types": ["full_attention", "sliding_attention"]},
    }

    def __init__(self, seed, folder):
        self.rng = np.random.default_rng([self.number, seed])
        self.folder, self.changes = Path(folder), []
        self.choose()
        self.tokenizer = self.make_tokenizer()
        self.make_model()
        self.write()

    def choose(self):
        self.language = self.chance(0.45)
        self.family = self.one(LANGUAGE if self.language else ENCODERS)
        scored = ["Bert", "Roberta", "XLMRoberta", "DistilBert"]
        self.scores = not self.language and self.family in scored and self.chance(0.3)
        self.pools = not self.language and not self.scores and self.chance(0.6)

    def chance(self, p):
        return self.rng.random() < p

    def one(self, values):
        return values[self.rng.integers(len(values))]

    def some(self, p, settings):
        return {name: self.one(values) for name, values in settings.items() if self.chance(p)}

    # ---------------------------------------------------------------------------------------------- what is written

    def make_tokenizer(self):
        kind = self.family
        make = getattr(transformers, f"{kind}Tokenizer", transformers.Qwen2Tokenizer)
        words = [*LETTERS, *WORDS, *".,:'"]
        if kind in ("Bert", "DistilBert", "MPNet"):
            special = MARKS | {"unk_token": "[UNK]"} if kind == "MPNet" else BRACKETS
            vocabulary = numbered([*special.values(), *words, *(f"##{c}" for c in LETTERS), "##s", "日"])
            steps = {
                "do_lower_case": YES_NO,
                "strip_accents": [None, True, False],
                "tokenize_chinese_chars": YES_NO,
            }
            made = make(vocab=vocabulary, **self.some(0.5, steps))
        elif kind in ("XLMRoberta", "Camembert"):
            pieces = ["▁", *words, *(f"▁{word}" for word in words)]
            scored = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
            made = make(vocab=[*scored, *((p, -1.0 - 9 / len(p)) for p in pieces), ("<mask>", 0.0)])
        elif kind in ("Llama", "Mistral", "Gemma3"):
            merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("e", "a"), ("s", "ea"), ("▁", "sea")]
            pieces = [*(f"<0x{n:02X}>" for n in range(256)), "▁", *LETTERS, *map("".join, merges)]
            vocabulary = numbered(["<unk>", "<s>", "</s>", *pieces])
            names = ("add_prefix_space", "add_bos_token", "add_eos_token", "legacy")
            options = self.some(0.4, dict.fromkeys(names, YES_NO))
            if kind == "Gemma3":
                vocabulary = numbered(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *pieces])
                options, make = self.some(0.4, {"add_bos_token": YES_NO}), transformers.GemmaTokenizer
            else:
                make = transformers.LlamaTokenizer
            made = make(vocab=vocabulary, merges=merges, **options)
        else:
            merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("e", "a"), ("s", "ea"), ("Ã", "©")]
            letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
            vocabulary = numbered([*MARKS.values(), *letters, *map("".join, merges)])
            options = self.some(0.5, {"add_prefix_space": YES_NO})
            if kind == "ModernBert":
                bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
                bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
                bare.decoder = tokenizers.decoders.ByteLevel()
                bare.post_processor = tokenizers.processors.TemplateProcessing(
                    "<s> $A </s>", "<s> $A </s> $B </s>", [("<s>", 0), ("</s>", 2)]
                )
                marks = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
                made = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, **marks)
            else:
                marks = (
                    {}
                    if kind == "Roberta"
                    else {f"{n}_token": MARKS[f"{n}_token"] for n in ("bos", "eos", "unk")}
                )
                made = make(vocab=vocabulary, merges=merges, **marks, **options)
        if self.chance(0.6):
            names = ("lstrip", "rstrip", "single_word", "normalized", "special")
            how = {name: bool(self.rng.integers(2)) for name in names}
            made.add_tokens([transformers.AddedToken("<x>", **how)], special_tokens=how["special"])
        return made

    def make_model(self):
        kind, tokens = self.family, len(self.tokenizer) + int(self.rng.integers(self.spare))
        configuration = getattr(transformers, their_name(kind, "Config"))
        usual = configuration().to_dict()
        ids = {
            f"{n}_token_id": getattr(self.tokenizer, f"{n}_token_id")
            for n in ("pad", "bos", "eos", "cls", "sep")
        }
        sizes = SIZES | {
            "num_key_value_heads": int(self.one([1, 2, 4])),
            "head_dim": int(self.one(self.heads)),
            "vocab_size": tokens,
            "local_attention": 6,
            "sliding_window": 5 if self.chance(0.5) else None,
            "relative_attention_num_buckets": 32,
        }
        fields = {name: value for name, value in (sizes | ids).items() if name in usual}
        fields |= self.own.get(kind, {})
        if "tie_word_embeddings" in usual and self.language:
            fields["tie_word_embeddings"] = self.chance(0.5)
        for name, value in usual.items():  # sometimes changes another setting
            if name not in (*fields, *LEFT_OUT) and self.chance(self.often):
                fields[name] = self.other(name, value)
        if "rope_parameters" in usual and self.language and self.chance(self.scales):
            rope, half = self.one(ROPE), fields["head_dim"] // 2 if "head_dim" in fields else 4
            factors = {
                name: [1.0, *[x] * (half - 1)] for name, x in rope.items() if name.endswith("t_factor")
            }
            fields["rope_parameters"] = {"rope_theta": 10000.0} | rope | factors
            if kind == "Gemma3":
                fields["rope_parameters"] = {
                    "full_attention": fields["rope_parameters"],
                    "sliding_attention": {"rope_theta": 500.0},
                }
        if self.scores:
            fields["num_labels"] = int(self.rng.integers(1, 4))
        suffix = "ForSequenceClassification" if self.scores else self.one(["Model", "ForMaskedLM"])
        suffix = ("LMHeadModel" if kind == "GPT2" else self.one(self.ends)) if self.language else suffix
        try:
            made = getattr(transformers, their_name(kind, suffix))(configuration(**fields))
            model = with_drawn_parameters(made)
            model.save_pretrained(self.folder, max_shard_size=self.one(self.shards))
        except Exception as error:
            raise NotWrittenError(f"{kind} {fields}: {error!r:.200}") from None
        changed = {n: v for n, v in fields.items() if n not in sizes | ids and v != usual.get(n)}
        self.changes += [f"{name}={value!r}" for name, value in changed.items()]

    def other(self, name, value):
        """Return a value of the setting's type, perhaps the same value."""
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            chunks = name == "chunk_size_feed_forward"
            return value if chunks else max(1, value + int(self.rng.integers(-1, 3)))
        if isinstance(value, float):
            return value * self.one([0.5, 2.0])
        choices = [names for end, names in NAMED.items() if end in name and isinstance(value, str)]
        return self.one(choices[0]) if choices else value

    def write(self):
        self.tokenizer.save_pretrained(self.folder)
        if self.pools:
            self.add_pipeline()
        self.change()

    def add_pipeline(self):
        with quiet():
            first = modules.Transformer(
                str(self.folder), tokenizer_args={}, max_seq_length=self.one([None, 8, 20])
            )
        chain = [first, modules.Pooling(32, pooling_mode=self.one(["mean", "cls", "max", "lasttoken"]))]
        if self.chance(0.4):
            activation = torch.nn.Tanh() if self.chance(0.5) else torch.nn.Identity()
            chain.append(modules.Dense(32, 16, bias=self.chance(0.5), activation_function=activation))
        if self.chance(0.5):
            chain.append(modules.Normalize())
        prompts = {"query": "query: ", "document": ""} if self.chance(0.5) else None
        name = "query" if prompts and self.chance(0.5) else None
        model = sentence_transformers.SentenceTransformer(
            modules=chain, prompts=prompts, default_prompt_name=name
        )
        if self.chance(0.4):
            model.similarity_fn_name = self.one(["cosine", "dot", "euclidean", "manhattan"])
        with quiet():
            model.save(str(self.folder))

    def change(self):
        """Change some keys of the files by hand, as people do."""
        files = {"tokenizer_config.json": TOKENIZER_SETTINGS, "generation_config.json": GENERATION_SETTINGS}
        files |= SENTENCE_SETTINGS if self.pools else {}
        for name, settings in files.items():
            path = self.folder / name
            if not path.exists() or not settings:
                continue
            values = json.loads(path.read_text())
            for _ in range(self.rng.poisson(1.4 if settings is TOKENIZER_SETTINGS else 0.7)):
                key = self.one(sorted(settings))
                values[key] = self.one(settings[key])
                self.changes.append(f"{name}: {key}={values[key]!r}")
            for key in list(values):  # a key that may be left out
                if self.chance(0.03) and isinstance(values[key], bool | int | float | type(None)):
                    del values[key]
                    self.changes.append(f"{name}: without {key}")
            path.write_text(json.dumps(values))
        for name, content in BESIDE.items():
            if self.chance(0.08):
                (self.folder / name).write_text(json.dumps(content(len(self.tokenizer))))
                self.changes.append(name)
        path = self.folder / "config.json"
        values = json.loads(path.read_text())
        for key in sorted(values):
            if self.chance(0.04) and key not in (*SIZES, "model_type", "architectures"):
                self.changes.append(f"config.json: without {key}")
                del values[key]
        if self.chance(0.05):
            values["unheard_of"] = 3
            self.changes.append("config.json: unheard_of")
        path.write_text(json.dumps(values))

    # -------------------------------------------------------------------------------------------------- both results

    @torch.no_grad()
    def theirs(self):
        if self.pools:
            how = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}}
            return of_pipeline(sentence_transformers.SentenceTransformer(str(self.folder), **how))
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        suffix = "ForSequenceClassification" if self.scores else "ForCausalLM" if self.language else ""
        auto = getattr(transformers, f"AutoModel{suffix}")
        model = auto.from_pretrained(self.folder, dtype=torch.float32).eval()
        ids = [tokenizer(text, truncation=not self.language)["input_ids"] for text in TEXTS]
        if self.language:
            return self.of_language_there(model, ids)
        # Texts are in lists, as CrossEncoder gives them: outside a list, an empty second text counts as missing.
        each = [[[text]] for text in TEXTS]
        each += [[[first], [second]] for first, second in PAIRS] if self.scores else []
        how = {"return_dict": True, "output_hidden_states": True}
        made = [model(**tokenizer(*one, return_tensors="pt", truncation=True), **how) for one in each]
        if self.scores:
            return {"ids": ids, "scores": np.concatenate([one.logits.numpy() for one in made])}
        return {"ids": ids} | {
            f"states {n}": np.concatenate([*one.hidden_states[:-1], one.last_hidden_state])
            for n, one in enumerate(made)
        }

    def of_language_there(self, model, listed):
        def run(ids):
            out = model(torch.tensor([ids]), return_dict=True, output_hidden_states=True)
            return {"logits": out.logits[0].numpy(), "states": np.concatenate(out.hidden_states)}

        def generate(ids, **limit):
            how = {"do_sample": False, "return_dict_in_generate": False} | limit
            given = torch.tensor([ids])
            return model.generate(given, attention_mask=torch.ones_like(given), **how)[0, len(ids) :]

        return self.of_language(listed, run, generate)

    def of_language(self, listed, run, generate):
        path = self.folder / "generation_config.json"
        values = json.loads(path.read_text()) if path.exists() else {}
        has_limit = any(values.get(name) is not None for name in ("max_length", "max_new_tokens"))
        limit = {} if has_limit else {"max_new_tokens": 10}
        found = {f"{name} {n}": x for n, ids in enumerate(listed) for name, x in run(ids).items()}
        return {"ids": listed, **found, "answers": [generate(ids, **limit).tolist() for ids in listed[:4]]}

    def of_language_here(self, model, listed):
        def run(ids):
            return {"logits": model.logits(ids), "states": np.stack(model.hidden_states(ids))}

        return self.of_language(listed, run, model.generate)

    def ours(self):
        model = models.load(self.folder)
        if self.pools:
            return of_pipeline(model)
        found = {"ids": [list(map(int, model._ids(text))) for text in TEXTS]}
        if self.scores:
            return found | {"scores": model.predict([*TEXTS, *PAIRS])}
        if self.language:
            return self.of_language_here(model, found["ids"])
        return found | {f"states {n}": np.stack(model.hidden_states(text)) for n, text in enumerate(TEXTS)}


class DrawEmbedder(Draw):
    """A folder of sentence-transformers with a decoder; its tokenizer may put an end after each text."""

    number, ends, often, spare = 49, ("ForCausalLM", "Model"), 0.06, 6
    language, scores, pools = True, False, True

    def choose(self):
        self.family = self.one(["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"])

    def make_tokenizer(self):
        made = super().make_tokenizer()
        made.pad_token = made.pad_token or made.eos_token  # sentence-transformers needs one
        if self.chance(0.7):
            end, steps = made.eos_token, tokenizers.processors.TemplateProcessing
            made.backend_tokenizer.post_processor = steps(f"$A {end}", None, [(end, made.eos_token_id)])
        return made


def numbered(words):
    return {word: n for n, word in enumerate(dict.fromkeys(words))}


def of_pipeline(model):
    """The names are the same in sentence-transformers and here. Texts go one by one: pads on the left change absolute
    positions."""
    calls = ("encode", "encode_query", "encode_document")
    found = {name: getattr(model, name)(TEXTS, batch_size=1) for name in calls}
    y = found["encode"]
    return found | {"similarity": np.asarray(model.similarity(y[:3], y[3:]))}


ENTRIES = {  # after the name of the architecture
    "rope.freq_base": [500.0, 1e6],
    "rope.scaling.type": ["none", "linear", "yarn"],
    "rope.scaling.factor": [2.0],
    "attention.scale": [0.3],
    "attention.causal": YES_NO,
    "logit_scale": [2.0],
    "pooling_type": [0, 1, 3],
    "expert_count": [0, 4],
    "unheard_of": [1, 0],
    "attention.sliding_window": [4, 64],
    "vocab_size": [7],
    "tensor_data_layout": ["Meta AI original pth"],
    "rope.dimension_count": [8, 4],
    "attn_logit_softcapping": [30.0],
    "final_logit_softcapping": [30.0],
    "embedding_scale": [2.0],
    "residual_scale": [0.5],
    "attention.clamp_kqv": [1.0],
    "use_parallel_residual": YES_NO,
    "attention.max_alibi_bias": [8.0],
    "decoder_start_token_id": [1],
}
OTHER_ENTRIES = {
    "general.file_type": [1, 7],
    "general.type": ["model", "adapter", "mmproj"],
    "general.quantization_version": [2],
    "split.count": [1, 2],
    "tokenizer.ggml.add_bos_token": YES_NO,
    "tokenizer.ggml.add_eos_token": YES_NO,
    "tokenizer.ggml.add_space_prefix": [True],
    "tokenizer.ggml.remove_extra_whitespaces": YES_NO,
    "tokenizer.ggml.eot_token_id": [9],
    "tokenizer.ggml.fim_pre_token_id": [9],
    "tokenizer.ggml.add_sep_token": YES_NO,
    "tokenizer.ggml.token_type_count": [1, 2],
    "tokenizer.ggml.unheard_of": [1],
    "quantize.imatrix.file": ["x"],
    "tokenizer.chat_template": ["{{ messages }}"],
    "tokenizer.ggml.mask_token_id": [7],
}


class DrawGGUF(Draw):
    """A GGUF file of such a model."""

    number = 48
    spare, heads, shards = 1, [8], ["1GB"]
    often = scales = 0.0  # a GGUF file has no keys for most of these settings
    own: ClassVar = {"GPT2": {"n_positions": 1024}}  # Transformers does not read another number from a file
    language, scores, pools = True, False, False

    def choose(self):
        self.family = self.one(["GPT2", "Llama", "Qwen2", "Qwen3"])

    def write(self):
        config = json.loads((self.folder / "config.json").read_text())
        rope = config.get("rope_parameters", {})
        if not {"rope_parameters", "n_embd"} & set(config) or rope.get("rope_type", "default") != "default":
            raise NotWrittenError("rotary positions that a file has no entry for")
        state = load_file(self.folder / "model.safetensors")
        if self.family == "GPT2":
            begins = ("transformer.", "lm_head")
            state = {n if n.startswith(begins) else f"transformer.{n}": x for n, x in state.items()}
        chosen, self.others = self.some(0.02, ENTRIES), self.some(0.06, OTHER_ENTRIES)
        pre = ["gpt-2", "qwen2", "llama-bpe", "tekken", None]
        self.pre = None if self.family == "Llama" else self.one(pre)
        self.typed = self.chance(0.85)
        kind = self.one(["F32", "F16", "Q8_0", "Q4_1"])
        self.changes += [chosen, self.others, self.pre, kind, *([] if self.typed else ["no types"])]
        usual = {
            "attention.layer_norm_epsilon": config.get("layer_norm_epsilon"),
            "rope.freq_base": rope.get("rope_theta"),
            "attention.key_length": config.get("head_dim"),
            "attention.value_length": config.get("head_dim"),
        }
        more = {name: value for name, value in (usual | chosen).items() if value is not None}
        gguf_files.write(self.folder / "model.gguf", config, state, kind, self.tokens(), more)

    def tokens(self):
        tokenizer, added = self.tokenizer, self.tokenizer.added_tokens_decoder
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        kinds = [(3 if added[n].special else 4) if n in added else 1 for n in range(len(tokens))]
        spelled = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        ranks = {a + b: n for n, (a, b) in enumerate(spelled)}
        if self.family == "Llama":
            kinds = [6 if token.startswith("<0x") else own for token, own in zip(tokens, kinds, strict=True)]
            own = {"model": "llama", "scores": [-float(ranks.get(token, 9999)) for token in tokens]}
        else:
            own = {"model": "gpt2", "merges": [f"{a} {b}" for a, b in spelled]}
        own |= {"tokens": tokens, "pre": self.pre, "token_type": kinds if self.typed else None}
        if self.pre in ("llama-bpe", "tekken"):  # llama.cpp adds a bos token unless the file says no
            own["add_bos_token"] = False
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown"}.items():
            if (n := getattr(tokenizer, f"{name}_token_id")) is not None and self.chance(0.9):
                own[f"{key}_token_id"] = n
        return gguf_files.of_tokenizer(**own) | self.others

    @torch.no_grad()
    def theirs(self):
        # SentencePiece and llama.cpp put a space after each mark, where Transformers does not.
        self.texts = [text.strip() for text in TEXTS if self.family != "Llama" or "<" not in text]
        file = {"gguf_file": "model.gguf"}
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, **file)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, **file, dtype=torch.float32
        ).eval()
        # llama.cpp ends an answer at these tokens, too.
        more = [tokenizer.get_vocab().get("<|endoftext|>"), self.others.get("tokenizer.ggml.eot_token_id")]
        ends = [n for n in (model.config.eos_token_id, *more) if n is not None]
        model.generation_config = transformers.GenerationConfig(eos_token_id=ends or None)
        return self.of_language_there(model, [tokenizer(text)["input_ids"] for text in self.texts])

    def ours(self):
        model = models.load(self.folder / "model.gguf")
        return self.of_language_here(model, [model._ids(text).tolist() for text in self.texts])


class NotWrittenError(Exception):
    """Transformers does not make a model of these settings."""


@contextlib.contextmanager
def quiet():
    """Silence the warnings and log lines of other libraries."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def difference(truth, got):
    """The first thing that differs, or None."""
    for name, expected in truth.items():
        found = got[name]
        if isinstance(expected, list):
            if found != expected:
                n = next(n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
                return f"{name} {n}: {found[n]}, expected {expected[n]}"
            continue
        if found.shape != expected.shape:
            return f"{name}: shape {found.shape}, expected {expected.shape}"
        largest = float(np.abs(expected).max(initial=1.0))
        off = float(np.abs(found - expected).max(initial=0.0))
        if not off <= 3e-5 * largest:
            return f"{name}: off by {off:.3g} of {largest:.3g}"
    return None


def verdict(seed, folder, kind=Draw):
    """Return what became of a drawn folder: one word, and the details."""
    with quiet():
        try:
            draw = kind(seed, folder)
        except NotWrittenError as error:
            return "not written", str(error)
        about = f"seed {seed}, {draw.family}{' scores' * draw.scores}{' pools' * draw.pools}, {draw.changes}"
        try:
            truth = draw.theirs()
        except Exception as error:
            truth = error
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            got = draw.ours()
        except (ValueError, NotImplementedError, FileNotFoundError) as error:
            return "refused", f"{about}: {error}"
    if isinstance(truth, Exception):
        return "they refuse", f"{about}: {truth!r:.200}"
    what = difference(truth, got)
    if what is None:
        return "equal", about
    if any(issubclass(each.category, models.FolderWarning) for each in said):
        return "warned", f"{about}: {what}"
    return "DIFFERENT", f"{about}: {what}; said {[str(each.message)[:200] for each in said]}"


def main(count, first=0, verbose=False, kind=Draw):
    transformers.utils.logging.disable_progress_bar()
    found = collections.Counter()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                word, about = verdict(seed, folder, kind)
            except Exception as error:
                word, about = "CRASHED", f"seed {seed}: {error!r:.500}"
        found[word] += 1
        if word in ("DIFFERENT", "CRASHED") or verbose:
            print(word, about, flush=True)
    print(dict(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[sys.argv.index("--first") + 1]) if "--first" in sys.argv else 0)
