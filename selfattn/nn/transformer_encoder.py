"""The Transformer's encoder: a layer of attention and a feed-forward network, and a stack of such layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import selfattn as sa
from selfattn.functional._arguments import check_size
from selfattn.nn import init
from selfattn.nn._arrays import (
    Array,
    Gradients,
    Pullback,
    as_features,
    as_gradient,
)
from selfattn.nn._docs import documented_vjp
from selfattn.nn.containers import ModuleList
from selfattn.nn.dropout import Dropout
from selfattn.nn.layer_norm import LayerNorm
from selfattn.nn.linear import Linear
from selfattn.nn.module import Module
from selfattn.nn.multihead_attention import MultiheadAttention

Parts: TypeAlias = dict[str, Gradients]  # by submodule
Differentiated: TypeAlias = tuple[Array, Callable[[Array], tuple[Array, Parts]]]
Branch: TypeAlias = Callable[[Array], Differentiated]


def relu(x: Array) -> Array:
    """Compute max(x, 0)."""
    y: Array = np.maximum(x, x.dtype.type(0))
    return y


def relu_vjp(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Compute max(x, 0) and its pullback; the gradient at 0 is 0."""
    return relu(x), lambda dy: np.where(x <= 0, dy.dtype.type(0), dy)


ACTIVATIONS: dict[str, tuple[Callable[..., Array], Callable[..., Any]]] = {
    "relu": (relu, relu_vjp),
    "gelu": (sa.gelu, sa.gelu_vjp),
}


class TransformerEncoderLayer(Module):
    """Self-attention and a feed-forward network, each with dropout, a residual and a LayerNorm.

    ``x = norm1(x + dropout1(self_attn(x)))``, then ``x = norm2(x + feed_forward(x))`` with
    ``feed_forward(x) = dropout2(linear2(dropout(activation(linear1(x)))))``. With ``norm_first`` the norms stand
    before what is added: ``x = x + dropout1(self_attn(norm1(x)))``, then ``x = x + feed_forward(norm2(x))``.

    Constructor, call and parameters are those of ``torch.nn.TransformerEncoderLayer``, defaults included:
    inputs are (L, N, d_model) unless ``batch_first``, and True in a boolean mask means *ignore*. As there, a
    new layer is in training mode, in which it drops 10 % of everything: call ``eval()`` before using it.

    Parameters
    ----------
    d_model : int
        The width of input and output.
    nhead : int
        The number of heads; it has to divide ``d_model``.
    dim_feedforward : int, default 2048
        The width between ``linear1`` and ``linear2``.
    dropout : float, default 0.1
        Of the attention's weights, behind the activation, and of what is added to the residual.
    activation : {"relu", "gelu"}, default "relu"
        gelu is the exact one, by the error function.
    layer_norm_eps : float, default 1e-5
    batch_first : bool, default False
        Batches are (N, L, d_model) rather than (L, N, d_model).
    norm_first : bool, default False
    bias : bool, default True
        False leaves the biases of all linear layers and norms out.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        Where the weights come from, in PyTorch's order, and afterwards what dropout draws from.

    Attributes
    ----------
    self_attn : MultiheadAttention
    linear1, linear2 : Linear
    norm1, norm2 : LayerNorm
    dropout, dropout1, dropout2 : Dropout

    See Also
    --------
    TransformerEncoder, MultiheadAttention

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, sections 3.1 and 3.3; for ``norm_first`` Xiong et al.,
    "On Layer Normalization in the Transformer Architecture", 2020, figure 1.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True, rng=0).eval()
    >>> x = np.ones((3, 5, 8), np.float32)
    >>> y, pullback = layer.vjp(x, key_lengths=[5, 4, 2])
    >>> dx, grads = pullback(y)
    >>> y.shape, dx.shape, grads["linear1.weight"].shape
    ((3, 5, 8), (3, 5, 8), (16, 8))
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f'activation must be "relu" or "gelu", not {activation!r}')
        self.d_model = check_size("d_model", d_model)
        self.activation, self.norm_first = activation, norm_first
        check_size("dim_feedforward", dim_feedforward)
        generator = init.as_generator(rng)
        if d_model % check_size("nhead", nhead):
            raise ValueError(f"nhead must divide d_model; {nhead} does not divide {d_model}")
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype, rng=generator
        )
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype=dtype, rng=generator)
        self.dropout = Dropout(dropout, dtype=dtype, rng=generator)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype=dtype, rng=generator)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.dropout1 = Dropout(dropout, dtype=dtype, rng=generator)
        self.dropout2 = Dropout(dropout, dtype=dtype, rng=generator)

    def extra_repr(self) -> str:
        """Return the width, and what distinguishes layers of the same shapes."""
        return f"d_model={self.d_model}, activation={self.activation!r}, norm_first={self.norm_first}"

    def forward(
        self,
        src: npt.ArrayLike,
        src_mask: npt.ArrayLike | None = None,
        src_key_padding_mask: npt.ArrayLike | None = None,
        is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
    ) -> Array:
        """Encode.

        Parameters
        ----------
        src : array_like, shape (L, N, d_model), with ``batch_first`` (N, L, d_model), or (L, d_model)
        src_mask : array_like, shape (L, L) or (N·nhead, L, L), optional
            True means that a pair is ignored; floats are added to the scores.
        src_key_padding_mask : array_like, shape (N, L) or (L,), optional
            True means that a token is ignored by all others; floats are added to its scores.
        is_causal : bool, default False
            A token sees none that come after it; with a mask, both must allow a pair.
        key_lengths : array_like of int, shape (N,) or (), optional
            How many tokens of each sequence exist.

        Returns
        -------
        ndarray, in the shape of ``src``
            What stands in the places of ignored tokens has no meaning.
        """
        masks = _masks(src_mask, src_key_padding_mask, is_causal, key_lengths)

        def attend(x: Array) -> Array:
            attended: Array = self.dropout1(self.self_attn(x, x, x, **masks)[0])
            return attended

        x = self._sublayer(_as_src(src, self), self.norm1, attend)
        return self._sublayer(x, self.norm2, self._feed_forward)

    @documented_vjp(result="y : ndarray, in the shape of ``src``")
    def vjp(
        self,
        src: npt.ArrayLike,
        src_mask: npt.ArrayLike | None = None,
        src_key_padding_mask: npt.ArrayLike | None = None,
        is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``. It drops what was dropped."""
        masks = _masks(src_mask, src_key_padding_mask, is_causal, key_lengths)
        x = _as_src(src, self)
        middle, attention_pullback = self._sublayer_vjp(x, "norm1", lambda x: self._attend_vjp(x, masks))
        y, feed_forward_pullback = self._sublayer_vjp(middle, "norm2", self._feed_forward_vjp)

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            d_middle, later = feed_forward_pullback(as_gradient(dy, y))
            dx, earlier = attention_pullback(d_middle)
            parts = earlier | later
            in_order = {name: parts[name] for name, _ in self.named_children() if name in parts}
            return dx, self.gather_gradients(in_order)

        return y, pullback

    # ------------------------------------------------------------------------------------------- their parts

    def _sublayer(self, x: Array, norm: LayerNorm, branch: Callable[[Array], Array]) -> Array:
        """Put a residual and a norm around a branch."""
        if self.norm_first:
            return x + branch(norm(x))
        y: Array = norm(x + branch(x))
        return y

    def _sublayer_vjp(self, x: Array, norm: str, branch: Branch) -> Differentiated:
        layer = getattr(self, norm)
        if self.norm_first:
            normed, norm_pullback = layer.vjp(x)
            added, branch_pullback = branch(normed)
            y = x + added
        else:
            added, branch_pullback = branch(x)
            y, norm_pullback = layer.vjp(x + added)

        def pullback(dy: Array) -> tuple[Array, Parts]:
            if self.norm_first:
                d_normed, parts = branch_pullback(dy)
                more, norm_grads = norm_pullback(d_normed)
                dx = dy + more
            else:
                d_sum, norm_grads = norm_pullback(dy)
                more, parts = branch_pullback(d_sum)
                dx = d_sum + more
            return dx.astype(x.dtype, copy=False), {**parts, norm: norm_grads}

        return y, pullback

    def _attend_vjp(self, x: Array, masks: dict[str, Any]) -> Differentiated:
        (attended, _), attention_pullback = self.self_attn.vjp(x, x, x, **masks)
        y, dropout_pullback = self.dropout1.vjp(attended)

        def pullback(dy: Array) -> tuple[Array, Parts]:
            (dq, dk, dv), grads = attention_pullback(dropout_pullback(dy)[0])
            return dq + dk + dv, {"self_attn": grads}

        return y, pullback

    def _feed_forward(self, x: Array) -> Array:
        activation, _ = ACTIVATIONS[self.activation]
        y: Array = self.dropout2(self.linear2(self.dropout(activation(self.linear1(x)))))
        return y

    def _feed_forward_vjp(self, x: Array) -> Differentiated:
        _, activation_vjp = ACTIVATIONS[self.activation]
        wide, pullback1 = self.linear1.vjp(x)
        active, activation_pullback = activation_vjp(wide)
        kept, dropout_pullback = self.dropout.vjp(active)
        narrow, pullback2 = self.linear2.vjp(kept)
        y, dropout2_pullback = self.dropout2.vjp(narrow)

        def pullback(dy: Array) -> tuple[Array, Parts]:
            d_kept, grads2 = pullback2(dropout2_pullback(dy)[0])
            dx, grads1 = pullback1(activation_pullback(dropout_pullback(d_kept)[0]))
            return dx, {"linear1": grads1, "linear2": grads2}

        return y, pullback


class TransformerEncoder(Module):
    """Encoder layers one after the other, and a norm at the end if there is one.

    Constructor, call and parameters are those of ``torch.nn.TransformerEncoder``. As there, the layers are
    copies of the one that is given, so all of them start with the same weights, and a new encoder is in
    training mode; and the output in the places of ignored tokens has no meaning (PyTorch's depends on the mode).

    Parameters
    ----------
    encoder_layer : TransformerEncoderLayer, or another Module that is called like one
        It is copied ``num_layers`` times, and not used itself. The copies' dropout draws from its generator.
    num_layers : int
    norm : LayerNorm, RMSNorm or another Module, optional
        What the last layer's output goes through; a model of ``norm_first`` layers needs one.
    enable_nested_tensor, mask_check : bool
        Without effect: they steer a fast path of PyTorch's, which changes no result.

    Attributes
    ----------
    layers : ModuleList
    norm : Module or None

    See Also
    --------
    TransformerEncoderLayer

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, norm_first=True, rng=0)
    >>> model = nn.TransformerEncoder(layer, num_layers=3, norm=nn.LayerNorm(8)).eval()
    >>> model(np.ones((5, 2, 8), np.float32), is_causal=True).shape
    (5, 2, 8)
    >>> list(model.parameters())[-3:]
    ['layers.2.norm2.bias', 'norm.weight', 'norm.bias']
    """

    def __init__(
        self,
        encoder_layer: Module,
        num_layers: int,
        norm: Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        del enable_nested_tensor, mask_check  # they change no result
        if not isinstance(encoder_layer, Module):
            raise TypeError(f"encoder_layer must be a Module, not {type(encoder_layer).__name__}")
        if not isinstance(norm, Module | None):
            raise TypeError(f"norm must be a Module or None, not {type(norm).__name__}")
        self.num_layers = check_size("num_layers", num_layers)
        self.layers = ModuleList([_copied(encoder_layer) for _ in range(num_layers)])
        self.norm = norm

    def forward(
        self,
        src: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        src_key_padding_mask: npt.ArrayLike | None = None,
        is_causal: bool | None = None,
        *,
        key_lengths: npt.ArrayLike | None = None,
    ) -> Array:
        """Encode.

        Parameters
        ----------
        src, mask, src_key_padding_mask, key_lengths
            As ``src``, ``src_mask`` and so on of :meth:`TransformerEncoderLayer.forward`; every layer gets them.
        is_causal : bool, optional
            None is False: PyTorch looks whether ``mask`` is causal, which makes no difference to the result.

        Returns
        -------
        ndarray, in the shape of ``src``
        """
        x: Any = src
        for layer in self.layers:
            x = layer(x, mask, src_key_padding_mask, bool(is_causal), key_lengths=key_lengths)
        y: Array = x if self.norm is None else self.norm(x)
        return y

    @documented_vjp(result="y : ndarray, in the shape of ``src``")
    def vjp(
        self,
        src: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        src_key_padding_mask: npt.ArrayLike | None = None,
        is_causal: bool | None = None,
        *,
        key_lengths: npt.ArrayLike | None = None,
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``. It drops what was dropped."""
        x: Any = src
        pullbacks = []
        for n, layer in enumerate(self.layers):
            x, layer_pullback = layer.vjp(
                x, mask, src_key_padding_mask, bool(is_causal), key_lengths=key_lengths
            )
            pullbacks.append((f"layers.{n}", layer_pullback))
        if self.norm is not None:
            x, norm_pullback = self.norm.vjp(x)
            pullbacks.append(("norm", norm_pullback))

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            dx: Any = dy
            parts: list[tuple[str, Gradients]] = []
            for name, part_pullback in reversed(pullbacks):
                dx, grads = part_pullback(dx)
                parts.append((name, grads))
            return dx, self.gather_gradients(dict(reversed(parts)))

        return x, pullback


def _as_src(src: npt.ArrayLike, layer: TransformerEncoderLayer) -> Array:
    x = as_features(src, layer.d_model, layer.linear1.weight.dtype, "src")
    if x.ndim not in (2, 3):
        axes = "(N, L, d_model)" if layer.self_attn.batch_first else "(L, N, d_model)"
        raise ValueError(f"src must have shape {axes} or (L, d_model), not {x.shape}")
    return x


def _masks(
    mask: npt.ArrayLike | None, padding_mask: npt.ArrayLike | None, is_causal: bool, key_lengths: npt.ArrayLike | None
) -> dict[str, Any]:  # fmt: skip
    """Name the masks as MultiheadAttention does; nobody sees its weights."""
    return {
        "attn_mask": mask, "key_padding_mask": padding_mask, "is_causal": is_causal, "key_lengths": key_lengths,
        "need_weights": False,
    }  # fmt: skip


def _copied(layer: Module) -> Module:
    """Copy a layer with its parameters, but not the generators that its dropout draws from.

    With copies of those, every layer would drop the same places.
    """
    generators = [vars(module)["rng"] for module in layer.modules() if "rng" in vars(module)]
    return copy.deepcopy(layer, {id(generator): generator for generator in generators})
