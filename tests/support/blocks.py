"""Random weights in the blocks of a GGUF file, and their values by the gguf package, which is an independent source."""

import numpy as np

from selfattn.engine.weights import QUANTS, Quants

# The positions of a block's float16 numbers.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
    "F16": (0,),
}


def drawn(rng, kind, out, width, scale=0.01):
    """Draw weights: any bits, and scales up to ``scale`` of either sign."""
    numbers, size = QUANTS[kind]
    raw = rng.integers(0, 256, (out, width // numbers, size), np.uint8)
    for at in HALVES.get(kind, ()):
        halves = (rng.uniform(-scale, scale, raw.shape[:2])).astype(np.float16)
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind in ("BF16", "F32"):
        wide = rng.standard_normal((out, width)).astype(np.float32).view(np.uint32)
        raw = (wide >> 16).astype(np.uint16).view(np.uint8) if kind == "BF16" else wide.view(np.uint8)
    return Quants(raw.reshape(out, width // numbers * size), kind, (out, width))


def expected(blocks):
    """Return the weights as float32, by the gguf package."""
    import gguf

    kind = gguf.GGMLQuantizationType[blocks.kind]
    return gguf.quants.dequantize(blocks.raw, kind).reshape(blocks.shape)
