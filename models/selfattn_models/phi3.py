"""Phi-3 and Phi-4: a Llama with query, key and value in one matrix, and gate and up in another.

Abdin et al., "Phi-3", 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar

from selfattn.engine import warn
from selfattn.engine.rope import NEW, OLD, read_rope
from selfattn_models._folder import Config
from selfattn_models._known_settings import FolderWarning
from selfattn_models.llama import LlamaForCausalLM

LONGROPE = ("longrope", "su", "yarn")  # names of one thing, in this family


class Phi3ForCausalLM(LlamaForCausalLM):
    """A language model under the names of ``transformers.Phi3ForCausalLM``. See :func:`selfattn_models.load`."""

    kinds: ClassVar[dict[str, str]] = {"phi3": "Phi3"}
    usual: ClassVar[dict[str, tuple[int, int | None, int | None]]] = {"phi3": (4096, None, None)}
    usual_eps = 1e-5
    fields: ClassVar[dict[str, str]] = LlamaForCausalLM.fields | {
        "query": "self_attn.qkv_proj",
        "key": "self_attn.qkv_proj",
        "value": "self_attn.qkv_proj",
        "gate": "mlp.gate_up_proj",
        "up": "mlp.gate_up_proj",
    }

    def _read_windows(self, config: Config, kind: str) -> None:
        self.windows = [config.size_or("sliding_window", None)] * self.num_layers

    def _read_rope(self, config: Config) -> None:
        """Read rotary positions of the first elements of each head.

        With two sets of factors, those of the original context alone are read.

        Transformers takes long_factor for all tokens of a text as soon as it is longer than the original context.
        """
        new, old, longest = config.raw(NEW), config.raw(OLD), self.max_positions
        own: dict[str, Any] = old or new or {}
        if not isinstance(own, dict):
            raise config.error(f"{OLD if old else NEW} must be an object, not {own!r:.80}")
        own = {**own, "rope_theta": own.get("rope_theta", config.number("rope_theta", self.usual_theta))}
        part = config.number("partial_rotary_factor", 1.0)
        part = config.inner(NEW, own).number("partial_rotary_factor", part)
        width = int(self.head_width * part)
        if not 2 <= width <= self.head_width:
            what = f"partial_rotary_factor {part} rotates {width} elements of heads"
            raise config.error(f"{what} of a width of {self.head_width}")
        before = config.size("original_max_position_embeddings", 4096)
        kind = own.get("rope_type") or own.get("type") or "default"
        if kind in LONGROPE:
            own |= {"rope_type": "longrope", "type": "longrope"}
            near, far = own.get("short_factor"), own.get("long_factor")
            if isinstance(far, list) and far != near:
                own["long_factor"] = near
                self.max_positions = min(before, longest)
        elif kind != "default":
            what = f"the type {kind!r:.80} of rotary positions is not supported"
            raise config.error(f"{what}; Phi-3 has default and longrope")
        values = {NEW: own | {"partial_rotary_factor": 1.0}, "original_max_position_embeddings": before}
        self.rope = read_rope(Config(values, config.where, file=config.file), width, longest)
        if self.max_positions < longest:
            what = "the long_factor of longer texts is not supported"
            warn(FolderWarning(f"{config.where}: the context is {before} and not {longest}: {what}"))
