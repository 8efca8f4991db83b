"""Losses of embeddings, with sentence-transformers' arithmetic: columns of texts' embeddings in, one number out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_input, check_number, check_size, layer_dtype, one_of
from selfattn._docs import copy_doc
from selfattn.functional._products import widened, widest
from selfattn.nn.losses import CrossEntropyLoss, MSELoss
from selfattn.nn.module import Module

Columns: TypeAlias = Sequence[npt.ArrayLike]
Slopes: TypeAlias = Callable[[float], list[Array]]  # from the gradient of the loss to those of the columns
DISTANCES = ("euclidean", "cosine", "manhattan")
SMALLEST = 1e-12  # what a length is at least when an embedding is divided by it, as in PyTorch


class EmbeddingLoss(Module):
    """The base of the losses of embeddings. A subclass computes the loss of columns of one width and dtype.

    :func:`selfattn.training.fit` makes the columns of texts: one for the first text of each example, one for the
    second, and so on.
    """

    _in_repr: ClassVar[tuple[str, ...]] = ("mini_batch_size",)
    labelled: ClassVar[bool] = False  # an example ends with a number
    in_batch: ClassVar[bool] = False  # texts of other examples count as wrong answers
    most: ClassVar[int | None] = 2  # columns; None: any number of at least 2

    def __init__(self, mini_batch_size: int | None, dtype: npt.DTypeLike) -> None:
        self.mini_batch_size = (
            None if mini_batch_size is None else check_size("mini_batch_size", mini_batch_size)
        )
        self.dtype = layer_dtype(dtype)

    def _compute(self, columns: list[Array], labels: Array | None) -> tuple[Any, Slopes]:
        raise NotImplementedError

    @np.errstate(all="ignore")  # the result shows infinities and NaN
    def forward(self, embeddings: Columns, labels: npt.ArrayLike | None = None) -> Any:
        """Compute the loss.

        Parameters
        ----------
        embeddings : sequence of array_like, each of shape (n, d)
            The columns that the class describes.
        labels : array_like, shape (n,), optional
            Only for a loss of scored pairs.

        Returns
        -------
        floating
            In the widest dtype of the columns, at least float32.

        Raises
        ------
        TypeError, ValueError
            The number of columns or a shape does not fit, or labels are missing or not expected.
        """
        return self._compute(*self._checked(embeddings, labels))[0]

    @np.errstate(all="ignore")
    @copy_doc(forward)
    def vjp(self, embeddings: Columns, labels: npt.ArrayLike | None = None) -> tuple[Any, Slopes]:
        """Compute the loss and its pullback, ``d_value -> list of gradients``, one for each column."""
        columns, wanted = self._checked(embeddings, labels)
        value, slopes = self._compute(columns, wanted)
        return value, lambda d_value: slopes(check_number("d_value", d_value))

    def _checked(self, embeddings: Columns, labels: Any) -> tuple[list[Array], Array | None]:
        name = type(self).__name__
        columns = [widened(as_input(each, self.dtype, f"column {n}")) for n, each in enumerate(embeddings)]
        shapes = [column.shape for column in columns]
        most = self.most or max(len(columns), 2)
        if len(columns) != most:
            least = "at least 2" if self.most is None else most
            raise ValueError(f"{name} takes {least} columns of embeddings, not {len(columns)}")
        if len(set(shapes)) > 1 or len(shapes[0]) != 2 or not shapes[0][0]:
            found = ", ".join(map(str, shapes))
            raise ValueError(f"columns must have one shape, (n, d) with n of at least 1, not {found}")
        if self.labelled != (labels is not None):
            takes = "needs labels, a number for each pair" if self.labelled else "takes no labels"
            raise ValueError(f"{name} {takes}")
        kind = widest(*columns)
        columns = [column.astype(kind, copy=False) for column in columns]
        if labels is None:
            return columns, None
        wanted = as_input(labels, self.dtype, "labels").astype(kind)
        if wanted.shape != shapes[0][:1]:
            raise ValueError(f"labels must have shape {shapes[0][:1]}, one for each pair, not {wanted.shape}")
        return columns, wanted


class MultipleNegativesRankingLoss(EmbeddingLoss):
    """−log softmax of an anchor's similarities to all candidates of a batch, at its own.

    Texts of other examples are wrong answers.

    An example is an anchor, its right answer, and any number of wrong ones: ``embeddings`` are two or more columns,
    (n, d) each. Each anchor has n times the number of other columns as candidates. A text that is twice in a batch is
    also a wrong answer to itself: :func:`~selfattn.training.fit` warns of it.

    Parameters
    ----------
    scale : float, default 20.0
        A factor of similarities.
    similarity_fct : {"cosine", "dot"}, default "cosine"
    mini_batch_size : int, optional
        :func:`~selfattn.training.fit` computes this number of texts at a time, twice: all embeddings, then the gradient
        of each piece. The gradient is that of the whole batch, in the memory of a piece; sentence-transformers has it
        as CachedMultipleNegativesRankingLoss.
    dtype : dtype of lists and integers, default float32

    References
    ----------
    Henderson et al., "Efficient Natural Language Response Suggestion for Smart Reply", 2017, section 4.4; Gao et al.,
    "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, for pieces.

    Examples
    --------
    >>> from selfattn import nn
    >>> loss = nn.MultipleNegativesRankingLoss(scale=1.0)
    >>> value, pullback = loss.vjp([[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 3.0]]])
    >>> round(float(value), 4)
    0.3133
    >>> pullback(1.0)[0].round(4)
    array([[0.    , 0.1345],
           [0.1345, 0.    ]], dtype=float32)
    """

    _in_repr = ("scale", "similarity_fct", "mini_batch_size")
    in_batch = True
    most = None

    def __init__(
        self,
        scale: float = 20.0,
        similarity_fct: Literal["cosine", "dot"] = "cosine",
        *,
        mini_batch_size: int | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__(mini_batch_size, dtype)
        self.scale = check_number("scale", scale)
        if self.scale <= 0:
            raise ValueError(f"scale must be above 0, not {scale}")
        self.similarity_fct = one_of("similarity_fct", similarity_fct, ("cosine", "dot"))

    def _compute(self, columns: list[Array], labels: Array | None) -> tuple[Any, Slopes]:
        n = len(columns[0])
        anchors, of_anchors = self._rows(columns[0])
        candidates, of_candidates = self._rows(np.concatenate(columns[1:]))
        scale = anchors.dtype.type(self.scale)
        value, pullback = CrossEntropyLoss().vjp(anchors @ candidates.T * scale, np.arange(n))

        def slopes(d: float) -> list[Array]:
            d_scores = pullback(d) * scale
            d_candidates = of_candidates(d_scores.T @ anchors)
            return [of_anchors(d_scores @ candidates), *np.split(d_candidates, len(columns) - 1)]

        return value, slopes

    def _rows(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        return unit(x) if self.similarity_fct == "cosine" else (x, lambda d: d)


class CosineSimilarityLoss(EmbeddingLoss):
    """(cosine − label)², the mean over pairs.

    ``embeddings`` are two columns (n, d), ``labels`` their scores (n,), such as 0 to 1.

    Parameters
    ----------
    mini_batch_size : int, optional
        As for :class:`MultipleNegativesRankingLoss`.
    dtype : dtype of lists and integers, default float32

    Examples
    --------
    >>> from selfattn import nn
    >>> value, pullback = nn.CosineSimilarityLoss().vjp([[[1.0, 0.0]], [[0.0, 2.0]]], [1.0])
    >>> float(value), pullback(1.0)[1]
    (1.0, array([[-1., -0.]], dtype=float32))
    """

    labelled = True

    def __init__(self, *, mini_batch_size: int | None = None, dtype: npt.DTypeLike = np.float32) -> None:
        super().__init__(mini_batch_size, dtype)

    def _compute(self, columns: list[Array], labels: Array | None) -> tuple[Any, Slopes]:
        assert labels is not None
        (a, of_a), (b, of_b) = map(unit, columns)
        value, pullback = MSELoss().vjp((a * b).sum(axis=1), labels)

        def slopes(d: float) -> list[Array]:
            d_cosines = pullback(d)[:, None]
            return [of_a(d_cosines * b), of_b(d_cosines * a)]

        return value, slopes


class TripletLoss(EmbeddingLoss):
    """max(distance to the similar − distance to the other + margin, 0), the mean over triplets.

    ``embeddings`` are three columns (n, d): anchors, similar and other texts.

    Parameters
    ----------
    distance_metric : {"euclidean", "cosine", "manhattan"}, default "euclidean"
        Cosine is 1 − cosine.
    triplet_margin : float, default 5.0
        By how much the other text should be further away. Of embeddings of length 1 no distance is above 2, by which
        5 is never reached.
    mini_batch_size : int, optional
        As for :class:`MultipleNegativesRankingLoss`.
    dtype : dtype of lists and integers, default float32

    Notes
    -----
    The gradient of the distance 0 is 0. PyTorch's is NaN for the Euclidean distance.

    Examples
    --------
    >>> from selfattn import nn
    >>> value, pullback = nn.TripletLoss().vjp([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 2.0]]])
    >>> float(value), pullback(1.0)[2]
    (8.0, array([[ 0., -1.]], dtype=float32))
    """

    _in_repr = ("distance_metric", "triplet_margin", "mini_batch_size")
    most = 3

    def __init__(
        self,
        distance_metric: Literal["euclidean", "cosine", "manhattan"] = "euclidean",
        triplet_margin: float = 5.0,
        *,
        mini_batch_size: int | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__(mini_batch_size, dtype)
        self.distance_metric = one_of("distance_metric", distance_metric, DISTANCES)
        self.triplet_margin = check_number("triplet_margin", triplet_margin)

    def _compute(self, columns: list[Array], labels: Array | None) -> tuple[Any, Slopes]:
        rows, of_rows = zip(*map(self._rows, columns), strict=True)
        near, of_near = self._distances(rows[0], rows[1])
        far, of_far = self._distances(rows[0], rows[2])
        losses = np.maximum(near - far + near.dtype.type(self.triplet_margin), 0)
        value = near.dtype.type(losses.mean(dtype=np.float64))

        def slopes(d: float) -> list[Array]:
            each = np.where(losses > 0, near.dtype.type(d / len(losses)), near.dtype.type(0))[:, None]
            (d_anchor, d_near), (more, d_far) = of_near(each), of_far(-each)
            return [own(x) for own, x in zip(of_rows, (d_anchor + more, d_near, d_far), strict=True)]

        return value, slopes

    def _rows(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        return unit(x) if self.distance_metric == "cosine" else (x, lambda d: d)

    def _distances(self, a: Array, b: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
        """Return the distances (n,) of rows, and from their gradients (n, 1) those of the rows."""
        if self.distance_metric == "cosine":
            return 1 - (a * b).sum(axis=1), lambda d: (-d * b, -d * a)
        gap = a - b
        if self.distance_metric == "manhattan":
            distances, direction = np.abs(gap).sum(axis=1), np.sign(gap)
        else:
            distances = np.sqrt(np.square(gap).sum(axis=1))
            direction = gap / np.where(distances > 0, distances, 1)[:, None]
        return distances, lambda d: (d * direction, -d * direction)


def unit(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Return the rows x / |x|, and from their gradients those of x; a row of zeros stays."""
    lengths = np.sqrt(np.square(x, dtype=np.float64).sum(axis=1, keepdims=True))
    lengths = np.maximum(lengths, SMALLEST).astype(x.dtype)
    rows = x / lengths
    return rows, lambda d: (d - rows * (d * rows).sum(axis=1, keepdims=True)) / lengths
