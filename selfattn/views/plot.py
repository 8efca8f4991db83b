"""Heat maps of attention weights with matplotlib, the extra ``viz``, imported when something is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import as_array, check_rows
from selfattn._extras import import_extra
from selfattn.views.writing import as_whole, letters, plain_number, short, visible
from selfattn.views.writing import number as written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

__all__ = ["plot_attention"]

Array: TypeAlias = npt.NDArray[Any]

MAX_NUMBERS = 400  # cells with numbers
MAX_LABELS = 40  # labels along an axis
MAX_TOKEN = 24  # characters
MOST_FLOAT32, MOST_DRAWN = 1e37, 1e300  # a larger number has the colour of this limit
CELL, LEAST, MOST = 0.55, 2.4, 9.0  # inches: a cell, the shortest and the longest side
LETTER = 0.085  # inches, about


def plot_attention(
    weights: npt.ArrayLike,
    tokens: Iterable[str] | None,
    ax: Axes | None = None,
    *,
    key_tokens: Iterable[str] | None = None,
    title: str | None = None,
    numbers: bool | None = None,
    precision: int = 2,
    vmin: float | None = None,
    vmax: float | None = None,
    cmap: Any = None,
    colorbar: bool = True,
) -> AxesImage:
    """Draw attention weights as a heat map: a row for each query, a column for each key.

    A notebook shows the figure after the cell; elsewhere call ``image.figure.savefig(...)`` or ``plt.show()``.
    Needs matplotlib, ``pip install 'selfattn[viz]'``.

    Parameters
    ----------
    weights : array_like, shape (L, S)
        Real numbers of any dtype: weights, or scores, or masks. NaN and infinities are hatched and named.
    tokens : iterable of str, length L, or None
        One for each query, shown as text without markup, in any script for which a font is installed. Tokens of
        more than 24 characters end in "…"; of more than 40 tokens every n-th is named, and the label of the
        axis says so. None numbers the rows.
    ax : matplotlib.axes.Axes, optional
        Where to draw. By default on a new figure that fits.
    key_tokens : iterable of str, length S, optional
        One for each key. By default ``tokens``, if there are as many keys as queries.
    title : str, optional
        The title above.
    numbers : bool, optional
        Write each number into its cell. By default up to 400 cells.
    precision : int, default 2
        The decimals of the written numbers.
    vmin, vmax : float, optional
        The ends of the colour scale; give heat maps to compare the same ones. By default 0 and the largest
        number, or, with negative numbers, as far below 0 as above.
    cmap : str or matplotlib.colors.Colormap, optional
        Default "Blues", with negative numbers "RdBu_r".
    colorbar : bool, default True
        Draw the colour scale next to the heat map.

    Returns
    -------
    matplotlib.image.AxesImage
        What was drawn; ``image.axes`` and ``image.figure`` lead to the rest.

    Raises
    ------
    ImportError
        Without matplotlib.
    TypeError
        Weights that are not real numbers, tokens that are not strings, an ``ax`` that is not one.
    ValueError
        Weights that are not a matrix, or have no rows or columns; tokens that do not fit them.

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> image = plot_attention([[0.9, 0.1], [0.4, 0.6]], ["river", "bank"])
    >>> [label.get_text() for label in image.axes.get_yticklabels()]
    ['river', 'bank']

    Two queries that look at three keys:

    >>> image = plot_attention(
    ...     [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], ["le", "fleuve"], key_tokens=["the", "river", "."]
    ... )
    >>> image.get_array().shape
    (2, 3)
    """
    matrix = _as_matrix(weights)
    rows = _as_tokens("tokens", tokens, len(matrix), matrix.shape)
    if key_tokens is None and matrix.shape[0] == matrix.shape[1]:
        columns = rows
    elif key_tokens is None and tokens is not None:
        raise ValueError(f"weights {matrix.shape} have {matrix.shape[1]} keys; name them with key_tokens=")
    else:
        columns = _as_tokens("key_tokens", key_tokens, matrix.shape[1], matrix.shape)
    if not 0 <= as_whole(precision) <= 17:
        raise ValueError(f"precision is a number of decimals from 0 to 17, not {precision!r}")
    precision = as_whole(precision)
    import_extra("matplotlib", "viz")
    from matplotlib import pyplot as plt

    low, high = _limits(matrix, vmin, vmax)
    if numbers is None:
        numbers = matrix.size <= MAX_NUMBERS
    ax = _new_axes(plt, matrix.shape, rows, columns) if ax is None else _as_axes(ax, plt)

    drawn = matrix
    if max(high, -low) > MOST_FLOAT32:  # matplotlib subtracts the limits in the numbers' dtype
        wide = matrix.astype(np.float64)
        drawn = np.where(np.isfinite(wide), np.clip(wide, -MOST_DRAWN, MOST_DRAWN), wide)
        low, high = max(low, -MOST_DRAWN), min(high, MOST_DRAWN)
    finite = np.ma.masked_invalid(drawn, copy=False)
    if cmap is None:
        cmap = "RdBu_r" if low < 0 else "Blues"
    # Numbers that are not finite are transparent, so that the hatching shows.
    image = ax.imshow(finite, cmap=cmap, vmin=low, vmax=high, aspect="equal", interpolation="nearest")
    ax.patch.set(facecolor="#f4f4f4", edgecolor="#b04040", hatch="///" if finite.mask.any() else None)
    for axis, labels, name in ((ax.xaxis, columns, "key"), (ax.yaxis, rows, "query")):
        _name_ticks(axis, labels, name)
    ax.xaxis.set(ticks_position="top", label_position="top")
    ax.tick_params(length=0)
    _slant_long_labels(ax, matrix.shape)
    ax.spines[:].set_visible(False)
    if title is not None:
        ax.set_title(title, parse_math=False, **_font(title))
    if numbers:
        _write_numbers(ax, image, matrix, precision)
    elif finite.mask.any():
        _name_hatching(ax, matrix)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, shrink=0.8)
    return image


def _as_matrix(weights: npt.ArrayLike) -> Array:
    """Check the weights; return them in float32 or float64, which matplotlib draws."""
    array = as_array("weights", weights)
    kind = array.dtype.kind
    if kind not in "fiub" and array.dtype.name != "bfloat16":
        raise TypeError(f"weights must be real numbers, not {array.dtype}")
    if array.ndim != 2:
        hint = "; choose one head or batch entry, such as weights[0]" if array.ndim > 2 else ""
        raise ValueError(f"weights must be (L, S), a row for each query; they are {array.shape}{hint}")
    if array.size == 0:
        raise ValueError(f"weights {array.shape} are empty: there is nothing to draw")
    return array.astype(np.float32 if array.dtype == np.float32 else np.float64)


def _as_tokens(name: str, tokens: Iterable[str] | None, count: int, shape: tuple[int, ...]) -> list[str]:
    """Check the tokens of one axis; return their labels."""
    if tokens is None:
        return [str(n) for n in range(count)]
    if isinstance(tokens, bytes):
        raise TypeError(f"{name} is {tokens!r:.40}, of type bytes, not a string")
    tokens = tokens.split() if isinstance(tokens, str) else tokens
    check_rows(name, tokens)
    if not isinstance(tokens, Iterable):
        raise TypeError(f"{name} must be a list of strings, not {tokens!r:.40}")
    given = list(tokens)
    for n, token in enumerate(given):
        if not isinstance(token, str):
            raise TypeError(f"{name}[{n}] is {token!r:.40}, of type {type(token).__name__}, not a string")
    if len(given) != count:
        axis = "rows" if name == "tokens" else "columns"
        raise ValueError(f"{len(given)} {name} do not fit weights {shape}, which have {count} {axis}")
    return [short(visible(token), MAX_TOKEN) for token in given]


def _as_axes(ax: Any, plt: Any) -> Any:
    if not isinstance(ax, plt.Axes):
        hint = "; choose one of them" if isinstance(ax, np.ndarray) else ""
        raise TypeError(f"ax must be a matplotlib Axes, not {type(ax).__name__}{hint}")
    return ax


def _new_axes(plt: Any, shape: tuple[int, ...], rows: list[str], columns: list[str]) -> Any:
    """Make a figure whose cells fit their numbers, within size limits, with room for the longest labels."""
    height, width = (min(max(CELL * n, LEAST), MOST) for n in shape)
    beside = LETTER * max(map(letters, rows)) + 1.5  # the labels, and the colour scale
    above = LETTER * max(map(letters, columns)) * math.sin(math.pi / 4) + 0.8
    return plt.subplots(figsize=(width + beside, height + above), layout="constrained")[1]


def _limits(matrix: Array, vmin: float | None, vmax: float | None) -> tuple[float, float]:
    """Return the ends of the colour scale."""
    finite = matrix[np.isfinite(matrix)]
    least, most = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    far = max(-least, most) or 1.0  # all zero, or nothing finite
    low = (-far if least < 0 else 0.0) if vmin is None else float(vmin)
    high = far if vmax is None else float(vmax)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"the colour scale needs finite vmin < vmax, not {low} and {high}")
    return low, high


def _name_ticks(axis: Any, labels: list[str], name: str) -> None:
    every = math.ceil(len(labels) / MAX_LABELS)
    shown = range(0, len(labels), every)
    axis.set_ticks(shown, [labels[n] for n in shown], parse_math=False, usetex=False)
    axis.set_label_text(name if every == 1 else f"{name}: 1 of {every} named")
    for n, label in zip(shown, axis.get_ticklabels(), strict=True):
        label.set(**_font(labels[n]))


def _slant_long_labels(ax: Any, shape: tuple[int, ...]) -> None:
    """Slant the names of the keys if they would overlap."""
    labels, box = ax.get_xticklabels(), ax.get_window_extent()
    cell = min(box.height / shape[0], box.width / shape[1]) / ax.figure.dpi  # inches
    between = cell * math.ceil(shape[1] / MAX_LABELS)
    if max(letters(label.get_text()) for label in labels) * LETTER > between:
        for label in labels:
            label.set(rotation=45, horizontalalignment="left", rotation_mode="anchor")


def _write_numbers(ax: Any, image: Any, matrix: Array, precision: int) -> None:
    for (i, j), number in np.ndenumerate(matrix):
        if np.isfinite(number):
            red, green, blue, _ = image.cmap(image.norm(image.get_array()[i, j]))
            # Luminance (ITU-R BT.601): black on bright, white on dark.
            color = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            text, box = plain_number(number, precision), None
            if abs(number) >= 1e7:
                text = written(float(number), precision, precision)
        else:
            text, color = str(number), "#b04040"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(
            j, i, text.replace("-", "−"), ha="center", va="center", color=color, fontsize="small", bbox=box
        )


def _name_hatching(ax: Any, matrix: Array) -> None:
    """Write below a heat map without numbers what its hatching means."""
    names = {"nan": np.isnan(matrix), "inf": np.isposinf(matrix), "−inf": np.isneginf(matrix)}
    present = ", ".join(f"{count} {name}" for name, cells in names.items() if (count := int(cells.sum())))
    ax.text(0.5, -0.02, f"hatched: {present}", transform=ax.transAxes, ha="center", va="top", color="#b04040")


def _font(label: str) -> dict[str, Any]:
    """Return font families for a label if matplotlib's own lack some of its characters."""
    others = _other_families(frozenset(c for c in label if not c.isspace() and not c.isascii()))
    if not others:
        return {}
    from matplotlib import rcParams

    return {"fontfamily": [*rcParams["font.family"], *others]}


@lru_cache(maxsize=1024)
def _other_families(characters: frozenset[str]) -> tuple[str, ...]:
    """Return installed families that have the characters that the configured ones lack."""
    from matplotlib import font_manager, rcParams

    missing = set(map(ord, characters))
    for family in rcParams["font.family"] if missing else ():
        missing -= _code_points(font_manager.findfont(font_manager.FontProperties(family=[family])))
    families: list[str] = []
    for entry in font_manager.fontManager.ttflist:
        if not missing:
            break
        if found := missing & _code_points(entry.fname):
            families.append(entry.name)
            missing -= found
    return tuple(families)


@lru_cache(maxsize=16)
def _code_points(path: str) -> frozenset[int]:
    """Return the characters of a font, or none if the font cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()
