"""What language models share: ids to logits, hidden states and steps, with the core's decoder. `_language.py` has texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from selfattn._check import Array
from selfattn.engine.decoder import Decoder
from selfattn.engine.sampling import generate
from selfattn.engine.weights import Weight
from selfattn.models._encoder import Encoder, Parameters, states
from selfattn.models._language import LanguageText

if TYPE_CHECKING:
    from selfattn.steps.transformer import TransformerSteps

LEAST = 256  # positions that are made ready
ROWS = 256  # of logits that are computed at once, where they are only summed up


class CausalModel(LanguageText, Encoder):
    """A language model. Subclasses name its parameters and make the core's settings.

    Attributes
    ----------
    vocab_size : int
    max_positions : int
        The context: the longest sequence, prompt and answer together.
    tied : bool
        The head is the table.
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
    interleaved = False  # a head's rotary pairs are neighbours, as in files of llama.cpp

    # --------------------------------------------------------------------------------------------------- the core

    def _head(self, p: Parameters) -> Weight:
        return p.weight(self.word_table if self.tied else "lm_head.weight")

    def _weights(self) -> set[str]:
        parameters = Parameters(self.arrays, None, self.blocks)
        self._settings(parameters, 1)
        self._head(parameters)
        return parameters.weights

    def _decoder(self, length: int) -> Decoder:
        """Return the decoder of sequences of so many tokens, made once for all up to a power of two."""
        ready = self._prepared.get("decoder")
        if ready is None or ready.max_seq_len < length:
            longest = min(max(LEAST, 1 << (length - 1).bit_length()), self.max_positions)
            settings, parameters = self._built(longest)
            ready = Decoder(settings, self._head(parameters), max_seq_len=longest)
            self._prepared["decoder"] = ready
        return ready

    # ------------------------------------------------------------------------------------------------------- calls

    def forward(self, text: str | Sequence[int]) -> Array:
        """Compute logits, as :meth:`logits` does."""
        return self.logits(text)

    def logits(self, text: str | Sequence[int]) -> Array:
        """Compute the logits of the token behind each one.

        Parameters
        ----------
        text : str or sequence of int
            A text, or its ids. The tokenizer may put a special token first; :meth:`tokens` shows it.

        Returns
        -------
        ndarray of float32, shape (L, vocab_size)
            Row i belongs to the token behind token i. Of float64 parameters, float64.

        Raises
        ------
        TypeError, ValueError
            Neither text nor ids; no tokens, or more than ``max_positions``; ids beyond the vocabulary.
        """
        ids = self._ids(text)
        return self._decoder(len(ids)).logits(ids)

    def hidden_states(self, text: str | Sequence[int]) -> list[Array]:
        """Compute what enters the first layer, and what leaves each layer.

        Parameters
        ----------
        text : str or sequence of int

        Returns
        -------
        list of ndarray, shape (L, d)
            The last is behind the final norm: what enters the head.
        """
        ids = self._ids(text)
        return states(self._built(len(ids))[0], ids)

    def steps(self, text: str | Sequence[int]) -> TransformerSteps:
        """Compute what enters the head with every intermediate result, to look at.

        Parameters
        ----------
        text : str or sequence of int

        Returns
        -------
        selfattn.steps.transformer.TransformerSteps
            In NumPy, and so equal to what the model computes up to rounding.
        """
        from selfattn.steps.transformer import transformer_steps  # in NumPy; imported when needed

        ids = self._ids(text)
        return transformer_steps(
            self._built(len(ids))[0], ids, None if self.tokenizer is None else self.tokens(ids.tolist())
        )

    def _generated(
        self,
        prompts: list[Array],
        max_new_tokens: int,
        ends: Callable[[int, int], bool],
        **how: Any,
    ) -> Iterator[list[int | None]]:
        longest = max(map(len, prompts)) + max(max_new_tokens, 0) if isinstance(max_new_tokens, int) else 1
        decoder = self._decoder(min(longest, self.max_positions))
        return generate(
            decoder, prompts, max_new_tokens=max_new_tokens, context=self.max_positions, ends=ends, **how
        )

    def _surprise(self, ids: Array, first: int) -> Array:
        """Return −log p of the tokens from the first on, each behind those before it, float64."""
        decoder = self._decoder(len(ids))
        rows = decoder.hidden([ids])[0][first - 1 : -1]
        found = np.empty(len(rows))
        for begin in range(0, len(rows), ROWS):
            logits = decoder.head(np.ascontiguousarray(rows[begin : begin + ROWS])).astype(np.float64)
            wanted = logits[np.arange(len(logits)), ids[first + begin : first + begin + len(logits)]]
            largest = logits.max(axis=1)
            logits -= largest[:, None]
            found[begin : begin + ROWS] = np.log(np.exp(logits, out=logits).sum(axis=1)) + largest - wanted
        return found
