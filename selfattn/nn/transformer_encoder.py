"""The Transformer's encoder: a layer of attention and a feed-forward network, and a stack of such layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_features, as_integers, check_divisor, check_size, one_of, seed_from_rng
from selfattn._docs import copy_doc
from selfattn.engine import transformer
from selfattn.engine.weights import Compact, check_input, float_type, is_compact, kind_of
from selfattn.functional._products import plain, widest
from selfattn.nn import init
from selfattn.nn._attention import IgnoreMasks, mask_from_ignored
from selfattn.nn.containers import ModuleList
from selfattn.nn.layers import Dropout, Linear
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback, named_gradients, run
from selfattn.nn.multihead_attention import MultiheadAttention
from selfattn.nn.rows import LayerNorm, RMSNorm

ACTIVATIONS = ("relu", "gelu")


class ResidualLayer(Module):
    """The base of encoder and decoder layers: attentions and a feed-forward network, each with residual and LayerNorm.

    A subclass names its attentions, and describes the parameters.
    """

    self_attn: MultiheadAttention
    linear1: Linear
    linear2: Linear
    dropout: Dropout

    _attentions: ClassVar[tuple[str, ...]]
    _in_repr = ("d_model", "activation", "norm_first")

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
        one_of("activation", activation, ACTIVATIONS)
        self.d_model = d_model = check_size("d_model", d_model)
        self.activation, self.norm_first = activation, norm_first
        dim_feedforward = check_size("dim_feedforward", dim_feedforward)
        drawn: dict[str, Any] = {"dtype": dtype, "rng": init.as_generator(rng)}
        nhead = check_divisor("nhead", nhead, "d_model", d_model)
        for name in self._attentions:  # PyTorch's order of drawing
            attention = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **drawn)
            setattr(self, name, attention)
        self.linear1 = Linear(d_model, dim_feedforward, bias, **drawn)
        self.dropout = Dropout(dropout, **drawn)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **drawn)
        numbers = range(1, len(self._attentions) + 2)
        for n in numbers:
            setattr(self, f"norm{n}", LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype))
        for n in numbers:
            setattr(self, f"dropout{n}", Dropout(dropout, **drawn))


class TransformerEncoderLayer(ResidualLayer):
    """Self-attention and a feed-forward network, each with dropout, a residual and a LayerNorm.

    ``x = norm1(x + dropout1(self_attn(x)))``, then ``x = norm2(x + feed_forward(x))`` with
    ``feed_forward(x) = dropout2(linear2(dropout(activation(linear1(x)))))``. With ``norm_first`` the norms come
    first: ``x = x + dropout1(self_attn(norm1(x)))``, then ``x = x + feed_forward(norm2(x))``.

    Constructor, call and parameters are those of ``torch.nn.TransformerEncoderLayer``, defaults included:
    inputs are (L, N, d_model) unless ``batch_first``, and True in a boolean mask means *ignore*. A new layer
    is in training mode, in which it drops 10 % of its values: call ``eval()`` before using it.

    Parameters
    ----------
    d_model : int
        The width of input and output.
    nhead : int
        The number of heads; it has to divide ``d_model``.
    dim_feedforward : int, default 2048
        The width between ``linear1`` and ``linear2``.
    dropout : float, default 0.1
        The probability in all dropouts: of the attention weights, after the activation, and before the sums.
    activation : {"relu", "gelu"}, default "relu"
        gelu is the exact one, by the error function.
    layer_norm_eps : float, default 1e-5
    batch_first : bool, default False
        Batches are (N, L, d_model) rather than (L, N, d_model).
    norm_first : bool, default False
    bias : bool, default True
        False leaves out the biases of all linear layers and norms.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights, in PyTorch's order, and then of dropout's draws.

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

    norm1: LayerNorm
    norm2: LayerNorm
    dropout1: Dropout
    dropout2: Dropout

    _attentions = ("self_attn",)

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
            A token sees no token after it; with a mask, both must allow a pair.
        key_lengths : array_like of int, shape (N,) or (), optional
            The number of real tokens of each sequence; the others are padding.

        Returns
        -------
        ndarray, in the shape of ``src``
            The values of ignored tokens are undefined.
        """
        ignored = IgnoreMasks(src_mask, src_key_padding_mask, is_causal, key_lengths)
        return _encode(False, self, [self], None, src, ignored)[0]

    @copy_doc(forward)
    def vjp(
        self,
        src: npt.ArrayLike,
        src_mask: npt.ArrayLike | None = None,
        src_key_padding_mask: npt.ArrayLike | None = None,
        is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``. The pullback uses the same dropout."""
        ignored = IgnoreMasks(src_mask, src_key_padding_mask, is_causal, key_lengths)
        return _encode(True, self, [self], None, src, ignored)


class Stack(Module):
    """Copies of a layer one after the other, and an optional norm at the end.

    The copies share the generators of dropout: with copies of these, every layer would drop the same places.
    """

    layers: ModuleList
    norm: Module | None

    def __init__(self, name: str, layer: Module, num_layers: int, norm: Module | None) -> None:
        if not isinstance(layer, Module):
            raise TypeError(f"{name} must be a Module, not {type(layer).__name__}")
        if not isinstance(norm, Module | None):
            raise TypeError(f"norm must be a Module or None, not {type(norm).__name__}")
        self.num_layers = check_size("num_layers", num_layers)
        generators = [vars(module)["rng"] for module in layer.modules() if "rng" in vars(module)]
        shared = {id(generator): generator for generator in generators}
        self.layers = ModuleList([copy.deepcopy(layer, dict(shared)) for _ in range(self.num_layers)])
        self.norm = norm

    def _run(self, keep: bool, x: Any, *inputs: Any, **options: Any) -> tuple[Array, Pullback]:
        """Call one layer after the other; the gradients of a memory, the second input, are added up."""
        pullbacks = []
        for n, layer in enumerate(self.layers):
            x, back = run(layer, keep, x, *inputs, **options)
            pullbacks.append((f"layers.{n}", back))
        if self.norm is not None:
            x, back = run(self.norm, keep, x)
            pullbacks.append(("norm", back))

        def pullback(dy: npt.ArrayLike) -> tuple[Any, Gradients]:
            d: Any = dy
            d_memory: Any = None
            grads: dict[str, Gradients] = {}
            for name, back in reversed(pullbacks):
                d, grads[name] = back(d)
                if isinstance(d, tuple):
                    d, more = d
                    d_memory = more if d_memory is None else d_memory + more
            gathered = self.gather_gradients(dict(reversed(grads.items())))
            return (d if d_memory is None else (d, d_memory)), gathered

        return x, pullback


class TransformerEncoder(Stack):
    """Encoder layers one after the other, and an optional norm at the end.

    Constructor, call and parameters are those of ``torch.nn.TransformerEncoder``. As there, the layers are
    copies of the given one, so all of them start with the same weights, and a new encoder is in training mode. The
    values of ignored tokens are undefined (in PyTorch they depend on the mode).

    Parameters
    ----------
    encoder_layer : TransformerEncoderLayer, or another Module with the same call
        The ModuleList ``layers`` has ``num_layers`` copies of it. Their dropout draws from its generator.
    num_layers : int
    norm : LayerNorm, RMSNorm or another Module, optional
        It follows the last layer; a model of ``norm_first`` layers needs one.
    enable_nested_tensor, mask_check : bool
        Without effect: in PyTorch they control a fast path, which does not change the result.

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
        del enable_nested_tensor, mask_check
        super().__init__("encoder_layer", encoder_layer, num_layers, norm)

    def _encode(self, keep: bool, src: npt.ArrayLike, ignored: IgnoreMasks) -> tuple[Array, Pullback]:
        """Run the layers, in one call of the core if it can compute all of them and the norm."""
        norm: Any = self.norm
        own: list[Any] = [layer for layer in self.layers if type(layer) is TransformerEncoderLayer]
        shapes = {(layer.d_model, layer.self_attn.num_heads, layer.self_attn.batch_first) for layer in own}
        whole = len(own) == len(self.layers) and len(shapes) == 1
        if whole and norm is not None:
            known = type(norm) in (LayerNorm, RMSNorm) and norm.weight is not None
            whole = known and norm.normalized_shape == (own[0].d_model,)
        if whole:
            return _encode(keep, self, own, norm, src, ignored)
        *masks, is_causal, key_lengths = ignored[:4]
        return self._run(keep, src, *masks, bool(is_causal), key_lengths=key_lengths)

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
            None is False. (PyTorch then checks whether ``mask`` is causal, which does not change the result.)

        Returns
        -------
        ndarray, in the shape of ``src``
        """
        return self._encode(False, src, IgnoreMasks(mask, src_key_padding_mask, is_causal, key_lengths))[0]

    @copy_doc(forward)
    def vjp(
        self,
        src: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        src_key_padding_mask: npt.ArrayLike | None = None,
        is_causal: bool | None = None,
        *,
        key_lengths: npt.ArrayLike | None = None,
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``. The pullback uses the same dropout."""
        return self._encode(True, src, IgnoreMasks(mask, src_key_padding_mask, is_causal, key_lengths))


def _encode(
    keep: bool,
    owner: Module,
    layers: Sequence[TransformerEncoderLayer],
    norm: Any,
    src: npt.ArrayLike,
    ignored: IgnoreMasks,
) -> tuple[Array, Any]:
    """Compute a stack of layers in one call of the core; return the output and, with ``keep``, its pullback.

    The core's rows are without the padding that ``key_lengths`` marks. Results and gradients have zeros in its places.
    """
    first = layers[0]
    x = as_features(src, first.d_model, float_type(first.linear1.weight), "src")
    batch_first = first.self_attn.batch_first
    if x.ndim not in (2, 3):
        axes = "(N, L, d_model)" if batch_first else "(L, N, d_model)"
        raise ValueError(f"src must have shape {axes} or (L, d_model), not {x.shape}")
    for layer in layers:
        check_layer(layer)
    named = owner.parameters()
    parameters = named.values()
    for parameter in parameters:
        if is_compact(parameter):
            check_input(x, kind_of(parameter))
    result_type = np.result_type(x, *{p.dtype for p in parameters})
    described = Description(widest(x, *parameters))

    def by_sequence(rows: Array) -> Array:
        """View (L, N, d) as (N, L, d), and back."""
        return rows.swapaxes(0, 1) if rows.ndim == 3 and not batch_first else rows

    *lead, length, d = by_sequence(x).shape
    shape = (lead[0] if lead else 1, length, d)
    exists = _existing(ignored.key_lengths, tuple(lead), length)

    def packed(rows: Array) -> Array:
        """Return the rows of real tokens, as the core takes them."""
        every = by_sequence(rows).reshape(shape)
        return plain(every.reshape(-1, d) if exists is None else every[exists], described.dtype)

    def unpacked(rows: Array) -> Array:
        """Return the rows in the shape of the input, with zeros for padding."""
        if exists is None:
            every = rows.reshape(shape)
        else:
            every = np.zeros(shape, rows.dtype)
            every[exists] = rows
        y = by_sequence(every.reshape(by_sequence(x).shape))
        return np.ascontiguousarray(y, result_type)

    lengths = np.full(shape[0], length) if exists is None else exists.sum(axis=1)
    present = np.flatnonzero(lengths)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths[present])]).astype(np.int64)
    heads = first.self_attn.num_heads
    allowed, key_bias = mask_from_ignored(ignored, tuple(lead), heads, (length, length), described.dtype)
    if key_bias is not None:
        key_bias = key_bias.reshape(shape[:2])[present]
    model = transformer.Transformer(
        tuple(described.layer(layer, bool(ignored.is_causal)) for layer in layers),
        final_norm=None if norm is None else described.norm(norm),
    )
    call = transformer.Call(
        mask=None if allowed is None else _four_axes(allowed, length, present),
        key_bias=key_bias if len(present) else None,
        dropout=dropouts(layers),
    )
    rows, core_back = described.compute(keep, model, packed(x), cu_seqlens, call)
    y = unpacked(rows)
    if not keep:
        return y, None

    def backward(dy: Array) -> tuple[Array, Gradients]:
        dx, pairs = core_back(packed(dy))
        return unpacked(dx).astype(x.dtype, copy=False), named_gradients(named, pairs)

    return y, checked_pullback(owner, y, parameters, backward)


def _four_axes(mask: Array, length: int, present: Array) -> Array:
    """View a mask that is broadcastable to (N, heads, L, L) with four axes; leave out empty sequences."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = np.broadcast_to(mask, (*mask.shape[:2], length, length))
    return mask if len(mask) in (1, len(present)) else mask[present]


def _existing(key_lengths: npt.ArrayLike | None, lead: tuple[int, ...], length: int) -> Array | None:
    """Return True for real tokens and False for padding, (N, L), or None without padding."""
    if key_lengths is None:
        return None
    lengths = as_integers("key_lengths", key_lengths)
    if lengths.shape not in ((), lead):
        raise ValueError(f"key_lengths must have shape {lead} or (), not {lengths.shape}")
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= length):
        raise ValueError(f"key_lengths must be in 0...{length}, not {key_lengths!r}")
    real = np.arange(length) < lengths.reshape(-1, 1)
    return np.broadcast_to(real, (lead[0] if lead else 1, length))


# ---- what layers say to the core: parameters as it reads them, and the parameter of each gradient


class Description:
    """Describes layers to the core.

    It remembers which parameter each of the core's arrays comes from, for the gradients.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        # Keys are ids of arrays that the core reads; values are the array and its parameter.
        self.origins: dict[int, tuple[Array, Array]] = {}

    def array(self, parameter: Any) -> Any:
        """Return a parameter as the core reads it; 16-bit floats become float32."""
        if parameter is None or isinstance(parameter, Compact):
            return parameter
        taken = plain(parameter, self.dtype)
        self.origins[id(taken)] = taken, parameter
        return taken

    def projection(self, weight: Any, bias: Array | None) -> transformer.Projection:
        """Describe a product."""
        return transformer.Projection(self.array(weight), self.array(bias))

    def norm(self, norm: Any) -> transformer.Norm:
        """Describe a LayerNorm or RMSNorm with a weight."""
        if isinstance(norm, RMSNorm):
            eps = np.finfo(self.dtype).eps if norm.eps is None else norm.eps
            return transformer.Norm(self.array(norm.weight), None, float(eps), "rms")
        return transformer.Norm(self.array(norm.weight), self.array(norm.bias), float(norm.eps))

    def layer(self, layer: Any, is_causal: bool) -> transformer.Layer:
        """Describe a layer."""
        attention, linear1, linear2 = layer.self_attn, layer.linear1, layer.linear2
        # The core takes rounded query, key and value separately.
        inputs: list[tuple[Any, Array | None]] = [(attention.in_proj_weight, attention.in_proj_bias)]
        if is_compact(inputs[0][0]):
            inputs = attention._projections()
        query, *others = [self.projection(weight, bias) for weight, bias in inputs]
        key, value = others or (None, None)
        return transformer.Layer(
            attention.num_heads,
            query,
            key,
            value,
            output=self.projection(attention.out_proj._operand("weight"), attention.out_proj.bias),
            attention_norm=self.norm(layer.norm1),
            up=self.projection(linear1._operand("weight"), linear1.bias),
            down=self.projection(linear2._operand("weight"), linear2.bias),
            feed_forward_norm=self.norm(layer.norm2),
            norm_first=bool(layer.norm_first),
            activation="relu" if layer.activation == "relu" else "gelu",
            causal=is_causal,
        )

    def compute(
        self,
        keep: bool,
        model: transformer.Transformer,
        inputs: Array,
        cu_seqlens: Array,
        call: transformer.Call,
        *,
        wants_rows: bool = True,
    ) -> tuple[Array, Any]:
        """Compute the rows of a model and, with ``keep``, ``dy -> (dx, pairs (parameter, gradient))``.

        ``dx`` is None if it is not wanted.
        """
        if not keep:
            return transformer.forward(model, inputs, cu_seqlens, call), None
        rows, core_back = transformer.vjp(model, inputs, cu_seqlens, call, wants_rows=wants_rows)

        def back(dy: Array) -> tuple[Any, list[tuple[Array, Array]]]:
            dx, grads, _ = core_back(dy)
            taken = zip(transformer.arrays(model), grads, strict=True)
            return dx, [(self.origins[id(array)][1], grad) for array, grad in taken]

        return rows, back


def dropouts(layers: Iterable[Any]) -> tuple[transformer.Dropout, ...]:
    """Return the dropout of layers in their current mode, each with a new seed; nothing if no layer drops."""
    found = []
    for layer in layers:
        attention = layer.self_attn
        after = (own.p if own.training else 0.0 for own in (layer.dropout1, layer.dropout, layer.dropout2))
        drops = [float(p) for p in (attention.dropout if attention.training else 0.0, *after)]
        seed = seed_from_rng(attention.rng) if any(drops) else 0
        found.append(transformer.Dropout._make([*drops, seed]))
    return tuple(found) if any(any(own[:-1]) for own in found) else ()


def check_layer(layer: Any) -> None:
    """Refuse a layer with submodules that the core cannot compute."""
    kinds = {
        "self_attn": MultiheadAttention,
        "norm1": LayerNorm,
        "linear1": Linear,
        "linear2": Linear,
        "norm2": LayerNorm,
        "dropout": Dropout,
        "dropout1": Dropout,
        "dropout2": Dropout,
    }
    why = "the core computes the layer as a whole; for other modules, compose a layer of your own"
    for name, kind in kinds.items():
        if (found := type(getattr(layer, name))) is not kind:
            wanted = f"a {kind.__name__}, not {found.__name__}"
            raise TypeError(f"{name} of a TransformerEncoderLayer must be {wanted}: {why}")
    for name, lacks, wanted in (
        ("norm1", layer.norm1.weight is None, "a weight"),
        ("norm2", layer.norm2.weight is None, "a weight"),
        ("self_attn", layer.self_attn.in_proj_weight is None, "keys and values as wide as its queries"),
    ):
        if lacks:
            raise ValueError(f"{name} of a TransformerEncoderLayer must have {wanted}: {why}")
    one_of("activation", layer.activation, ACTIVATIONS)
