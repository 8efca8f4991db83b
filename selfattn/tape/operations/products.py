"""Products of matrices and vectors; those of weights are computed by the core."""

from __future__ import annotations

from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.functional._products import as_rows, linear_backward
from selfattn.functional._products import linear as core_linear
from selfattn.tape.operations.table import composite, fit, operation
from selfattn.tape.tensors import Tensor


def _product(x: Array, y: Array) -> Array:
    """Return x @ y; rows of all leading axes are one matrix where y has two axes."""
    if y.ndim == 2 and x.ndim > 2:
        found: Array = (as_rows(x) @ y).reshape(*x.shape[:-1], y.shape[-1])
        return found
    return np.asarray(np.matmul(x, y))


def _of_left(dy: Array, x: Array, y: Array) -> Array:
    if y.ndim == 1:
        return fit(np.expand_dims(dy, -1) * y, x.shape)
    if x.ndim == 1:
        return fit(np.matmul(np.expand_dims(dy, -2), y.swapaxes(-1, -2))[..., 0, :], x.shape)
    return fit(_product(dy, y.swapaxes(-1, -2)), x.shape)


def _of_right(dy: Array, x: Array, y: Array) -> Array:
    if x.ndim == 1:
        outer = np.expand_dims(x, -1) * np.expand_dims(dy, -2) if y.ndim > 1 else dy * x
        return fit(outer, y.shape)
    if y.ndim == 1:
        return np.matmul(as_rows(x).T, dy.reshape(-1))
    if y.ndim == 2:
        return as_rows(x).T @ as_rows(dy)
    return fit(np.matmul(x.swapaxes(-1, -2), dy), y.shape)


def _rule(input: Array, other: Array) -> Any:
    if input.dtype != other.dtype:
        raise RuntimeError(f"expected both to have the same dtype, but got {input.dtype} and {other.dtype}")
    if input.ndim == 2 and other.ndim == 2:
        return input @ other, (lambda dy: dy @ other.T, lambda dy: input.T @ dy)
    return _product(input, other), (
        lambda dy: _of_left(dy, input, other),
        lambda dy: _of_right(dy, input, other),
    )


LABELS = {(2, 2): "Mm", (1, 1): "Dot", (2, 1): "Mv", (1, 2): "Squeeze", (3, 3): "Bmm"}


@operation("tm", 2, keeps=("1", "0"), label=lambda x, y: LABELS.get((x.ndim, y.ndim), "UnsafeView"))
def matmul(input: Array, other: Array) -> Any:
    """Return the matrix product of the last two axes; other axes are broadcast."""
    return _rule(input, other)


def _strict(name: str, left: int, right: int) -> None:
    def rule(input: Array, other: Array) -> Any:
        if (input.ndim, other.ndim) != (left, right):
            raise RuntimeError(f"tensors of {left} and {right} axes are needed")
        return _rule(input, other)

    rule.__name__, rule.__doc__ = name, f"Return the matrix product of tensors of {left} and {right} axes."
    operation("tm", 2, keeps=("1", "0"))(rule)


for _name, _axes in {"mm": (2, 2), "bmm": (3, 3), "mv": (2, 1), "dot": (1, 1)}.items():
    _strict(_name, *_axes)


@operation(
    "f",
    3,
    keeps=("1", "0", ""),
    label=lambda x, w, b=None: ("Addmm" if b is not None else "Mm") if x.ndim == 2 else "View",
)
def linear(input: Array, weight: Array, bias: Array | None = None) -> Any:
    """Return input @ weight.T + bias, by the core."""
    if weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        raise RuntimeError("the last axis of input must be as long as the last axis of weight")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"bias must have the shape {list(weight.shape[:1])}, not {list(bias.shape)}")
    kinds = {x.dtype for x in (input, weight, bias) if x is not None}
    if len(kinds) > 1:
        raise RuntimeError(f"all must have the same dtype, not {', '.join(sorted(map(str, kinds)))}")

    def back(dy: Array) -> Any:
        return *linear_backward(dy, input, weight, bias is not None), None

    y = core_linear(input, weight, bias)
    return y, back


@composite("tm")
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Return beta·input + alpha·(mat1 @ mat2)."""
    return input * beta + mat1.matmul(mat2) * alpha


@composite("tm")
def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Return beta·input + alpha·(batch1 @ batch2)."""
    return addmm(input, batch1, batch2, beta=beta, alpha=alpha)


@composite("tm")
def outer(input: Tensor, vec2: Tensor) -> Any:
    """Return the products of each number of one vector with each of another."""
    return input.unsqueeze(1) * vec2


@operation("", many=True, keeps=(), label="Einsum")
def _einsum(input: list[Array], equation: str) -> Any:
    """Return a sum of products; the gradient of an operand is the sum of products of the others."""
    given, _, asked = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    axes = max((x.ndim - len(t.replace("...", "")) for x, t in zip(input, terms, strict=True)), default=0)
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation][: max(axes, 0)]
    full = []
    for x, term in zip(input, terms, strict=True):
        n = x.ndim - len(term.replace("...", ""))
        full.append(term.replace("...", "".join(spare[len(spare) - n :])))
    if "->" not in equation:
        letters = sorted({c for t in terms for c in t if c.isalpha()})
        asked = "..." * ("..." in given) + "".join(c for c in letters if given.count(c) == 1)
    asked = asked.replace("...", "".join(spare))
    sizes = {c: n for x, t in zip(input, full, strict=True) for c, n in zip(t, x.shape, strict=True)}
    y = np.ascontiguousarray(np.einsum(f"{','.join(full)}->{asked}", *input, optimize=True))

    def of(i: int) -> Any:
        def back(dy: Array) -> Array:
            mine = full[i]
            others = [(full[j], x) for j, x in enumerate(input) if j != i]
            once = "".join(dict.fromkeys(mine))
            # Letters of this operand alone are summed in the product: its gradient is the same along them.
            known = [c for c in once if c in asked or any(c in t for t, _ in others)]
            terms = ",".join([asked, *(t for t, _ in others)])
            dx = np.einsum(f"{terms}->{''.join(known)}", dy, *(x for _, x in others), optimize=True)
            dx = np.broadcast_to(
                dx.reshape([sizes[c] if c in known else 1 for c in once]), [sizes[c] for c in once]
            )
            if len(once) != len(mine):  # a diagonal
                whole = np.zeros([sizes[c] for c in mine], dy.dtype)
                grid = np.ogrid[tuple(slice(sizes[c]) for c in once)]
                whole[tuple(grid[once.index(c)] for c in mine)] = dx
                return whole
            return dx.reshape(input[i].shape)

        return back

    return y, tuple(of(i) for i in range(len(input)))


@composite("t")
def einsum(equation: str, *operands: Any) -> Any:
    """Return a sum of products in Einstein's notation."""
    tensors = list(operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands)
    return _einsum(tensors, equation)


@composite("f")
def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Any:
    """Divide by the p-norm along an axis."""
    return input / input.norm(p, dim, keepdim=True).clamp(min=eps)


@composite("tf")
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return the cosine of the angle between vectors along an axis."""
    shape = np.broadcast_shapes(x1._array.shape, x2._array.shape)
    x1, x2 = x1.expand(shape), x2.expand(shape)
    a, b = (x.norm(2, dim, keepdim=True).clamp(min=eps) for x in (x1, x2))
    return ((x1 / a) * (x2 / b)).sum(dim)
