"""The embedding table: a row for each id."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, check_size, layer_dtype
from selfattn.engine.transformer import check_ids
from selfattn.functional._products import as_rows, widened
from selfattn.nn import init
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback


class Embedding(Module):
    """Look up a row of a table for each id.

    Parameters
    ----------
    num_embeddings : int
        The number of ids: 0 … num_embeddings − 1.
    embedding_dim : int
    padding_idx : int, optional
        An id whose row is initially 0 and gets no gradient; a negative one counts from the end.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the table.

    Attributes
    ----------
    weight : ndarray, shape (num_embeddings, embedding_dim)
        Drawn from N(0, 1).

    Notes
    -----
    ``y, pullback = layer.vjp(ids)`` and ``grads = pullback(dy)``: ids have no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> table = nn.Embedding(4, 2, rng=0)
    >>> table.weight = [[0, 0], [-1.072, -0.5001], [-0.002, -0.4311], [-0.002, -0.4311]]
    >>> table([[1, 2, 3]])
    array([[[-1.072 , -0.5001],
            [-0.002 , -0.4311],
            [-0.002 , -0.4311]]], dtype=float32)
    """

    weight: Array

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        self.num_embeddings = num_embeddings = check_size("num_embeddings", num_embeddings)
        self.embedding_dim = embedding_dim = check_size("embedding_dim", embedding_dim)
        if padding_idx is not None:
            padding_idx = check_size("padding_idx", padding_idx, -num_embeddings)
            if padding_idx >= num_embeddings:
                raise ValueError(f"padding_idx must be below {num_embeddings}, not {padding_idx}")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        weight = np.empty((num_embeddings, embedding_dim), layer_dtype(dtype))
        self.register_parameter("weight", init.normal_(weight, rng=rng))
        if padding_idx is not None:
            self.weight[padding_idx] = 0

    def extra_repr(self) -> str:
        """Return the sizes."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}{padding}"

    def check_ids(self, ids: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return ids as an array, after a check that they are integers within the table.

        Parameters
        ----------
        ids : array_like of int

        Returns
        -------
        ndarray of intp, in the shape of ``ids``
            The array itself if it is of that dtype.

        Raises
        ------
        TypeError
            They are not integers, or a masked array.
        ValueError
            One is negative or beyond the table.
        """
        if isinstance(ids, np.ma.MaskedArray):
            raise TypeError("ids is a MaskedArray; pass a plain array")
        array: npt.NDArray[Any] = np.asarray(ids)
        if array.size == 0 and not isinstance(ids, np.ndarray):
            array = array.astype(np.intp)  # an empty list is float64
        if array.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, not {array.dtype}")
        check_ids(array, self.num_embeddings)
        return array.astype(np.intp, copy=False)

    def forward(self, ids: npt.ArrayLike) -> Array:
        """Look up ids.

        Parameters
        ----------
        ids : array_like of int
            Of any shape, each in 0 … num_embeddings − 1.

        Returns
        -------
        ndarray, shape (*ids.shape, embedding_dim)
            Copies of the rows, in the dtype of ``weight``.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`check_ids`.
        """
        return self.weight[self.check_ids(ids)]

    def vjp(self, ids: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Look up ids; the pullback is ``dy -> grads``.

        Parameters
        ----------
        ids : array_like of int

        Returns
        -------
        y : ndarray, shape (*ids.shape, embedding_dim)
        pullback : callable
            ``{"weight": gradient} = pullback(dy)``, as :class:`Module` says. Each row is the sum of ``dy`` over the places of its
            id; that of ``padding_idx`` is 0.
        """
        ids = self.check_ids(ids)
        y = self.weight[ids]

        def backward(dy: Array) -> Gradients:
            d_weight = np.zeros_like(widened(self.weight))
            if ids.size:
                # Sums over runs of one id are several times as fast as adding row by row.
                order = np.argsort(ids, axis=None, kind="stable")
                in_order = ids.reshape(-1)[order]
                starts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
                d_weight[in_order[starts]] = np.add.reduceat(as_rows(widened(dy))[order], starts, axis=0)
            if self.padding_idx is not None:
                d_weight[self.padding_idx] = 0
            return {"weight": d_weight.astype(self.weight.dtype, copy=False)}

        # A model's pullback is for one state of its parameters, the table's included.
        return y, checked_pullback(self, y, [self.weight], backward)
