"""Every key that a folder may have is obeyed, has no effect, is refused, or is named in one warning."""

import ast
import dataclasses
import inspect
import json
import re
import warnings
from pathlib import Path

import pytest

import selfattn_models as models
from selfattn_models import loading
from selfattn_models._known_settings import rows
from selfattn_models._pipeline import Pipeline

BERT = {
    "model_type": "bert",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 9,
}
LLAMA = BERT | {
    "model_type": "llama",
    "sliding_window": 5,
    "rope_scaling": {"type": "linear", "factor": 2, "also": 3},
}


def test_one_warning_names_every_setting_that_is_not_known(tmp_path):
    models.save(models.BertModel(BERT, rng=0), tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(BERT | {"new": 3, "other": False, "null": None, "_own": 1})
    )
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{path or 'Transformer'}"}
        for path in ("", "Pooling")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling/config.json").write_text(
        '{"pooling_mode": "mean", "weights": [1], "embedding_dimension": 8}'
    )
    (tmp_path / "sentence_bert_config.json").write_text('{"expansion": 32}')
    with pytest.warns(models.FolderWarning) as found:
        models.load(tmp_path)
    assert len(found) == 1 and found[0].filename == __file__
    names = "Pooling/config.json: weights; config.json: new, other; sentence_bert_config.json: expansion"
    assert str(found[0].message).startswith(f"{tmp_path}: ") and str(found[0].message).endswith(f": {names}")


def test_a_model_that_is_made_warns_where_it_is_made():
    with pytest.warns(
        models.FolderWarning, match=": config.json: rope_scaling.also, sliding_window$"
    ) as found:
        models.LlamaForCausalLM(LLAMA, rng=0)
    assert len(found) == 1 and found[0].filename == __file__


# Keys of SmolLM2, Qwen2.5, Qwen3, Gemma 3, Phi-4, a cross-encoder, GTE, DistilBERT, XLM-R and a model of 2020 that
# Transformers' classes lack.
RELEASED = {
    "llama": {
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
    },
    "qwen2": {
        "max_window_layers": 21,
        "rope_theta": 1e6,
        "sliding_window": 32768,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
    },
    "qwen3": {
        "max_window_layers": 28,
        "rope_theta": 1e6,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "num_key_value_heads": 1,
    },
    "gemma3_text": {
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "num_key_value_heads": 1,
    },
    "phi3": {
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "sliding_window": 262144,
    },
    "bert": {
        "gradient_checkpointing": False,
        "pruned_heads": {},
        "sbert_ce_default_activation_function": "torch.nn.Identity",
        "top_k": 50,
    },
    "modernbert": {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": False},
    "distilbert": {
        "dim": 8,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 8,
        "output_past": True,
        "tie_weights_": True,
    },
    "xlm-roberta": {"output_past": True, "position_embedding_type": "absolute", "tie_encoder_decoder": False},
}


@pytest.mark.parametrize("kind", RELEASED)
def test_released_models_are_loaded_without_a_warning(kind):
    sizes = {"vocab_size": 11} if kind == "distilbert" else BERT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loading.MODELS[kind](sizes | RELEASED[kind] | {"model_type": kind}, rng=0)


@pytest.fixture(scope="module")
def obeyed():
    from folder_table import obeyed

    return obeyed()


def test_the_page_of_the_guide_is_what_code_does(obeyed):
    from folder_table import PAGE, page

    assert PAGE.read_text() == page(obeyed), "python models/tests/support/folder_table.py writes it again"


def parameters(*functions):
    """Return the names of the arguments of functions, and of those that they take out of ``kwargs``."""
    named = {name for function in functions for name in inspect.signature(function).parameters}
    taken = {
        name
        for function in functions
        for name in re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', inspect.getsource(function))
    }
    return (named | taken) - {"self", "args", "kwargs"}


def configurations():
    """Return the keys of Transformers' configurations: fields, attributes, other names."""
    transformers = pytest.importorskip("transformers")
    found = {}
    for kind in loading.MODELS:
        config = transformers.AutoConfig.for_model(kind)
        fields = {field.name for field in dataclasses.fields(config)}
        found[f"config.json of {kind}"] = fields | set(config.to_dict()) | set(config.attribute_map)
    return found


def of_generation():
    transformers = pytest.importorskip("transformers")
    return {"generation_config.json": transformers.GenerationConfig().to_dict()}


def of_tokenizers():
    transformers = pytest.importorskip("transformers")
    base = [transformers.PreTrainedTokenizerBase, transformers.PreTrainedTokenizerFast]
    names = [
        "Bert",
        "DistilBert",
        "Roberta",
        "XLMRoberta",
        "Camembert",
        "MPNet",
        "GPT2",
        "Llama",
        "Qwen2",
        "Gemma",
    ]
    classes = [*base, *(getattr(transformers, f"{name}Tokenizer") for name in names)]
    special = set(base[0].SPECIAL_TOKENS_ATTRIBUTES)
    named = parameters(*(each.__init__ for each in classes)) | special
    return {"tokenizer_config.json": named, "special_tokens_map.json": special}


def of_sentence_transformers():
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules

    found = {
        kind: parameters(getattr(modules, kind).__init__)
        for kind in ("Pooling", "Dense", "Dropout", "Normalize")
    }
    found["sentence_bert_config.json"] = parameters(modules.Transformer.__init__)
    found["Dense"] -= {"init_weight", "init_bias"}  # these are no settings, nor are those below
    found["sentence_bert_config.json"] -= {"model_name_or_path", "backend", "revision"}
    kinds = (library.SentenceTransformer, library.CrossEncoder)
    configs = [kind(modules=[modules.Normalize()], device="cpu")._get_model_config() for kind in kinds]
    found["config_sentence_transformers.json"] = set().union(*configs)
    return found


def of_gguf():
    import gguf

    found = {"GGUF": set(), "GGUF: architecture": set(), "GGUF: tokenizer.ggml": set()}
    for group in vars(gguf.constants.Keys).values():
        for key in getattr(group, "__dict__", {}).values():
            if isinstance(key, str) and "." in key and not key.startswith(("gguf.", "{arch}.{")):
                begin = next((begin for begin in ("{arch}.", "tokenizer.ggml.") if key.startswith(begin)), "")
                name = {"": "GGUF", "{arch}.": "GGUF: architecture"}.get(begin, "GGUF: tokenizer.ggml")
                found[name].add(key.removeprefix(begin))
    return found


@pytest.mark.parametrize(
    "keys", [configurations, of_generation, of_tokenizers, of_sentence_transformers, of_gguf]
)
def test_every_key_that_libraries_write_has_a_row(keys, obeyed):
    for name, names in keys().items():
        known = rows(name)
        read = obeyed.get(name, set()) | set(known.refused) | set(known.aliases)
        missing = [key for key in sorted(names) if key not in read and not known.without_effect(key)]
        assert not missing, f"{name}: {', '.join(missing)}"


def test_nothing_that_is_read_is_left_unused():
    """Fields that readers set are loaded by the models, and no reader throws away what it has read."""
    package = Path(models.__file__).parent
    fields, loaded, thrown = {field.name for field in dataclasses.fields(Pipeline)}, set(), []
    for path in package.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            nodes = list(ast.walk(function))
            reads = re.match("_read(_|$)", function.name)
            for node in nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and reads:
                    fields.add(node.attr)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    loaded.add(node.attr)
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    thrown += [f"{path.name}:{node.lineno}"] * (
                        call.func.attr in ("raw", "size", "number", "flag", "object")
                    )
    assert sorted(fields - loaded) == []
    assert thrown == []
