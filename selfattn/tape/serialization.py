"""Files of tensors: ``torch.save`` and ``torch.load``, without pickle.

A file is NumPy's npz: ``tree`` is JSON with the dicts, lists, texts and numbers, and each tensor is an array that the
tree names. Nothing of a file is executed.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfattn import _disk
from selfattn._check import Array
from selfattn.tape.dtypes import DTYPES, Size
from selfattn.tape.tensors import Parameter, Tensor, wrap

TENSOR, PAIRS, TUPLE = "tensor", "pairs", "tuple"


def save(obj: Any, f: Any) -> None:
    """Save tensors, and dicts and lists of tensors, numbers and texts, such as a state dict.

    Parameters
    ----------
    obj : Tensor, dict, list, tuple, str, number, bool or None
    f : path, or a binary file

    Raises
    ------
    TypeError
        ``obj`` holds something else, such as a module: save its ``state_dict()``.
    """
    arrays: list[Array] = []
    content = io.BytesIO()
    tree = json.dumps(_as_tree(obj, arrays, "obj"))
    named: dict[str, Any] = {f"{TENSOR}{n}": array for n, array in enumerate(arrays)}
    np.savez(content, tree=np.array(tree), **named)
    if hasattr(f, "write"):
        f.write(content.getvalue())
    else:
        _disk.write_file(Path(f), content.getvalue())


def _as_tree(obj: Any, arrays: list[Array], where: str) -> Any:
    """Return an object for JSON; its arrays go into a list."""
    if obj is None or isinstance(obj, bool | int | float | str):
        return obj
    if isinstance(obj, Tensor):
        # NumPy's files have no bfloat16.
        arrays.append(obj._array.view(np.uint16) if obj.dtype.name == "bfloat16" else obj._array)
        kind = "parameter" if isinstance(obj, Parameter) else TENSOR
        return {kind: len(arrays) - 1, "dtype": obj.dtype.name, "requires_grad": obj._leaf_requires_grad}
    if isinstance(obj, Mapping):
        return {
            PAIRS: [
                [_as_tree(k, arrays, where), _as_tree(v, arrays, f"{where}[{k!r}]")] for k, v in obj.items()
            ]
        }
    if isinstance(obj, list | tuple):
        items = [_as_tree(each, arrays, f"{where}[{n}]") for n, each in enumerate(obj)]
        return {TUPLE: items} if isinstance(obj, tuple) and not isinstance(obj, Size) else items
    if isinstance(obj, np.generic):
        return obj.item()
    raise TypeError(
        f"{where} is a {type(obj).__name__}, which is not saved; save the state_dict() of modules and optimizers"
    )


def load(f: Any, map_location: Any = None, *, weights_only: bool = True, mmap: bool | None = None) -> Any:
    """Read what :func:`save` wrote.

    Parameters
    ----------
    f : path, or a binary file
    map_location, weights_only, mmap
        Taken, and of no effect.

    Returns
    -------
    object
        Dicts are OrderedDicts.

    Raises
    ------
    ValueError
        The file is not of :func:`save`; those of PyTorch itself, which are pickled, are not read.
    """
    try:
        with np.load(f, allow_pickle=False) as found:
            tree = json.loads(str(found["tree"]))
            return _of_tree(tree, found)
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{f} is not a file of selfattn.tape's save ({error}). A file of PyTorch is pickled, and is not read: save "
            "its state_dict by safetensors, and read it by selfattn.files.load_arrays"
        ) from None


def _of_tree(tree: Any, arrays: Any) -> Any:
    if isinstance(tree, list):
        return [_of_tree(each, arrays) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if PAIRS in tree:
        return OrderedDict((_of_tree(k, arrays), _of_tree(v, arrays)) for k, v in tree[PAIRS])
    if TUPLE in tree:
        return tuple(_of_tree(each, arrays) for each in tree[TUPLE])
    cls = Parameter if "parameter" in tree else Tensor
    array = arrays[f"{TENSOR}{tree['parameter' if cls is Parameter else TENSOR]}"]
    if tree["dtype"] == "bfloat16":
        array = array.view(DTYPES["bfloat16"].numpy)
    made = wrap(array, cls)
    made.requires_grad = tree["requires_grad"]
    return made
