"""PyTorch: attention of tensors, differentiable there, and layers made from PyTorch's.

The operators that autograd, compiler and export see are in `_torch_operators`.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any, TypeAlias, Unpack

import numpy as np

from selfattn import nn
from selfattn._check import seed_from_rng
from selfattn._extras import import_extra
from selfattn.functional._options import AttentionOptions, accept_options
from selfattn.functional.attention import WRT
from selfattn.functional.block_mask import BlockMask
from selfattn.interop._torch_function import Call, attend, is_plain
from selfattn.interop._torch_operators import BLOCK_MASKS, TENSORS, attention, memory, plain_attention

torch: Any = import_extra("torch", "torch")
Tensor: TypeAlias = Any

__all__ = ["from_torch", "scaled_dot_product_attention"]

_LAYOUTS = {torch.strided, torch.jagged}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@accept_options(AttentionOptions)
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
    """Compute PyTorch's attention with selfattn's core and options.

    It is :func:`selfattn.scaled_dot_product_attention` for tensors.

    Gradients reach query, key, value, a float ``attn_mask``, ``alibi_slopes``, ``sinks``, ``bias`` and
    ``offset_bias``. They have gradients too, and tangents, as results have: double backward, forward mode and
    ``torch.func`` work, ``hessian`` and ``vmap`` among them. The bits are those of selfattn's function and of its
    vjp.

    Parameters
    ----------
    query, key, value : Tensor
        Of one dtype, on the CPU, with any strides, which are read in place. Nested tensors with a jagged layout, of
        shape (N, H, L*, E), become packed sequences; they take no mask, key lengths or block mask, and return no
        weights.
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
        A third derivative, forward mode of forward mode, and other than first derivatives of nested tensors, by
        backward mode, or in ``torch.compile``.

    Notes
    -----
    Dropout draws one number of ``torch.default_generator`` as its seed, so ``torch.manual_seed`` repeats it; ``rng``
    may also be a ``torch.Generator``. Weights that are dropped are others than PyTorch's. A call uses at most as many
    threads as ``torch.set_num_threads`` and :func:`selfattn.set_num_threads` allow. ``torch.compile`` breaks its
    graph at a ``block_mask``.

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
    given: dict[str, Any] = {**options, "is_causal": is_causal}
    if attn_mask is not None:
        given["attn_mask"] = attn_mask
    if dropout_p:
        given["dropout_p"] = dropout_p
    if return_lse:
        given["return_lse"] = True
    if return_weights:
        given["return_weights"] = True
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (_cast(x) for x in (query, key, value))
    _check(query, key, value)
    if len(given) > 1:
        _check_options(given)
    return (_jagged if query.is_nested else _run)(query, key, value, given)


def _run(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Any:
    """Compute attention; what is only kept for the backward pass is not returned."""
    named = {"query": query, "key": key, "value": value}
    options: dict[str, Any] = {}
    for name, x in given.items():
        (named if isinstance(x, torch.Tensor) and name in TENSORS else options)[name] = x
    tensors = tuple(named.values())
    if is_plain(tensors):
        results = attend(Call(tuple(named), options), tensors)
    else:
        # A trace of torch.jit is one graph with and without gradients, and its check compares both.
        keep = torch._C._get_tracing_state() is not None or (
            torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        )
        if not keep and len(named) == 3 and options.keys() == {"is_causal"}:
            return plain_attention(query, key, value, given["is_causal"])
        results = attention(**named, **_as_schema(options), keep=keep)
    n = 1 + ("return_lse" in given) + ("return_weights" in given)
    return results[0] if n == 1 else tuple(results[:n])


def _cast(x: Tensor) -> Tensor:
    """Return a tensor in autocast's dtype, as PyTorch's function takes it; float64 stays, as there."""
    casts = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype("cpu")) if casts else x


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse what is no tensor of the CPU, and several dtypes or layouts."""
    for name, x in zip(WRT, (query, key, value), strict=True):
        if not isinstance(x, torch.Tensor):
            kind = type(x).__name__
            raise TypeError(f"{name} is a {kind}, not a Tensor; selfattn's own function takes arrays")
        _check_device(name, x)
        dtype, layout = x.dtype, x.layout
        if dtype is not query.dtype:
            raise TypeError(f"query is {query.dtype}, but {name} is {dtype}: give {name}.to(query.dtype)")
        if dtype not in _DTYPES:
            raise TypeError(f"{name} is {dtype}; give floats, such as {name}.float()")
        if layout is not query.layout or layout not in _LAYOUTS:
            raise TypeError(f"{name} is {layout}; give all three dense, as by to_dense(), or torch.jagged")


def _check_device(name: str, x: Tensor) -> None:
    if not x.is_cpu:
        raise ValueError(f"{name} is on {x.device}; selfattn computes on the CPU: give {name}.cpu()")


def _check_options(given: dict[str, Any]) -> None:
    """Refuse tensors that NumPy cannot read, or that requires grad in place of a number; make a generator a seed."""
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            if name not in TENSORS and x.requires_grad:
                so = f"it has no gradient here; give float({name}), or multiply the query by a learned scale"
                raise TypeError(f"{name} must be a number, not a Tensor that requires grad: {so}")
            _check_device(name, x)
            if x.layout is not torch.strided:
                raise TypeError(f"{name} is {x.layout}; give {name}.to_dense()")
    rng = given.pop("rng", None)  # one of PyTorch's, or whatever NumPy's call takes
    if rng is not None and not isinstance(rng, torch.Generator):
        given["rng"] = seed_from_rng(rng)
    elif "dropout_p" in given:
        given["rng"] = torch.randint(2**63 - 1, (), generator=rng, device="cpu")


def _as_schema(given: dict[str, Any]) -> dict[str, Any]:
    """Return options as the operator's schema takes them: tensors and numbers in place of objects."""
    schema = {name: x for name, x in given.items() if x is not None}
    for name in schema.keys() & set(TENSORS):
        if name == "rng":
            seed = given[name] if given[name] < 2**63 else given[name] - 2**64
            schema[name] = torch.tensor(seed, device="cpu")
        else:
            schema[name] = torch.as_tensor(np.asarray(given[name]), device="cpu")
    if (window := schema.pop("window", None)) is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window must be (left, right), each an int >= 0 or None, got {window!r}")
        schema["left"], schema["right"] = window
    if (mask := schema.get("block_mask")) is not None:
        if not isinstance(mask, BlockMask):
            raise TypeError(f"block_mask must be a BlockMask, got {type(mask).__name__}")
        schema["block_mask"] = id(mask)
        BLOCK_MASKS[id(mask)] = mask
    return schema


def _jagged(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Any:
    """Compute attention of nested tensors (N, H, L*, E), whose rows, packed one after the other, the operator takes."""
    for name in ("attn_mask", "key_lengths", "block_mask", "return_weights"):
        if given.get(name) not in (None, False):
            raise TypeError(f"nested tensors take no {name}")
    rows = [x.transpose(1, 2) if x.dim() == 4 else x for x in (query, key, value)]
    for name, x in zip(WRT, rows, strict=True):
        if x.dim() != 4 or not x.is_contiguous():
            raise ValueError(f"{name} must have shape (N, H, L*, E) and be contiguous as (N, L*, H, E)")
    if key.offsets() is not value.offsets() and not torch.equal(key.offsets(), value.offsets()):
        lengths = [x.offsets().diff().tolist() for x in (key, value)]
        raise ValueError(
            f"key and value must have sequences of the same lengths, not {lengths[0]} and {lengths[1]}"
        )
    q, k, v = (x.values() for x in rows)
    results = _run(q, k, v, {**given, "cu_seqlens_q": query.offsets(), "cu_seqlens_k": key.offsets()})
    out, *lse = results if isinstance(results, tuple) else [results]
    nest = torch.nested.nested_tensor_from_jagged
    found = [nest(x, query.offsets()).transpose(1, 2) for x in (out, *(x.T for x in lse))]
    return tuple(found) if lse else found[0]


# ---------------------------------------------------------------------------------------------------- layers

_LAYER = {  # where PyTorch's encoder and decoder layers keep what their constructors take
    "d_model": "linear1.in_features",
    "nhead": "self_attn.num_heads",
    "dim_feedforward": "linear1.out_features",
    "dropout": "dropout.p",
    "layer_norm_eps": "norm1.eps",
    "batch_first": "self_attn.batch_first",
    "bias": "linear1.bias",
}
_PLACES = {
    "MultiheadAttention": {"bias": "in_proj_bias", "add_bias_kv": "bias_k"},
    "TransformerEncoderLayer": _LAYER,
    "TransformerDecoderLayer": _LAYER,
    "TransformerEncoder": {"encoder_layer": "layers.0"},
    "TransformerDecoder": {"decoder_layer": "layers.0"},
}
_ACTIVATIONS = {
    torch.nn.functional.relu: "relu",
    torch.relu: "relu",
    torch.nn.functional.gelu: "gelu",
    "ReLU()": "relu",
    "GELU(approximate='none')": "gelu",
}


def from_torch(module: Any) -> nn.Module:
    """Make selfattn's layer of the same name from a layer of ``torch.nn``, with copies of its parameters.

    Options, dtype, training mode, parameters that are shared, and modules that are used twice are kept. It takes the
    layers that :mod:`selfattn.nn` names as PyTorch does, and what contains them; modules of a ``Sequential`` get
    numbers as names.

    Parameters
    ----------
    module : torch.nn.Module

    Returns
    -------
    Module

    Raises
    ------
    TypeError
        A class that :mod:`selfattn.nn` does not have under this name, or a subclass.
    ValueError
        An option that the layer here does not have, such as ``max_norm``, another activation, or a hook.

    Examples
    --------
    >>> import torch
    >>> from selfattn.interop.torch import from_torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    >>> x = torch.randn(3, 5, 8)
    >>> torch.allclose(torch.from_numpy(from_torch(layer)(x.numpy())), layer(x), atol=1e-5)
    True
    """
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    first = next((x for x in parameters if x.is_floating_point()), torch.zeros(()))
    _check_device("module", first)
    converted: nn.Module = _converted(module, memory(first).dtype, {})
    return converted


def _converted(module: Any, dtype: np.dtype[Any], made: dict[Any, Any]) -> Any:
    """Return the layer; ``made`` has what was made of each module and parameter so far."""
    if module in made:
        return made[module]
    kind = type(module)
    if kind is torch.nn.modules.linear.NonDynamicallyQuantizableLinear:  # in MultiheadAttention
        kind = torch.nn.Linear
    name = kind.__name__
    known = [each for each in nn.__all__ if hasattr(torch.nn, each) and each not in ("Module", "init")]
    if name not in known or kind is not getattr(torch.nn, name):
        way = "convert its encoder and its decoder" if name == "Transformer" else f"it has {', '.join(known)}"
        raise TypeError(f"selfattn.nn has no layer for a {kind.__module__}.{name}; {way}")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError(f"a {name} has a hook, which selfattn.nn.{name} would not call: remove it")
    mine: Any = getattr(nn, name)
    taken = inspect.signature(mine).parameters
    for option, parameter in inspect.signature(kind).parameters.items():
        found = getattr(module, option, parameter.default)
        if option not in taken and option not in ("inplace", "args") and found != parameter.default:
            raise ValueError(f"selfattn.nn.{name} has no {option}, which is {found!r} here")
    if name in ("Sequential", "ModuleList"):
        children = [_converted(child, dtype, made) for child in module]
        made[module] = layer = mine(*children) if name == "Sequential" else mine(children)
    else:
        options = {
            each: _option(module, name, each, dtype, made) for each in taken if each not in ("dtype", "rng")
        }
        made[module] = layer = mine(**options, dtype=dtype) if "dtype" in taken else mine(**options)
        for child_name, child in module.named_children():
            if child_name != "activation":
                setattr(layer, child_name, _converted(child, dtype, made))
    for own, parameter in module.named_parameters(recurse=False):
        layer.register_parameter(own, made.setdefault(parameter, memory(parameter, own).copy()))
    layer.training = module.training
    return layer


def _option(module: Any, name: str, option: str, dtype: np.dtype[Any], made: dict[Any, Any]) -> Any:
    """Return what PyTorch's module has for an option of selfattn's constructor."""
    places = {"bias": "bias"} if name in ("Linear", "LayerNorm") else {}
    value = attrgetter({**places, **_PLACES.get(name, {})}.get(option, option))(module)
    if option in ("bias", "add_bias_kv"):
        return value is not None
    if option == "activation":
        activation = _ACTIVATIONS.get(repr(value) if isinstance(value, torch.nn.Module) else value)
        if activation is None:
            raise ValueError(f"activation of a {name} must be relu or gelu, not {value!r}")
        return activation
    if isinstance(value, torch.nn.Module):
        return _converted(value, dtype, made)
    return memory(value) if isinstance(value, torch.Tensor) else value
