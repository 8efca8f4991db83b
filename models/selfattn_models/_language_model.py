"""Language models that are given a text: logits and their gradients, ids and tokens, perplexity.

What they write themselves, answers and chats, is in `_causal.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import numpy as np

from selfattn.engine import Array, check_size, copy_doc, disk, one_of, quoted, transformer, warn
from selfattn.engine.decoder import Decoder, head_vjp
from selfattn.engine.weights import BITS, QUANTS, Weight, no_gradients
from selfattn.functional import log_softmax
from selfattn.nn.module import Pullback, checked_pullback
from selfattn.text import spelled, without_pads
from selfattn_models import _tokenizer
from selfattn_models._pretrained import Parameters, Pretrained, add

LEAST = 256  # positions that are made ready
# The digits of 8 bits to which rows of prompts are rounded, where weights are quants.
PRECISIONS = {"float32": 0, "int16": 2, "int8": 1}
ROWS = 256  # the most rows of logits at once, where they are only summed up
CACHES = {"float16": np.dtype(np.float16), "bfloat16": BITS}  # of 16 bits, as the core takes them


class LanguageModel(Pretrained):
    """A language model. Subclasses name its parameters and make the core's settings.

    Attributes
    ----------
    vocab_size : int
    max_positions : int
        The context: the longest sequence, prompt and answer together.
    tied : bool
        The head is the table.
    tokenizer : tokenizers.Tokenizer or None
    precision : {"float32", "int16", "int8"}
        The numbers to which rows of prompts are rounded where they multiply quants; see :func:`selfattn_models.load`.
    generation_config : dict
        The folder's settings of generation, by Transformers' names: the defaults of calls that generate.
    """

    heads: ClassVar[tuple[str, ...]] = (
        "lm_head.",
        "score.",
        "classifier.",
        "qa_outputs.",
        "multiple_choice_head.",
    )
    word_table: ClassVar[str]
    vocab_size: int
    max_positions: int
    tied: bool
    tokenizer: Any = None
    precision: str = "float32"
    generation_config: Mapping[str, Any] = MappingProxyType({})
    _warned = False  # True after the warning that the folder's settings would draw
    _folder: Path | None = None
    _cache_dtype: str | None = None

    # --------------------------------------------------------------------------------------------------- the core

    def set_precision(self, precision: str) -> None:
        """Set the numbers to which rows of prompts are rounded; :func:`selfattn_models.load` says more.

        Raises
        ------
        ValueError
            The name is another one, or the model has no quants.
        """
        one_of("precision", precision, PRECISIONS)
        if precision != "float32" and not any(QUANTS[weight.kind][0] > 1 for weight in self.quants.values()):
            raise ValueError(
                f"precision={precision!r} is for weights in quants; the weights of this model are {self.dtype}"
            )
        self.precision = precision
        self._prepared.pop("decoder", None)

    def _head(self, p: Parameters) -> Weight:
        name = self.word_table if self.tied else "lm_head.weight"
        return p.weight(name, self.vocab_size, self.hidden_size)

    def _decoder(self, length: int) -> Decoder:
        """Return a decoder of sequences of this length, made once for all lengths up to a power of two."""
        ready = self._prepared.get("decoder")
        if ready is None or ready.max_seq_len < length:
            longest = min(max(LEAST, 1 << (length - 1).bit_length()), self.max_positions)
            settings, parameters = self._built(longest)
            precision = PRECISIONS[self.precision]
            ready = Decoder(settings, self._head(parameters), max_seq_len=longest, prompt_precision=precision)
            self._prepared["decoder"] = ready
        ready.cache_dtype = CACHES.get(self.cache_dtype, ready.dtype)
        return ready

    @property
    def cache_dtype(self) -> str:
        """How keys and values are kept while tokens are generated: "float32", or rounded to "float16" or "bfloat16".

        16 bits halve the memory and the time in which a token reads its past. All else is computed as before. Float16
        has three more bits than bfloat16, and ends at 65504: keys and values beyond it become infinite. A model of
        float64 keeps float64.
        """
        return self._cache_dtype or ("float64" if self.dtype == "float64" else "float32")

    @cache_dtype.setter
    def cache_dtype(self, name: str) -> None:
        names = ["float64"] if self.dtype == "float64" else ["float32", *CACHES]
        if name not in names:
            raise ValueError(f"cache_dtype must be {' or '.join(names)}, not {quoted(name)}")
        self._cache_dtype = name

    # ------------------------------------------------------------------------------------------------------- calls

    def forward(self, text: str | Sequence[int]) -> Array:
        """Compute logits, as :meth:`logits` does."""
        return self.logits(text)

    def logits(self, text: str | Sequence[int]) -> Array:
        """Compute the logits of the token after each token.

        Parameters
        ----------
        text : str or sequence of int
            A text, or its ids. The tokenizer may put a special token first; :meth:`tokens` shows it.

        Returns
        -------
        ndarray of float32, shape (L, vocab_size)
            Row i is for the token after token i. Of float64 parameters, float64.

        Raises
        ------
        TypeError, ValueError
            Neither text nor ids; no tokens, or more than ``max_positions``; ids beyond the vocabulary.
        """
        ids = self._ids(text)
        return self._decoder(len(ids)).logits(ids)

    def vjp(self, text: str | Sequence[int] | Array) -> tuple[Array, Pullback]:
        """Compute logits, and their pullback.

        The pullback takes the gradient of logits to those of the parameters or, for rows, of the rows too.

        Parameters
        ----------
        text : str, sequence of int, or ndarray of the model's float dtype, shape (L, d)
            A text, its ids, or rows in place of what enters the first layer, ``hidden_states(text)[0]``.

        Returns
        -------
        logits : ndarray, shape (L, vocab_size)
            As of :meth:`logits`; of bfloat16 weights, without rounding what they multiply.
        pullback : callable
            ``dy -> grads``, by the names of :meth:`parameters`; of bfloat16 weights, float32. For rows, ``dy -> (dx,
            grads)``. Weights of int8 and of a GGUF file have no gradients: for rows ``grads`` is then empty, and
            their layers are expanded one at a time.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`logits`; rows of another dtype or shape; a text or ids, where weights have no gradients.

        Examples
        --------
        Which tokens of a text speak for the likeliest next one (gradient × input):

        >>> import numpy as np
        >>> import selfattn_models as models
        >>> config = {"vocab_size": 50, "n_embd": 8, "n_head": 2, "n_layer": 1}
        >>> model = models.GPT2LMHeadModel(config, rng=0)
        >>> rows = model.hidden_states([3, 1, 4])[0]
        >>> logits, pullback = model.vjp(rows)
        >>> dy = np.zeros_like(logits)
        >>> dy[-1, logits[-1].argmax()] = 1
        >>> dx, grads = pullback(dy)
        >>> (dx * rows).sum(axis=1).shape
        (3,)
        """
        given = isinstance(text, np.ndarray) and text.dtype.kind == "f"
        inputs = self._checked_rows(cast(Array, text)) if given else self._ids(text)
        settings, parameters = self._built(len(inputs))
        if given:
            settings = transformer.without_table(settings)
        trains = self.dtype in ("float32", "float64", "bfloat16")
        if not trains and not given:
            raise no_gradients(self.dtype)
        rounded = transformer.arrays(settings)  # the origins of gradients
        inner = transformer.expanded(settings) if trains else settings
        ends = np.array([0, len(inputs)])
        rows, back = transformer.vjp(inner, inputs, ends, wants_parameters=trains)
        head = self._head(parameters)
        logits, head_back = head_vjp(np.asarray(head) if trains else head, rows)

        def backward(dy: Array) -> Any:
            d_rows, d_head = head_back(dy)
            dx, grads, _ = back(d_rows)
            own = [(head, d_head), *zip(rounded, grads, strict=True)] if trains else []
            found = parameters.gradients(*zip(*own, strict=True)) if own else {}
            if settings.positions is not None:
                d_positions = np.zeros_like(settings.positions)
                d_positions[: len(dx)] = dx
                add(found, parameters.origins[id(settings.positions)][1], d_positions)
            return (dx, self._named(found)) if given else self._named(found)

        return logits, checked_pullback(self, logits, self.arrays.values(), backward)

    def _checked_rows(self, rows: Array) -> Array:
        """Check rows (L, d) that were given in place of a text."""
        wanted = np.dtype("float64" if self.dtype == "float64" else "float32")
        if rows.dtype != wanted:
            raise TypeError(f"rows must be {wanted}, as the model computes, not {rows.dtype}")
        if rows.ndim != 2 or rows.shape[1] != self.hidden_size or not 0 < len(rows) <= self.max_positions:
            most = f"(L, {self.hidden_size}) with L in 1...{self.max_positions}"
            raise ValueError(f"rows must have shape {most}, not {rows.shape}")
        return np.ascontiguousarray(rows)

    def _one(self, text: str | Sequence[int]) -> tuple[transformer.Transformer, Array, list[str] | None]:
        ids = self._ids(text)
        return self._built(len(ids))[0], ids, None if self.tokenizer is None else spelled(self.tokenizer, ids)

    # -------------------------------------------------------------------------------------------------------- ids

    def _encoded(self, text: str, number: int = 0, special: bool = True) -> Array:
        """Return the ids of a text."""
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing_message(self._folder))
        _tokenizer.check_unicode(text, number, "text")
        with disk.library_errors(f"the tokenizer cannot take text {number}"):
            encoding = self.tokenizer.encode(text, add_special_tokens=special)
        if encoding.overflowing:
            on = f"text {number} was cut: the truncation of the model's tokenizer has been switched on"
            warn(f"{on}; model.tokenizer.no_truncation() switches it off")
        return np.array(without_pads(self.tokenizer, encoding, encoding.ids), np.int64)

    def _ids(self, text: Any, number: int = 0, any_length: bool = False) -> Array:
        """Return the ids of a text, or check those that are given.

        They are of any length, or at most as many as the model takes.
        """
        if not isinstance(text, str):
            longest = None if any_length else self.max_positions
            return np.array(_tokenizer.checked_ids(text, number, self.vocab_size, longest, "text"), np.int64)
        ids = self._encoded(text, number)
        if any_length:
            return ids
        if not ids.size:
            raise ValueError(f"text {number}, {quoted(text)}, has no tokens")
        if ids.size > self.max_positions:
            most = self.max_positions
            raise ValueError(f"text {number} has {ids.size} tokens; this model takes {most} at most")
        return ids

    def tokens(self, text: str | Sequence[int]) -> list[str]:
        """Return the pieces of a text, as strings, special ones included.

        Parameters
        ----------
        text : str or sequence of int

        Returns
        -------
        list of str
            As the tokenizer writes them: a byte-level one has Ġ for a space.
        """
        ids = self._ids(text, any_length=True)
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing_message(self._folder))
        return [str(self.tokenizer.id_to_token(n)) for n in ids.tolist()]

    # -------------------------------------------------------------------------------------------------- evaluation

    def perplexity(
        self, text: str | Sequence[int], *, window: int | None = None, stride: int | None = None
    ) -> float:
        """Compute the perplexity of a text: e to the mean of −log p over its tokens but the first.

        Parameters
        ----------
        text : str or sequence of int
            Of any length from two tokens on.
        window : int, optional
            How many tokens the model sees at once, by default its context.
        stride : int, optional
            How many tokens of a longer text each further window adds, by default half a window. Each token is
            predicted once, from at least ``window - stride`` tokens before it.

        Returns
        -------
        float
            Its logarithm is the mean negative log-likelihood of a token, in nats. Infinite where a token has
            probability 0.

        Raises
        ------
        ValueError
            The text has fewer than two tokens, or window or stride do not fit.
        """
        return float(self.evaluate(text, window=window, stride=stride)["perplexity"])

    @copy_doc(perplexity)
    def evaluate(
        self,
        text: str | Sequence[int],
        *,
        window: int | None = None,
        stride: int | None = None,
        most_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Compute how well the model predicts a text.

        Parameters
        ----------
        most_tokens : int, optional
            Use only this many, the first ones.

        Returns
        -------
        dict
            ``perplexity``; ``mean_nll``, the mean negative log-likelihood of a token in nats; ``tokens``, how many
            were predicted.
        """
        ids = self._ids(text, any_length=True)
        if most_tokens is not None:
            ids = ids[: check_size("most_tokens", most_tokens, 2)]
        if ids.size < 2:
            raise ValueError(f"perplexity needs at least two tokens; the text has {ids.size}")
        context = self.max_positions
        most = context if window is None else check_size("window", window, 2)
        if most > context:
            raise ValueError(f"window must be at most the context of {context} tokens, not {window}")
        step = max(1, most // 2) if stride is None else check_size("stride", stride)
        if step >= most:
            raise ValueError(f"stride must be below the window of {most}, not {stride}")
        total, done = 0.0, 1  # the first token is not predicted
        while done < ids.size:
            end = min(ids.size, most if done == 1 else done + step)
            begin = max(0, end - most)
            total += float(self._surprise(ids[begin:end], done - begin).sum())
            done = end
        mean = total / (ids.size - 1)
        perplexity = math.inf if mean > 709 else math.exp(mean)  # beyond float64
        return {"perplexity": perplexity, "mean_nll": mean, "tokens": int(ids.size - 1)}

    def _surprise(self, ids: Array, first: int) -> Array:
        """Return −log p of each token from a first one on, given the tokens before it, float64."""
        decoder = self._decoder(len(ids))
        rows = decoder.hidden([ids])[0][first - 1 : -1]
        found = np.empty(len(rows))
        for begin in range(0, len(rows), ROWS):
            logits = decoder.head(np.ascontiguousarray(rows[begin : begin + ROWS])).astype(np.float64)
            places = np.arange(len(logits))
            found[begin : begin + ROWS] = -log_softmax(logits)[places, ids[first + begin + places]]
        return found
