"""A GPT: a decoder that learns to predict the next token and continues prompts."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn._check import (
    Array,
    as_integers,
    check_divisor,
    check_gradient,
    check_number,
    check_size,
    quoted,
)
from selfattn._docs import copy_doc
from selfattn.engine import transformer
from selfattn.engine.decoder import Decoder
from selfattn.engine.sampling import Sampling, generate
from selfattn.engine.transformer import Ids, check_ids, pack, vectors
from selfattn.engine.weights import multiply, refuse_gradients
from selfattn.functional._products import linear, linear_backward, plain, widest
from selfattn.nn import init
from selfattn.nn.containers import ModuleList
from selfattn.nn.inspection import InspectableModel
from selfattn.nn.layers import Embedding, Linear
from selfattn.nn.losses import CrossEntropyLoss
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback, named_gradients
from selfattn.nn.rows import LayerNorm
from selfattn.nn.transformer_encoder import Description, TransformerEncoderLayer, check_layer, dropouts

IGNORED = -100  # a target that the loss leaves out, as CrossEntropyLoss does by default
STD = 0.02  # standard deviation of new weights


class GPT(InspectableModel, Module):
    """Token and position embeddings, causal layers, a norm, and a head: logits of the next token.

    ``x = token_embedding(ids) + position_embedding(0 … L−1)``, then ``num_layers`` layers in which a token sees
    itself and the tokens before it, then ``logits = head(norm(x))``. A layer is a :class:`TransformerEncoderLayer`,
    by default with the norms first, as in GPT-2. With ``positions="rotary"`` no embedding is added; queries and keys
    are rotated instead.

    Parameters
    ----------
    vocab_size : int
        The number of ids: 0 … vocab_size − 1.
    d_model : int
        The width.
    num_layers, num_heads : int
        ``num_heads`` has to divide ``d_model``.
    max_seq_len : int
        The context, the most tokens of a sequence.
    positions : {"learned", "rotary"}, default "learned"
    dim_feedforward : int, optional
        The width between ``linear1`` and ``linear2``; by default four times ``d_model``.
    dropout : float, default 0.0
        As in the layers; embeddings are not dropped.
    activation : {"gelu", "relu"}, default "gelu"
    norm_first : bool, default True
        False puts the norms after the sums, and leaves out the last one.
    bias : bool, default True
        False leaves out the biases of all linear layers and norms. The head has no bias.
    tie_word_embeddings : bool, default True
        Whether the head's weight is the token embeddings' table.
    layer_norm_eps : float, default 1e-5
    rope_theta : float, default 10000.0
        The base of rotary angles: pair i of a head of width w turns by ``rope_theta**(−2i/w)`` at each position.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights, and then of dropout's draws.

    Attributes
    ----------
    token_embedding : Embedding
    position_embedding : Embedding or None
    layers : ModuleList of TransformerEncoderLayer
    norm : LayerNorm or None
    head : Linear

    See Also
    --------
    selfattn.training.fit : trains it, with its own loss.
    TransformerEncoder : sees both directions.

    Notes
    -----
    New weights are drawn as in GPT-2: from N(0, 0.02²), with 0.02/√(2·num_layers) for the two products of each layer
    that are added to the residual; biases are 0.

    A sequence's logits are the same, to the bit, alone or in a batch, and with any number of threads.

    References
    ----------
    Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.3; Su et al.,
    "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34; Press and Wolf, "Using the
    Output Embedding to Improve Language Models", 2017, for the tied head.

    Examples
    --------
    Learn a short text by heart, and generate it:

    >>> import numpy as np
    >>> from selfattn import nn, optim
    >>> text = "to be or not to be"
    >>> letters = sorted(set(text))
    >>> ids = np.array([letters.index(c) for c in text])
    >>> model = nn.GPT(len(letters), 32, num_layers=2, num_heads=2, max_seq_len=32, rng=0)
    >>> optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    >>> for _ in range(40):
    ...     loss, pullback = model.loss_vjp(ids)
    ...     optimizer.step(pullback(1.0))
    >>> bool(loss < 0.1)
    True
    >>> "".join(letters[i] for i in model.generate(ids[:3], max_new_tokens=15))
    'be or not to be'
    """

    position_embedding: Embedding | None
    norm: LayerNorm | None
    _in_repr = ("vocab_size", "d_model", "num_layers", "num_heads", "max_seq_len", "positions")

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        max_seq_len: int,
        positions: Literal["learned", "rotary"] = "learned",
        *,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        activation: str = "gelu",
        norm_first: bool = True,
        bias: bool = True,
        tie_word_embeddings: bool = True,
        layer_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        self.vocab_size = vocab_size = check_size("vocab_size", vocab_size)
        self.d_model = d_model = check_size("d_model", d_model)
        self.num_layers = num_layers = check_size("num_layers", num_layers, 0)
        self.num_heads = num_heads = check_divisor("num_heads", num_heads, "d_model", d_model)
        self.max_seq_len = max_seq_len = check_size("max_seq_len", max_seq_len)
        if positions not in ("learned", "rotary"):
            raise ValueError(f'positions must be "learned" or "rotary", not {positions!r}')
        if positions == "rotary" and d_model // num_heads % 2:
            raise ValueError(
                f"heads must have an even width for rotary positions, not {d_model} / {num_heads}"
            )
        self.positions = positions
        self.rope_theta = check_number("rope_theta", rope_theta)
        generator = init.as_generator(rng)
        drawn: dict[str, Any] = {"dtype": dtype, "rng": generator}
        self.token_embedding = Embedding(vocab_size, d_model, **drawn)
        self.position_embedding = Embedding(max_seq_len, d_model, **drawn) if positions == "learned" else None
        wide = 4 * d_model if dim_feedforward is None else dim_feedforward
        self.layers = ModuleList(
            TransformerEncoderLayer(
                d_model,
                num_heads,
                wide,
                dropout,
                activation,
                layer_norm_eps,
                batch_first=True,
                norm_first=norm_first,
                bias=bias,
                **drawn,
            )
            for _ in range(num_layers)
        )
        self.norm = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype) if norm_first else None
        self.head = Linear(d_model, vocab_size, bias=False, **drawn)
        if tie_word_embeddings:
            self.head.register_parameter("weight", self.token_embedding.weight)
        self._initialise(generator)

    def _initialise(self, rng: init.Generator) -> None:
        for name, array in self.parameters().items():
            if array.ndim == 2:
                added = name.endswith(("out_proj.weight", "linear2.weight"))
                init.normal_(array, 0.0, STD / math.sqrt(2 * self.num_layers) if added else STD, rng=rng)
            elif name.endswith("bias"):
                init.zeros_(array)

    # ---------------------------------------------------------------------------------------------- the model

    def forward(self, ids: npt.ArrayLike | Sequence[npt.ArrayLike]) -> Any:
        """Compute the logits of the next token after each token.

        Parameters
        ----------
        ids : array_like of int, shape (L,) or (N, L), or a list of N of different lengths

        Returns
        -------
        ndarray, shape (L, vocab_size) or (N, L, vocab_size), or a list of ndarray (L_i, vocab_size)

        Raises
        ------
        TypeError
            ``ids`` are not integers.
        ValueError
            A sequence is empty or longer than ``max_seq_len``, or an id is not in 0 … vocab_size − 1.
        """
        packed = self._pack(ids)
        return packed.unpacked(multiply(self._rows(packed), self.head._operand("weight"), None))

    @copy_doc(forward)
    def vjp(self, ids: npt.ArrayLike | Sequence[npt.ArrayLike]) -> tuple[Any, Pullback]:
        """Compute the logits and their pullback, ``dy -> grads``, with ``dy`` like the logits: ids have no gradient.

        The pullback uses the same dropout.
        """
        packed = self._pack(ids)
        logits, back = self._logits_vjp(packed)
        y = packed.unpacked(logits)

        def pullback(dy: Any) -> Gradients:
            if isinstance(y, list):
                if not hasattr(dy, "__len__") or len(dy) != len(y):
                    raise ValueError(
                        f"dy must have a gradient for each of {len(y)} sequences, in a list, not {dy!r:.80}"
                    )
                each = [check_gradient(own, of) for own, of in zip(dy, y, strict=True)]
                return dict(back(np.concatenate(each) if each else logits))
            return dict(back(check_gradient(dy, y).reshape(logits.shape)))

        return y, pullback

    def loss(
        self,
        ids: npt.ArrayLike | Sequence[npt.ArrayLike],
        targets: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
    ) -> float:
        """Compute the mean cross-entropy of predicting the targets, in nats.

        Parameters
        ----------
        ids : array_like of int, shape (L,) or (N, L), or a list of N of different lengths
        targets : like ``ids``, optional
            The token that should follow each one; −100 is not counted. By default each token but the first of a
            sequence is predicted from those before it: a sequence then has at least 2 and at most ``max_seq_len + 1``
            tokens.

        Returns
        -------
        float

        Raises
        ------
        TypeError, ValueError
            As for :meth:`forward`; or ``targets`` do not fit ``ids``.
        """
        packed, wanted = self._with_targets(ids, targets)
        logits = multiply(self._rows(packed), self.head._operand("weight"), None)
        return float(CrossEntropyLoss(ignore_index=IGNORED)(logits, wanted))

    @copy_doc(loss)
    def loss_vjp(
        self,
        ids: npt.ArrayLike | Sequence[npt.ArrayLike],
        targets: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
    ) -> tuple[float, Pullback]:
        """Compute the loss and its pullback, ``d_value -> grads``; ``d_value`` is 1.0 by default.

        The pullback uses the same dropout.
        """
        packed, wanted = self._with_targets(ids, targets)
        logits, back = self._logits_vjp(packed)
        value, loss_back = CrossEntropyLoss(ignore_index=IGNORED).vjp(logits, wanted)

        def pullback(d_value: Any = 1.0) -> Gradients:
            return dict(back(loss_back(d_value)))

        return float(value), pullback

    def loss_count(
        self,
        ids: npt.ArrayLike | Sequence[npt.ArrayLike],
        targets: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
    ) -> int:
        """Return the number of tokens that :meth:`loss` counts, by which it divides.

        Parameters
        ----------
        ids, targets : as for :meth:`loss`

        Returns
        -------
        int
        """
        return int(np.count_nonzero(self._with_targets(ids, targets)[1] != IGNORED))

    def _with_targets(self, ids: Any, targets: Any) -> tuple[_Packed, Array]:
        """Pack ids, and concatenate the targets, which fit them."""
        given = _sequences("ids", ids)
        if targets is None:
            short = [n for n, own in enumerate(given) if len(own) < 2]
            if short:
                raise ValueError(
                    f"sequence {short[0]} has {len(given[short[0]])} tokens; there must be 2 to predict one"
                )
            wanted = [own[1:] for own in given]
            return self._pack([own[:-1] for own in given]), np.concatenate(wanted)
        wanted = _sequences("targets", targets)
        lengths, of_targets = [len(own) for own in given], [len(own) for own in wanted]
        if lengths != of_targets:
            raise ValueError(f"targets must have the lengths of ids, {lengths[:9]}, not {of_targets[:9]}")
        return self._pack(ids), np.concatenate(wanted)

    def _one(self, ids: npt.ArrayLike) -> tuple[transformer.Transformer, Array, None]:
        packed = self._pack(ids)
        if not packed.one:
            raise ValueError(f"ids must be one sequence, of shape (L,), not {quoted(ids)}")
        return self._model(self._description()), packed.ids, None

    # --------------------------------------------------------------------------------------------- generation

    @copy_doc(Sampling)
    def generate(
        self,
        prompt: npt.ArrayLike | Sequence[npt.ArrayLike],
        max_new_tokens: int = 100,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Collection[int] | None = None,
        rng: Any = None,
        stream: bool = False,
    ) -> Any:
        """Continue one prompt, or several of different lengths at once, without dropout.

        Parameters
        ----------
        prompt : array_like of int, shape (L,) or (N, L), or a list of N of different lengths
        max_new_tokens : int, default 100
            A sequence also ends, with a UserWarning, when the context of ``max_seq_len`` tokens is full.
        stop : int or collection of int, optional
            A sequence ends after one of these ids.
        rng : int, sequence of int, Generator or None
            Seeds: with an int s, the seed of prompt i is s + i. A prompt's tokens depend on its seed, and not on
            other prompts.
        stream : bool, default False
            Return an iterator, which yields each token as soon as it is drawn.

        Returns
        -------
        ndarray of int64, shape (n,), or a list of such
            The new tokens. With ``stream`` an iterator of int; for several prompts, of lists with an int for each,
            None where a sequence has ended.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`forward`; or an option is outside its range; or the logits are not finite.

        References
        ----------
        Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, for ``top_p``; Fan et al.,
        "Hierarchical Neural Story Generation", 2018, for ``top_k``.
        """
        prompts = _sequences("prompt", prompt)
        for n, own in enumerate(prompts):
            check_ids(own, self.vocab_size, f"prompt {n} has")
        steps = generate(
            self._decoder(),
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_ids=_stop_ids(stop),
            rng=rng,
            context=self.max_seq_len,
        )
        alone = _is_one(prompt)
        if stream:
            return _first(steps) if alone else steps
        whole = list(steps)  # not zip(*steps): CPython 3.11 loses memory if an iterator raises there
        written = list(zip(*whole, strict=True))
        arrays = [np.array([new for new in own if new is not None], np.int64) for own in written]
        return arrays[0] if alone else arrays

    def _decoder(self) -> Decoder:
        """Return the model without dropout, for generation."""
        model = self._model(self._description())
        head = self.head._operand("weight")
        if isinstance(head, np.ndarray):
            head = plain(head, widest(head))
        return Decoder(model, head, max_seq_len=self.max_seq_len)

    # ---------------------------------------------------------------------------------------- the call of the core

    def _pack(self, ids: Any) -> _Packed:
        given = _sequences("ids", ids)
        for n, own in enumerate(given):
            if not 0 < len(own) <= self.max_seq_len:
                raise ValueError(
                    f"sequence {n} has {len(own)} tokens; there must be 1 to {self.max_seq_len}, max_seq_len"
                )
        packed, cu_seqlens = pack(given)
        check_ids(packed, self.vocab_size)
        return _Packed(
            packed, cu_seqlens, _is_one(ids), None if isinstance(ids, list | tuple) else np.shape(ids)
        )

    def _description(self) -> Description:
        return Description(widest(self.token_embedding.weight))

    def _model(self, described: Description) -> transformer.Transformer:
        every: Any = self.layers
        for layer in every:
            check_layer(layer)
        layers = [described.layer(layer, is_causal=True) for layer in every]
        if self.positions == "rotary":
            width = self.d_model // self.num_heads
            rotary = _rotary(self.max_seq_len, width, self.rope_theta, described.dtype)
            layers = [layer._replace(rotary=rotary) for layer in layers]
        learned = self.position_embedding
        return transformer.Transformer(
            tuple(layers),
            table=described.array(self.token_embedding.weight),
            positions=None if learned is None else plain(learned.weight, described.dtype),
            final_norm=None if self.norm is None else described.norm(self.norm),
        )

    def _compute(self, keep: bool, packed: _Packed) -> tuple[Array, Any]:
        """Compute the rows that enter the head and, with ``keep``, what gives gradients from theirs."""
        described = self._description()
        every: Any = self.layers
        model, call = self._model(described), transformer.Call(dropout=dropouts(every))
        wants_rows = self.position_embedding is not None
        return described.compute(keep, model, packed.ids, packed.cu_seqlens, call, wants_rows=wants_rows)

    def _rows(self, packed: _Packed) -> Array:
        return self._compute(False, packed)[0]

    def _logits_vjp(self, packed: _Packed) -> tuple[Array, Pullback]:
        """Compute packed logits, and the pullback from their gradient to the gradients of the parameters."""
        parameters = self.parameters()
        for parameter in parameters.values():
            refuse_gradients(parameter)
        rows, core_back = self._compute(True, packed)
        weight, positions = self.head.weight, self.position_embedding
        head = plain(weight, widest(weight))
        logits = linear(rows, head)

        def back(d_logits: Array) -> Gradients:
            d_rows, d_head = linear_backward(d_logits, rows, head, with_bias=False)
            dx, pairs = core_back(d_rows)
            pairs.append((weight, d_head))
            if positions is not None:
                pairs.append((positions.weight, packed.sum_by_position(dx, positions.weight.shape)))
            return named_gradients(parameters, pairs)

        return logits, checked_pullback(self, logits, parameters.values(), back)


class _Packed(NamedTuple):
    """The ids of sequences one after the other, and how they were given."""

    ids: Ids
    cu_seqlens: Ids
    one: bool  # they were one sequence
    shape: tuple[int, ...] | None  # of the given array; None: a list

    def unpacked(self, rows: Array) -> Any:
        """View the logits of packed tokens in the shape of the given sequences."""
        if self.one:
            return rows
        if self.shape is not None:
            return rows.reshape(*self.shape, rows.shape[1])
        return np.split(rows, self.cu_seqlens[1:-1])

    def sum_by_position(self, rows: Array, shape: tuple[int, ...]) -> Array:
        """Sum rows over sequences, position by position, in an array of ``shape``."""
        found = np.zeros(shape, rows.dtype)
        lengths = np.diff(self.cu_seqlens)
        if len(set(lengths.tolist())) == 1:
            rows.reshape(-1, lengths[0], rows.shape[1]).sum(axis=0, out=found[: lengths[0]])
            return found
        for begin, length in zip(self.cu_seqlens[:-1], lengths, strict=True):
            found[:length] += rows[begin : begin + length]
        return found


@functools.lru_cache(8)
def _rotary(longest: int, width: int, theta: float, dtype: np.dtype[Any]) -> transformer.Rotary:
    angles = np.outer(np.arange(longest), theta ** (-2 * np.arange(width // 2) / width))
    return transformer.Rotary(np.cos(angles).astype(dtype), np.sin(angles).astype(dtype))


def _stop_ids(stop: Any) -> frozenset[int]:
    """Return one id or many, integers of any type, as a set."""
    if stop is None:
        return frozenset()
    one = not isinstance(stop, Iterable) or getattr(stop, "ndim", 1) == 0
    return frozenset(check_size("stop", n, 0) for n in ([stop] if one else stop))


def _is_one(ids: Any) -> bool:
    """Return whether ids are one sequence, not several."""
    if isinstance(ids, list | tuple):
        return not ids or np.ndim(ids[0]) == 0
    return np.ndim(ids) == 1


def _sequences(name: str, ids: Any) -> list[Ids]:
    """Return one sequence or several as vectors of int64."""
    if isinstance(ids, list | tuple) and not _is_one(ids):
        return vectors(name, ids)
    array = as_integers(name, ids)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{name} must have shape (L,) or (N, L), or be a list of sequences, not {array.shape}"
        )
    return list(array) if array.ndim == 2 else [array]


def _first(steps: Iterator[list[int | None]]) -> Iterator[int]:
    """Yield the tokens that continue the only prompt."""
    for (new,) in steps:
        if new is not None:
            yield new
