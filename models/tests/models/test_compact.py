"""Models in int8 and bfloat16, against the plain reference with rows and weights rounded here; folders of them, and
what they refuse.
"""

import copy
import importlib
import json
import pickle

import numpy as np
import pytest
import safetensors.numpy as safetensors
from architectures import CONFIGS, PICTURES, VOCABULARY, class_of
from hostile import safetensors_file
from instruction_sets import ISAS, using
from refusals import refusals
from rounded import bits, from_bits, from_int8, int8, rounded_rows

import selfattn as sa
import selfattn_models as models
from selfattn import _core
from selfattn_models._folder import fit

reference = importlib.import_module("selfattn.reference.transformer")  # a function has its name as well
EPS = np.finfo(np.float32).eps
# Weights of these sizes have a whole group of 128 columns and part of another, those of other sizes part of one.
WIDE = {
    "hidden_size": 160,
    "num_attention_heads": 4,
    "intermediate_size": 300,
    "dim": 144,
    "n_heads": 3,
    "hidden_dim": 260,
}
NARROW = ("bert, other activation", "modernbert with biases", "vit without biases")
CASES = {
    name: (
        class_of(name),
        config
        | {key: value for key, value in WIDE.items() if key in config and name not in NARROW}
        | ({"model_type": family.lower()} if name in PICTURES else {}),
    )
    for name, (family, config) in CONFIGS.items()
    if name != "roberta" and "both sides" not in name  # windows change no product
} | {
    f"{name}, a classifier": (class_of(name, "ForSequenceClassification"), CONFIGS[name][1])
    for name in ("bert", "roberta", "distilbert")
}
WHOLE = ("position", "token_type", "pooler", "classifier", "relative_attention_bias", "patch_embeddings")
LENGTHS = (5, 1, 12, 30)
PIXELS = np.random.default_rng(7).standard_normal((3, 2, 12, 12)).astype(np.float32)
HAS_BFLOAT16 = _core._compact_unit(False) is not None
needs_bfloat16 = pytest.mark.skipif(
    not HAS_BFLOAT16, reason="this CPU, or this build, multiplies no bfloat16"
)
KINDS = ["int8", pytest.param("bfloat16", marks=needs_bfloat16)]
# The instruction sets whose multiply-adds are fused.
FUSED = [isa for isa in ISAS if isa not in ("baseline", "generic")]


def drawn(name, seed=0):
    """A float32 model; each product keeps the size of its rows."""
    make, config = CASES[name]
    rng, arrays = np.random.default_rng(seed), {}
    for key, array in make(config, rng=0).parameters().items():
        noise = rng.standard_normal(array.shape)
        if array.ndim == 1:
            around = 0.0 if key.endswith("bias") else 1.0
            arrays[key] = (around + 0.1 * noise).astype(np.float32)
        else:
            rows_of_numbers = "embeddings" in key and "patch" not in key
            into = 1 if rows_of_numbers else np.prod(array.shape[1:])
            arrays[key] = (noise * into**-0.5).astype(np.float32)
    return make(config, arrays)


def is_rounded(key, array):
    """Return whether `quantize` rounds an array: the weight of a layer's product, or the table of words."""
    return array.ndim == 2 and key.endswith("weight") and not any(part in key for part in WHOLE)


def ids_and_ends(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(2, VOCABULARY, sum(lengths)), np.cumsum([0, *lengths])


def result(name, model):
    """The last hidden states, and of classifiers the logits."""
    if name in PICTURES:
        return model(PIXELS)
    return (model._logits if "classifier" in name else model._rows)(*ids_and_ends())


def rounded_weights(state, kind):
    there_and_back = (lambda w: from_int8(*int8(w))) if kind == "int8" else (lambda w: from_bits(bits(w)))
    return {key: there_and_back(array) if is_rounded(key, array) else array for key, array in state.items()}


def emulated(settings, inputs, ends, kind, monkeypatch):
    """Compute the reference in float64 with rows that are rounded before each product."""

    def weight(part):  # DINOv2's are multiplied by its factors, and rounded once more
        return from_bits(bits(part.weight)) if kind == "bfloat16" else part.weight

    def project(self, name, x):
        part = getattr(self.layer, name)
        y = x if part is None else rounded_rows(x, kind) @ weight(part).T.astype(np.float64)
        return y if part is None or part.bias is None else y + part.bias

    with monkeypatch.context() as patch:
        patch.setattr(reference._Layer, "project", project)
        return reference.transformer(settings, inputs, ends, np.float64)


def rows_of(name, model):
    return model(PIXELS).reshape(-1, model.hidden_size) if name in PICTURES else model._rows(*ids_and_ends())


def distance(got, expected):
    """The root mean square of the difference, relative to what is expected."""
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


# The noise that rounding adds to a product, relative to the product. 128 normal numbers have a range of about 5.3
# deviations, and the largest is 2.7: 5.3 / 255 / sqrt(12) and 2.7 / 127 / sqrt(12), in quadrature. In bfloat16 errors
# are evenly spread up to 2**-9.
NOISE = {"int8": 0.0086, "bfloat16": 2**-9 / 3**0.5 * 2**0.5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_models(name, kind, monkeypatch):
    """Check each layer on the rows that the layers before it returned, and the whole model against float32."""
    make, config = CASES[name]
    model = drawn(name)
    state = model.state_dict()
    exact = make(config, rounded_weights(state, kind))  # in float32: rows are not rounded
    assert model.quantize(kind) is model
    assert f"dtype={kind}" in repr(model) and model.dtype == kind
    rounded = {key for key, array in model.parameters().items() if array.dtype in (np.int8, np.uint16)}
    assert rounded == {key for key, array in state.items() if is_rounded(key, array)}

    # A number almost halfway between two steps may be rounded to the other step, which changes all later numbers. An
    # error of 1e-5 of a step does that to few of 500 numbers, so the best of several inputs counts. GELU's polynomial
    # is off by 2.6e-5, or 2e-3 steps: 1 in 300 numbers is a step off, where all are off by 0.29 steps. Rows that are
    # rounded in another way are sqrt(2) apart.
    inputs = PIXELS if name in PICTURES else np.split(ids_and_ends((3,) * 5)[0], 5)
    best = np.full(model.num_layers, np.inf)
    for given in inputs:
        states = model.hidden_states(given)
        ends = np.array([0, len(states[0])])
        settings = exact._built(len(states[0]))[0]
        atol = 16 * EPS * np.abs(states[0]).max()  # the table, and whatever precedes the layers
        np.testing.assert_allclose(states[0], exact.hidden_states(given)[0], rtol=0, atol=atol)
        for n, layer in enumerate(settings.layers):
            last = n + 1 == len(settings.layers) and name not in PICTURES
            alone = settings._replace(
                layers=(layer,),
                table=None,
                token_type_row=None,
                positions=None,
                embedding_norm=None,
                final_norm=settings.final_norm if last else None,
            )
            expected = emulated(alone, states[n], ends, kind, monkeypatch)
            noise = distance(reference.transformer(alone, states[n], ends, np.float64), expected)
            best[n] = min(best[n], distance(states[n + 1], expected) / noise)
    by_polynomial = layer.gate is None and layer.activation == "gelu"
    assert best.max() < (0.25 if by_polynomial else 1e-3)

    # The noise of a layer's products adds up in quadrature; the factor 1.5 is there because the products' sizes vary.
    bound = 1.5 * NOISE[kind] * ((4 + (layer.gate is not None)) * model.num_layers) ** 0.5
    got, before = rows_of(name, model), rows_of(name, drawn(name))
    assert distance(got, before) < bound
    cosines = (got * before).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(before, axis=1)
    assert cosines.min() > 1 - (3 * bound) ** 2 / 2  # a few groups of a token may have larger errors
    if "classifier" in name:  # a few logits may have larger errors as well
        assert distance(result(name, model), result(name, drawn(name))) < 3 * bound


@pytest.mark.parametrize("kind", KINDS)
def test_token_types(kind):
    model, (ids, ends) = drawn("bert"), ids_and_ends()
    types = np.where(np.arange(len(ids)) < ends[1], 0, np.arange(len(ids)) % 2)
    before = model._rows(ids, ends, None, types)
    model.quantize(kind)
    got, plain = model._rows(ids, ends, None, types), model._rows(ids, ends)
    assert distance(got, before) < 1.5 * NOISE[kind] * 8**0.5 < distance(got, plain)
    # the core adds type 0, NumPy the others: the same bits
    np.testing.assert_array_equal(got[: ends[1]], plain[: ends[1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_alone_in_a_batch_and_with_any_threads(name, kind, threads_restored):
    model = drawn(name).quantize(kind)
    whole = result(name, model)
    for threads in (1, 2):
        sa.set_num_threads(threads)
        np.testing.assert_array_equal(result(name, model), whole)
    if name in PICTURES:
        np.testing.assert_array_equal(model(PIXELS[::-1].copy()), whole[::-1])
        np.testing.assert_array_equal([model(image) for image in PIXELS], whole)
        return
    ids, ends = ids_and_ends()
    texts = np.split(ids, ends[1:-1])
    call = model._logits if "classifier" in name else model._rows
    parts = whole if "classifier" in name else np.split(whole, ends[1:-1])
    for text, part in zip(texts, parts, strict=True):
        np.testing.assert_array_equal(call(text, np.array([0, len(text)])).reshape(part.shape), part)
    backwards = call(np.concatenate(texts[::-1]), np.cumsum([0, *LENGTHS[::-1]]))
    expected = np.concatenate([np.atleast_2d(part) for part in parts[::-1]])
    np.testing.assert_array_equal(backwards.reshape(whole.shape), expected)


@pytest.mark.skipif(len(FUSED) < 2, reason="one instruction set alone has fused multiply-adds here")
def test_products_have_the_same_bits_with_any_fused_instructions():
    rng = np.random.default_rng(0)
    packed = _core._int8_panels(*int8(rng.standard_normal((100, 300)).astype(np.float32)))
    x, bias = rng.standard_normal((37, 300)).astype(np.float32), rng.standard_normal(100).astype(np.float32)
    found = {}
    for isa in FUSED:
        with using(isa):
            found[isa] = _core._linear_forward(x, packed, bias).tobytes()
    assert len(set(found.values())) == 1


WEIGHTS = "model.safetensors"
NAME = "encoder.layer.0.attention.self.query.weight"


def is_mapped(array):
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_saved_and_loaded(name, kind, tmp_path):
    model = drawn(name).quantize(kind)
    models.save(model, tmp_path)
    again = models.load(tmp_path, dtype=None if kind == "int8" else kind)
    assert type(again) is type(model) and again.dtype == kind
    np.testing.assert_array_equal(result(name, again), result(name, model))
    assert again.parameters().keys() == model.parameters().keys()
    assert all(is_mapped(x) for x in again.parameters().values() if x.dtype in (np.int8, np.uint16))

    wide = models.load(tmp_path, dtype="float32")
    expected = rounded_weights(drawn(name).state_dict(), kind)
    assert wide.dtype == "float32" and wide.parameters().keys() == expected.keys()
    np.testing.assert_equal(dict(wide.parameters()), expected)
    if kind == "bfloat16":
        assert models.load(tmp_path).dtype == "float32"
    else:
        error, words = (ValueError, "is int8 already") if HAS_BFLOAT16 else (RuntimeError, "needs a CPU")
        with pytest.raises(error, match=words):
            models.load(tmp_path, dtype="bfloat16")
        models.save(wide, tmp_path)  # what is stored is as it was read
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@needs_bfloat16
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_a_folder_of_bfloat16_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="another reader of the folder")
    model = drawn("bert").quantize("bfloat16")
    models.save(model, tmp_path)
    theirs = transformers.BertModel.from_pretrained(tmp_path).float().state_dict()
    for key, array in rounded_weights(drawn("bert").state_dict(), "bfloat16").items():
        np.testing.assert_array_equal(theirs[key].numpy(), array, err_msg=key)


@pytest.fixture
def folder(tmp_path):
    models.save(drawn("bert").quantize("int8"), tmp_path)
    return tmp_path


def test_what_the_configuration_says_of_int8(folder):
    numbers = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}
    weights = numbers | {"symmetric": True, "dynamic": False}
    inputs = numbers | {"symmetric": False, "dynamic": True}
    table = ["embeddings.word_embeddings"]
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    ignored = found.pop("ignore")
    assert set(ignored) == {
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "pooler.dense",
    }
    assert found == {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs},
            "group_1": {"targets": table, "weights": weights, "input_activations": None},
        },
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quant_method", "gptq"),
        ("format", "pack-quantized"),
        ("quantization_status", "frozen"),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("sparsity_config", {"format": "dense"}),
        ("config_groups", None),
        ("config_groups.group_0.weights", None),
        ("config_groups.group_0.weights.strategy", "channel"),
        ("config_groups.group_0.weights.num_bits", 4),
        ("config_groups.group_0.weights.group_size", 64),
        ("config_groups.group_0.weights.symmetric", False),
        ("config_groups.group_0.weights.actorder", "group"),
        ("config_groups.group_0.input_activations", None),
        ("config_groups.group_0.input_activations.dynamic", False),
        ("config_groups.group_0.output_activations", {"num_bits": 8}),
        ("config_groups.group_1.weights.type", "float"),
    ],
)
def test_other_roundings_are_refused(folder, path, value):
    config = json.loads((folder / "config.json").read_text())
    *way, key = path.split(".")
    place = config["quantization_config"]
    for part in way:
        place = place[part]
    place[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        models.load(folder)
    assert path in str(error.value)


SCALE = NAME + "_scale"


def with_scale(value):
    def change(arrays):
        arrays[SCALE] = arrays[SCALE].copy()
        arrays[SCALE][1, 0] = value

    return change


def load_after(folder, change):
    arrays = safetensors.load_file(folder / WEIGHTS)
    change(arrays)
    safetensors.save_file(arrays, folder / WEIGHTS)
    models.load(folder)


test_bad_scales = refusals(
    (lambda a: a.pop(SCALE), [f"missing: {SCALE}"]),
    (lambda a: a.update({SCALE: a[SCALE][:, :1].copy()}), [f"{SCALE} has shape"]),
    *((with_scale(value), [f"{SCALE} must hold finite"]) for value in (np.nan, np.inf, -1)),
    (lambda a: a.update({NAME: a[NAME].astype(np.float32)}), [SCALE]),
    (lambda a: a.update({NAME[:-6] + "bias": np.zeros(160, np.int8)}), [NAME[:-6] + "bias is int8"]),
    given="folder",
    call=load_after,
)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_bfloat16_that_is_not_finite(bad):
    """What a folder or a state gives, on every CPU: it is checked before it is multiplied."""
    good = {"a.weight": bits(np.ones((2, 3), np.float32))}
    wrong = {"a.weight": bits(np.array([[1, 1, 1], [1, 1, bad]], np.float32))}
    given = {"a.weight": (2, 3)}, set(), (), "", "x"
    np.testing.assert_equal(fit(good, *given), good)
    with pytest.raises(ValueError, match=r"a\.weight holds NaN or an infinity"):
        fit(wrong, *given)


CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_safetensors(path, arrays, code):
    """Write a file of arrays, also of bfloat16, which the library's writer for NumPy lacks."""
    header, end = {}, 0
    for key, array in arrays.items():
        header[key] = {"dtype": code, "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    path.write_bytes(safetensors_file(header, b"".join(array.tobytes() for array in arrays.values())))


@pytest.mark.parametrize("dtype", [None, "float32", *KINDS])
@pytest.mark.parametrize("stored", ["float64", "float32", "float16", "bfloat16"])
def test_checkpoints(stored, dtype, tmp_path):
    model = drawn("bert, other activation")
    models.save(model, tmp_path)
    state = {
        key: bits(a) if stored == "bfloat16" else a.astype(stored) for key, a in model.state_dict().items()
    }
    write_safetensors(tmp_path / WEIGHTS, state, CODES[stored])
    values = {key: from_bits(a) if stored == "bfloat16" else a for key, a in state.items()}
    loaded = models.load(tmp_path, dtype=dtype)
    assert loaded.dtype == (dtype or ("float64" if stored == "float64" else "float32"))
    found = loaded.parameters()
    for key, value in values.items():
        narrow = value.astype(np.float32)
        if dtype in (None, "float32") or not is_rounded(key, value):
            expected = value if dtype is None and stored == "float64" else narrow
        elif dtype == "int8":
            expected, scale = int8(narrow)
            np.testing.assert_array_equal(found[key + "_scale"], scale)
        else:
            expected = bits(narrow)
        assert found[key].dtype == expected.dtype
        np.testing.assert_array_equal(found[key], expected, err_msg=key)
    with pytest.raises(ValueError, match=r"dtype must be .*'int4'"):
        models.load(tmp_path, dtype="int4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_weights_that_cannot_be_rounded(kind, bad):
    if kind == "int8" and np.isfinite(bad):
        pytest.skip("it is bfloat16 that rounds this number to infinity")
    model = drawn("bert")
    before = result("bert", model)
    name = "encoder.layer.1.output.dense.weight"  # the last one: others were rounded before it
    kept, model.parameters()[name][3, 200] = model.parameters()[name][3, 200], bad
    state = model.state_dict()
    with pytest.raises(ValueError, match=name):
        model.quantize(kind)
    assert model.dtype == "float32" and model.parameters().keys() == state.keys()
    np.testing.assert_equal(dict(model.parameters()), dict(state))
    model.parameters()[name][3, 200] = kept
    np.testing.assert_array_equal(result("bert", model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused(kind):
    model = drawn("bert, other activation")
    for dtype in ("int4", "float32", "float16", None, np.int8):
        with pytest.raises(ValueError, match="dtype must be 'bfloat16' or 'int8'"):
            model.quantize(dtype)
    assert model.dtype == "float32"
    model.quantize(kind)
    state = model.state_dict()
    for again in ("int8", "bfloat16") if HAS_BFLOAT16 else ("int8",):
        with pytest.raises(ValueError, match=f"this model is {kind}"):
            model.quantize(again)
    with pytest.raises(ValueError, match=f"weights of {kind} have no gradients"):
        model.vjp([2, 3, 4])
    with pytest.raises(ValueError, match=f"weights of {kind} have no gradients"):
        drawn("vit").quantize(kind).vjp(PIXELS)
    np.testing.assert_equal(dict(model.parameters()), dict(state))
    make, config = CASES["bert, other activation"]
    wide = {key: array.astype(np.float64) for key, array in make(config, rng=0).state_dict().items()}
    with pytest.raises(ValueError, match="this model is float64"):
        make(config, wide).quantize(kind)


def test_bfloat16_without_its_instructions():
    lacking = [isa for isa in ISAS if "bf16" not in isa and isa != "amx"]
    with using(lacking[-1]):
        assert _core._compact_unit(False) is None
        with pytest.raises(RuntimeError, match="bfloat16 needs a CPU"):
            drawn("bert, other activation").quantize("bfloat16")
        drawn("bert, other activation").quantize("int8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "modernbert", "dinov2", "distilbert, a classifier"])
def test_copies_and_states(name, kind):
    model, other = drawn(name).quantize(kind), drawn(name, seed=1).quantize(kind)
    before, others = result(name, model), result(name, other)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(result(name, same), before)
        assert repr(same) == repr(model)
        same.load_state_dict(other.state_dict())
        np.testing.assert_array_equal(result(name, same), others)
    np.testing.assert_array_equal(result(name, model), before)  # copies share nothing
    saved = model.state_dict()
    assert saved.keys() == model.parameters().keys()
    model.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(result(name, model), others)  # nothing of the old weights is kept
    model.load_state_dict(saved)
    np.testing.assert_array_equal(result(name, model), before)

    whole = drawn(name)
    with pytest.raises(ValueError):
        model.load_state_dict(whole.state_dict())
    with pytest.raises(ValueError):
        whole.load_state_dict(saved)
    np.testing.assert_array_equal(result(name, model), before)
    scale = [key for key in saved if key.endswith("_scale")]
    for bad in (-1, np.nan, np.inf) if scale else ():
        with pytest.raises(ValueError, match=f"{scale[-1]} must hold finite"):
            model.load_state_dict(saved | {scale[-1]: bad * saved[scale[-1]]})
        np.testing.assert_array_equal(result(name, model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_dinov2_that_change(kind):
    model = drawn("dinov2").quantize(kind)
    before = result("dinov2", model)
    model.parameters()["encoder.layer.0.layer_scale2.lambda1"][...] *= 2
    fresh = drawn("dinov2")
    fresh.parameters()["encoder.layer.0.layer_scale2.lambda1"][...] *= 2
    expected = result("dinov2", fresh.quantize(kind))
    np.testing.assert_array_equal(result("dinov2", model), expected)
    assert (expected != before).any()


@pytest.mark.parametrize("name", CASES)
def test_weights_are_packed_once(name, monkeypatch):
    model, pack, calls = drawn(name).quantize("int8"), _core._int8_panels, []

    def counted(*arrays):
        calls.append(arrays)
        return pack(*arrays)

    monkeypatch.setattr(_core, "_int8_panels", counted)
    first = result(name, model)
    once = len(calls)  # the table of words is not multiplied
    assert once == model.num_layers * (7 if "gate" in model.fields else 6)
    np.testing.assert_array_equal(result(name, model), first)
    if name not in PICTURES:
        model.hidden_states([2, 3, 4])
        model._rows(*ids_and_ends((3, 2)))
    assert len(calls) == once


def test_weights_in_use_are_not_written_to():
    model = drawn("bert, other activation").quantize("int8")
    before = result("bert, other activation", copy.deepcopy(model))
    array = model.parameters()[NAME]
    array[0] = 1  # nothing is packed yet
    assert (result("bert, other activation", model) != before).any()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
