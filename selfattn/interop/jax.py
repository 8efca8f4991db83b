"""Attention for JAX: :func:`scaled_dot_product_attention` under ``jit``, ``vmap`` and ``grad``, computed on the CPU.

:func:`dot_product_attention` is the same with the call of ``jax.nn``'s function.
JAX calls back into Python, where the core computes both directions. Reverse mode, first order.

>>> import jax, jax.numpy as jnp
>>> from selfattn.interop.jax import scaled_dot_product_attention
>>> x = jnp.ones((2, 3, 4))
>>> jax.jit(jax.grad(lambda v: scaled_dot_product_attention(x, x, v).sum()))(x)[0, :, 0]
Array([1., 1., 1.], dtype=float32)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import seed_from_rng
from selfattn._extras import import_extra
from selfattn.functional._options import AttentionOptions, accept_options
from selfattn.functional.attention import NAMES, attention_backward, attention_forward

jax, jnp, _buffers = (
    import_extra(name, "jax") for name in ("jax", "jax.numpy", "jax.experimental.buffer_callback")
)

Arrays: TypeAlias = dict[str, Any]
Constants: TypeAlias = tuple[tuple[str, Any], ...]
# What JAX traces, with the number of last axes that are neither batches nor heads; other arguments are constants of a
# call.
_TRACED = {"query": 2, "key": 2, "value": 2, "attn_mask": 2, "alibi_slopes": 0, "sinks": 0, "key_lengths": 0}


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
    Query, key, value, a float ``attn_mask``, ``alibi_slopes`` and ``sinks`` have gradients. JAX traces these,
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
    constants = {"return_lse": True, "dropout_p": dropout_p, "is_causal": is_causal, **given}
    found = _attend(tuple((name, _hashable(x)) for name, x in constants.items()), arrays)
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
    combined = mask if bias is None else jnp.asarray(bias)
    if bias is not None and mask is not None:
        combined = jnp.where(jnp.asarray(mask), combined, -jnp.inf)
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    options: dict[str, Any] = {"scale": scale, "window": window, "enable_gqa": k.shape[-2] != q.shape[-2]}
    if key_value_seq_lengths is not None:
        options["key_lengths"] = jnp.asarray(key_value_seq_lengths).reshape(-1, *(1,) * (q.ndim - 3))
    q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
    out, lse = scaled_dot_product_attention(q, k, v, combined, 0.0, is_causal, return_lse=True, **options)
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


@dataclasses.dataclass(frozen=True)
class _Callback:
    """What JAX calls with its buffers. JAX compiles equal callbacks once."""

    function: Callable[..., Any]
    constants: Constants
    rank: int

    def __call__(self, context: Any, results: Any, given: Arrays) -> None:
        arrays, constants = {name: np.asarray(x) for name, x in given.items()}, dict(self.constants)
        new = arrays["query"].ndim - self.rank
        if new:  # vmap's axes have length 1 in an array that it does not map
            batch = np.broadcast_shapes(*(x.shape[:new] for x in arrays.values()))
            arrays = {name: np.broadcast_to(x, batch + x.shape[new:]) for name, x in arrays.items()}
            for name in arrays.keys() & {"out", "statistics"}:
                arrays[name] = np.ascontiguousarray(arrays[name])
        if "rng" in arrays:
            constants["rng"] = int.from_bytes(arrays.pop("rng").tobytes(), "little")
        for result, x in zip(results, self.function(**arrays, **constants), strict=True):
            np.asarray(result)[...] = x


def _run(function: Callable[..., Any], types: Any, arrays: Arrays, constants: Constants) -> Any:
    """Compute when JAX does. Under vmap with dropout, each example is a call, and drops what it would drop alone."""
    callback = _Callback(function, constants, arrays["query"].ndim)
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types)
    method = "sequential" if "rng" in arrays else "expand_dims"
    # pure_callback copies arguments in the threads in which callbacks wait for the copies: many at once would wait
    # for ever.
    return _buffers.buffer_callback(callback, types, vmap_method=method)(arrays)


def _outline(constants: Constants, arrays: Arrays) -> Any:
    """Return out, statistics and lse of a call without keys, on arrays without memory.

    In this call the core checks arguments.
    """
    blank = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in arrays.items()}
    arguments: Arrays = {"key_lengths": 0, **dict(constants), **blank, "rng": 0, "num_threads": 1}
    return _core._attention_forward(**arguments)


def _plain(constants: Constants, arrays: Arrays) -> Any:
    out, _, lse = _outline(constants, arrays)
    return _run(_core.scaled_dot_product_attention, (out, lse), arrays, constants)


def _forward(constants: Constants, given: Arrays) -> Any:
    arrays = {name: x.value for name, x in given.items()}
    perturbed = {name: None for name, x in given.items() if x.perturbed}  # names, as JAX keeps them
    out, statistics, lse = _outline(constants, arrays)
    types = out, statistics, out.astype(lse.dtype), lse
    out, statistics, unrounded, lse = _run(attention_forward, types, arrays, constants)
    kept = {"out": unrounded, "statistics": statistics}
    return (out, lse), (arrays, kept, perturbed)


def _backward(constants: Constants, saved: Any, gradients: Any) -> Any:
    arrays, kept, perturbed = saved
    zero = jax.custom_derivatives.SymbolicZero  # of a result that was not used
    given = zip(("grad_out", "grad_lse"), gradients, strict=True)
    used = {name: x for name, x in given if not isinstance(x, zero)}
    kept |= {"grad_out": jnp.zeros_like(kept["out"])} | used
    floats = [name for name in perturbed if jnp.issubdtype(arrays[name].dtype, jnp.floating)]
    names = tuple(name for name in NAMES if name in floats)
    types, options = (
        [arrays[name] for name in names],
        (*constants[1:], ("names", names)),
    )  # without return_lse
    found = _run(attention_backward, types, arrays | kept, options)
    return ({**dict.fromkeys(arrays), **dict(zip(names, found, strict=True))},)


_attend = jax.custom_vjp(_plain, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward, symbolic_zeros=True)
_attend = jax.jit(_attend, static_argnums=0)  # shard_map takes symbolic zeros only there
