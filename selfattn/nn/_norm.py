"""What LayerNorm and RMSNorm share: all but their parameters at birth and the function that they call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, Gradients, Pullback, as_input, check_size, checked_pullback, layer_dtype
from selfattn._docs import documented_vjp
from selfattn.nn.module import Module


class Norm(Module):
    """A function of the last axes with a weight, and perhaps a bias, for each place in them.

    A subclass names the function and its vjp, which take x, the shape, the parameters of these names and eps.
    """

    _function: ClassVar[Callable[..., Any]]
    _function_vjp: ClassVar[Callable[..., Any]]
    weight: Array | None
    _names: ClassVar[tuple[str, ...]]  # a subclass of a norm may have more parameters

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        dtype: npt.DTypeLike,
        at_birth: tuple[float | None, ...],
    ) -> None:
        sizes = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        self.normalized_shape = tuple(check_size("normalized_shape", size) for size in sizes)
        self.eps = eps
        self.dtype = layer_dtype(dtype)
        for name, number in zip(self._names, at_birth, strict=True):
            filled = None if number is None else np.full(self.normalized_shape, number, self.dtype)
            self.register_parameter(name, filled)

    def extra_repr(self) -> str:
        """Return shape and eps."""
        return f"{self.normalized_shape}, eps={self.eps}"

    def _arguments(self, x: npt.ArrayLike) -> tuple[Any, ...]:
        parameters = (getattr(self, name) for name in self._names)
        return as_input(x, self.dtype), self.normalized_shape, *parameters, self.eps

    def forward(self, x: npt.ArrayLike) -> Array:
        """Normalise.

        Parameters
        ----------
        x : array_like, shape (..., *normalized_shape)

        Returns
        -------
        ndarray, in the shape of ``x``
            In the dtype to which ``x`` and the parameters promote.

        Raises
        ------
        ValueError
            The shape of ``x`` does not end in ``normalized_shape``.
        """
        y: Array = self._function(*self._arguments(x))
        return y

    @documented_vjp("``weight``")
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``."""
        y, norm_pullback = self._function_vjp(*self._arguments(x))

        def backward(dy: Array) -> tuple[Array, Gradients]:
            grads = norm_pullback(dy)
            found = {name: getattr(grads, name) for name in self._names}
            return grads.x, {name: gradient for name, gradient in found.items() if gradient is not None}

        return y, checked_pullback(self, y, [self.weight], backward)
