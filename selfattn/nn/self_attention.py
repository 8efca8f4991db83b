"""Self-attention with its projections, without and with residual and LayerNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_sequence, check_divisor, check_size, layer_dtype, one_of
from selfattn._docs import copy_doc
from selfattn.functional import (
    additive_attention,
    additive_attention_vjp,
    scaled_dot_product_attention,
    scaled_dot_product_attention_vjp,
)
from selfattn.functional.attention import WRT
from selfattn.nn import init
from selfattn.nn._attention import (
    ADDITIVE_OPTIONS,
    OPTIONS,
    PROJECTIONS,
    check_options,
    given_biases,
    lengths_for_heads,
    mask_for_heads,
    merge_heads,
    project,
    project_backward,
    split_heads,
)
from selfattn.nn.layers import Linear
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback, run
from selfattn.nn.rows import LayerNorm

if TYPE_CHECKING:
    from selfattn.steps.layers import LayerSteps

SCORES = ("scaled_dot", "dot", "additive")


class SelfAttention(Module):
    """softmax(Q·Kᵀ / √d_out)·V with Q = x @ W_query, K = x @ W_key, V = x @ W_value.

    Parameters
    ----------
    d_in, d_out : int
        The widths of the input and of the projections.
    bias : bool, default False
        Add ``b_query``, ``b_key`` and ``b_value`` to the projections.
    scale : bool, default True
        False leaves out the factor 1/√d_out of the scores: the same as ``score="dot"``.
    d_v : int, optional
        The width of the values, and so of the output, if not d_out.
    score : {"scaled_dot", "dot", "additive"}, default "scaled_dot"
        The score of a query and a key: their product, divided by √d_out or not, or ``v @ tanh(q + k)``, which takes
        only ``attn_mask``, ``is_causal``, ``causal``, ``key_lengths`` and ``num_threads``.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights: query, key, value, then the biases in that order, then ``v``.

    Attributes
    ----------
    W_query, W_key, W_value : ndarray, shape (d_in, d_out), (d_in, d_out) and (d_in, d_v)
        Drawn from U[0, 1), as ``torch.rand``. :mod:`selfattn.nn.init` has other distributions.
    b_query, b_key, b_value : ndarray, shape (d_out,), (d_out,) and (d_v,), or None
        Drawn in the same way.
    v : ndarray, shape (d_out,), or None
        The weights of the additive score, drawn in the same way.
    score : str
        "dot" if ``scale=False``.

    See Also
    --------
    SelfAttentionBlock, selfattn.scaled_dot_product_attention, selfattn.functional.additive_attention

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1. The additive score: Bahdanau et al., "Neural
    Machine Translation by Jointly Learning to Align and Translate", 2015, appendix A.1.2.

    Examples
    --------
    >>> import selfattn as sa
    >>> from selfattn import nn
    >>> layer = nn.SelfAttention(2, 3, rng=sa.torch_rng(0))
    >>> layer.W_query.round(4)
    array([[0.4963, 0.7682, 0.0885],
           [0.132 , 0.3074, 0.6341]], dtype=float32)
    >>> layer([[1.0, 0.0], [0.0, 1.0]]).shape
    (2, 3)
    """

    W_query: Array
    W_key: Array
    W_value: Array
    b_query: Array | None
    b_key: Array | None
    b_value: Array | None
    v: Array | None
    _call_options = OPTIONS
    _in_repr = ("d_in", "d_out", "d_v", "score")

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = False,
        scale: bool = True,
        *,
        d_v: int | None = None,
        score: str = "scaled_dot",
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        self.d_in, self.d_out = d_in, d_out = check_size("d_in", d_in), check_size("d_out", d_out)
        self.d_v = d_out if d_v is None else check_size("d_v", d_v)
        if one_of("score", score, SCORES) == "additive" and not scale:
            raise ValueError('scale=False means score="dot", but score="additive" was given')
        self.score = score if scale else "dot"
        kind, generator = layer_dtype(dtype), init.as_generator(rng)
        widths = dict(zip(PROJECTIONS, (d_out, d_out, self.d_v), strict=True))
        for name, width in widths.items():
            weight = init.uniform_(np.empty((d_in, width), kind), rng=generator)
            self.register_parameter(f"W_{name}", weight)
        for name, width in widths.items():
            drawn = init.uniform_(np.empty(width, kind), rng=generator) if bias else None
            self.register_parameter(f"b_{name}", drawn)
        additive = init.uniform_(np.empty(d_out, kind), rng=generator) if score == "additive" else None
        self.register_parameter("v", additive)

    def _project(self, x: Array) -> list[Array]:
        # Linear's weights are transposed: return views.
        weights = self._weights()
        return [project(x, W.T, getattr(self, f"b_{n}")) for n, W in zip(PROJECTIONS, weights, strict=True)]

    def _weights(self) -> tuple[Array, Array, Array]:
        return self.W_query, self.W_key, self.W_value

    def forward(self, x: npt.ArrayLike, attn_mask: npt.ArrayLike | None = None, **options: Any) -> Array:
        """Attend within sequences.

        Parameters
        ----------
        x : array_like, shape (..., L, d_in)
        attn_mask : array_like, optional
            Broadcastable to (..., L, L): True where attention is allowed, or floats that are added to the scores.
        **options
            Those of :func:`selfattn.scaled_dot_product_attention` but ``scale``, ``enable_gqa``, ``block_mask`` and
            what it returns, ``bias`` and ``offset_bias`` among them; with an additive score ``is_causal``,
            ``causal``, ``key_lengths`` and ``num_threads``.

        Returns
        -------
        ndarray, shape (..., L, d_v)
        """
        x = self._checked(x, options)
        if self.v is not None:
            arguments = self._additive_arguments(x)
            return additive_attention(*arguments, attn_mask=attn_mask, **options)  # type: ignore[no-any-return]
        q, k, v = self._project(x)
        y: Array = scaled_dot_product_attention(q, k, v, attn_mask, scale=self._scale(), **options)
        return y

    def _additive_arguments(self, x: Array) -> tuple[Any, ...]:
        """Return the arguments of additive attention.

        A bias is a last row of a weight, and the input gets a column of ones.
        """
        value = project(x, self.W_value.T, self.b_value)
        if self.b_query is None or self.b_key is None:
            return x, x, value, self.W_query, self.W_key, self.v
        wide = np.concatenate([x, np.ones_like(x[..., :1])], axis=-1)
        weights = (np.vstack([w, b]) for w, b in ((self.W_query, self.b_query), (self.W_key, self.b_key)))
        return wide, wide, value, *weights, self.v

    def _additive_backward(self, x: Array, d: Any) -> tuple[Array, Gradients]:
        dx, d_weight, d_bias = project_backward(d.value, x, self.W_value.T)
        grads = {"W_value": np.ascontiguousarray(d_weight.T), "b_value": d_bias, "v": d.v}
        for name, wide in (("query", d.w_query), ("key", d.w_key)):
            grads[f"W_{name}"], grads[f"b_{name}"] = wide[: self.d_in], wide[-1]
        return dx + (d.query + d.key)[..., : self.d_in], grads

    def _backward(self, x: Array, d: Any) -> tuple[Array, Gradients]:
        dx, grads = np.zeros_like(x), {}
        for name, weight in zip(PROJECTIONS, self._weights(), strict=True):
            d_x, d_weight, grads[f"b_{name}"] = project_backward(getattr(d, name), x, weight.T)
            grads[f"W_{name}"] = np.ascontiguousarray(d_weight.T)
            dx += d_x
        return dx, grads

    def _checked(self, x: npt.ArrayLike, options: dict[str, Any]) -> Array:
        """Check the input and the names of options."""
        array = as_sequence(x, self.d_in, self.W_query.dtype)
        check_options(options, OPTIONS if self.v is None else ADDITIVE_OPTIONS)
        return array

    def _scale(self) -> float | None:
        return 1.0 if self.score == "dot" else None

    @copy_doc(forward)
    def steps(self, x: npt.ArrayLike, attn_mask: npt.ArrayLike | None = None, **options: Any) -> LayerSteps:
        """Compute the output with every intermediate result, in NumPy: ``num_threads`` has no effect.

        Returns
        -------
        selfattn.steps.layers.LayerSteps
            Projections, scores, weights, weighted values; its ``result`` is the output. With an additive score
            its scores are ``tanh(query[i] + key[j]) @ v``.
        """
        from selfattn.steps.layers import layer_steps  # in NumPy; imported when needed

        x = self._checked(x, options)
        options.pop("num_threads", None)  # steps are computed in NumPy
        if self.v is None:
            options["scale"] = self._scale()
        return layer_steps(
            x,
            self.W_query,
            self.W_key,
            self.W_value,
            b_query=self.b_query,
            b_key=self.b_key,
            b_value=self.b_value,
            v=self.v,
            attn_mask=attn_mask,
            **options,
        )

    @copy_doc(forward)
    def vjp(
        self, x: npt.ArrayLike, attn_mask: npt.ArrayLike | None = None, **options: Any
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``, which uses the same dropout.

        With ``bias`` or ``offset_bias`` it returns ``(dx, d_bias, ...), grads``, their gradients after that of x.
        """
        x = array = self._checked(x, options)
        biases = given_biases(options)
        attention_pullback: Any
        if self.v is not None:
            arguments = self._additive_arguments(x)
            y, attention_pullback = additive_attention_vjp(*arguments, attn_mask=attn_mask, **options)
        else:
            q, k, v = self._project(x)
            read, attention_pullback = scaled_dot_product_attention_vjp(
                q, k, v, attn_mask, scale=self._scale(), wrt=(*WRT, *biases), **options
            )
            y = read.copy()  # the caller may change what is returned

        def backward(dy: Array) -> tuple[Any, Gradients]:
            d = attention_pullback(dy)
            dx, grads = (self._backward if self.v is None else self._additive_backward)(array, d)
            inputs = (dx, *(getattr(d, name) for name in biases)) if biases else dx
            return inputs, {name: grads[name] for name, _ in self._own_parameters()}

        return y, checked_pullback(self, y, dict(self._own_parameters()).values(), backward)


class SelfAttentionBlock(Module):
    """LayerNorm(x + attention(query(x), key(x), value(x))), without an output projection.

    Parameters
    ----------
    d_model : int
        The width of the input, of the projections and of the output.
    num_heads : int, default 1
        The columns of the projections are split into this number of heads, each with scale 1/√(d_model/num_heads);
        their outputs are concatenated. It has to divide ``d_model``.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights: query, key, value, each weight and then bias.

    Attributes
    ----------
    query, key, value : Linear
        From d_model to d_model, with biases.
    ln : LayerNorm

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, sections 3.1 and 3.2.

    Examples
    --------
    >>> from selfattn import nn
    >>> block = nn.SelfAttentionBlock(4, num_heads=2, rng=0)
    >>> list(block.parameters())[:3]
    ['query.weight', 'query.bias', 'key.weight']
    >>> block([[[1.0, 2.0, 3.0, 4.0]]]).shape
    (1, 1, 4)
    """

    _call_options = OPTIONS
    _in_repr = ("d_model", "num_heads")

    def __init__(
        self, d_model: int, num_heads: int = 1, *, dtype: npt.DTypeLike = np.float32, rng: init.Rng = None
    ) -> None:
        self.d_model = d_model = check_size("d_model", d_model)
        self.num_heads = check_divisor("num_heads", num_heads, "d_model", d_model)
        generator = init.as_generator(rng)
        self.query = Linear(d_model, d_model, dtype=dtype, rng=generator)
        self.key = Linear(d_model, d_model, dtype=dtype, rng=generator)
        self.value = Linear(d_model, d_model, dtype=dtype, rng=generator)
        self.ln = LayerNorm(d_model, dtype=dtype)

    def forward(self, x: npt.ArrayLike, attn_mask: npt.ArrayLike | None = None, **options: Any) -> Array:
        """Attend within sequences.

        Parameters
        ----------
        x : array_like, shape (..., L, d_model)
        attn_mask : array_like, optional
            Broadcastable to (..., L, L), the same for all heads: True where attention is allowed, or floats that are
            added to the scores.
        **options
            ``key_lengths``, broadcastable to the leading dims: the number of real tokens of each sequence; the others
            are padding. ``bias``, broadcastable to (..., num_heads, L, L), and ``offset_bias`` (..., num_heads, 2L -
            1). The others are those of :func:`selfattn.scaled_dot_product_attention` but ``scale``,
            ``enable_gqa``, ``block_mask`` and what it returns.

        Returns
        -------
        ndarray, shape (..., L, d_model)
        """
        return self._run(False, x, attn_mask, options)[0]

    @copy_doc(forward)
    def steps(self, x: npt.ArrayLike, attn_mask: npt.ArrayLike | None = None, **options: Any) -> LayerSteps:
        """Compute the output with every intermediate result, in NumPy: ``num_threads`` has no effect.

        Returns
        -------
        selfattn.steps.layers.LayerSteps
            Projections, scores, weights, residual, norm; with several heads, each of them.
        """
        from selfattn.steps.layers import layer_steps  # in NumPy; imported when needed

        x = as_sequence(x, self.d_model, self.query.weight.dtype)
        check_options(options)
        options.pop("num_threads", None)  # steps are computed in NumPy
        if self.num_heads > 1:  # one head has no axis in the steps
            attn_mask = mask_for_heads(attn_mask)
            options["key_lengths"] = lengths_for_heads(options.get("key_lengths"))
        return layer_steps(
            x,
            self.query.weight.T,
            self.key.weight.T,
            self.value.weight.T,
            b_query=self.query.bias,
            b_key=self.key.bias,
            b_value=self.value.bias,
            num_heads=self.num_heads,
            residual=True,
            norm=(self.ln.weight, self.ln.bias, self.ln.eps),
            attn_mask=attn_mask,
            **options,
        )

    @copy_doc(forward)
    def vjp(
        self, x: npt.ArrayLike, attn_mask: npt.ArrayLike | None = None, **options: Any
    ) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``, which uses the same dropout.

        With ``bias`` or ``offset_bias`` it returns ``(dx, d_bias, ...), grads``, their gradients after that of x.
        """
        return self._run(True, x, attn_mask, options)

    def _run(
        self, keep: bool, x: npt.ArrayLike, attn_mask: npt.ArrayLike | None, options: dict[str, Any]
    ) -> tuple[Array, Pullback]:
        x = array = as_sequence(x, self.d_model, self.query.weight.dtype)
        # A list: CPython 3.11 loses memory if a generator raises while * unpacks it.
        runs = [run(getattr(self, name), keep, x) for name in PROJECTIONS]
        projected, pullbacks = zip(*runs, strict=True)
        q, k, v = (split_heads(each, self.num_heads) for each in projected)
        check_options(options)
        key_lengths = lengths_for_heads(options.get("key_lengths"))
        options |= {"attn_mask": mask_for_heads(attn_mask), "key_lengths": key_lengths}
        attention_pullback: Any = None
        if keep:
            wrt = (*WRT, *given_biases(options))
            attended, attention_pullback = scaled_dot_product_attention_vjp(q, k, v, wrt=wrt, **options)
        else:
            attended = scaled_dot_product_attention(q, k, v, **options)
        y, norm_pullback = run(self.ln, keep, x + merge_heads(attended))

        def pullback(dy: npt.ArrayLike) -> tuple[Any, Gradients]:
            d_sum, norm_grads = norm_pullback(dy)
            dx = d_sum.astype(array.dtype)
            grads: dict[str, Gradients] = {}
            d_attended = attention_pullback(split_heads(d_sum, self.num_heads))
            for name, d, projection_pullback in zip(PROJECTIONS, d_attended[:3], pullbacks, strict=True):
                d_x, grads[name] = projection_pullback(merge_heads(d))
                dx += d_x
            return (dx, *d_attended[3:]) if d_attended[3:] else dx, self.gather_gradients(
                {**grads, "ln": norm_grads}
            )

        return y, pullback
