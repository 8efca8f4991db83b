"""Turns steps into a graph of matrices: which matrices each one is computed from, and which stage shows it.

`draw` draws the graph and `steps.js` computes with it; no HTML here. A graph may hold two sentences, called sides;
what they share, such as projections, is there once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.steps.attention import AttentionSteps
from selfattn.steps.layers import AdditiveSteps, LayerSteps, ModelSteps

Array: TypeAlias = npt.NDArray[Any]
Steps: TypeAlias = AttentionSteps | ModelSteps
Term: TypeAlias = str  # id of a node, "T:" and an id for its transpose, or an operator

OPERATORS = ("@", "=", "+", "·", "→", "where")
MAX_HEADS = 4  # heads that are shown as tables
MAX_PAIRS = 8  # queries whose weighted values are shown
MAX_NUMBERS = 200_000  # numbers in all matrices: about 2 MB as base64


class PageError(ValueError):
    """Steps that a page cannot show: too many numbers, no heads, or more than one sentence."""


@dataclass
class Node:
    """A matrix, and how it is computed from others."""

    id: str
    name: str  # such as "scores"
    data: Array  # (rows, columns), float64
    rows: str  # list of labels; "" counts from 0
    columns: str
    op: str
    args: tuple[str, ...]
    options: dict[str, Any]
    block: str  # the name of the block, if there are several
    head: str
    editable: bool  # whether it is given, not computed


@dataclass
class Equation:
    """One line: for each side terms and operators; the last term is the result."""

    label: str
    sides: list[list[Term]] = field(default_factory=list)


@dataclass
class Stage:
    """One step: a name, the key of its sentence, formula, NumPy, equations."""

    name: str
    caption: str
    formula: str
    numpy: str
    equations: list[Equation] = field(default_factory=list)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


@dataclass
class Head:
    """One head of one sentence as the first screen shows it: the matrices from inputs to output, by their roles.

    ``nodes`` are ids, ``stages`` the names of the stages that explain them.
    """

    side: int
    block: str
    head: str
    nodes: dict[str, str] = field(default_factory=dict)
    stages: dict[str, str] = field(default_factory=dict)


# Formula and NumPy of every stage.
LINES: dict[str, tuple[str, str]] = {
    "embeddings": ("e_i = table[token_i]", "embeddings = table[ids]"),
    "positions": (
        "p_ic = sin(i / 10000^(c/d)),  p_ib = cos(i / 10000^(c/d)),  b = c + 1,  c = 0, 2, 4, …",
        "angle = np.arange(L)[:, None] / 10000 ** (np.arange(0, d, 2) / d)\n"
        "positions[:, 0::2], positions[:, 1::2] = np.sin(angle), np.cos(angle)",
    ),
    "model_inputs": ("x_i = e_i + p_i", "inputs = embeddings + positions"),
    "inputs": ("x_1, …, x_L", "inputs = x"),
    "linear": ("y_ic = Σ_m x_im · W_mc", "y = x @ W"),
    "given": ("q_i,  k_j,  v_j", "query, key, value"),
    "query": ("q_ic = Σ_m x_im · WQ_mc", "query = {source} @ W_query"),
    "key": ("k_jc = Σ_m x_jm · WK_mc", "key = {source} @ W_key"),
    "value": ("v_jc = Σ_m x_jm · WV_mc", "value = {source} @ W_value"),
    "scores": ("s_ij = Σ_c q_ic · k_jc", "scores = query @ key.T"),
    "additive_scores": ("s_ij = Σ_c tanh(q_ic + k_jc) · v_c", "scores = np.tanh(query[:, None] + key) @ v"),
    "scaled_scores": ("t_ij = s_ij · scale", "scaled_scores = scores * scale"),
    "capped_scores": (
        "t_ij = cap · tanh(s_ij · scale / cap)",
        "scaled_scores = softcap * np.tanh(scores * scale / softcap)",
    ),
    "masked_scores": (
        "u_ij = t_ij (mask_ij = 1),  -∞ (mask_ij = 0)",
        "masked_scores = np.where(mask, scaled_scores, -np.inf)",
    ),
    "biased_scores": (
        "u_ij = t_ij + a_ij (mask_ij = 1),  -∞ (mask_ij = 0)",
        "masked_scores = np.where(mask, scaled_scores + added, -np.inf)",
    ),
    "weights": (
        "w_ij = exp(u_ij) / Σ_n exp(u_in)",
        "weights = np.exp(masked_scores) / np.exp(masked_scores).sum(axis=-1, keepdims=True)",
    ),
    "sink_weights": (
        "w_ij = exp(u_ij) / (exp(sink) + Σ_n exp(u_in))",
        "weights = np.exp(masked_scores) / (np.exp(sink) + np.exp(masked_scores).sum(axis=-1, keepdims=True))",
    ),
    "dropped_weights": ("w'_ij = w_ij · keep_ij", "dropped_weights = weights * keep"),
    "replaced_weights": (
        "w'_ij = g_ij (use_given = 1),  w_ij (use_given = 0)",
        "replaced_weights = np.where(use_given, given_weights, weights)",
    ),
    "weighted_values": ("z_ijc = w_ij · v_jc", "weighted_values = {source}[:, :, None] * value"),
    "output": ("o_ic = Σ_j w_ij · v_jc", "output = {source} @ value"),
    "concatenated": ("[o¹, o², …]", "concatenated = np.concatenate(outputs, axis=-1)"),
    "projected_output": ("y_ic = Σ_m o_im · WO_mc", "projected_output = {source} @ W_out"),
    "residual": ("r_ic = o_ic + x_ic", "residual = {source} + inputs"),
    "norm": (
        "n_ic = (r_ic - mean_i) / √(var_i + ε) · g_c + b_c",
        "norm = ({source} - mean) / np.sqrt(variance + eps) * ln_weight + ln_bias",
    ),
    "mean": ("m_c = Σ_i x_ic / L", "output = {source}.mean(axis=0)"),
}


class Graph:
    """A graph: nodes by id, stages in order, lists of labels.

    What is added belongs to ``side``, the sentence, 0 or 1, to ``block`` and to ``head``, if there are several.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.stages: dict[str, Stage] = {}
        self.labels: dict[str, list[str]] = {"one": [""]}
        self.heads: list[Head] = []
        self.side = self.numbers = 0
        self.block = ""
        self.leave_head()

    def enter_head(self, steps: AttentionSteps, h: int) -> None:
        """Let what is added belong to a head."""
        lead = steps.scores.shape[:-2]
        self.h, self.count = h, math.prod(lead)
        self.at = np.unravel_index(h, lead) if lead else ()
        self.head = ", ".join(str(n) for n, size in zip(self.at, lead, strict=True) if size > 1)

    def leave_head(self) -> None:
        """Let what is added belong to all heads."""
        self.h, self.count, self.at, self.head = 0, 1, (), ""

    @property
    def prefix(self) -> str:
        """What the names of the block's nodes and stages begin with."""
        return f"block{self.block}." if self.block else ""

    def add(
        self,
        name: str,
        data: Array,
        rows: str = "",
        columns: str = "",
        op: str = "given",
        *args: str,
        called: str = "",
        shared: bool = False,
        **options: Any,
    ) -> str:
        """Add a node to this side, and return its id; a shared node of the other side is used again.

        The page shows what it is ``called``, by default its name.
        """
        if self.numbers + data.size > MAX_NUMBERS:
            raise PageError(
                f"a page holds at most {MAX_NUMBERS} numbers, and these steps have more, with {name} of "
                f"shape {data.shape}. Show fewer tokens, dims or heads"
            )
        data = np.ascontiguousarray(np.atleast_2d(data), dtype=np.float64)
        head = "" if shared else self.head
        node = f"{self.prefix}{name}{f'.{self.h}' if head else ''}"
        if shared and node in self.nodes and np.array_equal(self.nodes[node].data, data):
            return node
        full = f"{node}~{self.side}" if self.side else node
        self.nodes[full] = Node(
            full, called or name, data, rows, columns, op, args, options, self.block, head, op == "given"
        )
        self.numbers += data.size
        return full

    def show(self, name: str, *terms: Term, variant: str = "", source: str = "") -> Stage:
        """Add an equation to a stage, a new one if needed; the line of NumPy names the node `source`.

        Of heads that are too many to show, the stage says how many there are.
        """
        full = self.prefix + name
        stage = self.stages.get(full)
        if stage is None:
            formula, line = LINES[variant or name]
            line = line.format(source=source and self.nodes[source].name)
            stage = self.stages[full] = Stage(full, variant or name, formula, line)
        if self.h >= MAX_HEADS:
            stage.notes.append(("abridged heads", {"shown": MAX_HEADS, "all": self.count}))
        elif self.side == 0:
            stage.equations.append(Equation(self.head, [list(terms)]))
        else:
            equation = next((e for e in stage.equations if e.label == self.head and len(e.sides) == 1), None)
            if equation is None:
                raise ValueError(f"compare= has other steps or heads than steps: {full} {self.head}".rstrip())
            equation.sides.append(list(terms))
        return stage


def build(steps: Steps, tokens: list[str], key_tokens: list[str], graph: Graph | None = None) -> Graph:
    """Return a new graph of steps, or add the steps to ``graph``, as the second side of its equations."""
    graph = _next_side(graph)
    side = graph.side
    graph.labels[f"t{side}"] = tokens
    graph.labels[f"k{side}"] = key_tokens
    if isinstance(steps, ModelSteps):
        _model(graph, steps)
    elif isinstance(steps, LayerSteps):
        _layer(graph, steps, None)
    else:
        _given(graph, steps)
    short = [stage.name for stage in graph.stages.values() for e in stage.equations if len(e.sides) <= side]
    if short:
        raise ValueError(f"compare= lacks the step {short[0]}")
    return graph


def _next_side(graph: Graph | None) -> Graph:
    if graph is None:
        return Graph()
    graph.side = 1
    return graph


def linear(x: Array, weight: Array, tokens: list[str], graph: Graph | None = None) -> Graph:
    """Add the graph of ``x @ weight`` alone."""
    graph = _next_side(graph)
    rows = f"t{graph.side}"
    graph.labels[rows] = tokens
    a = graph.add("inputs", x, rows, called="x")
    b = graph.add("W", weight, shared=True)
    y = graph.add("linear", x @ weight, rows, "", "matmul", a, b, called="y")
    graph.show("inputs", a)
    graph.show("linear", a, "@", b, "=", y)
    stages = {"inputs": "inputs", "output": "linear"}
    graph.heads.append(Head(graph.side, "", "", {"inputs": a, "output": y}, stages))
    return graph


def _by_head(array: Array) -> Array:
    return array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])


def _given(graph: Graph, steps: AttentionSteps) -> None:
    """Add attention alone, whose inputs are queries, keys and values."""
    if 0 in steps.scores.shape[:-2]:
        raise PageError(f"there are no heads to show: the scores have shape {steps.scores.shape}")
    heads = []
    for h in range(math.prod(steps.scores.shape[:-2])):
        graph.enter_head(steps, h)
        heads.append([graph.add(name, getattr(steps, name)[graph.at], rows) for name, rows in _inputs(graph)])
        graph.show("given", *heads[h])
    _attention(graph, steps, heads)
    for head in graph.heads:
        head.stages |= dict.fromkeys(("query", "key", "value"), "given")


def _inputs(graph: Graph) -> list[tuple[str, str]]:
    """Return the names of a head's inputs, and the labels of their rows."""
    t, c = f"t{graph.side}", f"k{graph.side}"
    return [("query", t), ("key", c), ("value", c)]


def _attention(graph: Graph, steps: AttentionSteps, heads: Sequence[Sequence[str]]) -> list[str]:
    """Add the stages from scores to output for every head; return the ids of the outputs."""
    outputs = []
    for h, (q, k, v) in enumerate(heads):
        graph.enter_head(steps, h)
        outputs.append(_head(graph, steps, q, k, v))
    graph.leave_head()
    return outputs


def _head(graph: Graph, steps: AttentionSteps, q: str, k: str, v: str) -> str:
    call, at, prefix, show = steps._call, graph.at, graph.prefix, graph.show
    t, c = f"t{graph.side}", f"k{graph.side}"

    def node(name: str, data: Array, op: str = "given", *args: str, **options: Any) -> str:
        return graph.add(name, data, t, c, op, *args, **options)

    def scalar(name: str, value: float) -> str:
        return graph.add(name, np.array(value), "one", "one", shared=True)

    if isinstance(steps, AdditiveSteps):
        vector = graph.add("v", np.asarray(steps.parameters.v), "one", shared=True)
        scores = node("scores", steps.scores[at], "additive", q, k, vector)
        show("scores", q, "+", k, vector, "→", scores, variant="additive_scores")
    else:
        scores = node("scores", steps.scores[at], "matmul", q, k, turned="second")
        show("scores", q, "@", "T:" + k, "=", scores)

    scale = scalar("scale", call.scale)
    caps = [] if call.softcap is None else [scalar("softcap", call.softcap)]
    scaled = node("scaled_scores", steps.scaled_scores[at], "scale", scores, scale, *caps)
    show("scaled_scores", scores, "·", scale, *caps, "=", scaled, variant="capped_scores" if caps else "")

    mask = node("mask", call.allowed[at])
    bias = _added(steps, at)
    added = [] if bias is None else [node("added", bias)]
    masked = node("masked_scores", steps.masked_scores[at], "mask", scaled, mask, *added)
    plus, variant = (["+", *added], "biased_scores") if added else ([], "")
    show("masked_scores", scaled, *plus, "where", mask, "=", masked, variant=variant)

    sink = None if call.sinks is None else call.sinks[at]
    sinks = [] if sink is None or sink == -np.inf else [graph.add("sink", sink, "one", "one")]
    shares = steps.weights[at]
    weights = node("weights", shares, "softmax", masked, mask, *sinks)
    totals = shares.astype(np.float64).sum(axis=-1, keepdims=True)
    sums = graph.add("row_sums", totals, t, "one", "row_sums", weights)
    show("weights", masked, *sinks, "→", weights, sums, variant="sink_weights" if sinks else "")

    roles = {"query": q, "key": k, "value": v, "scale": scale, "mask": mask, "scores": masked}
    if steps._replaced:
        replacing, use = node("given_weights", steps.dropped_weights[at]), scalar("use_given", 1.0)
        weights = node("replaced_weights", steps.dropped_weights[at], "choose", weights, replacing, use)
        show("replaced_weights", replacing, "where", use, "=", weights)
        roles["switch"] = use
    elif call.keep is not None:
        factor = 0.0 if call.dropout_p >= 1 else 1 / (1 - call.dropout_p)
        keep = node("keep", call.keep[at] * factor)
        before, weights = (
            weights,
            node("dropped_weights", steps.dropped_weights[at], "multiply", weights, keep),
        )
        show("dropped_weights", before, "·", keep, "=", weights)

    pairs = []
    for i, row in enumerate(graph.nodes[weights].data[:MAX_PAIRS] if graph.h < MAX_HEADS else ()):
        with np.errstate(invalid="ignore"):
            data = np.where(call.allowed[at][i][:, None], row[:, None] * graph.nodes[v].data, 0.0)
        pairs.append(graph.add(f"weighted_values[{i}]", data, c, "", "pairs", weights, v, mask, query=i))
    stage = show("weighted_values", weights, "·", v, "=", *pairs, source=weights)
    if pairs and len(pairs) < len(shares):
        stage.notes.append(("abridged queries", {"shown": len(pairs), "all": len(shares)}))
    output = graph.add("output", steps.output[at], t, "", "sum", weights, v, mask, *pairs)
    show("output", weights, "@", v, "=", output, source=weights)
    roles |= {"weights": weights, "output": output}
    stages = {name: prefix + name for name in ("query", "key", "value", "scores", "output")}
    stages |= {"mask": prefix + "masked_scores", "weights": prefix + graph.nodes[weights].name}
    graph.heads.append(Head(graph.side, graph.block, graph.head, roles, stages))
    return output


def _added(steps: AttentionSteps, at: tuple[Any, ...]) -> Array | None:
    """Return the sum of ALiBi's bias, the float mask and the biases; None if there is none."""
    call = steps._call
    if call.bias is None and call.alibi_slopes is None and call.offset_bias is None:
        return None
    data = np.zeros(steps.scores.shape[-2:])
    i, j = np.indices(data.shape)
    if call.alibi_slopes is not None:
        data = data - float(call.alibi_slopes[at]) * np.abs(i + call.offset - j)
    biases = [] if call.bias is None else [call.bias[at]]
    if call.offset_bias is not None:
        biases.append(call.offset_bias[at][j - i + len(data) - 1])
    for bias in biases:
        data = data + np.where(np.isneginf(bias), 0, bias)
    return data


def _layer(graph: Graph, steps: LayerSteps, inputs: str | None) -> str:
    """Add the stages of a layer, from the projections on; return the id of the result."""
    batch = steps.inputs.shape[:-2]
    if np.prod(batch, dtype=int) != 1:
        raise PageError(
            f"a page shows one sentence; these are steps of inputs {steps.inputs.shape}: call the layer with "
            "one sentence of the batch"
        )
    p, t = steps.parameters, f"t{graph.side}"

    def flat(array: Array) -> Array:
        return array.reshape(array.shape[-2:])

    sources, before = {}, None
    if inputs is None:
        for name, rows in _inputs(graph):  # the default is the previous source
            end = "inputs" if name == "query" else f"{name}_inputs"
            array = getattr(steps, end)
            if array is not before:
                source = graph.add(end, flat(array), rows)
            sources[name], before = source, array
        inputs = sources["query"]
        graph.show("inputs", *dict.fromkeys(sources.values()))

    heads, known = [], len(graph.heads)
    for name, rows in _inputs(graph):
        per_head = getattr(steps, name)
        full = per_head if p.num_heads == 1 else per_head.swapaxes(-2, -3)
        full = full.reshape(per_head.shape[-2], -1)
        whole = _affine(graph, steps, name, name, sources.get(name, inputs), full, rows)
        heads.append(_split(graph, steps, whole, per_head, rows))
    outputs = _attention(graph, steps, list(zip(*heads, strict=True)))

    last = outputs[0]
    if steps.concatenated is not None:
        last = graph.add("concatenated", flat(steps.concatenated), t, "", "concat", *outputs)
        stage = graph.show("concatenated", *outputs[:MAX_HEADS], "=", last)
        if len(outputs) > MAX_HEADS:
            stage.notes.append(("abridged heads", {"shown": MAX_HEADS, "all": len(outputs)}))
    if steps.projected_output is not None:
        last = _affine(graph, steps, "projected_output", "out", last, flat(steps.projected_output), t)
    if steps.residual is not None:
        y = graph.add("residual", flat(steps.residual), t, "", "add", last, inputs)
        graph.show("residual", last, "+", inputs, "=", y, source=last)
        last = y
    if steps.norm is not None and p.norm is not None:
        *parameters, eps = p.norm
        data, ids = flat(steps.norm), []
        for name, array in zip(("ln_weight", "ln_bias"), parameters, strict=True):
            filled = np.full(data.shape[-1], float(name == "ln_weight")) if array is None else array
            ids.append(graph.add(name, filled, "one", shared=True))
        y = graph.add("norm", data, t, "", "norm", last, *ids, eps=eps)
        graph.show("norm", last, *ids, "→", y, source=last)
        last = y
    for head in graph.heads[known:]:
        head.nodes = {"inputs": inputs, **head.nodes}
        head.stages["inputs"] = stage_of(graph, inputs)
        if last not in outputs:
            head.nodes["result"], head.stages["result"] = last, stage_of(graph, last)
    return last


def stage_of(graph: Graph, node: str) -> str:
    """Return the name of the stage that computes a node."""
    return next(
        name
        for name, stage in graph.stages.items()
        if any(node in results(side) for equation in stage.equations for side in equation.sides)
    )


def results(terms: Sequence[Term]) -> list[str]:
    """Return the ids that an equation computes: the terms after the last ``=`` or ``→``, or all if there is neither."""
    return [t for t in terms[start_of_results(terms) :] if t and t not in OPERATORS]


def start_of_results(terms: Sequence[Term]) -> int:
    """Return the index after the last ``=`` or ``→``; 0 if there is neither."""
    return max((n + 1 for n, term in enumerate(terms) if term in ("=", "→")), default=0)


def _affine(graph: Graph, steps: LayerSteps, name: str, end: str, source: str, data: Array, rows: str) -> str:
    """Add a product with the weight of a name's end, and its bias, if there is one."""
    weight, bias = (getattr(steps.parameters, f"{letter}_{end}") for letter in "Wb")
    w = graph.add(f"W_{end}", weight, shared=True)
    biases = [] if bias is None else [graph.add(f"b_{end}", bias, "one", shared=True)]
    y = graph.add(name, data, rows, "", "matmul", source, w, *biases)
    plus = ["+", *biases] if biases else []
    shown = graph.show(name, source, "@", w, *plus, "=", y, source=source)
    if biases and " + b" not in shown.numpy:
        shown.numpy += f" + b_{end}"
        shown.formula += " + b_c"
    return y


def _split(graph: Graph, steps: LayerSteps, whole: str, per_head: Array, rows: str) -> list[str]:
    """Cut a projection into heads: some of its columns each."""
    width, name, heads = per_head.shape[-1], graph.nodes[whole].name, []
    for h, data in enumerate(per_head.reshape(-1, *per_head.shape[-2:])):
        graph.enter_head(steps, h)
        heads.append(
            graph.add(name, data, rows, "", "slice", whole, start=h * width) if graph.head else whole
        )
    graph.leave_head()
    return heads


def _model(graph: Graph, steps: ModelSteps) -> None:
    rows = f"t{graph.side}"
    e = graph.add("embeddings", steps.embeddings, rows)
    p = graph.add("positions", steps.positions, rows)
    x = graph.add("inputs", steps.inputs, rows, "", "add", e, p)
    graph.show("embeddings", e)
    graph.show("positions", p)
    graph.show("model_inputs", e, "+", p, "=", x)
    for n, block in enumerate(steps.blocks):
        graph.block = str(n) if len(steps.blocks) > 1 else ""
        x = _layer(graph, block, x)
    graph.block = ""
    mean = graph.add("mean", steps.output, "one", "", "mean", x, called="output")
    graph.show("mean", x, "→", mean, source=x)
