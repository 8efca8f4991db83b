"""PyTorch: attention as differentiable operators that share memory with tensors.

Owns the operators ``selfattn::attention`` and ``selfattn::attention_backward``, through which PyTorch's autograd, compiler and export
see the core.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, Unpack, cast

import numpy as np

from selfattn import _core
from selfattn._check import Array, seed_from_rng
from selfattn._extras import import_extra
from selfattn.functional._gradients import WRT, AttentionGradients, apart, round_into
from selfattn.functional._options import AttentionOptions, takes
from selfattn.functional.attention import HEADS, attention_backward
from selfattn.functional.block_mask import BlockMask
from selfattn.functional.varlen import varlen_backward

torch: Any = import_extra("torch", "torch")
Tensor: TypeAlias = Any

__all__ = ["scaled_dot_product_attention"]

_WRT = AttentionGradients._fields
_TENSORS = (*_WRT, "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "rng")
_SCHEMA = (
    f"Tensor query, Tensor key, Tensor value, {', '.join(f'Tensor? {name}=None' for name in _TENSORS[3:])}, *, "
    "float dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, str? causal=None, "
    "int? left=None, int? right=None, float? softcap=None, int? block_mask=None, int? num_threads=None"
)
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_block_masks: weakref.WeakValueDictionary[int, BlockMask] = (
    weakref.WeakValueDictionary()
)  # by what operators take


@takes(AttentionOptions)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Compute PyTorch's attention with selfattn's core and options: :func:`selfattn.scaled_dot_product_attention` for tensors.

    Gradients reach query, key, value, a float ``attn_mask``, ``alibi_slopes`` and ``sinks``, once: gradients have no gradients.
    The bits are those of selfattn's function and of its vjp.

    Parameters
    ----------
    query, key, value : Tensor
        Of one dtype, on the CPU, with any strides, which are read in place. Nested tensors with a jagged layout, of shape
        (N, H, L*, E), become packed sequences; they take no mask, key lengths, block mask or weights, and no ``torch.compile``.
    **options
    return_lse : bool, default False
        Append the log-sum-exp, which has a gradient.
    return_weights : bool, default False
        Append the weights, (..., L, S), which have no gradient.

    Returns
    -------
    out : Tensor, shape (..., L, Ev)
        Contiguous; or a tuple, with ``lse`` and ``weights``.

    Raises
    ------
    TypeError, ValueError
        As selfattn's function; tensors of several dtypes, of integers, sparse, complex or on another device.
    RuntimeError
        A second derivative.

    Notes
    -----
    Dropout draws one number of ``torch.default_generator`` as its seed, so ``torch.manual_seed`` repeats it; ``rng`` may also be a
    ``torch.Generator``. Weights that are dropped are others than PyTorch's. A call uses at most as many threads as
    ``torch.set_num_threads`` and :func:`selfattn.set_num_threads` allow. ``block_mask`` cannot be traced by ``torch.compile``.

    Examples
    --------
    >>> import torch
    >>> from selfattn.interop.torch import scaled_dot_product_attention
    >>> q, k, v = torch.randn(3, 1, 8, 64, 32, requires_grad=True)
    >>> out = scaled_dot_product_attention(q, k, v, is_causal=True, window=(15, 0))
    >>> out.sum().backward()
    >>> out.shape
    torch.Size([1, 8, 64, 32])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if (
            type(x) is not torch.Tensor
            or not x.is_cpu
            or x.dtype not in _DTYPES
            or x.dtype is not query.dtype
        ):
            _check(name, x, query)
    given: dict[str, Any] = {**options}
    if attn_mask is not None:
        given["attn_mask"] = attn_mask
    if dropout_p:
        given["dropout_p"] = dropout_p
    if given:
        _to_schema(given)
    if query.is_nested:
        return _jagged(
            query,
            key,
            value,
            given,
            is_causal=is_causal,
            return_lse=return_lse,
            return_weights=return_weights,
        )
    given.update(is_causal=is_causal, return_lse=return_lse, return_weights=return_weights)
    results = _run(query, key, value, given)
    return results[0] if len(results) == 1 else results


def _run(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Call the operator; what it keeps for the backward pass is not returned."""
    tensors = (query, key, value, *(x for x in given.values() if isinstance(x, torch.Tensor)))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    results = _attention(query, key, value, keep=keep, **given)
    return tuple(results[: 1 + given["return_lse"] + given["return_weights"]])


def _check(name: str, x: Any, query: Tensor) -> None:
    """Refuse what is no tensor of the CPU, or has another dtype than query."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(x).__name__}; selfattn's own function takes arrays"
        )
    if x.device.type != "cpu":
        raise ValueError(f"{name} is on {x.device}; selfattn computes on the CPU: give {name}.cpu()")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"{name} is {x.dtype}; float16, bfloat16, float32 and float64 work: give {name}.float()"
        )
    if x.dtype is not query.dtype:
        raise TypeError(f"query is {query.dtype}, but {name} is {x.dtype}: give {name}.to(query.dtype)")
    if x.is_nested != query.is_nested or x.layout not in (torch.strided, torch.jagged):
        raise TypeError(
            f"query is {query.layout}, and {name} {x.layout}: give all strided (dense), or all torch.jagged"
        )


def _to_schema(given: dict[str, Any]) -> None:
    """Make options what the operators' schema takes: tensors, and numbers in place of objects."""
    for name in _TENSORS[3:7]:
        if given.get(name) is not None and not isinstance(given[name], torch.Tensor):
            given[name] = torch.as_tensor(np.asarray(given[name]))
    if (window := given.pop("window", None)) is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window must be (left, right), each an int >= 0 or None, got {window!r}")
        given["left"], given["right"] = window
    if (mask := given.get("block_mask")) is not None:
        if not isinstance(mask, BlockMask):
            raise TypeError(f"block_mask must be a BlockMask, got {type(mask).__name__}")
        _block_masks[id(mask)] = mask
        given["block_mask"] = id(mask)
    rng = given.pop("rng", None)
    if rng is None or isinstance(rng, torch.Generator):
        if given.get("dropout_p"):
            given["rng"] = torch.randint(2**63 - 1, (), generator=rng)
    else:
        seed = seed_from_rng(rng)
        given["rng"] = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def _jagged(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any], **flags: bool) -> Any:
    """Compute attention of nested tensors (N, H, L*, E), whose rows, packed one after the other, the operator takes."""
    refused = [
        name for name in ("attn_mask", "key_lengths", "block_mask") if given.pop(name, None) is not None
    ]
    if refused or flags["return_weights"]:
        raise TypeError(f"nested tensors take no {[*refused, 'return_weights'][0]}")
    rows = [x.transpose(1, 2) if x.dim() == 4 else x for x in (query, key, value)]
    for name, x in zip(_TENSORS, rows, strict=False):
        if x.dim() != 4 or x.layout is not torch.jagged or not x.is_contiguous():
            raise ValueError(f"{name} must be jagged, of shape (N, H, L*, E), contiguous as (N, L*, H, E)")
    offsets = query.offsets()
    given |= {"cu_seqlens_q": offsets, "cu_seqlens_k": key.offsets(), **flags}
    q, k, v = (x.values() for x in rows)
    out, *lse = _run(q, k, v, given)
    nested = [
        torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in (out, *(x.T for x in lse))
    ]
    return tuple(nested) if lse else nested[0]


# -------------------------------------------------------------------------------------------------- operators


def _read(tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments as the core takes them."""
    given: dict[str, Any] = {
        name: _array(x) for name, x in zip(_TENSORS, tensors, strict=False) if x is not None
    }
    if "rng" in given:
        given["rng"] = int(given["rng"]) % 2**64
    if "left" in options or "right" in options:
        given["window"] = options.pop("left", None), options.pop("right", None)
    if "block_mask" in options:
        number = options.pop("block_mask")
        if number not in _block_masks:
            raise ValueError(
                "the block mask of this call is gone; a graph that is saved takes a dense attn_mask"
            )
        given["block_mask"] = _block_masks[number]
    if "num_threads" not in options:
        given["num_threads"] = min(torch.get_num_threads(), _core.get_num_threads())
    return given | options


def _array(x: Tensor) -> Array:
    """Return a tensor's memory as an array."""
    x = x.detach() if x.requires_grad else x
    if x.dtype is not torch.bfloat16:
        return cast("Array", x.numpy())
    array: Array = x.view(torch.int16).numpy()
    return array.view(import_extra("ml_dtypes", "torch").bfloat16)


def _tensor(x: Array) -> Tensor:
    """Return an array's memory as a tensor."""
    x = np.asarray(x, order="C")
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype.kind == "V"
        else torch.from_numpy(x)
    )


def _forward(*tensors: Tensor | None, keep: bool = False, **options: Any) -> list[Tensor]:
    """Return the results, and with ``keep`` statistics and, for 16 bits, the output before rounding."""
    given = _read(tensors, options)
    packed = "cu_seqlens_q" in given
    if not keep:
        results = (_core._varlen_attention if packed else _core.scaled_dot_product_attention)(**given)
        return [_tensor(x) for x in (results if type(results) is tuple else (results,))]
    call = _core._varlen_forward if packed else _core._attention_forward
    out, statistics, unrounded, *rest = call(**given, unrounded=True)
    kept = [statistics]
    if unrounded is not out:
        round_into(out, unrounded, given["num_threads"])
        kept.append(unrounded)
    return [_tensor(x) for x in (out, *rest, *kept)]


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None, keep: bool = False,
    return_lse: bool = False, return_weights: bool = False, enable_gqa: bool = False, **_: Any,
) -> list[Tensor]:  # fmt: skip
    """Return empty tensors of the shapes, dtypes and strides that `_forward` returns."""
    *lead, L, _E = query.shape
    shape, rows = (*query.shape[:-1], value.shape[-1]), (query.shape[1], query.shape[0])
    if len(others) < 5 or others[4] is None:  # no packed sequences
        dims = -3 if enable_gqa else -2  # the heads of query count
        lead = list(torch.broadcast_shapes(*(x.shape[:dims] for x in (query, key, value))))
        lead += query.shape[dims:-2]
        shape, rows = (*lead, L, value.shape[-1]), (*lead, L)
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    found = [query.new_empty(shape)]
    found += [query.new_empty(rows, dtype=wide)] * return_lse
    found += [query.new_empty((*lead, L, key.shape[-2]))] * return_weights
    if keep:
        found.append(query.new_empty((*rows, 2), dtype=wide))
        if query.dtype.itemsize == 2:
            found.append(query.new_empty(shape, dtype=wide))
    return found


def _backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, statistics: Tensor, *tensors: Tensor | None,
    wrt: list[int], **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the inputs whose places ``wrt`` lists."""
    given = _read(tensors, options)
    backward, heads = (
        (varlen_backward, slice(1, 2)) if "cu_seqlens_q" in given else (attention_backward, HEADS)
    )
    query, key, value = (given.pop(name) for name in WRT)
    grad = np.zeros(out.shape, value.dtype) if grad_out is None else _array(grad_out)
    found = backward(
        query, apart(key, heads), apart(value, heads), names=tuple(_WRT[n] for n in wrt), grad_out=grad,
        grad_lse=None if grad_lse is None else _array(grad_lse), out=_array(out), statistics=_array(statistics), **given,
    )  # fmt: skip
    return [_tensor(cast("Array", found[n])) for n in wrt]


def _backward_fake(*tensors: Any, wrt: list[int], **_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (tensors[4 + n] for n in wrt)]


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: list[Tensor]
) -> None:
    """Keep what the gradients need; a tensor that is changed in place before they are computed is PyTorch's error."""
    ctx.options = dict(keyword_only_inputs)
    keep, ctx.lse, weights = (ctx.options.pop(name) for name in ("keep", "return_lse", "return_weights"))
    kept = output[1 + ctx.lse :]
    ctx.mark_non_differentiable(*kept)
    kept = kept[weights:]
    if not keep:
        raise RuntimeError("selfattn::attention needs keep=True where an input requires a gradient")
    ctx.save_for_backward(kept[1] if len(kept) > 1 else output[0], kept[0], *inputs)
    ctx.set_materialize_grads(False)
    ctx.block_mask = _block_masks.get(ctx.options["block_mask"])


def _pull_back(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    wrt = [n for n, needed in enumerate(ctx.needs_input_grad) if needed]
    found = _attention_backward(
        grads[0], grads[1] if ctx.lse else None, *ctx.saved_tensors, wrt=wrt, **ctx.options
    )
    places = dict(zip(wrt, found, strict=True))
    return tuple(places.get(n) for n in range(len(ctx.needs_input_grad)))


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "selfattn's attention has first derivatives only: gradients cannot be differentiated again"
    )


def _operator(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str) -> Any:
    """Register a function as an operator; return what calls it."""
    operator = torch.library.custom_op(
        f"selfattn::{name}", function, mutates_args=(), device_types="cpu", schema=f"({schema}) -> Tensor[]"
    )
    operator.register_fake(fake)
    return operator


_forward_operator = _operator(
    "attention",
    _forward,
    _forward_fake,
    f"{_SCHEMA}, bool return_lse=False, bool return_weights=False, bool keep=False",
)
_backward_operator = _operator(
    "attention_backward", _backward, _backward_fake,
    f"Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor statistics, {_SCHEMA}, int[] wrt=[]",
)  # fmt: skip
_forward_operator.register_autograd(_pull_back, setup_context=_save)
_backward_operator.register_autograd(_refuse)
_attention, _attention_backward = (
    torch.ops.selfattn.attention.default,
    torch.ops.selfattn.attention_backward.default,
)
