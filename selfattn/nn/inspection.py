"""What a transformer computes on the way: hidden states, and every intermediate value, also of a changed run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from selfattn._check import Array
from selfattn._docs import copy_doc
from selfattn.engine.transformer import Transformer

if TYPE_CHECKING:
    from selfattn.steps.changes import Change
    from selfattn.steps.transformer import TransformerSteps


class InspectableModel:
    """The base of models whose steps can be seen, and changed. Subclasses have ``_one``."""

    _norm_in_states: ClassVar[bool] = True  # the last hidden state is after the final norm

    def _one(self, text: Any) -> tuple[Transformer, Array, list[str] | None]:
        """Return the core's settings for one text, without dropout, what goes into the core, and the tokens."""
        raise NotImplementedError

    def hidden_states(self, text: Any, change: Change | None = None) -> list[Array]:
        """Compute what enters the first layer, and what leaves each layer.

        Parameters
        ----------
        text : str or sequence of int
            A text, or its ids; a pair of texts for a cross-encoder; pixels (channels, height, width) for a ViT.
        change : selfattn.steps.Change, optional
            What is to be different: a head off, for example.

        Returns
        -------
        list of ndarray, shape (L, d)
            The last is after the final norm, if there is one: what enters the head or is pooled. That of a ViT is
            before it.

        Raises
        ------
        TypeError, ValueError
            The model does not take the text, or the change does not fit them.
        """
        from selfattn.steps.transformer import states  # imports what computes steps in NumPy

        settings, inputs, _ = self._one(text)
        return states(
            settings if self._norm_in_states else settings._replace(final_norm=None), inputs, change
        )

    @copy_doc(hidden_states)
    def steps(self, text: Any, change: Change | None = None) -> TransformerSteps:
        """Compute the last rows, before a head or pooling, with every intermediate result, to look at.

        Returns
        -------
        selfattn.steps.transformer.TransformerSteps
            NumPy computes them, so they equal what the model computes up to rounding. Of a ViT the first token is the
            class's, the others are patches, row by row.
        """
        from selfattn.steps.transformer import transformer_steps  # in NumPy; imported when needed

        return transformer_steps(*self._one(text), change=change)
