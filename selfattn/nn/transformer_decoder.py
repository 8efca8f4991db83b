"""The Transformer's decoder: a layer with self-attention and attention to a memory, and a stack of such layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy.typing as npt

from selfattn._check import Array, as_features, check_gradient
from selfattn._docs import copy_doc
from selfattn.engine.weights import float_type
from selfattn.nn._attention import IgnoreMasks
from selfattn.nn.layers import Dropout
from selfattn.nn.module import Gradients, Module, Pullback, run
from selfattn.nn.multihead_attention import MultiheadAttention
from selfattn.nn.rows import GELU, Activation, LayerNorm, ReLU
from selfattn.nn.transformer_encoder import ResidualLayer, Stack

# Takes the gradient of a sublayer's output; returns the gradients of its input, the memory, and parameters by
# submodule.
Back: TypeAlias = Callable[[Array], tuple[Array, Array | None, dict[str, Gradients]]]
Sublayer: TypeAlias = Callable[[Array], tuple[Array, Back]]
ACTIVATIONS: dict[str, Activation] = {"relu": ReLU(), "gelu": GELU()}


class TransformerDecoderLayer(ResidualLayer):
    """Self-attention, attention to a memory and a feed-forward network, each with dropout, a residual and a LayerNorm.

    ``x = norm1(x + dropout1(self_attn(x)))``, ``x = norm2(x + dropout2(multihead_attn(x, memory)))``, and ``x =
    norm3(x + feed_forward(x))`` with ``feed_forward(x) = dropout3(linear2(dropout(activation(linear1(x)))))``. With
    ``norm_first`` the norms come first: ``x = x + dropout1(self_attn(norm1(x)))`` and so on.

    Constructor, call and parameters are those of ``torch.nn.TransformerDecoderLayer``, defaults included: inputs
    are (L, N, d_model) unless ``batch_first``, True in a boolean mask means *ignore*, and self-attention is causal
    only with ``tgt_is_causal`` or a mask. A new layer is in training mode, in which it drops 10 % of its values.

    A layer without memory, as in a GPT, is a :class:`TransformerEncoderLayer` with ``is_causal=True`` in its calls.

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
            The output of an encoder.
        tgt_mask, memory_mask : array_like, shape (L, L) and (L, S), or (N·nhead, L, L) and (N·nhead, L, S), optional
            True means that a pair is ignored; floats are added to the scores.
        tgt_key_padding_mask, memory_key_padding_mask : array_like, shape (N, L) and (N, S), or (L,) and (S,), optional
            True means that a token is ignored; floats are added to its scores.
        tgt_is_causal, memory_is_causal : bool, default False
            Token i sees no token after token i of the target, or of the memory; with a mask, both must allow a pair.
        key_lengths, memory_key_lengths : array_like of int, shape (N,) or (), optional
            The number of real tokens of each target, and of each memory; the others are padding.

        Returns
        -------
        ndarray, in the shape of ``tgt``
            The values of ignored tokens are undefined.
        """
        own = IgnoreMasks(tgt_mask, tgt_key_padding_mask, tgt_is_causal, key_lengths)
        cross = IgnoreMasks(memory_mask, memory_key_padding_mask, memory_is_causal, memory_key_lengths)
        return self._run(False, tgt, memory, own, cross)[0]

    @copy_doc(forward)
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
        """Compute the output and its pullback, ``dy -> ((d_tgt, d_memory), grads)``.

        The pullback uses the same dropout.
        """
        own = IgnoreMasks(tgt_mask, tgt_key_padding_mask, tgt_is_causal, key_lengths)
        cross = IgnoreMasks(memory_mask, memory_key_padding_mask, memory_is_causal, memory_key_lengths)
        return self._run(True, tgt, memory, own, cross)

    def _run(
        self, keep: bool, tgt: npt.ArrayLike, memory: npt.ArrayLike, own: IgnoreMasks, cross: IgnoreMasks
    ) -> tuple[Array, Pullback]:
        """Compute the output; self-attention and attention to the memory ignore ``own`` and ``cross``."""
        dtype = float_type(self.linear1.weight)
        x = as_features(tgt, self.d_model, dtype, "tgt")
        memory = as_features(memory, self.d_model, dtype, "memory")

        def attend(name: str, dropout: Dropout, to: Array | None, ignored: IgnoreMasks) -> Sublayer:
            """Attend to the memory, or to x itself if ``to`` is None."""
            mask, padding, is_causal, key_lengths, *_ = ignored

            def sublayer(x: Array) -> tuple[Array, Back]:
                keys = x if to is None else to
                (y, _), attention_back = run(
                    getattr(self, name),
                    keep,
                    x,
                    keys,
                    keys,
                    padding,
                    False,
                    mask,
                    is_causal=is_causal,
                    key_lengths=key_lengths,
                )
                y, drop_back = run(dropout, keep, y)

                def back(dy: Array) -> tuple[Array, Array | None, dict[str, Gradients]]:
                    (dq, dk, dv), grads = attention_back(drop_back(dy)[0])
                    return (dq + dk + dv, None, {name: grads}) if to is None else (dq, dk + dv, {name: grads})

                return y, back

            return sublayer

        def feed_forward(x: Array) -> tuple[Array, Back]:
            chain = []
            for name, layer in (
                ("linear1", self.linear1),
                ("", ACTIVATIONS[self.activation]),
                ("", self.dropout),
                ("linear2", self.linear2),
                ("", self.dropout3),
            ):
                x, layer_back = run(layer, keep, x)
                chain.append((name, layer_back))

            def back(dy: Array) -> tuple[Array, None, dict[str, Gradients]]:
                found: dict[str, Gradients] = {}
                for name, layer_back in reversed(chain):
                    dy, found[name] = layer_back(dy)
                return dy, None, found

            return x, back

        backs = []
        for norm, sublayer in (
            ("norm1", attend("self_attn", self.dropout1, None, own)),
            ("norm2", attend("multihead_attn", self.dropout2, memory, cross)),
            ("norm3", feed_forward),
        ):
            x, back = self._residual(keep, norm, sublayer, x)
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

    def _residual(self, keep: bool, name: str, sublayer: Sublayer, x: Array) -> tuple[Array, Back]:
        """Add the output of a sublayer to its input, with the norm before the sublayer or after the sum."""
        norm: LayerNorm = getattr(self, name)
        if self.norm_first:
            normed, norm_back = run(norm, keep, x)
            more, sublayer_back = sublayer(normed)
            y = x + more
        else:
            more, sublayer_back = sublayer(x)
            y, norm_back = run(norm, keep, x + more)

        def back(dy: Array) -> tuple[Array, Array | None, dict[str, Gradients]]:
            if self.norm_first:
                d_sum = check_gradient(dy, y)
                d_normed, d_memory, grads = sublayer_back(d_sum)
                d_more, norm_grads = norm_back(d_normed)
            else:
                d_sum, norm_grads = norm_back(dy)
                d_more, d_memory, grads = sublayer_back(d_sum)
            return d_sum + d_more, d_memory, {**grads, name: norm_grads}

        return y, back


class TransformerDecoder(Stack):
    """Decoder layers one after the other, and an optional norm at the end.

    Constructor, call and parameters are those of ``torch.nn.TransformerDecoder``. As there, the layers are
    copies of the given one, so all of them start with the same weights, and a new decoder is in training mode.

    Parameters
    ----------
    decoder_layer : TransformerDecoderLayer, or another Module with the same call
        The ModuleList ``layers`` has ``num_layers`` copies of it. Their dropout draws from its generator.
    num_layers, norm : as for :class:`TransformerEncoder`

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

    @copy_doc(TransformerDecoderLayer.forward)
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
        """Decode; every layer gets the arguments after ``tgt``.

        Parameters
        ----------
        tgt_is_causal, memory_is_causal : bool, optional
            Token i sees no token after token i of the target, or of the memory; with a mask, both must allow a pair.
            None is False. (PyTorch then checks whether ``tgt_mask`` is causal, which does not change the result.)
        """
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        causal = bool(tgt_is_causal), memory_is_causal
        lengths = {"key_lengths": key_lengths, "memory_key_lengths": memory_key_lengths}
        return self._run(False, tgt, memory, *masks, *causal, **lengths)[0]

    @copy_doc(forward)
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
        """Compute the output and its pullback, ``dy -> ((d_tgt, d_memory), grads)``.

        The pullback uses the same dropout.
        """
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        causal = bool(tgt_is_causal), memory_is_causal
        lengths = {"key_lengths": key_lengths, "memory_key_lengths": memory_key_lengths}
        return self._run(True, tgt, memory, *masks, *causal, **lengths)
