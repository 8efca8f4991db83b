"""The way back: the gradients of attention under their own matrices.

There are formulas, sums, edits and a finite difference. The graph is that of the steps, with gradients as further
nodes: their first numbers are those of the kernels, and `operations.js` computes them again after an edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from selfattn._check import as_array
from selfattn.functional.attention import scaled_dot_product_attention_vjp
from selfattn.steps.attention import AttentionSteps
from selfattn.steps.layers import AdditiveSteps
from selfattn.views.document import Document, drawn_by_script, weights_svg
from selfattn.views.draw import Drawing
from selfattn.views.graph import Graph, build
from selfattn.views.language import fill, in_language
from selfattn.views.page import check_tokens
from selfattn.views.texts import CAPTIONS, SCRIPTED, WAY_BACK
from selfattn.views.tours import Stop
from selfattn.views.writing import Array, plain_number

__all__ = ["WayBack", "way_back_page"]

MOST_ROWS, MOST_COLUMNS = 12, 12  # the largest matrix that is shown
#: What the page calls a matrix, and its role in the graph.
STAGES = dict(zip("xQKVSPO", ["inputs", "query", "key", "value", "scores", "weights", "output"], strict=True))


@dataclass(frozen=True, repr=False)
class WayBack(Document):
    """The page of :func:`way_back_page`: shows itself in a notebook; ``page.save(path)`` writes a file."""

    tour: tuple[Stop, ...] = ()

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
        A batch of texts; dropout, sinks, a softcap or another score than a product; more than 12 rows or columns;
        tokens or a gradient that do not fit.

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
    graph = build(steps, queries, keys)
    if not 0 <= head < len(graph.heads):
        raise ValueError(f"head must be from 0 to {len(graph.heads) - 1}, not {head}")
    ids = graph.heads[head].nodes
    stages = _stages(graph, ids)
    shape = graph.nodes[stages["O"]].data.shape
    if grad_output is None:
        wish = np.zeros(shape)
        wish[-1:, :1] = 1
    else:
        wish = as_array("grad_output", grad_output).astype(np.float64)
    if wish.shape != shape or not np.isfinite(wish).all():
        raise ValueError(f"grad_output must be finite, of shape {shape}, not {wish.shape}")
    _add_gradients(graph, stages, ids["scale"], wish)
    shown = {name: (node, f"d{name}") for name, node in stages.items()}

    def behind(node: str) -> set[str]:
        return {node}.union(*map(behind, graph.nodes[node].args))

    kept = set().union(*(behind(node) for pair in shown.values() for node in pair))
    graph.nodes, graph.stages = {name: node for name, node in graph.nodes.items() if name in kept}, {}
    row = int(np.abs(wish).sum(axis=1).argmax()) if wish.size else 0
    stops = _stops(captions, graph, stages, row)
    data = Drawing(graph, [], captions, False, 3, MOST_ROWS).data() | {
        "pairs": shown,
        "scale": ids["scale"],
        "row": row,
        "stops": [asdict(stop) for stop in stops],
        "captions": captions,
    }
    title, matrices = captions["title"], {"P": stages["P"], "dS": "dS"}
    picture = weights_svg(
        [(name, np.abs(graph.nodes[node].data), queries, keys, set()) for name, node in matrices.items()],
        title,
    )
    body = drawn_by_script("sa-way-back", lang, title, "", data, name=captions["tab of way back"])
    return WayBack(title, body, picture, lang, tuple(stops))


def _stages(graph: Graph, ids: dict[str, str]) -> dict[str, str]:
    """Return the nodes of a head that the page shows; x only if queries, keys and values are projections of it."""
    weights, scores = (graph.nodes[ids[name]] for name in ("weights", "scores"))
    for name, there in (
        ("a softcap", len(graph.nodes[scores.args[0]].args) > 2),
        ("dropout, or given weights", weights.op != "softmax"),
        ("sinks", len(weights.args) > 2),
    ):
        if there:
            raise ValueError(f"the way back is not shown with {name}")
    made = {(node.op, *node.args[:1]) for node in (graph.nodes[ids[STAGES[name]]] for name in "QKV")}
    has_x = made == {("matmul", ids.get("inputs"))}
    found = {name: ids[role] for name, role in STAGES.items() if has_x or name != "x"}
    for name, node in found.items():
        rows, columns = graph.nodes[node].data.shape
        if rows > MOST_ROWS or columns > MOST_COLUMNS:
            raise ValueError(
                f"the way back shows at most {MOST_ROWS} rows and {MOST_COLUMNS} columns; "
                f"{name} is {(rows, columns)}"
            )
    return found


def _add_gradients(graph: Graph, stages: dict[str, str], scale: str, wish: Array) -> None:
    """Add the gradients: the kernels compute those of Q, K and V, and NumPy those of weights, scores and x."""
    q, k, v, s, p = (stages[name] for name in "QKVSP")
    query, key, value, weights = (graph.nodes[node].data for node in (q, k, v, p))
    _, mask, *added = (graph.nodes[node].data for node in graph.nodes[s].args)
    bias = np.where(mask, sum(added), -np.inf)
    _, pullback = scaled_dot_product_attention_vjp(
        query, key, value, bias, scale=float(graph.nodes[scale].data[0, 0])
    )
    dq, dk, dv = pullback(wish)
    dp = wish @ value.T
    ds = weights * (dp - (weights * dp).sum(axis=1, keepdims=True))

    def add(name: str, data: Array, op: str, *args: str, end: str = "", **options: Any) -> Array:
        like = graph.nodes[stages[name]]
        graph.add(f"d{name}{end}", data, like.rows, like.columns, op, *args, **options)
        return data

    add("O", wish, "given")
    add("V", dv, "matmul", p, "dO", turned="first")
    add("P", dp, "matmul", "dO", v, turned="second")
    add("S", ds, "softmax_gradient", p, "dP")
    add("Q", dq, "matmul", "dS", k, scale, scaled=True)
    add("K", dk, "matmul", "dS", q, scale, turned="first", scaled=True)
    sources = [graph.nodes[node] for node in (q, k, v)]
    if "x" in stages:
        parts = []
        for name, node, gradient in zip("QKV", sources, (dq, dk, dv), strict=True):
            weight = node.args[1]
            part = gradient @ graph.nodes[weight].data.T
            parts.append(add("x", part, "matmul", f"d{name}", weight, end=name, turned="second"))
        add("x", np.sum(parts, axis=0), "add", "dxQ", "dxK", "dxV")
    else:
        for node in sources:  # their numbers can be changed
            node.op, node.args, node.editable = "given", (), True


def _stops(texts: dict[str, str], graph: Graph, stages: dict[str, str], row: int) -> list[Stop]:
    """Return the tour's stops with this page's numbers.

    A zero wish, or less than 2 or more than 6 keys, gives no stops.
    """
    wish, dv, dp, ds = (graph.nodes[node].data for node in ("dO", "dV", "dP", "dS"))
    queries, words = graph.labels["t0"], graph.labels["k0"]
    keys = [f"{word} ({n})" if words.count(word) > 1 else word for n, word in enumerate(words)]
    if not wish.any() or len(keys) < 2 or len(keys) > 6:
        return []
    column, word = int(np.abs(wish[row]).argmax()), queries[row]

    def listed(numbers: Array) -> str:
        parts = [f"*{key}* {plain_number(x, 3)}" for key, x in zip(keys, numbers, strict=True)]
        return f"{', '.join(parts[:-1])} {texts['and']} {parts[-1]}"

    values = {
        "word": word,
        "column": column,
        "shares": listed(dv[:, column]),
        "most": keys[int(dp[row].argmax())],
        "said": listed(dp[row]),
        "mean": plain_number(graph.nodes[stages["P"]].data[row] @ dp[row], 3),
        "sum": " ".join(signed(x, 4) for x in ds[row]),
    }

    def stop(name: str, options: tuple[str, ...], right: int, stage: int) -> Stop:
        ask, reveal = (fill(texts[f"{part}.{name}"], **values) for part in ("ask", "reveal"))
        return Stop(texts[f"stop.{name}"], ask, options, right, reveal, stage=stage)

    several = tuple(keys)
    stops = [
        stop("said", several, int(np.abs(dv[:, column]).argmax()), 1),
        stop("shares", several, int(dp[row].argmax()), 2),
        stop("gains", (texts["yes"], texts["no"]), 1, 3),
    ]
    if np.count_nonzero(np.abs(wish).sum(axis=1)) == 1 and len(queries) > 1:
        stops.append(stop("asks", (fill(texts["only"], word=word), texts["all"]), 0, 4))
    if "x" in stages:
        stops.append(stop("inputs", (texts["add up"], texts["largest"]), 0, 5))
    return stops


def signed(x: float, decimals: int) -> str:
    """Write a number with its sign."""
    plain = plain_number(x, decimals)
    return plain if plain.startswith("−") else f"+{plain}"
