"""The base of all layers: named parameters and submodules, state dicts, training mode, repr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, check_gradient, warn
from selfattn._docs import copy_doc
from selfattn.engine.weights import (
    BITS,
    SCALE,
    Compact,
    Weight,
    check_kind,
    good_bits,
    good_scale,
    is_compact,
    kind_of,
    to_kind,
)

Gradients: TypeAlias = dict[str, Array]
Pullback: TypeAlias = Callable[..., Any]


class IncompatibleKeys(NamedTuple):
    """The names that only the module or only the state has, as :meth:`Module.load_state_dict` returns them.

    Attributes
    ----------
    missing_keys : list of str
        Parameters of the module that the state does not have.
    unexpected_keys : list of str
        Names in the state that the module does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class Module:
    """A layer has parameters, computes outputs from inputs, and computes gradients.

    A subclass registers its arrays with :meth:`register_parameter`, keeps other modules as attributes, and
    defines ``forward`` (which ``layer(...)`` calls) and, to be trainable, ``vjp``.

    Attributes
    ----------
    training : bool
        True for a new layer, as in PyTorch. Dropout acts only while it is True; see :meth:`train` and :meth:`eval`.

    See Also
    --------
    ModuleList, Sequential

    Notes
    -----
    Layers convert lists and integers to their own dtype, take arrays of floats as they are, and return the dtype to
    which these and the parameters promote. Arrays of another dtype, masked arrays and matrices are a TypeError; so is
    float16 in a layer of bfloat16, or the other way round. Shapes that do not fit are a ValueError.

    ``y, pullback = layer.vjp(x)`` and ``dx, grads = pullback(dy)``: ``y`` is what ``forward`` returns; ``dx`` has the
    shape and dtype of ``x``; ``grads`` has the names of :meth:`parameters`, and new arrays in each parameter's dtype.
    A pullback may be called again; until its last call, arguments must not change. A ``dy`` of another shape than
    ``y`` is a ValueError; one that holds neither floats nor integers is a TypeError. After a change of a parameter on
    which the gradients depend, a pullback raises a RuntimeError, because it has kept values that the old parameter
    gave.

    Examples
    --------
    A new kind of layer, and a model of two such layers:

    >>> import numpy as np
    >>> from selfattn import nn
    >>> class Scale(nn.Module):
    ...     def __init__(self, width):
    ...         self.register_parameter("factor", np.ones(width, np.float32))
    ...
    ...     def forward(self, x):
    ...         return x * self.factor
    ...
    ...     def vjp(self, x):
    ...         def pullback(dy):
    ...             return dy * self.factor, {"factor": (dy * x).sum(axis=0)}
    ...
    ...         return self(x), pullback
    >>> model = nn.Sequential(Scale(2), Scale(2))
    >>> model
    Sequential(
      (0): Scale(factor=(2,), dtype=float32)
      (1): Scale(factor=(2,), dtype=float32)
    )
    >>> y, pullback = model.vjp(np.array([[1.0, 2.0]], np.float32))
    >>> dx, grads = pullback(np.ones_like(y))
    >>> grads["1.factor"]
    array([1., 2.], dtype=float32)
    """

    training: bool = True
    _parameter_names: tuple[str, ...] = ()
    _rounds: ClassVar[tuple[str, ...]] = ()  # the names of weights that quantize rounds
    _floats_alone: ClassVar[bool] = False  # True: the module cannot use submodules with rounded weights
    _in_repr: ClassVar[tuple[str, ...]] = ()  # the attributes in the repr; those that are None are left out
    _call_options: ClassVar[tuple[str, ...] | None] = None  # names that forward takes as **options; None: any

    # ---------------------------------------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``."""
        return self.forward(*args, **kwargs)

    def _from_arrays(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module from the array side; those of selfattn.tape then take and return arrays too."""
        return self(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output; subclasses define it.

        Parameters
        ----------
        *args, **kwargs
            The arguments of ``layer(...)``.

        Returns
        -------
        object
            As the subclass describes.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    @copy_doc(forward)
    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Pullback]:
        """Compute the output and a function that pulls gradients back; subclasses define it.

        Returns
        -------
        pullback : callable
            ``dx, grads = pullback(dy)`` with the names of :meth:`parameters` in ``grads``, or ``grads =
            pullback(dy)`` where the input has no gradient.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define vjp; a module of selfattn.tape.nn has it from its forward alone: "
            "derive from selfattn.tape.nn.Module, and compute with its tensors"
        )

    # ------------------------------------------------------------------------------------------- parameters

    def register_parameter(self, name: str, array: Array | None) -> None:
        """Make an array a parameter: an attribute that is trained and saved.

        None means that the layer lacks this parameter.

        The array itself is kept, not a copy. An array that is registered in two places is shared.

        Parameters
        ----------
        name : str
            An identifier. If it names a parameter already, the new array replaces that one's.
        array : ndarray or None

        Raises
        ------
        ValueError
            ``name`` is no identifier, or is the name of a method.
        TypeError
            ``name`` is no str, or ``array`` neither an ndarray nor None.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter must be a str, not {type(name).__name__}")
        if not name.isidentifier():
            raise ValueError(f"the name of a parameter must be an identifier, not {name!r}")
        if callable(getattr(type(self), name, None)):
            raise ValueError(f"{name} is a method of {type(self).__name__}; a parameter needs another name")
        if array is not None and not isinstance(array, np.ndarray):
            raise TypeError(f"parameter {name} must be an ndarray or None, not {type(array).__name__}")
        if name not in self._parameter_names:
            self._parameter_names = (*self._parameter_names, name)
        self.__dict__[name] = array

    def quantize(self, dtype: str) -> Self:
        """Round the weights of all products in this module and in its submodules to 8 or 16 bits, in place.

        ``Linear`` and ``MultiheadAttention`` have such weights, and layers that contain them. int8 has a scale for
        each 128 numbers of a row, in a parameter ``…weight_scale``; bfloat16 is held as its bits, in uint16. All else
        stays float32. Rounded weights multiply rows that are also rounded, and have no gradients.

        Parameters
        ----------
        dtype : {"int8", "bfloat16"}

        Returns
        -------
        Module
            The module itself.

        Raises
        ------
        ValueError
            The dtype is another one; there are no such weights, or a module such as ``EmbeddingModel`` cannot compute
            with rounded ones; or one is not float32, or NaN, or infinite. Then nothing has changed.
        RuntimeError
            ``"bfloat16"``, and the CPU does not multiply it.

        Examples
        --------
        >>> from selfattn import nn
        >>> nn.Linear(256, 2, bias=False, rng=0).quantize("int8").parameters()["weight_scale"].shape
        (2, 2)
        """
        check_kind(dtype)
        found = []
        for module in self.modules():
            if module._floats_alone:
                raise ValueError(
                    f"{type(module).__name__} computes only with float weights, not with {dtype}"
                )
            for name in module._rounds:
                array = module.__dict__[name]
                if array is None:
                    continue
                title = f"{name} of a {type(module).__name__}"
                if array.dtype != np.float32:
                    raise ValueError(f"{title} is {kind_of(array)}; only float32 is rounded to {dtype}")
                found.append((module, name, to_kind(title, array, dtype)))
        if not found:
            raise ValueError(
                f"{type(self).__name__} has no weights that are rounded; Linear and MultiheadAttention have"
            )
        for module, name, (values, scale) in found:
            module.register_parameter(name, values)
            if scale is not None:
                module.register_parameter(name + SCALE, scale)
        return self

    def _operand(self, name: str, rows: slice = slice(None)) -> Weight:
        """Return a weight, or some of its rows, in the form that a product takes; rounded weights are packed once."""
        values: Array = self.__dict__[name]
        scale: Array | None = self.__dict__.get(name + SCALE)
        if not is_compact(values):
            return values if rows == slice(None) else values[rows]
        kept: dict[Any, Compact] = self.__dict__.setdefault("_compacts", {})
        if any(array.flags.writeable for array in (values, scale) if array is not None):  # changed
            kept.clear()
            for array in (values, scale):
                if array is not None:
                    array.flags.writeable = False
        key = name, rows.start, rows.stop
        if key not in kept or kept[key].source is not values:
            kept[key] = Compact(values[rows], None if scale is None else scale[rows], values)
        return kept[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._parameter_names:
            object.__setattr__(self, name, value)
            if type(value) is np.ndarray and value.dtype.kind == "f" and not name.startswith("_"):
                self._warn_of_array(name, sys._getframe(1))
            return
        parameter = self.__dict__[name]
        if value is parameter:  # this ends `layer.weight += 1`
            return
        if parameter is None:
            raise AttributeError(f"this {type(self).__name__} was made without {name}")
        parameter[...] = _fitting(name, parameter, value, strict=True)  # in place: optimisers hold the array

    def _warn_of_array(self, name: str, caller: FrameType) -> None:
        """Warn of an array of floats that is set as an attribute and is no parameter, as it would be in PyTorch too.

        Classes of this package set such constants, and ``forward`` and ``vjp`` of others what is to be looked at.
        """
        module = caller.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("selfattn", "selfattn_models") and caller.f_code.co_name not in ("forward", "vjp"):
            warn(
                f"{name} of this {type(self).__name__} is an array and no parameter, so it is not trained: "
                f"self.register_parameter({name!r}, array) makes it one, and self._{name} = array keeps a constant"
            )

    def _own_parameters(self) -> Iterator[tuple[str, Array]]:
        for name in self._parameter_names:
            if (array := self.__dict__[name]) is not None:
                yield name, array

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the direct submodules with their names, in the order of assignment."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def modules(self) -> Iterator[Module]:
        """Yield this module and all its submodules, at any depth, each once."""
        seen: set[int] = set()
        stack: list[Module] = [self]
        while stack:
            module = stack.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                stack += [child for _, child in module.named_children()][::-1]

    def _all_parameters(self, prefix: str = "") -> list[tuple[str, Array]]:
        """Return every parameter once for each of its names."""
        found = [(prefix + name, array) for name, array in self._own_parameters()]
        for name, child in self.named_children():
            found += child._all_parameters(f"{prefix}{name}.")
        return found

    def parameters(self) -> dict[str, Array]:
        """Return the parameters by name, not copies: optimisers write into them. A shared parameter appears once.

        Returns
        -------
        dict of str to ndarray
            Keys and shapes are those of PyTorch's module of that name.
        """
        return self._arrays()

    def _arrays(self) -> dict[str, Array]:
        """Return the parameters by name; for modules of selfattn.tape too, whose ``parameters`` yields tensors."""
        first: dict[int, tuple[str, Array]] = {}
        for name, array in self._all_parameters():
            first.setdefault(id(array), (name, array))
        return dict(first.values())

    def gather_gradients(self, parts: Mapping[str, Gradients]) -> Gradients:
        """Name the gradients of submodules as :meth:`parameters` does; gradients of a shared parameter are added up.

        Parameters
        ----------
        parts : mapping of str to dict
            The name of a submodule and the gradients of its pullback; ``""`` for the module's own parameters. For a
            submodule that was used twice, their sum (see :func:`add_gradients`).

        Returns
        -------
        dict of str to ndarray
        """
        gradients = {
            f"{part}.{name}" if part else name: gradient
            for part, named in parts.items()
            for name, gradient in named.items()
        }
        every, once = dict(self._all_parameters()), self._arrays()
        if len(every) == len(once):
            return gradients
        return named_gradients(once, ((every[name], gradient) for name, gradient in gradients.items()))

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all parameters by name; as in PyTorch, a shared parameter has all its names."""
        return {name: array.copy() for name, array in self._all_parameters()}

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike], strict: bool = True) -> IncompatibleKeys:
        """Copy arrays into the parameters. Everything is checked before anything is written.

        Parameters
        ----------
        state : mapping of str to array_like
            By name, as from :meth:`state_dict` or a file. A shared parameter needs one of its names. For a
            PyTorch module: ``{name: t.numpy() for name, t in module.state_dict().items()}``.
        strict : bool, default True
            False allows missing and unexpected names, and rounds to the parameter's dtype.

        Returns
        -------
        IncompatibleKeys
            Both lists are empty when ``strict``.

        Raises
        ------
        ValueError
            A shape differs, or a parameter is read-only; or, when ``strict``, a name or a dtype does. The message
            lists all of them.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a mapping of names to arrays, not {type(state).__name__}")
        parameters = dict(self._all_parameters())
        given = {id(array) for name, array in parameters.items() if name in state}
        missing = [name for name, array in parameters.items() if name not in state and id(array) not in given]
        unexpected = [name for name in state if name not in parameters]
        problems = [f"missing: {name} {parameters[name].shape}" for name in missing if strict]
        problems += [f"unexpected: {name}" for name in unexpected if strict]
        scales = {name + SCALE for name, array in parameters.items() if is_compact(array)}
        owners = {id(_owner(array)) for array in parameters.values()}
        fitting = {}
        for name, array in parameters.items():
            if name in state:
                try:
                    fitting[name] = _fitting(name, array, state[name], strict)
                    _check_rounded(name, array, fitting[name], name in scales)
                    if not (array.flags.writeable or is_compact(array) or name in scales):
                        raise ValueError(f"{name} is read-only")
                    # The state may hold a parameter, which would be written to before it is read.
                    if id(_owner(fitting[name])) in owners:
                        fitting[name] = fitting[name].copy()
                except (TypeError, ValueError) as error:
                    problems.append(str(error))
        if problems:
            raise ValueError(f"the state does not fit {type(self).__name__}:\n  " + "\n  ".join(problems))
        for name, value in fitting.items():
            if is_compact(parameters[name]) or name in scales:
                parameters[name].flags.writeable = True  # so the packed weights are made again
            parameters[name][...] = value
        return IncompatibleKeys(missing, unexpected)

    # -------------------------------------------------------------------------------------------------- modes

    def train(self, mode: bool = True) -> Module:
        """Set training mode for this module and all its submodules.

        Parameters
        ----------
        mode : bool, default True
            False leaves training mode, as :meth:`eval` does.

        Returns
        -------
        Module
            The module itself.

        Raises
        ------
        TypeError
            ``mode`` is no bool.
        """
        if not isinstance(mode, bool | np.bool_):
            raise TypeError(f"mode must be True or False, not {mode!r}")
        for module in self.modules():
            module.training = bool(mode)
        return self

    def eval(self) -> Module:
        """Leave training mode, so that dropout does nothing, and return the module."""
        return self.train(False)

    # --------------------------------------------------------------------------------------------------- repr

    def extra_repr(self) -> str:
        """Return the part of the repr before the shapes: the attributes that ``_in_repr`` names.

        Subclasses may define it.
        """
        shown = [(name, value) for name in self._in_repr if (value := getattr(self, name)) is not None]
        return ", ".join(
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in shown
        )

    def __repr__(self) -> str:
        own = dict(self._own_parameters())
        shapes = [f"{name}={array.shape}" for name, array in own.items()]
        dtypes = dict.fromkeys(f"dtype={array.dtype}" for array in own.values())
        head = ", ".join(filter(None, [self.extra_repr(), *shapes, *dtypes]))
        children = [f"({name}): {child!r}" for name, child in self.named_children()]
        if not children:
            return f"{type(self).__name__}({head})"
        lines = "\n".join([head, *children] if head else children).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {lines}\n)"


def arrays_of(model: Any) -> dict[str, Array]:
    """Return the arrays of a module, or of another object with ``parameters()``."""
    found: dict[str, Array] = model._arrays() if isinstance(model, Module) else model.parameters()
    return found


def output_of(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a module, or another callable, computes from arrays."""
    return model._from_arrays(*args, **kwargs) if isinstance(model, Module) else model(*args, **kwargs)


def add_gradients(total: Gradients, more: Gradients) -> Gradients:
    """Add ``more`` to ``total``, name by name, and return ``total``.

    These are the gradients of a layer that is used more than once.

    Parameters
    ----------
    total : dict of str to ndarray
        The dict is changed, its arrays are not: each sum is a new array, and a new name gets the array of ``more``.
    more : dict of str to ndarray
        In the shapes of those of the same name in ``total``.

    Returns
    -------
    dict of str to ndarray
        ``total`` itself.
    """
    for name, gradient in more.items():
        total[name] = total[name] + gradient if name in total else gradient
    return total


def named_gradients(parameters: Mapping[str, Array], pairs: Iterable[tuple[Array, Array]]) -> Gradients:
    """Name gradients, given as pairs (parameter, gradient), and round them; a shared parameter's are added up."""
    names = {id(array): name for name, array in parameters.items()}
    found: Gradients = {}
    for parameter, gradient in pairs:
        add_gradients(found, {names[id(parameter)]: gradient})
    kept = [(name, array.dtype) for name, array in parameters.items() if name in found]
    return {name: found[name].astype(dtype, copy=False) for name, dtype in kept}


def run(module: Any, keep: bool, *inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Call a module, and return ``(y, pullback)``, or without ``keep`` ``(y, None)``."""
    return module.vjp(*inputs, **options) if keep else (module(*inputs, **options), None)


def checked_pullback(
    owner: Any,
    y: Array,
    parameters: Iterable[Array | None],
    backward: Callable[[Array], Any],
    name: str = "dy",
) -> Pullback:
    """Return a pullback that checks the gradient of y, refuses changed parameters, and calls ``backward``.

    The optimiser writes into the arrays, so a gradient taken after a step would silently mix old activations with new
    weights. A checksum of their memory costs a fraction of the weights' product, and unlike a counter it also notices
    ``weight[...] = 0``.
    """
    arrays = tuple(array for array in parameters if array is not None)
    before, kind = _core._checksum(arrays), type(owner).__name__

    def pullback(dy: npt.ArrayLike) -> Any:
        dy = check_gradient(dy, y, name)
        if _core._checksum(arrays) != before:
            raise RuntimeError(f"the parameters of {kind} have changed since vjp was called; call vjp again")
        return backward(dy)

    return pullback


def _owner(array: Any) -> Any:
    """Return the array that owns a view's memory."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array


def _check_rounded(name: str, parameter: Array, array: Array, scale: bool) -> None:
    """Refuse rounded weights for a float parameter, and values or scales that rounding cannot give."""
    if is_compact(array) and not is_compact(parameter):
        raise ValueError(f"{name} is {parameter.dtype}; the state has rounded weights")
    if scale and not good_scale(array):
        raise ValueError(f"{name} must hold finite numbers, none negative")
    if parameter.dtype == BITS and not good_bits(array):
        raise ValueError(f"{name} holds NaN or an infinity")


def _fitting(name: str, parameter: Array, value: npt.ArrayLike, strict: bool) -> Array:
    """Return the value as an array that fits the parameter; a value that does not is an error."""
    array = np.asarray(as_array(name, value))
    if array.shape != parameter.shape:
        raise ValueError(f"{name} has shape {parameter.shape}, not {array.shape}")
    if is_compact(parameter) and array.dtype != parameter.dtype:
        raise ValueError(f"{name} holds {kind_of(parameter)}, rounded weights; not {array.dtype}")
    if array.dtype.name not in ("float16", "bfloat16", "float32", "float64") and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold floats or integers, not {array.dtype}")
    typed = hasattr(value, "dtype") and array.dtype.kind not in "iu"
    if strict and typed and not np.can_cast(array.dtype, parameter.dtype, "safe"):
        raise ValueError(
            f"{name} is {parameter.dtype}; {array.dtype} would lose precision (strict=False rounds)"
        )
    return array
