"""Bad arguments to scaled_dot_product_attention: the exception, what it says, and that nothing was written."""

import inspect
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from bad_calls import BAD, array, undecided_overlaps
from inputs import random_inputs
from processes import run_script

import selfattn as sa

attend = sa.scaled_dot_product_attention


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_arguments(bad):
    """The exception is right, and the call writes to no output, wrong or right."""
    with pytest.raises(bad.error, match=bad.match) as caught:
        attend(**bad.arguments())
    assert type(caught.value) in (TypeError, ValueError, ZeroDivisionError) or isinstance(
        caught.value, MemoryError
    )
    out = bad.change.get("out", np.full((2, 3, 6), 7.0, np.float32))
    before = None if np.asarray(out).dtype.hasobject else np.asarray(out).tobytes()
    with pytest.raises((TypeError, ValueError, ZeroDivisionError, MemoryError)):
        attend(**bad.arguments() | {"out": out})
    assert before is None or np.asarray(out).tobytes() == before


def test_the_call_itself():
    q = array((2, 4))
    with pytest.raises(TypeError, match="at most 6 positional arguments \\(7 given\\)"):
        attend(q, q, q, None, 0.0, False, 1.0)
    with pytest.raises(TypeError, match="multiple values for argument 'query'"):
        attend(q, q, q, query=q)
    with pytest.raises(TypeError, match="multiple values for argument 'attn_mask'"):
        attend(q, q, q, None, attn_mask=None)
    with pytest.raises(TypeError):
        attend(**{1: 2})
    assert attend(q, value=q, key=q).shape == (2, 4)
    # names that are not interned, such as keys of ** that were built at run time
    assert attend(
        **{"".join(("que", "ry")): q, "".join(("k", "ey")): q, "".join(("val", "ue")): q}
    ).shape == (2, 4)


def test_values_that_count_as_not_given():
    q, k, v = random_inputs((3, 4), 5)
    parameters = list(inspect.signature(attend).parameters.values())
    nothing = {each.name: None for each in parameters[6:] if each.default is None}
    np.testing.assert_array_equal(attend(q, k, v, None, 0, None, **nothing), attend(q, k, v))


def test_an_empty_list_is_one_of_integers():
    """NumPy converts an empty list to float64."""
    nothing = np.ones((0, 2, 4))
    assert attend(nothing, nothing, nothing, key_lengths=[]).shape == (0, 2, 4)
    assert sa.attention_steps(nothing, nothing, nothing, key_lengths=[]).output.shape == (0, 2, 4)
    assert sa.BlockMask.from_documents([]).to_dense(0, 0).shape == (0, 0)
    with pytest.raises(ValueError, match=r"indices must have shape \(2,\) or \(\), got \(0,\)"):
        sa.KVCache(2, 1, 4).reorder([])
    with pytest.raises(TypeError, match="key_lengths must be of an integer dtype, got float64"):
        attend(nothing, nothing, nothing, key_lengths=[1.0])
    for kind in ("U3", "c16", bool, object):
        empty = np.zeros(0, kind)
        for function in (attend, sa.attention_steps):
            with pytest.raises(TypeError, match="key_lengths must be"):
                function(nothing, nothing, nothing, key_lengths=empty)
        with pytest.raises(TypeError, match="query_ids must be integers, got"):
            sa.BlockMask.from_documents(empty)


def test_the_generators_own_error_comes_through():
    class Broken:
        def integers(self, *_, **__):
            raise KeyError("no numbers left")

    class Odd(Broken):
        def integers(self, *_, **__):
            return "three"

    q = array((3, 4))
    with pytest.raises(KeyError, match="no numbers left"):
        attend(q, q, q, dropout_p=0.5, rng=Broken())
    with pytest.raises(TypeError):
        attend(q, q, q, dropout_p=0.5, rng=Odd())
    with pytest.raises(TypeError, match="RandomState"):
        attend(q, q, q, dropout_p=0.5, rng=np.random.RandomState(0))


class Raises:
    """An argument that raises an exception when it is read, which must reach the caller."""

    def __index__(self):
        raise KeyboardInterrupt("while it was read")

    __float__ = __index__


@pytest.mark.parametrize(
    "call",
    [
        lambda x: sa.scaled_dot_product_attention(x, x, x, window=(Raises(), None)),
        lambda x: sa.scaled_dot_product_attention(x, x, x, num_threads=Raises()),
        lambda x: sa.scaled_dot_product_attention(x, x, x, dropout_p=0.5, rng=Raises()),
        lambda x: sa.scaled_dot_product_attention(x, x, x, scale=Raises()),
        lambda x: sa.softmax(x, axis=Raises()),
        lambda x: sa.layer_norm(x, Raises()),
        lambda x: sa.layer_norm(x, (Raises(),)),
        lambda x: sa.layer_norm(x, 3, eps=Raises()),
        lambda x: sa.set_num_threads(Raises()),
    ],
)
def test_what_an_argument_raises_comes_through(call):
    with pytest.raises(KeyboardInterrupt, match="while it was read"):
        call(np.ones((2, 3)))


def test_lengths_that_change_during_a_call():
    """The call must not read what another thread writes after the check. The test runs in a new process, which could
    crash.
    """
    script = """
    import threading
    import numpy as np
    import selfattn as sa

    q = np.random.default_rng(0).standard_normal((16, 150, 32), dtype=np.float32)
    lengths = np.full(16, 100)
    expected = sa.scaled_dot_product_attention(q, q, q, key_lengths=lengths, num_threads=1)
    stop = threading.Event()
    def change():
        while not stop.is_set():
            lengths[:] = 10**12
            lengths[:] = 100  # so it is when this thread loses the GIL, at the end of a loop
    thread = threading.Thread(target=change)
    thread.start()
    right = 0
    for _ in range(60):
        try:
            out = sa.scaled_dot_product_attention(q, q, q, key_lengths=lengths, num_threads=1)
        except ValueError as error:
            assert "key_lengths must be between 0 and" in str(error)
        else:
            assert (out == expected).all()
            right += 1
    stop.set()
    thread.join()
    assert right > 10, right
    """
    run_script(script)


def test_a_window_that_changes_while_it_is_read():
    class Clears:
        def __index__(self):
            window.clear()
            return 1

    q = array((3, 4))
    window = [Clears(), 2]
    np.testing.assert_array_equal(attend(q, q, q, window=window), attend(q, q, q, window=(1, 2)))


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "key_lengths"]
)
def test_out_overlaps_an_input(name):
    memory = np.zeros(1000, np.uint8)
    arguments = dict(zip(("query", "key", "value"), random_inputs((2, 5, 4)), strict=True))
    shape = (2,) if name not in arguments and name != "attn_mask" else (2, 5, 5 if name == "attn_mask" else 4)
    dtype = np.dtype(
        {"alibi_slopes": np.float64, "sinks": np.float64, "key_lengths": np.int64}.get(name, np.float32)
    )
    size = dtype.itemsize * int(np.prod(shape))
    arguments[name] = memory[:size].view(dtype).reshape(shape)
    for first in (0, 4, 12, size - 1):
        out = memory[first : first + 160].view(np.float32).reshape(2, 5, 4)
        for view in (out, out[::-1, ::-1, ::-1]):
            with pytest.raises(ValueError, match=f"out overlaps {name}"):
                attend(**arguments, out=view)
    assert not memory.any()
    attend(**arguments, out=memory[size : size + 160].view(np.float32).reshape(2, 5, 4))
    assert not memory[:size].any()


def test_a_copied_input_cannot_overlap():
    memory = np.zeros(40, np.float32)
    _, k, v = random_inputs((2, 5, 4))
    out = memory.reshape(2, 5, 4)
    attend(out.astype(np.int8), k.astype(np.int8), v.tolist(), out=np.zeros((2, 5, 4)))


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "key_lengths"])
@pytest.mark.parametrize("function", [attend, sa.scaled_dot_product_attention_vjp])
def test_out_overlaps_an_input_that_is_converted(function, name):
    """The forward call works on a copy, but a pullback reads the argument again."""
    memory = np.zeros(40, np.float32)
    q, k, v = random_inputs((2, 5, 4))
    small = memory[:2].view(np.int32 if name == "key_lengths" else np.float32)
    for given in (small, memoryview(small)):
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            function(q, k, v, **{name: given}, out=memory.reshape(2, 5, 4))


def test_an_overlap_that_cannot_be_decided_is_an_error():
    query, out = next(undecided_overlaps())
    with pytest.raises(ValueError, match="cannot tell whether out overlaps query"):
        attend(query, np.ones((2, 2)), np.ones((2, 2)), out=out)
    assert not out.any()


@pytest.mark.parametrize(
    "strides",
    [(0, 16, 4), (80, 0, 4), (80, 16, 0), (16, 16, 4), (4, 16, 4), (80, 12, 4), (80, 16, 2), (80, 8, 4)],
)
def test_out_that_overlaps_itself(strides):
    memory = np.zeros(400, np.float32)
    out = np.lib.stride_tricks.as_strided(memory, (2, 5, 4), strides)
    with pytest.raises(ValueError, match="out overlaps itself"):
        attend(*random_inputs((2, 5, 4)), out=out)
    assert not memory.any()


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
@pytest.mark.parametrize(
    "wrong",
    [
        np.complex64(0.5 + 1j),
        np.array(0.5 + 1j),
        np.array(np.timedelta64(3)),
        np.array("0.5"),
        np.array(b"0.5"),
        np.array(Fraction(1, 2), object),
        np.array("0.5", np.dtypes.StringDType()),
        np.array(1, "m8[s]"),
        np.array(True),
        True,
        "0.5",
        b"0.5",
        0.5 + 0j,
    ],
    ids=repr,
)
def test_what_numpy_would_make_a_number_of(name, wrong):
    """Dropping an imaginary part, or reading a text as a number, would give a wrong result without an error."""
    x = random_inputs((2, 5, 4))
    for function in (attend, sa.attention_steps):
        with pytest.raises(TypeError, match=f"{name} must be a real number"):
            function(*x, **{name: wrong})


def test_real_numbers_of_any_kind():
    x = random_inputs((2, 5, 4))
    for half in (Fraction(1, 2), Decimal("0.5"), np.float16(0.5), np.longdouble(0.5), np.array(0.5)):
        for function in (attend, sa.reference.scaled_dot_product_attention):
            np.testing.assert_array_equal(function(*x, scale=half), function(*x, scale=0.5))
    for function in (sa.layer_norm, sa.rms_norm):
        with pytest.raises(TypeError, match="eps must be a real number"):
            function(x[0], 4, eps=np.complex64(1e-5))
    with pytest.raises(ValueError, match="scale is too large for a float"):
        sa.attention_steps(*x, scale=10**400)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.tri(5, dtype=np.float32), "holds floats 0 and 1"),
        (np.tri(5), "holds floats 0 and 1"),
        (~np.tri(5, dtype=bool), "is True where a key comes after the query"),
    ],
)
def test_a_mask_that_probably_means_something_else_is_a_warning_once(mask, message, monkeypatch):
    monkeypatch.setattr("selfattn._check._warned", set())
    q = np.ones((2, 5, 4))
    with pytest.warns(UserWarning, match=message) as caught:
        sa.scaled_dot_product_attention(q, q, q, mask)
    assert caught[0].filename == __file__
    sa.scaled_dot_product_attention(q, q, q, mask)  # a warning would be an error


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros((5, 5)),
        np.ones((5, 5)),
        np.where(np.tri(5), 0, -np.inf),
        np.tri(5) * 0.5,
        np.tri(5, dtype=bool),
        ~np.tri(5, k=1, dtype=bool),
        ~np.tri(5, k=-1, dtype=bool),
        np.zeros((5, 5), bool),
    ],
)
def test_other_masks_are_no_warning(mask, monkeypatch):
    monkeypatch.setattr("selfattn._check._warned", set())
    sa.scaled_dot_product_attention(*[np.ones((2, 5, 4))] * 3, mask)
