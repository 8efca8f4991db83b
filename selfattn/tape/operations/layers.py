"""Operations of layers: norms, embedding, dropout, losses and attention, by the core and the layers of selfattn.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from selfattn import _core
from selfattn import nn as layers
from selfattn._check import Array
from selfattn.functional.attention import attention_vjp
from selfattn.tape.generator import dropout_generator
from selfattn.tape.operations.indices import added_at
from selfattn.tape.operations.table import TABLE, composite, operation
from selfattn.tape.tensors import Tensor

attention_calls: list[list[Any]] = []  # lists that each call of attention adds its arguments to


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


@operation("", 3, keeps=("01", "0", ""), label="NativeLayerNorm")
def _layer_norm(input: Array, weight: Any, bias: Any, shape: tuple[int, ...], eps: float) -> Any:
    y = _core.layer_norm(input, shape, weight, bias, eps)
    return y, lambda dy: _core._layer_norm_backward(input, dy, shape, weight, bias, eps)


@composite("f")
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Shift and scale the last axes to mean 0 and variance 1."""
    return _layer_norm(input, weight, bias, _shape(normalized_shape), eps)


@operation("", 2, keeps=("01", "0"), label="FusedRmsNorm")
def _rms_norm(input: Array, weight: Any, shape: tuple[int, ...], eps: float | None) -> Any:
    y = _core.rms_norm(input, shape, weight, eps)
    return y, lambda dy: _core._rms_norm_backward(input, dy, shape, weight, None, eps)[:2]


@composite("f")
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """Scale the last axes to mean square 1."""
    return _rms_norm(input, weight, _shape(normalized_shape), eps)


@operation("", 2, label="Embedding", keeps=("", "0"))
def _embedding(input: Array, weight: Array, padding_idx: int | None) -> Any:
    if input.dtype.kind not in "iu":
        raise RuntimeError(f"the indices of an embedding must be integers, not {input.dtype}")
    if input.size and (input.min() < 0 or input.max() >= len(weight)):
        wrong = input.min() if input.min() < 0 else input.max()
        raise IndexError(f"index out of range in self: {wrong} is not in 0 … {len(weight) - 1}")

    shape = weight.shape

    def back(dy: Array) -> Array:
        dx = added_at(shape, (input,), dy)
        if padding_idx is not None:
            dx[padding_idx] = 0
        return dx

    return weight[input], (None, back)


@composite("f")
def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Any:
    """Look up a row of weight for each integer."""
    return _embedding(input, weight, padding_idx)


@operation("", label="OneHot")
def _one_hot(input: Array, num_classes: int) -> Any:
    n = num_classes if num_classes >= 0 else int(input.max()) + 1
    if input.size and (input.min() < 0 or input.max() >= n):
        raise RuntimeError("Class values must be smaller than num_classes, and not negative.")
    return np.eye(n, dtype=np.int64)[input], None


@composite("f")
def one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    """Return for each class a row that is 1 at its place and 0 elsewhere."""
    return _one_hot(tensor, num_classes)


@operation("", keeps=("-",))
def _dropout(input: Array, p: float) -> Any:
    if p == 1:
        factors: Array = np.zeros_like(input)
    else:
        factors = (dropout_generator().random(input.shape, np.float32) >= p).astype(input.dtype)
        factors *= input.dtype.type(1 / (1 - p))
    with np.errstate(invalid="ignore"):
        return input * factors, (lambda dy: dy * factors,)


@composite("tf")
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Set each number to 0 with probability p, and divide the others by 1 − p."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return _dropout(input, p) if training and p else input


# -------------------------------------------------------------------------------------------------------------- losses


def _by_layer(loss: Any, x: Array, target: Any) -> Any:
    value, pullback = loss.vjp(x, target)
    return value, (pullback,)


@operation("", label="NllLoss", keeps=("0",))
def _cross_entropy(input: Array, target: Array, loss: Any) -> Any:
    return _by_layer(loss, input, target)


def _one(x: Any) -> Any:
    return x._array if isinstance(x, Tensor) else x


def _constant(x: Any, loss: str) -> Any:
    """Return the array of a tensor that has no gradient here."""
    if isinstance(x, Tensor) and x.requires_grad:
        raise NotImplementedError(f"{loss}: target has no gradient here; give target.detach()")
    return _one(x)


def _reduction(reduction: str) -> str:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction; it is 'none', 'mean' or 'sum'")
    return reduction


@composite("f")
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Any = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return −log softmax(input) at the target class, or its mean under target probabilities."""
    kind: Any = _reduction(reduction)
    loss = layers.CrossEntropyLoss(
        weight=_one(weight), ignore_index=ignore_index, reduction=kind, label_smoothing=label_smoothing
    )
    return _cross_entropy(input, _constant(target, "cross_entropy"), loss)


@composite("f")
def nll_loss(
    input: Tensor, target: Tensor, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Any:
    """Return −input at the target class: the loss of log-probabilities."""
    classes = input if input.ndim == 1 else input.movedim(1, -1)
    open_ = target != ignore_index
    index = target.masked_fill(~open_, 0)
    losses = -classes.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    factors = open_.to(input.dtype) if weight is None else weight[index] * open_
    losses = losses * factors
    return losses.sum() / factors.sum() if _reduction(reduction) == "mean" else _reduced(losses, reduction)


def _reduced(losses: Any, reduction: str) -> Any:
    kind = _reduction(reduction)
    return losses if kind == "none" else losses.mean() if kind == "mean" else losses.sum()


@composite("f")
def mse_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Any:
    """Return the mean of the squared differences."""
    return _reduced((input - target).square(), reduction)


@composite("f")
def l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Any:
    """Return the mean of the absolute differences."""
    return _reduced((input - target).abs(), reduction)


@composite("f")
def smooth_l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0) -> Any:
    """Return squared differences below beta, and absolute ones above it."""
    if beta == 0:
        return l1_loss(input, target, reduction=reduction)
    far = (input - target).abs()
    near = far < beta
    return _reduced(TABLE["where"].function(near, far * far * (0.5 / beta), far - 0.5 * beta), reduction)


@composite("f")
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Any = None, *, reduction: str = "mean"
) -> Any:
    """Return the cross entropy of probabilities with targets from 0 to 1."""
    yes, no = (x.log().clamp(min=-100) for x in (input, 1 - input))
    losses = -(target * yes + (1 - target) * no)
    return _reduced(losses if weight is None else losses * weight, reduction)


@operation("", label="BinaryCrossEntropyWithLogits", keeps=("0",))
def _with_logits(input: Array, target: Array, loss: Any) -> Any:
    return _by_layer(loss, input, target)


@composite("f")
def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Any = None, *, reduction: str = "mean", pos_weight: Any = None
) -> Any:
    """Return the cross entropy of logits with targets from 0 to 1."""
    kind: Any = _reduction(reduction)
    return _with_logits(
        input,
        _constant(target, "binary_cross_entropy_with_logits"),
        layers.BCEWithLogitsLoss(weight=_one(weight), reduction=kind, pos_weight=_one(pos_weight)),
    )


@composite("f")
def kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Any:
    """Return target·(log target − input), the divergence of log-probabilities from probabilities."""
    t: Any = target
    if log_target:
        losses = t.exp() * (t - input)
    else:
        losses = TABLE["where"].function(t > 0, t * (t.clamp(min=1e-38).log() - input), 0.0)
    if reduction == "batchmean":
        return losses.sum() / input.shape[0]
    return _reduced(losses, reduction)


# ----------------------------------------------------------------------------------------------------------- attention


@operation("", 4, keeps=("0123", "0123", "0123", "0123"), label="ScaledDotProductFlashAttentionForCpu")
def _attention(query: Array, key: Array, value: Array, attn_mask: Any, options: dict[str, Any]) -> Any:
    floats = attn_mask is not None and attn_mask.dtype != bool
    names: Any = ("query", "key", "value") + ("attn_mask",) * floats
    y, pullback = attention_vjp(
        (query, key, value), names, return_lse=False, out=None, attn_mask=attn_mask, **options
    )
    return y, lambda dy: (*pullback(dy), None)


@composite("f")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return softmax(query @ keyᵀ·scale + mask) @ value, in memory that is linear in the length."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    for calls in attention_calls:
        arrays = (query._array, key._array, value._array, _one(attn_mask))
        calls.append((*arrays, dict(options)))
    rng = int(dropout_generator().integers(2**62)) if dropout_p else None
    return _attention(query, key, value, attn_mask, {**options, "dropout_p": dropout_p, "rng": rng})
