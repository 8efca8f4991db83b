"""The text of a tensor, equal to PyTorch's to the character: its numbers, its lines, and what follows them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfattn._check import Array, check_number, check_size, one_of

__all__ = ["format_number", "format_tensor", "set_printoptions"]


@dataclass
class _Options:
    precision: int = 4
    threshold: float = 1000
    edgeitems: int = 3
    linewidth: float = 80
    sci_mode: bool | None = None


_PROFILES: dict[str, dict[str, float]] = {
    "default": {},
    "short": {"precision": 2, "edgeitems": 2},
    "full": {"threshold": math.inf},
}
_PREFIX = "tensor("
_options = _Options()


def set_printoptions(
    precision: int | None = None,
    threshold: float | None = None,
    edgeitems: int | None = None,
    linewidth: float | None = None,
    profile: str | None = None,
    sci_mode: bool | None = None,
) -> None:
    """Set how tensors are printed, as ``torch.set_printoptions`` does; NumPy's own options are others.

    Parameters
    ----------
    precision : int, optional
        Digits after the point: 4 at first.
    threshold : float, optional
        A tensor of more numbers is summarised: 1000 at first.
    edgeitems : int, optional
        Numbers at the beginning and the end of each dimension in a summary: 3 at first.
    linewidth : int, optional
        Characters of a line: 80 at first.
    profile : {"default", "short", "full"}, optional
        All of these at once, before those that are given too.
    sci_mode : bool, optional
        Whether numbers have exponents; each call without it lets each tensor decide.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn.tape.printing import format_tensor, set_printoptions
    >>> set_printoptions(precision=2)
    >>> print(format_tensor(np.float32([0.12345, 2]), "float32"))
    tensor([0.12, 2.00])
    >>> set_printoptions(profile="default")
    """
    given: dict[str, Any] = {"sci_mode": sci_mode}
    for name, value in (("precision", precision), ("edgeitems", edgeitems)):
        if value is not None:
            given[name] = check_size(name, value, least=0)
    for name, number in (("threshold", threshold), ("linewidth", linewidth)):
        if number is not None:
            given[name] = check_number(name, number)
    if profile is not None:
        given = vars(_Options()) | _PROFILES[one_of("profile", profile, _PROFILES)] | given
    vars(_options).update(given)


def format_tensor(array: Array, dtype: str, *, suffix: str = "", parameter: bool = False) -> str:
    """Return the text that PyTorch's ``repr`` gives for a tensor on a CPU.

    Parameters
    ----------
    array : ndarray
        The tensor's numbers.
    dtype : str
        The tensor's dtype by its name, such as ``"bfloat16"``, whose numbers may be an array of float32.
    suffix : str, optional
        What a tensor with a gradient has at the end, such as ``", grad_fn=<MmBackward0>"``. It starts a line if the
        last one has no room.
    parameter : bool, optional
        True gives the text of a ``Parameter``.

    Returns
    -------
    str

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn.tape.printing import format_tensor
    >>> print(format_tensor(np.float64([[1, 2.5], [-3, 4]]), "float64", suffix=", requires_grad=True"))
    tensor([[ 1.0000,  2.5000],
            [-3.0000,  4.0000]], dtype=torch.float64, requires_grad=True)
    """
    notes = []
    if not _options.edgeitems if array.size else array.ndim != 1:
        notes.append(f"size={array.shape}")
    if dtype != "float32" and not (array.size and dtype in {"int64", "bool"}):
        notes.append(f"dtype=torch.{dtype}")
    if suffix:
        notes.append(suffix.removeprefix(", "))
    text = _PREFIX + (_elements(array, dtype) if array.size else "[]")
    used = len(text) - text.rfind("\n") + 1  # PyTorch counts 2 too many
    for note in notes:
        if used + len(note) + 2 > _options.linewidth:
            text += ",\n" + " " * len(_PREFIX) + note
            used = len(_PREFIX) + len(note)
        else:
            text += ", " + note
            used += len(note) + 2
    return ("Parameter containing:\n" if parameter else "") + text + ")"


def format_number(value: Array, dtype: str, spec: str, *, suffix: str = "", parameter: bool = False) -> str:
    """Return what PyTorch's ``format(tensor, spec)`` gives: a tensor of no dimensions is formatted as Python's number.

    Parameters
    ----------
    value : ndarray
        The tensor's numbers.
    dtype, suffix, parameter
        As for :func:`format_tensor`, which formats all other tensors; their ``spec`` must be empty, and so must that
        of every ``Parameter``.
    spec : str
        What follows the colon in an f-string.

    Returns
    -------
    str

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn.tape.printing import format_number
    >>> format_number(np.array(2.71828), "float64", ".2f")
    '2.72'
    """
    if value.ndim == 0 and not parameter:
        return format(value.item(), spec)
    if spec:
        kind = "Parameter" if parameter else "Tensor"
        raise TypeError(f"unsupported format string passed to {kind}.__format__")
    return format_tensor(value, dtype, suffix=suffix, parameter=parameter)


def _elements(array: Array, dtype: str) -> str:
    """Return the numbers in their brackets."""
    edge, dims = _options.edgeitems, array.ndim
    cut = [array.size > _options.threshold and size > 2 * edge for size in array.shape]
    for axis in np.flatnonzero(cut):
        array = np.delete(array, slice(edge, array.shape[axis] - edge), axis)
    texts, width = _numbers(array, dtype)
    columns = (_options.linewidth - len(_PREFIX) - dims + 1) / (width + 2)
    waiting = iter(texts)

    def nested(axis: int) -> str:
        if axis == dims:
            return next(waiting).rjust(width)
        entries = [nested(axis + 1) for _ in range(array.shape[axis])]
        last = axis == dims - 1
        if cut[axis]:
            entries.insert(edge, " ..." if last and edge else "...")
        if last:
            length = max(1, int(min(columns, len(entries))))
            entries = [", ".join(entries[at : at + length]) for at in range(0, len(entries), length)]
        gap = "\n" * max(1, dims - axis - 1) + " " * (len(_PREFIX) + axis + 1)
        return f"[{f',{gap}'.join(entries)}]"

    return nested(0)


def _numbers(array: Array, dtype: str) -> tuple[list[str], int]:
    """Return the text of each number, and the width of the widest one that is finite and not 0."""
    values: list[Any]
    if "float" not in dtype:
        values = array.ravel().tolist()
        texts = [str(value) for value in values]
        return texts, max(map(len, texts), default=1)
    values = array.astype(np.float64).ravel().tolist()
    ordinary = [value and math.isfinite(value) for value in values]
    sizes = [abs(value) for value, counts in zip(values, ordinary, strict=True) if counts]
    spec = "#.0f"  # 2. for 2.0
    if sizes:
        least, most = min(sizes), max(sizes)
        sci_mode = _options.sci_mode
        if sci_mode is None:
            sci_mode = most / least > 1000 or most > 1e8 or least < 1e-4
        if sci_mode or not all(map(float.is_integer, sizes)):
            spec = f".{_options.precision}{'e' if sci_mode else 'f'}"
    texts = [format(value, spec) for value in values]
    return texts, max((len(text) for text, counts in zip(texts, ordinary, strict=True) if counts), default=1)
