"""RMSNorm: mean square 1 over the last axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import selfattn as sa
from selfattn.nn._arrays import (
    Array,
    Gradients,
    Pullback,
    Unchanged,
    as_gradient,
    as_input,
    check_eps,
    float_dtype,
)
from selfattn.nn.layer_norm import norm_shape
from selfattn.nn.module import Module


class RMSNorm(Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axes.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The last axes of the input.
    eps : float, optional
        The machine epsilon of the precision that is computed in, by default.
    elementwise_affine : bool, default True
        Without it there are no parameters.
    dtype : dtype, default float32

    Attributes
    ----------
    weight : ndarray, shape normalized_shape, or None
        1 at birth.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Examples
    --------
    >>> from selfattn import nn
    >>> nn.RMSNorm(2)([[3.0, 4.0]]).round(4)
    array([[0.8485, 1.1314]], dtype=float32)
    """

    weight: Array | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self.normalized_shape = norm_shape(normalized_shape)
        self.eps = None if eps is None else check_eps(eps)
        self.dtype = float_dtype(dtype)
        self.register_parameter(
            "weight", np.ones(self.normalized_shape, self.dtype) if elementwise_affine else None
        )

    def extra_repr(self) -> str:
        """Return shape and eps."""
        return f"{self.normalized_shape}, eps={self.eps}"

    def forward(self, x: npt.ArrayLike) -> Array:
        """Normalise.

        Parameters
        ----------
        x : array_like, shape (..., *normalized_shape)
            Lists and integers are taken in the layer's dtype.

        Returns
        -------
        ndarray, in the shape of ``x``
            In the dtype to which ``x`` and weight promote.

        Raises
        ------
        TypeError
            A boolean, complex, object or long double array, a masked array or a matrix.
        ValueError
            The shape of ``x`` does not end in ``normalized_shape``.
        """
        return sa.rms_norm(as_input(x, self.dtype), self.normalized_shape, self.weight, self.eps)

    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``.

        Parameters
        ----------
        x : array_like, shape (..., *normalized_shape)
            As :meth:`forward` takes it. Until the last call of the pullback, it must stay as it is.

        Returns
        -------
        y : ndarray, in the shape of ``x``
            What :meth:`forward` returns.
        pullback : callable
            ``dx, grads = pullback(dy)``, as often as wanted: ``dx`` in the shape and dtype of ``x``,
            ``grads`` keyed like :meth:`parameters`, in their shapes and dtypes.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`forward`. In the pullback: ``dy`` has another shape than y, or holds neither floats
            nor integers.
        RuntimeError
            In the pullback: ``weight`` has changed.
        """
        x = as_input(x, self.dtype)
        y, norm_pullback = sa.rms_norm_vjp(x, self.normalized_shape, self.weight, self.eps)
        unchanged = Unchanged("RMSNorm", self.weight)

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            dy = as_gradient(dy, y)
            unchanged.check()
            grads = norm_pullback(dy)
            return grads.x, {name: getattr(grads, name) for name, _ in self._own_parameters()}

        return y, pullback
