"""The instruction sets of this build on this CPU: how to run on one of them, and how to compare all with the truth."""

import contextlib

import numpy as np
from gradients import assert_true_gradients, everything, true_gradients
from inputs import normal
from tolerances import assert_results, rounds_weights, truth

import selfattn as sa
from selfattn import _core

ISAS = _core.available_isas()


@contextlib.contextmanager
def using(isa):
    before = _core.get_isa()
    _core._set_isa(isa)
    try:
        assert _core.get_isa() == isa
        yield isa
        assert _core.get_isa() == isa  # nothing in between chose another
    finally:
        _core._set_isa(before)


def closing(length, closed):
    """Return options, by name, that close these keys for every query of two heads, and more keys for some."""
    n_keys = len(closed)
    i, j = np.ogrid[:length, :n_keys]
    holes = ~closed & ((i + j) % 3 > 0)
    lengths = [n_keys * 9 // 10, n_keys // 3]
    heads = {"alibi_slopes": np.array([0.1, 0.2]), "sinks": np.array([0.5, 1.0])}
    return {
        "boolean mask of a row": {"attn_mask": ~closed},
        "boolean mask": {"attn_mask": holes},
        "float mask of a row": {"attn_mask": np.where(closed, -np.inf, 0.0)},
        "float mask": {"attn_mask": np.where(holes, 0.5, -np.inf).astype(np.float32)},
        "lengths": {"key_lengths": lengths},
        "lengths, causal": {"key_lengths": lengths, "is_causal": True},
        "window": {"window": (length, 5), "attn_mask": ~closed},
        "dropout": {"attn_mask": holes, "dropout_p": 0.4, "rng": 7},
        "others": {"attn_mask": holes, "softcap": 2.0} | heads,
    }


def check(arrays, options=None, *, clean=None, grad_out=None, backward=True, num_threads=None, what=""):
    """Compare each instruction set with the truth of these arrays, or of `clean`, which differ only in masked keys."""
    options = options or {}
    known = arrays if clean is None else clean
    gqa, truths = options.get("enable_gqa", False), {}
    for isa in ISAS:
        with using(isa):
            at = f"{isa}: {[x.shape for x in arrays]} {what}"
            rounds = [rounds_weights(*known, gqa, has_pullback) for has_pullback in (False, True)]
            if (forward := ("forward", rounds[0])) not in truths:
                truths[forward] = truth(*known, **options)
            results = sa.scaled_dot_product_attention(
                *arrays, **options, return_lse=True, return_weights=True, num_threads=num_threads
            )
            assert_results(results, truths[forward], at)
            # takes another path
            alone = sa.scaled_dot_product_attention(*arrays, **options, num_threads=num_threads)
            assert alone.tobytes() == results[0].tobytes(), at
            if not backward:
                continue
            if grad_out is None:
                grad_out = normal(np.random.default_rng(5), alone.shape, alone.dtype)
            if (pulled := ("backward", rounds[1])) not in truths:
                truths[pulled] = true_gradients(known, options, grad_out)
            _, pullback = sa.scaled_dot_product_attention_vjp(
                *arrays, **options, wrt=everything(options), num_threads=num_threads
            )
            assert_true_gradients(pullback(grad_out), truths[pulled], at)
