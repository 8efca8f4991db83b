"""Qwen3: a Llama whose heads of queries and keys are normalised before they are rotated. Qwen team, "Qwen3", 2025."""

from __future__ import annotations

from typing import ClassVar

from selfattn_models.llama import LlamaForCausalLM, LlamaLayers, LlamaModel


class Qwen3Layers(LlamaLayers):
    """What the folder of a Qwen3 says beyond a Llama's."""

    kinds: ClassVar[dict[str, str]] = {"qwen3": "Qwen3"}
    usual: ClassVar[dict[str, tuple[int, int | None, int | None]]] = {"qwen3": (32768, 32, 128)}
    fields: ClassVar[dict[str, str]] = LlamaLayers.fields | {
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    }


class Qwen3ForCausalLM(Qwen3Layers, LlamaForCausalLM):
    """A language model under the names of ``transformers.Qwen3ForCausalLM``. See :func:`selfattn_models.load`."""


class Qwen3Model(Qwen3Layers, LlamaModel):
    """A decoder that makes embeddings, as Qwen3-Embedding does, under the names of ``transformers.Qwen3Model``."""
