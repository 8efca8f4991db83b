"""Attention as functions of PyTorch's autograd: gradients, `torch.func`, and `vmap` of them.

They serve eager calls, for which the operators of `_torch_operators` would read their schemas at each call; those stay
for what compiles, traces or watches a program.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

from selfattn._extras import import_extra
from selfattn.functional.tangents import scaled_dot_product_attention_hvp, scaled_dot_product_attention_jvp
from selfattn.interop._torch_operators import _tensor as as_tensor
from selfattn.interop._torch_operators import as_core_takes, backward, forward, memory

torch: Any = import_extra("torch", "torch")
forward_ad: Any = torch.autograd.forward_ad
Tensor: TypeAlias = Any
Tensors: TypeAlias = tuple[Tensor, ...]

_is_old_batch: Any = torch._C._functorch.is_legacy_batchedtensor
_TYPES = {torch.Tensor, torch.nn.Parameter}
# The number of last axes that are neither batches nor heads.
_OWN_AXES = {
    "query": 2,
    "key": 2,
    "value": 2,
    "attn_mask": 2,
    "bias": 2,
    "offset_bias": 1,
    "out": 2,
    "statistics": 2,
}
_OWN_AXES |= {"grad_out": 2, "grad_lse": 1, "alibi_slopes": 0, "sinks": 0, "key_lengths": 0}


@dataclass(eq=False, slots=True)
class Call:
    """What a call was given: the names of its tensors, in their order, and all else, as the core takes it."""

    names: tuple[str, ...]
    options: dict[str, Any]

    def read(self, tensors: Tensors) -> dict[str, Any]:
        return as_core_takes(self.names, tensors, self.options)

    def read_moving(self, moving: tuple[Tensor | None, ...]) -> dict[str, Any]:
        """Return tensors, each of which may have a tangent after all of them, as the core's functions take them."""
        if "cu_seqlens_q" in self.names:
            raise RuntimeError(
                "attention of nested tensors has first derivatives by backward(), and no others"
            )
        n = len(self.names)
        named = zip(self.names, moving[n:], strict=True)
        given = self.read(moving[:n]) | {
            "tangents": {name: memory(x, f"the tangent of {name}") for name, x in named if x is not None}
        }
        return {name: x for name, x in given.items() if name not in ("return_lse", "return_weights")}


def is_plain(tensors: Tensors) -> bool:
    """Return whether nothing compiles, traces or watches a call, so that it needs no operator."""
    return (
        _TYPES.issuperset(map(type, tensors))
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
    )


def attend(call: Call, tensors: Tensors) -> Any:
    """Compute attention of plain tensors; return the results, and what the backward pass needs if there may be one."""
    if (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or _is_transformed():
        return _apply(_Attention, call, *tensors)
    return forward(call.read(tensors), False)


def _is_transformed() -> bool:
    """Return whether forward mode or `torch.func` sees the call."""
    return bool(forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())


def _apply(function: Any, *arguments: Any) -> Any:
    """Call a function of autograd; without autograd only what it computes.

    PyTorch's own `apply` reads its signature each time, which takes microseconds.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    arguments = torch._functorch.utils.unwrap_dead_wrappers(arguments)
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return super(torch.autograd.Function, function).apply(*arguments)
        return function.forward(*arguments)
    except RuntimeError:
        if not any(isinstance(x, torch.Tensor) and _is_old_batch(x) for x in arguments):
            raise
    return _apply_to_old_batch(function, *arguments)


def _apply_to_old_batch(function: Any, *arguments: Any) -> Tensors:
    """Call a function of autograd under the older `vmap`, which `is_grads_batched` and `gradcheck` use."""
    level = torch._C._vmapmode_decrement_nesting() + 1
    try:
        axes = tuple(0 if isinstance(x, torch.Tensor) and _is_old_batch(x) else None for x in arguments)
        bare = [
            x if axis is None else torch._remove_batch_dim(x, level, 1, 0)
            for x, axis in zip(arguments, axes, strict=True)
        ]
        n = next(len(x) for x, axis in zip(bare, axes, strict=True) if axis == 0)
        found, _ = function.vmap(SimpleNamespace(batch_size=n), axes, *bare)
    finally:
        torch._C._vmapmode_increment_nesting()
    return tuple(torch._add_batch_dim(x, 0, level) for x in found)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The results, and what gradients need."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor) -> Tensors:
        return tuple(forward(call.read(tensors), True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        call, *tensors = inputs
        lse, weights = (bool(call.options.get(name)) for name in ("return_lse", "return_weights"))
        ctx.mark_non_differentiable(*output[1 + lse :])
        ctx.set_materialize_grads(False)
        statistics, out = (*output[1 + lse + weights :], output[0])[:2]
        ctx.call, ctx.lse, ctx.others = call, lse, len(output) - 1 - lse
        _save(ctx, out, statistics, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        names = ctx.call.names
        wrt = tuple(itertools.compress(names, ctx.needs_input_grad[1:]))
        found = _apply(_Gradients, ctx.call, wrt, grads[0], grads[1] if ctx.lse else None, *ctx.saved_tensors)
        places = dict(zip(wrt, found, strict=True))
        return None, *map(places.get, names)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        found = _apply(_Tangents, ctx.call, *ctx.saved_tensors[2:], *tangents)
        return *found[: 1 + ctx.lse], *(None,) * ctx.others

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, *tensors: Tensor) -> Any:
        return _batched(_Attention, info.batch_size, (call,), call.names, tensors, in_dims[1:])


class _Gradients(torch.autograd.Function):  # type: ignore[misc]
    """The gradients of the inputs that ``wrt`` names."""

    @staticmethod
    def forward(
        call: Call,
        wrt: tuple[str, ...],
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        out: Tensor,
        statistics: Tensor,
        *tensors: Tensor,
    ) -> Tensors:
        return tuple(backward(call.read(tensors), wrt, grad_out, grad_lse, out, statistics))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        ctx.call, ctx.wrt, *gradients = inputs[:4]
        ctx.set_materialize_grads(False)
        _save(ctx, *gradients, *inputs[6:])

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Any, ...]:
        # The Hessian is symmetric: the gradient of <gradients, directions> is its product with the directions.
        call, (grad_out, grad_lse, *tensors) = ctx.call, ctx.saved_tensors
        places = dict(zip(ctx.wrt, directions, strict=True))
        moving = (*tensors, *map(places.get, call.names))
        wanted = ctx.needs_input_grad
        of_out, of_lse = _apply(_Tangents, call, *moving) if wanted[2] or wanted[3] else (None, None)
        wrt = tuple(itertools.compress(call.names, wanted[6:]))
        found = _apply(_Products, call, wrt, grad_out, grad_lse, None, None, *moving) if wrt else ()
        places = dict(zip(wrt, found[len(wrt) :], strict=True))
        return (
            None,
            None,
            of_out,
            None if grad_lse is None else of_lse,
            None,
            None,
            *map(places.get, call.names),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensors:
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        gradients = grad_out, grad_lse, *tangents[2:4]
        found: Tensors = _apply(_Products, ctx.call, ctx.wrt, *gradients, *tensors, *tangents[6:])
        return found[len(ctx.wrt) :]

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, wrt: tuple[str, ...], *tensors: Tensor | None) -> Any:
        names = "grad_out", "grad_lse", "out", "statistics", *call.names
        return _batched(_Gradients, info.batch_size, (call, wrt), names, tensors, in_dims[2:], wrt)


class _Tangents(torch.autograd.Function):  # type: ignore[misc]
    """The tangents of the output and of the log-sum-exp, along one tangent, or None, for each tensor of the call."""

    @staticmethod
    def forward(call: Call, *moving: Tensor | None) -> Tensors:
        _, found = scaled_dot_product_attention_jvp(**call.read_moving(moving), return_lse=True)
        return tuple(map(as_tensor, found))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        ctx.call, *moving = inputs
        ctx.set_materialize_grads(False)
        _save(ctx, *moving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        names, wanted = ctx.call.names, ctx.needs_input_grad[1:]
        wrt = tuple(dict.fromkeys(itertools.compress(2 * names, wanted)))
        found = _apply(_Products, ctx.call, wrt, *gradients, None, None, *ctx.saved_tensors)
        of_tangents, of_tensors = (
            dict(zip(wrt, part, strict=True)) for part in (found[: len(wrt)], found[len(wrt) :])
        )
        return None, *map(of_tensors.get, names), *map(of_tangents.get, names)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            "attention has no forward mode of forward mode: take it of backward(), as hessian does"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, *moving: Tensor | None) -> Any:
        return _batched(_Tangents, info.batch_size, (call,), 2 * call.names, moving, in_dims[1:])


class _Products(torch.autograd.Function):  # type: ignore[misc]
    """The gradients that ``wrt`` names, and their tangents: products with the Hessian."""

    @staticmethod
    def forward(
        call: Call,
        wrt: tuple[str, ...],
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        grad_out_tangent: Tensor | None,
        grad_lse_tangent: Tensor | None,
        *moving: Tensor | None,
    ) -> Tensors:
        named: dict[str, Any] = {
            "grad_out": grad_out,
            "grad_lse": grad_lse,
            "grad_out_tangent": grad_out_tangent,
            "grad_lse_tangent": grad_lse_tangent,
        }
        gradients: dict[str, Any] = {
            name: None if x is None else memory(x, name) for name, x in named.items()
        }
        found = scaled_dot_product_attention_hvp(**call.read_moving(moving), **gradients, wrt=wrt)
        return tuple(as_tensor(x) for part in found for x in part)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "attention has first and second derivatives, no third ones: leave out create_graph=True"
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("attention has first and second derivatives, no third ones")

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, wrt: tuple[str, ...], *tensors: Tensor | None) -> Any:
        names = *2 * ("grad_out", "grad_lse"), *2 * call.names
        return _batched(_Products, info.batch_size, (call, wrt), names, tensors, in_dims[2:], 2 * wrt)


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    """Keep tensors for the backward pass and, where there is one, for forward mode."""
    ctx.save_for_backward(*tensors)
    if _is_transformed():
        ctx.save_for_forward(*tensors)


def _batched(
    function: Any,
    n: int,
    constants: tuple[Any, ...],
    names: tuple[str, ...],
    tensors: Tensors,
    axes: tuple[int | None, ...],
    results: tuple[str, ...] = (),
) -> tuple[Tensors, int]:
    """Call a function for each of ``n`` examples, whose axes in the tensors are given: in one call, if it can be.

    It cannot be with dropout, as each example drops what it would drop alone, nor of packed sequences. Of one call
    the examples are another leading axis, and results that are like inputs, whose names are given, get their shapes.
    """
    given = list(zip(tensors, axes, strict=True))
    call = constants[0]
    if call.options.get("dropout_p") or "cu_seqlens_q" in call.names:
        each = [
            _apply(function, *constants, *(x if axis is None else x.select(axis, i) for x, axis in given))
            for i in range(n)
        ]
        return tuple(map(torch.stack, zip(*each, strict=True))), 0
    shapes = {
        name: x.shape if axis is None else x.movedim(axis, 0).shape[1:]
        for name, (x, axis) in zip(names, given, strict=True)
        if x is not None
    }
    leading = max(len(shapes[name]) for name in ("query", "key", "value")) - 2
    whole: list[Tensor] = []
    for name, (x, axis) in zip(names, given, strict=True):
        if x is None:
            whole.append(None)
            continue
        ones = (1,) * (leading + _OWN_AXES[name] - len(shapes[name]))
        first = x.expand(n, *x.shape) if axis is None else x.movedim(axis, 0)
        whole.append(first.reshape(n, *ones, *shapes[name]))
        if name in ("out", "statistics"):
            whole[-1] = whole[-1].contiguous()
    found = _apply(function, *constants, *whole)
    if results:
        found = [x.reshape(n, *shapes[name]) for x, name in zip(found, results, strict=True)]
    return tuple(found), 0
