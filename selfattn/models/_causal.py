"""Language models: ids and texts to logits, hidden states and steps; generation, chats and perplexity, with the core's decoder.

Text comes out as whole characters: tokens of bytes are held back until they make one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from selfattn import _disk
from selfattn._check import Array, check_size, quoted
from selfattn.engine.decoder import Decoder
from selfattn.engine.sampling import generate
from selfattn.engine.weights import Weight
from selfattn.models import _tokenizer
from selfattn.models._answers import Answer, AnswerInterrupted, collected, stops_of, streamed
from selfattn.models._chat import rendered
from selfattn.models._pretrained import Parameters, Pretrained, states
from selfattn.models._text import one_or_many
from selfattn.text import without_pads

if TYPE_CHECKING:
    from selfattn.steps.transformer import TransformerSteps

LEAST = 256  # positions that are made ready
ROWS = 256  # of logits that are computed at once, where they are only summed up


class CausalModel(Pretrained):
    """A language model. Subclasses name its parameters and make the core's settings.

    Attributes
    ----------
    vocab_size : int
    max_positions : int
        The context: the longest sequence, prompt and answer together.
    tied : bool
        The head is the table.
    tokenizer : tokenizers.Tokenizer or None
    chat_template : str or None
        Jinja2's source of how a chat becomes a text.
    special_tokens : dict of str to str
        What a template may name, such as ``bos_token``.
    stop_ids : frozenset of int
        Tokens that end an answer.
    """

    heads: ClassVar[tuple[str, ...]] = (
        "lm_head.", "score.", "classifier.", "qa_outputs.", "multiple_choice_head.",
    )  # fmt: skip
    word_table: ClassVar[str]
    vocab_size: int
    max_positions: int
    tied: bool
    interleaved = False  # a head's rotary pairs are neighbours, as in files of llama.cpp
    tokenizer: Any = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})
    stop_ids: frozenset[int] = frozenset()
    kept: Mapping[str, bytes] = MappingProxyType({})  # small files of the folder
    _folder: Path | None = None
    # chat_template and stop_ids as those files have them
    _as_read: tuple[str | None, frozenset[int]] = (None, frozenset())

    # --------------------------------------------------------------------------------------------------- the core

    def _head(self, p: Parameters) -> Weight:
        return p.weight(self.word_table if self.tied else "lm_head.weight")

    def _weights(self) -> set[str]:
        return super()._weights() | (set() if self.tied else {"lm_head.weight"})

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

    # -------------------------------------------------------------------------------------------------------- ids

    def _encoded(self, text: str, number: int = 0, special: bool = True, depth: int = 3) -> Array:
        """Return the ids of a text."""
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing(self._folder))
        _tokenizer.check_unicode(text, number, "text")
        with _disk.library_errors(f"the tokenizer cannot take text {number}"):
            encoding = self.tokenizer.encode(text, add_special_tokens=special)
        if encoding.overflowing:  # it is off when a model is loaded
            warnings.warn(
                f"text {number} was cut: the truncation of the model's tokenizer has been switched on; "
                "model.tokenizer.no_truncation() ends that",
                stacklevel=depth,
            )
        return np.array(without_pads(self.tokenizer, encoding, encoding.ids), np.int64)

    def _ids(self, text: Any, number: int = 0, any_length: bool = False) -> Array:
        """Return the ids of a text, or check those that are given; of any length, or as many as the model takes at once."""
        if not isinstance(text, str):
            longest = None if any_length else self.max_positions
            return np.array(_tokenizer.checked_ids(text, number, self.vocab_size, longest, "text"), np.int64)
        ids = self._encoded(text, number, depth=4)
        if any_length:
            return ids
        if not ids.size:
            raise ValueError(f"text {number}, {quoted(text)}, has no tokens")
        if ids.size > self.max_positions:
            raise ValueError(
                f"text {number} has {ids.size} tokens; this model takes {self.max_positions} at most"
            )
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
            raise ValueError(_tokenizer.missing(self._folder))
        return [str(self.tokenizer.id_to_token(n)) for n in ids.tolist()]

    # ------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 100,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] | None = None,
        rng: Any = None,
        stream: bool = False,
    ) -> Any:
        """Go on from a prompt, or from each of many at once.

        Parameters
        ----------
        prompt : str, sequence of int, or list of such
            Texts or ids, of any lengths.
        max_new_tokens : int, default 100
        temperature : float, default 0.0
            0 takes the likeliest token each time. Else logits are divided by it, and a token is drawn.
        top_k : int, optional
            Draw from the likeliest k tokens alone.
        top_p : float, optional
            Draw from the likeliest tokens that together have this probability.
        repetition_penalty : float, default 1.0
            Above 1, tokens that are there already become less likely, those of the prompt too.
        stop : str or sequence of str, optional
            An answer ends before the first of these. A special token's text ends it too.
        rng : int, sequence of int, or Generator, optional
            The seed. Prompt i of several has rng + i, or its own of a sequence.
        stream : bool, default False

        Returns
        -------
        str, or list of str
            What is new, without special tokens. The model's own end of text ends it. For a prompt of ids an ndarray of ids,
            the one that ended it included. The tokens of a prompt do not depend on those beside it.
        iterator
            If ``stream``: of pieces of that text, never a part of a character; of ids for a prompt of ids. For a list of prompts,
            of lists of pieces, which may be empty: a str, or a list of ids.

        Raises
        ------
        TypeError, ValueError
            A prompt is empty or beyond the context, an argument is out of its range, or the model's logits are NaN.

        Warns
        -----
        UserWarning
            The context was full, or Ctrl-C was pressed: the answer ends there, between two tokens.

        References
        ----------
        Temperature, top_k, top_p and the penalty are those of Transformers' ``generate``, in that order behind the penalty.

        Examples
        --------
        ::

            model = models.load("SmolLM2-135M-Instruct.Q4_1.gguf")
            print(model.generate("The capital of France is", 5))
            for piece in model.generate("Once upon a time", temperature=0.8, rng=0, stream=True):
                print(piece, end="", flush=True)
        """
        alone, given, _ = one_or_many(prompt)
        prompts = list(given)
        if not prompts:
            raise ValueError("there are no prompts")
        ids = [self._ids(each, n) for n, each in enumerate(prompts)]
        texts = [isinstance(each, str) for each in prompts]
        pieces = self._answers(
            ids, texts, max_new_tokens, stop, temperature=temperature, top_k=top_k, top_p=top_p,
            repetition_penalty=repetition_penalty, rng=rng,
        )  # fmt: skip
        return streamed(pieces, alone, texts) if stream else collected(pieces, alone, texts)

    def chat(self, messages: Any, max_new_tokens: int = 512, *, stream: bool = False, **how: Any) -> Any:
        """Answer the last message of a chat.

        Parameters
        ----------
        messages : str, or list of dict
            ``{"role": "user", "content": "…"}`` and so on, as the model's template takes them; a str is one message of the user.
        max_new_tokens : int, default 512
        stream : bool, default False
        **how
            ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ``stop`` and ``rng``, as for :meth:`generate`.

        Returns
        -------
        str, or iterator of str
            The answer. To go on, append it as ``{"role": "assistant", "content": answer}`` and the next message.

        Raises
        ------
        TypeError, ValueError
            The messages are none, the model has no chat template, or the template refuses them or takes too long; or as for
            :meth:`generate`.
        ImportError
            Jinja2 is not installed: ``pip install 'selfattn[models]'``.

        Notes
        -----
        The template comes with the model, and so is not trusted: it runs in Jinja2's sandbox, and may take so many steps only.

        Examples
        --------
        ::

            model.chat("What is the capital of France? Answer in one sentence.")
        """
        ids = self._encoded(self.chat_prompt(messages), special=False)
        if ids.size > self.max_positions:
            raise ValueError(
                f"the chat has {ids.size} tokens; this model takes {self.max_positions} at most, the answer included"
            )
        stop = how.pop("stop", None)
        unknown = set(how) - {"temperature", "top_k", "top_p", "repetition_penalty", "rng"}
        if unknown:
            raise TypeError(f"chat() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        pieces = self._answers([ids], [True], max_new_tokens, stop, **how)
        return streamed(pieces, True, [True]) if stream else collected(pieces, True, [True])

    def chat_prompt(self, messages: Any) -> str:
        """Return the text that :meth:`chat` goes on from.

        Parameters
        ----------
        messages : str, or list of dict

        Returns
        -------
        str
            What the model's template makes of them, with the beginning of an answer.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template; generate() goes on from any text, such as one in the form that the model was "
                "trained with"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return rendered(self.chat_template, messages, self.special_tokens)

    def _answers(
        self, ids: list[Array], texts: list[bool], max_new_tokens: int, stop: Any, **how: Any
    ) -> Iterator[list[Any]]:
        """Return an iterator of what is new at each step: a str or a list of ids for each prompt. Checks at the call."""
        stops = stops_of(stop)
        stop_ids = self.stop_ids | self._special_ids(stops)
        if stops and self.tokenizer is None:
            raise ValueError(f"stop needs text: {_tokenizer.missing(self._folder)}")
        answers = [Answer(self._decoded if text or stops else None, stops) for text in texts]

        def ends(i: int, new: int) -> bool:
            return answers[i].add(new, new in stop_ids)

        steps = self._generated(ids, max_new_tokens, ends, **how)

        def taken() -> list[Any]:
            return [
                answer.text() if text else answer.new_ids()
                for answer, text in zip(answers, texts, strict=True)
            ]

        def pieces() -> Iterator[list[Any]]:
            count = 0
            try:
                for count, _ in enumerate(steps, 1):  # noqa: B007
                    yield taken()
            except KeyboardInterrupt:
                told = AnswerInterrupted(f"interrupted after {count} new tokens; the answer ends there")
                warnings.warn(told, stacklevel=3)
            for answer in answers:
                answer.finish()
            yield taken()

        return pieces()

    def _decoded(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _special_ids(self, stops: Sequence[str]) -> set[int]:
        """Return the ids of special tokens among texts: they are left out of what is decoded, and so never found there."""
        if not stops or self.tokenizer is None:
            return set()
        added = self.tokenizer.get_added_tokens_decoder()
        return {n for n, token in added.items() if token.special and token.content in stops}

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
            How many tokens of a longer text each further window adds, by default half a window: each token is predicted once,
            from at least ``window - stride`` tokens before it.

        Returns
        -------
        float
            Its logarithm is the mean negative log-likelihood of a token, in nats. Infinite where a token has probability 0.

        Raises
        ------
        ValueError
            The text has fewer than two tokens, or window or stride do not fit.

        Examples
        --------
        ::

            math.log(model.perplexity(text))
        """
        return float(self.evaluate(text, window=window, stride=stride)["perplexity"])

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
        text, window, stride
            As for :meth:`perplexity`.
        most_tokens : int, optional
            Only the first so many.

        Returns
        -------
        dict
            ``perplexity``; ``mean_nll``, the mean negative log-likelihood of a token in nats; ``tokens``, how many were predicted.

        Raises
        ------
        ValueError
            As for :meth:`perplexity`.
        """
        ids = self._ids(text, any_length=True)
        if most_tokens is not None:
            ids = ids[: check_size("most_tokens", most_tokens, 2)]
        if ids.size < 2:
            raise ValueError(f"perplexity needs at least two tokens; the text has {ids.size}")
        most = self.max_positions if window is None else check_size("window", window, 2)
        if most > self.max_positions:
            raise ValueError(
                f"window must be at most the context of {self.max_positions} tokens, not {window}"
            )
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
