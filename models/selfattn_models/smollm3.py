"""SmolLM3: a Llama of which some layers, each fourth one as a rule, have no rotary positions.

Bakouch et al., "SmolLM3", 2025.
"""

from __future__ import annotations

from typing import Any, ClassVar

from selfattn_models._folder import FULL, SLIDING, Config
from selfattn_models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """A language model under the names of ``transformers.SmolLM3ForCausalLM``. See :func:`selfattn_models.load`."""

    kinds: ClassVar[dict[str, str]] = {"smollm3": "SmolLM3"}
    usual: ClassVar[dict[str, tuple[int, int | None, int | None]]] = {"smollm3": (32768, 4, None)}
    usual_theta = 2e6
    usually_tied = True

    def _read_windows(self, config: Config, kind: str) -> None:
        """Read which layers have rotary positions; the others are those with windows, unless the folder names these."""
        given, every = config.raw("no_rope_layers"), config.size("no_rope_layer_interval", 4)
        if given is None:
            given = [int((n + 1) % every != 0) for n in range(self.num_layers)]
        if not isinstance(given, list) or len(given) < self.num_layers or set(map(repr, given)) - {"0", "1"}:
            what = "no_rope_layers must have 1, or 0 for no rotary positions, for each layer"
            raise config.error(f"{what}, not {given!r:.80}")
        self.rotates = list(map(bool, given))
        size = config.size_or("sliding_window", None)
        windows = config.flag("use_sliding_window", False) and size is not None
        usual = [FULL if rotates or not windows else SLIDING for rotates in self.rotates[: self.num_layers]]
        self._take_windows(config, config.raw("layer_types") or usual, size)

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        return super()._options(n, longest, dtype) | ({} if self.rotates[n] else {"rotary": None})
