"""Transformers for tests: settings are drawn so that any two values occur together in some case, with tiny arrays."""

import numpy as np

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

    def norm(kind):
        bias = array(d) if kind == "layer" and flip() else None
        return Norm(array(d), bias, float(rng.choice([1e-12, 1e-5])), kind)

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
                norm_first=flip(),
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
    most_heads = {layer.num_heads for layer in layers}
    masks = None, array(1, 1, longest, longest), array(len(lengths), 1, longest, longest) > -1
    mask = masks[rng.integers(3)]
    if len(most_heads) == 1 and flip():
        mask = array(1, *most_heads, longest, longest)
    if mask is not None and mask.dtype == bool:
        mask |= np.eye(longest, dtype=bool)
    model = Transformer(
        tuple(layers), table=array(vocabulary, d) if takes_ids else None,
        always=array(d) if takes_ids and flip() else None, positions=array(longest, d) if takes_ids and flip() else None,
        embedding_norm=norm("layer") if flip() else None, final_norm=norm("rms") if flip() else None, mask=mask,
        pooling=(None, "mean", "first", "last")[rng.integers(4)],
    )  # fmt: skip
    inputs = rng.integers(0, vocabulary, ends[-1]) if takes_ids else array(ends[-1], d)
    if flip():  # with some keys closed
        bias = array(int(rng.choice([1, len(lengths)])), longest)
        bias[:, 1:][bias[:, 1:] < -1] = -np.inf
        model = model._replace(key_bias=bias)
    return model, inputs, ends
