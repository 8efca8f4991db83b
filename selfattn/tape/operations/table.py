"""The table of operations: each has a name, a rule in NumPy with its gradients, and the places where PyTorch has it.

A rule takes arrays and options, and returns the result with the functions that take its gradient back: a tuple of one
for each input, or one function for all inputs, or None if there is no gradient. The rule of a view returns, in place
of the result, the function from the input's array to the view.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from selfattn._check import Array
from selfattn.tape.dtypes import DTYPES, dtype_of, get_default_dtype, result_dtype
from selfattn.tape.tensors import Node, Tensor, check_writable, edge_of, mode, next_number, set_history, wrap

Back: TypeAlias = Callable[[Array], Any]
Rule: TypeAlias = Callable[..., tuple[Any, Any]]

new = object.__new__
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
MISSING: Any = object()
NUMBERS = (int, float, np.generic)
TABLE: dict[str, Any] = {}


class Operation:
    """An operation on tensors.

    Attributes
    ----------
    keeps : tuple of str
        For each input, what its gradient needs: 0, 1, … are inputs, o the result, "-" an array that nobody can change.
    places : str
        Where it is found: t as ``torch.name``, m as a method, f in ``torch.nn.functional``, i as a method ``name_``
        that writes into the tensor.
    """

    def __init__(self, rule: Rule, places: str, inputs: int, **settings: Any) -> None:
        self.rule, self.places, self.inputs = rule, places, inputs
        self.name: str = rule.__name__.lstrip("_")
        # The label of its nodes, or a function from its arrays and options to the label.
        self.label: Any = settings.pop("label", None) or "".join(map(str.capitalize, self.name.split("_")))
        self.keeps: tuple[str, ...] = settings.pop("keeps", ())
        self.promotes: str = settings.pop(
            "promotes", ""
        )  # "same": to a common dtype; "float": also to floats
        self.view: bool = settings.pop("view", False)
        self.many: bool = settings.pop("many", False)  # the first argument is a sequence of tensors
        self.results: Any = settings.pop("results", None)  # the tuple of several results
        self.names = list(inspect.signature(rule).parameters)[:inputs]
        assert not settings, settings
        quick = not self.many and self.results is None
        # One function for each form: an operation on small tensors is mostly what surrounds its rule.
        call = _of_any(self)
        if quick and inputs == 1:
            call = _of_one(self, call)
        elif quick and inputs == 2:
            call = _of_two(self, call)
        self.call: Any = call
        call.__name__ = call.__qualname__ = self.name
        call.__doc__ = rule.__doc__
        setattr(call, "__signature__", inspect.signature(rule))  # noqa: B010 # mypy knows no attributes of functions

    def __repr__(self) -> str:
        return f"<operation {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self.call(*args, **kwargs)

    def _kept(self, edges: Any, inputs: Any, out: Tensor) -> Any:
        """Return the counts of changes of the arrays that the gradients need."""
        kept = []
        for edge, needs in zip(edges, self.keeps, strict=False):
            if edge is not None:
                for place in needs:
                    x = out if place == "o" else inputs[int(place)] if place != "-" else None
                    if isinstance(x, Tensor):
                        kept.append((x._versions, x._versions[0]))
        return tuple(kept) if any(self.keeps) else None

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Move inputs that were given by name to their places."""
        for name in self.names[len(args) :]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        return args

    def _promoted(self, inputs: Any) -> Any:
        """Return the inputs in the dtype of the operation; casts have gradients."""
        first = inputs[0]
        if isinstance(first, Tensor) and first._array.dtype in FLOATS:
            kind = first._array.dtype
            for x in inputs:
                if isinstance(x, Tensor):
                    if x._array.dtype is not kind and x._array.dtype != kind:
                        break
                elif x.__class__ is not float and x.__class__ is not int:
                    break
            else:
                return inputs
        inputs = [as_operand(self, x) for x in inputs]
        wanted = result_dtype(*inputs)
        if self.promotes == "float" and not wanted.is_floating_point:
            wanted = get_default_dtype()
        kind = wanted.numpy
        return [
            (x if x._array.dtype == kind else x.to(wanted)) if isinstance(x, Tensor) else kind.type(x)
            for x in inputs
        ]


def _of_any(op: Operation) -> Callable[..., Any]:
    """Return the call of an operation on inputs of any kind."""
    rule, count, many, label, results = op.rule, op.inputs, op.many, op.label, op.results
    promotes, keeps, labelled = op.promotes, bool(op.keeps), op.label.__class__ is str

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = op._in_order(args, kwargs)
        inputs: Any = args[0] if many else args[:count]
        options = args[1:] if many else args[count:]
        if promotes:
            inputs = op._promoted(inputs)
        arrays: list[Any] = []
        edges: list[Any] = []
        noted = False
        for x in inputs:
            edge: Any = None
            if isinstance(x, Tensor):
                arrays.append(x._array)
                edge = x._node if x._base is None else edge_of(x)
                if edge is None and x._leaf_requires_grad:
                    edge = x
                noted = noted or edge is not None
            else:
                arrays.append(x)
            edges.append(edge)
        try:
            result, backs = rule(arrays, *options, **kwargs) if many else rule(*arrays, *options, **kwargs)
        except (ValueError, IndexError, TypeError, RuntimeError, AttributeError) as error:
            raise explained(op, arrays, error) from None
        found = out = wrap(result if results is None else result[0])
        if results is not None:
            found = results(out, *map(wrap, result[1:]))
        if noted and backs is not None and mode.enabled:
            kept = op._kept(edges, inputs, out) if keeps else None
            if backs.__class__ is tuple:  # what no gradient needs is not held
                backs = tuple([b if e is not None else None for b, e in zip(backs, edges, strict=False)])
            name = label if labelled else label(*arrays, *options, **kwargs)
            out._node = Node(name, tuple(edges), backs, kept)
        return found

    return call


def _of_one(op: Operation, general: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of an operation with one input: a function of its numbers, or a view."""
    rule, label, promotes, view = op.rule, op.label, op.promotes, op.view
    needs = op.keeps[0] if op.keeps else ""
    keeps_input, keeps_result = "0" in needs, "o" in needs
    labelled = label.__class__ is str

    def call(input: Any, *options: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Tensor):
            raise TypeError(f"{op.name}(): argument 'input' must be Tensor, not {type(input).__name__}")
        array = input._array
        if promotes and array.dtype is not FLOAT32 and array.dtype is not FLOAT64:
            return general(input, *options, **kwargs)
        try:
            result, backs = rule(array, *options, **kwargs) if options or kwargs else rule(array)
            if view:
                replay = result
                result = replay(array)
        except (ValueError, IndexError, TypeError, RuntimeError) as error:
            raise explained(op, [array], error) from None
        out = new(Tensor)
        out._array = result if result.__class__ is np.ndarray else np.asarray(result)
        out._versions = [0]
        if view:
            share(out, input, replay)
        if backs is not None and mode.enabled:
            edge = input._node if input._base is None else edge_of(input)
            if edge is None and input._leaf_requires_grad:
                edge = input
            if edge is not None:
                node = out._node = new(Node)
                node.label = label if labelled else label(array, *options, **kwargs)
                node.inputs, node.backs, node.retained, node.number = (edge,), backs, None, next_number()
                node.kept = None
                if keeps_input or keeps_result:
                    versions = input._versions if keeps_input else out._versions
                    node.kept = ((versions, versions[0]),)
                elif needs:
                    node.kept = ()
        return out

    return call


def _of_two(op: Operation, general: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of an operation on two tensors of one dtype, or a tensor and a number."""
    rule, label = op.rule, op.label
    keeps = [*op.keeps, "", ""][:2]
    labelled = label.__class__ is str

    def call(input: Any = MISSING, other: Any = MISSING, *options: Any, **kwargs: Any) -> Any:
        if options or kwargs or other is MISSING or not isinstance(input, Tensor):
            given = [x for x in (input, other) if x is not MISSING]
            return general(*given, *options, **kwargs)
        x, y = input._array, other
        kind = x.dtype
        if kind is not FLOAT32 and kind is not FLOAT64:
            return general(input, other)
        tensor = isinstance(other, Tensor)
        if tensor:
            y = other._array
            if y.dtype is not kind:
                return general(input, other)
        elif y.__class__ is not float and y.__class__ is not int:
            return general(input, other)
        try:
            result, backs = rule(x, y)
        except (ValueError, RuntimeError) as error:
            raise explained(op, [x, y], error) from None
        out = new(Tensor)
        out._array = result if result.__class__ is np.ndarray else np.asarray(result)
        out._versions = [0]
        if backs is not None and mode.enabled:
            left: Any = input._node if input._base is None else edge_of(input)
            if left is None and input._leaf_requires_grad:
                left = input
            right: Any = None
            if tensor:
                right = other._node if other._base is None else edge_of(other)
                if right is None and other._leaf_requires_grad:
                    right = other
            if left is not None or right is not None:
                if left is None or right is None:  # what no gradient needs is not held
                    backs = (backs[0], None) if right is None else (None, backs[1])
                node = out._node = new(Node)
                node.label = label if labelled else label(x, y)
                node.inputs, node.backs, node.retained, node.number = (
                    (left, right),
                    backs,
                    None,
                    next_number(),
                )
                needs = (keeps[0] if left is not None else "") + (keeps[1] if right is not None else "")
                node.kept = kept_arrays(needs, input, other if tensor else None, out) if needs else None
        return out

    return call


def kept_arrays(needs: str, input: Tensor, other: Tensor | None, out: Tensor) -> Any:
    """Return the counts of changes of what gradients need: 0 the input, 1 the other one, o the result."""
    kept = []
    if "0" in needs:
        kept.append((input._versions, input._versions[0]))
    if "1" in needs and other is not None:
        kept.append((other._versions, other._versions[0]))
    if "o" in needs:
        kept.append((out._versions, out._versions[0]))
    return tuple(kept)


def _floats() -> set[np.dtype[Any]]:
    found = {np.dtype(kind) for kind in ("float16", "float32", "float64")}
    with contextlib.suppress(ImportError):
        found.add(DTYPES["bfloat16"].numpy)
    return found


FLOATS = _floats()


def operation(places: str, inputs: int = 1, **settings: Any) -> Callable[[Rule], Operation]:
    """Make a rule an operation of the table."""

    def made(rule: Rule) -> Operation:
        found = TABLE[rule.__name__.lstrip("_")] = Operation(rule, places, inputs, **settings)
        return found

    return made


class Composite:
    """An operation that is made of others.

    Attributes
    ----------
    places : str
        As of an :class:`Operation`.
    """

    def __init__(self, function: Callable[..., Any], places: str) -> None:
        self.function, self.places, self.name = function, places, function.__name__.lstrip("_")
        self.keeps = ("0",)  # one of its operations may need its input

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self.function(*args, **kwargs)


def composite(places: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of tensors an operation of the table."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE[function.__name__.lstrip("_")] = Composite(function, places)
        return function

    return made


def as_operand(op: Any, x: Any) -> Any:
    """Return a tensor or a number; NumPy's arrays become tensors."""
    if isinstance(x, Tensor | bool | int | float):
        return x
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray):
        return wrap(x)
    raise TypeError(f"{op.name}(): an operand must be a Tensor or a number, not {type(x).__name__}")


def share(out: Tensor, of: Tensor, replay: Callable[[Array], Array]) -> None:
    """Make a tensor a view of another's memory, if its array is one."""
    array = out._array
    if array is of._array:
        out._array = array.view()
    elif not of._array.flags.c_contiguous and not np.may_share_memory(
        array, of._array
    ):  # reshape() has copied
        return
    out._versions = of._versions
    if not array.flags.writeable and of._array.flags.writeable:  # an expanded axis: it cannot be written to
        return
    if of._base is None:
        out._base, out._replay, out._origin = of, replay, of._node
    else:
        before = of._replay
        out._base, out._replay = of._base, lambda array: replay(before(array))
        edge_of(of)
        out._origin = of._origin


def write(x: Tensor, value: Tensor, at: Any = ...) -> Tensor:
    """Write a tensor's value into another's memory, or into a part of it, and note it in the graph."""
    check_writable(x)
    node = value._node
    if node is None and value._leaf_requires_grad and mode.enabled:
        node = Node("Copy", (value,), (lambda dy: dy,))
    np.copyto(x._array, value._array, casting="same_kind")
    x._versions[0] += 1
    if mode.enabled and (node is not None or edge_of(x) is not None):
        set_history(x, node or Node("Zero", (edge_of(x),), (np.zeros_like,)))
    return x


def in_place(op: Operation | Composite) -> Callable[..., Tensor]:
    """Return the operation that writes its result into the first input."""
    needs_old = any("0" in needs for needs in op.keeps)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_writable(self)
        old = self
        if (
            needs_old
            and mode.enabled
            and any(x.requires_grad for x in (self, *args) if isinstance(x, Tensor))
        ):
            old = wrap(self._array.copy())  # the gradients need the numbers that are written over
            old._node = edge_of(self)
        result = op(old, *args, **kwargs)
        if result._array.shape != self._array.shape:
            raise RuntimeError(
                f"output with shape {list(self.shape)} doesn't match the broadcast shape {list(result.shape)}"
            )
        if result._array.dtype != self._array.dtype:
            if dtype_of(result._array).rank > self.dtype.rank:
                raise RuntimeError(
                    f"result type {result.dtype} can't be cast to the desired output type {self.dtype}"
                )
            result = result.to(self.dtype)
        return write(self, result)

    method.__name__ = method.__qualname__ = f"{op.name}_"
    method.__doc__ = f"Write the result of :func:`{op.name}` into the tensor, and return the tensor."
    return method


def explained(op: Operation, arrays: list[Any], error: Exception) -> Exception:
    """Return the error of a rule in PyTorch's class, with the name of the operation and the shapes."""
    shapes = [list(x.shape) for x in arrays if isinstance(x, np.ndarray)]
    if isinstance(error, np.exceptions.AxisError):
        return IndexError(f"{op.name}(): {error}; the tensor has the shape {', '.join(map(str, shapes))}")
    if isinstance(error, NotImplementedError):
        return NotImplementedError(f"{op.name}(): {error}")
    if isinstance(error, TypeError | AttributeError):
        takes = f"{op.name}({', '.join(inspect.signature(op.rule).parameters)})"
        return TypeError(f"{op.name}(): {error}; it takes {takes}")
    kind = IndexError if isinstance(error, IndexError) else RuntimeError
    return kind(f"{op.name}(): {error} (shapes {', '.join(map(str, shapes))})")


class ValuesIndices(NamedTuple):
    """The values that an operation chose, and where they are."""

    values: Tensor
    indices: Tensor


def fit(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which an array of a shape was broadcast."""
    if gradient.shape == shape:
        return gradient
    if gradient.ndim > len(shape):
        gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(gradient.shape) if n != 1 and shape[i] == 1)
    return gradient.sum(axis=axes, keepdims=True) if axes else gradient


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of an array, or of a number."""
    return x.shape if x.__class__ is np.ndarray else ()


quiet = np.errstate(all="ignore")  # a decorator of rules in which infinities and NaN are no fault
