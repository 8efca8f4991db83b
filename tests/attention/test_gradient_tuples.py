"""What pullbacks return where `wrt` selects gradients: a tuple of just those, in its order, with every name as an
attribute."""

import copy
import pickle
from itertools import permutations

import numpy as np
import pytest
from inputs import random_inputs

import selfattn as sa
from selfattn import reference

Q, K, V = random_inputs((2, 5, 4), dtype=np.float64)
OPTIONS = {"attn_mask": np.zeros((5, 5)), "alibi_slopes": np.array([0.1, 0.2]), "sinks": np.zeros(2)}
BIASES = ("bias", "offset_bias")
NAMES = ("query", "key", "value", *OPTIONS)


def pull(wrt=None, options=OPTIONS):
    named = {} if wrt is None else {"wrt": wrt}
    out, pullback = sa.scaled_dot_product_attention_vjp(Q, K, V, **options, **named)
    return pullback(np.ones_like(out))


def test_query_key_and_value_are_unpacked():
    dq, dk, dv = grads = pull()
    assert grads._fields == NAMES[:3]
    assert dq is grads.query and dk is grads.key and dv is grads.value
    packed = [x.swapaxes(0, 1) for x in (Q, K, V)]
    out, pullback = sa.varlen_attention_vjp(*packed, [0, 2, 5], [0, 2, 5])
    dq, dk, dv = grads = pullback(np.ones_like(out))
    assert dq is grads.query and dk is grads.key and dv is grads.value


def test_the_mask_alone_is_unpacked():
    (dmask,) = grads = pull("attn_mask")
    assert dmask.shape == (5, 5) and dmask is grads.attn_mask and grads.query is None
    packed, masks = [x.swapaxes(0, 1) for x in (Q, K, V)], [np.zeros((2, 2)), None]
    out, pullback = sa.varlen_attention_vjp(
        *packed, [0, 2, 5], [0, 2, 5], attn_mask=masks, wrt=("attn_mask",)
    )
    ((first, none),) = pullback(np.ones_like(out))
    assert first.shape == (2, 2) and none is None


@pytest.mark.parametrize("n", [0, 1, 2, 6])
def test_the_order_is_that_of_wrt(n):
    whole = pull(NAMES)
    for wrt in [*permutations(NAMES, n)][::37]:
        grads = pull(list(wrt))
        assert isinstance(grads, tuple) and isinstance(grads, sa.AttentionGradients)
        assert grads._fields == wrt and len(grads) == n and list(grads._asdict()) == [*wrt]
        for name, gradient in zip(wrt, grads, strict=True):
            assert getattr(grads, name) is gradient
            np.testing.assert_array_equal(gradient, getattr(whole, name))
        assert all(getattr(grads, name) is None for name in NAMES if name not in wrt)


def test_a_set_has_the_order_of_the_arguments():
    for wrt in (set(NAMES), frozenset(NAMES)):
        assert pull(wrt)._fields == NAMES
    assert pull({"value": 1, "query": 2}.keys())._fields == ("value", "query")


def test_it_says_what_it_has():
    grads = pull(("sinks", "key"))
    assert repr(grads).startswith("AttentionGradients(sinks=array([") and "query" not in repr(grads)
    with pytest.raises(AttributeError, match=r"^AttentionGradients has no attribute 'q'; it has sinks, key$"):
        grads.q  # noqa: B018
    for name in ("sinks", "query", "q"):  # of those that it has, those that wrt does not name, and others
        with pytest.raises(AttributeError):
            setattr(grads, name, 1)
    with pytest.raises(TypeError, match=r"AttentionGradients has query, .*, sinks, .*, not keys"):
        sa.AttentionGradients(keys=1)
    assert sa.AttentionGradients._fields == (*NAMES, *BIASES)


def test_it_is_a_tuple_of_names():
    one, two = np.ones(2), np.zeros(2)
    grads = sa.AttentionGradients(value=one, query=two)
    assert grads == (one, two) and grads[::-1] == (two, one) and grads[1:] == (two,)
    changed = grads._replace(query=one)
    assert changed.query is one and type(changed) is type(grads)
    with pytest.raises((TypeError, ValueError), match="sinks"):
        grads._replace(sinks=one)
    rebuilt = type(grads)(*(2 * x for x in grads))  # as tools for named tuples do
    assert rebuilt._fields == ("value", "query") and rebuilt.value[0] == 2
    match grads:
        case sa.AttentionGradients(query=found):
            assert found is two


@pytest.mark.parametrize(
    "repeated",
    [*(lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in range(6)), copy.copy, copy.deepcopy],
)
def test_pickles_and_copies_have_the_same_names(repeated):
    for grads in (pull(("sinks", "key")), pull(()), sa.RotaryGradients(sin=np.ones(2))):
        again = repeated(grads)
        assert type(again) is type(grads) and again._fields == grads._fields
        np.testing.assert_equal(again._asdict(), grads._asdict())
        assert all((a is b) == (repeated is copy.copy) for a, b in zip(again, grads, strict=True))


def test_the_reference_has_the_gradients_of_what_was_given():
    out, pullback = reference.scaled_dot_product_attention_vjp(Q, K, V)
    dq, dk, dv = grads = pullback(np.ones_like(out))
    assert dq is grads.query and dk is grads.key and dv is grads.value and grads.sinks is None
    boolean = OPTIONS | {"attn_mask": np.ones((5, 5), bool)}
    for options, names in ((OPTIONS, NAMES), (boolean, [name for name in NAMES if name != "attn_mask"])):
        out, pullback = reference.scaled_dot_product_attention_vjp(Q, K, V, **options)
        found = pullback(np.ones_like(out))
        assert isinstance(found, sa.AttentionGradients) and list(found._fields) == [*names]


@pytest.mark.parametrize("module", [sa, reference])
def test_rotary_gradients(module):
    table = np.ones((5, 2))
    for wrt, names in [(("sin", "x"), ("sin", "x")), ("cos", ("cos",)), ({"sin", "cos"}, ("cos", "sin"))]:
        y, pullback = module.apply_rotary_emb_vjp(Q, table, table, wrt=wrt)
        grads = pullback(np.ones_like(y))
        assert isinstance(grads, sa.RotaryGradients) and grads._fields == names
        assert [getattr(grads, name) is None for name in ("x", "cos", "sin")] == [
            name not in names for name in ("x", "cos", "sin")
        ]
    y, pullback = module.apply_rotary_emb_vjp(Q, table, table)
    dx, dcos, dsin = pullback(np.ones_like(y))
    assert (dx.shape, dcos.shape, dsin.shape) == (Q.shape, table.shape, table.shape)
    with pytest.raises(ValueError, match="wrt names x twice"):
        module.apply_rotary_emb_vjp(Q, table, table, wrt=("x", "x"))
    with pytest.raises(AttributeError, match="RotaryGradients has no attribute 'y'; it has sin, x"):
        sa.RotaryGradients(sin=1, x=2).y  # noqa: B018
