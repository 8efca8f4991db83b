"""SwiGLU: the feed-forward block of Llama and its kin, a product with a gate."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, check_size
from selfattn._docs import copy_doc
from selfattn.nn import init
from selfattn.nn.layers import Linear
from selfattn.nn.module import Gradients, Module, Pullback
from selfattn.nn.rows import SiLU


class SwiGLU(Module):
    """``w2(silu(w1(x)) * w3(x))``: a hidden layer each of whose numbers has a gate.

    Parameters
    ----------
    d_model : int
        The width of input and output.
    d_ff : int
        The width between.
    bias : bool, default False
        Whether the three layers have biases.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights.

    Attributes
    ----------
    w1, w2, w3 : Linear
        Under Llama's own names; Transformers calls them ``gate_proj``, ``down_proj`` and ``up_proj``.

    References
    ----------
    Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.

    Examples
    --------
    >>> from selfattn import nn
    >>> layer = nn.SwiGLU(4, 8, rng=0)
    >>> layer([[1.0, 2.0, 3.0, 4.0]]).shape
    (1, 4)
    >>> list(layer.parameters())
    ['w1.weight', 'w2.weight', 'w3.weight']
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        bias: bool = False,
        *,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        d_model, d_ff = check_size("d_model", d_model), check_size("d_ff", d_ff)
        generator = init.as_generator(rng)
        self.w1 = Linear(d_model, d_ff, bias, dtype=dtype, rng=generator)
        self.w2 = Linear(d_ff, d_model, bias, dtype=dtype, rng=generator)
        self.w3 = Linear(d_model, d_ff, bias, dtype=dtype, rng=generator)
        self.silu = SiLU(dtype=dtype)

    def forward(self, x: npt.ArrayLike) -> Array:
        """Compute the output.

        Parameters
        ----------
        x : array_like, shape (..., d_model)

        Returns
        -------
        ndarray, shape (..., d_model)
        """
        y: Array = self.w2(self.silu(self.w1(x)) * self.w3(x))
        return y

    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``."""
        (h1, back1), (h3, back3) = self.w1.vjp(x), self.w3.vjp(x)
        gate, back_gate = self.silu.vjp(h1)
        y, back2 = self.w2.vjp(gate * h3)

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            d, grads2 = back2(dy)
            dx, grads1 = back1(back_gate(d * h3)[0])
            more, grads3 = back3(d * gate)
            return dx + more, self.gather_gradients({"w1": grads1, "w2": grads2, "w3": grads3})

        return y, pullback
