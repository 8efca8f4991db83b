"""Tensors from numbers: of lists and arrays, filled, in sequence, random."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.random import TorchGenerator
from selfattn.tape.dtypes import as_dtype, dtype, dtype_of, get_default_dtype
from selfattn.tape.dtypes import device as check_device
from selfattn.tape.generator import default_generator
from selfattn.tape.operations.views import sizes_of
from selfattn.tape.tensors import Parameter, Tensor, as_tensor_array, values_of, wrap


def _made(array: Array, requires_grad: bool = False, device: Any = None) -> Tensor:
    if device is not None:
        check_device(device)
    found: Tensor = wrap(array)
    if requires_grad:
        found.requires_grad = True
    return found


def _kind(kind: dtype | None) -> np.dtype[Any]:
    return (get_default_dtype() if kind is None else as_dtype(kind)).numpy


def tensor(
    data: Any, *, dtype: dtype | None = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    """Make a tensor of numbers, nested lists or an array, which is copied.

    Parameters
    ----------
    data : array_like
        Python's floats give the default dtype, its ints int64.
    dtype : dtype, optional
    device : str or device, optional
        The CPU.
    requires_grad : bool, default False

    Returns
    -------
    Tensor

    Examples
    --------
    >>> import selfattn.tape as torch
    >>> torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensor([[1., 2.],
            [3., 4.]])
    """
    typed = hasattr(data, "dtype")
    array = np.array(as_tensor_array(data) if typed else values_of(data))
    if dtype is not None:
        array = array.astype(as_dtype(dtype).numpy)
    elif not typed and array.dtype.kind == "f" and not _has_tensors(data):
        array = array.astype(_kind(None))
    elif not typed and array.dtype == np.uint64:
        raise OverflowError("an integer of the data does not fit into 64 bits")
    dtype_of(array)
    return _made(array, requires_grad, device)


def _has_tensors(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and _has_tensors(data[0])
    return hasattr(data, "dtype")


def as_tensor(data: Any, dtype: dtype | None = None, device: Any = None) -> Tensor:
    """Make a tensor of data: the data's own memory, if it is a tensor or an array of that dtype."""
    if isinstance(data, Tensor):
        return data if dtype is None else data.to(dtype)
    if isinstance(data, np.ndarray) and (dtype is None or data.dtype == as_dtype(dtype).numpy):
        return from_numpy(data)
    return tensor(data, dtype=dtype, device=device)


def from_numpy(ndarray: Array) -> Tensor:
    """Make a tensor of an array's own memory."""
    if not isinstance(ndarray, np.ndarray):
        raise TypeError(f"expected np.ndarray (got {type(ndarray).__name__})")
    dtype_of(ndarray)
    return _made(np.asarray(ndarray))


def is_tensor(obj: Any) -> bool:
    """Return whether an object is a tensor."""
    return isinstance(obj, Tensor)


def _filled(
    name: str, number: float
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """Return a function of sizes that fills a tensor, one of another tensor, and a method."""

    def sized(
        *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **unused: Any
    ) -> Tensor:
        if "size" in unused:
            size = (unused["size"],)
        return _made(np.full(sizes_of(size), number, _kind(dtype)), requires_grad, device)

    def like(input: Tensor, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        return sized(
            input._array.shape, dtype=dtype or input.dtype, device=device, requires_grad=requires_grad
        )

    def method(self: Tensor, *size: Any, dtype: Any = None, **options: Any) -> Tensor:
        return sized(*size, dtype=dtype or self.dtype, **options)

    for function, full, words in (
        (sized, name, "of the sizes"),
        (like, f"{name}_like", "in the shape and dtype of another one"),
        (method, f"new_{name}", "in the dtype of this one"),
    ):
        function.__name__ = function.__qualname__ = full
        function.__doc__ = f"Make a tensor {words}, filled with {number}."
    return sized, like, method


zeros, zeros_like, _new_zeros = _filled("zeros", 0)
ones, ones_like, _new_ones = _filled("ones", 1)
empty, empty_like, _new_empty = _filled("empty", 0)


def full(
    size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    """Make a tensor that is filled with a number, in the number's dtype."""
    number = fill_value.item() if isinstance(fill_value, Tensor) else fill_value
    kind = np.asarray(number).dtype if dtype is None else _kind(dtype)
    kind = _kind(None) if dtype is None and kind.kind == "f" else kind
    return _made(np.full(sizes_of((size,)), number, kind), requires_grad, device)


def full_like(input: Tensor, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    """Make a tensor in the shape and dtype of another one, filled with a number."""
    return full(input.shape, fill_value, dtype=dtype or input.dtype, **options)


def _new_tensor(self: Tensor, data: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return tensor(data, dtype=dtype or self.dtype, **options)


def eye(
    n: int, m: int | None = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    """Make a matrix with ones on its diagonal."""
    return _made(np.eye(n, m, dtype=_kind(dtype)), requires_grad, device)


def _triangle(name: str, numpy: Callable[..., Any], words: str) -> Callable[..., Tensor]:
    def indices(row: int, col: int, offset: int = 0, *, dtype: Any = None, device: Any = None) -> Tensor:
        return _made(
            np.stack(numpy(row, offset, col)).astype(np.int64 if dtype is None else _kind(dtype)),
            False,
            device,
        )

    indices.__name__ = indices.__qualname__ = name
    indices.__doc__ = f"Return the rows and the columns of a matrix that are {words} a diagonal."
    return indices


tril_indices = _triangle("tril_indices", np.tril_indices, "on or below")
triu_indices = _triangle("triu_indices", np.triu_indices, "on or above")


def arange(
    *bounds: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **named: Any
) -> Tensor:
    """Make the numbers from start (0) to end, which is left out, by step (1)."""
    if len(bounds) == 1 and bounds[0].__class__ is int and not named and bounds[0] >= 0:
        kind = np.dtype(np.int64) if dtype is None else as_dtype(dtype).numpy
        return _made(np.arange(bounds[0], dtype=kind), requires_grad, device)
    bounds = tuple(
        b.item() if isinstance(b, Tensor) else b
        for b in (*bounds, *map(named.get, ("start", "end", "step")))
        if b is not None
    )
    if not 1 <= len(bounds) <= 3:
        raise TypeError(
            f"arange() takes end, start and end, or start, end and step, not {len(bounds)} numbers"
        )
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if step == 0 or (end - start) * step < 0:
        raise RuntimeError(f"upper bound and lower bound inconsistent with step sign: {start}, {end}, {step}")
    whole = all(isinstance(b, int | np.integer) for b in bounds)
    kind = _kind(dtype) if dtype is not None or not whole else np.dtype(np.int64)
    n = math.ceil((end - start) / step)
    return _made((start + np.arange(n) * step).astype(kind), requires_grad, device)


def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Make numbers at equal distances from start to end, both included."""
    return _made(np.linspace(float(start), float(end), steps).astype(_kind(dtype)), requires_grad, device)


# ----------------------------------------------------------------------------------------------------- random numbers


def source(generator: TorchGenerator | None) -> TorchGenerator:
    """Return the generator that was given, or the default one."""
    return default_generator() if generator is None else generator


def _drawn(kind: np.dtype[Any], draw: Callable[[np.dtype[Any]], Array]) -> Array:
    """Draw in float32 for 16 bits, else in the dtype itself."""
    return draw(kind) if kind.itemsize > 2 else draw(np.dtype(np.float32)).astype(kind)


def rand(
    *size: Any, generator: Any = None, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    """Draw from U[0, 1): PyTorch's numbers, to the bit."""
    shape = sizes_of(size)
    array = _drawn(_kind(dtype), lambda kind: source(generator).random(shape, kind))
    return _made(array, requires_grad, device)


def randn(
    *size: Any, generator: Any = None, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    """Draw from the standard normal distribution: PyTorch's numbers, to the last bits."""
    array = source(generator).standard_normal(sizes_of(size), _kind(dtype))
    return _made(array, requires_grad, device)


def rand_like(input: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    """Draw from U[0, 1) in the shape and dtype of a tensor."""
    return rand(input._array.shape, dtype=dtype or input.dtype, **options)


def randn_like(input: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    """Draw from the standard normal distribution in the shape and dtype of a tensor."""
    return randn(input._array.shape, dtype=dtype or input.dtype, **options)


def normal(mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None) -> Tensor:
    """Draw from the normal distribution: of a size, or of tensors of means and deviations."""
    if size is not None:
        return _made(source(generator).normal(float(mean), float(std), sizes_of((size,)), _kind(None)))
    m, s = (as_tensor_array(x) for x in (mean, std))
    shape = np.broadcast_shapes(m.shape, s.shape)
    drawn = source(generator).standard_normal(
        shape, np.result_type(m, s) if "f" in (m.dtype.kind + s.dtype.kind) else _kind(None)
    )
    return _made(np.asarray(drawn * s + m, drawn.dtype))


def randint(
    low: int,
    high: Any = None,
    size: Any = None,
    *,
    generator: Any = None,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Draw integers from low (0) to high, which is left out: PyTorch's numbers."""
    if size is None:
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    array = source(generator).integers(low, high, sizes_of((size,)))
    return _made(array.astype(np.int64 if dtype is None else _kind(dtype)), requires_grad, device)


def randint_like(input: Tensor, low: int, high: int | None = None, *, dtype: Any = None) -> Tensor:
    """Draw integers in the shape and dtype of a tensor."""
    return randint(low, high, input._array.shape, dtype=dtype or input.dtype)


def randperm(n: int, *, generator: Any = None, dtype: Any = None, device: Any = None) -> Tensor:
    """Draw an order of the integers 0 … n − 1: PyTorch's."""
    return _made(
        source(generator).randperm(n).astype(np.int64 if dtype is None else _kind(dtype)), False, device
    )


def bernoulli(input: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    """Draw ones with the probabilities in a tensor, else zeros."""
    chance = input._array if p is None else p
    drawn = source(generator).random(input._array.shape, np.float64) < chance
    return _made(drawn.astype(input._array.dtype))


def multinomial(
    input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Draw places with probabilities in proportion to weights, for each row; the draws are not PyTorch's.

    Parameters
    ----------
    input : Tensor, shape (n,) or (rows, n)
        Weights, none below 0, some above 0.
    num_samples : int
    replacement : bool, default False
        Whether a place may be drawn more than once.
    generator : Generator, optional

    Returns
    -------
    Tensor of int64, shape (num_samples,) or (rows, num_samples)
    """
    rows = np.atleast_2d(input._array.astype(np.float64))
    if not np.isfinite(rows).all() or (rows < 0).any():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if (rows.sum(-1) <= 0).any():
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement and num_samples > (rows > 0).sum(-1).min():
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if replacement or num_samples == 1:
        drawn = source(generator).random((len(rows), num_samples), np.float64)
        ends = np.cumsum(rows, -1)
        found = np.stack(
            [np.searchsorted(end, u * end[-1], "right") for end, u in zip(ends, drawn, strict=True)]
        )
        last = rows.shape[-1] - 1 - np.argmax(rows[:, ::-1] > 0, -1)
        found = np.minimum(found, last[:, None])
    else:  # the places with the earliest of exponential times are a sample without replacement
        with np.errstate(divide="ignore"):
            times = -np.log1p(-source(generator).random(rows.shape, np.float64)) / rows
        found = np.argsort(times, -1)[:, :num_samples]
    return _made(found.astype(np.int64).reshape(*input._array.shape[:-1], num_samples))


# ------------------------------------------------------------------------------------------------------------- methods


def _random_method(name: str, draw: Callable[..., Array]) -> Callable[..., Tensor]:
    def method(self: Tensor, *args: Any, generator: Any = None, **options: Any) -> Tensor:
        from selfattn.tape.operations.table import write

        return write(
            self, wrap(np.asarray(draw(self._array, source(generator), *args, **options), self._array.dtype))
        )

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Fill the tensor with random numbers, as PyTorch's ``{name}``."
    return method


def _uniform(x: Array, rng: TorchGenerator, a: float = 0.0, b: float = 1.0) -> Array:
    return _drawn(x.dtype, lambda kind: rng.uniform(a, b, x.shape, kind))


def _normal(x: Array, rng: TorchGenerator, mean: float = 0.0, std: float = 1.0) -> Array:
    return rng.normal(mean, std, x.shape, x.dtype)


def _bernoulli(x: Array, rng: TorchGenerator, p: float = 0.5) -> Array:
    return np.asarray(rng.random(x.shape, np.float64) < p)


METHODS = {
    "new_zeros": _new_zeros,
    "new_ones": _new_ones,
    "new_empty": _new_empty,
    "new_tensor": _new_tensor,
    "new_full": lambda self, size, fill_value, **options: full(
        size, fill_value, **{"dtype": self.dtype, **options}
    ),
    "uniform_": _random_method("uniform_", _uniform),
    "normal_": _random_method("normal_", _normal),
    "bernoulli_": _random_method("bernoulli_", _bernoulli),
    "multinomial": multinomial,
}
for _name, _method in METHODS.items():
    setattr(Tensor, _name, _method)

__all__ = [
    "Parameter",
    "arange",
    "as_tensor",
    "bernoulli",
    "empty",
    "empty_like",
    "eye",
    "from_numpy",
    "full",
    "full_like",
    "is_tensor",
    "linspace",
    "multinomial",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
]
