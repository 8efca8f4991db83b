"""Gradients that are too long together are made shorter."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from selfattn import _core
from selfattn._check import Array, check_number
from selfattn.optim.optimizers import is_writable_kind

CHUNK = 4096  # elements that are summed up in their own precision; their sums are in float64


def clip_grad_norm_(
    grads: Mapping[str, Array], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> float:
    """Scale gradients, in place, so that the norm of all of them together is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, but of gradients, not of parameters: they are multiplied by min(1,
    max_norm / (norm + 10⁻⁶)).

    Parameters
    ----------
    grads : mapping of str to ndarray
        The second result of a pullback. Its arrays are changed.
    max_norm : float
    norm_type : float, default 2.0
        p of the p-norm, above 0; ``math.inf`` is that of the largest.
    error_if_nonfinite : bool, default False
        Whether a norm that is infinite or NaN is an error. Otherwise the gradients become 0 or NaN, as in PyTorch.

    Returns
    -------
    float
        The norm before clipping: (Σ abs(g)ᵖ)^(1/p) over all elements of all gradients.

    Raises
    ------
    TypeError, ValueError
        Something is of another kind or not above 0, or a gradient is read-only. Nothing has been changed then.
    RuntimeError
        The norm is not finite, and ``error_if_nonfinite``.

    References
    ----------
    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> grads = {"weight": np.array([3.0, 0.0]), "bias": np.array([4.0])}
    >>> optim.clip_grad_norm_(grads, max_norm=1.0)
    5.0
    >>> grads["weight"].round(5), grads["bias"].round(5)
    (array([0.6, 0. ]), array([0.8]))
    """
    if not isinstance(grads, Mapping):
        raise TypeError(
            f"grads must be a mapping of names to gradients, the second result of a pullback, not {type(grads).__name__}"
        )
    for name, gradient in grads.items():
        if not is_writable_kind(gradient):
            raise TypeError(
                f"the gradient of {name} must be an ndarray of floats, as it is changed, not {gradient!r:.80}"
            )
        if not gradient.flags.writeable:
            raise ValueError(f"the gradient of {name} is read-only, and clipping changes it")
    max_norm, power = check_number("max_norm", max_norm), check_number("norm_type", norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm}")
    if not power > 0:
        raise ValueError(f"norm_type must be above 0, not {norm_type}")
    arrays = [np.asarray(gradient) for gradient in {id(each): each for each in grads.values()}.values()]
    norm = _norm(arrays, power)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}; they cannot be clipped")
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # NaN too
        _core._scale(tuple(arrays), tuple(float(array.dtype.type(factor)) for array in arrays))
    return norm


@np.errstate(all="ignore")
def _norm(arrays: list[Array], power: float) -> float:
    wide = [array.astype(np.float32) if array.dtype.itemsize == 2 else array for array in arrays]
    if power == 2:
        total = sum((_square_sum(array) for array in wide), 0.0)
        if 1e-30 < total < math.inf:
            return math.sqrt(total)
    largest = float(np.max([0.0, *(np.abs(array).max() for array in wide if array.size)]))  # NaN if one is
    if math.isinf(power) or not 0 < largest < math.inf:
        return largest
    total = sum(float(((np.abs(array).astype(np.float64) / largest) ** power).sum()) for array in wide)
    # A float64's power is inf where p is so small that the norm is beyond the range; a Python float's is an error.
    return float(largest * np.float64(total) ** (1 / power))


def _square_sum(array: Array) -> float:
    flat = array.reshape(-1)
    if flat.size <= CHUNK:
        return float(np.dot(flat, flat))
    whole = flat.size // CHUNK * CHUNK
    chunks, rest = flat[:whole].reshape(-1, CHUNK), flat[whole:]
    return float(np.vecdot(chunks, chunks).sum(dtype=np.float64)) + float(np.dot(rest, rest))
