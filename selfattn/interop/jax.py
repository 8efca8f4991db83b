"""Attention for JAX: :func:`scaled_dot_product_attention` under ``jit``, ``vmap`` and ``grad``, computed on the CPU.

:func:`dot_product_attention` is the same with the call of ``jax.nn``'s function.
JAX calls back into Python, where the core computes all directions: reverse and forward mode, and either of reverse
mode, such as ``hessian``.

>>> import jax, jax.numpy as jnp
>>> from selfattn.interop.jax import scaled_dot_product_attention
>>> x = jnp.ones((2, 3, 4))
>>> jax.jit(jax.grad(lambda v: scaled_dot_product_attention(x, x, v).sum()))(x)[0, :, 0]
Array([1., 1., 1.], dtype=float32)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from selfattn import _core, functional
from selfattn._check import seed_from_rng
from selfattn._extras import import_extra
from selfattn.functional._options import AttentionOptions, accept_options
from selfattn.functional.attention import attention_backward, attention_forward

jax, jnp, jax_core, ad, batching, mlir, _buffers = (
    import_extra(f"jax{name}", "jax")
    for name in (
        "",
        ".numpy",
        ".extend.core",
        ".interpreters.ad",
        ".interpreters.batching",
        ".interpreters.mlir",
        ".experimental.buffer_callback",
    )
)

Arrays: TypeAlias = dict[str, Any]
Constants: TypeAlias = tuple[tuple[str, Any], ...]
# What JAX traces, with the number of last axes that are neither batches nor heads; other arguments are constants of a
# call.
_TRACED = {"query": 2, "key": 2, "value": 2, "attn_mask": 2, "bias": 2, "offset_bias": 1}
_TRACED |= {"alibi_slopes": 0, "sinks": 0, "key_lengths": 0}


@accept_options(AttentionOptions)
def scaled_dot_product_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Compute exact attention, with the arguments and the bits of :func:`selfattn.scaled_dot_product_attention`.

    Parameters
    ----------
    query, key, value : array_like, shapes (..., L, E), (..., S, E), (..., S, Ev)
        Integers become JAX's default float.
    **options
    return_lse : bool, default False
        Return ``(out, lse)``.

    Notes
    -----
    Query, key, value, a float ``attn_mask``, biases, ``alibi_slopes`` and ``sinks`` have gradients. JAX traces these,
    ``key_lengths`` and ``rng``: an int, a key of ``jax.random`` or its uint32, which dropout needs. Others are
    constants under ``jit``.
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, **options}
    rng = given.pop("rng", None)
    arrays = {name: jnp.asarray(given.pop(name)) for name in _TRACED if given.get(name) is not None}
    for name in ("query", "key", "value"):
        if jnp.issubdtype(arrays[name].dtype, jnp.integer):
            arrays[name] = arrays[name].astype(float)
    rank = max(arrays[name].ndim for name in ("query", "key", "value"))
    for name, x in arrays.items():  # vmap adds axes before these
        arrays[name] = x.reshape((1,) * (rank - 2 + _TRACED[name] - x.ndim) + x.shape)
    seed = _seed(rng) if dropout_p or rng is not None else None
    if dropout_p:
        arrays["rng"] = seed
    settings: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, **given}
    constants = tuple((name, _hashable(x)) for name, x in settings.items() if x is not None)
    found = _attend(constants, arrays)
    return found if return_lse else found[0]


def dot_product_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    bias: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: npt.ArrayLike | None = None,
    key_value_seq_lengths: npt.ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention with the call of ``jax.nn.dot_product_attention``.

    A query without open keys gets 0; in JAX it gets the mean of all values.

    Parameters
    ----------
    query, key, value : array_like, shapes ([B, ]T, N, H), ([B, ]S, K, H), ([B, ]S, K, Hv)
        N is a multiple of K.
    bias : array_like, broadcastable to ([B, ]N, T, S), optional
        Added to the scaled scores; it has a gradient.
    mask : array_like of bool, broadcastable to ([B, ]N, T, S), optional
        True where a query sees a key.
    scale, is_causal : float, bool
    query_seq_lengths, key_value_seq_lengths : array_like of int, shape (B,), optional
        Later queries get 0, and later keys are not seen.
    local_window_size : int or (int, int), optional
        The keys that are seen before a query and after it.
    implementation : {None, "xla"}
        Of no effect.
    return_residual : bool, default False
        Return ``(out, lse)``.

    Returns
    -------
    out : Array, shape ([B, ]T, N, Hv)
    lse : Array, shape ([B, ]T, N)
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation must be None or 'xla', not {implementation!r}")
    q, k, v = (jnp.asarray(x) for x in (query, key, value))
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        shapes = f"{q.shape}, {k.shape} and {v.shape}"
        raise ValueError(
            f"query, key and value must have 3 axes or 4, (batch, length, heads, width), not {shapes}"
        )
    if mask is not None and jnp.asarray(mask).dtype != bool:
        raise TypeError(f"mask must be of bool, not {jnp.asarray(mask).dtype}; floats are a bias")
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    options: dict[str, Any] = {"scale": scale, "window": window, "enable_gqa": k.shape[-2] != q.shape[-2]}
    options |= {"bias": bias, "is_causal": is_causal}
    if key_value_seq_lengths is not None:
        options["key_lengths"] = jnp.asarray(key_value_seq_lengths).reshape(-1, *(1,) * (q.ndim - 3))
    q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
    out, lse = scaled_dot_product_attention(q, k, v, mask, return_lse=True, **options)
    out, lse = out.swapaxes(-3, -2), lse.swapaxes(-2, -1)
    if query_seq_lengths is not None:
        rows = jnp.arange(q.shape[-2]) < jnp.asarray(query_seq_lengths).reshape(-1, 1)
        out = jnp.where(rows.reshape(*out.shape[:-2], 1, 1), out, 0)
    return (out, lse) if return_residual else out


def _hashable(x: Any) -> Any:
    """Return numbers and lists as JAX can compare them; of a number that JAX traces its own error says so."""
    x = x.tolist() if hasattr(x, "tolist") else x
    return tuple(x) if isinstance(x, list) else x


def _seed(rng: Any) -> Any:
    """Return a seed as uint32, the lowest bits first."""
    if isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.key_data(rng)
    if isinstance(rng, jax.Array) and rng.dtype == np.uint32:
        return rng
    if not isinstance(rng, int | np.integer):
        raise TypeError(f"dropout needs an int, a key of jax.random or its uint32 as rng, not {rng!r:.80}")
    return jnp.asarray(np.array([seed_from_rng(rng)], np.uint64).view(np.uint32))


# ------------------------------------------------------------------------------------------------ primitives
#
# Four functions of arrays, each named: attention; its tangents; its gradients; and tangents of these, products with
# the Hessian. Each is the derivative or the transpose of another. "d_query" is the tangent of "query", and so on.

_LINEAR = "d_"


@dataclasses.dataclass(frozen=True)
class _Callback:
    """What JAX calls with its buffers. JAX compiles equal callbacks once."""

    function: Callable[..., Any]
    parameters: Constants

    def __call__(self, context: Any, results: Any, given: Arrays) -> None:
        arrays, parameters = {name: np.asarray(x) for name, x in given.items()}, dict(self.parameters)
        constants = dict(parameters.pop("constants"))
        if "rng" in arrays:
            constants["rng"] = int.from_bytes(arrays.pop("rng").tobytes(), "little")
        found = self.function({**arrays, **constants}, **parameters)
        for result, x in zip(results, found, strict=True):
            np.asarray(result)[...] = x


def _attention(given: Arrays, keep: bool) -> Any:
    if not keep:
        return _core.scaled_dot_product_attention(**given, return_lse=True)
    out, statistics, unrounded, lse = attention_forward(**given, return_lse=True)
    return out, lse, unrounded, statistics


def _gradients(given: Arrays, wrt: tuple[str, ...]) -> Any:
    return attention_backward(**given, names=wrt)


def _tangents(given: Arrays) -> Any:
    return functional.scaled_dot_product_attention_jvp(**_moving(given), return_lse=True)[1]


def _products(given: Arrays, wrt: tuple[str, ...]) -> Any:
    named = {f"{name}_tangent": given.pop(_LINEAR + name, None) for name in ("grad_out", "grad_lse")}
    return functional.scaled_dot_product_attention_hvp(**_moving(given), **named, wrt=wrt)[1]


def _moving(given: Arrays) -> Arrays:
    """Return arguments of which those with tangents name them."""
    tangents = {name.removeprefix(_LINEAR): given.pop(name) for name in [*given] if name.startswith(_LINEAR)}
    others = {name: x for name, x in given.items() if name not in ("out", "statistics")}
    return {**others, "tangents": tangents}


def _outline(names: tuple[str, ...], types: Any, constants: Constants, keep: bool = False, **_: Any) -> Any:
    """Return what a call without keys on arrays without memory gives. In this call the core checks arguments."""
    arrays = {name: x for name, x in zip(names, types, strict=True) if name in _TRACED}
    blank = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in arrays.items()}
    arguments: Arrays = {"key_lengths": 0, **dict(constants), **blank, "rng": 0, "num_threads": 1}
    out, statistics, lse = _core._attention_forward(**arguments, return_lse=True)
    return (out, lse, out.astype(lse.dtype), statistics) if keep else (out, lse)


def _alike(names: tuple[str, ...], types: Any, wrt: tuple[str, ...], **_: Any) -> Any:
    return [types[names.index(name)] for name in wrt]


def _primitive(function: Callable[..., Any], outline: Callable[..., Any]) -> Any:
    """Make a primitive of JAX that calls a function of this file with NumPy's arrays when JAX computes."""
    made = jax_core.Primitive(f"selfattn{function.__name__}")
    made.multiple_results = True

    def call(*arrays: Any, names: tuple[str, ...], **parameters: Any) -> Any:
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outline(names, arrays, **parameters)]
        callback = _Callback(function, tuple(parameters.items()))
        # pure_callback copies arguments in the threads in which callbacks wait for the copies: many at once would
        # wait for ever.
        return _buffers.buffer_callback(callback, types)(dict(zip(names, arrays, strict=True)))

    def abstract(*types: Any, names: tuple[str, ...], **parameters: Any) -> Any:
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in outline(names, types, **parameters)]

    made.def_impl(call)
    made.def_abstract_eval(abstract)
    mlir.register_lowering(made, mlir.lower_fun(call, multiple_results=True))
    batching.primitive_batchers[made] = functools.partial(_batched, made)
    return made


def _bind(primitive: Any, arrays: Arrays, **parameters: Any) -> Any:
    return primitive.bind(*arrays.values(), names=tuple(arrays), **parameters)


def _batched(primitive: Any, arrays: Any, axes: Any, *, names: tuple[str, ...], **parameters: Any) -> Any:
    """Compute examples in one call, with a leading axis more; with dropout each is a call, and drops what it would."""
    n = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    given = {
        name: x if axis is None else jnp.moveaxis(x, axis, 0)
        for name, x, axis in zip(names, arrays, axes, strict=True)
    }
    mapped = {name for name, axis in zip(names, axes, strict=True) if axis is not None}
    if "rng" in names:

        def alone(each: Arrays) -> Any:
            return _bind(primitive, {name: each.get(name, given[name]) for name in names}, **parameters)

        found = jax.lax.map(alone, {name: given[name] for name in mapped})
        return found, [0] * len(found)
    shapes = {name: x.shape[name in mapped :] for name, x in given.items()}
    leading = max(len(shapes[name]) for name in ("query", "key", "value")) - 2
    wrt = parameters.get("wrt", ())
    whole = {}
    for name, x in given.items():
        own = _TRACED.get(name.removeprefix(_LINEAR), {"grad_lse": 1}.get(name.removeprefix(_LINEAR), 2))
        ones = (1,) * (leading + own - len(shapes[name]))
        partner = name.removeprefix(_LINEAR) if name.startswith(_LINEAR) else _LINEAR + name
        if name in mapped:
            whole[name] = x.reshape(n, *ones, *shapes[name])
        elif name == "query" or name in wrt or name not in _TRACED or partner in names:
            whole[name] = jnp.broadcast_to(x.reshape(*ones, *shapes[name]), (n, *ones, *shapes[name]))
        else:
            whole[name] = x
    found = _bind(primitive, whole, **parameters)
    if wrt:
        found = [x.reshape(n, *shapes[name]) for name, x in zip(wrt, found, strict=True)]
    return found, [0] * len(found)


def _split(values: Any, names: tuple[str, ...], tangents: Any) -> tuple[Arrays, Arrays]:
    """Return arrays by name, and the tangents, of those that have one, by theirs."""
    arrays = dict(zip(names, values, strict=True))
    moving = zip(names, tangents, strict=True)
    return arrays, {_LINEAR + name: x for name, x in moving if type(x) is not ad.Zero and name not in _KEPT}


_KEPT = "out", "statistics"  # functions of the inputs, whose tangents count


def _attention_jvp(values: Any, tangents: Any, *, names: Any, constants: Constants, keep: bool) -> Any:
    arrays, moving = _split(values, names, tangents)
    out, lse, unrounded, statistics = results = _bind(attention_p, arrays, constants=constants, keep=True)
    kept = {"out": unrounded, "statistics": statistics}
    found = _bind(tangents_p, arrays | kept | moving, constants=constants)
    still = [jnp.zeros_like(x) for x in results[2:]] if keep else []
    return results if keep else [out, lse], [*found, *still]


def _gradients_jvp(values: Any, tangents: Any, *, names: Any, **parameters: Any) -> Any:
    arrays, moving = _split(values, names, tangents)
    results = _bind(gradients_p, arrays, **parameters)
    return results, _bind(products_p, arrays | moving, **parameters)


def _linear_jvp(primitive: Any, values: Any, tangents: Any, *, names: Any, **parameters: Any) -> Any:
    """Differentiate what is linear in its tangents with respect to these; else the result has no derivative here."""
    arrays, moving = _split(values, names, tangents)
    if any(name[len(_LINEAR) :] in _TRACED or name == "d_grad_out" for name in moving):
        raise NotImplementedError(
            "attention has first derivatives in both modes, and both of reverse mode: no third derivatives, and "
            "nothing of forward mode"
        )
    changed = {name[len(_LINEAR) :]: x for name, x in moving.items()}
    still = {name: x for name, x in arrays.items() if not name.startswith(_LINEAR)}
    return _bind(primitive, arrays, **parameters), _bind(primitive, still | changed, **parameters)


def _tangents_transpose(gradients: Any, *values: Any, names: Any, constants: Constants) -> Any:
    arrays, wrt = _fixed(values, names)
    types = _outline(names, [x.aval if ad.is_undefined_primal(x) else x for x in values], constants)
    given = _given(gradients, types)
    found = _bind(gradients_p, arrays | given, constants=constants, wrt=wrt)
    places = dict(zip((_LINEAR + name for name in wrt), found, strict=True))
    return [places.get(name) for name in names]


def _products_transpose(directions: Any, *values: Any, names: Any, constants: Constants, wrt: Any) -> Any:
    """Transpose a product with the Hessian, which is symmetric."""
    arrays, of = _fixed(values, names)
    along = {_LINEAR + n: u for n, u in zip(wrt, directions, strict=True) if type(u) is not ad.Zero}
    places: Arrays = {}
    if tensors := tuple(name for name in of if name in _TRACED):
        found = _bind(products_p, arrays | along, constants=constants, wrt=tensors)
        places |= zip((_LINEAR + name for name in tensors), found, strict=True)
    if len(tensors) < len(of):
        still = {name: x for name, x in arrays.items() if not name.startswith("grad")}
        found = _bind(tangents_p, still | along, constants=constants)
        places |= zip(("d_grad_out", "d_grad_lse"), found, strict=True)
    return [places.get(name) for name in names]


def _fixed(values: Any, names: tuple[str, ...]) -> tuple[Arrays, tuple[str, ...]]:
    """Return the arrays that are known, and of which arrays the unknown ones are tangents."""
    known = {name: x for name, x in zip(names, values, strict=True) if not name.startswith(_LINEAR)}
    return known, tuple(name[len(_LINEAR) :] for name in names if name.startswith(_LINEAR))


def _given(gradients: Any, types: Any) -> Arrays:
    """Return the gradients of the output, zeros if it has none, and of the log-sum-exp if it has one."""
    out, lse = gradients
    found = {"grad_out": jnp.zeros(types[0].shape, types[0].dtype) if type(out) is ad.Zero else out}
    return found if type(lse) is ad.Zero else found | {"grad_lse": lse}


attention_p, tangents_p = _primitive(_attention, _outline), _primitive(_tangents, _outline)
gradients_p, products_p = _primitive(_gradients, _alike), _primitive(_products, _alike)
ad.primitive_jvps[attention_p], ad.primitive_jvps[gradients_p] = _attention_jvp, _gradients_jvp
for linear, transpose in ((tangents_p, _tangents_transpose), (products_p, _products_transpose)):
    ad.primitive_jvps[linear] = functools.partial(_linear_jvp, linear)
    ad.primitive_transposes[linear] = transpose


@functools.partial(jax.jit, static_argnums=0)  # shard_map takes unknown primitives only there
def _attend(constants: Constants, arrays: Arrays) -> Any:
    return tuple(_bind(attention_p, arrays, constants=constants, keep=False))
