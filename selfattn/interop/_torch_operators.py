"""The operators ``selfattn::…`` of PyTorch: what its autograd, compiler and export see of the core.

Owns their schemas, their gradients, and how tensors share memory with arrays.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from selfattn import _core
from selfattn._check import Array, as_array
from selfattn._extras import import_extra
from selfattn.functional._options import AttentionOptions
from selfattn.functional.attention import (
    NAMES,
    attention_backward,
    attention_forward,
    scaled_dot_product_attention_vjp,
)
from selfattn.functional.block_mask import BlockMask

torch: Any = import_extra("torch", "torch")
Tensor: TypeAlias = Any

TENSORS = (*NAMES, "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "rng")
_KINDS = {"float | None": "float?", "bool": "bool", "int | None": "int?"}  # as the schema writes types
_NUMBERS = ", ".join(
    f"{_KINDS[p.annotation]} {p.name}={p.default}"
    for p in inspect.signature(scaled_dot_product_attention_vjp).parameters.values()
    if p.name in AttentionOptions.__annotations__ and p.annotation in _KINDS
)
_SCHEMA = (
    f"Tensor query, Tensor key, Tensor value, {', '.join(f'Tensor? {name}=None' for name in TENSORS[3:])}, *, "
    f"float dropout_p=0.0, bool is_causal=False, {_NUMBERS}, str? causal=None, int? left=None, int? right=None, "
    "int? block_mask=None"
)
_PLAIN = torch.Tensor
_NUMPYS = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool}
_OFFSETS = TENSORS[3:].index("cu_seqlens_q")
BLOCK_MASKS: weakref.WeakValueDictionary[int, BlockMask] = weakref.WeakValueDictionary()  # by their id


def _plain(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Compute attention without options and gradients: a long schema, and autograd, take microseconds."""
    arrays = memory(query), memory(key), memory(value)
    return _tensor(_core.scaled_dot_product_attention(*arrays, None, 0.0, is_causal, num_threads=_threads()))


def forward(given: dict[str, Any], keep: bool) -> list[Tensor]:
    """Return the results, and with ``keep`` statistics and, for 16 bits, the output before rounding."""
    if not keep:
        packed = "cu_seqlens_q" in given
        found = (_core._varlen_attention if packed else _core.scaled_dot_product_attention)(**given)
        return [_tensor(x) for x in (found if isinstance(found, tuple) else (found,))]
    out, statistics, unrounded, *rest = attention_forward(**given)
    kept = (statistics,) if unrounded is out else (statistics, unrounded)
    return [_tensor(x) for x in (out, *rest, *kept)]


def _forward(*tensors: Tensor | None, keep: bool = False, **options: Any) -> list[Tensor]:
    return forward(_read(tensors, options), keep)


def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    keep: bool = False,
    return_lse: bool = False,
    return_weights: bool = False,
    enable_gqa: bool = False,
    **_: Any,
) -> list[Tensor]:
    """Return tensors of the shapes, dtypes and strides that `_forward` returns."""
    packed = others[_OFFSETS:] and others[_OFFSETS] is not None
    heads = -3 if enable_gqa else -2  # those of query count
    lead = torch.broadcast_shapes(*(x.shape[:heads] for x in (query, key, value))) + query.shape[heads:-2]
    rows = (query.shape[1], query.shape[0]) if packed else (*lead, query.shape[-2])
    shape = (*(query.shape[:2] if packed else rows), value.shape[-1])
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    found = [query.new_empty(shape)]
    found += [query.new_empty(rows, dtype=wide)] * return_lse
    found += [query.new_empty((*rows, key.shape[-2]))] * return_weights
    if keep:
        found += [query.new_empty((*rows, 2), dtype=wide)]
        found += [query.new_empty(shape, dtype=wide)] * (query.dtype.itemsize == 2)
    return found


def backward(
    given: dict[str, Any],
    names: tuple[str, ...],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    statistics: Tensor,
) -> list[Tensor]:
    """Return the gradients that ``names`` lists."""
    found = attention_backward(
        **given,
        names=names,
        out=memory(out),
        statistics=memory(statistics),
        grad_lse=None if grad_lse is None else memory(grad_lse),
        grad_out=np.zeros(out.shape, given["query"].dtype) if grad_out is None else memory(grad_out),
    )
    return [_tensor(x) for x in found]


def _backward(*tensors: Tensor | None, wrt: list[int], **options: Any) -> list[Tensor]:
    return backward(_read(tensors[4:], options), tuple(NAMES[n] for n in wrt), *tensors[:4])


def _save(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: list[Tensor]) -> None:
    """Keep what the gradients need."""
    flags = "keep", "return_lse", "return_weights"
    keep, ctx.lse, weights = (keyword_only_inputs.pop(name) for name in flags)
    if not keep:
        raise RuntimeError("this graph was made without gradients: make it with tensors that require them")
    ctx.mark_non_differentiable(*output[1 + ctx.lse :])
    ctx.set_materialize_grads(False)
    statistics, out = (*output[1 + ctx.lse + weights :], output[0])[:2]
    ctx.save_for_backward(out, statistics, *inputs)
    ctx.options, ctx.block_mask = keyword_only_inputs, BLOCK_MASKS.get(keyword_only_inputs["block_mask"])


def _pull_back(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    wrt = [n for n, needed in enumerate(ctx.needs_input_grad) if needed]
    grad_lse = grads[1] if ctx.lse else None
    found = attention_gradients(grads[0], grad_lse, *ctx.saved_tensors, wrt=wrt, **ctx.options)
    places = dict(zip(wrt, found, strict=True))
    return tuple(places.get(n) for n in range(len(ctx.needs_input_grad)))


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("attention has first derivatives here, no second ones: leave out create_graph=True")


def _read(tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments as the core takes them."""
    given = as_core_takes(TENSORS, tensors, options)
    if "left" in given or "right" in given:
        given["window"] = given.pop("left", None), given.pop("right", None)
    if "block_mask" in given:
        if given["block_mask"] not in BLOCK_MASKS:
            raise ValueError("the block mask of this graph is gone: a graph that is kept needs an attn_mask")
        given["block_mask"] = BLOCK_MASKS[given["block_mask"]]
    return given


def as_core_takes(
    names: tuple[str, ...], tensors: tuple[Tensor | None, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Return tensors by name, those that there are, and other options, as the core's functions take them."""
    given = {"num_threads": _threads(), **options}
    for name, x in zip(names, tensors, strict=False):
        if x is not None:
            given[name] = memory(x, name)
            if name == "rng":
                given[name] = int(given[name]) % 2**64
    return given


def _threads() -> int:
    return min(int(torch.get_num_threads()), _core.get_num_threads())


def memory(x: Tensor, name: str = "x") -> Array:
    """Return a tensor's memory as an array."""
    if x.requires_grad:
        x = x.detach()
    return x.numpy() if type(x) is _PLAIN and x.dtype in _NUMPYS else as_array(name, x)


def _tensor(x: Array) -> Tensor:
    """Return an array's memory as a tensor."""
    x = np.asarray(x, order="C")
    if x.dtype.kind == "V":  # bfloat16
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _register(schema: str, function: Callable[..., Any], fake: Callable[..., Any], **autograd: Any) -> Any:
    """Register a function as an operator, and return what calls it.

    A custom_op would check results for microseconds.
    """
    name = f"selfattn::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "cpu", function)
    torch.library.register_fake(name, fake)
    if autograd:
        torch.library.register_autograd(name, autograd.pop("backward"), **autograd)
    return getattr(torch.ops.selfattn, name.partition("::")[2]).default


plain_attention = _register(
    "plain_attention(Tensor query, Tensor key, Tensor value, bool is_causal) -> Tensor",
    _plain,
    lambda query, key, value, is_causal: _forward_fake(query, key, value)[0],
)
attention = _register(
    f"attention({_SCHEMA}, bool return_lse=False, bool return_weights=False, bool keep=False) -> Tensor[]",
    _forward,
    _forward_fake,
    backward=_pull_back,
    setup_context=_save,
)
attention_gradients = _register(
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor statistics, "
    f"{_SCHEMA}, int[] wrt=[]) -> Tensor[]",
    _backward,
    lambda *tensors, wrt, **_: [tensors[4 + n].new_empty(tensors[4 + n].shape) for n in wrt],
    backward=_refuse,
)
