"""GGUF files: models of every architecture and kind against the float32 model of the dequantised weights; tokenizers;
hostile files.
"""

import json
import struct

import gguf
import numpy as np
import pytest
from gguf_files import SPELLED, byte_level, of_tokenizer, sentencepiece, write
from hostile_gguf import Parts, packed, put_together
from language_folders import SPECIAL, TEMPLATE, make_tokenizer
from refusals import refusals

import selfattn_models as models
from selfattn.engine.rope import read_rope
from selfattn_models import _gguf_tokenizer, loading
from selfattn_models._folder import Config
from selfattn_models._gguf_file import GGUF

SIZE = make_tokenizer().get_vocab_size()
LLAMA = {
    "model_type": "llama",
    "vocab_size": SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "gemma3": LLAMA
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_theta": 1e4,
    },
    "phi3": LLAMA
    | {"model_type": "phi3", "sliding_window": 5, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6},
    "smollm3": LLAMA
    | {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "rope_theta": 1e4},
}
GEMMA3 = {"attention.sliding_window": 5, "attention.sliding_window_pattern": 2, "attention.key_length": 16}
PHI3 = {"attention.sliding_window": 5, "rope.dimension_count": 8}
MORE = {"gemma3": GEMMA3, "phi3": PHI3}
IDS = np.random.default_rng(0).integers(0, SIZE, 20)


def make(config, arrays=None):
    kind = loading.MODELS[config["model_type"]]
    if arrays is not None:
        return kind(config, arrays)
    model, rng = kind(config, rng=0), np.random.default_rng(1)
    for array in model.arrays.values():
        if array.ndim == 1:
            array[...] += 0.3 * rng.standard_normal(array.shape).astype(np.float32)
    return model


def truth(config, arrays):
    """Logits of the float32 model, which the drawn folders compare with Transformers'."""
    return make(config, arrays).logits(IDS)


def close(got, expected):
    """As in test_language_models.py: some products of up to 256 terms."""
    assert got.dtype == np.float32
    atol = 16 * np.sqrt(256) * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
CASES = [(name, kind) for name in ("llama", "gpt2") for kind in KINDS]
CASES += [(name, kind) for name in CONFIGS if name not in ("llama", "gpt2") for kind in ("F32", "Q4_1")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_those_of_the_dequantised_weights(name, kind, tmp_path):
    config, path = CONFIGS[name], tmp_path / "model.gguf"
    meant = write(path, config, make(config).state_dict(), kind, more=MORE.get(name))
    expected = truth(config, meant)
    stored = models.load(path)
    close(stored.logits(IDS), expected)
    assert stored.dtype == {"F32": "float32"}.get(kind, kind)
    whole = models.load(path, dtype="float32")
    assert whole.dtype == "float32"
    close(whole.logits(IDS), expected)
    assert np.abs(stored.logits(IDS) - whole.logits(IDS)).max() < 1e-3
    np.testing.assert_equal(dict(whole.state_dict()), meant)
    prompts = [IDS[:3], IDS[:9]]
    np.testing.assert_equal(stored.generate(prompts, 6), [stored.generate(prompt, 6) for prompt in prompts])
    assert len(stored.steps(IDS).layers) == stored.num_layers
    np.testing.assert_allclose(stored.steps(IDS).output, stored.hidden_states(IDS)[-1], atol=1e-4)
    # the gradient of rows; float32's is tested with finite differences
    rows = stored.hidden_states(IDS)[0]
    dy = np.random.default_rng(2).standard_normal(expected.shape, np.float32)
    (y, pullback), (_, exact) = stored.vjp(rows), whole.vjp(rows)
    np.testing.assert_array_equal(y, stored.logits(IDS))
    dx, grads = pullback(dy)
    close(dx, exact(dy)[0])
    if stored.dtype != "float32":
        assert grads == {}
        with pytest.raises(ValueError, match=f"weights of {kind} have no gradients"):
            stored.vjp(IDS)


def test_mixed_kinds_and_those_of_256(tmp_path, run):
    """What llama.cpp calls Q4_K_M: Q4_K and Q6_K in one layer, Q8_0 for the table."""
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    kinds = {
        "v_proj": "Q6_K",
        "k_proj": "Q5_K",
        "q_proj": "Q3_K",
        "down_proj": "Q6_K",
        "up_proj": "Q2_K",
        "gate_proj": "IQ4_XS",
        "embed_tokens": "Q8_0",
        "lm_head": "Q6_K",
    }
    path, state = tmp_path / "model.gguf", make(config).state_dict()
    meant = write(path, config, state, {name: kinds.get(name.split(".")[-2], "Q4_K") for name in state})
    expected = truth(config, meant)
    close(models.load(path).logits(IDS), expected)
    close(models.load(path, dtype="float32").logits(IDS), expected)
    lines = run("info", path).out.splitlines()
    assert "Q3_K         1 tensors        0.0 MB  multiplied as stored" in lines and len(lines) == 8
    found = json.loads(run("info", "--json", path).out)
    assert found["Q6_K"] == {"tensors": 3, "bytes": (128 + 256 + SIZE) * 210, "how": "multiplied as stored"}
    path.write_bytes(b"GGUF")
    assert "no GGUF file" in run("info", path, code=1).err


def test_gemma3_with_and_without_windows(tmp_path):
    """The 27B alone, known by its 62 layers, scales scores by d / heads; 10,000 is the base of layers with windows
    unless a file says it.
    """
    path, entries = tmp_path / "model.gguf", {"attention.key_length": 16, "rope.freq_base": 1e6}
    own = CONFIGS["gemma3"] | {"sliding_window_pattern": 6, "hidden_size": 32, "rope_theta": 1e6}
    for layers, scalar in ((7, 16), (62, 8)):
        config = own | {"num_hidden_layers": layers, "query_pre_attn_scalar": scalar}
        meant = write(path, config, make(config).state_dict(), more=entries | {"attention.sliding_window": 5})
        close(models.load(path).logits(IDS), truth(config, meant))
    write(path, config, meant, more=entries)
    close(models.load(path).logits(IDS), truth(config | {"layer_types": ["full_attention"] * 62}, meant))
    scaled = {"attention.sliding_window": 5, "rope.freq_base_swa": 500.0}
    scaled |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    write(path, config, meant, more=entries | scaled)
    rope = {"rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    close(models.load(path).logits(IDS), truth(config | rope, meant))


def test_phi3_without_a_window(tmp_path):
    config = CONFIGS["phi3"] | {"sliding_window": None}
    for window in (None, 0):
        more = PHI3 | {"attention.sliding_window": window}
        meant = write(tmp_path / "model.gguf", config, make(config).state_dict(), more=more)
        close(models.load(tmp_path / "model.gguf").logits(IDS), truth(config, meant))


def test_gpt2_without_its_feed_forward_length(tmp_path):
    """It is four times the width, as in Transformers' configuration."""
    meant = write(tmp_path / "m.gguf", GPT2, make(GPT2).state_dict(), more={"feed_forward_length": None})
    close(models.load(tmp_path / "m.gguf").logits(IDS), truth(GPT2, meant))


def test_longrope_has_its_factors_in_tensors(tmp_path):
    path, short = tmp_path / "model.gguf", np.linspace(1, 2, 4, dtype=np.float32)
    more = PHI3 | {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    both = {"rope_factors_short.weight": short, "rope_factors_long.weight": 3 * short}
    state = make(CONFIGS["phi3"]).state_dict()
    meant = write(path, CONFIGS["phi3"], state, more=more, tensors=both)
    with pytest.warns(models.FolderWarning, match="the context is 32 and not 64"):
        ours = models.load(path)
    rope = {"rope_type": "longrope", "attention_factor": 1.25} | dict.fromkeys(
        ("short_factor", "long_factor"), short.tolist()
    )
    close(ours.logits(IDS), truth(CONFIGS["phi3"] | {"rope_parameters": rope}, meant))
    write(path, CONFIGS["phi3"], state, more=PHI3, tensors={"rope_factors_long.weight": short})
    with pytest.raises(ValueError, match=r"rope_factors_long\.weight"):
        models.load(path)


def test_rotary_scaling(tmp_path):
    path, state = tmp_path / "model.gguf", make(LLAMA).state_dict()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for rope in ({"rope_type": "linear", "factor": 2.0}, yarn):
        names = {"rope_type": "type", "original_max_position_embeddings": "original_context_length"}
        more = {f"rope.scaling.{names.get(name, name)}": value for name, value in rope.items()}
        meant = write(path, LLAMA, state, more=more)
        expected = truth(LLAMA | {"rope_parameters": {"rope_theta": 10000.0} | rope}, meant)
        close(models.load(path).logits(IDS), expected)
    # Llama 3's factors are in a tensor.
    llama3 = {
        "rope_theta": 10000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    plain, scaled = (
        np.array(read_rope(Config({"rope_parameters": each}), 16, 64).frequencies)
        for each in ({"rope_theta": 10000.0}, llama3)
    )
    factors = {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
    meant = write(path, LLAMA, state, tensors=factors)
    found = models.load(path)
    close(found.logits(IDS), truth(LLAMA | {"rope_parameters": llama3}, meant))
    models.save(found, tmp_path / "folder")
    np.testing.assert_array_equal(models.load(tmp_path / "folder").logits(IDS), found.logits(IDS))


def test_rounded_and_saved(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, LLAMA, make(LLAMA).state_dict(), "Q4_0", byte_level(SPECIAL, template=TEMPLATE))
    stored, whole = models.load(path), models.load(path, dtype="float32")
    assert models.load(path, dtype="int8").dtype == "int8"
    with pytest.raises(ValueError, match="this model is Q4_0; load it as float32"):
        stored.quantize("int8")
    with pytest.raises(ValueError, match="are quants of GGUF, which a folder cannot hold"):
        models.save(stored, tmp_path / "folder")
    models.save(whole, tmp_path / "folder")
    again = models.load(tmp_path / "folder")
    assert again.generate("the", 9) == whole.generate("the", 9)
    assert again.chat_prompt("hi") == stored.chat_prompt("hi") == "<|user|>hi<|end|><|assistant|>"
    assert again.stop_ids == whole.stop_ids
    assert again.special_tokens == whole.special_tokens


TEXTS = [
    "not the é 😀",
    "  two  spaces\n\nand lines",
    "x = 12345;",
    "<|user|>hi<|end|>",
    "don't",
    "",
    "日本語",
]


def test_byte_level_tokenizers(tmp_path):
    path, state, made = tmp_path / "model.gguf", make(LLAMA).state_dict(), make_tokenizer()
    write(path, LLAMA, state, entries=byte_level(SPECIAL))
    found = models.load(path)
    for text in TEXTS:
        ids = made.encode(text).ids
        assert found.tokenizer.encode(text).ids == ids
        assert found.tokenizer.decode(ids) == made.decode(ids)
    assert found.stop_ids == {made.token_to_id("<|end|>")}
    assert found.special_tokens == {"eos_token": "<|end|>"}
    write(path, LLAMA, state, entries=byte_level(SPECIAL, bos="<|user|>", pre="smollm"))
    found = models.load(path)
    assert found.tokens("a12") == ["<|user|>", "a", "1", "2"]
    write(path, LLAMA, state, entries=byte_level(SPECIAL, pre="qwen2"))
    assert models.load(path).tokens("a12\n") == ["a", "1", "2", "Ċ"]
    llama3 = byte_level(SPECIAL, pre="llama-bpe")
    write(path, LLAMA, state, entries=llama3 | of_tokenizer(bos_token_id=5))
    found = models.load(path)
    assert found.tokens("12345 it's\n\n")[1:] == ["1", "2", "3", "4", "5", "Ġ", "i", "t", "'", "s", "Ċ", "Ċ"]
    assert found.tokenizer.encode("a").ids[0] == 5
    pieces = found.tokenizer.pre_tokenizer.pre_tokenize_str("12345 it's\n\n")
    assert [piece for piece, _ in pieces] == ["123", "45", "Ġit", "'s", "ĊĊ"]
    write(path, LLAMA, state, entries=llama3 | of_tokenizer(add_eos_token=True))
    assert models.load(path).tokens("a") == ["a", "<|end|>"]
    for pre in ("qwen2", "deepseek-r1-qwen"):
        write(path, LLAMA, state, entries=byte_level(SPECIAL, pre=pre))
        assert models.load(path).tokens("e\u0301") == models.load(path).tokens("é")  # NFC, as Qwen2's folders
    write(path, LLAMA, state, entries=byte_level(SPECIAL, pre="tekken") | of_tokenizer(bos_token_id=5))
    assert models.load(path).tokenizer.encode("a").ids[0] == 5
    write(path, LLAMA, state, entries=byte_level(SPECIAL, pre="default"))
    with pytest.warns(models.FolderWarning, match=r"tokenizer.ggml.pre names no pre-tokenizer.* by gpt-2"):
        found = models.load(path)
    assert found.tokenizer.encode(TEXTS[2]).ids == made.encode(TEXTS[2]).ids
    write(path, LLAMA, state, entries=byte_level(SPECIAL, pre="new"))
    with pytest.raises(ValueError, match="the pre-tokenizer 'new' is not supported"):
        models.load(path)


@pytest.mark.parametrize("types", [None, [1] * SIZE])
def test_marks_whatever_their_type(types, tmp_path):
    """Old converters wrote no types, or called marks normal; without these, the marks of a chat are cut into
    letters.
    """
    entries = byte_level(SPECIAL, template=TEMPLATE) | of_tokenizer(token_type=types)
    write(tmp_path / "model.gguf", LLAMA, make(LLAMA).state_dict(), entries=entries)
    found = models.load(tmp_path / "model.gguf")
    assert found.tokens(found.chat_prompt("hi")) == ["<|user|>", "h", "i", "<|end|>", "<|assistant|>"]
    assert found.stop_ids == {make_tokenizer().token_to_id("<|end|>")}


def test_drawing_as_the_file_says(tmp_path):
    path, state = tmp_path / "model.gguf", make(LLAMA).state_dict()
    said = {"temp": 0.5, "top_p": 0.75, "top_k": -1, "penalty_repeat": 1.0}  # powers of 2, exact in float32
    named = {f"general.sampling.{name}": value for name, value in said.items()}
    write(path, LLAMA, state, entries=named)
    model = models.load(path)
    drawn = model.generate(IDS, 9, sampling="folder", rng=1)
    np.testing.assert_array_equal(drawn, model.generate(IDS, 9, temperature=0.5, top_p=0.75, rng=1))
    more = {"general.sampling.mirostat": 2, "general.sampling.penalty_repeat": 1.5}
    write(path, LLAMA, state, entries=named | more)
    with pytest.warns(
        models.FolderWarning, match="penalty_repeat=1.5, general.sampling.mirostat=2 is not done"
    ):
        models.load(path)


def test_sentencepiece_tokenizers(tmp_path):
    """The neighbours whose token has the best score join first; what is no token is spelled in bytes."""
    scores = dict.fromkeys("▁tabc", -9.0) | {"ab": -3.0, "bc": -1.0, "▁t": -2.0, "▁tabc": -4.0}
    tokens = [*SPELLED, *scores]
    config = LLAMA | {"vocab_size": len(tokens)}
    entries = sentencepiece(scores, pre="default")
    write(tmp_path / "model.gguf", config, make(config).state_dict(), entries=entries)
    found = models.load(tmp_path / "model.gguf")
    for text, pieces in (("tab", "▁t ab"), ("tabc", "▁t a bc"), ("a  é", "▁ a ▁ ▁ <0xC3> <0xA9>"), ("", "")):
        ids = found.tokenizer.encode(text).ids
        assert ids == [1, *map(tokens.index, pieces.split())]
        assert found.tokenizer.decode(ids) == text
    assert found.stop_ids == {2}
    # White space after Phi-3's marks is theirs, which only the name of the model says.
    for name, count in (("Llama", 4), ("Phi-3 mini", 2)):
        write(
            tmp_path / "model.gguf",
            config,
            make(config).state_dict(),
            entries=entries | {"general.name": name},
        )
        found = models.load(tmp_path / "model.gguf")
        for text, tokens in (("<s>\nt", 4), ("</s>\nt", count)):
            assert len(found.tokenizer.encode(text, add_special_tokens=False).ids) == tokens


def test_merges_are_all_pairs_that_make_a_token():
    """Of drawn tokens: the order of the tokens that they make, then of the first token's id."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        drawn = {"".join(rng.choice(list("ab€𝄞"), rng.integers(6))) for _ in range(60)}
        tokens = rng.permutation(sorted(drawn)).tolist()
        order = rng.permutation(len(tokens))[: rng.integers(60)]
        pairs = ((a, tokens[n][len(a) :]) for n in order for a in tokens if a and tokens[n].startswith(a))
        assert _gguf_tokenizer._merges(tokens, order) == [(a, b) for a, b in pairs if b and b in tokens]


def load_bytes(folder, content):
    (folder / "bad.gguf").write_bytes(content)
    models.load(folder / "bad.gguf")


def file(entries=(), tensors=(), data=bytes(99), **more):
    return put_together(Parts(list(entries), list(tensors), data, **more))


def test_the_least_alignment(tmp_path):
    path, tensor = tmp_path / "m.gguf", ("t", [1], 0, 0)
    path.write_bytes(file([("general.alignment", 4, struct.pack("<I", 8))], [tensor]))
    assert list(GGUF(path).tensors) == ["t"]
    path.write_bytes(file([("general.alignment", 4, struct.pack("<I", 4))], [tensor]))
    with pytest.raises(ValueError, match="power of two from 8 on, not 4"):
        GGUF(path)


ARCHITECTURE = ("general.architecture", *packed("llama"))
test_hostile_headers = refusals(
    (b"", "it has 0 bytes"),
    (b"GGUF", "it has 4 bytes"),
    (b"nope" + bytes(40), "does not begin with GGUF"),
    (file(version=1), "has version 1"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(9), "big-endian"),
    (file(counts=(2**63, 0)), "0 entries and 9223372036854775808 tensors"),
    (file(counts=(0, 2**40)), "1099511627776 entries"),
    (file(counts=(0, 1))[:24] + struct.pack("<Q", 2**60) + bytes(99), "expected 1152921504606846976 bytes"),
    (file([("a", 99, bytes(99))]), "a is of the type 99"),
    (file([("a", 9, struct.pack("<IQ", 4, 2**62) + bytes(99))]), "more than the file has bytes for"),
    (file([("a", 9, struct.pack("<IQ", 8, 2**40) + bytes(99))]), "more than the file has bytes for"),
    (file([("a", 9, struct.pack("<IQQ", 8, 2, 2**63) + bytes(99))]), "text 0 of a goes beyond"),
    (file([("a", 9, struct.pack("<IQ", 9, 1) + bytes(99))]), "an array of the type 9"),
    (file([("a", 8, struct.pack("<Q", 2) + b"\xff\xff")], counts=(0, 1)), "a is not UTF-8"),
    (file([("a", 0, b"1"), ("a", 0, b"1")]), "it has the entry 'a' twice"),
    (file([("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
    (file([("general.alignment", 4, struct.pack("<I", 24))]), "power of two"),
    (file([], [("t", [], 0, 0)]), "0 dimensions"),
    (file([], [("t", [2] * 9, 0, 0)]), "9 dimensions"),
    (file([], [("t", [2**40, 2**40], 0, 0)]), "has the shape"),
    (file([], [("t", [0], 0, 0)]), "has the shape"),
    (file([], [("t", [8], 77, 0)]), "of the kind 77"),
    (file([], [("t", [33], 2, 0)]), "rows of 33 numbers, in blocks of 32"),
    (file([], [("t", [8], 0, 5)]), "offset 5"),
    (file([], [("t", [8], 0, 2**60)]), r"ends at byte 11529.*: it is cut off or damaged"),
    (file([], [("t", [9999], 0, 0)]), "cut off or damaged"),
    (file([], [("t", [8], 0, 0), ("t", [8], 0, 0)]), "it has the tensor 't' twice"),
    (file([], [("t", [16], 0, 0), ("u", [8], 0, 32)], bytes(200)), "'t' and 'u' overlap"),
    (file([], [("t", [8], 0, 0)]), "has the architecture None"),
    (
        file([("general.architecture", *packed("nomic-bert"))], [("t", [8], 0, 0)]),
        "'nomic-bert'; .*encoders are loaded from the folder",
    ),
    (
        file([ARCHITECTURE, ("llama.pooling_type", *packed(3))], [("t", [8], 0, 0)]),
        "is an encoder, of pooling_type 3; encoders are loaded",
    ),
    (file([ARCHITECTURE]), "has no tensors"),
    (file([ARCHITECTURE], [("t", [8], 0, 0)]), "llama lacks attention.head_count"),
    given="tmp_path",
    call=load_bytes,
)


def load_with(folder, changes):
    write(folder / "bad.gguf", LLAMA, make(LLAMA).state_dict(), **changes)
    models.load(folder / "bad.gguf")


def zeros(kind):
    return np.zeros((4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind


def tokenizer(**values):
    tokens = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    return {"entries": of_tokenizer(**(tokens | values))}


KIND = gguf.GGMLQuantizationType
test_files_that_are_no_whole_models = refusals(
    ({"entries": {"split.no": 1, "split.count": 3}}, "is part 2 of 3 of a split model; join them"),
    ({"entries": {"general.type": "adapter"}}, "holds 'adapter'.* merge it into its model"),
    ({"entries": {"general.type": "mmproj"}}, "holds 'mmproj'.* no model$"),
    (
        {"tensors": {"token_types.weight": zeros(KIND.MXFP4)}},
        "has the tensor 'token_types.weight', MXFP4 of shape",
    ),
    (
        {"tensors": {"blk.0.attn_q.bias": zeros(KIND.Q8_K)}},
        "'blk.0.attn_q.bias' is of the kind Q8_K; supported are",
    ),
    given="tmp_path",
    call=load_with,
)
test_entries_that_do_not_fit = refusals(
    ({"attention.head_count": 0}, "must be an int of at least 1, not 0"),
    ({"attention.head_count": [4, 2]}, r"must be an int of at least 1, not \[4, 2\]"),
    ({"attention.head_count": "4"}, "must be an int of at least 1, not '4'"),
    ({"attention.layer_norm_rms_epsilon": float("nan")}, "must be a positive number, not nan"),
    ({"block_count": 1000}, "describes 1000 layers|missing: model.layers.2"),
    ({"block_count": 2**31 - 1}, "at most 10000, not 2147483647"),
    ({"block_count": 1}, "has no such weight|unexpected"),
    ({"feed_forward_length": 95}, r"shape \(96, 64\), the configuration says \(95, 64\)"),
    ({"attention.value_length": 8}, "different widths"),
    ({"rope.dimension_count": 8}, "a part of each head"),
    ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope'"),
    ({"attention.sliding_window": 5}, "sliding windows"),
    ({"logit_scale": 2.0}, "llama: logit_scale=2.0 is not supported; only 1 is"),
    ({"expert_count": 8}, "llama: expert_count=8 is not supported; only 0 is"),
    ({"context_length": None}, "llama lacks context_length"),
    ({"attention.causal": False}, "attention.causal=False is not supported"),
    (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5},
        "attn_factor 0.5",
    ),
    given="tmp_path",
    call=lambda folder, more: load_with(folder, {"more": more}),
)
test_tokenizers_that_do_not_fit = refusals(
    (tokenizer(tokens=["a", "a"]), "the token 'a' twice"),
    (tokenizer(tokens=["a"] * (SIZE + 1)), f"{SIZE + 1} tokens, and a table of {SIZE} rows"),
    (tokenizer(tokens=[1, 2]), "must be a list of str"),
    (tokenizer(merges=["a b c"]), "two tokens and a space"),
    (tokenizer(merges=["a x"]), "no tokenizer can be made"),
    (tokenizer(eos_token_id=3), "must be one of 3 tokens, not 3"),
    (tokenizer(model="bert"), "of kind 'bert'"),
    (tokenizer(model="llama", scores=[1.0]), "1 scores for 3 tokens"),
    (tokenizer(token_type=[1]), "1 types for 3 tokens"),
    given="tmp_path",
    call=load_with,
)


def test_a_file_is_loaded_where_no_thread_can_be_started(tmp_path, monkeypatch):
    write(tmp_path / "model.gguf", LLAMA, make(LLAMA).state_dict(), "Q8_0")
    expected = models.load(tmp_path / "model.gguf").generate([3, 1], 5)

    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    np.testing.assert_array_equal(models.load(tmp_path / "model.gguf").generate([3, 1], 5), expected)


def test_a_tokenizer_that_fits(tmp_path):
    write(tmp_path / "model.gguf", LLAMA, make(LLAMA).state_dict(), **tokenizer())
    assert models.load(tmp_path / "model.gguf").tokens("abba") == ["ab", "b", "a"]


def test_the_reader_agrees_with_the_package(tmp_path):
    path = tmp_path / "good.gguf"
    write(path, LLAMA, make(LLAMA).state_dict(), "Q8_0", byte_level(SPECIAL, template=TEMPLATE))
    ours, theirs = GGUF(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [each.name for each in theirs.tensors]
    for each in theirs.tensors:
        np.testing.assert_array_equal(ours.raw(each.name).reshape(-1), each.data.reshape(-1).view(np.uint8))
    for name, value in ours.metadata.items():
        assert theirs.fields[name].contents() == value, name
