"""Transformers of the core for tests: drawn ones with tiny arrays, and calls that must not read beyond an array."""

import numpy as np

from selfattn import _core, nn
from selfattn.engine.transformer import Layer, Norm, Projection, Rotary, Transformer


def drawn(seed, dtype, *, d=None, lengths=(3, 1, 5), dropout=False):
    """Return a model, its inputs and where its sequences begin. Different seeds make different choices."""
    rng = np.random.default_rng(seed)

    def array(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(dtype)

    def flip():
        return bool(rng.integers(2))

    def linear(out, into):
        return Projection(array(out, into, scale=into**-0.5), array(out) if flip() else None)

    def norm(kind, width=None):
        bias = array(width or d) if kind == "layer" and flip() else None
        return Norm(array(width or d), bias, float(rng.choice([1e-12, 1e-5])), kind)

    d = int(rng.choice([4, 6, 12])) if d is None else d
    longest, vocabulary = max(lengths), 7
    layers = []
    for _ in range(rng.integers(1, 3)):
        key_heads = int(rng.choice([1, 2]))
        heads, width = key_heads * int(rng.choice([1, 2])), 2 * int(rng.integers(1, 4))
        wide, kind = int(rng.integers(1, 9)), str(rng.choice(["layer", "rms"]))
        if flip():
            query, key, value = linear((heads + 2 * key_heads) * width, d), None, None
        else:
            query, key, value = (linear(n * width, d) for n in (heads, key_heads, key_heads))
        angles = rng.standard_normal((longest, int(rng.integers(1, width // 2 + 1))))
        fed = bool(rng.integers(4))  # most have a feed-forward network
        # LayerNorm of two elements is their order: its gradient is what rounding leaves of 0.
        head_kind, post = str(rng.choice(["layer", "rms"])) if width > 2 else "rms", fed and flip()
        layers.append(
            Layer(
                heads, query, key, value,
                output=linear(d, heads * width),
                attention_norm=norm(kind) if flip() else None,
                up=linear(wide, d) if fed else None,
                gate=linear(wide, d) if fed and flip() else None,
                down=linear(d, wide) if fed else None,
                feed_forward_norm=norm(kind) if fed and flip() else None,
                num_key_heads=key_heads,
                norm_first=post or flip(),
                query_norm=norm(head_kind, width) if flip() else None,
                key_norm=norm(head_kind, width) if flip() else None,
                attention_post_norm=norm(kind) if post else None,
                feed_forward_post_norm=norm(kind) if post and flip() else None,
                activation=str(rng.choice(["gelu", "gelu_tanh", "relu", "silu"])),
                causal=flip(),
                window=(int(rng.integers(3)), 1) if flip() else (None, None),
                rotary=Rotary(np.cos(angles).astype(dtype), np.sin(angles).astype(dtype), flip()) if flip() else None,
                scale=0.3 if flip() else None,
                softcap=2.0 if flip() else 0.0,
                dropout=(0.25, 0.5, 0.125, 0.5) if dropout else (0.0, 0.0, 0.0, 0.0),
                seed=int(rng.integers(2**62)),
            )
        )  # fmt: skip
    ends = np.cumsum([0, *lengths])
    takes_ids = flip()
    factor = takes_ids and flip()
    adds = takes_ids and not factor
    most_heads = {layer.num_heads for layer in layers}
    masks = None, array(1, 1, longest, longest), array(len(lengths), 1, longest, longest) > -1
    mask = masks[rng.integers(3)]
    if len(most_heads) == 1 and flip():
        mask = array(1, *most_heads, longest, longest)
    if mask is not None and mask.dtype == bool:
        mask |= np.eye(longest, dtype=bool)
    model = Transformer(
        tuple(layers), table=array(vocabulary, d) if takes_ids else None, table_factor=2.5 if factor else None,
        always=array(d) if adds and flip() else None, positions=array(longest, d) if adds and flip() else None,
        embedding_norm=norm("layer") if flip() else None, final_norm=norm("rms") if flip() else None, mask=mask,
        pooling=(None, "mean", "first", "last")[rng.integers(4)],
    )  # fmt: skip
    inputs = rng.integers(0, vocabulary, ends[-1]) if takes_ids else array(ends[-1], d)
    if flip():  # with some keys closed
        bias = array(int(rng.choice([1, len(lengths)])), longest)
        bias[:, 1:][bias[:, 1:] < -1] = -np.inf
        model = model._replace(key_bias=bias)
    return model, inputs, ends


def good_call(width=24, heads=4, layers=3, lengths=(6, 3, 12)):
    """Ids, where their sequences begin, and a model of float64 as the core takes it."""
    rng = np.random.default_rng(0)
    model = nn.EmbeddingModel(
        str.split, 50, width, max_seq_len=12, num_layers=layers, num_heads=heads, dtype=np.float64, rng=1
    )
    return rng.integers(0, 50, sum(lengths)), np.cumsum([0, *lengths]), model._core_model()


def bad_calls():
    ids, starts, (own, numbers, layers) = good_call()
    parameters, of_layer = layers[0]
    table, *_ = own
    ones, eye = np.ones, np.ones((24, 24))
    packed = _core._int8_panels(np.ones((24, 24), np.int8), np.ones((24, 1), np.float32))

    def with_ids(changed, starts=starts, own=own):
        return changed, starts, (own, numbers, layers)

    def with_starts(*changed):
        return ids, np.array(changed, int), (own, numbers, layers)

    def with_own(n, array):
        return ids, starts, ((*own[:n], array, *own[n + 1 :]), numbers, layers)

    def with_numbers(*changed):
        return ids, starts, (own, changed, layers)

    def with_layers(changed):
        return ids, starts, (own, numbers, changed)

    def with_layer(changes, heads=of_layer[0], key_heads=of_layer[1], width=of_layer[2]):
        arrays = [*parameters, *[None] * (28 - len(parameters))]
        for n, array in changes.items():
            arrays[n] = array
        return with_layers(((tuple(arrays), (heads, key_heads, width, *of_layer[3:])),))

    return {
        "an id too large": with_ids(np.where(ids == ids[3], 50, ids)),
        "a negative id": with_ids(np.where(ids == ids[3], -1, ids)), "offsets beyond the ids": with_starts(0, 6, 9, 22),
        "offsets short of the ids": with_starts(0, 6, 9), "offsets that fall": with_starts(0, 9, 6, 21),
        "offsets that overflow": with_starts(0, 2**62, -(2**62), 21), "a first offset of 1": with_starts(1, 6, 9, 21),
        "an empty sentence": with_starts(0, 6, 6, 9, 21), "no offsets": with_starts(),
        "a sentence longer than the positions": with_starts(0, 21),
        "offsets of 32 bits": with_ids(ids, starts.astype(np.int32)), "ids of 32 bits": with_ids(ids.astype(np.int32)),
        "ids in two axes": with_ids(ids[None]), "ids with steps": with_ids(np.repeat(ids, 2)[::2]),
        "a list of ids": with_ids(ids.tolist()), "rows in place of ids": with_ids(ones((21, 24))),
        "rows of another width": with_ids(ones((21, 22)), own=(None, None, None, *own[3:])),
        "positions of rows": with_ids(ones((21, 24)), own=(None, None, table[:30], *own[3:])),
        "ids in place of rows": with_own(0, None), "a table of another width": with_own(0, ones((50, 22))),
        "a table of another dtype": with_own(0, table.astype(np.float32)),
        "an empty table": with_own(0, table[:0]),
        "a table in Fortran's order": with_own(0, np.asfortranarray(table)),
        "int8's table and no scales": with_own(0, (table.astype(np.int8),)),
        "a packed table with float64": with_own(0, packed), "a long row for all": with_own(1, ones(25)),
        "positions of another width": with_own(2, ones((50, 22))), "a mask of three axes": with_own(3, ones((1, 12, 12))),
        "a mask that is too small": with_own(3, ones((1, 1, 11, 11))),
        "a mask for two heads": with_own(3, ones((1, 2, 12, 12))),
        "a mask for two sequences": with_own(3, ones((2, 1, 12, 12))),
        "a mask of integers": with_own(3, ones((1, 1, 12, 12), np.int64)),
        "a mask of objects": with_own(3, ones((1, 1, 12, 12), object)),
        "a mask with more columns than rows": with_own(3, ones((1, 1, 12, 13))),
        "a bias of too few keys": with_own(4, ones((1, 11))),
        "a bias of keys for two sequences": with_own(4, ones((2, 12))),
        "a bias of keys in one axis": with_own(4, ones(12)),
        "a bias of keys of float32": with_own(4, ones((1, 12), np.float32)),
        "a bias of keys in Fortran's order": with_own(4, ones((12, 3)).T),
        "a long norm": with_own(5, ones(25)), "a norm's bias without a weight": with_own(6, ones(24)),
        "seven arrays": (ids, starts, (own[:7], numbers, layers)), "another width": with_numbers(22, *numbers[1:]),
        "no width": with_numbers(0, *numbers[1:]), "another type": with_numbers(24, False, *numbers[2:]),
        "another pooling": with_numbers(*numbers[:-1], 4), "a weight transposed": with_layer({0: eye.T[::-1]}),
        "no query": with_layer({0: None}), "a weight with too few rows": with_layer({2: ones((23, 24))}),
        "no value": with_layer({4: None}),
        "a value without a key": with_layer({0: ones((72, 24)), 1: None, 2: None, 3: None}),
        "a key's bias without a key": with_layer({0: ones((72, 24)), 1: None, 2: None, 4: None, 5: None}),
        "a short bias": with_layer({7: ones(23), 6: eye}), "no norm and no output": with_layer({8: None}),
        "up of no rows": with_layer({10: ones((0, 24))}), "up without down": with_layer({10: ones((40, 24))}),
        "down without up": with_layer({14: ones((24, 40))}),
        "a feed-forward network without an activation": with_layer({10: ones((40, 24)), 14: ones((24, 40))}),
        "a last norm without a feed-forward network": with_layer({16: ones(24)}),
        "angles wider than a head": with_layer({26: ones((30, 4)), 27: ones((30, 4))}),
        "too few angles": with_layer({26: ones((11, 3)), 27: ones((11, 3))}),
        "cosines without sines": with_layer({26: ones((30, 3))}),
        "a norm of heads as wide as the model": with_layer({18: ones(24)}), "a post norm after the sum": with_layer({22: ones(24)}),
        "a factor of a table with positions": with_numbers(*numbers, 2.0),
        "packed weights with float64": with_layer({0: packed, 2: packed, 4: packed}),
        "a packed key alone": with_layer({2: packed}), "key heads that do not divide": with_layer({}, key_heads=3),
        "heads that do not fit": with_layer({}, heads=5, key_heads=5), "no heads": with_layer({}, heads=0),
        "heads of no width": with_layer({}, width=0),
        "heads that overflow": with_layer({}, heads=2**40, key_heads=2**40, width=2**40),
        "29 arrays": with_layers((((*parameters, *[None] * 19), of_layer),)),
        "29 arrays of no layer": with_layers((None,)),
        "numbers that are missing": with_layers(((parameters, of_layer[:9]),)),
        "a layer of one": with_layers(((parameters,),)),
        "a dropout above 1": with_layers(((parameters, (*of_layer[:15], 0.0, 1.5, 0.0, 0.0)),)),
        "a list of layers, which may shrink": with_layers(list(layers)),
        "a list of arrays, which may shrink": with_layers(((list(parameters), of_layer),)),
    }  # fmt: skip
