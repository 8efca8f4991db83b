"""The layers of ``torch.nn``: each holds its parameters, and calls a function of ``torch.nn.functional``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from selfattn import nn as layers
from selfattn._check import Array
from selfattn.tape.dtypes import as_dtype, get_default_dtype
from selfattn.tape.generator import default_generator
from selfattn.tape.nn import functional as F  # noqa: N812
from selfattn.tape.nn import init
from selfattn.tape.nn.module import Module
from selfattn.tape.tensors import Parameter, Tensor, no_grad, wrap

f: Any = F


def dtype_of_layer(dtype: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of a layer that is made with a dtype, or without one."""
    return (get_default_dtype() if dtype is None else as_dtype(dtype)).numpy


def _parameter(array: Any) -> Parameter | None:
    return None if array is None else Parameter(wrap(array))


class Linear(Module):
    """``input @ weight.T + bias``.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default True
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        made = layers.Linear(
            in_features, out_features, bias, dtype=dtype_of_layer(dtype), rng=default_generator()
        )
        self.register_parameter("weight", _parameter(made.weight))
        self.register_parameter("bias", _parameter(made.bias))

    @classmethod
    def of_arrays(cls, weight: Array, bias: Array | None) -> Self:
        """Make a layer of arrays that exist."""
        made = object.__new__(cls)
        made.out_features, made.in_features = weight.shape
        made.register_parameter("weight", _parameter(weight))
        made.register_parameter("bias", _parameter(bias))
        return made

    def reset_parameters(self) -> None:
        """Draw the parameters again."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Any:
        """Multiply by the weight, and add the bias."""
        return f.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class LazyLinear(Linear):
    """A Linear that learns its number of inputs, and draws its parameters, at its first call.

    Parameters
    ----------
    out_features : int
    bias : bool, default True
    """

    def __init__(self, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
        self.in_features, self.out_features = 0, out_features
        self._options = (bias, device, dtype)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Any:
        """Multiply by the weight, and add the bias."""
        if self.weight is None:
            self.__class__ = Linear
            Linear.__init__(self, input.shape[-1], self.out_features, *self._options)
        return super().forward(input) if isinstance(self, LazyLinear) else Linear.forward(self, input)


class Embedding(Module):
    """A row of a table for each integer.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
    padding_idx : int, optional
        An integer whose row is 0 at first, and is not trained.
    """

    weight: Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        made = layers.Embedding(
            num_embeddings, embedding_dim, padding_idx, dtype=dtype_of_layer(dtype), rng=default_generator()
        )
        self.padding_idx = made.padding_idx
        self.register_parameter("weight", _parameter(made.weight))

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None) -> Self:
        """Make a layer of a table that exists."""
        made = object.__new__(cls)
        made.num_embeddings, made.embedding_dim = embeddings.shape
        made.padding_idx = padding_idx
        made.register_parameter("weight", Parameter(embeddings, not freeze))
        return made

    def reset_parameters(self) -> None:
        """Draw the table again."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, input: Tensor) -> Any:
        """Look up rows."""
        return f.embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """Return the sizes."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axes, times a weight, plus a bias.

    Parameters
    ----------
    normalized_shape : int or sequence of int
    eps : float, default 1e-5
    elementwise_affine : bool, default True
    bias : bool, default True
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        made = layers.LayerNorm(normalized_shape, eps, elementwise_affine, bias, dtype=dtype_of_layer(dtype))
        self.normalized_shape, self.eps, self.elementwise_affine = (
            made.normalized_shape,
            eps,
            elementwise_affine,
        )
        self.register_parameter("weight", _parameter(made.weight))
        self.register_parameter("bias", _parameter(made.bias))

    def forward(self, input: Tensor) -> Any:
        """Normalise."""
        return f.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the shape and the options."""
        affine = f"elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"
        return f"{self.normalized_shape}, eps={self.eps}, {affine}"


class RMSNorm(Module):
    """Mean square 1 over the last axes, times a weight.

    Parameters
    ----------
    normalized_shape : int or sequence of int
    eps : float, optional
    elementwise_affine : bool, default True
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        made = layers.RMSNorm(normalized_shape, eps, elementwise_affine, dtype=dtype_of_layer(dtype))
        self.normalized_shape, self.eps, self.elementwise_affine = (
            made.normalized_shape,
            eps,
            elementwise_affine,
        )
        self.register_parameter("weight", _parameter(made.weight))

    def forward(self, input: Tensor) -> Any:
        """Normalise."""
        return f.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the shape and the options."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class Identity(Module):
    """The input itself, whatever the arguments of the layer are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def forward(self, input: Any) -> Any:
        """Return the input."""
        return input


class Dropout(Module):
    """Zeros with probability p, in training; the masks are not PyTorch's.

    Parameters
    ----------
    p : float, default 0.5
    inplace : bool, default False
        Taken, and of no effect.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self.p, self.inplace = p, inplace

    def forward(self, input: Tensor) -> Any:
        """Drop numbers while the module is in training mode."""
        return f.dropout(input, self.p, self.training)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"p={self.p}, inplace={self.inplace}"


class Flatten(Module):
    """Several axes as one.

    Parameters
    ----------
    start_dim, end_dim : int, default 1 and -1
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Any) -> Any:
        """Make the axes one."""
        return input.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        """Return the axes."""
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class PReLU(Module):
    """max(x, 0) + weight·min(x, 0) with a weight that is trained.

    Parameters
    ----------
    num_parameters : int, default 1
    init : float, default 0.25
    """

    def __init__(
        self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = None
    ) -> None:
        self.num_parameters = num_parameters
        self.register_parameter("weight", _parameter(np.full(num_parameters, init, dtype_of_layer(dtype))))

    def forward(self, input: Tensor) -> Any:
        """Compute the function of each number."""
        return f.prelu(input, self.weight)

    def extra_repr(self) -> str:
        """Return the number of weights."""
        return f"num_parameters={self.num_parameters}"


# ----------------------------------------------------------------------------------------- layers without parameters


class _Function(Module):
    """A layer that is a function with options: its constructor takes them in the order of ``_defaults``."""

    _function: ClassVar[str]
    _defaults: ClassVar[dict[str, Any]]
    _hidden: ClassVar[tuple[str, ...]] = ()  # options that the function does not take

    def __init__(self, *args: Any, **options: Any) -> None:
        unknown = set(options) - set(self._defaults)
        if unknown or len(args) > len(self._defaults):
            raise TypeError(f"{type(self).__name__}() takes {', '.join(self._defaults) or 'no arguments'}")
        given = dict(zip(self._defaults, args, strict=False)) | options
        for name, default in self._defaults.items():
            setattr(self, name, given.get(name, default))
        self.inplace = given.get("inplace", False)

    def _options(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in self._defaults if name not in ("inplace", *self._hidden)
        }

    def forward(self, *inputs: Tensor) -> Any:
        """Compute the function."""
        return getattr(f, self._function)(*inputs, **self._options())

    def extra_repr(self) -> str:
        """Return the options, as PyTorch shows them."""
        return _shown(self)


# How PyTorch shows options; other layers show none.
SHOWN: dict[str, Callable[[Any], str]] = {
    "GELU": lambda m: f"approximate={m.approximate!r}",
    "Softmax": lambda m: f"dim={m.dim}",
    "LogSoftmax": lambda m: f"dim={m.dim}",
    "Softmin": lambda m: f"dim={m.dim}",
    "GLU": lambda m: f"dim={m.dim}",
    "ELU": lambda m: f"alpha={m.alpha}",
    "CELU": lambda m: f"alpha={m.alpha}",
    "LeakyReLU": lambda m: f"negative_slope={m.negative_slope}",
    "Softplus": lambda m: f"beta={m.beta}, threshold={m.threshold}",
    "Hardtanh": lambda m: f"min_val={m.min_val}, max_val={m.max_val}",
    "Hardshrink": lambda m: f"{m.lambd}",
    "Softshrink": lambda m: f"{m.lambd}",
    "Threshold": lambda m: f"threshold={m.threshold}, value={m.value}",
}


def _shown(module: Any) -> str:
    shown = SHOWN[type(module).__name__](module) if type(module).__name__ in SHOWN else ""
    return ", ".join(filter(None, [shown, "inplace=True" * bool(module.inplace)]))


_REDUCTION = {"reduction": "mean"}
_LEGACY = {"size_average": None, "reduce": None}
# The layer, its function, and its options with their defaults, in PyTorch's order.
FUNCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ReLU": ("relu", {"inplace": False}),
    "ReLU6": ("relu6", {"inplace": False}),
    "GELU": ("gelu", {"approximate": "none"}),
    "SiLU": ("silu", {"inplace": False}),
    "Mish": ("mish", {"inplace": False}),
    "Tanh": ("tanh", {}),
    "Sigmoid": ("sigmoid", {}),
    "LogSigmoid": ("logsigmoid", {}),
    "Softsign": ("softsign", {}),
    "Tanhshrink": ("tanhshrink", {}),
    "Hardsigmoid": ("hardsigmoid", {"inplace": False}),
    "Hardswish": ("hardswish", {"inplace": False}),
    "SELU": ("selu", {"inplace": False}),
    "ELU": ("elu", {"alpha": 1.0, "inplace": False}),
    "CELU": ("celu", {"alpha": 1.0, "inplace": False}),
    "LeakyReLU": ("leaky_relu", {"negative_slope": 0.01, "inplace": False}),
    "Softplus": ("softplus", {"beta": 1.0, "threshold": 20.0}),
    "Hardtanh": ("hardtanh", {"min_val": -1.0, "max_val": 1.0, "inplace": False}),
    "Hardshrink": ("hardshrink", {"lambd": 0.5}),
    "Softshrink": ("softshrink", {"lambd": 0.5}),
    "Threshold": ("threshold", {"threshold": 0.0, "value": 0.0, "inplace": False}),
    "GLU": ("glu", {"dim": -1}),
    "Softmax": ("softmax", {"dim": -1}),
    "LogSoftmax": ("log_softmax", {"dim": -1}),
    "Softmin": ("softmin", {"dim": -1}),
    "CosineSimilarity": ("cosine_similarity", {"dim": 1, "eps": 1e-8}),
    "CrossEntropyLoss": (
        "cross_entropy",
        {"weight": None, **_LEGACY, "ignore_index": -100, **_REDUCTION, "label_smoothing": 0.0},
    ),
    "NLLLoss": ("nll_loss", {"weight": None, "ignore_index": -100, **_REDUCTION}),
    "MSELoss": ("mse_loss", {**_LEGACY, **_REDUCTION}),
    "L1Loss": ("l1_loss", {**_LEGACY, **_REDUCTION}),
    "SmoothL1Loss": ("smooth_l1_loss", {**_LEGACY, **_REDUCTION, "beta": 1.0}),
    "BCELoss": ("binary_cross_entropy", {"weight": None, **_LEGACY, **_REDUCTION}),
    "BCEWithLogitsLoss": (
        "binary_cross_entropy_with_logits",
        {"weight": None, **_LEGACY, **_REDUCTION, "pos_weight": None},
    ),
    "KLDivLoss": ("kl_div", {**_LEGACY, **_REDUCTION, "log_target": False}),
}


def _layer(name: str, function: str, defaults: dict[str, Any]) -> type[_Function]:
    doc = (
        f"The layer of ``torch.nn.functional.{function}``, with its options: {', '.join(defaults) or 'none'}."
    )
    members = {
        "_function": function,
        "_defaults": defaults,
        "_hidden": tuple(_LEGACY),
        "__doc__": doc,
        "__module__": __name__,
    }
    return type(name, (_Function,), members)


globals().update({name: _layer(name, *row) for name, row in FUNCTIONS.items()})
