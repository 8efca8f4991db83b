"""nn.EmbeddingModel and nn.ProxyTask: its layers, PyTorch's numbers, extremes, forms of sentences, errors."""

import collections
import collections.abc
import copy
import math
import operator
import pickle
from array import array as python_array

import numpy as np
import pytest
from nn_checks import check_gradients, perturbed, torch_state
from refusals import refusals

import selfattn as sa
from selfattn import nn, optim, training
from selfattn.text import WhitespaceTokenizer

VOCABULARY, WIDTH, LONGEST = 50, 16, 12
TRIPLET = [5, 3, 3, 49, 0, 7], [7, 5, 3], list(range(20))  # the last one is cut to LONGEST


def model_of(layers=1, heads=1, dtype=np.float32, rng=0, tokenizer=str.split):
    return nn.EmbeddingModel(
        tokenizer,
        VOCABULARY,
        WIDTH,
        max_seq_len=LONGEST,
        num_layers=layers,
        num_heads=heads,
        dtype=dtype,
        rng=rng,
    )


def torch_model(layers, heads, dtype=np.float32, seed=1):
    """The same parameters in PyTorch, drawn in the same order."""
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.ln = torch.nn.LayerNorm(WIDTH)

        def forward(self, x):
            projected = self.query(x), self.key(x), self.value(x)
            q, k, v = (y.unflatten(-1, (heads, -1)).transpose(0, 1) for y in projected)
            weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
            return self.ln((weights @ v).transpose(0, 1).flatten(1) + x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding_layer = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.attention_layers = torch.nn.Sequential(*(Block() for _ in range(layers)))
            place = torch.arange(LONGEST, dtype=torch.float64)[:, None]
            rate = torch.exp(torch.arange(0, WIDTH, 2, dtype=torch.float64) * (-math.log(10000.0) / WIDTH))
            self.table = torch.stack([torch.sin(place * rate), torch.cos(place * rate)], dim=-1).flatten(1)

        def forward(self, ids):
            x = self.embedding_layer(torch.as_tensor(ids[:LONGEST]))
            return self.attention_layers(x + self.table[: len(x)].to(x.dtype)).mean(0)

        def confidence(self, main, similar, non_similar):
            main, similar, non_similar = self(main), self(similar), self(non_similar)
            sigmoid = torch.nn.functional.logsigmoid
            return sigmoid(main @ similar) + sigmoid(-(main @ non_similar))

    torch.set_num_threads(1)  # on a busy machine PyTorch's threads mostly wait for each other
    torch.manual_seed(seed)
    return Model().to(torch.float64 if dtype == np.float64 else torch.float32)


def test_a_model_is_its_layers_and_has_their_gradients():
    sizes = {"max_seq_len": 4, "num_layers": 2, "num_heads": 2}
    model = perturbed(nn.EmbeddingModel(str.split, 5, 4, **sizes, rng=0, dtype=np.float64))
    sentences = [[1, 4, 1], [2], [0, 3, 2, 1]]
    for ids in sentences:
        x = model.embedding_layer(ids) + model.positions.table[: len(ids)]
        for block in model.attention_layers:
            x = block(x)
        np.testing.assert_allclose(model(ids), x.mean(axis=0), rtol=0, atol=1e-14)

    def vjp():
        y, pullback = model.vjp(sentences)
        return y, lambda dy: ((), pullback(dy))

    check_gradients(model, vjp)


@pytest.mark.usefixtures("openmp_restored")
@pytest.mark.parametrize(("layers", "heads"), [(0, 1), (3, 4)])
def test_the_same_seed_gives_the_weights_of_pytorch(layers, heads):
    expected = torch_state(torch_model(layers, heads, seed=3))
    got = model_of(layers, heads, rng=sa.torch_rng(3)).state_dict()
    assert list(got) == list(expected)
    for name, array in got.items():
        assert array.dtype == np.float32
        if name == "embedding_layer.weight":  # many normal numbers at once differ by up to 3 ulp
            np.testing.assert_allclose(array, expected[name], rtol=4 * np.finfo(np.float32).eps)
        else:
            np.testing.assert_array_equal(array, expected[name])


@pytest.mark.usefixtures("openmp_restored")
@pytest.mark.parametrize(
    ("layers", "heads", "dtype", "close"), [(1, 1, np.float32, 3e-5), (3, 4, np.float64, 1e-10)]
)
def test_every_loss_of_300_steps_is_that_of_pytorch(layers, heads, dtype, close):
    """Training starts from the same seed, with batches of one; the rounding errors of 300 steps add up."""
    torch = pytest.importorskip("torch")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if dtype == np.float32 else torch.float64)  # draws other numbers
    try:
        theirs = torch_model(layers, heads, dtype, seed=2)
    finally:
        torch.set_default_dtype(before)
    task = nn.ProxyTask(model_of(layers, heads, dtype, rng=sa.torch_rng(2)))
    their_adam = torch.optim.Adam(theirs.parameters(), lr=1e-3)
    our_adam = optim.Adam(task.parameters(), lr=1e-3)
    rng = np.random.default_rng(0)
    sentences = [rng.integers(0, VOCABULARY, rng.integers(1, 10)).tolist() for _ in range(60)]
    triplets = [sentences[i : i + 3] for i in range(0, 60, 3)]
    losses = []
    for n in range(300):
        expected = -theirs.confidence(*triplets[n % 20])
        their_adam.zero_grad()
        expected.backward()
        their_adam.step()
        confidence, pullback = task.vjp(*triplets[n % 20])
        our_adam.step(pullback(-1.0))
        losses.append(expected.item())
        assert abs(-confidence - losses[-1]) <= close * max(1, abs(losses[-1])), n
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:20])  # it did learn


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_a_list_of_sentences_is_each_of_them(name):
    dtype = getattr(pytest.importorskip("ml_dtypes"), name) if name == "bfloat16" else np.dtype(name)
    eps = 2.0**-7 if name == "bfloat16" else np.finfo(dtype).eps
    task = nn.ProxyTask(model_of(2, 4, dtype))
    model = task.model
    # a few roundings of numbers up to 4; products with more rows may add up in another order
    close = {"rtol": 0, "atol": 64 * eps}
    y, pullback = model.vjp(TRIPLET)
    assert y.shape == (3, WIDTH) and y.dtype == dtype
    np.testing.assert_array_equal(model(TRIPLET), y)
    np.testing.assert_array_equal(model.encode(iter(TRIPLET), batch_size=3), y)
    two = model.encode(TRIPLET, batch_size=2)
    np.testing.assert_allclose(two.astype(np.float64), y.astype(np.float64), **close)
    np.testing.assert_array_equal(model(np.array([[1, 2], [3, 4]])), model([[1, 2], [3, 4]]))
    total = {}
    for row, ids in zip(y, TRIPLET, strict=True):
        alone, pullback_alone = model.vjp(ids)
        assert alone.shape == (WIDTH,)
        np.testing.assert_allclose(alone.astype(np.float64), row.astype(np.float64), **close)
        nn.add_gradients(total, pullback_alone(np.cos(row)))
    for key, gradient in pullback(np.cos(y)).items():
        assert gradient.dtype == dtype
        expected = np.asarray(total[key], np.float64)
        np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, **close, err_msg=key)


def test_a_list_of_triplets_is_each_of_them():
    task = nn.ProxyTask(model_of(2, 4, np.float64))
    main, similar, other = [TRIPLET[0], [1]], [TRIPLET[1], [2, 3]], [TRIPLET[2], [4]]
    confidence, pullback = task.vjp(main, similar, other)
    np.testing.assert_array_equal(task(main, similar, other), confidence)
    close = {"rtol": 0, "atol": 256 * np.finfo(float).eps}  # dot products of 16 numbers up to 4
    parts = [task.vjp(*sentences) for sentences in zip(main, similar, other, strict=True)]
    np.testing.assert_allclose(confidence, [part[0] for part in parts], **close)
    grads = pullback([-0.5, -2.0])
    one, two = parts[0][1](-0.5), parts[1][1](-2.0)
    for name, gradient in grads.items():
        np.testing.assert_allclose(gradient, one[name] + two[name], **close, err_msg=name)
    for name, gradient in pullback(-0.5).items():  # the bias has one gradient for all
        np.testing.assert_array_equal(gradient, pullback([-0.5, -0.5])[name])


def test_tokens_come_from_any_kind_of_tokenizer():
    class Pieces:
        def encode(self, sentence, out_type=None):
            assert out_type is int
            return np.array([len(word) for word in sentence.split()])

    def lengths(sentence):
        return tuple(len(word) for word in sentence.split())

    for tokenizer in (Pieces(), lengths):
        model = model_of(tokenizer=tokenizer)
        np.testing.assert_array_equal(model("tom chase jerry"), model([3, 5, 5]))
        np.testing.assert_array_equal(model.encode(["tom chase", "jerry"]), model([[3, 5], [5]]))
        np.testing.assert_array_equal(model(np.array(["tom chase", "jerry"])), model([[3, 5], [5]]))
    assert model.tokenizer is lengths


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_can_be_copied_and_sent_to_other_processes(again):
    model = model_of(2, 4, tokenizer=WhitespaceTokenizer(["tom", "chase", "jerry"]))
    other = again(model)
    np.testing.assert_array_equal(other("tom jerry"), model("tom jerry"))
    other.attention_layers[0].query.weight[...] = 0
    assert model.attention_layers[0].query.weight.any()
    assert not np.array_equal(other("tom jerry"), model("tom jerry"))


def test_what_is_written_into_steps_does_not_change_the_model():
    model = model_of(2, 4)
    before, steps = model([1, 2, 3]), model.steps([1, 2, 3])
    for array in (steps.embeddings, steps.positions, steps.blocks[0].query, steps.output):
        if array.flags.writeable:
            array[...] = 7
    np.testing.assert_array_equal(model([1, 2, 3]), before)


def test_a_long_sentence_is_cut():
    model = model_of()
    long = np.arange(10**6) % VOCABULARY
    np.testing.assert_array_equal(model(long), model(long[:LONGEST]))
    np.testing.assert_array_equal(model(long.tolist()), model(long[:LONGEST]))
    beyond = [*range(LONGEST), VOCABULARY]  # tokens that are cut are not checked
    np.testing.assert_array_equal(model(beyond), model(beyond[:LONGEST]))


def test_tied_blocks_have_one_gradient():
    model = model_of(2, 1, np.float64)
    first, second = model.attention_layers
    second.query.register_parameter("weight", first.query.weight)
    untied = model_of(2, 1, np.float64)
    untied.load_state_dict(model.state_dict())
    y, pullback = model.vjp(TRIPLET[0])
    grads, apart = pullback(y), untied.vjp(TRIPLET[0])[1](y)
    assert list(grads) == list(model.parameters())
    name = "attention_layers.{}.query.weight"
    assert name.format(1) not in grads
    np.testing.assert_array_equal(grads[name.format(0)], apart[name.format(0)] + apart[name.format(1)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_sigma_is_finite_and_exact_for_dot_products_of_any_size(dtype):
    """Embeddings are LayerNorm's output times its weight: the dot product of x with itself is 16·weight²."""
    model = model_of(1, 1, dtype)
    task = nn.ProxyTask(model)
    ln = model.attention_layers[0].ln
    for size in (1e-3, 1.0, 10.0, 100.0, 1e8):
        ln.weight[...] = size
        a, b = model([3]).astype(np.float64), model([9]).astype(np.float64)
        near, far = a @ a, a @ b
        confidence, pullback = task.vjp([3], [3], [9])
        exact = -np.logaddexp(0, -near) - np.logaddexp(0, far)
        # the dot product far is a sum of 16 products of numbers up to 4·size
        close = 16 * np.finfo(dtype).eps * (1 + 16 * size**2)
        assert np.isfinite(confidence) and abs(confidence - exact) <= close
        for name, gradient in pullback(-1.0).items():
            assert np.isfinite(gradient).all(), (size, name)
        opposite, _ = task.vjp([9], [9], [9])
        assert np.isfinite(opposite) and opposite <= -16 * size**2 * 0.9  # the model is sure, and wrong


test_wrong_sentences_are_quoted = refusals(
    (lambda m: m(""), ValueError, "'' has no tokens"),
    (lambda m: m([]), ValueError, r"\[\] has no tokens"),
    (lambda m: m(["a", ""]), ValueError, "sentence 1, '' has no tokens"),
    (lambda m: m.encode(["a"] * 9 + [""], batch_size=3), ValueError, "sentence 9, '' has no tokens"),
    (lambda m: m([3, 50]), ValueError, r"0\.\.\.49, as vocab_size is 50; \[3, 50\] has 50"),
    (lambda m: m([-1]), ValueError, r"\[-1\] has -1"),
    (lambda m: m([2**70]), TypeError, "sequence of integers, not .*1180591620717411303424"),
    (lambda m: m(None), TypeError, "expected a str or a sequence of integers, not None"),
    (lambda m: m(b"tom"), TypeError, "integers, not b'tom'"),
    (lambda m: m(np.ma.array([1, 2], mask=[0, 1])), TypeError, "sequence of integers, not .*masked"),
    (lambda m: m([1.5]), TypeError, "integers, not 1.5"),
    (lambda m: m([[1, 2.5], [3]]), TypeError, r"sentence 0, \[1, 2.5\]"),
    (lambda m: m([[5], [True]]), TypeError, r"sentence 1, \[True\]"),
    (lambda m: m([[5], ["1"]]), TypeError, "a str or a sequence of integers"),
    (lambda m: m([[5], {1: 2}]), TypeError, "a str or a sequence of integers"),
    (lambda m: m(np.zeros((2, 2, 2), int)), TypeError, "integers"),
    (lambda m: m.encode("tom chase"), TypeError, "a list of sentences, not 'tom chase'"),
    (lambda m: m.encode(["tom"], batch_size=0), ValueError, "batch_size must be at least 1, not 0"),
    (lambda m: m.vjp([1])[1](np.ones(3)), ValueError, r"\(16,\), not \(3,\)"),
    (lambda m: nn.ProxyTask(m)([[1]], [[1]], [1]), TypeError, "three sentences or three lists"),
    (lambda m: nn.ProxyTask(m)([[1]], [[1]], [[1]] * 2), ValueError, "same length, not 1, 1, 2"),
    (lambda m: nn.ProxyTask(m).vjp([1], [1], [1])[1]([1.0]), ValueError, r"\(\), not \(1,\)"),
    (lambda m: nn.ProxyTask("m"), TypeError, "must be an EmbeddingModel, not str"),
    given=lambda: model_of(tokenizer=lambda sentence: [len(word) for word in sentence.split()]),
)


def returned(ids):
    return lambda: model_of(tokenizer=lambda sentence: ids)("tom")


test_wrong_tokenizers_are_caught = refusals(
    (returned([1, None]), TypeError, r"the tokenizer returned \[1, None\] for 'tom'"),
    (returned([1.0]), TypeError, r"the tokenizer returned \[1.0\] for 'tom'"),
    (returned(None), TypeError, "the tokenizer returned None for 'tom'"),
    (returned([[1]]), TypeError, r"the tokenizer returned \[\[1\]\] for 'tom'"),
    (returned([1, 50]), ValueError, "'tom' has 50"),
    (returned([-1]), ValueError, "'tom' has -1"),
)


def made_with(**arguments):
    right = {"tokenizer": str.split, "vocab_size": 5, "embedding_dim": 8, "max_seq_len": 4}
    return lambda: nn.EmbeddingModel(**(right | arguments))


test_wrong_constructions_say_what_is_wrong = refusals(
    (made_with(embedding_dim=7), ValueError, "embedding_dim must be even, .* not 7"),
    (made_with(vocab_size=0), ValueError, "vocab_size must be at least 1, not 0"),
    (made_with(max_seq_len=0), ValueError, "max_seq_len must be at least 1"),
    (made_with(num_layers=-1), ValueError, "num_layers must be at least 0"),
    (made_with(num_heads=3), ValueError, "3 does not divide 8"),
    (made_with(tokenizer=None), TypeError, "tokenizer must have encode"),
    (made_with(dtype=int), TypeError, "dtype must be one of"),
    (made_with(rng="0"), TypeError, "rng must be"),
)


def test_progress_is_shown_where_wanted(capsys):
    pytest.importorskip("tqdm", reason="tqdm is an extra")
    model = model_of()
    expected = model.encode([[1]] * 5, batch_size=2)
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(model.encode([[1]] * 5, batch_size=2, progress=True), expected)
    assert "encode: 3 of 3 batches, " in capsys.readouterr().err
    assert model.encode([]).shape == (0, WIDTH)


def test_sentences_as_tensors():
    torch = pytest.importorskip("torch")
    model, ids = model_of(), [torch.tensor([1, 2]), torch.tensor([3])]
    np.testing.assert_array_equal(model(ids), model([[1, 2], [3]]))
    np.testing.assert_array_equal(model(ids[0]), model([1, 2]))
    np.testing.assert_array_equal(model(torch.tensor([[1, 2], [3, 4]])), model([[1, 2], [3, 4]]))


class Sequence(collections.abc.Sequence):
    """A minimal subclass of the abstract class, without slices."""

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, n):
        return self.items[operator.index(n)]


FORMS = {
    "tuple": tuple,
    "deque": collections.deque,
    "user's sequence": Sequence,
    "user's list": collections.UserList,
    "generator": lambda items: (item for item in items),
    "map": lambda items: map(str, items),
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "array": np.array,
    "array of StringDType": lambda items: np.array(items, np.dtypes.StringDType()),
    "array of objects": lambda items: np.array(items, object),
}
TEXTS = ["a", "bb", "ccc", "bbbb"]


def by_length(dtype=np.float32):
    return nn.EmbeddingModel(lambda sentence: [len(sentence)], 10, 4, max_seq_len=3, rng=0, dtype=dtype)


@pytest.mark.parametrize("form", FORMS)
def test_sentences_come_in_every_form_of_an_iterable(form):
    model, given = by_length(), FORMS[form]
    expected, task = model.encode(TEXTS), nn.ProxyTask(model)
    for found in (
        model.encode(given(TEXTS)),
        model.encode(given(TEXTS), batch_size=3),
        model(given(TEXTS)),
        model.vjp(given(TEXTS))[0],
    ):
        np.testing.assert_array_equal(found, expected)
    found = task.execute(given(TEXTS), given(TEXTS), given(TEXTS))
    np.testing.assert_array_equal(found, task.execute(TEXTS, TEXTS, TEXTS))
    np.testing.assert_array_equal(model(np.array("bb")), model("bb"))
    assert training.make_triplets(given(TEXTS[:3] * 4), rng=0) if form != "keys" else True


IDS = {
    "deque": collections.deque,
    "user's sequence": Sequence,
    "generator": lambda ids: (n for n in ids),
    "range": lambda ids: range(ids[0], ids[0] + len(ids)),
    "array.array": lambda ids: python_array("h", ids),
    "NumPy's integers": lambda ids: [np.int8(n) for n in ids],
    "array of objects": lambda ids: np.array(ids, object),
    "big-endian array": lambda ids: np.array(ids, ">u2"),
}


@pytest.mark.parametrize("form", IDS)
def test_ids_come_in_every_form_of_a_sequence(form):
    model, ids = by_length(), [[2, 3], [4], [5, 6, 7, 8]]
    expected = model.encode(ids)
    np.testing.assert_array_equal(model.encode([IDS[form](each) for each in ids]), expected)
    np.testing.assert_array_equal(model([IDS[form](each) for each in ids]), expected)
    found, expected = (
        training.fit(nn.ProxyTask(by_length()), [triplet], epochs=1, rng=0, log_every=None).step_losses
        for triplet in ([IDS[form](each) for each in ids], ids)
    )
    assert found == expected


@pytest.mark.parametrize(
    "change", [np.asfortranarray, lambda a: np.repeat(a, 2, 1)[:, ::2], lambda a: a.astype(">f4")]
)
def test_parameters_of_any_layout(change):
    model = nn.EmbeddingModel(lambda sentence: [len(sentence)], 10, 4, max_seq_len=8, rng=0)
    y, pullback = model.vjp("a")
    grads = pullback(y)
    for module in model.modules():
        own = {name: x for name, x in module.parameters().items() if "." not in name and x.ndim == 2}
        for name, array in own.items():
            module.register_parameter(name, change(array))
    again, pullback = model.vjp("a")
    np.testing.assert_array_equal(again, y)
    assert again.dtype == y.dtype
    np.testing.assert_equal(pullback(y), grads)
