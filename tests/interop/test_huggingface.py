"""The door to Transformers: models, generation and training equal its eager attention; masks keep what they mean."""

import copy
import functools
import random

import numpy as np
import pytest

import selfattn as sa

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")
from transformers import masking_utils as masks  # noqa: E402

from selfattn.interop import huggingface  # noqa: E402

huggingface.register()
agree = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
BERT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}
LLAMA = dict(**BERT, **ENDS, num_key_value_heads=2, head_dim=8)
GPT = dict(vocab_size=99, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, **ENDS)
PAIRED = dict(vocab_size=99, d_model=32, **ENDS, decoder_start_token_id=1)
SIDES = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
SIDES |= {name.replace("en", "de", 1): n for name, n in SIDES.items()}
MODELS = {
    "bert": (tf.BertModel, tf.BertConfig(**BERT)),
    "modernbert": (
        tf.ModernBertModel,
        tf.ModernBertConfig(**BERT, **ENDS, local_attention=6, global_attn_every_n_layers=2),
    ),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(**GPT)),
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA)),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**LLAMA, sliding_window=6)),
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config(**LLAMA, sliding_window=6, attn_logit_softcapping=2.0)),
    "gpt-oss": (
        tf.GptOssForCausalLM,
        tf.GptOssConfig(**LLAMA, sliding_window=6, num_local_experts=2, num_experts_per_tok=2),
    ),
    "llama4": (
        tf.Llama4ForCausalLM,
        tf.Llama4TextConfig(**LLAMA, attention_chunk_size=5, num_local_experts=2),
    ),
    "t5": (
        tf.T5ForConditionalGeneration,
        tf.T5Config(**PAIRED, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0),
    ),
    "bart": (
        tf.BartForConditionalGeneration,
        tf.BartConfig(**PAIRED, **SIDES, dropout=0.0, init_std=0.2, forced_eos_token_id=None),
    ),
    "vit": (tf.ViTModel, tf.ViTConfig(**BERT, image_size=16, patch_size=4)),
}


def pair(name, dtype=torch.float32):
    """A tiny model with eager attention, and the same model with selfattn's."""
    cls, config = MODELS[name]
    for attention in ("eager", "selfattn"):
        torch.manual_seed(0)
        yield cls._from_config(copy.deepcopy(config), attn_implementation=attention).to(dtype).eval()


def tokens(side=None):
    """Three sequences of 13 tokens with their mask: two are padded on a side or in the middle."""
    ids = torch.randint(3, 99, (3, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, n in ((0, 4), (2, 9)) if side else ():
        mask[row, {"right": slice(-n, None), "left": slice(n), "middle": slice(3, 5)}[side]] = 0
    return ids, mask


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_eager(name):
    (eager, ours), draw = pair(name), random.Random(name)
    for side in (None, "right", "left", "middle"):
        ids, mask = tokens(side)
        given, kept = {"input_ids": ids, "attention_mask": mask}, mask.bool()
        if name == "vit":
            given, kept = {"pixel_values": torch.randn(2, 3, 16, 16)}, torch.ones(2, 17).bool()
        if ours.config.is_encoder_decoder:
            given["decoder_input_ids"], kept = ids[:, :9], torch.ones(3, 9).bool()
        with torch.set_grad_enabled(draw.random() < 0.5):
            expected, found = (model(**given, output_attentions=side != "right") for model in (eager, ours))
        agree(found[0][kept], expected[0][kept])
        for kind in ("attentions", "decoder_attentions", "cross_attentions"):
            for x, y in zip(found.get(kind) or (), expected.get(kind) or (), strict=True):
                agree(x.transpose(1, 2)[kept], y.transpose(1, 2)[kept])


def opens(mask):
    """The pairs that a mask's options open, as weights of scores that are all 0."""
    options = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in mask.options.items()}
    assert options.get("attn_mask", np.ones((1, 1))).shape[-2] == 1  # no array of all pairs
    q, k = np.zeros((2, 1, mask.shape[2], 1)), np.zeros((2, 1, mask.length, 1))
    weights = sa.scaled_dot_product_attention(q, k, k, return_weights=True, **options)[1]
    return torch.from_numpy(np.pad(weights > 0, [(0, 0)] * 3 + [(0, mask.shape[3] - mask.length)]))


def test_masks_mean_what_transformers_means():
    """Drawn masks reach the core as options that open the same pairs; other operations see Transformers' mask."""
    draw, both = random.Random(0), masks.sliding_window_bidirectional_mask_function(2)
    functions = (
        masks.bidirectional_mask_function,
        masks.causal_mask_function,
        masks.sliding_window_causal_mask_function(3),
        both,
        masks.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    )
    for _ in range(150):
        function, rows = draw.choice(functions), draw.randint(1, 9)
        past = 0 if function is both else draw.choice((0, 3, 8))
        dropped, room = draw.choice((0, past // 2)), draw.choice((0, 5))
        padding = torch.rand(2, past + rows) < 0.7
        if draw.random() < 0.5:
            padding = torch.arange(past + rows) < torch.tensor([[past + 1], [past + rows]])
        given = {
            "batch_size": 2,
            "q_length": rows,
            "kv_length": past + rows - dropped + room,
            "q_offset": past,
            "kv_offset": dropped,
            "mask_function": function,
            "attention_mask": draw.choice((None, padding)),
        }
        mask = huggingface._mask(**given)
        expected = masks.sdpa_mask(**given, allow_is_causal_skip=False).expand(2, 1, -1, -1)
        assert torch.equal(opens(mask), expected), given
        agree(mask + 0.0, masks.eager_mask(**given))


def test_other_masks_are_arrays():
    """What a caller adds to a mask's function counts, and a change in place."""
    sizes = {"batch_size": 1, "q_length": 5, "kv_length": 5, "q_offset": 0, "kv_offset": 0}
    for function in (lambda b, h, q, k: k != 1, masks.sliding_window_overlay(2)):
        both = masks.and_masks(masks.sliding_window_causal_mask_function(4), function)
        given = {**sizes, "attention_mask": None, "mask_function": both}
        mask = huggingface._mask(**given)
        assert torch.equal(mask.options["attn_mask"], masks.sdpa_mask(**given, allow_is_causal_skip=False))
    mask[..., 2] = -torch.inf
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    found, _ = huggingface._attention(torch.nn.Module(), q, k, v, mask)
    agree(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, mask + 0.0).transpose(1, 2))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss", "llama4", "gpt2", "t5", "bart"])
def test_generation(name):
    (eager, ours), (ids, mask) = pair(name), tokens("left")
    ways = {"num_beams": 3, "cache_implementation": "static", "use_cache": False, "prefill_chunk_size": 4}
    for way in ("num_return_sequences", *random.Random(name).sample(list(ways), 2)):
        options = {"max_new_tokens": 10, "do_sample": False, way: ways.get(way, 1)}
        found, expected = (model.generate(ids, attention_mask=mask, **options) for model in (ours, eager))
        assert torch.equal(found, expected), way


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "t5"])
def test_training_equals_eager(name):
    (ids, mask), models = tokens("right"), list(pair(name))
    for model in models:
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.02)
        for _ in range(20):
            optimizer.zero_grad()
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
            optimizer.step()
    agree(*({name: x.data for name, x in model.named_parameters()} for model in models), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """The mean error is about that of eager attention in 16 bits, also where autocast is on."""
    pytest.importorskip("ml_dtypes")
    (ids, mask), (exact, mixed) = tokens("right"), pair("mistral")
    exact = exact(ids, attention_mask=mask).logits
    eager, ours = (model(ids, attention_mask=mask).logits for model in pair("mistral", dtype))
    with torch.autocast("cpu", dtype):
        mixed = mixed(ids, attention_mask=mask).logits
    eager, *found = ((x - exact)[mask.bool()].abs().mean() for x in (eager, ours, mixed))
    assert max(found) < 1.2 * eager


def test_packed_sequences_and_compiled_models():
    (ids, mask), (eager, ours) = tokens("left"), pair("mistral")
    given = {"position_ids": torch.cat([torch.arange(5), torch.arange(8)])[None], "use_cache": False}
    lengths = {"cu_seq_lens_q": torch.tensor([0, 5, 13]), "max_length_q": 8}
    agree(ours(ids[:1], **given, **lengths).logits, eager(ids[:1], **given).logits)
    with pytest.raises(
        TypeError, match="does not know cu_seq_lens_q, max_length_q, which MistralAttention passes"
    ):
        ours(ids[:1], **lengths)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    agree(*(model(ids, attention_mask=mask).logits[mask.bool()] for model in (compiled, eager)))


def test_what_is_refused():
    _, ours = pair("llama")
    with pytest.raises(
        TypeError, match="does not know indices, which LlamaAttention passes: leave it out, or load"
    ):
        ours(tokens()[0], indices=torch.ones(1), cache_position=None)
    with pytest.raises(ValueError, match="query is on meta"):
        ours.to("meta")(torch.ones(1, 3, dtype=torch.long, device="meta"))


def test_a_model_with_code_of_its_own_is_refused():
    """As "sdpa" refuses it; what goes through Transformers' interface, or has parts that do, is taken."""
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    for kind in ("Deberta", "MPNet", "Bloom"):
        own = getattr(tf, f"{kind}Config")(**(GPT if kind == "Bloom" else config))
        with pytest.raises(ValueError, match=f'{kind}Model computes attention in code of its own.*"eager"'):
            getattr(tf, f"{kind}Model")._from_config(own, attn_implementation="selfattn")
    huggingface.register()  # twice changes nothing
    bert = tf.BertConfig(**config, vocab_size=9)
    for kind in (tf.BertModel, type("Mine", (tf.BertModel,), {})):
        assert (
            kind._from_config(bert, attn_implementation="selfattn").config._attn_implementation == "selfattn"
        )
