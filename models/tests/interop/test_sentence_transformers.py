"""sentence-transformers' names: its classes here give its results, and the model's own methods take its keywords."""

import copy
import pickle
import sys
import warnings

import numpy as np
import pytest
from processes import run_script
from refusals import refusals
from text_folders import add_pipeline, old_pooling, save_bert

import selfattn_models as models
from selfattn_models.interop.sentence_transformers import CrossEncoder, SentenceTransformer

TEXTS = ["the sea was calm", "a ship sailed over dark water", "", "near old stones ."]
PAIRS = [("the sea was calm", "a ship"), ("old stones", "dark water near")]
PROMPTS = {"q": "query: ", "query": "the sea ", "passage": "old "}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    settings = {"prompts": PROMPTS, "default_prompt_name": "q", "similarity_fn_name": "dot"}
    folder = save_bert(tmp_path_factory.mktemp("encoder"), 64)
    return add_pipeline(folder, old_pooling("mean"), normalize=True, sentence=settings)


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


def save_cross_encoder(folder, labels=1, **more):
    names = {str(n): str(n) for n in range(labels)}
    return save_bert(folder, 64, "BertForSequenceClassification", num_labels=labels, id2label=names, **more)


def both(kind, folder, **options):
    library = pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = getattr(library, kind.__name__)(str(folder), device="cpu", **options)
    return kind(folder, **options), theirs


def check_same(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, **TOLERANCE)


OPTIONS = [
    {},
    {"default_prompt_name": "z", "prompts": {"query": "ship ", "z": "sea "}},
    {"truncate_dim": 4, "prompts": {"corpus": "sea ", "passage": "ship "}},
    {"similarity_fn_name": "manhattan"},
]
CALLS = [
    ((), {}),
    (("query",), {}),
    ((None, "ship ", 2, False), {}),
    ((), {"prompt": ""}),
    ((), {"prompt_name": "document"}),
    ((), {"normalize_embeddings": True, "truncate_dim": 5}),
    ((), {"truncate_dim": 5}),
    (
        (),
        {
            "device": "cpu",
            "normalize_embeddings": False,
            "output_value": "sentence_embedding",
            "precision": "float32",
        },
    ),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_embeddings_are_those_of_sentence_transformers(folder, options):
    ours, theirs = both(SentenceTransformer, folder, **options)
    for given in TEXTS, TEXTS[1], tuple(TEXTS[:2]):
        for method in "encode", "encode_query", "encode_document":
            for arguments, keywords in CALLS:
                found = getattr(ours, method)(given, *arguments, **keywords)
                check_same(found, getattr(theirs, method)(given, *arguments, **keywords))
    a, b = ours.encode(TEXTS), ours.encode(sentences=TEXTS[::-1])
    for kind in "cosine", "dot", "euclidean", "manhattan", options.get("similarity_fn_name", "dot"):
        check_same(ours.similarity(a, b), theirs.similarity(a, b))
        check_same(ours.similarity_pairwise(a, b), theirs.similarity_pairwise(a, b))
        ours.similarity_fn_name = theirs.similarity_fn_name = kind
    for name in "default_prompt_name", "max_seq_length", "similarity_fn_name", "truncate_dim":
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.prompts.items() <= theirs.prompts.items()
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension()


def test_settings_are_an_objects_own(model):
    cut, whole = SentenceTransformer(model, truncate_dim=4), SentenceTransformer(model)
    assert [each.encode("sea").size for each in (cut, whole, model)] == [4, *[model.encode("sea").size] * 2]
    cut.max_seq_length = 5
    assert [each.max_seq_length for each in (cut, whole, model)] == [5, 16, 16]


def test_what_is_set_is_saved(folder, tmp_path):
    ours, theirs = both(SentenceTransformer, folder)
    for each in ours, theirs:
        each.max_seq_length, each.default_prompt_name = 6, "passage"
    with pytest.warns(UserWarning, match="3 of 4 texts were longer than 6 tokens") as caught:
        check_same(y := ours.encode(TEXTS), theirs.encode(TEXTS))
    assert caught[0].filename == __file__
    models.save(ours.model, tmp_path)
    saved, of_theirs = both(SentenceTransformer, tmp_path)
    for each in saved, of_theirs:
        assert (each.max_seq_length, each.default_prompt_name) == (6, "passage")
    with pytest.warns(UserWarning):
        np.testing.assert_array_equal(saved.encode(TEXTS), y)


@pytest.mark.parametrize(
    "says", ["", "saved", "sentence_transformers", "sbert_ce_default_activation_function"]
)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_those_of_sentence_transformers(labels, says, tmp_path):
    torch = pytest.importorskip("torch")
    identity = "torch.nn.modules.linear.Identity"
    newer, older = {"activation_fn": identity}, identity
    config = {says: newer if says == "sentence_transformers" else older} if "_" in says else {}
    folder = save_cross_encoder(tmp_path, labels, **config)
    if says == "saved":  # in config_sentence_transformers.json
        both(CrossEncoder, folder, activation_fn=torch.nn.Identity())[1].save(
            str(folder := tmp_path / "saved")
        )
    ours, theirs = both(CrossEncoder, folder)
    functions = {"activation_fn": torch.nn.Identity()}, {"activation_fn": torch.nn.Sigmoid()}
    for keywords in ({}, {"prompt": "ship "}, {"apply_softmax": True}, {"batch_size": 1}, *functions):
        for given in PAIRS, PAIRS[0], list(PAIRS[0]), np.array(PAIRS):
            check_same(ours.predict(given, **keywords), theirs.predict(given, **keywords))
    for keywords in ({}, {"top_k": 2, "return_documents": True}, *functions) if labels == 1 else ():
        found, expected = (each.rank("the sea", TEXTS, **keywords) for each in (ours, theirs))
        check_same([each.pop("score") for each in found], [each.pop("score") for each in expected])
        assert found == expected


def test_a_model_takes_their_keywords(model, folder, tmp_path):
    """With the bits of its own keywords, and those of the classes here."""
    y, wide = model.encode(TEXTS, None, False, True, "query"), model.encode(TEXTS, normalize=False)
    own = {"normalize_embeddings": True, "show_progress_bar": False, "prompt_name": "query"}
    query, passage = model.encode(TEXTS, prompt="query"), model.encode(TEXTS, prompt="old ")
    pickled = pickle.dumps(SentenceTransformer(model))
    for each in model, copy.deepcopy(SentenceTransformer(folder)), pickle.loads(pickled):
        np.testing.assert_array_equal(each.encode(TEXTS, convert_to_numpy=True, **own), y)
        np.testing.assert_array_equal(each.encode_query(TEXTS), query)
        np.testing.assert_array_equal(each.encode_document(TEXTS, prompt_name="passage"), passage)
    np.testing.assert_array_equal(model.encode_document(TEXTS), passage)
    cut = wide[:, :5] / np.linalg.norm(wide[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(TEXTS, normalize=False, truncate_dim=5), wide[:, :5], rtol=0)
    np.testing.assert_allclose(model.encode(TEXTS, normalize_embeddings=True, truncate_dim=5), cut, rtol=1e-6)
    assert model.encode([], truncate_dim=5).shape == (0, 5)
    assert model.get_sentence_embedding_dimension() == y.shape[1]
    scorer = models.load(save_cross_encoder(tmp_path))
    expected = 1 / (1 + np.exp(-scorer.predict(PAIRS)))
    np.testing.assert_allclose(scorer.predict(PAIRS, activation_fn="Sigmoid"), expected, rtol=1e-6)
    scores = np.array(CrossEncoder(scorer).predict([(PAIRS[0][0], text) for text in TEXTS]))
    found = scorer.rank(PAIRS[0][0], iter(TEXTS), return_documents=True, show_progress_bar=False)
    order = np.argsort(-scores, kind="stable")
    assert found == [{"corpus_id": n, "score": float(scores[n]), "text": TEXTS[n]} for n in order.tolist()]


def made(kind, **options):
    return lambda model, folder: kind(folder, **options)


def encoded(method="encode", **keywords):
    return lambda model, folder: getattr(model, method)("a", **keywords)


ERRORS = (
    (made(SentenceTransformer, device="cuda"), "device='cuda': selfattn computes on the CPU"),
    (made(SentenceTransformer, trust_remote_code=True), "trust_remote_code=True: no code of"),
    (
        lambda *_: SentenceTransformer("a-b"),
        FileNotFoundError,
        "a .gguf file (hf download sentence-transformers/a-b --local-dir a-b fetches a folder)",
    ),
    (
        lambda *_: CrossEncoder("a/b"),
        FileNotFoundError,
        "a/b does not exist; expected a folder that save_pretrained or",
    ),
    (made(SentenceTransformer, revisio=None), TypeError, "unexpected keyword argument 'revisio'"),
    (made(CrossEncoder), TypeError, "BertModel has no classifier"),
    (made(SentenceTransformer, default_prompt_name="x"), "default_prompt_name 'x' is none of"),
    (
        lambda _, folder: SentenceTransformer(folder).encode("a", prompt="query"),
        "prompt_name= takes its text",
    ),
    (encoded(convert_to_tensor=True), "convert_to_tensor=True: results are NumPy arrays; torch.from_numpy"),
    (encoded("encode_query", convert_to_numpy=False), "convert_to_numpy=False: results are NumPy"),
    (
        encoded("encode_document", device=["cpu", "cpu"]),
        "device=['cpu', 'cpu']: selfattn computes on the CPU",
    ),
    (encoded(pool={}), "pool={}: one process computes on all CPUs"),
    (encoded(output_value=None), "output_value=None: hidden_states(text)[-1] has a row"),
    (encoded(precision="int8"), "precision='int8': embeddings are float32"),
    (encoded(colour=1), TypeError, "unexpected keyword argument 'colour'"),
    (
        encoded(normalize=False, normalize_embeddings=True),
        TypeError,
        "both normalize and normalize_embeddings",
    ),
    (encoded(progress=True, show_progress_bar=False), TypeError, "both progress and show_progress_bar"),
    (encoded("encode_query", prompt="a", prompt_name="q"), TypeError, "both prompt and prompt_name"),
    (encoded(prompt_name="x"), "prompt_name 'x' is none of the folder's prompts, ['passage', 'q', 'query']"),
    (encoded(truncate_dim=0), "truncate_dim must be at least 1, not 0"),
    (lambda m, _: m.similarity_pairwise([1.0], [[1.0], [2.0]]), "same number of rows, not 1 and 2"),
    (lambda m, _: setattr(m, "max_seq_length", 65), "this model takes 64 tokens at most"),
)
test_errors_name_the_way = refusals(
    *((*what, [said]) for *what, said in ERRORS),
    given="model",
    call=lambda model, call: call(model, model._folder),
)


DOORS = (
    "sentence_transformers.SentenceTransformer numpy, langchain.Embeddings langchain_core, "
    "bertopic.Embedder bertopic"
)


@pytest.mark.parametrize("door", DOORS.split(", "))
def test_doors_for_texts_work_without_pytorch(door, folder):
    path, library = door.split()
    pytest.importorskip(library)
    module, name = path.split(".")
    script = f"""
    import sys
    class Missing:
        def find_spec(name, *_):
            if name in ("torch", "transformers", "sentence_transformers"):
                raise ModuleNotFoundError(name=name)
    sys.meta_path.insert(0, Missing)  # None in sys.modules would not be enough for SciPy
    from selfattn.interop.{module} import {name}
    door = {name}({str(folder)!r})
    method = next(each for each in ("embed_documents", "encode") if hasattr(door, each))
    print(len(getattr(door, method)(["a ship", "the sea"])[1]))
    """
    assert run_script(script) == "16"


def test_errors_of_scores(tmp_path):
    three = models.load(save_cross_encoder(tmp_path / "three", 3))
    with pytest.raises(ValueError, match="rank needs one label, and the model has 3"):
        three.rank("a", ["b"])
    with pytest.raises(ValueError, match=r"num_labels is 1, and the folder's classifier has 3"):
        CrossEncoder(three, num_labels=1)
    for function, said in {
        "Tanh": "Tanh is not supported",
        np.max: r"keep the shape \(1, 3\); it ret",
    }.items():
        with pytest.raises(ValueError, match=f"activation_fn.*{said}"):
            three.predict(["a"], activation_fn=function)


def test_their_tools_take_the_class(folder):
    """Evaluators, mining and others find the same with it as with theirs."""
    pytest.importorskip("torch")
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    library, datasets = pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    util, texts = (
        library.util,
        ["the sea was calm", "a ship", "old stones", "dark water near", "the ship sank"],
    )
    pairs, relevant = datasets.Dataset.from_dict({"a": texts[:3], "b": texts[2:]}), {"0": {"0"}, "3": {"1"}}
    numbered, quiet = {str(n): text for n, text in enumerate(texts)}, {"write_csv": False}
    of_pairs = texts[:2], texts[3:], [0.1, 0.9]
    tools = [
        evaluation.InformationRetrievalEvaluator(numbered, numbered, relevant, truncate_dim=8, **quiet),
        evaluation.EmbeddingSimilarityEvaluator(*of_pairs, **quiet),
        evaluation.BinaryClassificationEvaluator(*of_pairs[:2], [0, 1], **quiet),
        evaluation.TripletEvaluator(texts[:2], texts[1:3], texts[3:], **quiet),
        lambda model: [score for score, *_ in util.paraphrase_mining(model, texts)],
        lambda model: util.mine_hard_negatives(pairs, model, num_negatives=1, verbose=False)["negative"],
        lambda model: [x.tolist() for x in model.encode(texts[:2], convert_to_numpy=False)],
        lambda model: model.similarity(*[model.encode(texts, convert_to_tensor=True)] * 2).tolist(),
    ]
    ours, theirs = both(SentenceTransformer, folder)
    assert isinstance(ours, library.SentenceTransformer)  # which KeyBERT and MTEB ask
    for tool in tools:
        found, expected = (tool(model) for model in (ours, theirs))
        found, expected = (list(x.values()) if isinstance(x, dict) else x for x in (found, expected))
        if isinstance(found, list) and not isinstance(found[0], str):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        else:
            assert list(found) == list(expected)
    with pytest.raises(AttributeError, match="'SentenceTransformer' object has no attribute 'half'"):
        ours.half()


def test_tensors_need_their_library(model, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for wrong in ({"convert_to_tensor": True}, {"convert_to_numpy": False}):
        with pytest.raises(ValueError, match=f"does not take {next(iter(wrong))}"):
            SentenceTransformer(model).encode(TEXTS, **wrong)
