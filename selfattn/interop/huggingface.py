"""Transformers: after `register`, ``attn_implementation="selfattn"`` computes a model's attention here.

Owns what Transformers' masks and keywords mean. ``selfattn.interop.torch`` owns the operator and its gradients.
Causality, windows, padding and packed sequences reach the core as such, not as arrays of all pairs.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from selfattn import _core
from selfattn._extras import import_extra
from selfattn.functional import BlockMask

torch: Any = import_extra("torch", "huggingface")
transformers: Any = import_extra("transformers", "huggingface")
masking_utils: Any = import_extra("transformers.masking_utils", "huggingface")
output_capturing: Any = import_extra("transformers.utils.output_capturing", "huggingface")

from selfattn.interop._torch_operators import _tensor, _threads, memory  # noqa: E402
from selfattn.interop.torch import scaled_dot_product_attention  # noqa: E402

__all__ = ["register"]

# Keywords that models hand down to attention, and that change nothing there.
_HARMLESS = {
    "position_ids",
    "cache_position",
    "position_embeddings",  # queries and keys are rotated already
    "cache",
    "past_key_values",
    "use_cache",  # `key` and `value` come from it
    "sliding_window",  # the mask has it
    "seq_idx",  # for layers without attention
    "deterministic",  # gradients always are
    "labels",
    "num_items_in_batch",
    "logits_to_keep",
    "return_dict",
    "output_hidden_states",
    "output_router_logits",  # later
}
# Lengths of packed sequences, which Transformers reads in `position_ids` too: the mask has them.
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def register() -> None:
    """Let Transformers' models take ``attn_implementation="selfattn"``: encoders, decoders and both together.

    Examples
    --------
    >>> from selfattn.interop import huggingface
    >>> huggingface.register()
    """
    transformers.AttentionInterface.register("selfattn", _attention)
    transformers.AttentionMaskInterface.register("selfattn", _mask)
    if not hasattr(transformers.PreTrainedModel.get_correct_attn_implementation, "selfattn"):
        transformers.PreTrainedModel.get_correct_attn_implementation = _checking(
            transformers.PreTrainedModel.get_correct_attn_implementation
        )


def _checking(choose: Any) -> Any:
    """Return Transformers' method that chooses an implementation, with the refusal that "sdpa" has of its own."""

    @functools.wraps(choose)
    def chosen(self: Any, *given: Any, **named: Any) -> Any:
        found = choose(self, *given, **named)
        known = self._supports_attention_backend or self._supports_sdpa
        if found == "selfattn" and not (known or _takes_interface(type(self))):
            raise ValueError(
                f"{type(self).__name__} computes attention in code of its own, which no attn_implementation changes: "
                'load it with attn_implementation="eager"'
            )
        return found

    chosen.selfattn = True  # type: ignore[attr-defined]
    return chosen


def _takes_interface(kind: type) -> bool:
    """Return whether the module of a model's class, or of one that it inherits from, calls Transformers' interface."""
    modules = (sys.modules.get(each.__module__) for each in kind.__mro__)
    own = (each for each in modules if each is not None and each.__name__ != "transformers.modeling_utils")
    return any(hasattr(each, "ALL_ATTENTION_FUNCTIONS") for each in own)


# ------------------------------------------------------------------------------------------------------ masks


class _Mask(torch.Tensor):  # type: ignore[misc]
    """A mask as what it means: options of attention over the first `length` keys; later keys are closed.

    An operation on it sees Transformers' own mask, which is added to scores, and may change it: then that one counts.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # reading a shape needs no dispatch

    @staticmethod
    def __new__(cls, given: dict[str, Any], options: dict[str, Any], length: int) -> _Mask:
        shape = (given["batch_size"], 1, given["q_length"], given["kv_length"])
        named = {name: given[name] for name in ("dtype", "device") if name in given}
        mask: _Mask = torch.Tensor._make_wrapper_subclass(cls, shape, **named)
        mask.given, mask.options, mask.length = given, options, length
        return mask

    @functools.cached_property
    def added(self) -> Any:
        return masking_utils.eager_mask(**self.given)

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        args, named = torch.utils._pytree.tree_map_only(_Mask, lambda mask: mask.added, (args, named or {}))
        return operation(*args, **named)


def _mask(**given: Any) -> Any:
    """Return the mask that Transformers describes by lengths, offsets, a function of indices and a padding mask."""
    given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if masking_utils.is_tracing(given["attention_mask"]):
        return masking_utils.eager_mask(**given)
    known = _meaning(**given) or ({"attn_mask": masking_utils.sdpa_mask(**given)}, given["kv_length"])
    return _Mask(given, *known)


def _meaning(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Any,
    attention_mask: Any,
    **_: Any,
) -> tuple[dict[str, Any], int] | None:
    """Return options of attention over the first keys, and the number of keys; None where no options mean the mask."""
    parts = [(*_KINDS.get(name, ("unknown", len)), held) for name, held in _parts(mask_function)]
    rule = {kind: read(held) for kind, read, held in parts}
    offset, causal = int(q_offset) - kv_offset, "causal" in rule
    length = offset + q_length if causal else kv_length  # the diagonal ends in the last open key
    if (
        "unknown" in rule
        or len(rule) < len(parts)
        or not 0 <= offset <= length <= kv_length
        or ("window" in rule and offset and not causal)
        or (attention_mask is not None and attention_mask.ndim != 2)
    ):
        return None
    options: dict[str, Any] = {name: rule[name] for name in ("causal", "window") if name in rule}
    if "documents" in rule:
        rows, keys = np.arange(q_length) + int(q_offset), np.arange(length) + kv_offset
        options["block_mask"] = BlockMask.from_documents(rule["documents"](rows), rule["documents"](keys))
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset : kv_offset + length]
        lengths = kept.sum(-1, keepdim=True)
        if not torch.equal(kept, torch.arange(kept.shape[1]) < lengths):
            kept = torch.nn.functional.pad(kept, (0, length - kept.shape[1]))
            options["attn_mask"] = kept[:, None, None]
        elif bool((lengths < length).any()):
            options["key_lengths"] = lengths
    return options, length


# What Transformers' functions of indices mean, by what they hold; documents as a function of positions.
_KINDS: dict[str, tuple[str, Any]] = {
    "bidirectional_mask_function": ("all", len),
    "causal_mask_function": ("causal", lambda held: "lower_right"),
    "sliding_window_overlay": ("window", lambda held: (held["sliding_window"] - 1, None)),
    "sliding_window_bidirectional_overlay": ("window", lambda held: (held["sliding_window"],) * 2),
    "chunked_overlay": (
        "documents",
        lambda held: lambda i: (i - held["left_padding"][:, None, None].numpy()) // held["chunk_size"],
    ),
    # A position rises by 1 within a sequence: what positions mean there, distances of indices mean too.
    "packed_sequence_mask_function": (
        "documents",
        lambda held: lambda i: held["packed_sequence_mask"].numpy()[:, None, i],
    ),
    "remap_positions_for_packed_sequence": ("positions", len),
}


def _parts(function: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the names of the functions of Transformers that a mask function joins, with what each holds."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return [("", {})]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = dict(zip(function.__code__.co_freevars, cells, strict=True))
    name = function.__qualname__.partition(".")[0]
    inner = held.get("mask_functions", [held[x] for x in ("mask_function",) if x in held])
    return [(name, held)] * (name != "and_masks") + [part for each in inner for part in _parts(each)]


# -------------------------------------------------------------------------------------------------- attention


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Any = None,
    s_aux: Any = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Any, Any]:
    """Compute a module's attention: the output, (batch, queries, heads, width), and the weights if they are wanted."""
    rows, columns = query.shape[2], key.shape[2]
    length = columns
    options: dict[str, Any] = {"attn_mask": attention_mask}
    if isinstance(attention_mask, _Mask):
        if "added" in vars(attention_mask) or attention_mask.shape[2:] != (rows, columns):
            options["attn_mask"] = attention_mask.added
        else:
            length, options = attention_mask.length, attention_mask.options.copy()
    elif attention_mask is None and rows > 1:  # as in Transformers' sdpa
        options["is_causal"] = getattr(module, "is_causal", True) if is_causal is None else is_causal
    harmless = _HARMLESS | _PACKED if "block_mask" in options else _HARMLESS
    unknown = [name for name, given in others.items() if given is not None and name not in harmless]
    if unknown:
        raise TypeError(
            f"selfattn's attention does not know {', '.join(unknown)}, which {type(module).__name__} "
            "passes: leave it out, or load the model with attn_implementation='eager'"
        )
    if length < columns:
        key, value = key[:, :, :length], value[:, :, :length]
    if torch.is_autocast_enabled("cpu"):  # as PyTorch's own attention
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    mask = options.get("attn_mask")
    if position_bias is not None:
        bias = position_bias[..., :length]
        if mask is not None:
            bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
        mask = bias
    collected = output_capturing._active_collector.get() or ()  # some models keep the keyword to themselves
    wanted = bool(output_attentions) or any("attentions" in name for name in collected)
    options |= {
        "attn_mask": mask,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "return_weights": wanted,
        "enable_gqa": key.shape[1] != query.shape[1],
    }
    if dropout or not _are_arrays(query, key, value):
        found = scaled_dot_product_attention(query, key, value, dropout_p=dropout, **options)
        out, weights = found if wanted else (found, None)
        out = out.transpose(1, 2).contiguous()
    else:
        out = query.new_empty((query.shape[0], rows, query.shape[1], value.shape[3]))
        array = memory if query.dtype is torch.bfloat16 else torch.Tensor.numpy
        tensors = (array(x) for x in (query, key, value, out.transpose(1, 2)))
        given = {name: memory(x, name) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        given |= zip(("query", "key", "value", "out"), tensors, strict=True)
        found = _core.scaled_dot_product_attention(**given, num_threads=_threads())
        weights = _tensor(found[1]) if wanted else None
    if wanted and length < columns:
        weights = torch.nn.functional.pad(weights, (0, columns - length))
    return out, weights


def _are_arrays(query: Any, key: Any, value: Any) -> bool:
    """Return whether the core may read a call's tensors itself, which saves the operator's time.

    It may not where anything differentiates, traces or watches the call, nor where the operator's errors are due.
    """
    return not (
        torch.is_grad_enabled()
        or torch.autograd.forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
    ) and all(
        type(x) is torch.Tensor and x.is_cpu and x.dtype is query.dtype and len(x) == len(query)
        for x in (query, key, value)
    )
