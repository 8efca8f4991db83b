"""Pretrained models: encoders and language models.

They are read from folders of Transformers and sentence-transformers, and from GGUF files.

>>> import selfattn_models as models
>>> model = models.load("./all-MiniLM-L6-v2")  # doctest: +SKIP
>>> model.encode(["a storm at sea", "the sea was calm"]).shape  # doctest: +SKIP
(2, 384)

A name is loaded when it is first used. What is supported: BERT (MiniLM, BGE, E5, GTE), RoBERTa, XLM-R, DistilBERT,
MPNet and ModernBERT; sequence classifiers and cross-encoders on BERT, RoBERTa and DistilBERT; ViT and DINOv2; the
language models GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 3, SmolLM3 and Phi-3. Llama, Mistral, Qwen2, Qwen3 and
Gemma 3 also make embeddings, as E5-Mistral, Qwen3-Embedding and EmbeddingGemma do. A setting of a folder that is not
supported and would change results is an error; one that is not known is in a warning.

``selfattn_models.search`` searches in texts, ``readings`` says what heads do, ``pages`` shows it. It builds on the
public names of selfattn, and on `selfattn.engine`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AnswerInterrupted",
    "BertForSequenceClassification",
    "BertModel",
    "Conversation",
    "DistilBertForSequenceClassification",
    "DistilBertModel",
    "FolderWarning",
    "GPT2LMHeadModel",
    "Gemma3ForCausalLM",
    "Gemma3TextModel",
    "LlamaForCausalLM",
    "LlamaModel",
    "MPNetModel",
    "ModernBertModel",
    "Phi3ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "SmolLM3ForCausalLM",
    "ViTModel",
    "load",
    "pack",
    "save",
]
_MODULES = ("interop", "pages", "readings", "search")

if TYPE_CHECKING:
    from selfattn_models.loading import (
        Answer,
        AnswerInterrupted,
        BertForSequenceClassification,
        BertModel,
        Conversation,
        DistilBertForSequenceClassification,
        DistilBertModel,
        FolderWarning,
        Gemma3ForCausalLM,
        Gemma3TextModel,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        LlamaModel,
        ModernBertModel,
        MPNetModel,
        Phi3ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3Model,
        RobertaForSequenceClassification,
        RobertaModel,
        SmolLM3ForCausalLM,
        ViTModel,
        load,
        save,
    )
    from selfattn_models.packs import pack
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            home = "packs" if name == "pack" else "loading"
            return getattr(import_module(f"selfattn_models.{home}"), name)
        if name in _MODULES:
            return import_module(f"selfattn_models.{name}")
        raise AttributeError(f"module 'selfattn_models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__, *_MODULES])
