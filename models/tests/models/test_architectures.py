"""Every architecture against Transformers: small random models, saved there and loaded here, and the reverse."""

import json

import numpy as np
import pytest
from architectures import CLASSIFIERS, CONFIGS, LANGUAGE, PICTURES, TEXTS, VOCABULARY, their_name
from text_folders import add_pipeline, old_pooling, with_drawn_parameters

import selfattn_models as models

torch = pytest.importorskip("torch", reason="the expected values come from PyTorch and Transformers")
transformers = pytest.importorskip("transformers", reason="the expected values come from Transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

LENGTHS = (5, 1, 12, 33)
FAR = (2, 150)
# The eager form gives NaN where a padded row sees only padding.
SDPA = ("modernbert", "qwen3 with windows on", "gemma3 that")


def other(name, kind="Model", **more):
    family, values = (CONFIGS | LANGUAGE)[name]
    tokens = dict.fromkeys((f"{each}_token_id" for each in ("bos", "eos", "cls", "sep")), 0)
    config = getattr(transformers, their_name(family, "Config"))(
        **((tokens if name in TEXTS else {}) | values | more)
    )
    config._attn_implementation = "sdpa" if name.startswith(SDPA) else "eager"
    return with_drawn_parameters(getattr(transformers, their_name(family, kind))(config))


@pytest.fixture
def pair(request, tmp_path):
    """A model of Transformers in float64, the truth, and ours from the folder that it was saved to in float32."""
    name, kind = request.param if isinstance(request.param, tuple) else (request.param, "Model")
    theirs = other(name, kind)
    theirs.save_pretrained(tmp_path / "theirs")
    return theirs.double(), models.load(tmp_path / "theirs")


def close(got, truth, what="", factor=128):
    """Compare within a few eps times the largest element: sums of up to 40 terms, in some twenty products one after the
    other.
    """
    truth = truth.detach().numpy() if hasattr(truth, "detach") else truth
    assert got.dtype == np.float32
    assert got.shape == truth.shape, what
    atol = factor * np.finfo(np.float32).eps * max(1.0, np.abs(truth).max(initial=0))
    np.testing.assert_allclose(got, truth, rtol=0, atol=atol, err_msg=what)


def drawn_ids(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, VOCABULARY, length) for length in lengths]
    return ids, np.concatenate(ids), np.cumsum([0, *lengths])


def padded(ids):
    """Ids (n, longest) with a mask, as Transformers takes them; the padding is a token like any other."""
    longest = max(map(len, ids))
    table, mask = np.full((len(ids), longest), 2), np.zeros((len(ids), longest), int)
    for row, one in enumerate(ids):
        table[row, : len(one)], mask[row, : len(one)] = one, 1
    return {"input_ids": torch.tensor(table), "attention_mask": torch.tensor(mask)}


def assert_gradients(y, pullback, truth, theirs, ours):
    """Compare the gradients of all parameters in use. Names are those of files; in memory Transformers may have
    others.
    """
    close(y, truth)
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    (truth * torch.tensor(dy)).sum().backward()
    grads = pullback(dy)
    names = {array.tobytes(): key for key, array in ours.parameters().items()}
    expected = {
        names[p.detach().numpy().astype(np.float32).tobytes()]: p.grad
        for _, p in theirs.named_parameters()
        if p.grad is not None and p.grad.any()
    }
    assert set(expected) <= set(grads) <= set(ours.parameters())
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for key, grad in grads.items():
        true = expected.get(key, torch.zeros(grad.shape, dtype=torch.float64))
        # The gradient of a key's bias is 0: only rounding errors remain, as large as those of other gradients.
        size = max(float(true.abs().max()), largest / 100)
        close(grad / np.float32(size), true / size, key, factor=512)


@pytest.mark.parametrize("pair", TEXTS, indirect=True)
def test_packed_sequences_equal_padded_ones_and_their_gradients(pair):
    """With types of tokens where a model has some."""
    theirs, ours = pair
    ids, flat, ends = drawn_ids(FAR if ours.max_positions > 150 else LENGTHS)
    kinds = getattr(theirs.config, "type_vocab_size", 1)
    types = np.random.default_rng(2).integers(0, kinds, len(flat)) if kinds > 1 else None
    inputs = padded(ids)
    mask = inputs["attention_mask"].bool()
    if types is not None:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        inputs["token_type_ids"][mask] = torch.tensor(types)
    rows = theirs(**inputs).last_hidden_state[mask]
    y, pulled = ours._rows_vjp(flat, ends, None, types)
    np.testing.assert_array_equal(y, ours._rows(flat, ends, None, types))
    for n, one in enumerate(ids):  # alone, to the bit
        own = None if types is None else types[ends[n] : ends[n + 1]]
        alone = ours._rows(one, np.array([0, len(one)]), None, own)
        np.testing.assert_array_equal(alone, y[ends[n] : ends[n + 1]])
    assert_gradients(y, lambda dy: ours._named(pulled(dy)), rows, theirs, ours)
    # the core looks up texts whose types are all 0, other rows come from here: the same bits
    mixed = ours._rows(flat, ends, None, None if types is None else types * (np.arange(len(flat)) >= ends[1]))
    np.testing.assert_array_equal(mixed[: ends[1]], ours._rows(ids[0], ends[:2]))


@pytest.mark.parametrize("pair", [(name, "ForSequenceClassification") for name in CLASSIFIERS], indirect=True)
def test_logits(pair):
    theirs, ours = pair
    """And their gradients, those of all parameters, the head's too."""
    ids, flat, ends = drawn_ids()
    logits = theirs(**padded(ids)).logits
    close(ours._logits(flat, ends), logits)
    y, pullback = ours.vjp([one.tolist() for one in ids])
    assert_gradients(y, pullback, logits, theirs, ours)


@pytest.mark.parametrize("mode", [None, "cls", "lasttoken"])
def test_sentences_through_vjp(mode, tmp_path):
    """``vjp`` pools as the folder says: without sentence-transformers' files by the mean, and does not normalise."""
    theirs = other("bert")
    theirs.save_pretrained(tmp_path)
    if mode is not None:
        add_pipeline(tmp_path, old_pooling(mode, width=24), normalize=True)
    ours, theirs = models.load(tmp_path), theirs.double()
    ids, _, _ = drawn_ids()
    y, pullback = ours.vjp([one.tolist() for one in ids])
    np.testing.assert_array_equal(y, ours.encode([one.tolist() for one in ids]))
    inputs = padded(ids)
    weights = inputs["attention_mask"] / inputs["attention_mask"].sum(1, keepdim=True)
    if mode is not None:
        weights = torch.zeros(weights.shape)
        weights[range(len(ids)), [0 if mode == "cls" else len(one) - 1 for one in ids]] = 1
    pooled = (theirs(**inputs).last_hidden_state * weights[..., None]).sum(1)
    pooled = pooled if mode is None else torch.nn.functional.normalize(pooled)
    assert_gradients(y, pullback, pooled, theirs, ours)

    alone, alone_pullback = ours.vjp(ids[0].tolist())
    np.testing.assert_array_equal(alone, y[0])
    with pytest.raises(ValueError, match="dy must have the shape"):
        alone_pullback(y)
    ours.parameters()["encoder.layer.0.output.dense.bias"][0] += 1
    with pytest.raises(RuntimeError, match="have changed since vjp"):
        alone_pullback(alone)


@pytest.mark.parametrize(
    ("pair", "size"),
    [(name, (12, 12)) for name in PICTURES] + [("dinov2", size) for size in ((8, 12), (20, 28), (4, 4))],
    indirect=["pair"],
)
def test_pictures(pair, size):
    theirs, ours = pair
    pixels = np.random.default_rng(0).standard_normal((3, 2, *size)).astype(np.float32)
    truth = theirs(torch.tensor(pixels).double(), output_hidden_states=True)
    y, pullback = ours.vjp(pixels)
    np.testing.assert_array_equal(y, ours(pixels))
    np.testing.assert_array_equal(y[1], ours(pixels[1]))
    for state, expected in zip(ours.hidden_states(pixels[2]), truth.hidden_states, strict=True):
        close(state, expected[2])
    assert_gradients(y, pullback, truth.last_hidden_state, theirs, ours)


DECODERS = [(name, "LMHeadModel" if name == "gpt2" else "ForCausalLM") for name in LANGUAGE]


@pytest.mark.parametrize("pair", DECODERS, indirect=True)
def test_gradients_of_language_models(pair):
    theirs, ours = pair
    ids = drawn_ids([33])[1]
    y, pullback = ours.vjp(ids)
    np.testing.assert_array_equal(y, ours.logits(ids))
    assert_gradients(y, pullback, theirs(torch.tensor(ids)[None]).logits[0], theirs, ours)


def test_phi3_with_longrope_has_its_original_context(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4}
    rope |= {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": 32, "sliding_window": None}
    theirs = other("phi3", "ForCausalLM", **sizes, rope_parameters=rope)
    theirs.save_pretrained(tmp_path)
    with pytest.warns(models.FolderWarning, match="the context is 32 and not 64: the long_factor"):
        ours = models.load(tmp_path)
    ids = drawn_ids([33])[1]
    close(ours.logits(ids[:32]), theirs.double()(torch.tensor(ids[:32])[None]).logits[0])
    with pytest.raises(ValueError, match="33 ids; the model has 32 positions"):
        ours.logits(ids)


SAVED = [(name, "Model") for name in CONFIGS] + [(name, "ForSequenceClassification") for name in CLASSIFIERS]
SAVED += DECODERS


@pytest.mark.parametrize(("name", "kind"), SAVED)
def test_folders_saved_here_load_there(name, kind, tmp_path):
    theirs = other(name, kind)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = models.load(tmp_path / "theirs")
    models.save(ours, tmp_path / "ours")
    back, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = theirs.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in back.state_dict().items())
    again = models.load(tmp_path / "ours")
    np.testing.assert_equal(again.parameters(), ours.parameters())
    assert type(again) is type(ours)
    assert again.config == ours.config | {"architectures": [type(theirs).__name__]}


def test_loading_maps_the_file_and_training_does_not_write_to_it(tmp_path):
    other("bert").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    ours = models.load(tmp_path)
    array = ours.parameters()["encoder.layer.0.output.dense.weight"]
    assert not array.flags.owndata
    array += 1
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_both_spellings_of_modernbert(tmp_path):
    """Older versions wrote two thetas and how often a layer sees everything; newer ones list the layers."""
    theirs = other("modernbert")
    theirs.save_pretrained(tmp_path)
    ids = np.arange(2, 30)
    expected = models.load(tmp_path).hidden_states(ids)[-1]
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        config.pop(key, None)
    config |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(models.load(tmp_path).hidden_states(ids)[-1], expected)
