"""Multi-head attention with an output projection, as PyTorch's module of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import (
    Array,
    as_array,
    as_features,
    check_divisor,
    check_probability,
    check_size,
    seed_from_rng,
)
from selfattn._docs import copy_doc
from selfattn.engine.weights import float_type, refuse_gradients
from selfattn.functional._products import widened, widest
from selfattn.functional.attention import WRT, attention_backward
from selfattn.nn import init
from selfattn.nn._attention import (
    BIASES,
    PROJECTIONS,
    IgnoreMasks,
    given_biases,
    lengths_for_heads,
    mask_from_ignored,
    project,
    project_backward,
    split_heads,
    with_key_bias,
)
from selfattn.nn.layers import Linear
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback, run

if TYPE_CHECKING:
    from selfattn.steps.layers import LayerSteps

Inputs = tuple[Array, Array, Array]


class MultiheadAttention(Module):
    """Attention of several heads between projections: ``out_proj(concatenated heads)``.

    Constructor, call and parameters are those of ``torch.nn.MultiheadAttention``, defaults included: inputs
    are (L, N, E) unless ``batch_first``, the weights are returned unless ``need_weights=False``, and True in
    a boolean mask means *ignore*, only in this class and the Transformer's layers.

    Parameters
    ----------
    embed_dim : int
        The width of the query, of all heads together and of the output.
    num_heads : int
        It has to divide ``embed_dim``.
    dropout : float, default 0.0
        The probability to drop a weight while ``training``, which a new module is.
    bias : bool, default True
        Add biases in all four projections.
    add_bias_kv, add_zero_attn : bool, default False
        Not supported: True is an error.
    kdim, vdim : int, optional
        The widths of key and value, if not ``embed_dim``.
    batch_first : bool, default False
        Batches are (N, L, E) rather than (L, N, E).
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights, in PyTorch's order, and then of dropout's draws.

    Attributes
    ----------
    in_proj_weight : ndarray, shape (3·embed_dim, embed_dim), or None
        The projections of query, key and value in one matrix, drawn Xavier-uniform as one.
    q_proj_weight, k_proj_weight, v_proj_weight : ndarray or None
        In its place when a ``kdim`` or ``vdim`` differs: (embed_dim, embed_dim), (embed_dim, kdim) and
        (embed_dim, vdim).
    in_proj_bias : ndarray, shape (3·embed_dim,), or None
        Initially 0. Its middle third, the bias of the keys, does not change the output: it adds the same
        number to all scores of a row.
    out_proj : Linear
        From embed_dim to embed_dim; its bias is initially 0.

    Raises
    ------
    NotImplementedError
        ``add_bias_kv`` or ``add_zero_attn``.

    See Also
    --------
    TransformerEncoderLayer, SelfAttentionBlock, selfattn.scaled_dot_product_attention

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> layer = nn.MultiheadAttention(4, 2, batch_first=True, rng=0)
    >>> x = np.eye(4, dtype=np.float32)[None]
    >>> output, weights = layer(x, x, x, key_padding_mask=[[False, False, False, True]])
    >>> output.shape, weights.shape, weights[0, :, 3]
    ((1, 4, 4), (1, 4, 4), array([0., 0., 0., 0.], dtype=float32))
    >>> (output, weights), pullback = layer.vjp(x, x, x)
    >>> (dq, dk, dv), grads = pullback(output)
    >>> list(grads)
    ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias']
    """

    in_proj_weight: Array | None
    q_proj_weight: Array | None
    k_proj_weight: Array | None
    v_proj_weight: Array | None
    in_proj_bias: Array | None
    _rounds = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    _in_repr = ("embed_dim", "num_heads", "dropout", "batch_first")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        for name, asked in {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}.items():
            if asked:
                raise NotImplementedError(f"{name}={asked!r} is not supported; only {name}=False is")
        self.embed_dim = embed_dim = check_size("embed_dim", embed_dim)
        self.num_heads = check_divisor("num_heads", num_heads, "embed_dim", embed_dim)
        self.kdim = embed_dim if kdim is None else check_size("kdim", kdim)
        self.vdim = embed_dim if vdim is None else check_size("vdim", vdim)
        self.head_dim = embed_dim // self.num_heads
        self.dropout = check_probability("dropout", dropout)
        self.batch_first = batch_first
        self.rng = init.as_generator(rng)
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias, dtype=dtype, rng=self.rng)
        kind, widths = self.out_proj.weight.dtype, (embed_dim, self.kdim, self.vdim)
        one = widths == (embed_dim,) * 3
        # PyTorch draws the weights of out_proj before these.
        columns = [embed_dim, None, None, None] if one else [None, *widths]
        for name, width in zip(self._rounds, columns, strict=True):
            shape = (3 * embed_dim if one else embed_dim, width or 0)
            drawn = None if width is None else init.xavier_uniform_(np.empty(shape, kind), rng=self.rng)
            self.register_parameter(name, drawn)
        self.register_parameter("in_proj_bias", np.zeros(3 * embed_dim, kind) if bias else None)
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    # --------------------------------------------------------------------------------------------- the calls

    def forward(
        self,
        query: npt.ArrayLike,
        key: npt.ArrayLike,
        value: npt.ArrayLike,
        key_padding_mask: npt.ArrayLike | None = None,
        need_weights: bool = True,
        attn_mask: npt.ArrayLike | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        offset_bias: npt.ArrayLike | None = None,
    ) -> tuple[Array, Array | None]:
        """Attend.

        Parameters
        ----------
        query : array_like, shape (L, N, embed_dim), with ``batch_first`` (N, L, embed_dim), or (L, embed_dim)
        key, value : array_like, shape (S, N, kdim) and (S, N, vdim), and so on
        key_padding_mask : array_like, shape (N, S) or (S,), optional
            True means that a key is ignored; floats are added to its scores.
        need_weights : bool, default True
            False saves the time and memory of the weights.
        attn_mask : array_like, shape (L, S) or (N·num_heads, L, S), optional
            True means that a pair is ignored; floats are added to the scores.
        average_attn_weights : bool, default True
            Return the mean of the weights over the heads.
        is_causal : bool, default False
            Query i sees no keys after key i. PyTorch also requires the mask; here it is not needed, and with a mask,
            both must allow a pair.
        key_lengths : array_like of int, shape (N,) or (), optional
            The number of real keys of each sequence; those after them are padding.
        bias : array_like of float, optional
            Broadcastable to (N, num_heads, L, S), added to the scores, beside masks that are not floats themselves.
        offset_bias : array_like of float, optional
            (num_heads, L + S - 1) or (N, num_heads, L + S - 1), as in :func:`selfattn.scaled_dot_product_attention`.

        Returns
        -------
        output : ndarray, in the shape of ``query``
        weights : ndarray or None
            (N, L, S), or (N, num_heads, L, S) when they are not averaged, without N for one sequence; after dropout.
            A row that ignores all keys has weights of 0 and an output of ``out_proj.bias``, where PyTorch gives NaN.
        """
        ignored = IgnoreMasks(attn_mask, key_padding_mask, is_causal, key_lengths, bias, offset_bias)
        return self._run(False, (query, key, value), ignored, need_weights, average_attn_weights)[0]

    @copy_doc(forward)
    def vjp(
        self,
        query: npt.ArrayLike,
        key: npt.ArrayLike,
        value: npt.ArrayLike,
        key_padding_mask: npt.ArrayLike | None = None,
        need_weights: bool = True,
        attn_mask: npt.ArrayLike | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        offset_bias: npt.ArrayLike | None = None,
    ) -> tuple[tuple[Array, Array | None], Pullback]:
        """Compute ``(output, weights)`` and the pullback ``d_output -> ((dq, dk, dv), grads)``.

        No gradient flows back through the weights. In self-attention, where one array is query, key and value, its
        gradient is ``dq + dk + dv``. The pullback drops the same weights.

        Returns
        -------
        result : tuple, (output, weights)
        pullback : callable, ``(dq, dk, dv), grads = pullback(d_output)``, as :class:`Module` says
            The gradients of ``bias`` and ``offset_bias``, if they are given, follow dv.
        """
        refuse_gradients(self.out_proj.weight)
        ignored = IgnoreMasks(attn_mask, key_padding_mask, is_causal, key_lengths, bias, offset_bias)
        return self._run(True, (query, key, value), ignored, need_weights, average_attn_weights)

    def _run(
        self, keep: bool, given: tuple[Any, ...], ignored: IgnoreMasks, need_weights: bool, average: bool
    ) -> tuple[tuple[Array, Array | None], Any]:
        inputs = self._inputs(*given)
        options = self._options(inputs, ignored)
        q, k, v = self._project(inputs)
        attended, statistics, *weights = _core._attention_forward(
            q, k, v, **options, return_weights=bool(need_weights)
        )
        output, out_pullback = run(self.out_proj, keep, self._merge(attended))
        result = output, _averaged(weights[0] if need_weights else None, average)
        if not keep:
            return result, None

        def backward(d_output: Array) -> tuple[tuple[Array, ...], Gradients]:
            d_merged, out_grads = out_pullback(d_output)
            d_heads = attention_backward(
                q,
                k,
                v,
                names=(*WRT, *given_biases(options)),
                out=attended,
                statistics=statistics,
                grad_out=self._split(d_merged),
                **options,
            )
            d_inputs, own = self._project_backward(inputs, d_heads[:3])
            return (*d_inputs, *d_heads[3:]), self.gather_gradients({"": own, "out_proj": out_grads})

        own = dict(self._own_parameters()).values()
        return result, checked_pullback(self, output, own, backward, "d_output")

    @copy_doc(forward)
    def steps(
        self,
        query: npt.ArrayLike,
        key: npt.ArrayLike,
        value: npt.ArrayLike,
        key_padding_mask: npt.ArrayLike | None = None,
        attn_mask: npt.ArrayLike | None = None,
        is_causal: bool = False,
        *,
        key_lengths: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        offset_bias: npt.ArrayLike | None = None,
    ) -> LayerSteps:
        """Compute the output with every intermediate result.

        Returns
        -------
        selfattn.steps.layers.LayerSteps
            Projections, scores and weights of each head (with one head there is no axis of heads), then the
            concatenated heads and their projection. Batches are (N, …) for any ``batch_first``.
        """
        from selfattn.steps.layers import layer_steps  # in NumPy; imported when needed

        inputs = self._inputs(query, key, value)
        ignored = IgnoreMasks(attn_mask, key_padding_mask, is_causal, key_lengths, bias, offset_bias)
        options = self._options(inputs, ignored)
        key_bias = options.pop("key_bias")
        if key_bias is not None:
            name = "attn_mask" if bias is None else "bias"
            options[name] = with_key_bias(options[name], key_bias)
        if self.num_heads == 1:
            for name, axis in (("attn_mask", -3), ("bias", -3), ("offset_bias", -2)):
                if options[name] is not None and options[name].ndim > -axis - 1:
                    options[name] = options[name].squeeze(axis)
            options["key_lengths"] = key_lengths
        q, k, v = (x.swapaxes(0, 1) if self._sequence_first(x) else x for x in inputs)
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = ((np.asarray(w), b) for w, b in self._projections())
        return layer_steps(
            q,
            w_q.T,
            w_k.T,
            w_v.T,
            b_query=b_q,
            b_key=b_k,
            b_value=b_v,
            key_inputs=k,
            value_inputs=v,
            num_heads=self.num_heads,
            W_out=np.asarray(self.out_proj._operand("weight")).T,
            b_out=self.out_proj.bias,
            **options,
        )

    # ---------------------------------------------------------------------------------------- their steps

    def _inputs(self, query: npt.ArrayLike, key: npt.ArrayLike, value: npt.ArrayLike) -> Inputs:
        """Check that the inputs are sequences or batches whose sizes fit."""
        dtype, widths = float_type(self.out_proj.weight), (self.embed_dim, self.kdim, self.vdim)
        given = zip((query, key, value), widths, PROJECTIONS, strict=True)
        q, k, v = (as_features(x, width, dtype, name) for x, width, name in given)
        if q.ndim not in (2, 3) or not q.ndim == k.ndim == v.ndim:
            axes = "(N, L, E)" if self.batch_first else "(L, N, E)"
            raise ValueError(
                f"query, key and value must all be (L, E) or all be {axes}, not {q.shape}, {k.shape} and {v.shape}"
            )
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(f"key {k.shape} and value {v.shape} differ in more than the last axis")
        if self._lead(q) != self._lead(k):
            raise ValueError(
                f"query {q.shape} and key {k.shape} differ in the size of the batch, which is axis "
                f"{0 if self.batch_first else 1} because batch_first={self.batch_first}"
            )
        return q, k, v

    def _sequence_first(self, x: Array) -> bool:
        return x.ndim == 3 and not self.batch_first

    def _lead(self, x: Array) -> tuple[int, ...]:
        """Return the leading dims: (N,), or () for one sequence."""
        return () if x.ndim == 2 else (x.shape[0 if self.batch_first else 1],)

    def _options(self, inputs: Inputs, ignored: IgnoreMasks) -> dict[str, Any]:
        """Return the options of attention, the seed of dropout included."""
        query, key, _ = inputs
        n_queries, n_keys = (x.shape[0 if self._sequence_first(x) else -2] for x in (query, key))
        compute = widest(*inputs, *[x for _, x in self._own_parameters()])
        pairs = n_queries, n_keys
        mask, key_bias = mask_from_ignored(ignored, self._lead(query), self.num_heads, pairs, compute)
        p = self.dropout if self.training else 0.0
        return {
            "attn_mask": mask,
            "key_bias": key_bias,
            **{
                name: None if x is None else as_array(name, x)
                for name, x in zip(BIASES, ignored[-2:], strict=True)
            },
            "dropout_p": p,
            "is_causal": bool(ignored.is_causal),
            "key_lengths": lengths_for_heads(ignored.key_lengths),
            "rng": seed_from_rng(self.rng) if p > 0 else None,
        }

    def _projections(self) -> list[tuple[Any, Array | None]]:
        """Return weight and bias of each of the three projections, as views."""
        d = self.embed_dim
        if self.in_proj_weight is not None:
            weights = [self._operand("in_proj_weight", slice(d * n, d * (n + 1))) for n in range(3)]
        else:
            weights = [self._operand(name) for name in self._rounds[1:]]
        biases: list[Any] = [None] * 3 if self.in_proj_bias is None else np.split(self.in_proj_bias, 3)
        return list(zip(weights, biases, strict=True))

    def _project(self, inputs: Inputs) -> list[Array]:
        """Return queries, keys and values as (N, num_heads, length, head_dim)."""
        pairs = zip(inputs, self._projections(), strict=True)
        return [self._split(project(x, weight, bias)) for x, (weight, bias) in pairs]

    def _project_backward(self, inputs: Inputs, d_heads: tuple[Array, ...]) -> tuple[Inputs, Gradients]:
        found = [
            project_backward(self._merge(d), x, weight)
            for d, x, (weight, _) in zip(d_heads, inputs, self._projections(), strict=True)
        ]
        (dq, *weight_q), (dk, *weight_k), (dv, *weight_v) = found
        d_weights, d_biases = zip(weight_q, weight_k, weight_v, strict=True)
        grads = dict(zip(self._rounds[1:], d_weights, strict=True))
        if self.in_proj_weight is not None:
            grads = {"in_proj_weight": np.concatenate(d_weights)}
        if self.in_proj_bias is not None:
            grads["in_proj_bias"] = np.concatenate(d_biases)
        return (dq, dk, dv), grads

    def _split(self, x: Array) -> Array:
        """View (L, N, E), or (N, L, E), as (N, num_heads, L, head_dim)."""
        return split_heads(x.swapaxes(0, 1) if self._sequence_first(x) else x, self.num_heads)

    def _merge(self, x: Array) -> Array:
        """Copy (N, num_heads, L, head_dim) to the order of the inputs."""
        x = x.swapaxes(-2, -3)
        if x.ndim == 4 and not self.batch_first:
            x = x.swapaxes(0, 1)
        return x.reshape(*x.shape[:-2], self.embed_dim)


def _averaged(weights: Array | None, average: bool) -> Array | None:
    """Return the mean over the heads of (..., num_heads, L, S) if ``average``, else the weights of each head."""
    if weights is None or not average:
        return weights
    mean: Array = widened(weights).mean(axis=-3)
    return mean.astype(weights.dtype, copy=False)
