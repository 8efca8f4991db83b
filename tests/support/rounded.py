"""Numbers rounded to int8 and bfloat16 by NumPy, for tests of what the core and the models round."""

import numpy as np

GROUP = 128  # columns of int8 that have one scale


def groups_of(x):
    """Cut rows into groups, and pad the last with its last number, which changes no range."""
    count = -(-x.shape[1] // GROUP)
    return np.pad(x, ((0, 0), (0, count * GROUP - x.shape[1])), "edge").reshape(len(x), count, GROUP)


def int8(weight):
    """Return values and scales; the largest value of a group is 127."""
    parts = groups_of(weight)
    scale = np.abs(parts).max(2) / np.float32(127)
    values = np.rint(parts / np.where(scale == 0, np.float32(1), scale)[..., None]).astype(np.int8)
    return np.ascontiguousarray(values.reshape(len(weight), -1)[:, : weight.shape[1]]), scale


def from_int8(values, scale):
    return values * np.repeat(scale, GROUP, 1)[:, : values.shape[1]]


def bits(x):
    """Return the upper halves of float32 numbers, rounded to nearest, ties to even."""
    whole = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def rounded_rows(x, kind):
    """Round rows as products do: in int8, to 255 steps between the least and the greatest number of each group."""
    x = x.astype(np.float32)
    if kind == "bfloat16":
        return from_bits(bits(x)).astype(np.float64)
    parts = groups_of(x)
    least = parts.min(2, keepdims=True)
    span = parts.max(2, keepdims=True) - least
    q = np.rint((parts - least) * (np.float32(255) / np.where(span == 0, np.float32(1), span)))
    values = least.astype(np.float64) + q * (span / np.float32(255)).astype(np.float64)
    return values.reshape(len(x), -1)[:, : x.shape[1]]
