"""Calls of attention that Hypothesis draws, small ones, with every option that has a definition."""

import numpy as np
from hypothesis import strategies as st


def broadcast_shape(draw, shape):
    """Draw a shape that broadcasts to `shape`: some axes 1, some leading axes left out."""
    shape = [draw(st.sampled_from([1, n])) for n in shape]
    return tuple(shape[draw(st.integers(0, len(shape))) :])


@st.composite
def problems(draw):
    """Draw arrays and options of an attention call, in every legal combination."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_queries, n_keys = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    width, v_width = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    options = {}
    lead = draw(st.sampled_from([(), (1,), (2,), (3, 2), (2, 1, 2)]))
    if lead and draw(st.booleans()):
        kv_lead, lead = lead, (*lead[:-1], lead[-1] * draw(st.integers(1, 3)))
        options["enable_gqa"] = True
        leads = [lead, kv_lead, kv_lead]
    else:
        leads = [broadcast_shape(draw, lead) for _ in range(3)]
        lead = np.broadcast_shapes(*leads)
    sizes = [(n_queries, width), (n_keys, width), (n_keys, v_width)]
    arrays = [rng.normal(size=(*dims, *size)) for dims, size in zip(leads, sizes, strict=True)]

    pairs = (*lead, n_queries, n_keys)
    match draw(st.sampled_from(["no", "bool", "float"])):
        case "bool":
            options["attn_mask"] = rng.random(broadcast_shape(draw, pairs)) < 0.7
        case "float":
            mask = rng.normal(size=broadcast_shape(draw, pairs))
            name = draw(st.sampled_from(["attn_mask", "bias"]))
            options[name] = np.where(rng.random(mask.shape) < 0.7, mask, -np.inf)
            if name == "bias" and draw(st.booleans()):
                options["attn_mask"] = rng.random(broadcast_shape(draw, pairs)) < 0.7
    if draw(st.booleans()):
        offsets = n_queries + n_keys - 1 if n_queries and n_keys else 0
        numbers = rng.normal(size=(*broadcast_shape(draw, lead), offsets))
        options["offset_bias"] = np.where(rng.random(numbers.shape) < 0.9, numbers, -np.inf)
    if draw(st.booleans()):
        options["is_causal"] = True
    corners = [None, "upper_left"] + ["lower_right"] * ("is_causal" not in options)
    options["causal"] = draw(st.sampled_from(corners))
    if draw(st.booleans()):
        options["window"] = tuple(draw(st.one_of(st.none(), st.integers(0, 4))) for _ in range(2))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.3, 5.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([-0.5, 0.0, 1.0]))
    if draw(st.booleans()):
        options["alibi_slopes"] = rng.normal(size=broadcast_shape(draw, lead))
    if draw(st.booleans()):
        sinks = rng.normal(size=broadcast_shape(draw, lead))
        options["sinks"] = np.where(rng.random(sinks.shape) < 0.8, sinks, -np.inf)
    if draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, n_keys, broadcast_shape(draw, lead), endpoint=True)
    return arrays, options, draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])), draw(st.integers(0, 2**64 - 1))
