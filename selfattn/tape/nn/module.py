"""The base of modules that are written with a ``forward``, and the containers of modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from selfattn import nn as layers
from selfattn._check import Array, as_array
from selfattn.nn.module import IncompatibleKeys
from selfattn.steps import attention_steps
from selfattn.tape.dtypes import as_dtype, dtype
from selfattn.tape.operations.layers import attention_calls
from selfattn.tape.tensors import Parameter, Tensor, as_tensor_array, enable_grad, grad, no_grad, wrap

# From layers of other packages to modules, by the name of the file that defines their class.
ADOPTED: dict[str, Callable[[Any], Any]] = {}


class _IncompatibleKeys(IncompatibleKeys):
    """The names that differ, shown as PyTorch shows them."""

    def __repr__(self) -> str:
        return super().__repr__() if any(self) else "<All keys matched successfully>"


class Module(layers.Module):
    """A module: its parameters, its submodules, and ``forward``, whose gradients come from the tape.

    A module with a ``forward`` is also a layer of :mod:`selfattn.nn`: its :meth:`vjp` takes and returns arrays, so
    ``selfattn.training.fit`` trains it.

    Examples
    --------
    >>> import selfattn.tape as torch
    >>> from selfattn.tape import nn
    >>> class Scale(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.factor = nn.Parameter(torch.ones(width))
    ...
    ...     def forward(self, x):
    ...         return x * self.factor
    >>> model = Scale(2)
    >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
    >>> model.factor.grad
    tensor([1., 2.])
    """

    _buffer_names: Mapping[str, bool] = {}  # whether each is in the state dict

    # ------------------------------------------------------------------------------------- parameters, buffers, modules

    def register_parameter(self, name: str, param: Any) -> None:
        """Make a Parameter an attribute that is trained and saved; None means that the module lacks it."""
        if not isinstance(name, str) or "." in name or not name:
            raise KeyError(f"a parameter's name must be a str without dots, not {name!r}")
        if param is not None and not isinstance(param, Parameter):
            raise TypeError(
                f"cannot assign {type(param).__name__} as parameter {name!r}: a Parameter or None is needed"
            )
        if name not in self._parameter_names:
            self._parameter_names = (*self._parameter_names, name)
        self.__dict__[name] = param

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Make a tensor an attribute that is saved, if it is persistent, but not trained."""
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                f"cannot assign {type(tensor).__name__} as buffer {name!r}: a Tensor or None is needed"
            )
        if hasattr(self, name) and name not in self._buffer_names:
            raise KeyError(f"attribute '{name}' already exists")
        self.__dict__["_buffer_names"] = {**self._buffer_names, name: persistent}
        self.__dict__[name] = tensor

    def register_module(self, name: str, module: Module | None) -> None:
        """Make a module an attribute."""
        setattr(self, name, module)

    add_module = register_module

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter):
            self.register_parameter(name, value)
        elif name in self._parameter_names and value is not None:
            raise TypeError(
                f"cannot assign {type(value).__name__} as parameter {name!r}: a Parameter or None is needed"
            )
        elif name in self._buffer_names and not isinstance(value, Tensor | None):
            raise TypeError(
                f"cannot assign {type(value).__name__} as buffer {name!r}: a Tensor or None is needed"
            )
        else:
            object.__setattr__(self, name, _adopted(value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_") and name.endswith("hook"):
            raise AttributeError(f"selfattn.tape has no hooks: {name} is not there; the guide lists what is")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __delattr__(self, name: str) -> None:
        self._parameter_names = tuple(each for each in self._parameter_names if each != name)
        self.__dict__["_buffer_names"] = {
            each: kept for each, kept in self._buffer_names.items() if each != name
        }
        object.__delattr__(self, name)

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """Yield the direct submodules with their names, each once."""
        seen: set[int] = set()
        for name, module in self._children():
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def _children(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in vars(self).items() if isinstance(value, layers.Module))

    def children(self) -> Iterator[Any]:
        """Yield the direct submodules."""
        return (module for _, module in self.named_children())

    def named_modules(self, memo: set[Any] | None = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield this module and all its submodules with their names, each once."""
        seen = set() if memo is None else memo
        if self not in seen:
            seen.add(self)
            yield prefix, self
            for name, child in self._children():
                yield from child.named_modules(seen, f"{prefix}.{name}" if prefix else name)

    def _named(
        self, prefix: str, own: Callable[[Module], Iterable[tuple[str, Any]]], recurse: bool
    ) -> Iterator[Any]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix=prefix) if recurse else [(prefix, self)]:
            for name, tensor in own(module):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{name}" if path else name, tensor

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters with their names, each once."""
        return self._named(prefix, lambda m: [(n, m.__dict__[n]) for n in m._parameter_names], recurse)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:  # type: ignore[override]
        """Yield the parameters, each once."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with their names."""
        return self._named(prefix, lambda m: [(n, m.__dict__[n]) for n in m._buffer_names], recurse)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the buffers."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def get_parameter(self, target: str) -> Parameter:
        """Return the parameter of a name such as ``"block.weight"``."""
        return dict(self.named_parameters())[target]

    def get_submodule(self, target: str) -> Any:
        """Return the submodule of a name such as ``"blocks.0"``."""
        return dict(self.named_modules())[target]

    def _own_parameters(self) -> Iterator[tuple[str, Array]]:
        for name in self._parameter_names:
            if (parameter := self.__dict__[name]) is not None:
                yield name, parameter._array

    def apply(self, fn: Callable[[Any], Any]) -> Self:
        """Call a function of each submodule and then of this module."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    # --------------------------------------------------------------------------------------------------------- changes

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert all parameters and buffers of floats to a dtype, in place; the device is the CPU."""
        wanted = [each for each in (*args, *kwargs.values()) if isinstance(each, dtype)]
        for each in (*args, *kwargs.values()):
            if not isinstance(each, dtype | bool):
                wrap(np.zeros(0)).to(each)  # it must be the CPU
        for tensor in (*self.parameters(), *self.buffers()) if wanted else ():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(wanted[0])
        return self

    def float(self) -> Self:
        """Convert to float32."""
        return self.to(as_dtype("FloatTensor"))

    def double(self) -> Self:
        """Convert to float64."""
        return self.to(as_dtype("DoubleTensor"))

    def half(self) -> Self:
        """Convert to float16."""
        return self.to(as_dtype("HalfTensor"))

    def cpu(self) -> Self:
        """Return the module itself."""
        return self

    def cuda(self, device: Any = None) -> Self:
        """Refuse: there is the CPU alone."""
        raise RuntimeError("selfattn.tape computes on the CPU alone; torch.cuda.is_available() is False")

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the parameters are trained."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        forget_gradients(self.parameters(), set_to_none)

    # ----------------------------------------------------------------------------------------------------------- state

    def _state(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield what is saved, each tensor with all its names."""
        for name in self._parameter_names:
            if self.__dict__[name] is not None:
                yield prefix + name, self.__dict__[name]
        for name, persistent in self._buffer_names.items():
            if persistent and self.__dict__[name] is not None:
                yield prefix + name, self.__dict__[name]
        for name, child in self._children():
            yield from child._state(f"{prefix}{name}.")

    def state_dict(self) -> OrderedDict[str, Tensor]:  # type: ignore[override]
        """Return all parameters and persistent buffers by name, in their own memory."""
        return OrderedDict((name, tensor.detach()) for name, tensor in self._state())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copy tensors or arrays into the parameters and buffers. All is checked before anything is written.

        Parameters
        ----------
        state_dict : mapping of str to Tensor or array_like
            As from :meth:`state_dict`, of this module, of a layer of selfattn.nn or of PyTorch.
        strict : bool, default True
            False allows missing and unexpected names.
        assign : bool, default False
            Refused: the module keeps its own memory.

        Returns
        -------
        IncompatibleKeys

        Raises
        ------
        RuntimeError
            A shape differs, or, when ``strict``, a name is missing or unexpected. The message lists all of them.
        """
        if assign:
            raise NotImplementedError(
                "load_state_dict: assign=True is not here; numbers are copied into the module"
            )
        own = dict(self._state())
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        problems = []
        if strict and unexpected:
            problems.append(
                "Unexpected key(s) in state_dict: " + ", ".join(f'"{name}"' for name in unexpected) + "."
            )
        if strict and missing:
            problems.append(
                "Missing key(s) in state_dict: " + ", ".join(f'"{name}"' for name in missing) + "."
            )
        found = {}
        for name, tensor in own.items():
            if name in state_dict:
                given = state_dict[name]
                found[name] = (
                    given._array
                    if isinstance(given, Tensor)
                    else as_array(
                        name, getattr(given, "data", given) if hasattr(given, "requires_grad") else given
                    )
                )
                if found[name].shape != tensor._array.shape:
                    problems.append(
                        f"size mismatch for {name}: copying a param with shape torch.Size({list(found[name].shape)}) "
                        f"from checkpoint, the shape in current model is torch.Size({list(tensor._array.shape)})."
                    )
        if problems:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self).__name__}:\n\t" + "\n\t".join(problems)
            )
        for name, array in found.items():
            own[name]._array[...] = array.copy() if np.may_share_memory(array, own[name]._array) else array
            own[name]._versions[0] += 1
        return _IncompatibleKeys(missing, unexpected)

    # -------------------------------------------------------------------------------------------------- the array side

    def _from_arrays(self, *args: Any, **kwargs: Any) -> Any:
        with no_grad():
            y = self(*map(_as_input, args), **{name: _as_input(each) for name, each in kwargs.items()})
        return _as_output(y) if isinstance(y, Tensor) else y

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run ``forward`` on arrays, and return the output as an array with its pullback.

        Parameters
        ----------
        *args, **kwargs
            The arguments of ``forward``; arrays and lists of numbers become tensors.

        Returns
        -------
        y : ndarray
        pullback : callable
            ``dx, grads = pullback(dy)``, with a gradient for each argument of floats before ``grads``, which has the
            names of the parameters; ``grads`` alone if no argument is of floats.
        """
        inputs = [_as_input(each) for each in args]
        with enable_grad():
            y = self(*inputs, **{name: _as_input(each) for name, each in kwargs.items()})
        if not isinstance(y, Tensor):
            raise TypeError(
                f"forward must return one tensor, not {type(y).__name__}, for the gradients of arrays"
            )
        named = dict(self.named_parameters())
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        moved = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]

        def pullback(dy: Any) -> Any:
            given = np.asarray(dy, y._array.dtype)
            if not given.ndim:  # one number for all, as a task's pullback gets it
                given = np.full(y._array.shape, given)
            found = grad(y, [*moved, *trained.values()], wrap(given), retain_graph=True, allow_unused=True)
            arrays = [
                np.zeros_like(x._array) if d is None else d._array
                for x, d in zip([*moved, *trained.values()], found, strict=True)
            ]
            of_inputs, of_parameters = arrays[: len(moved)], arrays[len(moved) :]
            grads = dict(zip(trained, of_parameters, strict=True))
            return (*of_inputs, grads) if of_inputs else grads

        return _as_output(y), pullback

    def steps(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``forward``, and return the steps of each call of ``scaled_dot_product_attention`` in it.

        Parameters
        ----------
        *args, **kwargs
            The arguments of ``forward``.

        Returns
        -------
        list of selfattn.steps.AttentionSteps
        """
        calls: list[Any] = []
        attention_calls.append(calls)
        try:
            self(*map(_as_input, args), **kwargs)
        finally:
            attention_calls.remove(calls)
        return [attention_steps(q, k, v, attn_mask=mask, **options) for q, k, v, mask, options in calls]

    # ------------------------------------------------------------------------------------------------------------ repr

    def extra_repr(self) -> str:
        """Return the part of the repr in the brackets; subclasses may define it."""
        return ""

    def __repr__(self) -> str:
        extra = self.extra_repr()
        lines = extra.split("\n") if extra else []
        children = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in self._shown()]
        if not children:
            return f"{self._name()}({extra})" if len(lines) < 2 else _indented(self._name(), lines)
        return _indented(self._name(), lines + children)

    def _name(self) -> str:
        return type(self).__name__

    def _shown(self) -> Iterable[tuple[str, Any]]:
        return self.named_children()


def _indented(name: str, lines: list[str]) -> str:
    return f"{name}(\n  " + "\n  ".join(lines) + "\n)"


def _as_output(y: Tensor) -> Any:
    return y._array if y._array.ndim else y._array[()]


def _as_input(x: Any) -> Any:
    """Return an argument of the array side as a tensor; one of floats requires a gradient."""
    if isinstance(x, Tensor | str | None) or callable(x):
        return x
    if not isinstance(x, np.ndarray | list | tuple | np.generic):
        return x
    try:
        found: Tensor = wrap(as_tensor_array(x))
    except (TypeError, ValueError):
        return x
    if isinstance(x, list | tuple) and found._array.dtype == np.float64:
        found = found.to(as_dtype("FloatTensor"))
    if found.is_floating_point():
        found.requires_grad = True
    return found


def forget_gradients(parameters: Iterable[Tensor], set_to_none: bool) -> None:
    """Remove gradients, or fill them with zeros."""
    for parameter in parameters:
        if set_to_none or parameter._grad is None:
            parameter._grad = None
        else:
            parameter._grad._array[...] = 0
            parameter._grad._versions[0] += 1


# ----------------------------------------------------------------------------------------------------------- containers


class _Container(Module):
    """The base of containers: modules by name."""

    def __init__(self) -> None:
        self.__dict__["_modules"] = {}

    _modules: dict[str, Any]

    def _children(self) -> Iterator[tuple[str, Any]]:
        yield from self._modules.items()

    def add_module(self, name: str, module: Any) -> None:
        """Add a module."""
        self._modules[name] = _checked_module(self, module)

    register_module = add_module

    def __len__(self) -> int:
        return len(self._modules)

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        return modules[name] if name in modules else super().__getattr__(name)


def _adopted(value: Any) -> Any:
    adopt = ADOPTED.get(type(value).__module__)
    return value if adopt is None else adopt(value)


def _checked_module(owner: Module, module: Any) -> Any:
    module = _adopted(module)
    if not isinstance(module, layers.Module):
        raise TypeError(f"only modules can be in a {type(owner).__name__}, not {type(module).__name__}")
    return module


class ModuleList(_Container):
    """A list of modules.

    Parameters
    ----------
    modules : iterable of Module, optional
    """

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def append(self, module: Any) -> Self:
        """Add a module at the end."""
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[Any]) -> Self:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Any) -> None:
        """Add a module before the one at an index."""
        found = list(self)
        found.insert(index, _checked_module(self, module))
        self._replace(found)

    def pop(self, index: int = -1) -> Any:
        """Remove a module and return it."""
        found = list(self)
        module = found.pop(index)
        self._replace(found)
        return module

    def _replace(self, modules: Iterable[Any]) -> None:
        self.__dict__["_modules"] = {str(n): module for n, module in enumerate(modules)}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        found = list(self._modules.values())[index]
        return type(self)(found) if isinstance(index, slice) else found

    def __setitem__(self, index: int, module: Any) -> None:
        found = list(self)
        found[index] = _checked_module(self, module)
        self.__dict__["_modules"] = dict(zip(self._modules, found, strict=True))

    def __delitem__(self, index: Any) -> None:
        found = list(self)
        del found[index]
        self._replace(found)

    def __iadd__(self, modules: Iterable[Any]) -> Self:
        return self.extend(modules)

    def __add__(self, modules: Iterable[Any]) -> Self:
        return type(self)([*self, *modules])

    def _shown(self) -> Iterable[tuple[str, Any]]:
        """Show equal neighbours as one line, as PyTorch does for a list."""
        groups: list[list[Any]] = []
        for module in self:
            if groups and repr(groups[-1][0]) == repr(module):
                groups[-1].append(module)
            else:
                groups.append([module])
        start = 0
        for group in groups:
            yield (
                (str(start), group[0])
                if len(group) == 1
                else (
                    f"{start}-{start + len(group) - 1}",
                    _Shown(f"{len(group)} x {group[0]!r}"),
                )
            )
            start += len(group)


class _Shown:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Sequential(ModuleList):
    """A chain: each module gets the output of the one before it.

    Parameters
    ----------
    *modules : Module, or one OrderedDict of modules
    """

    def __init__(self, *modules: Any) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            super().__init__()
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            super().__init__(modules)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return type(self)(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def forward(self, input: Any) -> Any:
        """Call one module after the other."""
        for module in self:
            input = module(input)
        return input

    def _shown(self) -> Iterable[tuple[str, Any]]:
        return self.named_children()


class ModuleDict(_Container):
    """A dict of modules.

    Parameters
    ----------
    modules : mapping of str to Module, optional
    """

    def __init__(self, modules: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__()
        self.update(modules)

    def update(self, modules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Add modules."""
        for name, module in dict(modules).items():
            self.add_module(name, module)

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __setitem__(self, name: str, module: Any) -> None:
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def keys(self) -> Iterable[str]:
        """Return the names."""
        return self._modules.keys()

    def values(self) -> Iterable[Any]:
        """Return the modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return names and modules."""
        return self._modules.items()


class ParameterList(Module):
    """A list of parameters.

    Parameters
    ----------
    values : iterable of Tensor, optional
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        for value in values:
            self.append(value)

    def append(self, value: Any) -> Self:
        """Add a parameter at the end."""
        made = value if isinstance(value, Parameter) else Parameter(value)
        self.register_parameter(str(len(self)), made)
        return self

    def __len__(self) -> int:
        return len(self._parameter_names)

    def __iter__(self) -> Iterator[Parameter]:
        return (self.__dict__[name] for name in self._parameter_names)

    def __getitem__(self, index: int) -> Parameter:
        return list(self)[index]

    def extra_repr(self) -> str:
        """Return a line for each parameter."""
        sizes = ["x".join(map(str, p.shape)) for p in self]
        return "\n".join(
            f"  ({n}): Parameter containing: [{p.dtype} of size {size}]"
            for n, (p, size) in enumerate(zip(self, sizes, strict=True))
        )
