"""The Transformer's decoder: a layer that attends to itself and to a memory, and a stack of such layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, Gradients, Pullback, as_features, as_gradient, check_size
from selfattn._docs import documented_vjp
from selfattn.engine.weights import float_type
from selfattn.nn import init
from selfattn.nn.activations import GELU, Activation, ReLU
from selfattn.nn.containers import ModuleList, Sequential
from selfattn.nn.dropout import Dropout
from selfattn.nn.layer_norm import LayerNorm
from selfattn.nn.linear import Linear
from selfattn.nn.module import Module
from selfattn.nn.multihead_attention import MultiheadAttention
from selfattn.nn.transformer_encoder import copied

# From the gradient of a part's output to those of its input, of the memory, and of parameters by the names of submodules.
Back: TypeAlias = Callable[[Array], tuple[Array, Array | None, dict[str, Gradients]]]
Part: TypeAlias = Callable[[Array], tuple[Array, Back]]
ACTIVATIONS: dict[str, Activation] = {"relu": ReLU(), "gelu": GELU()}
_PULLBACK = """\
``(d_tgt, d_memory), grads = pullback(dy)``, as often as wanted: the gradients of both in the shape and dtype of each,
    and ``grads`` keyed like :meth:`parameters`, in their shapes and dtypes."""


class TransformerDecoderLayer(Module):
    """Self-attention, attention to a memory and a feed-forward network, each with dropout, a residual and a LayerNorm.

    ``x = norm1(x + dropout1(self_attn(x)))``, ``x = norm2(x + dropout2(multihead_attn(x, memory)))``, and ``x = norm3(x +
    feed_forward(x))`` with ``feed_forward(x) = dropout3(linear2(dropout(activation(linear1(x)))))``. With ``norm_first``
    the norms stand before what is added: ``x = x + dropout1(self_attn(norm1(x)))`` and so on.

    Constructor, call and parameters are those of ``torch.nn.TransformerDecoderLayer``, defaults included: inputs
    are (L, N, d_model) unless ``batch_first``, True in a boolean mask means *ignore*, and self-attention is causal only with
    ``tgt_is_causal`` or a mask. As there, a new layer is in training mode, in which it drops 10 % of everything.

    A layer without memory, as GPT has it, is a :class:`TransformerEncoderLayer` called with ``is_causal=True``.

    Parameters
    ----------
    d_model : int
        The width of inputs and output.
    nhead : int
        The number of heads; it has to divide ``d_model``.
    dim_feedforward : int, default 2048
        The width between ``linear1`` and ``linear2``.
    dropout : float, default 0.1
        Of the attentions' weights, behind the activation, and of what is added to the residual.
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
        self.d_model = d_model = check_size("d_model", d_model)
        self.activation, self.norm_first = activation, norm_first
        dim_feedforward = check_size("dim_feedforward", dim_feedforward)
        if d_model % check_size("nhead", nhead):
            raise ValueError(f"nhead must divide d_model; {nhead} does not divide {d_model}")
        generator = init.as_generator(rng)
        drawn: dict[str, Any] = {"dtype": dtype, "rng": generator}
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **drawn)
        self.multihead_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, **drawn
        )
        self.linear1 = Linear(d_model, dim_feedforward, bias, **drawn)
        self.dropout = Dropout(dropout, **drawn)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **drawn)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.norm3 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.dropout1 = Dropout(dropout, **drawn)
        self.dropout2 = Dropout(dropout, **drawn)
        self.dropout3 = Dropout(dropout, **drawn)

    def extra_repr(self) -> str:
        """Return the width, and what distinguishes layers of the same shapes."""
        return f"d_model={self.d_model}, activation={self.activation!r}, norm_first={self.norm_first}"

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
            What stands in the places of ignored tokens has no meaning.

        Raises
        ------
        TypeError, ValueError
            Inputs or masks that do not fit.
        """
        x, memory = self._checked(tgt, memory)
        own = _options(tgt_mask, tgt_key_padding_mask, tgt_is_causal, key_lengths)
        cross = _options(memory_mask, memory_key_padding_mask, memory_is_causal, memory_key_lengths)

        def attend_to_itself(x: Array) -> Any:
            return self.dropout1(self.self_attn(x, x, x, **own)[0])

        def attend_to_memory(x: Array) -> Any:
            return self.dropout2(self.multihead_attn(x, memory, memory, **cross)[0])

        def feed_forward(x: Array) -> Any:
            return self.dropout3(self.linear2(self.dropout(ACTIVATIONS[self.activation](self.linear1(x)))))

        parts = (self.norm1, attend_to_itself), (self.norm2, attend_to_memory), (self.norm3, feed_forward)
        for norm, part in parts:
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x

    @documented_vjp(result="y : ndarray, in the shape of ``tgt``", pullback=_PULLBACK)
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
        """Compute the output and its pullback, ``dy -> ((d_tgt, d_memory), grads)``. It drops what was dropped."""
        x, memory = self._checked(tgt, memory)
        own = _options(tgt_mask, tgt_key_padding_mask, tgt_is_causal, key_lengths)
        cross = _options(memory_mask, memory_key_padding_mask, memory_is_causal, memory_key_lengths)
        first = self._attention("self_attn", "dropout1", None, own)
        second = self._attention("multihead_attn", "dropout2", memory, cross)
        backs = []
        for norm, part in (("norm1", first), ("norm2", second), ("norm3", self._feed_forward)):
            x, back = self._residual(norm, part, x)
            backs.append(back)

        def pullback(dy: npt.ArrayLike) -> tuple[tuple[Array, Array], Gradients]:
            d: Any = dy
            parts: dict[str, Gradients] = {}
            d_memory = None
            for back in reversed(backs):
                d, d_other, grads = back(d)
                d_memory = d_other if d_memory is None else d_memory
                parts |= grads
            assert d_memory is not None
            ordered = {name: parts[name] for name, _ in self.named_children() if name in parts}
            return (d, d_memory), self.gather_gradients(ordered)

        return x, pullback

    # ---------------------------------------------------------------------------------------- their parts

    def _checked(self, tgt: npt.ArrayLike, memory: npt.ArrayLike) -> tuple[Array, Array]:
        dtype = float_type(self.linear1.weight)
        return as_features(tgt, self.d_model, dtype, "tgt"), as_features(
            memory, self.d_model, dtype, "memory"
        )

    def _residual(self, name: str, part: Part, x: Array) -> tuple[Array, Back]:
        """Add a part to x, with the norm before or behind; ``dy -> (dx, d_memory or None, grads)``."""
        norm: LayerNorm = getattr(self, name)
        if self.norm_first:
            normed, norm_back = norm.vjp(x)
            added, part_back = part(normed)
            y = x + added
        else:
            added, part_back = part(x)
            y, norm_back = norm.vjp(x + added)

        def back(dy: Array) -> tuple[Array, Array | None, dict[str, Gradients]]:
            if self.norm_first:
                dy = as_gradient(dy, y)
                d_normed, d_memory, grads = part_back(dy)
                d_added, norm_grads = norm_back(d_normed)
                return dy + d_added, d_memory, {**grads, name: norm_grads}
            d_sum, norm_grads = norm_back(dy)
            d_part, d_memory, grads = part_back(d_sum)
            return d_sum + d_part, d_memory, {**grads, name: norm_grads}

        return y, back

    def _attention(self, name: str, dropout: str, memory: Array | None, options: dict[str, Any]) -> Part:
        """Attend to the memory, or without one to x itself."""
        attention, drop = getattr(self, name), getattr(self, dropout)

        def part(x: Array) -> tuple[Array, Back]:
            keys = x if memory is None else memory
            (attended, _), attention_back = attention.vjp(x, keys, keys, **options)
            y, drop_back = drop.vjp(attended)

            def back(dy: Array) -> tuple[Array, Array | None, dict[str, Gradients]]:
                (dq, dk, dv), grads = attention_back(drop_back(dy)[0])
                if memory is None:
                    return dq + dk + dv, None, {name: grads}
                return dq, dk + dv, {name: grads}

            return y, back

        return part

    def _feed_forward(self, x: Array) -> tuple[Array, Back]:
        layers = self.linear1, ACTIVATIONS[self.activation], self.dropout, self.linear2, self.dropout3
        y, chain_back = Sequential(*layers).vjp(x)

        def back(dy: Array) -> tuple[Array, None, dict[str, Gradients]]:
            dx, grads = chain_back(dy)
            named: dict[str, Gradients] = {"linear1": {}, "linear2": {}}
            for key, gradient in grads.items():
                number, name = key.split(".")
                named["linear1" if number == "0" else "linear2"][name] = gradient
            return dx, None, named

        return y, back


class TransformerDecoder(Module):
    """Decoder layers one after the other, and a norm at the end if there is one.

    Constructor, call and parameters are those of ``torch.nn.TransformerDecoder``. As there, the layers are
    copies of the one that is given, so all of them start with the same weights, and a new decoder is in training mode.

    Parameters
    ----------
    decoder_layer : TransformerDecoderLayer, or another Module that is called like one
        It is copied ``num_layers`` times, and not used itself. The copies' dropout draws from its generator.
    num_layers : int
    norm : LayerNorm, RMSNorm or another Module, optional
        What the last layer's output goes through; a model of ``norm_first`` layers needs one.

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
        if not isinstance(decoder_layer, Module):
            raise TypeError(f"decoder_layer must be a Module, not {type(decoder_layer).__name__}")
        if not isinstance(norm, Module | None):
            raise TypeError(f"norm must be a Module or None, not {type(norm).__name__}")
        self.num_layers = check_size("num_layers", num_layers)
        self.layers = ModuleList([copied(decoder_layer) for _ in range(num_layers)])
        self.norm = norm

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

        Raises
        ------
        TypeError, ValueError
            Inputs or masks that do not fit.
        """
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, bool(tgt_is_causal)
        x: Any = tgt
        for layer in self.layers:
            x = layer(
                x,
                memory,
                *masks,
                memory_is_causal,
                key_lengths=key_lengths,
                memory_key_lengths=memory_key_lengths,
            )
        y: Array = x if self.norm is None else self.norm(x)
        return y

    @documented_vjp(result="y : ndarray, in the shape of ``tgt``", pullback=_PULLBACK)
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
        """Compute the output and its pullback, ``dy -> ((d_tgt, d_memory), grads)``. It drops what was dropped."""
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, bool(tgt_is_causal)
        x: Any = tgt
        pullbacks = []
        for layer in self.layers:
            x, layer_pullback = layer.vjp(
                x,
                memory,
                *masks,
                memory_is_causal,
                key_lengths=key_lengths,
                memory_key_lengths=memory_key_lengths,
            )
            pullbacks.append(layer_pullback)
        norm_pullback = None
        if self.norm is not None:
            x, norm_pullback = self.norm.vjp(x)

        def pullback(dy: npt.ArrayLike) -> tuple[tuple[Array, Array], Gradients]:
            d: Any = dy
            last: dict[str, Gradients] = {}
            if norm_pullback is not None:
                d, last["norm"] = norm_pullback(d)
            parts: list[tuple[str, Gradients]] = []
            d_memory: Any = None
            for n in reversed(range(len(pullbacks))):
                (d, more), grads = pullbacks[n](d)
                d_memory = more if d_memory is None else d_memory + more
                parts.append((f"layers.{n}", grads))
            return (d, d_memory), self.gather_gradients({**dict(reversed(parts)), **last})

        return x, pullback


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
