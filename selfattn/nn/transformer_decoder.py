"""The Transformer's decoder: a layer that attends to itself and to a memory, and a stack of such layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy.typing as npt

from selfattn._check import Array, as_features, as_gradient
from selfattn.engine.weights import float_type
from selfattn.nn.activations import GELU, Activation, ReLU
from selfattn.nn.dropout import Dropout
from selfattn.nn.module import Gradients, Module, Pullback, run
from selfattn.nn.multihead_attention import MultiheadAttention
from selfattn.nn.norms import LayerNorm
from selfattn.nn.transformer_encoder import ResidualLayer, Stack

# From the gradient of what is added to those of its input, of the memory, and of parameters by the names of submodules.
Back: TypeAlias = Callable[[Array], tuple[Array, Array | None, dict[str, Gradients]]]
Added: TypeAlias = Callable[[Array], tuple[Array, Back]]
ACTIVATIONS: dict[str, Activation] = {"relu": ReLU(), "gelu": GELU()}


class TransformerDecoderLayer(ResidualLayer):
    """Self-attention, attention to a memory and a feed-forward network, each with dropout, a residual and a LayerNorm.

    ``x = norm1(x + dropout1(self_attn(x)))``, ``x = norm2(x + dropout2(multihead_attn(x, memory)))``, and ``x = norm3(x +
    feed_forward(x))`` with ``feed_forward(x) = dropout3(linear2(dropout(activation(linear1(x)))))``. With ``norm_first``
    the norms come before what is added: ``x = x + dropout1(self_attn(norm1(x)))`` and so on.

    Constructor, call and parameters are those of ``torch.nn.TransformerDecoderLayer``, defaults included: inputs
    are (L, N, d_model) unless ``batch_first``, True in a boolean mask means *ignore*, and self-attention is causal only with
    ``tgt_is_causal`` or a mask. As there, a new layer is in training mode, in which it drops 10 % of everything.

    A layer without memory, as GPT has it, is a :class:`TransformerEncoderLayer` called with ``is_causal=True``.

    Parameters
    ----------
    d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, dtype, rng
        As for :class:`TransformerEncoderLayer`.

    Attributes
    ----------
    self_attn, multihead_attn : MultiheadAttention
    linear1, linear2 : Linear
    norm1, norm2, norm3 : LayerNorm
    dropout, dropout1, dropout2, dropout3 : Dropout

    See Also
    --------
    TransformerDecoder, TransformerEncoderLayer

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, sections 3.1 and 3.3.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> layer = nn.TransformerDecoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True, rng=0).eval()
    >>> tgt, memory = np.ones((3, 4, 8), np.float32), np.ones((3, 5, 8), np.float32)
    >>> y, pullback = layer.vjp(tgt, memory, tgt_is_causal=True, memory_key_lengths=[5, 4, 2])
    >>> (d_tgt, d_memory), grads = pullback(y)
    >>> y.shape, d_memory.shape, grads["multihead_attn.in_proj_weight"].shape
    ((3, 4, 8), (3, 5, 8), (24, 8))
    """

    multihead_attn: MultiheadAttention
    dropout1: Dropout
    dropout2: Dropout
    dropout3: Dropout

    _attentions = ("self_attn", "multihead_attn")

    def forward(
        self,
        tgt: npt.ArrayLike,
        memory: npt.ArrayLike,
        tgt_mask: npt.ArrayLike | None = None,
        memory_mask: npt.ArrayLike | None = None,
        tgt_key_padding_mask: npt.ArrayLike | None = None,
        memory_key_padding_mask: npt.ArrayLike | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
        memory_key_lengths: npt.ArrayLike | None = None,
    ) -> Array:
        """Decode.

        Parameters
        ----------
        tgt : array_like, shape (L, N, d_model), with ``batch_first`` (N, L, d_model), or (L, d_model)
        memory : array_like, shape (S, N, d_model), with ``batch_first`` (N, S, d_model), or (S, d_model)
            What an encoder returned.
        tgt_mask, memory_mask : array_like, shape (L, L) and (L, S), or (N·nhead, L, L) and (N·nhead, L, S), optional
            True means that a pair is ignored; floats are added to the scores.
        tgt_key_padding_mask, memory_key_padding_mask : array_like, shape (N, L) and (N, S), or (L,) and (S,), optional
            True means that a token is ignored; floats are added to its scores.
        tgt_is_causal, memory_is_causal : bool, default False
            Token i sees none beyond token i of the target, or of the memory; with a mask, both must allow a pair.
        key_lengths, memory_key_lengths : array_like of int, shape (N,) or (), optional
            How many tokens of each target, and of each memory, exist.

        Returns
        -------
        ndarray, in the shape of ``tgt``
            What is in the places of ignored tokens has no meaning.
        """
        own = _options(tgt_mask, tgt_key_padding_mask, tgt_is_causal, key_lengths)
        cross = _options(memory_mask, memory_key_padding_mask, memory_is_causal, memory_key_lengths)
        return self._run(False, tgt, memory, own, cross)[0]

    def vjp(
        self,
        tgt: npt.ArrayLike,
        memory: npt.ArrayLike,
        tgt_mask: npt.ArrayLike | None = None,
        memory_mask: npt.ArrayLike | None = None,
        tgt_key_padding_mask: npt.ArrayLike | None = None,
        memory_key_padding_mask: npt.ArrayLike | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
        memory_key_lengths: npt.ArrayLike | None = None,
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> ((d_tgt, d_memory), grads)``. It drops what was dropped.

        Parameters
        ----------
        tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal,
        key_lengths, memory_key_lengths
            As :meth:`forward` takes them.

        Returns
        -------
        y : ndarray, in the shape of ``tgt``
        pullback : callable
            ``(d_tgt, d_memory), grads = pullback(dy)``, as :class:`Module` says.
        """
        own = _options(tgt_mask, tgt_key_padding_mask, tgt_is_causal, key_lengths)
        cross = _options(memory_mask, memory_key_padding_mask, memory_is_causal, memory_key_lengths)
        return self._run(True, tgt, memory, own, cross)

    def _run(
        self,
        keep: bool,
        tgt: npt.ArrayLike,
        memory: npt.ArrayLike,
        own: dict[str, Any],
        cross: dict[str, Any],
    ) -> tuple[Array, Pullback]:
        dtype = float_type(self.linear1.weight)
        x = as_features(tgt, self.d_model, dtype, "tgt")
        memory = as_features(memory, self.d_model, dtype, "memory")

        def attend(name: str, dropout: Dropout, to: Array | None, options: dict[str, Any]) -> Added:
            """Attend to the memory, or without one to x itself."""

            def added(x: Array) -> tuple[Array, Back]:
                keys = x if to is None else to
                (y, _), attention_back = run(getattr(self, name), keep, x, keys, keys, **options)
                y, drop_back = run(dropout, keep, y)

                def back(dy: Array) -> tuple[Array, Array | None, dict[str, Gradients]]:
                    (dq, dk, dv), grads = attention_back(drop_back(dy)[0])
                    return (dq + dk + dv, None, {name: grads}) if to is None else (dq, dk + dv, {name: grads})

                return y, back

            return added

        def feed_forward(x: Array) -> tuple[Array, Back]:
            chain = []
            for name, layer in (
                ("linear1", self.linear1), ("", ACTIVATIONS[self.activation]), ("", self.dropout),
                ("linear2", self.linear2), ("", self.dropout3),
            ):  # fmt: skip
                x, layer_back = run(layer, keep, x)
                chain.append((name, layer_back))

            def back(dy: Array) -> tuple[Array, None, dict[str, Gradients]]:
                found: dict[str, Gradients] = {}
                for name, layer_back in reversed(chain):
                    dy, found[name] = layer_back(dy)
                return dy, None, found

            return x, back

        backs = []
        for norm, added in (
            ("norm1", attend("self_attn", self.dropout1, None, own)),
            ("norm2", attend("multihead_attn", self.dropout2, memory, cross)),
            ("norm3", feed_forward),
        ):
            x, back = self._residual(keep, norm, added, x)
            backs.append(back)

        def pullback(dy: npt.ArrayLike) -> tuple[tuple[Array, Array], Gradients]:
            d: Any = dy
            d_memory: Any = None
            found: dict[str, Gradients] = {}
            for back in reversed(backs):
                d, d_other, grads = back(d)
                d_memory = d_other if d_memory is None else d_memory
                found |= grads
            ordered = {name: found[name] for name, _ in self.named_children() if name in found}
            return (d, d_memory), self.gather_gradients(ordered)

        return x, pullback

    def _residual(self, keep: bool, name: str, added: Added, x: Array) -> tuple[Array, Back]:
        """Add what is made of x to it, with the norm before or after; ``dy -> (dx, d_memory or None, grads)``."""
        norm: LayerNorm = getattr(self, name)
        if self.norm_first:
            normed, norm_back = run(norm, keep, x)
            more, added_back = added(normed)
            y = x + more
        else:
            more, added_back = added(x)
            y, norm_back = run(norm, keep, x + more)

        def back(dy: Array) -> tuple[Array, Array | None, dict[str, Gradients]]:
            if self.norm_first:
                dy = as_gradient(dy, y)
                d_normed, d_memory, grads = added_back(dy)
                d_more, norm_grads = norm_back(d_normed)
                return dy + d_more, d_memory, {**grads, name: norm_grads}
            d_sum, norm_grads = norm_back(dy)
            d_more, d_memory, grads = added_back(d_sum)
            return d_sum + d_more, d_memory, {**grads, name: norm_grads}

        return y, back


class TransformerDecoder(Stack):
    """Decoder layers one after the other, and a norm at the end if there is one.

    Constructor, call and parameters are those of ``torch.nn.TransformerDecoder``. As there, the layers are
    copies of the one that is given, so all of them start with the same weights, and a new decoder is in training mode.

    Parameters
    ----------
    decoder_layer : TransformerDecoderLayer, or another Module that is called like one
        It is copied ``num_layers`` times, and not used itself. The copies' dropout draws from its generator.
    num_layers, norm
        As for :class:`TransformerEncoder`.

    Attributes
    ----------
    layers : ModuleList
    norm : Module or None

    See Also
    --------
    TransformerDecoderLayer

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> layer = nn.TransformerDecoderLayer(8, nhead=2, dim_feedforward=16, rng=0)
    >>> model = nn.TransformerDecoder(layer, num_layers=2).eval()
    >>> tgt, memory = np.ones((4, 3, 8), np.float32), np.ones((5, 3, 8), np.float32)
    >>> model(tgt, memory, tgt_is_causal=True).shape
    (4, 3, 8)
    """

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__("decoder_layer", decoder_layer, num_layers, norm)

    def forward(
        self,
        tgt: npt.ArrayLike,
        memory: npt.ArrayLike,
        tgt_mask: npt.ArrayLike | None = None,
        memory_mask: npt.ArrayLike | None = None,
        tgt_key_padding_mask: npt.ArrayLike | None = None,
        memory_key_padding_mask: npt.ArrayLike | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
        memory_key_lengths: npt.ArrayLike | None = None,
    ) -> Array:
        """Decode.

        Parameters
        ----------
        tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, memory_is_causal, key_lengths,
        memory_key_lengths
            As :meth:`TransformerDecoderLayer.forward` takes them; every layer gets them.
        tgt_is_causal : bool, optional
            None is False: PyTorch looks whether ``tgt_mask`` is causal, which makes no difference to the result.

        Returns
        -------
        ndarray, in the shape of ``tgt``
        """
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        causal = bool(tgt_is_causal), memory_is_causal
        lengths = {"key_lengths": key_lengths, "memory_key_lengths": memory_key_lengths}
        y: Array = self._run(False, tgt, memory, *masks, *causal, **lengths)[0]
        return y

    def vjp(
        self,
        tgt: npt.ArrayLike,
        memory: npt.ArrayLike,
        tgt_mask: npt.ArrayLike | None = None,
        memory_mask: npt.ArrayLike | None = None,
        tgt_key_padding_mask: npt.ArrayLike | None = None,
        memory_key_padding_mask: npt.ArrayLike | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
        memory_key_lengths: npt.ArrayLike | None = None,
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> ((d_tgt, d_memory), grads)``. It drops what was dropped.

        Parameters
        ----------
        tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal,
        key_lengths, memory_key_lengths
            As :meth:`forward` takes them.

        Returns
        -------
        y : ndarray, in the shape of ``tgt``
        pullback : callable
            ``(d_tgt, d_memory), grads = pullback(dy)``, as :class:`Module` says.
        """
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        causal = bool(tgt_is_causal), memory_is_causal
        lengths = {"key_lengths": key_lengths, "memory_key_lengths": memory_key_lengths}
        return self._run(True, tgt, memory, *masks, *causal, **lengths)


def _options(
    mask: npt.ArrayLike | None,
    padding: npt.ArrayLike | None,
    is_causal: bool,
    key_lengths: npt.ArrayLike | None,
) -> dict[str, Any]:
    """Return the options of one attention."""
    return {
        "attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal, "key_lengths": key_lengths,
        "need_weights": False,
    }  # fmt: skip
