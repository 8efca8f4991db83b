"""Text through models: what sentence-transformers makes of the same folder, and the same bits in any company."""

import collections
import copy
import json
import pickle
import shutil
import warnings

import numpy as np
import pytest
import tokenizers
from architectures import CONFIGS, TEXTS, class_of
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals
from text_folders import (
    VOCABULARY,
    D,
    add_pipeline,
    make_tokenizer,
    old_pooling,
    random_dense,
    save_bert,
    write_json,
)

import selfattn as sa
import selfattn_models as models
from selfattn import _core, _disk, nn, text, training, views
from selfattn_models import _tokenizer

SENTENCES = [
    "the sea was calm",
    "a ship",
    "",
    "ships sailed over dark water near old stones.",
    "é 🙂 שלום",
    "zzz ship",
    "The SEA",
    "  the\tsea \n",
    "a\x00b \u200b",
    "[SEP] the [CLS]",
]
# The tolerance is for sums of up to 32 products and 16 tokens after two layers of numbers of size 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder without files of sentence-transformers, to be read only."""
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def model(plain):
    return models.load(plain)


@pytest.fixture
def folder(plain, tmp_path):
    """A copy, to add files to."""
    return shutil.copytree(plain, tmp_path, dirs_exist_ok=True)


def theirs(folder):
    library = pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = library.SentenceTransformer(str(folder), device="cpu")
        return model.encode(SENTENCES, show_progress_bar=False)


PROMPT = {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
PIPELINES = {  # pipelines as older versions wrote them; drawn folders have those of version 6
    "cls, normalised": {"pooling": old_pooling("cls"), "normalize": True},
    "three side by side, in the old order": {"pooling": old_pooling("mean", "cls", "max")},
    "two in another order": {
        "pooling": {"embedding_dimension": D, "pooling_mode": ["mean", "cls"], "include_prompt": True},
        "new": True,
    },
    "dense": {"pooling": old_pooling("mean"), "dense": random_dense(5), "normalize": True},
    "dense without bias or activation": {
        "pooling": {"embedding_dimension": D, "pooling_mode": "mean"},
        "new": True,
        "dense": random_dense(24, activation="Identity", bias=False),
    },
    "prompt left out of pooling": {"pooling": old_pooling("mean", include_prompt=False), "sentence": PROMPT},
    "prompt left out of max and cls": {
        "pooling": old_pooling("cls", "max", include_prompt=False),
        "sentence": PROMPT,
    },
    "truncated": {"pooling": old_pooling("mean"), "sentence": {"truncate_dim": 7}},
    "short": {"pooling": old_pooling("mean"), "transformer": {"max_seq_length": 6, "do_lower_case": True}},
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.filterwarnings("ignore:.*longer than 6 tokens")
def test_embeddings_are_those_of_sentence_transformers(folder, name, tmp_path_factory):
    add_pipeline(folder, **PIPELINES[name])
    expected = theirs(folder)
    model = models.load(folder)
    y = model.encode(SENTENCES)
    assert y.dtype == np.float32
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, **TOLERANCE)
    np.testing.assert_array_equal(list(map(model.encode, SENTENCES)), y)
    # A saved model gives the same there, and the same bits here.
    again = tmp_path_factory.mktemp("saved") / "model"
    models.save(model, again)
    np.testing.assert_allclose(theirs(again), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(models.load(again).encode(SENTENCES), y)


def test_a_folder_of_transformers_gets_the_mean(plain, model):
    np.testing.assert_allclose(model.encode(SENTENCES), theirs(plain), **TOLERANCE)


def test_a_saved_model_replaces_all_of_another(folder, model):
    add_pipeline(folder, old_pooling("cls"), normalize=True)
    models.save(model, folder)
    np.testing.assert_array_equal(models.load(folder).encode(SENTENCES), model.encode(SENTENCES))


def test_saving_does_not_change_the_tokenizer(model):
    class Watched:
        from_str = tokenizers.Tokenizer.from_str

        def __getattr__(self, name):
            assert name not in ("no_truncation", "enable_truncation", "no_padding"), name
            return getattr(model.tokenizer, name)

    content = json.loads(_tokenizer.without_cutting(Watched()))
    assert content == json.loads(model.tokenizer.to_str()) | {"truncation": None}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_every_parameter_of_a_copy_counts(model, copied):
    y = model.encode("a ship")
    other = copied(model)
    np.testing.assert_array_equal(other.encode("a ship"), y)
    for name, array in other.parameters().items():
        if name == "embeddings.token_type_embeddings.weight":
            array = array[:1]  # noqa: PLW2901
        before = array.copy()
        array += np.random.default_rng(0).standard_normal(array.shape).astype(array.dtype)  # noqa: PLW2901
        assert "pooler" in name or "key.bias" in name or (other.encode("a ship") != y).any(), name
        array[...] = before
    np.testing.assert_array_equal(model.encode("a ship"), y)


def test_a_tokenizer_that_has_outgrown_the_model_is_not_saved(folder, tmp_path):
    model = models.load(folder)
    model.tokenizer.add_tokens([f"new{n}" for n in range(model.vocab_size)])
    with pytest.raises(ValueError, match=r"tokenizer.json has \d+ tokens, and the model's vocab_size is"):
        models.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_model_that_cannot_be_saved_leaves_no_folder(model, tmp_path, monkeypatch):
    def full(path, *_):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("selfattn._disk._write_to_disk", full)
    with pytest.raises(OSError, match="No space left"):
        models.save(model, tmp_path / "new" / "model")
    assert list(tmp_path.rglob("model*")) == []


def test_prompts_by_name_and_by_text(folder):
    sentence = {"prompts": {"q": "query: ", "d": ""}, "default_prompt_name": "q"}
    add_pipeline(folder, old_pooling("mean"), sentence=sentence)
    model = models.load(folder)
    np.testing.assert_array_equal(model.encode("a ship"), model.encode("query: a ship", prompt=""))
    np.testing.assert_array_equal(model.encode("a ship", prompt="d"), model.encode("a ship", prompt=""))
    np.testing.assert_array_equal(model.encode("ship", prompt="the "), model.encode("the ship", prompt=""))
    with pytest.raises(TypeError, match="prompt must be a str, not int"):
        model.encode("a ship", prompt=3)
    with pytest.raises(TypeError, match="sentence 1 is ids"):
        model.encode(["a ship", [2, 3]], prompt="q")


def test_the_tokenizers_padding_is_never_embedded(folder, model):
    tokenizer = make_tokenizer()
    tokenizer.enable_padding(length=20)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    padded = models.load(folder)
    for direction in (None, "right", "left"):  # None: the file's padding; else it is switched on later
        if direction is not None:
            padded.tokenizer.enable_padding(length=20, direction=direction)
        assert padded.tokens("the sea was calm") == ["[CLS]", "the", "sea", "was", "calm", "[SEP]"]
        np.testing.assert_array_equal(padded.encode(SENTENCES), model.encode(SENTENCES))
        assert len(padded.hidden_states("the sea")[0]) == 4
        assert len(padded.steps("the sea").tokens) == 4


@pytest.fixture(scope="module")
def dense_model(plain, tmp_path_factory):
    folder = shutil.copytree(plain, tmp_path_factory.mktemp("dense"), dirs_exist_ok=True)
    add_pipeline(folder, old_pooling("mean", "max"), dense=random_dense(5, 2 * D), normalize=True)
    return models.load(folder)


sentences_of_any_length = st.lists(
    st.lists(st.sampled_from([*VOCABULARY][5:]), max_size=18).map(" ".join), min_size=1, max_size=12
)


@pytest.mark.parametrize("which", ["model", "dense_model"])
@settings(max_examples=30)
@given(sentences=sentences_of_any_length, data=st.data())
@pytest.mark.filterwarnings("ignore:.*longer than")
def test_the_bits_do_not_depend_on_company_order_batch_or_threads(which, request, sentences, data):
    model = request.getfixturevalue(which)
    y = model.encode(sentences)
    before = _core.get_num_threads()
    try:
        _core.set_num_threads(data.draw(st.integers(1, 3)))
        batch_size = data.draw(st.sampled_from([None, 1, 2, 5]))
        order = data.draw(st.permutations(range(len(sentences))))
        shuffled = model.encode((sentences[n] for n in order), batch_size=batch_size)
        np.testing.assert_array_equal(shuffled, y[list(order)])
        one = data.draw(st.sampled_from(range(len(sentences))))
        np.testing.assert_array_equal(model.encode(sentences[one]), y[one])
    finally:
        _core.set_num_threads(before)


def test_the_bits_are_the_same_on_every_instruction_set_in_any_batch(model, isa):
    y = model.encode(SENTENCES)
    np.testing.assert_array_equal(model.encode(SENTENCES[::-1], batch_size=3), y[::-1])
    np.testing.assert_array_equal([model.encode(sentence) for sentence in SENTENCES], y)


def test_many_pieces_and_calls(model, monkeypatch):
    """Pieces that are tokenised one ahead, and more tokens than one call takes, against one by one."""
    monkeypatch.setattr("selfattn_models._tokenizer.FIRST_CHUNK", 2)
    monkeypatch.setattr("selfattn_models._tokenizer.CHUNK", 3)
    monkeypatch.setattr("selfattn_models._tokenizer.MOST_TOKENS", 12)
    y = np.stack([model.encode(sentence) for sentence in SENTENCES])
    np.testing.assert_array_equal(model.encode(SENTENCES * 3), np.tile(y, (3, 1)))
    monkeypatch.setattr("selfattn_models._tokenizer.MOST_CHARACTERS", 5)
    np.testing.assert_array_equal(model.encode(iter(SENTENCES)), y)


def test_any_iterable_of_text_or_ids(model):
    y = model.encode(["a ship", "the sea"])
    ids = [model._ids("a ship"), model._ids("the sea")]
    for given_form in (
        ("a ship", "the sea"),
        iter(["a ship", "the sea"]),
        collections.deque(["a ship", "the sea"]),
        np.array(["a ship", "the sea"]),
        np.array(["a ship", "the sea"], object),
        np.array(["a ship", "the sea"], np.dtypes.StringDType()),
        dict.fromkeys(["a ship", "the sea"]).keys(),
        ids,
        np.array(ids),
        ["a ship", ids[1]],
        map(np.array, ids),
    ):
        np.testing.assert_array_equal(model.encode(given_form), y)
    for one in ("a ship", np.str_("a ship"), np.array("a ship"), ids[0], np.array(ids[0]), tuple(ids[0])):
        np.testing.assert_array_equal(model.encode(one), y[0])
    assert model.encode([]).shape == (0, D)
    assert model.encode(iter(())).dtype == np.float32


def test_empty_text_emoji_and_right_to_left(model):
    assert model.tokens("") == ["[CLS]", "[SEP]"]
    np.testing.assert_array_equal(model.encode(""), model.encode([2, 3]))
    assert model.tokens("🙂 שלום é 👩‍👩‍👧") == ["[CLS]", "🙂", "שלום", "é", "[UNK]", "[SEP]"]


def test_a_hundred_thousand_tokens_are_cut_with_a_notice(model):
    words = ["sea", "calm", "ship", "dark"] * 25_000
    with pytest.warns(UserWarning, match="1 of 3 texts were longer than 24 tokens") as caught:
        y = model.encode(["a ship", " ".join(words), "the sea"])
    assert [warning.filename for warning in caught] == [__file__]  # once, where it was called
    np.testing.assert_array_equal(y[1], model.encode(" ".join(words[:22])))  # [CLS] and [SEP] stay
    for call in (model.tokens, model.hidden_states, model.steps):
        with pytest.warns(UserWarning, match="the text was longer than 24 tokens") as caught:
            call(" ".join(words))
        assert [warning.filename for warning in caught] == [__file__]


def test_cut_on_the_left_where_the_folder_says_so(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", config | {"truncation_side": "left", "model_max_length": 4})
    with pytest.warns(UserWarning, match="longer than 4 tokens"):
        assert models.load(folder).tokens("the sea was calm") == ["[CLS]", "was", "calm", "[SEP]"]


test_bad_input = refusals(
    (lambda m: m.encode(3), TypeError, "str or an iterable of str, not 3"),
    (lambda m: m.encode(b"sea"), TypeError, "not b'sea'"),
    (lambda m: m.encode(["a", None]), TypeError, "sentence 1 must be a str or a sequence of ids, not None"),
    (lambda m: m.encode(["a", float("nan")]), TypeError, "sentence 1 must be .* not nan"),
    (lambda m: m.encode(["a", "b", b"c"]), TypeError, "sentence 2 must be"),
    (lambda m: m.encode([[2.0, 3.0]]), TypeError, "sentence 0 must be"),
    (lambda m: m.encode(["a", [2, 99, 3]]), ValueError, r"ids must be in 0\.\.\.24.*sentence 1 has 99"),
    (lambda m: m.encode([2, -1]), ValueError, "sentence 0 has -1"),
    (lambda m: m.encode(["a", np.ma.array([2, 5], mask=[0, 1])]), TypeError, "sentence 1 must be"),
    (lambda m: m.tokens(bytearray(b"abc")), TypeError, "sentence 0 must be"),
    (lambda m: m.encode([[2], []]), ValueError, "sentence 1 has no ids"),
    (lambda m: m.encode([[5] * 25]), ValueError, "sentence 0 has 25 ids; the model has 24 positions"),
    (lambda m: m.encode(["a", [2], "sea \ud83d"]), ValueError, r"sentence 2, .*character 4 is '\\ud83d'"),
    (lambda m: m.encode(["a ship"] * 2600 + [None]), TypeError, "sentence 2600 must be"),
    (lambda m: m.hidden_states([1, 25]), ValueError, r"0\.\.\.24"),
    (lambda m: m.hidden_states([-1]), ValueError, r"0\.\.\.24"),
    (lambda m: m.hidden_states([1] * 25), ValueError, "25 ids.*24 positions"),
    (lambda m: m.hidden_states([]), ValueError, "no|empty"),
    (lambda m: m.encode("a", batch_size=0), ValueError, "batch_size"),
    (lambda m: m.encode_to("x.npy", "a"), TypeError, "iterable of sentences, not 'a'"),
    (lambda m: m.encode_to("no/x.npy", ["a"]), FileNotFoundError, r"'no/x\.npy'$"),
    (lambda m: m.predict("a"), TypeError, "BertModel has no classifier"),
    given="model",
)


class Table:
    """It has what DataFrames of pandas and Polars and tables of Arrow have."""

    columns = column_names = ("text",)

    def __iter__(self):
        return iter(self.columns)


@pytest.mark.parametrize(
    "given", [{"sea": "ship"}, {"sea"}, frozenset(["sea"]), Table(), np.zeros(1, [("sea", "U3")])], ids=type
)
def test_what_is_no_list_of_texts(given, model, tmp_path):
    words = text.WhitespaceTokenizer(["sea", "ship"])
    embedding = nn.EmbeddingModel(words, 2, 4, max_seq_len=4, rng=0)
    for call in (
        model.encode,
        model.encode_query,
        model.encode_document,
        model.vjp,
        lambda x: model.encode_to(tmp_path / "v.npy", x),
        embedding.encode,
        embedding,
        embedding.vjp,
        text.WhitespaceTokenizer.train,
        lambda x: text.train_sentencepiece(x, 9),
        lambda x: training.make_triplets(x, 0),
        lambda x: training.fit(nn.ProxyTask(embedding), x),
        lambda x: views.explorer(sa.attention_steps(*np.ones((3, 1, 2))), x),
    ):
        with pytest.raises(TypeError, match=r"whose keys would be read|has no order|a table, whose columns"):
            call(given)
    assert model.encode({"a": "sea"}.values()).shape == model.encode({"sea": 0}.keys()).shape == (1, D)


def test_missing_texts(model):
    column = ["sea"] * 9 + [np.nan]
    for call in (
        model.encode,
        nn.EmbeddingModel(lambda x: [0], 2, 4, max_seq_len=4, rng=0).encode,
        text.WhitespaceTokenizer.train,
        lambda x: training.make_triplets(x, 0),
    ):
        with pytest.raises(TypeError, match=r'nan; a text is missing: fillna\(""\)'):
            call(column)


def test_tensors_that_numpy_cannot_read(model):
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 3, requires_grad=True)
    for call in (lambda x: model.similarity(x, x), model.encode):
        with pytest.raises((TypeError, RuntimeError), match=r"NumPy cannot read .*, a tensor.*\.detach\(\)"):
            call(x)


def test_a_tokenizer_that_gets_no_threads_works_in_one(model):
    class Alone:
        """The library's tokenizer, whose threads cannot be started."""

        def __getattr__(self, name):
            return getattr(model.tokenizer, name)

        def encode_batch_fast(self, texts):
            raise BaseException("ThreadPoolBuildError { kind: IOError }")  # a panic, which is no Exception

    texts = {0: "the sea", 1: ("one", "and another"), 2: ""}
    with_threads, without = (_tokenizer.tokenize(each, texts, True) for each in (model.tokenizer, Alone()))
    assert with_threads == without


def pooling(**config):
    return lambda folder: add_pipeline(folder, config)


def modules(*types, path=""):
    listed = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, kind in enumerate(types)]
    return lambda folder: write_json(folder / "modules.json", listed)


def mean(**more):
    return lambda folder: add_pipeline(folder, old_pooling("mean"), **more)


OURS = "sentence_transformers.models."


def method(name):
    return {"method": "forward", "method_output_name": name}


def load_after(folder, damage):
    damage(folder)
    models.load(folder)


test_folders_that_are_not_supported = refusals(
    (pooling(pooling_mode_weightedmean_tokens=True), "pooling mode 'weightedmean' is not supported"),
    (pooling(pooling_mode="mean_sqrt_len_tokens"), "pooling mode 'mean_sqrt_len_tokens'"),
    (modules(OURS + "Transformer", OURS + "LSTM"), "models.LSTM is not supported"),
    (modules(OURS + "Transformer", "mine.Pooling"), "mine.Pooling is not supported"),
    (modules(OURS + "BoW"), "must begin with a Transformer"),
    (modules(OURS + "Transformer"), "has no Pooling"),
    (
        mean(dense=random_dense(5, activation="torch.nn.modules.activation.ReLU")),
        "activation_function 'torch.nn.modules.activation.ReLU' is not supported",
    ),
    (
        lambda f: (
            mean(dense=random_dense(5))(f),
            write_json(
                f / "2_Dense/config.json",
                {"in_features": 16, "out_features": 6, "activation_function": "torch.nn.Tanh"},
            ),
        ),
        r"has {.*\(5, 16\).*config.json says {.*\(6, 16\)",
    ),
    (
        lambda f: (
            mean(dense=random_dense(5))(f),
            (f / "2_Dense/model.safetensors").rename(f / "2_Dense/pytorch_model.bin"),
        ),
        "pickle.*SentenceTransformer",
    ),
    (
        mean(transformer={"config_args": {"num_hidden_layers": 1}}),
        "config_args: num_hidden_layers=1 is not supported",
    ),
    (
        mean(transformer={"modality_config": {"text": method("pooler_output")}}),
        "modality_config .*pooler_output.* is not supported",
    ),
    (mean(sentence=PROMPT | {"prompts": {}}), "default_prompt_name 'q' is none of the prompts"),
    (mean(sentence={"model_type": "MultiVectorEncoder"}), "model_type='MultiVectorEncoder'"),
    (
        mean(transformer={"modality_config": {"message": method("last_hidden_state")}}),
        "modality_config of message",
    ),
    (mean(transformer={"query_length": 9}), "query_length=9 is not supported; only a model without it is"),
    (modules(OURS + "Transformer", path="../other"), "not inside the folder"),
    (lambda f: write_json(f / "modules.json", {"a": 1}), "must be a list of modules"),
    (lambda f: (f / "tokenizer.json").write_text("{"), "is not a tokenizer of Hugging Face's"),
    (
        lambda f: make_tokenizer(VOCABULARY | {"other": 25}).save(str(f / "tokenizer.json")),
        "has 26 tokens, and the model's vocab_size is 25: it belongs to another model",
    ),
    given="folder",
    call=load_after,
)


def test_ids_of_the_tokenizer_beyond_the_vocabulary(folder):
    vocabulary = {word: n if n < 24 else 40 for word, n in VOCABULARY.items()}  # a gap, not more tokens
    make_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"id 40 of sentence 1, '🙂'.*belongs to another model"):
        models.load(folder).encode(["sea", "🙂"])


def test_a_folder_without_a_tokenizer_takes_ids(folder, model):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n")
    bare = models.load(folder)
    np.testing.assert_array_equal(bare.encode([2, 5, 3]), model.encode([2, 5, 3]))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*it has vocab\.txt.*save_pretrained"):
        bare.encode("sea")


def test_encode_to_writes_what_encode_returns(model, tmp_path):
    path = tmp_path / "vectors.npy"
    y = model.encode_to(path, (sentence for sentence in SENTENCES * 40), batch_size=50)
    np.testing.assert_array_equal(y, model.encode(SENTENCES * 40))
    assert isinstance(y, np.memmap)
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), y)
    assert model.encode_to(path, []).shape == (0, D)
    assert list(tmp_path.iterdir()) == [path]


def test_encode_to_leaves_what_was_there_when_it_fails(model, tmp_path):
    path = tmp_path / "vectors.npy"
    path.write_bytes(b"before")

    def breaking():
        yield from SENTENCES * 60
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        model.encode_to(path, breaking())
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(IsADirectoryError):
        model.encode_to(tmp_path, ["a"])


def test_progress(model, capsys):
    model.encode(SENTENCES, progress=True)
    assert "encode: 10 of 10 texts, " in capsys.readouterr().err


def test_steps_have_the_numbers_that_the_model_computes(model):
    sentence = "ships sailed over dark water"
    steps, L = model.steps(sentence), len(model.tokens(sentence))
    np.testing.assert_allclose(steps.output, model.hidden_states(sentence)[-1], **TOLERANCE)
    layer = steps.layers[0]
    assert layer.query.shape == (2, L, 8)
    assert layer.weights.shape == (2, L, L)
    np.testing.assert_allclose(layer.weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(layer.scores, layer.query @ layer.key.swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    assert {"layers.0.weights", "layers.1.down", "embeddings", "output"} < set(steps.to_dict())
    assert not layer.up.flags.writeable
    assert not steps.positions.flags.writeable
    table = model.parameters()["embeddings.position_embeddings.weight"]
    assert not np.shares_memory(steps.positions, table)
    assert f"{L} tokens, width 16, 2 layers" in repr(steps)


@pytest.mark.parametrize("name", TEXTS)
def test_steps_of_every_architecture(name):
    """Norms before and after, angles, windows, gates and relative positions, in NumPy and in the core."""
    model = class_of(name)(CONFIGS[name][1] | {"initializer_range": 0.3}, rng=0)
    ids = [5, 7, 11, 30, 2, 2, 39, 8, 6]
    steps, hidden = model.steps(ids), model.hidden_states(ids)
    computed = [steps.inputs, *(layer.result for layer in steps.layers[:-1]), steps.output]
    for ours, theirs in zip(computed, hidden, strict=True):
        size = max(1.0, float(np.abs(theirs).max()))  # sums of large numbers have large errors
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * size)


PAIRS = [
    ("the sea", "a ship"),
    ("was calm", ""),
    ("a ship sailed over the dark water", "near old stones near old stones"),
]


@pytest.mark.filterwarnings("ignore:.*longer than 14 tokens")
def test_logits_of_pairs_and_sentences(tmp_path):
    """Drawn folders compare scores with Transformers."""
    save_bert(tmp_path, positions=14, kind="BertForSequenceClassification", num_labels=3)
    ours = models.load(tmp_path)
    mixed = [*PAIRS, "the sea was calm"]
    y = ours.predict(mixed)
    assert y.shape == (4, 3)
    np.testing.assert_array_equal(list(map(ours.predict, mixed)), y)
    np.testing.assert_array_equal(ours.predict(map(list, PAIRS), batch_size=1), y[:3])
    states = [ours.hidden_states(pair)[-1] for pair in PAIRS]
    np.testing.assert_allclose(ours.steps(PAIRS[0]).output, states[0], **TOLERANCE)
    np.testing.assert_allclose(ours.encode(PAIRS), [rows.mean(0) for rows in states], **TOLERANCE)
    logits, pullback = ours.vjp(PAIRS)
    np.testing.assert_array_equal(logits, ours.predict(PAIRS))
    np.testing.assert_array_equal(ours.vjp(PAIRS[0])[0], ours(PAIRS[0]))
    assert {"classifier.weight", "bert.pooler.dense.bias"} <= set(pullback(logits))
    assert ours.predict([]).shape == (0, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["type_vocab_size"]  # without this key there are two types, too
    write_json(tmp_path / "config.json", config)
    np.testing.assert_array_equal(models.load(tmp_path).predict(mixed), y)


def test_a_cross_encoder_of_sentence_transformers(tmp_path):
    """The folder of such an encoder has a modules.json without pooling."""
    torch, library = pytest.importorskip("torch"), pytest.importorskip("sentence_transformers")
    save_bert(tmp_path / "bert", kind="BertForSequenceClassification", num_labels=1)
    library.CrossEncoder(str(tmp_path / "bert"), device="cpu").save(str(tmp_path / "made"))
    model = models.load(tmp_path / "made")
    models.save(model, tmp_path / "again")
    for folder in ("made", "again"):
        theirs = library.CrossEncoder(str(tmp_path / folder), device="cpu")
        expected = theirs.predict(PAIRS, activation_fn=torch.nn.Identity(), show_progress_bar=False)
        np.testing.assert_allclose(model.predict(PAIRS)[:, 0], expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_embed_and_search_take_such_a_folder(folder, dtype, capsys, tmp_path, run):
    add_pipeline(folder, old_pooling("mean"))
    model, given = models.load(folder, dtype=dtype), ["--dtype", dtype][: 2 * (dtype == "int8")]
    line = json.loads(run("embed", folder, "a ship", *given).out)
    y = model.encode("a ship")
    np.testing.assert_array_equal(np.array(line["embedding"], np.float32), y)
    assert np.array_equal(y, models.load(folder).encode("a ship")) == (dtype == "float32")
    text = tmp_path / "book.txt"
    text.write_text("the sea was calm\n\na ship\nold stones\n")
    files = ["--file", str(text), "--out", str(tmp_path / "v.NPY")]
    run("embed", folder, *files, *given)
    expected = model.encode(["the sea was calm", "", "a ship", "old stones"])
    np.testing.assert_array_equal(np.load(tmp_path / "v.NPY"), expected)
    capsys.readouterr()
    assert run("search", folder, text, "a ship", "-k", "1", *given).out == "1.000\t3\ta ship\n"
    found = json.loads(run("search", folder, text, "dark water", "-k", "1", "--json", *given).out)
    units = [x / np.linalg.norm(x) for x in model.encode(["dark water", found["text"]])]
    assert abs(found["score"] - units[0] @ units[1]) < 2e-6


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
def test_search_as_the_folder_means_it(folder, kind, tmp_path, run):
    """Drawn folders compare similarities, queries and documents with sentence-transformers."""
    prompts = {"query": "the ", "document": "old ", "short": "a "}
    sentence = {"prompts": prompts, "default_prompt_name": "short", "similarity_fn_name": kind}
    add_pipeline(folder, old_pooling("mean"), sentence=sentence)
    model, rng, words = models.load(folder), np.random.default_rng(0), [*VOCABULARY][5:]
    lines = [" ".join(rng.choice(words, n % 7 + 1)) for n in range(12)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    for query, document, options in (
        ("the ", "old ", []),
        ("a ", "x", ["--query-prompt", "short", "--prompt", "x"]),
    ):
        y, rows = model.encode("ship", prompt=query), model.encode(lines, prompt=document)
        distance = {"euclidean": ((y - rows) ** 2).sum(1) ** 0.5, "manhattan": np.abs(y - rows).sum(1)}
        sizes = np.linalg.norm(rows, axis=1) * np.linalg.norm(y) if kind == "cosine" else 1
        expected = np.sort(-distance[kind] if kind in distance else rows @ y / sizes)[:-5:-1]
        given = [str(folder), str(tmp_path / "lines.txt"), "ship", "--json", "-k", "4", *options]
        found = [json.loads(line)["score"] for line in run("search", *given).out.splitlines()]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    expected = model.encode("ship", prompt="the ")
    np.testing.assert_allclose(
        json.loads(run("embed", folder, "ship", "--prompt", "query").out)["embedding"], expected, **TOLERANCE
    )


def test_a_dense_layer_in_bfloat16_needs_no_other_package(folder):
    activation, weight, bias = random_dense(5)
    bits = {"linear.weight": weight.view(np.uint32) >> 16, "linear.bias": bias.view(np.uint32) >> 16}
    kept = {name: (array << 16).view(np.float32) for name, array in bits.items()}
    add_pipeline(folder, old_pooling("mean"), dense=(activation, kept["linear.weight"], kept["linear.bias"]))
    expected = models.load(folder).encode(SENTENCES)
    halves = {name: array.astype(np.uint16) for name, array in bits.items()}
    (folder / "2_Dense/model.safetensors").write_bytes(_disk.to_safetensors(halves, None, list(halves)))
    np.testing.assert_array_equal(models.load(folder).encode(SENTENCES), expected)


def test_files_of_sentence_transformers_without_modules_change_nothing(folder):
    """sentence-transformers does not read these files either."""
    expected = models.load(folder).encode(SENTENCES)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 3})
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 4})
    np.testing.assert_array_equal(models.load(folder).encode(SENTENCES), expected)


def test_a_length_without_room_for_the_special_tokens_is_refused(folder):
    model, said = models.load(folder), "max_seq_length is 1; each text has 2 special tokens"
    with pytest.raises(ValueError, match=said):
        model.max_seq_length = 1
    model.max_seq_length = 2  # enough for a text, not for a pair
    with pytest.raises(ValueError, match="max_seq_length is 2; each pair has 3 special tokens"):
        model.encode(["a ship", ("a ship", "at sea")])
    add_pipeline(folder, old_pooling("mean"), transformer={"max_seq_length": 1, "do_lower_case": True})
    with pytest.raises(ValueError, match=said):
        models.load(folder)


def test_similarities_of_rows_that_do_not_fit(folder):
    with pytest.raises(ValueError, match=r"rows of one width, .* not \(1, 2\) and \(1, 3\)"):
        models.load(folder).similarity([1.0, 2.0], [1.0, 2.0, 3.0])
    add_pipeline(folder, old_pooling("mean"), sentence={"similarity_fn_name": "maxsim"})
    with pytest.raises(
        ValueError, match="similarity_fn_name 'maxsim' is not supported; supported are cosine, dot"
    ):
        models.load(folder)


def test_what_the_command_line_says(folder, tmp_path, run):
    assert run("embed", folder, "sea " * 50).err == (
        "selfattn embed: the text was longer than 24 tokens, the most that the model takes, and cut there\n"
    )
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in run("embed", folder, "sea", code=1).err
    assert "nowhere is not a folder" in run("embed", tmp_path / "nowhere", "sea", code=1).err
