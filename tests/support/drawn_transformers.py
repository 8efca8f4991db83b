"""Transformers of the core for tests: drawn ones with tiny arrays, and calls that must not read beyond an array."""

import numpy as np

from selfattn import _core, nn
from selfattn.engine.transformer import Call, Dropout, Layer, Norm, Projection, Rotary, Transformer


def drawn(seed, dtype, *, d=None, lengths=(3, 1, 5), dropout=False):
    """Return a model, its inputs, where its sequences begin, and what a call adds.

    Different seeds make different choices.
    """
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
    layers, seeds = [], []
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
                heads,
                query,
                key,
                value,
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
                rotary=Rotary(np.cos(angles).astype(dtype), np.sin(angles).astype(dtype), flip())
                if flip()
                else None,
                scale=0.3 if flip() else None,
                softcap=2.0 if flip() else 0.0,
            )
        )
        seeds.append(int(rng.integers(2**62)))
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
        tuple(layers),
        table=array(vocabulary, d) if takes_ids else None,
        table_factor=2.5 if factor else None,
        token_type_row=array(d) if adds and flip() else None,
        positions=array(longest, d) if adds and flip() else None,
        embedding_norm=norm("layer") if flip() else None,
        final_norm=norm("rms") if flip() else None,
    )
    pooling = (None, "mean", "first", "last")[rng.integers(4)]
    inputs = rng.integers(0, vocabulary, ends[-1]) if takes_ids else array(ends[-1], d)
    bias = None
    if flip():  # with some keys closed
        bias = array(int(rng.choice([1, len(lengths)])), longest)
        bias[:, 1:][bias[:, 1:] < -1] = -np.inf
    drops = tuple(Dropout(0.25, 0.5, 0.125, 0.5, seed) for seed in seeds) if dropout else ()
    call = Call(mask, bias, drops, pooling)
    if (
        seed % 2 and mask is not None and mask.dtype != bool and len(mask) == 1
    ):  # the same, as a part of the model
        return model._replace(position_bias=mask), inputs, ends, call._replace(mask=None)
    return model, inputs, ends, call


def good_call(width=24, heads=4, layers=3, lengths=(6, 3, 12)):
    """A model of float64, ids, where their sequences begin, and what the call adds, as the core takes them."""
    rng = np.random.default_rng(0)
    model = nn.EmbeddingModel(
        str.split, 50, width, max_seq_len=12, num_layers=layers, num_heads=heads, dtype=np.float64, rng=1
    )
    return model._model(), rng.integers(0, 50, sum(lengths)), np.cumsum([0, *lengths]), Call(pooling="mean")


def bad_calls():
    model, ids, starts, call = good_call()
    layer, table = model.layers[0], model.table
    ones, eye = np.ones, np.ones((24, 24))
    packed = _core._int8_panels(np.ones((24, 24), np.int8), np.ones((24, 1), np.float32))

    def with_ids(changed, starts=starts, **own):
        return model._replace(**own), changed, starts, call

    def with_starts(*changed):
        return model, ids, np.array(changed, int), call

    def with_own(**changed):
        return model._replace(**changed), ids, starts, call

    def with_call(**changed):
        return model, ids, starts, call._replace(**changed)

    def with_layers(*changed):
        return with_own(layers=changed)

    def with_layer(**changed):
        return with_layers(layer._replace(**changed))

    def both(weight, bias=None):
        return Projection(weight, bias)

    rows = {"table": None, "positions": None}
    joint = {"query": both(ones((72, 24))), "key": None, "value": None}
    half = {"table": table.astype(np.float32), "positions": None}
    return {
        "an id too large": with_ids(np.where(ids == ids[3], 50, ids)),
        "a negative id": with_ids(np.where(ids == ids[3], -1, ids)),
        "offsets beyond the ids": with_starts(0, 6, 9, 22),
        "offsets short of the ids": with_starts(0, 6, 9),
        "offsets that fall": with_starts(0, 9, 6, 21),
        "offsets that overflow": with_starts(0, 2**62, -(2**62), 21),
        "a first offset of 1": with_starts(1, 6, 9, 21),
        "an empty sentence": with_starts(0, 6, 6, 9, 21),
        "no offsets": with_starts(),
        "a sentence longer than the positions": with_starts(0, 21),
        "offsets of 32 bits": with_ids(ids, starts.astype(np.int32)),
        "ids of 32 bits": with_ids(ids.astype(np.int32)),
        "ids in two axes": with_ids(ids[None]),
        "ids with steps": with_ids(np.repeat(ids, 2)[::2]),
        "a list of ids": with_ids(ids.tolist()),
        "rows in place of ids": with_ids(ones((21, 24))),
        "rows of another width": with_ids(ones((21, 22)), **rows),
        "positions of rows": with_ids(ones((21, 24)), table=None),
        "ids in place of rows": with_own(**rows),
        "a table of another width": with_own(table=ones((50, 22))),
        "a table of another dtype": with_own(table=table.astype(np.float32)),
        "an empty table": with_own(table=table[:0]),
        "a table in Fortran's order": with_own(table=np.asfortranarray(table)),
        "a table in one axis": with_own(table=ones(24)),
        "int8's table and no scales": with_own(table=(table.astype(np.int8),)),
        "a packed table with float64": with_own(table=packed),
        "a table that is no array": with_own(table="table"),
        "a long row for all": with_own(token_type_row=ones(25)),
        "positions of another width": with_own(positions=ones((50, 22))),
        "a norm as wide as a head": with_own(final_norm=Norm(ones(6))),
        "a long norm": with_own(embedding_norm=Norm(ones(25))),
        "a norm's bias without a weight": with_own(embedding_norm=Norm(None, ones(24))),
        "a norm of another kind": with_own(embedding_norm=Norm(ones(24), kind="batch")),
        "a norm with an eps of text": with_own(embedding_norm=Norm(ones(24), eps="small")),
        "an array in place of a norm": with_own(embedding_norm=ones(24)),
        "a factor of a table with positions": with_own(table_factor=2.0),
        "a factor without a table": with_ids(ones((21, 24)), **rows, table_factor=2.0),
        "nothing that has a width": with_own(layers=(), **rows),
        "a list of layers, which may shrink": with_own(layers=[layer]),
        "a mask of three axes": with_call(mask=ones((1, 12, 12))),
        "a mask that is too small": with_call(mask=ones((1, 1, 11, 11))),
        "a mask for two heads": with_call(mask=ones((1, 2, 12, 12))),
        "a mask for two sequences": with_call(mask=ones((2, 1, 12, 12))),
        "a mask of integers": with_call(mask=ones((1, 1, 12, 12), np.int64)),
        "a mask of objects": with_call(mask=ones((1, 1, 12, 12), object)),
        "a mask with more columns than rows": with_call(mask=ones((1, 1, 12, 13))),
        "a mask beside a bias of positions": (
            model._replace(position_bias=ones((1, 1, 12, 12))),
            ids,
            starts,
            call._replace(mask=ones((1, 1, 12, 12))),
        ),
        "a bias of too few keys": with_call(key_bias=ones((1, 11))),
        "a bias of keys for two sequences": with_call(key_bias=ones((2, 12))),
        "a bias of keys in one axis": with_call(key_bias=ones(12)),
        "a bias of keys of float32": with_call(key_bias=ones((1, 12), np.float32)),
        "a bias of keys in Fortran's order": with_call(key_bias=ones((12, 3)).T),
        "another pooling": with_call(pooling="median"),
        "a precision of four integers": with_call(prompt_precision=4),
        "a dropout above 1": with_call(dropout=(Dropout(output=1.5),) * 3),
        "a dropout for one layer of three": with_call(dropout=(Dropout(),)),
        "a seed of text": with_call(dropout=(Dropout(seed="0"),) * 3),
        "no call": (model, ids, starts, None),
        "a call that is a plain tuple": (model, ids, starts, tuple(call)),
        "a model that is a plain tuple": (tuple(model), ids, starts, call),
        "a layer of one": with_layers((layer,)),
        "no layer": with_layers(None),
        "a weight transposed": with_layer(query=both(eye.T[::-1])),
        "a projection that is a plain tuple": with_layer(query=(eye, None)),
        "no query": with_layer(query=None),
        "a query without a weight": with_layer(query=both(None)),
        "a weight with too few rows": with_layer(key=both(ones((23, 24)))),
        "no value": with_layer(value=None),
        "a value without a key": with_layer(**joint | {"value": layer.value}),
        "a key's bias without a key": with_layer(**joint | {"key": both(None, ones(24))}),
        "a short bias": with_layer(output=both(eye, ones(23))),
        "no norm and no output": with_layer(attention_norm=None),
        "up of no rows": with_layer(up=both(ones((0, 24))), down=both(ones((24, 0)))),
        "up without down": with_layer(up=both(ones((40, 24)))),
        "down without up": with_layer(down=both(ones((24, 40)))),
        "a feed-forward network without an activation": with_layer(
            up=both(ones((40, 24))), down=both(ones((24, 40))), activation=None
        ),
        "an activation that nobody knows": with_layer(activation="swish"),
        "a last norm without a feed-forward network": with_layer(feed_forward_norm=Norm(ones(24))),
        "angles wider than a head": with_layer(rotary=Rotary(ones((30, 4)), ones((30, 4)))),
        "too few angles": with_layer(rotary=Rotary(ones((11, 3)), ones((11, 3)))),
        "cosines without sines": with_layer(rotary=Rotary(ones((30, 3)), None)),
        "more sines than cosines": with_layer(rotary=Rotary(ones((30, 3)), ones((31, 3)))),
        "a norm of heads as wide as the model": with_layer(query_norm=Norm(ones(24))),
        "a post norm after the sum": with_layer(attention_post_norm=Norm(ones(24))),
        "packed weights with float64": with_layer(query=both(packed), key=both(packed), value=both(packed)),
        "a packed key alone": with_ids(ids, **half, layers=(layer._replace(key=both(packed)),)),
        "key heads that do not divide": with_layer(num_key_heads=3),
        "heads that do not fit": with_layer(num_heads=5, num_key_heads=5),
        "no heads": with_layer(num_heads=0),
        "a number of heads that is no int": with_layer(num_heads=4.0),
        "more heads than rows": with_layer(num_heads=2**40, num_key_heads=2**40),
        "heads that overflow": with_layer(num_heads=2**63, num_key_heads=2**63),
        "a flag that is a number": with_layer(causal=1),
        "a window of one bound": with_layer(window=(1,)),
        "a scale of text": with_layer(scale="1"),
    }
