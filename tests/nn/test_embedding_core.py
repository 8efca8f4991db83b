"""The C core of the embedding model against the same model composed of the package's other functions."""

import tracemalloc

import numpy as np
import pytest
from leaks import assert_nothing_stays, fails

import selfattn as sa
from selfattn import _core, nn

# width, heads, blocks, and the lengths of the sentences: around the vectors, the panels and tiles of every instruction
# set (64 columns, 24, 12, 6), the depth of a panel (128), the rows of a product (240) and of a part (384)
SHAPES = {
    "one token": (2, 1, 1, [1]),
    "narrow": (6, 3, 2, [1, 2, 3, 40]),
    "no blocks": (20, 2, 0, [3, 4]),
    "heads": (24, 4, 3, [6, 3, 12]),
    "wide": (130, 2, 2, [70, 1, 150]),
    "parts": (32, 2, 1, [19, 23, 1, 40, 7] * 12),
    "one long sentence": (66, 3, 1, [300]),
}


def model_of(width, heads, layers, lengths, dtype):
    return nn.EmbeddingModel(
        str.split, 50, width,
        max_seq_len=max(lengths, default=1), num_layers=layers, num_heads=heads, dtype=dtype, rng=1,
    )  # fmt: skip


def case(width, heads, layers, lengths, dtype=np.float64):
    """A model, its arrays with packed ids, and a gradient; drawn anew each time, so that nothing is shared."""
    rng = np.random.default_rng(0)
    model = model_of(width, heads, layers, lengths, dtype)
    for name, array in model.parameters().items():
        if "ln." in name:
            array[...] = rng.standard_normal(array.shape)
    cu_seqlens = np.cumsum([0, *lengths])
    ids = rng.integers(0, 50, cu_seqlens[-1])
    return (
        model,
        (ids, cu_seqlens, model._core_model()),
        rng.standard_normal((len(lengths), width)).astype(dtype),
    )


def composed(model, ids, cu_seqlens, grad):
    """The model made of the package's other layers, sentence by sentence: embeddings and gradients by name."""
    outputs, total = [], {name: np.zeros_like(array) for name, array in model.parameters().items()}
    for sentence, dy in zip(np.split(ids, cu_seqlens[1:-1]), grad, strict=True):
        x, table_pullback = model.embedding_layer.vjp(sentence)
        x, pullbacks = x + model.positions.table[: len(sentence)], []
        for block in model.attention_layers:
            x, pullback = block.vjp(x)
            pullbacks.append(pullback)
        outputs.append(x.mean(axis=0))
        dx = np.tile(dy / len(sentence), (len(sentence), 1))
        for n, pullback in reversed([*enumerate(pullbacks)]):
            dx, grads = pullback(dx)
            nn.add_gradients(total, {f"attention_layers.{n}.{name}": d for name, d in grads.items()})
        nn.add_gradients(total, {"embedding_layer.weight": table_pullback(dx)["weight"]})
    return np.array(outputs), total


def core_vjp(arguments, grad):
    y, saved = _core._transformer_forward(*arguments, True)
    return [y, *_core._transformer_backward(saved, grad, False, False)[0]]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_and_gradients(shape, dtype, isa):
    model, arguments, grad = case(*shape, dtype)
    wide = model_of(*shape, np.float64)
    wide.load_state_dict(model.state_dict())
    wide.positions.table[...] = model.positions.table
    y, grads = composed(wide, *arguments[:2], grad.astype(np.float64))
    got, expected = core_vjp(arguments, grad), [y, *grads.values()]
    np.testing.assert_array_equal(_core._transformer_forward(*arguments, False), got[0])
    assert len(got) == len(expected)
    sizes = [max(1.0, np.abs(x).max(initial=0)) for x in expected]
    for n in range(5, len(expected), 8):  # key.bias: its true gradient is 0, what comes out is rounding
        expected[n], sizes[n] = 0 * expected[n], sizes[n - 1]
    for n, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
        # sums of up to 300 terms, three layers in a row, relative to the largest element
        atol = 512 * np.finfo(dtype).eps * sizes[n]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=str(n))


def test_without_sentences_nothing_is_embedded_and_gradients_are_zero():
    model, arguments, grad = case(4, 1, 1, [])
    y, *grads = core_vjp(arguments, grad)
    assert y.shape == (0, 4)
    for gradient, array in zip(grads, model.parameters().values(), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(array))


@pytest.mark.parametrize("shape", ["heads", "wide", "parts", "one long sentence"])
def test_the_same_bits_for_any_number_of_threads(shape, isa):
    _, arguments, grad = case(*SHAPES[shape], np.float32)
    try:
        sa.set_num_threads(1)
        expected = core_vjp(arguments, grad)
        for threads in (2, 7):
            sa.set_num_threads(threads)
            for ours, one in zip(core_vjp(arguments, grad), expected, strict=True):
                np.testing.assert_array_equal(ours, one)
            np.testing.assert_array_equal(_core._transformer_forward(*arguments, False), expected[0])
    finally:
        sa.set_num_threads(None)


def test_a_sentence_does_not_depend_on_its_company():
    """Its bits are the same alone, first and last: how products are cut does not show."""
    _, (ids, cu_seqlens, core_model), _ = case(*SHAPES["parts"], np.float32)
    together = _core._transformer_forward(ids, cu_seqlens, core_model, False)
    for n in (0, 17, len(together) - 1):
        own = ids[cu_seqlens[n] : cu_seqlens[n + 1]]
        alone = _core._transformer_forward(own, np.array([0, len(own)]), core_model, False)
        np.testing.assert_array_equal(alone[0], together[n])


def test_how_attention_shares_a_sentence_out_does_not_show(isa):
    """A sentence alone may be halved for two threads, and few queries do not go through the matrix unit."""
    rng = np.random.default_rng(0)
    model = nn.EmbeddingModel(str.split, 50, 64, max_seq_len=100, rng=0)
    other = rng.integers(0, 50, 100).tolist()
    for length in (16, 17, 32, 33, 40, 48, 49, 63, 64, 65, 97):
        sentence = rng.integers(0, 50, length).tolist()
        for company in ([sentence, other], [sentence] * 20):
            np.testing.assert_array_equal(model(company)[0], model(sentence))


def test_a_pullback_may_be_called_again_and_gives_new_arrays():
    _, arguments, grad = case(*SHAPES["heads"])
    _, saved = _core._transformer_forward(*arguments, True)
    first, second = (_core._transformer_backward(saved, grad, False, False)[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert not np.shares_memory(one, other)
        np.testing.assert_array_equal(one, other)
    copies = [x.copy() for x in first]
    del saved, second
    core_vjp(arguments, 2 * grad)  # memory that was given back is used again
    for one, copy in zip(first, copies, strict=True):
        np.testing.assert_array_equal(one, copy)


def hostile():
    """Calls that must not read beyond an array, each with what is wrong."""
    _, (ids, cu_seqlens, (own, numbers, layers)), _ = case(*SHAPES["heads"])
    good = {"ids": ids, "cu_seqlens": cu_seqlens, "own": own, "numbers": numbers, "layers": layers}
    parameters, of_layer = layers[0]
    table = own[0]

    def with_own(n, array):
        return good | {"own": (*own[:n], array, *own[n + 1 :])}

    def with_layer(changes, **numbers):
        arrays = [*parameters, *[None] * (20 - len(parameters))]
        for n, array in changes.items():
            arrays[n] = array
        names = ["heads", "key_heads", "width"]
        return good | {
            "layers": (
                (
                    tuple(arrays),
                    tuple(numbers.get(name, x) for name, x in zip(names, of_layer, strict=False))
                    + of_layer[3:],
                ),
            )
        }

    yield "an id too large", good | {"ids": np.where(ids == ids[3], 50, ids)}
    yield "a negative id", good | {"ids": np.where(ids == ids[3], -1, ids)}
    yield "offsets beyond the ids", good | {"cu_seqlens": np.array([0, 6, 9, 22])}
    yield "offsets short of the ids", good | {"cu_seqlens": np.array([0, 6, 9])}
    yield "offsets that go back", good | {"cu_seqlens": np.array([0, 9, 6, 21])}
    yield "offsets that overflow", good | {"cu_seqlens": np.array([0, 2**62, -(2**62), 21])}
    yield "a first offset of 1", good | {"cu_seqlens": np.array([1, 6, 9, 21])}
    yield "an empty sentence", good | {"cu_seqlens": np.array([0, 6, 6, 9, 21])}
    yield "no offsets", good | {"cu_seqlens": np.zeros(0, int)}
    yield "a sentence longer than the positions", good | {"cu_seqlens": np.array([0, 21])}
    yield "ids of 32 bits", good | {"ids": ids.astype(np.int32)}
    yield "ids in two axes", good | {"ids": ids[None]}
    yield "ids with steps", good | {"ids": np.repeat(ids, 2)[::2]}
    yield "a list of ids", good | {"ids": ids.tolist()}
    yield "rows in place of ids", good | {"ids": np.ones((21, 24))}
    yield "ids in place of rows", with_own(0, None)
    yield "a table of another width", with_own(0, np.ones((50, 22)))
    yield "a table of another dtype", with_own(0, table.astype(np.float32))
    yield "an empty table", with_own(0, table[:0])
    yield "a table in Fortran's order", with_own(0, np.asfortranarray(table))
    yield "positions of another width", with_own(2, np.ones((50, 22)))
    yield "a mask of three axes", with_own(3, np.ones((1, 12, 12)))
    yield "a mask that is too small", with_own(3, np.ones((1, 1, 11, 11)))
    yield "a mask for two heads", with_own(3, np.ones((1, 2, 12, 12)))
    yield "a mask for two sequences", with_own(3, np.ones((2, 1, 12, 12)))
    yield "a mask of integers", with_own(3, np.ones((1, 1, 12, 12), np.int64))
    yield "a mask of numbers without a dtype", with_own(3, np.ones((1, 1, 12, 12), object))
    yield "a bias of too few keys", with_own(4, np.ones((1, 11)))
    yield "a bias of keys for two sequences", with_own(4, np.ones((2, 12)))
    yield "a bias of keys in one axis", with_own(4, np.ones(12))
    yield "a bias of keys of float32", with_own(4, np.ones((1, 12), np.float32))
    yield "a bias of keys in Fortran's order", with_own(4, np.ones((12, 3)).T)
    yield "a norm's bias without a weight", with_own(6, np.ones(24))
    yield "a long norm", with_own(5, np.ones(25))
    yield "a long row for all", with_own(1, np.ones(25))
    yield "seven arrays", good | {"own": own[:7]}
    yield "another width", good | {"numbers": (22, *numbers[1:])}
    yield "no width", good | {"numbers": (0, *numbers[1:])}
    yield "another type", good | {"numbers": (24, False, *numbers[2:])}
    yield "another pooling", good | {"numbers": (*numbers[:-1], 4)}
    yield "a weight with too few rows", with_layer({2: np.ones((23, 24))})
    yield "a short bias", with_layer({7: np.ones(23), 6: np.ones((24, 24))})
    yield "a weight transposed", with_layer({0: np.ones((24, 24)).T[::-1]})
    yield "no norm and no output", with_layer({8: None})
    yield "no value", with_layer({4: None})
    yield "no query", with_layer({0: None})
    yield "a value without a key", with_layer({0: np.ones((72, 24)), 1: None, 2: None, 3: None})
    yield "a key's bias without a key", with_layer({0: np.ones((72, 24)), 1: None, 2: None, 4: None, 5: None})
    yield "a last norm without a feed-forward network", with_layer({16: np.ones(24)})
    yield "up of no rows", with_layer({10: np.ones((0, 24))})
    yield "up without down", with_layer({10: np.ones((40, 24))})
    yield "down without up", with_layer({14: np.ones((24, 40))})
    yield (
        "a feed-forward network without an activation",
        with_layer({10: np.ones((40, 24)), 14: np.ones((24, 40))}),
    )
    yield "angles wider than a head", with_layer({18: np.ones((30, 4)), 19: np.ones((30, 4))})
    yield "too few angles", with_layer({18: np.ones((11, 3)), 19: np.ones((11, 3))})
    yield "cosines without sines", with_layer({18: np.ones((30, 3))})
    yield "key heads that do not divide", with_layer({}, key_heads=3)
    yield "heads that do not fit", with_layer({}, heads=5, key_heads=5)
    yield "no heads", with_layer({}, heads=0)
    yield "heads of no width", with_layer({}, width=0)
    yield "heads that overflow", with_layer({}, heads=2**40, key_heads=2**40, width=2**40)
    yield "21 arrays", good | {"layers": (((*parameters, *[None] * 11), of_layer),)}
    yield "numbers that are missing", good | {"layers": ((parameters, of_layer[:9]),)}
    yield "a layer of one", good | {"layers": ((parameters,),)}
    yield "a list of layers, which may shrink", good | {"layers": list(layers)}
    yield "a list of arrays, which may shrink", good | {"layers": ((list(parameters), of_layer),)}

    rows = (None, None, table[:30], *own[3:])
    yield "rows of another width", good | {"ids": np.ones((21, 22)), "own": (None, None, None, *own[3:])}
    yield "offsets of 32 bits", good | {"cu_seqlens": cu_seqlens.astype(np.int32)}
    yield "a mask with more columns than rows", with_own(3, np.ones((1, 1, 12, 13)))
    yield "int8's table and no scales", with_own(0, (table.astype(np.int8),))
    packed = _core._int8_panels(np.ones((24, 24), np.int8), np.ones((24, 1), np.float32))
    yield "packed weights beside float64", with_layer({0: packed, 2: packed, 4: packed})
    yield "a packed key alone", with_layer({2: packed})
    yield "a table of blocks beside float64", with_own(0, packed)
    chances = (*of_layer[:15], 0.0, 1.5, 0.0, 0.0)
    yield "a dropout above 1", good | {"layers": ((parameters, chances),)}
    yield "21 arrays of no layer", good | {"layers": (None,)}
    yield "positions of rows", good | {"ids": np.ones((21, 24)), "own": rows}


def run(call, keep):
    ids, cu_seqlens, *model = call.values()
    return _core._transformer_forward(ids, cu_seqlens, tuple(model), keep)


HOSTILE = dict(hostile())


@pytest.mark.parametrize("call", HOSTILE.values(), ids=HOSTILE)
def test_hostile_calls_are_refused(call):
    for keep in (False, True):
        with pytest.raises((TypeError, ValueError)):
            run(call, keep)


def test_hostile_gradients_are_refused():
    _, arguments, grad = case(*SHAPES["heads"])
    _, saved = _core._transformer_forward(*arguments, True)
    for wrong in (grad[:2], grad[:, :-1], grad.astype(np.float32), grad.T, np.asfortranarray(grad), grad[0]):
        with pytest.raises(ValueError, match=r"float64 with shape \(3, 24\)"):
            _core._transformer_backward(saved, wrong, True, False)
    for arguments in ((None, grad), (saved, None), (saved,), (grad, grad)):
        with pytest.raises((TypeError, ValueError)):
            _core._transformer_backward(*arguments, True, False)
    with pytest.raises(ValueError, match="float mask"):
        _core._transformer_backward(saved, grad, True, True)


def test_nothing_leaks():
    _, arguments, grad = case(*SHAPES["heads"])
    triplets = np.stack([grad] * 3)
    own, _, layers = arguments[2]
    held = [
        *arguments[:2],
        *own[::2][:2],
        *(x for arrays, _ in layers for x in arrays if x is not None),
        grad,
        triplets,
    ]

    def call():
        _, saved = _core._transformer_forward(*arguments, True)
        _core._transformer_backward(saved, grad, True, False)
        _core._transformer_forward(*arguments, False)
        for wrong in HOSTILE.values():
            fails(wrong, True, function=run)
        fails(saved, grad[:2], True, True, function=_core._transformer_backward)
        _, slopes = _core._proxy_confidences(triplets)
        _core._proxy_gradients(triplets, slopes)
        fails(grad, function=_core._proxy_confidences)
        fails(triplets, slopes[0], function=_core._proxy_gradients)
        _core._pack_ids([[1, 2], [3]], 10)
        _core._pack_ids([[1, 2], [99]], 10)

    assert_nothing_stays(call, held)


def test_memory_of_past_sizes_makes_room():
    """What small models left behind must not keep a larger one from meeting its own memory again."""
    _, small, _ = case(*SHAPES["narrow"])
    held = [_core._transformer_forward(*small, True) for _ in range(20)]  # more at a time than are kept
    del held
    _, arguments, grad = case(*SHAPES["wide"])
    tracemalloc.start()
    try:
        for _ in range(10):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            core_vjp(arguments, grad)
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 2**15  # what it works in and its gradients are some MiB


def test_ids_are_packed_or_want_a_closer_look():
    ids, cu_seqlens = _core._pack_ids([[3, 1], [0], [9, 9, 9]], 10)
    assert (ids.dtype, cu_seqlens.dtype) == (np.int64, np.int64)
    assert (ids.tolist(), cu_seqlens.tolist()) == ([3, 1, 0, 9, 9, 9], [0, 2, 3, 6])
    assert [array.tolist() for array in _core._pack_ids([], 10)] == [[], [0]]
    numbers = ([10], [-1], [2**63], [-(2**80)], [True], [1.0], ["1"], [np.int64(1)])
    for odd in ([], None, (1,), np.array([1]), *numbers):
        assert _core._pack_ids([[1], odd], 10) is None
    with pytest.raises(TypeError):
        _core._pack_ids(([1],), 10)
