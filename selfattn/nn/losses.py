"""Losses: the distance of an output from its target, and its gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import (
    Array,
    as_array,
    as_input,
    check_probability,
    is_float,
    layer_dtype,
    one_of,
    promoted,
)
from selfattn._docs import copy_doc
from selfattn.functional import log_softmax, softmax
from selfattn.functional._products import widened, widest
from selfattn.nn.module import Module, Pullback

WIDE = np.dtype(np.float64)
Reduction: TypeAlias = Literal["mean", "sum", "none"]


class Elements(NamedTuple):
    """The losses of all elements, before their reduction to one number, and their gradient."""

    x: Array
    losses: Array  # float32 or float64
    divisor: float  # what the mean divides by
    slope: Callable[[Array], Array]  # from the gradients of the losses to the gradient of x
    dtype: np.dtype[Any]  # the dtype of the result


class Loss(Module):
    """The base of the losses: the reduction and its gradient. A subclass computes the :class:`Elements`."""

    _in_repr = ("reduction",)

    def __init__(self, reduction: Reduction, dtype: npt.DTypeLike) -> None:
        self.reduction = one_of("reduction", reduction, ("mean", "sum", "none"))
        self.dtype = layer_dtype(dtype)

    def _elements(self, x: npt.ArrayLike, target: npt.ArrayLike) -> Elements:
        raise NotImplementedError

    @np.errstate(all="ignore")  # the result shows infinities and NaN
    def forward(self, x: npt.ArrayLike, target: npt.ArrayLike) -> Any:
        """Compute the loss.

        Parameters
        ----------
        x, target : array_like
            In the shapes that the class describes.

        Returns
        -------
        floating, or ndarray with ``reduction="none"``
            In the dtype to which ``x`` and a ``target`` of floats promote. It is computed in float32, or float64 if
            one of them is, and summed in float64.

        Raises
        ------
        TypeError, ValueError
            ``x`` or ``target`` has a dtype or shape that does not fit, or ``target`` has a class that does not exist.
        """
        return self._reduced(self._elements(x, target))

    @np.errstate(all="ignore")
    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike, target: npt.ArrayLike) -> tuple[Any, Pullback]:
        """Compute the loss and its pullback, ``d_value -> dx``: ``d_value`` is 1.0 for the gradient of the loss.

        Without reduction, ``d_value`` is an array in the shape of the losses, or one number for all. The attribute
        ``count`` of the pullback is the number that a mean divides by.
        """
        elements = self._elements(x, target)
        value, array, losses = self._reduced(elements), elements.x, elements.losses

        @np.errstate(all="ignore")
        def pullback(d_value: npt.ArrayLike) -> Array:
            d = as_input(d_value, losses.dtype, "d_value").astype(losses.dtype)
            if d.shape not in ((), np.shape(value)):
                raise ValueError(f"d_value must have the shape of the loss, {np.shape(value)}, not {d.shape}")
            if self.reduction == "mean":
                d = d / losses.dtype.type(elements.divisor)
            dx = elements.slope(np.broadcast_to(d, losses.shape))
            return np.ascontiguousarray(dx, array.dtype).reshape(array.shape)

        if self.reduction == "mean":  # for the mean over several batches
            setattr(pullback, "count", elements.divisor)  # noqa: B010 # mypy knows no attributes of functions
        return value, pullback

    def _reduced(self, elements: Elements) -> Any:
        _, losses, divisor, _, dtype = elements
        if self.reduction == "none":
            return losses.astype(dtype, copy=False)
        total = np.ascontiguousarray(losses).sum(dtype=np.float64)  # one order for every layout
        return dtype.type(total / np.float64(divisor) if self.reduction == "mean" else total)


class CrossEntropyLoss(Loss):
    """−log softmax(x) at the target class, or its mean under the target probabilities of all classes.

    Constructor and call are those of ``torch.nn.CrossEntropyLoss``, without its deprecated arguments. ``x`` holds
    unnormalised scores (logits), of shape (C,), (N, C) or (N, C, d1, …): the C classes are axis 1. A language model's
    logits (N, L, C) need a row for each token: ``loss(logits.reshape(-1, C), ids.reshape(-1))``.

    ``target`` holds integers, the classes 0 … C − 1, in the shape of ``x`` without its axis of classes; or floats,
    probabilities, in the shape of ``x``.

    Parameters
    ----------
    weight : array_like, shape (C,), optional
        A factor of the loss of each class.
    ignore_index : int, default -100
        Targets with this number have a loss of 0, and do not count in the mean. With probabilities it must be below 0.
    reduction : {"mean", "sum", "none"}, default "mean"
        The mean is weighted: with classes, the sum is divided by the weights of the targets; with probabilities by
        the number of elements, N·d1·…. Without an element it is NaN, as in PyTorch.
    label_smoothing : float, default 0.0
        From 0 to 1: this share of each target's probability is spread evenly over all classes.
    dtype : dtype of lists and integers, default float32

    References
    ----------
    Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7, for label smoothing.

    Examples
    --------
    >>> from selfattn import nn
    >>> loss = nn.CrossEntropyLoss()
    >>> value, pullback = loss.vjp([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [0, 2])
    >>> round(float(value), 4)
    0.7531
    >>> pullback(1.0).round(4)
    array([[-0.1674,  0.1224,  0.045 ],
           [ 0.1667,  0.1667, -0.3333]], dtype=float32)
    """

    weight: Array | None

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__(reduction, dtype)
        self.weight = None if weight is None else as_input(weight, WIDE, "weight").copy()
        if self.weight is not None and self.weight.ndim != 1:
            raise ValueError(f"weight must have shape (C,), a number for each class, not {self.weight.shape}")
        if isinstance(ignore_index, bool) or not hasattr(ignore_index, "__index__"):
            raise TypeError(f"ignore_index must be an int, not {ignore_index!r}")
        self.ignore_index = operator.index(ignore_index)
        self.label_smoothing = check_probability("label_smoothing", label_smoothing)

    def extra_repr(self) -> str:
        """Return the options that are not the default."""
        more = "" if self.weight is None else f", weight={self.weight.shape}"
        more += f", label_smoothing={self.label_smoothing}" if self.label_smoothing else ""
        return f"ignore_index={self.ignore_index}{more}, {super().extra_repr()}"

    def _elements(self, x: npt.ArrayLike, target: npt.ArrayLike) -> Elements:
        array = as_input(x, self.dtype)
        if array.ndim == 0:
            raise ValueError("x must have shape (C,), (N, C) or (N, C, d1, …), not ()")
        axis = 0 if array.ndim == 1 else 1
        scores = np.moveaxis(widened(array), axis, -1)  # (…, C)
        if self.weight is not None and self.weight.shape != scores.shape[-1:]:
            raise ValueError(
                f"weight has {len(self.weight)} numbers, but x {array.shape} has {scores.shape[-1]} classes"
            )
        wanted = as_array("target", target)
        if wanted.size == 0 and not isinstance(target, np.ndarray):
            wanted = wanted.astype(np.int64)  # an empty list is float64
        if wanted.dtype.kind in "iu" and wanted.shape == scores.shape[:-1]:
            found = self._of_classes(scores, wanted)
            dtype = array.dtype
        elif is_float(wanted.dtype) and wanted.shape == array.shape:
            if self.ignore_index >= 0:
                raise ValueError(
                    f"ignore_index={self.ignore_index} is for targets that are classes; these are probabilities"
                )
            wanted = as_input(target, self.dtype, "target")
            found = self._of_probabilities(scores, np.moveaxis(wanted, axis, -1))
            dtype = promoted([array.dtype, wanted.dtype])
        else:
            raise self._misfit(array, wanted, scores.shape[:-1])
        losses, divisor, slope = found
        return Elements(array, losses, divisor, lambda d: np.moveaxis(slope(d), -1, axis), dtype)

    def _misfit(self, x: Array, target: Array, shape: tuple[int, ...]) -> Exception:
        message = (
            f"target must hold classes, integers of shape {shape}, or probabilities, floats of shape {x.shape}; "
            f"not {target.dtype} of shape {target.shape}"
        )
        if target.dtype.kind not in "iu" and not is_float(target.dtype):
            return TypeError(message)
        if x.ndim > 2 and target.shape == x.shape[:-1]:
            message += (
                "; the classes are axis 1 of x: if they are its last, pass x.reshape(-1, "
                f"{x.shape[-1]}) and target.reshape(-1)"
            )
        return ValueError(message)

    def _of_classes(self, scores: Array, classes: Array) -> tuple[Array, float, Callable[[Array], Array]]:
        """Compute the losses of scores (…, C) for target classes (…), the divisor of their mean, and the gradient."""
        number = scores.shape[-1]
        counts = classes != self.ignore_index
        wrong = counts & ((classes < 0) | (classes >= number))
        if wrong.any():
            raise ValueError(
                f"target must be in 0...{number - 1}, or {self.ignore_index}, which is ignored; not "
                f"{classes[wrong].flat[0]}"
            )
        index = np.where(counts, classes, 0).astype(np.intp)[..., None]
        logs = log_softmax(scores)
        kind, smoothing = logs.dtype, self.label_smoothing
        weight = None if self.weight is None else self.weight.astype(kind, copy=False)
        # `base` (C,) has the target probability of every class, and `sure` is added to that of the target class.
        sure: Array = np.full(classes.shape, 1 - smoothing, kind)
        if weight is not None:
            sure = (1 - smoothing) * weight[index[..., 0]]
        sure = np.where(counts, sure, kind.type(0))
        losses = -_share(sure, _at(logs, index)[..., 0])
        base: Array | None = None
        if smoothing:
            base = (np.ones(number, kind) if weight is None else weight) * kind.type(smoothing / number)
            losses -= _share(base, logs).sum(axis=-1)
        losses = np.where(counts, losses, kind.type(0))
        divisor = counts.sum() if weight is None else weight[index[..., 0]][counts].sum(dtype=np.float64)

        def slope(d: Array) -> Array:
            d = np.where(counts, d, kind.type(0))
            total = sure if base is None else sure + base.sum()
            dx = softmax(scores)
            dx[~counts] = 0  # NaN too
            dx *= (d * total)[..., None]
            if base is not None:
                dx -= d[..., None] * base
            np.put_along_axis(dx, index, _at(dx, index) - (d * sure)[..., None], axis=-1)
            return dx

        return losses, float(divisor), slope

    def _of_probabilities(
        self, scores: Array, wanted: Array
    ) -> tuple[Array, float, Callable[[Array], Array]]:
        """Compute the losses of scores (…, C) for target probabilities, the divisor, and the gradient."""
        kind = widest(scores, wanted)
        scores = scores.astype(kind, copy=False)
        smoothing, number = self.label_smoothing, max(scores.shape[-1], 1)
        # order="C", so that sums have the same order for every layout
        shares = wanted.astype(kind, order="C") * (1 - smoothing) + smoothing / number
        shares = shares if self.weight is None else shares * self.weight.astype(kind)
        losses = -_share(shares, log_softmax(scores)).sum(axis=-1)

        def slope(d: Array) -> Array:
            dx: Array = softmax(scores) * shares.sum(axis=-1, keepdims=True) - shares
            dx *= d[..., None]
            return dx

        return losses, float(losses.size), slope


class MSELoss(Loss):
    """(x − target)², of each element.

    Call and ``reduction`` are those of ``torch.nn.MSELoss``; but ``target`` has the shape of ``x``, where PyTorch
    only warns.

    Parameters
    ----------
    reduction : {"mean", "sum", "none"}, default "mean"
    dtype : dtype of lists and integers, default float32

    Examples
    --------
    >>> from selfattn import nn
    >>> value, pullback = nn.MSELoss().vjp([1.0, 2.0], [1.0, 4.0])
    >>> float(value), pullback(1.0)
    (2.0, array([ 0., -2.], dtype=float32))
    """

    def __init__(self, *, reduction: Reduction = "mean", dtype: npt.DTypeLike = np.float32) -> None:
        super().__init__(reduction, dtype)

    def _elements(self, x: npt.ArrayLike, target: npt.ArrayLike) -> Elements:
        array, wanted = _same_shape(x, target, self.dtype)
        kind = widest(array, wanted)
        error = array.astype(kind, copy=False) - wanted.astype(kind, copy=False)
        dtype = promoted([array.dtype, wanted.dtype])
        return Elements(array, error * error, error.size, lambda d: error * (2 * d), dtype)


class BCEWithLogitsLoss(Loss):
    """Binary cross-entropy, −t·log σ(x) − (1 − t)·log(1 − σ(x)), of scores x and target probabilities t.

    Call and options are those of ``torch.nn.BCEWithLogitsLoss``, without its deprecated arguments. ``target`` has the
    shape of ``x``; its numbers should be from 0 to 1. As log σ(x) is computed as min(x, 0) − log(1 + exp(−abs(x))),
    the loss is finite for every finite x, and 0 for correct infinite ones.

    Parameters
    ----------
    weight : array_like, optional
        A factor of each element's loss, broadcastable to the shape of ``x``. The mean divides by the number of
        elements.
    reduction : {"mean", "sum", "none"}, default "mean"
    pos_weight : array_like, optional
        A factor of the first term, that of t, broadcastable to the shape of ``x``.
    dtype : dtype of lists and integers, default float32

    Examples
    --------
    >>> from selfattn import nn
    >>> value, pullback = nn.BCEWithLogitsLoss().vjp([0.0, 2.0], [1.0, 1.0])
    >>> round(float(value), 4), pullback(1.0).round(4)
    (0.41, array([-0.25  , -0.0596], dtype=float32))
    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        *,
        reduction: Reduction = "mean",
        pos_weight: npt.ArrayLike | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__(reduction, dtype)
        self.weight = None if weight is None else as_input(weight, WIDE, "weight").copy()
        self.pos_weight = None if pos_weight is None else as_input(pos_weight, WIDE, "pos_weight").copy()

    def _elements(self, x: npt.ArrayLike, target: npt.ArrayLike) -> Elements:
        array, wanted = _same_shape(x, target, self.dtype)
        scores, t = (x.astype(widest(array, wanted), copy=False) for x in (array, wanted))
        factors = []
        for name, given in {"weight": self.weight, "pos_weight": self.pos_weight}.items():
            if given is not None and not _fits(given.shape, array.shape):
                raise ValueError(f"{name} {given.shape} cannot be broadcast to the shape of x, {array.shape}")
            factors.append(scores.dtype.type(1) if given is None else given.astype(scores.dtype))
        weight, pos_weight = factors
        no, yes = 1 - t, t * pos_weight
        decay = np.exp(-np.abs(scores))
        rest = np.log1p(decay)  # −log σ(−x) = max(x, 0) + rest, −log σ(x) = max(−x, 0) + rest
        losses = weight * (
            _share(no, np.maximum(scores, 0) + rest) + _share(yes, np.maximum(-scores, 0) + rest)
        )

        def slope(d: Array) -> Array:
            sure = scores >= 0
            on, off = (np.where(side, 1, decay) / (1 + decay) for side in (sure, ~sure))  # σ(x), σ(−x)
            dx: Array = d * weight * (no * on - yes * off)
            return dx

        return Elements(array, np.asarray(losses), array.size, slope, promoted([array.dtype, wanted.dtype]))


def _share(share: Array, x: Array) -> Array:
    """Return ``share * x``, and 0 where the share is 0, even if x is infinite."""
    found: Array = np.where(share == 0, x.dtype.type(0), share * x)
    return found


def _at(x: Array, index: npt.NDArray[np.intp]) -> Array:
    """Return the element of each row (…, C) at an index (…, 1)."""
    found: Array = np.take_along_axis(x, index, axis=-1)
    return found


def _same_shape(x: npt.ArrayLike, target: npt.ArrayLike, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    array, wanted = as_input(x, dtype), as_input(target, dtype, "target")
    if array.shape != wanted.shape:
        raise ValueError(f"x and target must have the same shape, not {array.shape} and {wanted.shape}")
    return array, wanted


def _fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, into) == into
    except ValueError:
        return False
