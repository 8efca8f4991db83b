"""A GPT: a decoder of one's own, which learns to predict the next token and writes on from prompts."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from selfattn._check import (
    Array,
    Gradients,
    Pullback,
    as_gradient,
    as_integers,
    check_number,
    check_size,
    checked_pullback,
)
from selfattn._docs import documented_vjp
from selfattn.engine import transformer
from selfattn.engine.decoder import Decoder
from selfattn.engine.sampling import generate
from selfattn.engine.weights import multiply, refuse_gradients
from selfattn.functional._products import linear, linear_backward, plain, widest
from selfattn.nn import init
from selfattn.nn.containers import ModuleList
from selfattn.nn.embedding import Embedding
from selfattn.nn.layer_norm import LayerNorm
from selfattn.nn.linear import Linear
from selfattn.nn.losses import CrossEntropyLoss
from selfattn.nn.module import Module
from selfattn.nn.transformer_encoder import TransformerEncoderLayer, core_norm, core_settings, parts_of_layer

IGNORED = -100  # a target that is not to be predicted, as CrossEntropyLoss has it
STD = 0.02  # of new weights


class GPT(Module):
    """Token and position embeddings, layers that look back, a norm, and a head: logits of the next token.

    ``x = token_embedding(ids) + position_embedding(0 … L−1)``, then ``num_layers`` layers in which a token sees itself and those
    before it, then ``logits = head(norm(x))``. A layer is a :class:`TransformerEncoderLayer`, by default with the norms first, as
    in GPT-2. With ``positions="rotary"`` nothing is added; queries and keys are turned by angles instead.

    Parameters
    ----------
    vocab_size : int
        How many ids there are: 0 … vocab_size − 1.
    d_model : int
        The width.
    num_layers, num_heads : int
        ``num_heads`` has to divide ``d_model``.
    max_seq_len : int
        The most tokens of a sequence: the context.
    positions : {"learned", "rotary"}, default "learned"
    dim_feedforward : int, optional
        The width between ``linear1`` and ``linear2``; by default four times ``d_model``.
    dropout : float, default 0.0
        As in the layers; embeddings are not dropped.
    activation : {"gelu", "relu"}, default "gelu"
    norm_first : bool, default True
        False puts the norms behind the sums, and leaves the last one out.
    bias : bool, default True
        False leaves the biases of all linear layers and norms out. The head has none.
    tie_word_embeddings : bool, default True
        Whether the head's weight is the token embeddings' table.
    layer_norm_eps : float, default 1e-5
    rope_theta : float, default 10000.0
        The base of rotary angles: pair i of a head of width w turns by ``rope_theta**(−2i/w)`` a position.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        Where the weights come from, and afterwards what dropout draws from.

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
    TransformerEncoder : what reads both ways.

    Notes
    -----
    New weights are those of GPT-2: N(0, 0.02²), with 0.02/√(2·num_layers) for the two products of each layer that are added to
    the residual; biases are 0.

    A sequence's logits are the same, to the bit, alone or in a batch, and with any number of threads.

    References
    ----------
    Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.3; Su et al., "RoFormer:
    Enhanced Transformer with Rotary Position Embedding", 2021, equation 34; Press and Wolf, "Using the Output Embedding to
    Improve Language Models", 2017, for the tied head.

    Examples
    --------
    Learn a short text by heart, and say it:

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
        self.num_heads = num_heads = check_size("num_heads", num_heads)
        self.max_seq_len = max_seq_len = check_size("max_seq_len", max_seq_len)
        if d_model % num_heads:
            raise ValueError(f"num_heads must divide d_model; {num_heads} does not divide {d_model}")
        if positions not in ("learned", "rotary"):
            raise ValueError(f'positions must be "learned" or "rotary", not {positions!r}')
        if positions == "rotary" and d_model // num_heads % 2:
            raise ValueError(
                f"heads must have an even width for rotary positions, not {d_model} / {num_heads}"
            )
        self.positions = positions
        self.rope_theta = check_number("rope_theta", rope_theta)
        generator = init.as_generator(rng)
        self.token_embedding = Embedding(vocab_size, d_model, dtype=dtype, rng=generator)
        self.position_embedding = (
            Embedding(max_seq_len, d_model, dtype=dtype, rng=generator) if positions == "learned" else None
        )
        wide = 4 * d_model if dim_feedforward is None else dim_feedforward
        self.layers = ModuleList(
            TransformerEncoderLayer(
                d_model, num_heads, wide, dropout, activation, layer_norm_eps,
                batch_first=True, norm_first=norm_first, bias=bias, dtype=dtype, rng=generator,
            )
            for _ in range(num_layers)
        )  # fmt: skip
        self.norm = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype) if norm_first else None
        self.head = Linear(d_model, vocab_size, bias=False, dtype=dtype, rng=generator)
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

    def extra_repr(self) -> str:
        """Return the sizes."""
        return (
            f"vocab_size={self.vocab_size}, d_model={self.d_model}, num_layers={self.num_layers}, "
            f"num_heads={self.num_heads}, max_seq_len={self.max_seq_len}, positions={self.positions!r}"
        )

    # ---------------------------------------------------------------------------------------------- the model

    def forward(self, ids: npt.ArrayLike | Sequence[npt.ArrayLike]) -> Any:
        """Compute the logits of the token behind each one.

        Parameters
        ----------
        ids : array_like of int, shape (L,) or (N, L), or a list of N of different lengths

        Returns
        -------
        ndarray, shape (L, vocab_size) or (N, L, vocab_size), or a list of ndarray (L_i, vocab_size)

        Raises
        ------
        TypeError
            ``ids`` are no integers.
        ValueError
            A sequence is empty or longer than ``max_seq_len``, or an id is not in 0 … vocab_size − 1.
        """
        call = _Call(self, ids)
        rows = transformer.forward(call.model, call.ids, call.starts)
        return call.unpacked(multiply(rows, self.head._operand("weight"), None))

    @documented_vjp(
        result="y : ndarray or list of ndarray",
        pullback="""\
``grads = pullback(dy)``, as often as wanted: keyed like :meth:`parameters`, in their shapes and dtypes. ``dy`` is like
    ``y``.""",
    )
    def vjp(self, ids: npt.ArrayLike | Sequence[npt.ArrayLike]) -> tuple[Any, Pullback]:
        """Compute the logits and their pullback, ``dy -> grads``: ids have no gradient. It drops what was dropped."""
        call = _Call(self, ids)
        rows, back = call.vjp()
        logits = linear(rows, call.head)
        y = call.unpacked(logits)
        unchanged = checked_pullback(self, logits, call.parameters, back)

        def pullback(dy: Any) -> Gradients:
            if isinstance(y, list):
                if not hasattr(dy, "__len__") or len(dy) != len(y):
                    raise ValueError(
                        f"dy must have a gradient for each of {len(y)} sequences, in a list, not {dy!r:.80}"
                    )
                each = [as_gradient(own, of) for own, of in zip(dy, y, strict=True)]
                return dict(unchanged(np.concatenate(each) if each else logits))
            return dict(unchanged(as_gradient(dy, y).reshape(logits.shape)))

        return y, pullback

    def loss(
        self,
        ids: npt.ArrayLike | Sequence[npt.ArrayLike],
        targets: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
    ) -> float:
        """Compute the mean cross-entropy of tokens that are to be predicted, in nats.

        Parameters
        ----------
        ids : array_like of int, shape (L,) or (N, L), or a list of N of different lengths
        targets : like ``ids``, optional
            What should follow each token; −100 is not counted. By default each token but the first of a sequence is predicted
            from those before it: a sequence then has 2 tokens or more, and one more than ``max_seq_len`` at most.

        Returns
        -------
        float

        Raises
        ------
        TypeError, ValueError
            As for :meth:`forward`; or ``targets`` do not fit ``ids``.
        """
        call, wanted = self._loss_call(ids, targets)
        rows = transformer.forward(call.model, call.ids, call.starts)
        logits = multiply(rows, self.head._operand("weight"), None)
        return float(CrossEntropyLoss(ignore_index=IGNORED)(logits, wanted))

    def loss_vjp(
        self,
        ids: npt.ArrayLike | Sequence[npt.ArrayLike],
        targets: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
    ) -> tuple[float, Pullback]:
        """Compute the loss and its pullback, ``d_value -> grads``. It drops what was dropped.

        Parameters
        ----------
        ids, targets
            As :meth:`loss` takes them.

        Returns
        -------
        value : float
            What :meth:`loss` returns.
        pullback : callable
            ``grads = pullback(1.0)``, as often as wanted: keyed like :meth:`parameters`, in their shapes and dtypes.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`loss`.
        RuntimeError
            In the pullback: a parameter that it needs has changed.
        """
        call, wanted = self._loss_call(ids, targets)
        rows, back = call.vjp()
        logits = linear(rows, call.head)
        value, loss_back = CrossEntropyLoss(ignore_index=IGNORED).vjp(logits, wanted)
        unchanged = checked_pullback(self, logits, call.parameters, back)

        def pullback(d_value: Any = 1.0) -> Gradients:
            return dict(unchanged(loss_back(d_value)))

        return float(value), pullback

    def _loss_call(self, ids: Any, targets: Any) -> tuple[_Call, Array]:
        given = _sequences("ids", ids)
        if targets is None:
            short = [n for n, own in enumerate(given) if len(own) < 2]
            if short:
                raise ValueError(
                    f"sequence {short[0]} has {len(given[short[0]])} tokens; there must be 2 to predict one"
                )
            wanted = [own[1:] for own in given]
            return _Call(self, [own[:-1] for own in given]), np.concatenate(wanted)
        wanted = _sequences("targets", targets)
        lengths, of_targets = [len(own) for own in given], [len(own) for own in wanted]
        if lengths != of_targets:
            raise ValueError(f"targets must have the lengths of ids, {lengths[:9]}, not {of_targets[:9]}")
        return _Call(self, ids), np.concatenate(wanted)

    # --------------------------------------------------------------------------------------------- generation

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
        """Write on from a prompt, or from several of different lengths at once. Nothing is dropped meanwhile.

        Parameters
        ----------
        prompt : array_like of int, shape (L,) or (N, L), or a list of N of different lengths
        max_new_tokens : int, default 100
            A sequence also ends, with a UserWarning, when the context of ``max_seq_len`` tokens is full.
        temperature : float, default 0.0
            0 takes the likeliest token. Else logits are divided by it, and a token is drawn.
        top_k : int, optional
            Draw from the likeliest k alone.
        top_p : float, optional
            Draw from the likeliest tokens that together have this probability.
        stop : int or collection of int, optional
            A sequence ends behind one of these ids.
        rng : int, sequence of int, Generator or None
            Seeds: of an int s, prompt i has s + i. A prompt's tokens depend on its seed, and on no other prompt.
        stream : bool, default False
            Return an iterator instead, which gives out each token as soon as there is one.

        Returns
        -------
        ndarray of int64, shape (n,), or a list of such
            The new tokens. With ``stream`` an iterator of int; of several prompts, of a list of int in each step, None where
            a sequence has ended.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`forward`; or an option is out of its range; or the logits are not finite.

        References
        ----------
        Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, for ``top_p``; Fan et al., "Hierarchical Neural
        Story Generation", 2018, for ``top_k``.
        """
        prompts = _sequences("prompt", prompt)
        for n, own in enumerate(prompts):
            wrong = own[(own < 0) | (own >= self.vocab_size)]
            if wrong.size:
                raise ValueError(f"ids must be in 0...{self.vocab_size - 1}, prompt {n} has {wrong[0]}")
        steps = generate(
            self._decoder(), prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            stop_ids=_stop_ids(stop), rng=rng, context=self.max_seq_len,
        )  # fmt: skip
        alone = _is_one(prompt)
        if stream:
            return _first(steps) if alone else steps
        whole = list(steps)  # not spread itself: CPython 3.11 loses memory where an iterator raises there
        written = list(zip(*whole, strict=True))
        arrays = [np.array([new for new in own if new is not None], np.int64) for own in written]
        return arrays[0] if alone else arrays

    def _decoder(self) -> Decoder:
        """Return the model without dropout as it generates."""
        model = self._settings()
        layers = tuple(layer._replace(dropout=(0.0, 0.0, 0.0, 0.0)) for layer in model.layers)
        head = self.head._operand("weight")
        if isinstance(head, np.ndarray):
            head = plain(head, widest(head))
        return Decoder(model._replace(layers=layers), head, max_seq_len=self.max_seq_len)

    def _settings(self) -> transformer.Transformer:
        """Describe the model to the core: 16-bit parameters as float32."""
        table = self.token_embedding.weight
        kind = widest(table)
        rotary = None
        if self.positions == "rotary":
            rotary = _rotary(self.max_seq_len, self.d_model // self.num_heads, self.rope_theta, kind)
        positions = None if self.position_embedding is None else plain(self.position_embedding.weight, kind)
        every: Any = self.layers
        layers = (core_settings(parts_of_layer(layer), layer, True, kind) for layer in every)
        return transformer.Transformer(
            tuple(layer if rotary is None else layer._replace(rotary=rotary) for layer in layers),
            table=plain(table, kind),
            positions=positions,
            final_norm=None if self.norm is None else core_norm(self.norm, kind),
        )


class _Call:
    """A call of a model: packed ids, settings, and the way back."""

    def __init__(self, model: GPT, ids: Any) -> None:
        self.owner = model
        given = _sequences("ids", ids)
        for n, own in enumerate(given):
            if not 0 < len(own) <= model.max_seq_len:
                raise ValueError(
                    f"sequence {n} has {len(own)} tokens; there must be 1 to {model.max_seq_len}, max_seq_len"
                )
        self.ids = np.concatenate(given) if given else np.zeros(0, np.int64)
        if self.ids.size and not 0 <= self.ids.min() <= self.ids.max() < model.vocab_size:
            wrong = (self.ids < 0) | (self.ids >= model.vocab_size)
            raise ValueError(f"ids must be in 0...{model.vocab_size - 1}, not {self.ids[wrong][0]}")
        self.lengths = [len(own) for own in given]
        self.starts = np.cumsum([0, *self.lengths], dtype=np.int64)
        self.one = _is_one(ids)
        self.shape = None if isinstance(ids, list | tuple) else np.shape(ids)
        self.model = model._settings()
        self.named = dict(model._all_parameters())
        self.parameters = list({id(array): array for array in self.named.values()}.values())

    def unpacked(self, rows: Array) -> Any:
        """See the logits of packed tokens as those of the given sequences."""
        if self.one:
            return rows
        if self.shape is not None:
            return rows.reshape(*self.shape, rows.shape[1])
        return np.split(rows, self.starts[1:-1])

    def vjp(self) -> tuple[Array, Any]:
        """Compute the rows that enter the head, and the way from the logits' gradient to those of the parameters."""
        owner = self.owner
        for parameter in self.parameters:
            refuse_gradients(parameter)
        rows, core_back = transformer.vjp(self.model, self.ids, self.starts)
        self.head = plain(owner.head.weight, widest(owner.head.weight))

        def back(d_logits: Array) -> Gradients:
            d_rows, d_head, _ = linear_backward(d_logits, rows, self.head)
            dx, grads, _ = core_back(d_rows)
            found = dict(zip(self._names(), grads, strict=True)) | {"head.weight": d_head}
            if owner.position_embedding is not None:
                found["position_embedding.weight"] = self._of_positions(dx)
            return self._gathered(found)

        return rows, back

    def _of_positions(self, dx: Array) -> Array:
        """Sum the gradients of what enters the layers over sequences."""
        weights: Any = self.owner.position_embedding
        d_weight = np.zeros(weights.weight.shape, dx.dtype)
        if len(set(self.lengths)) == 1:
            length = self.lengths[0]
            dx.reshape(-1, length, dx.shape[1]).sum(axis=0, out=d_weight[:length])
            return d_weight
        for begin, length in zip(self.starts[:-1], self.lengths, strict=True):
            d_weight[:length] += dx[begin : begin + length]
        return d_weight

    def _names(self) -> list[str]:
        """Return the names of parameters in the order of the core's gradients."""
        parts: dict[str, list[str]] = {}
        for name in self.named:
            parts.setdefault(".".join(name.split(".")[:3]), []).append(name)
        names = ["token_embedding.weight"]
        for n in range(len(self.model.layers)):
            for part in ("self_attn", "norm1", "linear1", "linear2", "norm2"):
                names += parts[f"layers.{n}.{part}"]
        return names + [name for name in self.named if name.startswith("norm.")]

    def _gathered(self, found: Gradients) -> Gradients:
        """Add up the gradients of shared parameters, and round them, as :meth:`Module.gather_gradients` names them."""
        first: dict[int, str] = {}
        gathered: Gradients = {}
        for name, array in self.named.items():
            owner = first.setdefault(id(array), name)
            gathered[owner] = gathered[owner] + found[name] if owner in gathered else found[name]
        return {name: grad.astype(self.named[name].dtype, copy=False) for name, grad in gathered.items()}


@functools.lru_cache(8)
def _rotary(longest: int, width: int, theta: float, dtype: np.dtype[Any]) -> transformer.Rotary:
    angles = np.outer(np.arange(longest), theta ** (-2 * np.arange(width // 2) / width))
    return transformer.Rotary(np.cos(angles).astype(dtype), np.sin(angles).astype(dtype))


def _stop_ids(stop: Any) -> frozenset[int]:
    """Take one id or many, of any kind of integers."""
    if stop is None:
        return frozenset()
    one = not isinstance(stop, Iterable) or getattr(stop, "ndim", 1) == 0
    return frozenset(check_size("stop", n, 0) for n in ([stop] if one else stop))


def _is_one(ids: Any) -> bool:
    """Tell one sequence from many."""
    if isinstance(ids, list | tuple):
        return not ids or np.ndim(ids[0]) == 0
    return np.ndim(ids) == 1


def _sequences(name: str, ids: Any) -> list[npt.NDArray[np.int64]]:
    """Take one sequence or many as vectors of int64."""
    if isinstance(ids, list | tuple) and not _is_one(ids):
        found = [as_integers(f"{name} of sequence {n}", own) for n, own in enumerate(ids)]
        for n, own in enumerate(found):
            if own.ndim != 1:
                raise ValueError(f"{name} of sequence {n} must have shape (L,), not {own.shape}")
        return found
    array = as_integers(name, ids)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{name} must have shape (L,) or (N, L), or be a list of sequences, not {array.shape}"
        )
    return list(array) if array.ndim == 2 else [array]


def _first(steps: Iterator[list[int | None]]) -> Iterator[int]:
    """Give out the tokens of the only prompt."""
    for (new,) in steps:
        if new is not None:
            yield new
