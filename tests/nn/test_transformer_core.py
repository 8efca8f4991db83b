"""The C core of the transformer against the reference: every setting, drawn, on every instruction set."""

import numpy as np
import pytest
from drawn_transformers import drawn

from selfattn import reference
from selfattn.engine import transformer
from selfattn.engine.transformer import Layer, Norm, Projection, Transformer

# Around the vectors, panels and tiles of the instruction sets; the width is then drawn to be small or given.
LENGTHS = {"short": ((3, 1, 5), None), "tiles": ((17, 1, 40, 33), 24), "wide": ((130, 2), 130)}


def close(got, expected, dtype, what):
    assert (got.shape, got.dtype) == (expected.shape, dtype), what
    # Sums of up to 300 terms, in up to eight products one behind the other, relative to the largest element.
    atol = 2048 * np.finfo(dtype).eps * max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=what)


@pytest.mark.parametrize(
    ("seed", "size", "dropout", "dtype"),
    [
        (
            seed,
            ("short", "short", "tiles", "wide")[seed % 4],
            seed % 3 == 0,
            (np.float32, np.float64)[seed % 2],
        )
        for seed in range(40)
    ],
)
def test_results_and_gradients(seed, size, dropout, dtype, isa):
    lengths, width = LENGTHS[size]
    model, inputs, ends = drawn(seed, dtype, d=width, lengths=lengths, dropout=dropout)
    # The core has the gradient of a mask for each head, where no two heads share a key head.
    heads = {number for layer in model.layers for number in (layer.num_heads, layer.num_key_heads)}
    shared = (
        model.mask is not None
        and model.mask.dtype != bool
        and {(1, n) for n in heads} == {model.mask.shape[:2]}
    )
    y, pullback = transformer.vjp(model, inputs, ends, wants_mask=shared)
    truth, true_pullback = reference.transformer_vjp(model, inputs, ends, np.float64)
    close(y, truth, dtype, "y")
    np.testing.assert_array_equal(transformer.forward(model, inputs, ends), y)

    dy = np.random.default_rng(1).standard_normal(y.shape).astype(dtype)
    (dx, grads, d_mask), (true_dx, true_grads, true_mask) = pullback(dy), true_pullback(dy)
    close(dx, true_dx, dtype, "dx")
    assert len(grads) == len(true_grads)
    for n, (grad, expected) in enumerate(zip(grads, true_grads, strict=True)):
        close(grad, expected, dtype, f"gradient {n}")
    if shared:
        close(d_mask, true_mask, dtype, "dmask")


def test_masks_of_any_dtype_and_layout(isa):
    """They are read as they are: a copy of a batch's mask would be as large as the mask."""
    model, inputs, ends = drawn(1, np.float32, lengths=(40, 33))
    mask = (
        np.random.default_rng(0).integers(-8, 8, (2, 1, 40, 40)).astype(np.float32)
    )  # the same numbers in every dtype
    mask[mask == -8] = -np.inf
    mask[..., 0] = 0
    expected = transformer.forward(model._replace(mask=mask), inputs, ends)
    unaligned = np.zeros(mask.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(mask.shape)
    unaligned[...] = mask
    others = [mask.astype(dtype) for dtype in (np.float64, np.float16, ">f4", ">f8")]
    for other in (
        unaligned,
        np.asfortranarray(mask),
        np.repeat(mask, 2, axis=-1)[..., ::2],
        mask[..., ::-1].copy()[..., ::-1],
        *others,
    ):
        np.testing.assert_array_equal(transformer.forward(model._replace(mask=other), inputs, ends), expected)


def test_a_window_wider_than_any_sequence_is_none():
    rng = np.random.default_rng(0)
    table, query = rng.standard_normal((5, 4)), rng.standard_normal((12, 4))
    layer = transformer.Layer(2, transformer.Projection(query), output=transformer.Projection(np.eye(4)))
    inputs, ends = np.arange(5), np.array([0, 5])
    expected = transformer.forward(transformer.Transformer((layer,), table), inputs, ends)
    wide = transformer.Transformer((layer._replace(window=(2**63 - 2, 2**63 - 2)),), table)
    np.testing.assert_array_equal(transformer.forward(wide, inputs, ends), expected)


@pytest.mark.parametrize("tokens", [1, 3, 7, 48])
def test_weights_that_do_not_stay_in_a_cache(tokens, isa):
    """With more than a megabyte few rows fetch them ahead. A token's bits are those that it has among many."""
    rng = np.random.default_rng(0)
    d, wide = 200, 300

    def linear(out, into):
        return Projection((rng.standard_normal((out, into)) * into**-0.5).astype(np.float32))

    def norm():
        return Norm(np.ones(d, np.float32), np.zeros(d, np.float32))

    layer = Layer(
        4, linear(3 * d, d), None, None,
        output=linear(d, d), attention_norm=norm(), up=linear(wide, d), down=linear(d, wide), feed_forward_norm=norm(),
    )  # fmt: skip
    model = Transformer((layer,))
    x = rng.standard_normal((60, d)).astype(np.float32)
    among_many = transformer.forward(model, x, np.arange(61))
    close(among_many, reference.transformer_vjp(model, x, np.arange(61), np.float64)[0], np.float32, "y")
    alone = transformer.forward(model, x[:tokens], np.arange(tokens + 1))
    np.testing.assert_array_equal(alone, among_many[:tokens])
