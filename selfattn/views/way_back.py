"""The way back: the gradients of attention under their own matrices.

There are formulas, sums, edits and a finite difference.

The first gradients are those of the kernels; `way_back_compute.js` computes them again after an edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import as_array
from selfattn.functional.attention import scaled_dot_product_attention_vjp
from selfattn.steps.attention import AttentionSteps
from selfattn.steps.layers import AdditiveSteps, LayerSteps
from selfattn.views.document import Document, drawn_by_script, weights_svg
from selfattn.views.language import fill, in_language
from selfattn.views.page import check_tokens
from selfattn.views.texts import CAPTIONS, SCRIPTED, WAY_BACK
from selfattn.views.tours import Stop
from selfattn.views.writing import Array, number, plain_number, text

__all__ = ["WayBack", "way_back_page"]

Arrays: TypeAlias = dict[str, Array]
MOST_ROWS, MOST_COLUMNS = 12, 12  # the largest matrix that is shown


@dataclass(frozen=True, repr=False)
class WayBack(Document):
    """The page of :func:`way_back_page`: shows itself in a notebook; ``page.save(path)`` writes a file."""

    styles: ClassVar[tuple[str, ...]] = ("way_back.css",)
    scripts: ClassVar[tuple[str, ...]] = ("way_back.js",)


def way_back_page(
    steps: AttentionSteps,
    tokens: Sequence[str] | None = None,
    *,
    grad_output: npt.ArrayLike | None = None,
    head: int = 0,
    key_tokens: Sequence[str] | None = None,
    lang: str = "en",
) -> WayBack:
    """Show the gradients of one head of attention, each under its own matrix.

    From the output's gradient dO back to dV, dP, dS, dQ and dK, and for a layer of one head to dx: formulas, the sum
    and a finite difference of every number, and why a row of dS adds up to zero. Numbers of dO and of the inputs can
    be changed.

    Parameters
    ----------
    steps : AttentionSteps or LayerSteps
        Of one text.
    tokens : sequence of str, one for each query, optional
    grad_output : array_like, shape (L, Ev), optional
        The gradient of the output, dO. None: 1 for the first number of the last token, 0 for the others.
    head : int, default 0
        Which of several heads is shown.
    key_tokens : sequence of str, one for each key, optional
    lang : {"en", "de", "fr"}
        The language of the page.

    Returns
    -------
    WayBack

    Raises
    ------
    TypeError
        Steps of another kind.
    ValueError
        Dropout, sinks, a softcap or another score than a product; more than 12 rows or columns; tokens or a gradient
        that do not fit.

    References
    ----------
    Dao et al. (2022), "FlashAttention", appendix B.2, equations 2 to 6: dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P∘(dP − mean),
    dQ = scale·dS·K, dK = scale·dSᵀ·Q.

    Examples
    --------
    >>> import selfattn as sa
    >>> x = [[1.2, 0.0], [0.8, 0.8], [0.9, 0.1]]
    >>> page = way_back_page(sa.attention_steps(x, x, x), ["stream", "bank", "mud"])
    >>> "The way back" in page.title
    True
    """
    if not isinstance(steps, AttentionSteps) or isinstance(steps, AdditiveSteps):
        raise TypeError(
            "the way back shows scaled dot products: pass what attention_steps or layer.steps returned, "
            f"not {type(steps).__name__}"
        )
    captions = in_language({name: CAPTIONS[name] for name in SCRIPTED} | WAY_BACK, lang)
    queries, keys = check_tokens(steps, tokens, key_tokens)
    projections = _projections(steps)
    forward = _forward(steps, head, bool(projections))
    added = _added(steps, head)
    shape = forward["O"].shape
    wish = np.zeros(shape) if grad_output is None else as_array("grad_output", grad_output).astype(np.float64)
    if grad_output is None:
        wish[-1:, :1] = 1
    if wish.shape != shape or not np.isfinite(wish).all():
        raise ValueError(f"grad_output must be finite, of shape {shape}, not {wish.shape}")
    scale = steps._call.scale
    backward = _backward(forward, projections, added, scale, wish)
    rows = np.abs(wish).sum(axis=1)
    row = int(rows.argmax()) if rows.size else 0
    data = {
        "queries": queries,
        "keys": keys,
        "forward": {name: forward[name].tolist() for name in "xQKV" if name in forward},
        "weights": {n: {"weight": w.tolist(), "bias": b.tolist()} for n, (w, b) in projections.items()}
        or None,
        "scale": scale,
        "closed": (~np.isfinite(forward["S"])).astype(int).tolist(),
        "added": added.tolist(),
        "wish": wish.tolist(),
        "row": row,
        "stops": [asdict(stop) for stop in _stops(captions, queries, keys, forward, backward, wish, row)],
        "captions": captions,
    }
    title, shown = captions["title"], {"P": forward["P"], "dS": np.abs(backward["S"])}
    picture = weights_svg([(name, array, queries, keys, set()) for name, array in shown.items()], title)
    return WayBack(title, _body(title, data, forward, backward, queries, keys), picture, lang)


def _of(array: Array, steps: AttentionSteps, head: int) -> Array:
    """Return one head's matrix, in float64."""
    matrices = array.reshape(-1, *array.shape[-2:])
    heads = steps.weights.reshape(-1, *steps.weights.shape[-2:]).shape[0]
    if not 0 <= head < heads:
        raise ValueError(f"head must be from 0 to {heads - 1}, not {head}")
    matrix: Array = matrices[head].astype(np.float64)
    return matrix


def _forward(steps: AttentionSteps, head: int, has_inputs: bool) -> Arrays:
    call = steps._call
    given = not np.array_equal(steps.dropped_weights, steps.weights, equal_nan=True)
    for name, there in (
        ("a softcap", call.softcap not in (None, 0)),
        ("sinks", call.sinks is not None),
        ("dropout, or given weights", given),
    ):
        if there:
            raise ValueError(f"the way back is not shown with {name}")
    arrays = [steps.query, steps.key, steps.value, steps.masked_scores, steps.weights, steps.output]
    found = {name: _of(array, steps, head) for name, array in zip("QKVSPO", arrays, strict=True)}
    if has_inputs and isinstance(steps, LayerSteps):
        found = {"x": _of(steps.inputs, steps, head), **found}
    for name, matrix in found.items():
        if matrix.shape[0] > MOST_ROWS or matrix.shape[1] > MOST_COLUMNS:
            raise ValueError(
                f"the way back shows at most {MOST_ROWS} rows and {MOST_COLUMNS} columns; {name} is {matrix.shape}"
            )
    return found


def _projections(steps: AttentionSteps) -> dict[str, tuple[Array, Array]]:
    """Return weight and bias of each projection of self-attention with one head.

    For other steps, which show no dx, this is {}.
    """
    if not isinstance(steps, LayerSteps) or not (
        steps.inputs.ndim == 2
        and steps.parameters.num_heads == 1
        and steps.key_inputs is steps.inputs
        and steps.value_inputs is steps.inputs
        and steps.query.ndim == 2
    ):
        return {}
    p = steps.parameters
    pairs = {"Q": (p.W_query, p.b_query), "K": (p.W_key, p.b_key), "V": (p.W_value, p.b_value)}
    found = {}
    for name, (weight, given) in pairs.items():
        bias = np.zeros(weight.shape[1]) if given is None else given.astype(float).ravel()
        found[name] = weight.astype(float), bias
    return found


def _added(steps: AttentionSteps, head: int) -> Array:
    """Return what masks and slopes add to the scores."""
    scaled, masked = _of(steps.scaled_scores, steps, head), _of(steps.masked_scores, steps, head)
    finite = np.isfinite(masked) & np.isfinite(scaled)
    added: Array = np.subtract(masked, scaled, out=np.zeros_like(masked), where=finite)
    return added


def _backward(
    forward: Arrays, projections: dict[str, tuple[Array, Array]], added: Array, scale: float, wish: Array
) -> Arrays:
    """Return the gradients: the kernels compute those of Q, K and V, and NumPy those of weights, scores and x."""
    query, key, value = (np.ascontiguousarray(forward[name]) for name in "QKV")
    mask = np.where(np.isfinite(forward["S"]), added, -np.inf)
    _, pullback = scaled_dot_product_attention_vjp(query, key, value, mask, scale=scale)
    found: dict[str, Any] = dict(zip("QKV", pullback(wish), strict=True))
    dp = wish @ value.T
    mean = (forward["P"] * dp).sum(axis=1, keepdims=True)
    found |= {"S": forward["P"] * (dp - mean), "P": dp, "O": wish}
    if projections:
        found["x"] = sum(found[name] @ weight.T for name, (weight, _) in projections.items())
    return found


def _stops(
    texts: dict[str, str],
    queries: list[str],
    keys: list[str],
    forward: Arrays,
    backward: Arrays,
    wish: Array,
    row: int,
) -> list[Stop]:
    """Return the tour's stops with this page's numbers.

    A zero wish, or less than 2 or more than 6 keys, gives no stops.
    """
    if not wish.any() or len(keys) < 2 or len(keys) > 6:
        return []
    dp, column, word = backward["P"][row], int(np.abs(wish[row]).argmax()), queries[row]

    def listed(numbers: Array, decimals: int) -> str:
        parts = [f"*{key}* {plain_number(x, decimals)}" for key, x in zip(keys, numbers, strict=True)]
        return f"{', '.join(parts[:-1])} {texts['and']} {parts[-1]}"

    values = {
        "word": word,
        "column": column,
        "shares": listed(backward["V"][:, column], 3),
        "most": keys[int(dp.argmax())],
        "said": listed(dp, 2),
        "mean": plain_number(forward["P"][row] @ dp, 3),
        "sum": " ".join(signed(x, 4) for x in backward["S"][row]),
    }
    several = tuple(keys)
    plan: list[tuple[str, tuple[str, ...], int, int]] = [
        ("said", several, int(np.abs(backward["V"][:, column]).argmax()), 1),
        ("shares", several, int(dp.argmax()), 2),
        ("gains", (texts["yes"], texts["no"]), 1, 3),
    ]
    if np.count_nonzero(np.abs(wish).sum(axis=1)) == 1 and len(queries) > 1:
        plan.append(("asks", (fill(texts["only"], word=word), texts["all"]), 0, 4))
    if "x" in forward:
        plan.append(("inputs", (texts["add up"], texts["largest"]), 0, 5))
    return [
        Stop(
            texts[f"stop.{name}"],
            fill(texts[f"ask.{name}"], **values),
            options,
            right,
            fill(texts[f"reveal.{name}"], **values),
            stage=stage,
        )
        for name, options, right, stage in plan
    ]


def signed(x: float, decimals: int) -> str:
    """Write a number with its sign."""
    plain = plain_number(x, decimals)
    return plain if plain.startswith("−") else f"+{plain}"


def _body(
    title: str, data: dict[str, Any], forward: Arrays, backward: Arrays, queries: list[str], keys: list[str]
) -> str:
    """Return the tables that are shown without a script, and the data that the script reads."""
    tables, texts = [], data["captions"]
    for name, values in forward.items():
        rows = keys if name in "KV" else queries
        columns = keys if name in "SP" else [str(n) for n in range(values.shape[1])]
        for caption, matrix in (
            (texts[f"name.{name}"], values),
            (f"{texts[f'gradient.{name}']} = {texts[f'formula.{name}']}", backward[name]),
        ):
            head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
            lines = "".join(
                f'<tr><th scope="row">{text(label)}</th>'
                f"{''.join(f'<td>{number(float(x), 4, 4)}</td>' for x in line)}</tr>"
                for label, line in zip(rows, matrix, strict=True)
            )
            tables.append(f"<table><caption>{text(caption)}</caption><tr><td></td>{head}</tr>{lines}</table>")
    shown = f'<div class="sa-tables">{"".join(tables)}</div>'
    return drawn_by_script("sa-way-back", texts["lang"], title, shown, data, name=texts["tab of way back"])
