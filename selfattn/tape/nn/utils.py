"""Clipping of gradients, and sequences of several lengths, as ``torch.nn.utils``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from selfattn import optim
from selfattn.tape.operations.joins import cat, pad, stack
from selfattn.tape.tensors import Tensor, wrap


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of parameters down so that the norm of all of them is at most max_norm.

    Returns
    -------
    Tensor
        The norm before.
    """
    if norm_type != 2:
        raise ValueError(f"norm_type must be 2, not {norm_type}")
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = {str(n): p._grad._array for n, p in enumerate(found) if p._grad is not None}
    norm = optim.clip_grad_norm_(grads, float(max_norm)) if grads else 0.0
    if error_if_nonfinite and not np.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}, so they cannot be clipped")
    return wrap(np.asarray(norm, next(iter(grads.values())).dtype if grads else np.float32))


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Keep each number of the gradients between −clip_value and clip_value."""
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter._grad is not None:
            np.clip(parameter._grad._array, -clip_value, clip_value, out=parameter._grad._array)


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Join all numbers of parameters on one axis."""
    return cat([parameter.reshape(-1) for parameter in parameters])


def pad_sequence(
    sequences: Iterable[Tensor], batch_first: bool = False, padding_value: float = 0.0
) -> Tensor:
    """Join tensors of several lengths along a new axis, the shorter ones with numbers at their ends.

    Parameters
    ----------
    sequences : iterable of Tensor
        Of one shape, but for their first axes.
    batch_first : bool, default False
        Whether the new axis is the first, or the second.
    padding_value : float, default 0

    Returns
    -------
    Tensor
    """
    found: list[Any] = list(sequences)
    longest = max(map(len, found))
    padded = [pad(x, (0, 0) * (x.ndim - 1) + (0, longest - len(x)), value=padding_value) for x in found]
    return stack(padded, 0 if batch_first else 1)
