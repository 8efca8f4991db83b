"""Tensors: an array, and the graph of the operations that made it, through which gradients flow back.

A :class:`Node` is one operation of the graph. An edge is where a gradient goes: the node that made an input, or the
input itself if it is a leaf that requires a gradient, or None. A view shares its base's memory and its count of
changes; a write into memory gives the base a new node, and its views make theirs anew when they are next used.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from selfattn._check import Array, as_array
from selfattn.tape import printing
from selfattn.tape.dtypes import Size, as_dtype, device, dtype, dtype_of, get_default_dtype
from selfattn.tape.missing import missing

Back: TypeAlias = Callable[[Array], Any]
CPU = device()


class _Mode(threading.local):
    enabled = True  # whether operations are noted in the graph


mode = _Mode()
next_number = itertools.count().__next__


class Node:
    """An operation of the graph.

    Attributes
    ----------
    inputs : tuple of (Node, Tensor or None)
        Where the gradients of the inputs go.
    backs : callable, or tuple of (callable or None)
        From the gradient of the result to those of all inputs, or one function for each input, which is None if no
        gradient goes there.
    kept : tuple of (list, int), or None
        The counts of changes of the arrays that ``backs`` need, and what they were. None: it holds no arrays, and is
        not freed.
    number : int
        Larger than those of all nodes before it.
    """

    __slots__ = ("backs", "inputs", "kept", "label", "number", "retained")

    def __init__(self, label: str, inputs: tuple[Any, ...], backs: Any, kept: Any = None) -> None:
        self.label = label
        self.inputs = inputs
        self.backs = backs
        self.kept = kept
        self.number = next_number()
        self.retained: Tensor | None = None

    def name(self) -> str:
        """Return PyTorch's name of the node, such as MulBackward0."""
        return f"{self.label}Backward0" if not self.label[-1].isdigit() else self.label

    def __repr__(self) -> str:
        return f"<{self.name()} object at {id(self):#x}>"


class Tensor:
    """An array of numbers that knows how it was computed, if it requires a gradient.

    Parameters
    ----------
    *data
        One list or array, which becomes a tensor of the default dtype, or sizes, for a tensor that is not filled.

    Attributes
    ----------
    grad : Tensor or None
        The sum of the gradients that all calls of :meth:`backward` brought, of a leaf.

    Examples
    --------
    >>> import selfattn.tape as torch
    >>> x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    tensor([2., 4., 6.])
    """

    def __getattr__(self, name: str) -> Any:
        raise missing("Tensor", name)

    if TYPE_CHECKING:  # the table of operations gives tensors their methods and operators

        def _operator(self, other: Any) -> Any: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
        __pow__ = __matmul__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __eq__ = __ne__ = _operator

        def __neg__(self) -> Any: ...

        def __invert__(self) -> Any: ...

        def __iter__(self) -> Iterator[Tensor]: ...

        def __setitem__(self, key: Any, value: Any) -> None: ...

    _array: Array
    _versions: list[int]  # how often the memory has been written to; views share it
    _node: Node | None = None
    _leaf_requires_grad: bool = False
    _grad: Tensor | None = None
    _base: Tensor | None = None  # of a view: the tensor that owns the memory
    _replay: Callable[[Array], Array]  # of a view: from the base's array to the view
    _origin: Node | None = None  # of a view: the base's node when this view's node was made
    __array_priority__ = 1000  # NumPy's operators leave the operation to the tensor

    def __new__(cls, *data: Any, **options: Any) -> Self:  # noqa: D102
        default = get_default_dtype().numpy
        if len(data) == 1 and not isinstance(data[0], int):
            array = np.array(values_of(data[0]), default)
        else:
            array = np.zeros(data, default)
        return wrap(array, cls)

    # ------------------------------------------------------------------------------------------------- properties

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to this tensor."""
        return self._leaf_requires_grad or self.grad_fn is not None

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self.grad_fn is not None:
            if not value:
                raise RuntimeError(
                    "requires_grad can be changed of leaves alone; to use a computed tensor as a constant, take "
                    "tensor.detach()"
                )
            return
        if value and not self.is_floating_point():
            raise RuntimeError(f"only tensors of floats can require gradients, not of {self.dtype}")
        self._leaf_requires_grad = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether gradients flow to this leaf, and return it."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad_fn(self) -> Node | None:
        """The node that made this tensor; None for a leaf."""
        edge = edge_of(self)
        return edge if edge.__class__ is Node else None

    @property
    def is_leaf(self) -> bool:
        """Whether no operation of the graph made this tensor."""
        return self.grad_fn is None

    @property
    def grad(self) -> Tensor | None:
        """The gradient that has been accumulated, of a leaf."""
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            if not isinstance(value, Tensor):
                raise TypeError(f"grad must be a Tensor or None, not {type(value).__name__}")
            if value.shape != self.shape:
                raise RuntimeError(f"grad has shape {list(value.shape)}, the tensor {list(self.shape)}")
        self._grad = value

    @property
    def data(self) -> Tensor:
        """A tensor of the same memory that the graph knows nothing of."""
        return wrap(self._array)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._array = as_tensor_array(value)
        self._versions[0] += 1

    @property
    def shape(self) -> Size:
        """The sizes of the axes."""
        return Size(self._array.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._array.ndim

    @property
    def dtype(self) -> dtype:
        """The kind of the numbers."""
        return dtype_of(self._array)

    @property
    def device(self) -> device:
        """The CPU."""
        return CPU

    @property
    def is_cuda(self) -> bool:
        """False: there is the CPU alone."""
        return False

    @property
    def is_sparse(self) -> bool:
        """False: all numbers are there."""
        return False

    @property
    def itemsize(self) -> int:
        """The bytes of a number."""
        return self._array.itemsize

    @property
    def _version(self) -> int:
        return self._versions[0]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis."""
        return self.shape if dim is None else self._array.shape[dim]

    def dim(self) -> int:
        """Return the number of axes."""
        return self._array.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return self._array.size

    nelement = numel

    def element_size(self) -> int:
        """Return the bytes of a number."""
        return self._array.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """Return the steps in memory of all axes, or of one, in elements."""
        steps = tuple(step // self._array.itemsize for step in self._array.strides)
        return steps if dim is None else steps[dim]

    def data_ptr(self) -> int:
        """Return the address of the first number."""
        return int(self._array.ctypes.data)

    def is_contiguous(self) -> bool:
        """Return whether the numbers follow each other in memory."""
        return self._array.flags.c_contiguous

    def is_floating_point(self) -> bool:
        """Return whether the numbers are floats."""
        return self.dtype.is_floating_point

    # ------------------------------------------------------------------------------------------------------ values

    def numpy(self, *, force: bool = False) -> Array:
        """Return the array, which shares the tensor's memory."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype, copy=copy)

    def item(self) -> Any:
        """Return the only element as a number of Python."""
        if self._array.size != 1:
            raise RuntimeError(f"a Tensor with {self._array.size} elements cannot be converted to Scalar")
        return self._array.item()

    def tolist(self) -> Any:
        """Return the numbers as nested lists."""
        return self._array.tolist()

    def __bool__(self) -> bool:
        if self._array.size != 1:
            many = "no values" if self._array.size == 0 else "more than one value"
            raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
        return bool(self._array.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        if self._array.dtype.kind not in "iub" or self._array.size != 1:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self._array.item())

    def __len__(self) -> int:
        if self._array.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return len(self._array)

    def __contains__(self, value: Any) -> bool:
        return bool((self._array == (value._array if isinstance(value, Tensor) else value)).any())

    def __hash__(self) -> int:
        return id(self)

    def _suffix(self) -> str:
        node = self.grad_fn
        return f", grad_fn=<{node.name()}>" if node else ", requires_grad=True" * self.requires_grad

    def __repr__(self) -> str:
        return printing.format_tensor(self._array, self.dtype.name, suffix=self._suffix())

    def __format__(self, spec: str) -> str:
        return printing.format_number(self._array, self.dtype.name, spec, suffix=self._suffix())

    # ------------------------------------------------------------------------------------------------------- graph

    def backward(self, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to the ``grad`` of every leaf that it was computed from.

        Parameters
        ----------
        gradient : Tensor, optional
            In the shape of the tensor; 1 for a tensor of one element.
        retain_graph : bool, default False
            Keep the arrays of the graph, so that ``backward`` can be called again.

        Raises
        ------
        RuntimeError
            The tensor does not require a gradient, or has more than one element and no ``gradient`` is given; the
            graph was freed by an earlier call; or an array that a gradient needs has been changed.
        """
        edge = edge_of(self)
        if edge is None:
            raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
        run_backward(edge, root_gradient(self, gradient), retain_graph, accumulate)

    def retain_grad(self) -> None:
        """Keep the gradient of this tensor as its ``grad`` too, if it is no leaf."""
        edge = edge_of(self)
        if edge is None:
            raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
        if edge.__class__ is Node:
            edge.retained = self

    def detach(self) -> Tensor:
        """Return a tensor of the same memory that is a constant for the graph."""
        found = wrap(self._array)
        found._versions = self._versions
        return found

    def detach_(self) -> Self:
        """Make this tensor a leaf that requires no gradient."""
        self._node, self._leaf_requires_grad, self._base = None, False, None
        return self

    def cpu(self) -> Self:
        """Return the tensor itself."""
        return self

    def pin_memory(self) -> Self:
        """Return the tensor itself."""
        return self

    def is_pinned(self) -> bool:
        """Return False."""
        return False

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse: there is the CPU alone."""
        raise RuntimeError("selfattn.tape computes on the CPU alone; torch.cuda.is_available() is False")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError(
                "only leaves of the graph can be copied by deepcopy; take tensor.detach().clone()"
            )
        made = wrap(self._array.copy(), type(self))
        made._leaf_requires_grad = self._leaf_requires_grad
        made._grad = None if self._grad is None else wrap(self._grad._array.copy())
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.is_leaf:
            raise RuntimeError("only leaves of the graph can be pickled; take tensor.detach()")
        return _unpickled, (type(self), self._array, self._leaf_requires_grad)


class Parameter(Tensor):
    """A tensor that a module registers when it is assigned to one of its attributes; it is trained and saved.

    Parameters
    ----------
    data : Tensor
        Its memory is shared.
    requires_grad : bool, default True
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Self:  # noqa: D102
        array = np.zeros(0, get_default_dtype().numpy) if data is None else as_tensor_array(data)
        made = wrap(array, cls)
        made.requires_grad = requires_grad
        return made

    def __repr__(self) -> str:
        return printing.format_tensor(self._array, self.dtype.name, suffix=self._suffix(), parameter=True)

    def __format__(self, spec: str) -> str:
        return printing.format_number(
            self._array, self.dtype.name, spec, suffix=self._suffix(), parameter=True
        )


def wrap(array: Any, cls: Any = Tensor) -> Any:
    """Return a leaf over an array, without a check."""
    made = object.__new__(cls)
    made._array = array if array.__class__ is np.ndarray else np.asarray(array)
    made._versions = [0]
    return made


def _unpickled(cls: Any, array: Array, requires_grad: bool) -> Tensor:
    made: Tensor = wrap(array, cls)
    made._leaf_requires_grad = requires_grad
    return made


def values_of(data: Any) -> Any:
    """Return nested lists with the numbers of tensors in place of the tensors."""
    if isinstance(data, Tensor):
        return data._array
    if isinstance(data, list | tuple):
        return [values_of(each) for each in data]
    return data


def as_tensor_array(data: Any) -> Array:
    """Return the array of a tensor, or of what NumPy can read."""
    if isinstance(data, Tensor):
        return data._array
    array = as_array("data", data)
    dtype_of(array)
    return array


# ----------------------------------------------------------------------------------------------------------- the graph


def edge_of(x: Tensor) -> Node | Tensor | None:
    """Return where a gradient of the tensor goes."""
    base = x._base
    if base is not None and x._origin is not (now := edge_of(base)) and now.__class__ is Node:
        # The memory has been written to: the gradient goes through the base's new node.
        replay, layout = x._replay, base._array
        x._node = Node("AsStrided", (now,), (lambda dy: scattered(dy, replay, layout),))
        x._origin = now
    return x._node or (x if x._leaf_requires_grad else None)


def scattered(dy: Array, replay: Callable[[Array], Array], layout: Array) -> Array:
    """Return zeros in the layout of a base, with dy in the place of a view."""
    whole = np.empty_like(layout, dy.dtype)
    whole[...] = 0
    replay(whole)[...] = dy
    return whole


def set_history(x: Tensor, node: Node) -> None:
    """Give a tensor whose memory has been written to the node of its new value."""
    base = x._base
    if base is None:
        x._node = node
        return
    replay, layout, old = x._replay, base._array, edge_of(base)

    def rest(dy: Array) -> Array:
        kept = np.empty_like(layout, dy.dtype)
        kept[...] = dy
        replay(kept)[...] = 0
        return kept

    backs = None if old is None else rest, lambda dy: replay(np.asarray(dy))
    base._node = Node("CopySlices", (old, node), backs)


def check_writable(x: Tensor) -> None:
    """Refuse to write into a leaf that requires a gradient, or into memory that several elements share."""
    if mode.enabled:
        if x._leaf_requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if x._base is not None and x._base._leaf_requires_grad:
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place operation."
            )
    if not x._array.flags.writeable:
        raise RuntimeError(
            "the tensor cannot be written to: several of its elements are one number in memory, as after expand(), or "
            "its array is read-only; take tensor.clone() first"
        )


def root_gradient(y: Tensor, gradient: Any) -> Array:
    """Return the gradient at which :meth:`Tensor.backward` starts."""
    if gradient is None:
        if y._array.size != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return np.ones(y._array.shape, y._array.dtype)
    array = as_tensor_array(gradient)
    if array.shape != y._array.shape:
        raise RuntimeError(f"gradient has shape {list(array.shape)}, the tensor {list(y._array.shape)}")
    return array.astype(y._array.dtype)


def accumulate(leaf: Tensor, gradient: Array, own: bool) -> None:
    """Add a gradient to a leaf's; ``own`` is True for an array that nothing else holds."""
    if leaf._grad is None:
        leaf._grad = wrap(gradient if own else np.array(gradient, leaf._array.dtype))
    else:
        leaf._grad._array += gradient
        leaf._grad._versions[0] += 1


def run_backward(
    root: Node | Tensor, dy: Array, retain_graph: bool, sink: Callable[[Tensor, Array, bool], None]
) -> None:
    """Send a gradient back from an edge; each leaf's goes to ``sink``."""
    if isinstance(root, Tensor):
        sink(root, dy, False)
        return
    order, seen, stack = [], {root}, [root]
    while stack:
        node: Any = stack.pop()
        order.append(node)
        for edge in node.inputs:
            if edge.__class__ is Node and edge not in seen:
                seen.add(edge)
                stack.append(edge)
    order.sort(key=attrgetter("number"), reverse=True)  # a node is later than its inputs
    found: dict[Any, Array] = {root: dy}
    with np.errstate(all="ignore"):
        for node in order:
            dy = found.pop(node, None)  # type: ignore[arg-type]
            if dy is None:
                continue
            if node.retained is not None:
                node.retained._grad = wrap(np.array(dy))
            if node.kept is not None:
                _check_kept(node)
            backs, inputs = node.backs, node.inputs
            each = backs.__class__ is tuple
            grads = [None if back is None else back(dy) for back in backs] if each else backs(dy)
            for edge, gradient in zip(inputs, grads, strict=False):
                if edge is None or gradient is None:
                    continue
                if edge.__class__ is Node:
                    before = found.get(edge)
                    found[edge] = gradient if before is None else before + gradient
                else:
                    own = gradient is not dy and getattr(gradient, "base", gradient) is None
                    sink(edge, gradient, own)
            if node.kept is not None and not retain_graph:
                node.backs = node.kept = FREED


FREED: Any = ("freed",)


def _check_kept(node: Node) -> None:
    if node.kept is FREED:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed). Specify retain_graph=True if you need to backward through the graph a second time."
        )
    for versions, number in node.kept:
        if versions[0] != number:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"array that {node.name()} needs has been written to since. It is at version {versions[0]}; expected "
                f"version {number} instead."
            )


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of tensors with respect to others, as ``torch.autograd.grad`` without ``create_graph``.

    Parameters
    ----------
    outputs, inputs : Tensor, or sequence of Tensor
        The inputs are leaves, or tensors on the way from leaves to the outputs.
    grad_outputs : Tensor, or sequence of Tensor, optional
        The gradients of the outputs; 1 for an output of one element.
    retain_graph : bool, default False
    allow_unused : bool, default False
        Whether the gradient of an input on which no output depends is None and no error.

    Returns
    -------
    tuple of Tensor
    """
    ys, xs = ([each] if isinstance(each, Tensor) else list(each) for each in (outputs, inputs))
    dys = [grad_outputs] if grad_outputs is None or isinstance(grad_outputs, Tensor) else list(grad_outputs)
    found: dict[int, Array] = {}

    def collect(leaf: Tensor, gradient: Array, own: bool) -> None:
        found[id(leaf)] = found[id(leaf)] + gradient if id(leaf) in found else np.asarray(gradient)

    edges = [edge_of(x) for x in xs]
    kept = {
        id(edge): (edge.retained, edge.retained and edge.retained._grad)
        for edge in edges
        if isinstance(edge, Node)
    }
    try:
        for edge in edges:
            if edge.__class__ is Node:
                edge.retained = wrap(np.zeros(0))
        for n, y in enumerate(ys):
            edge = edge_of(y)
            if edge is None:
                raise RuntimeError(
                    f"element {n} of tensors does not require grad and does not have a grad_fn"
                )
            last = n == len(ys) - 1
            run_backward(
                edge, root_gradient(y, dys[n] if n < len(dys) else None), retain_graph or not last, collect
            )
        results: list[Tensor | None] = []
        for n, (x, edge) in enumerate(zip(xs, edges, strict=True)):
            got = edge.retained._grad if isinstance(edge, Node) and edge.retained is not None else None
            if got is None and id(x) in found:
                got = wrap(found[id(x)])
            if got is None and not allow_unused:
                raise RuntimeError(
                    f"inputs[{n}] was not used to compute the outputs, or does not require a gradient; "
                    "allow_unused=True gives None for it"
                )
            results.append(got)
    finally:
        for edge in edges:
            if isinstance(edge, Node):
                edge.retained = kept[id(edge)][0]
    return tuple(results)


# --------------------------------------------------------------------------------------------------------------- modes


class set_grad_enabled:  # noqa: N801 # PyTorch's name
    """Note operations in the graph, or do not; at once, and until the end of a ``with``."""

    def __init__(self, mode_: bool) -> None:
        self._before = mode.enabled
        self._wanted = mode.enabled = bool(mode_)

    def __enter__(self) -> None:
        mode.enabled = self._wanted

    def __exit__(self, *error: Any) -> None:
        mode.enabled = self._before


class _Within:
    """A mode as a context, or as a decorator of a function or a generator."""

    enabled: bool

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __new__(cls, function: Any = None) -> Any:
        return object.__new__(cls) if function is None else cls()(function)

    def __enter__(self) -> None:
        self._before.append(mode.enabled)
        mode.enabled = self.enabled

    def __exit__(self, *error: Any) -> None:
        mode.enabled = self._before.pop()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with type(self)():
                return function(*args, **kwargs)

        return within


class no_grad(_Within):  # noqa: N801 # PyTorch's name
    """Compute without noting operations in the graph: a context, or a decorator."""

    enabled = False


class inference_mode(_Within):  # noqa: N801 # PyTorch's name
    """As :class:`no_grad`."""

    enabled = False


class enable_grad(_Within):  # noqa: N801 # PyTorch's name
    """Note operations in the graph again, within ``no_grad``."""

    enabled = True


def is_grad_enabled() -> bool:
    """Return whether operations are noted in the graph."""
    return mode.enabled


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of some values."""
    return (x for x in values if isinstance(x, Tensor))


__all__ = ["Node", "Parameter", "Tensor", "as_dtype", "grad"]
