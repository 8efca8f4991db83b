"""ONNX's own test cases: 93 of Attention (opsets 23 to 25), 64 of norms, activations and rotary embeddings.

`onnx.backend.test` generates inputs and expected outputs; each case is a graph of one node. Here every node
is spelled with selfattn's functions and must meet ONNX's tolerances. bfloat16 has a tolerance of its own,
as in ONNX's runner.
"""

import importlib
import warnings
from dataclasses import dataclass

import numpy as np
import pytest

import selfattn as sa
from selfattn import reference

onnx = pytest.importorskip("onnx", reason="the ONNX cases need the package onnx")

FUNCTIONS = (reference, sa)

# Operators, and the module of onnx.backend.test.case.node that makes the cases of each.
MODULES = {
    "Attention": "attention",
    "Gelu": "gelu",
    "LayerNormalization": "layernormalization",
    "LogSoftmax": "logsoftmax",
    "RMSNormalization": "rmsnormalization",
    "RotaryEmbedding": "rotaryembedding",
    "Softmax": "softmax",
}


@dataclass(frozen=True)
class Case:
    """One node with its data; what is absent is missing from the dicts."""

    name: str
    operator: str
    opset: int
    inputs: dict[str, np.ndarray]  # by the names of the operator's definition
    outputs: dict[str, np.ndarray]
    attributes: dict[str, object]
    rtol: float
    atol: float


def collect():
    """Have ONNX make its cases, with the same random numbers in every session."""
    state = np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in MODULES.values():
                np.random.seed(0)
                importlib.import_module(f"onnx.backend.test.case.node.{module}")
    finally:
        np.random.set_state(state)
    from onnx.backend.test.case import node as generated

    for made in generated._NodeTestCases:
        nodes = made.model.graph.node
        if len(nodes) != 1 or nodes[0].op_type not in MODULES:
            continue  # an operator as a graph of others, or one that selfattn lacks
        [node], [(given, expected)] = nodes, made.data_sets
        opset = next(entry.version for entry in made.model.opset_import if entry.domain == "")
        schema = onnx.defs.get_schema(node.op_type, opset)
        yield Case(
            name=made.name,
            operator=node.op_type,
            opset=opset,
            inputs=named(schema.inputs, node.input, given),
            outputs=named(schema.outputs, node.output, expected),
            attributes={a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
            rtol=made.rtol,
            atol=made.atol,
        )


def named(formal, actual, arrays):
    """Give arrays the names of a definition; an empty name in `actual` is an optional one left out."""
    present = [parameter.name for parameter, name in zip(formal, actual, strict=False) if name]
    return dict(zip(present, arrays, strict=True))


CASES = list(collect())
ATTENTION = [case for case in CASES if case.operator == "Attention"]
OTHERS = [case for case in CASES if case.operator != "Attention"]


def assert_meets(case, name, got):
    expected = case.outputs[name]
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    rtol = max(case.rtol, 2.0**-6) if expected.dtype.name == "bfloat16" else case.rtol
    np.testing.assert_allclose(
        got.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=case.atol, err_msg=name
    )


def test_all_cases_are_here():
    assert len(ATTENTION) >= 93 and len(OTHERS) >= 64
    assert {case.opset for case in ATTENTION} >= {23, 24, 25}
    given = [case.inputs.keys() for case in CACHED]
    assert sum("past_key" in names for names in given) >= 18
    assert sum("nonpad_kv_seqlen" in names for names in given) >= 13


def split_heads(x, heads):
    """(B, L, heads · width) to (B, heads, L, width)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def merge_heads(x):
    """(B, heads, L, width) to (B, L, heads · width)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def arrays_of(case):
    """Query, key and value in four dimensions, and whether the node has three."""
    arrays = [case.inputs[name] for name in "QKV"]
    packed = arrays[0].ndim == 3
    if packed:
        heads = [case.attributes[f"{name}_num_heads"] for name in ("q", "kv", "kv")]
        arrays = list(map(split_heads, arrays, heads))
    return *arrays, packed


def masking(case, n_queries, n_keys):
    """Express what closes keys with selfattn's arguments: by an option if there is one, else by a mask.

    In ONNX the first query's own key is the first one after the past. With a cache outside the node (lengths, but
    no past) the last query's own key is the last one that is not padding: each batch entry has its own diagonal.
    """
    mask, lengths = case.inputs.get("attn_mask"), case.inputs.get("nonpad_kv_seqlen")
    arguments = {}
    if lengths is not None:
        arguments["key_lengths"] = lengths[:, None]  # the same for all heads
    if mask is not None and mask.shape[-1] < n_keys:  # a short mask closes the keys that it does not reach
        hidden = np.zeros((), bool) if mask.dtype == bool else np.full((), -np.inf, mask.dtype)
        rest = np.broadcast_to(hidden, (*mask.shape[:-1], n_keys - mask.shape[-1]))
        mask = np.concatenate([mask, rest], axis=-1)

    is_causal = bool(case.attributes.get("is_causal", 0))
    sizes = [case.attributes.get(f"{side}_window_size", -1) for side in ("left", "right")]
    left, right = (None if size < 0 else size for size in sizes)
    n_past = case.inputs["past_key"].shape[2] if "past_key" in case.inputs else 0
    one_diagonal = lengths is None or "past_key" in case.inputs
    if not is_causal and left is None and right is None:
        pass
    elif one_diagonal and n_past == 0:
        arguments |= {"is_causal": is_causal, "window": (left, right)}
    elif one_diagonal and is_causal and n_past == n_keys - n_queries:
        arguments |= {"causal": "lower_right", "window": (left, right)}
    else:
        first = n_past if one_diagonal else lengths[:, None, None, None] - n_queries
        i, j = first + np.arange(n_queries)[:, None], np.arange(n_keys)
        allowed = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
        allowed &= (j <= i) | (not is_causal)
        allowed &= True if left is None else j >= i - left
        allowed &= True if right is None else j <= i + right
        if mask is None or mask.dtype == bool:
            mask = allowed if mask is None else mask & allowed
        else:
            mask = np.where(allowed, mask, mask.dtype.type(-np.inf))
    return arguments if mask is None else arguments | {"attn_mask": mask}


def attention_node(function, case):
    """Compute one ONNX Attention node: its output Y and, if it has that output, qk_matmul_output."""
    query, key, value, packed = arrays_of(case)
    if "past_key" in case.inputs:
        key = np.concatenate([case.inputs["past_key"], key], axis=2)
        value = np.concatenate([case.inputs["past_value"], value], axis=2)
    arguments = masking(case, query.shape[2], key.shape[2])
    arguments |= {"enable_gqa": True, "scale": case.attributes.get("scale")}
    if case.attributes.get("softcap", 0.0) > 0.0:
        arguments["softcap"] = case.attributes["softcap"]

    out, weights = function.scaled_dot_product_attention(query, key, value, return_weights=True, **arguments)
    results = {"Y": merge_heads(out) if packed else out}
    if "qk_matmul_output" in case.outputs:
        steps = sa.attention_steps(query, key, value, **arguments)
        uncapped = sa.attention_steps(query, key, value, **(arguments | {"softcap": None}))
        mode = case.attributes.get("qk_matmul_output_mode", 0)
        wanted = [uncapped.scaled_scores, steps.scaled_scores, steps.masked_scores, weights][mode]
        results["qk_matmul_output"] = wanted.astype(query.dtype)
    return results


@pytest.mark.parametrize("case", ATTENTION, ids=[case.name for case in ATTENTION])
def test_attention(case):
    for function in FUNCTIONS:
        results = attention_node(function, case)
        for name in case.outputs.keys() - {"present_key", "present_value"}:  # caches are concatenated above
            assert_meets(case, name, results[name])


# KVCache is what ONNX keeps for the caller: past keys and values, or a cache of which nonpad_kv_seqlen are in use.
# Each query has its own key there; not so where ONNX is causal with other numbers of queries than of new keys.
CACHED = [
    case
    for case in ATTENTION
    if "nonpad_kv_seqlen" in case.inputs
    or (
        "past_key" in case.inputs
        and (
            not case.attributes.get("is_causal", 0)
            or case.inputs["Q"].shape[-2] == case.inputs["K"].shape[-2]
        )
    )
]


def cached_node(case):
    """Compute one node with KVCache: its Y, and the cache's keys and values."""
    query, key, value, packed = arrays_of(case)
    cache = sa.KVCache(*key.shape[:2], key.shape[3], value_dim=value.shape[3], dtype=key.dtype)
    lengths = case.inputs.get("nonpad_kv_seqlen")
    if lengths is None:
        cache.append(case.inputs["past_key"], case.inputs["past_value"])
    cache.append(key, value, lengths=lengths)

    options = {"scale": case.attributes.get("scale"), "attn_mask": case.inputs.get("attn_mask")}
    if options["attn_mask"] is not None:  # the cache has as many keys as its longest sequence
        options["attn_mask"] = options["attn_mask"][..., : cache.lengths.max()]
    if case.attributes.get("softcap", 0.0) > 0.0:
        options["softcap"] = case.attributes["softcap"]
    if case.attributes.get("is_causal", 0):
        left = case.attributes.get("left_window_size", -1)
        out = cache.attend(query, window=(None if left < 0 else left, None), **options)
    else:
        out = sa.scaled_dot_product_attention(
            query, cache.key, cache.value, enable_gqa=True, key_lengths=cache.lengths[:, None], **options
        )
    return {"Y": merge_heads(out) if packed else out, "present_key": cache.key, "present_value": cache.value}


@pytest.mark.parametrize("case", CACHED, ids=[case.name for case in CACHED])
def test_attention_with_a_cache(case):
    results = cached_node(case)
    for name in case.outputs.keys() - {"qk_matmul_output"}:
        assert_meets(case, name, results[name])


def norm_node(function, case):
    x, scale = case.inputs["X"], case.inputs.get("Scale", case.inputs.get("scale"))
    shape = x.shape[case.attributes.get("axis", -1) % x.ndim :]
    eps = case.attributes.get("epsilon", 1e-5)
    if case.operator == "LayerNormalization":
        return function.layer_norm(x, shape, scale, case.inputs.get("B"), eps)
    return function.rms_norm(x, shape, np.broadcast_to(scale, shape), eps)


def gelu_node(function, case):
    [x] = case.inputs.values()
    return function.gelu(x, approximate=case.attributes.get("approximate", b"none").decode())


def softmax_node(function, case):
    [x] = case.inputs.values()
    softmax = function.softmax if case.operator == "Softmax" else function.log_softmax
    return softmax(x, case.attributes.get("axis", -1))


def rotary_node(function, case):
    x, cos, sin, *positions = case.inputs.values()
    packed = x.ndim == 3
    if packed:
        x = split_heads(x, case.attributes["num_heads"])
    if positions:
        cos, sin = cos[positions[0]], sin[positions[0]]
    n = case.attributes.get("rotary_embedding_dim", 0) or x.shape[-1]
    turned = function.apply_rotary_emb(x[..., :n], cos, sin, bool(case.attributes.get("interleaved", 0)))
    y = np.concatenate([turned, x[..., n:]], axis=-1)
    return merge_heads(y) if packed else y


NODES = {
    "Gelu": gelu_node,
    "LayerNormalization": norm_node,
    "LogSoftmax": softmax_node,
    "RMSNormalization": norm_node,
    "RotaryEmbedding": rotary_node,
    "Softmax": softmax_node,
}


@pytest.mark.parametrize("case", OTHERS, ids=[case.name for case in OTHERS])
def test_others(case):
    name = next(iter(case.outputs))  # norms may also give their mean and deviation
    for function in FUNCTIONS:
        assert_meets(case, name, NODES[case.operator](function, case))
