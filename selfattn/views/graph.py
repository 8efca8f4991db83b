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
PER_HEAD = (
    "given",
    "scores",
    "scaled_scores",
    "masked_scores",
    "weights",
    "dropped_weights",
    "replaced_weights",
    "weighted_values",
    "output",
)
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
    editable: bool
    block: str  # the name of the block, if there are several
    head: str


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
    """A graph: nodes by id, stages in order, lists of labels; ``side`` is the sentence, 0 or 1, that is being added."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.stages: dict[str, Stage] = {}
        self.labels: dict[str, list[str]] = {"one": [""]}
        self.heads: list[Head] = []
        self.side = 0
        self.block = self.head = ""  # block and head of the nodes being added
        self.numbers = 0

    def add(
        self,
        node: str,
        name: str,
        data: Array,
        rows: str = "",
        columns: str = "",
        op: str = "given",
        args: tuple[str, ...] = (),
        options: dict[str, Any] | None = None,
        *,
        editable: bool = False,
        shared: bool = False,
    ) -> str:
        """Add a node to this side, and return its id; a shared node of the other side is used again."""
        if self.numbers + data.size > MAX_NUMBERS:
            raise PageError(
                f"a page holds at most {MAX_NUMBERS} numbers, and these steps have more, with {name} of "
                f"shape {data.shape}. Show fewer tokens, dims or heads"
            )
        data = np.ascontiguousarray(np.atleast_2d(data), dtype=np.float64)
        if shared and node in self.nodes and np.array_equal(self.nodes[node].data, data):
            return node
        full = f"{node}~{self.side}" if self.side else node
        head = "" if shared else self.head
        self.nodes[full] = Node(
            full, name, data, rows, columns, op, args, options or {}, editable, self.block, head
        )
        self.numbers += data.size
        return full

    def show(
        self,
        name: str,
        terms: Sequence[Term],
        label: str = "",
        prefix: str = "",
        variant: str = "",
        source: str = "",
    ) -> Stage:
        """Add an equation to a stage, a new one if needed; the line of NumPy names the node `source`."""
        stage = self.stages.get(prefix + name)
        if stage is None:
            formula, line = LINES[variant or name]
            line = line.format(source=source and self.nodes[source].name)
            stage = Stage(prefix + name, variant or name, formula, line)
            self.stages[stage.name] = stage
        if self.side == 0:
            stage.equations.append(Equation(label, [list(terms)]))
        else:
            equation = next((e for e in stage.equations if e.label == label and len(e.sides) == 1), None)
            if equation is None:
                raise ValueError(f"compare= has other steps or heads than steps: {name} {label}".rstrip())
            equation.sides.append(list(terms))
        return stage


def build(steps: Steps, tokens: list[str], key_tokens: list[str], graph: Graph | None = None) -> Graph:
    """Return a new graph of steps, or add the steps to ``graph``, as the second side of its equations."""
    graph = _next_side(graph)
    side = graph.side
    graph.labels[f"t{side}"] = tokens
    graph.labels[f"k{side}"] = tokens if key_tokens == tokens else key_tokens
    if isinstance(steps, ModelSteps):
        _model(graph, steps)
    elif isinstance(steps, LayerSteps):
        _layer(graph, steps, "", None)
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
    a = graph.add("inputs", "x", x, rows, editable=True)
    b = graph.add("W", "W", weight, editable=True, shared=True)
    y = graph.add("linear", "y", x @ weight, rows, op="matmul", args=(a, b))
    graph.show("inputs", [a])
    graph.show("linear", [a, "@", b, "=", y])
    stages = {"inputs": "inputs", "output": "linear"}
    graph.heads.append(Head(graph.side, "", "", {"inputs": a, "output": y}, stages))
    return graph


def _by_head(array: Array) -> Array:
    return array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])


def _given(graph: Graph, steps: AttentionSteps) -> None:
    """Add attention alone, whose inputs are queries, keys and values."""
    if 0 in steps.scores.shape[:-2]:
        raise PageError(f"there are no heads to show: the scores have shape {steps.scores.shape}")
    t, k = f"t{graph.side}", f"k{graph.side}"
    heads: list[list[str]] = [[], [], []]
    many = _by_head(steps.query).shape[0] > 1
    for part, (name, rows) in enumerate({"query": t, "key": k, "value": k}.items()):
        for h, data in enumerate(_by_head(getattr(steps, name))):
            graph.head = _head_label(steps, h)
            suffix = f".{h}" if many else ""
            heads[part].append(graph.add(name + suffix, name, data, rows, editable=True))
    for h, (q, key, v) in enumerate(zip(*heads, strict=True)):
        if h < MAX_HEADS:
            graph.show("given", [q, "", key, "", v], _head_label(steps, h))
    _attention(graph, steps, "", heads)
    for head in graph.heads:
        head.stages |= dict.fromkeys(("query", "key", "value"), "given")


def _head_label(steps: AttentionSteps, h: int) -> str:
    lead = steps.scores.shape[:-2]
    if np.prod(lead, dtype=int) <= 1:
        return ""
    index = [int(n) for n in np.unravel_index(h, lead)]
    while len(lead) > 1 and lead[0] == 1:
        lead, index = lead[1:], index[1:]
    return str(index[0]) if len(index) == 1 else str(tuple(index))


def _attention(graph: Graph, steps: AttentionSteps, prefix: str, heads: list[list[str]]) -> list[str]:
    """Add the stages from scores to output for every head; return the ids of the outputs."""
    outputs = []
    for h, (q, k, v) in enumerate(zip(*heads, strict=True)):
        graph.head = _head_label(steps, h)
        outputs.append(_head(graph, steps, prefix, h, q, k, v))
    graph.head = ""
    for name in PER_HEAD:
        _note_heads(graph, prefix + name, len(outputs))
    return outputs


def _note_heads(graph: Graph, stage: str, count: int) -> None:
    """If a stage exists, add the note that some heads are not shown."""
    if count > MAX_HEADS and stage in graph.stages:
        graph.stages[stage].notes.append(("abridged heads", {"shown": MAX_HEADS, "all": count}))


def _head(graph: Graph, steps: AttentionSteps, prefix: str, h: int, q: str, k: str, v: str) -> str:
    call, side = steps._call, graph.side
    t, c = f"t{side}", f"k{side}"
    label = _head_label(steps, h)
    end = f".{h}" if label else ""
    shown = h < MAX_HEADS
    lead = steps.scores.shape[:-2]
    at = np.unravel_index(h, lead) if lead else ()

    def node(name: str, data: Array, op: str, args: tuple[str, ...], **options: Any) -> str:
        return graph.add(f"{prefix}{name}{end}", name, data, t, c, op, args, options)

    def given(name: str, data: Array, rows: str = t, columns: str = c) -> str:
        return graph.add(f"{prefix}{name}{end}", name, data, rows, columns, editable=True)

    def show(name: str, *terms: Term, variant: str = "", source: str = "") -> None:
        if shown:
            graph.show(name, terms, label, prefix, variant, source)

    if isinstance(steps, AdditiveSteps):
        v_data = np.asarray(steps.parameters.v)
        vector = graph.add(f"{prefix}v", "v", v_data, "one", editable=True, shared=True)
        scores = node("scores", steps.scores[at], "additive", (q, k, vector))
        show("scores", q, "+", k, "", vector, "→", scores, variant="additive_scores")
    else:
        scores = node("scores", steps.scores[at], "matmulT", (q, k))
        show("scores", q, "@", "T:" + k, "=", scores)

    def scalar(name: str, value: float) -> str:
        return graph.add(f"{prefix}{name}", name, np.array(value), "one", "one", editable=True, shared=True)

    scale = scalar("scale", call.scale)
    if call.softcap is None:
        scaled = node("scaled_scores", steps.scaled_scores[at], "scale", (scores, scale))
        show("scaled_scores", scores, "·", scale, "=", scaled)
    else:
        softcap = scalar("softcap", call.softcap)
        scaled = node("scaled_scores", steps.scaled_scores[at], "scale", (scores, scale, softcap))
        show("scaled_scores", scores, "·", scale, "", softcap, "=", scaled, variant="capped_scores")

    allowed = call.allowed[at].astype(np.float64)
    mask = given("mask", allowed)
    data = _added(steps, at)
    added = () if data is None else (given("added", data),)
    plus = ["+", *added] if added else []
    masked = node("masked_scores", steps.masked_scores[at], "mask", (scaled, mask, *added))
    show("masked_scores", scaled, *plus, "where", mask, "=", masked, variant="biased_scores" if added else "")

    def sums(weights: str) -> str:
        totals = steps.weights[at].astype(np.float64).sum(axis=-1, keepdims=True)
        return graph.add(f"{prefix}row_sums{end}", "row_sums", totals, t, "one", "row_sums", (weights,))

    if call.sinks is None or call.sinks[at] == -np.inf:
        weights = node("weights", steps.weights[at], "softmax", (masked, mask))
        show("weights", masked, "→", weights, "", sums(weights))
    else:
        sink = given("sink", call.sinks[at], "one", "one")
        weights = node("weights", steps.weights[at], "softmax", (masked, mask, sink))
        show("weights", masked, "", sink, "→", weights, "", sums(weights), variant="sink_weights")

    roles = {"query": q, "key": k, "value": v, "scale": scale, "mask": mask, "scores": masked}
    stages = {name: prefix + name for name in ("query", "key", "value", "scores", "weights", "output")}
    stages["mask"] = prefix + "masked_scores"
    if steps._replaced:
        replacing = given("given_weights", steps.dropped_weights[at])
        use = scalar("use_given", 1.0)
        args = (weights, replacing, use)
        weights = node("replaced_weights", steps.dropped_weights[at], "choose", args)
        show("replaced_weights", replacing, "where", use, "=", weights)
        roles["switch"], stages["weights"] = use, prefix + "replaced_weights"
    elif call.keep is not None:
        factor = 0.0 if call.dropout_p >= 1 else 1 / (1 - call.dropout_p)
        keep = given("keep", call.keep[at] * factor)
        dropped = node("dropped_weights", steps.dropped_weights[at], "multiply", (weights, keep))
        show("dropped_weights", weights, "·", keep, "=", dropped)
        weights, stages["weights"] = dropped, prefix + "dropped_weights"

    pairs = _pairs(graph, steps, f"{prefix}weighted_values{end}", weights, mask, v, at) if shown else []
    if shown:
        show("weighted_values", weights, "·", v, "=", *pairs, source=weights)
        if len(pairs) < len(allowed):
            graph.stages[prefix + "weighted_values"].notes.append(
                ("abridged queries", {"shown": len(pairs), "all": len(allowed)})
            )
    output = graph.add(
        f"{prefix}output{end}", "output", steps.output[at], t, "", "sum", (weights, v, mask, *pairs)
    )
    show("output", weights, "@", v, "=", output, source=weights)
    roles |= {"weights": weights, "output": output}
    graph.heads.append(Head(side, graph.block, label, roles, stages))
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


def _pairs(
    graph: Graph, steps: AttentionSteps, name: str, weights: str, mask: str, v: str, at: tuple[Any, ...]
) -> list[str]:
    """Add weighted values, with a node for each of the first queries."""
    value, pairs = graph.nodes[v].data, []
    for i, row in enumerate(graph.nodes[weights].data[:MAX_PAIRS]):
        with np.errstate(invalid="ignore"):
            data = np.where(steps._call.allowed[at][i][:, None], row[:, None] * value, 0.0)
        pairs.append(
            graph.add(
                f"{name}[{i}]",
                f"weighted_values[{i}]",
                data,
                f"k{graph.side}",
                "",
                "pairs",
                (weights, v, mask),
                {"query": i},
            )
        )
    return pairs


def _layer(graph: Graph, steps: LayerSteps, prefix: str, inputs: str | None) -> str:
    """Add the stages of a layer, from the projections on; return the id of the result."""
    batch = steps.inputs.shape[:-2]
    if np.prod(batch, dtype=int) != 1:
        raise PageError(
            f"a page shows one sentence; these are steps of inputs {steps.inputs.shape}: call the layer with "
            "one sentence of the batch"
        )
    p, t, c = steps.parameters, f"t{graph.side}", f"k{graph.side}"

    def flat(array: Array) -> Array:
        return array.reshape(array.shape[-2:])

    if inputs is None:
        inputs = graph.add(f"{prefix}inputs", "inputs", flat(steps.inputs), t, editable=True)
        terms = [inputs]
        sources, before = {"query": inputs}, steps.inputs
        source = inputs
        for name in ("key", "value"):  # the default is the previous source
            array = getattr(steps, f"{name}_inputs")
            if array is not before:
                full_name = f"{name}_inputs"
                source = graph.add(prefix + full_name, full_name, flat(array), c, editable=True)
                terms += ["", source]
            sources[name], before = source, array
        graph.show("inputs", terms, prefix=prefix)
    else:
        sources = dict.fromkeys(("query", "key", "value"), inputs)

    heads = []
    for name, rows in (("query", t), ("key", c), ("value", c)):
        per_head = getattr(steps, name)
        full = per_head if p.num_heads == 1 else per_head.swapaxes(-2, -3)
        full = full.reshape(per_head.shape[-2], -1)
        weight, bias = getattr(p, f"W_{name}"), getattr(p, f"b_{name}")
        whole = _affine(graph, prefix, name, f"W_{name}", sources[name], weight, bias, full, rows, name)
        heads.append(_split(graph, whole, _by_head(per_head), rows))
    known = len(graph.heads)
    outputs = _attention(graph, steps, prefix, heads)

    last = outputs[0]
    if steps.concatenated is not None:
        data = flat(steps.concatenated)
        last = graph.add(f"{prefix}concatenated", "concatenated", data, t, "", "concat", tuple(outputs))
        joined = [term for output in outputs[:MAX_HEADS] for term in (output, "")]
        graph.show("concatenated", [*joined[:-1], "=", last], prefix=prefix)
        _note_heads(graph, f"{prefix}concatenated", len(outputs))
    if steps.projected_output is not None and p.W_out is not None:
        last = _affine(
            graph,
            prefix,
            "projected_output",
            "W_out",
            last,
            p.W_out,
            p.b_out,
            flat(steps.projected_output),
            t,
            "projected_output",
        )
    if steps.residual is not None:
        y = graph.add(f"{prefix}residual", "residual", flat(steps.residual), t, "", "add", (last, inputs))
        graph.show("residual", [last, "+", inputs, "=", y], prefix=prefix, source=last)
        last = y
    if steps.norm is not None and p.norm is not None:
        last = _norm(graph, prefix, last, p.norm, flat(steps.norm), t)
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


def _affine(
    graph: Graph,
    prefix: str,
    name: str,
    weight_name: str,
    source: str,
    weight: Array,
    bias: Array | None,
    data: Array,
    rows: str,
    stage: str,
) -> str:
    w = graph.add(prefix + weight_name, weight_name, weight, editable=True, shared=True)
    args: tuple[str, ...] = (source, w)
    terms = [source, "@", w]
    if bias is not None:
        b_name = "b" + weight_name[1:]
        b = graph.add(prefix + b_name, b_name, bias, "one", editable=True, shared=True)
        args, terms = (*args, b), [*terms, "+", b]
    y = graph.add(prefix + name, name, data, rows, "", "matmul", args)
    shown = graph.show(stage, [*terms, "=", y], prefix=prefix, source=source)
    if bias is not None and " + b" not in shown.numpy:
        shown.numpy += f" + b{weight_name[1:]}"
        shown.formula += " + b_c"
    return y


def _split(graph: Graph, whole: str, per_head: Array, rows: str) -> list[str]:
    """Cut a projection into heads: some of its columns each."""
    if len(per_head) == 1:
        return [whole]
    name, width = graph.nodes[whole].name, per_head.shape[-1]
    base = whole.partition("~")[0]
    heads = []
    for h, data in enumerate(per_head):
        graph.head = str(h)
        heads.append(graph.add(f"{base}.{h}", name, data, rows, "", "slice", (whole,), {"start": h * width}))
    graph.head = ""
    return heads


def _norm(
    graph: Graph,
    prefix: str,
    last: str,
    norm: tuple[Array | None, Array | None, float],
    data: Array,
    rows: str,
) -> str:
    weight, bias, eps = norm
    ids = []
    for name, array, default in (("ln_weight", weight, 1.0), ("ln_bias", bias, 0.0)):
        filled = np.full(data.shape[-1], default) if array is None else array
        ids.append(graph.add(prefix + name, name, filled, "one", editable=True, shared=True))
    y = graph.add(f"{prefix}norm", "norm", data, rows, "", "norm", (last, *ids), {"eps": eps})
    graph.show("norm", [last, "", ids[0], "", ids[1], "→", y], prefix=prefix, source=last)
    return y


def _model(graph: Graph, steps: ModelSteps) -> None:
    rows = f"t{graph.side}"
    e = graph.add("embeddings", "embeddings", steps.embeddings, rows, editable=True)
    p = graph.add("positions", "positions", steps.positions, rows, editable=True)
    x = graph.add("inputs", "inputs", steps.inputs, rows, "", "add", (e, p))
    graph.show("embeddings", [e])
    graph.show("positions", [p])
    graph.show("model_inputs", [e, "+", p, "=", x])
    for n, block in enumerate(steps.blocks):
        graph.block = str(n) if len(steps.blocks) > 1 else ""
        x = _layer(graph, block, f"block{n}." if graph.block else "", x)
    graph.block = ""
    mean = graph.add("mean", "output", steps.output, "one", "", "mean", (x,))
    graph.show("mean", [x, "→", mean], source=x)
