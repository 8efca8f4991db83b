"""Packs of language models have the bits of "baseline" in a page, and the page of a GPT runs them."""

import base64

import numpy as np
import pytest
from gguf_files import write
from instruction_sets import using
from language_folders import save_language_model
from page_driver import bars, compute, in_base64
from small_tokenizers import byte_level

import selfattn_models as models
from selfattn.engine.sampling import probabilities, sampling
from selfattn.views.live_pages import read_kernels
from selfattn_models.packs import packed
from selfattn_models.pages.live_pages import LIVE_PAGES

pytest.importorskip("playwright.sync_api")
SCRIPTS = ("live/kernel.js", "live/pack.js")
COMPUTE = """const found = [];
    for (const { pack, ids, more } of given) {
        const { model: description } = await readPack(bytes(pack), "drawn");
        const model = kernel.transformer(description), cache = model.cache(ids.length + more), greedy = [];
        const logits = text(model.logits(model.forward(ids).rows, false));
        let input = ids;
        while (greedy.length < more) {
            const { rows } = model.forward(input, { cache }), logits = model.logits(rows.slice(-description.d));
            greedy.push(logits.indexOf(Math.max(...logits)));
            input = greedy.slice(-1);
        }
        cache.free();
        model.free();
        found.push([logits, greedy]);
    }
    return found;"""


def drawn_model(rng, path):
    """Return a drawn model of Llama's kind; some are read from a GGUF file, which the package gguf makes."""
    key_heads, kind = int(rng.integers(1, 3)), str(rng.choice(["llama", "llama", "mistral", "qwen2"]))
    heads, width = key_heads * int(rng.integers(1, 3)), 2 * int(rng.choice([1, 4, 8, 16]))
    config = {
        "model_type": kind,
        "vocab_size": int(rng.integers(20, 70)),
        "hidden_size": heads * width,
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": int(rng.choice([32, 96, 160])),
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": bool(rng.integers(2)),
    }
    if kind == "mistral":
        config["sliding_window"] = int(rng.choice([2, 5, 4096]))
    model = models.LlamaForCausalLM(config, rng=int(rng.integers(1 << 30)))
    if kind == "llama" and rng.random() < 0.7:
        state = model.state_dict()
        if config["tie_word_embeddings"]:
            state.pop("lm_head.weight", None)
        write(path, config, state, str(rng.choice(["F32", "F16", "Q8_0", "Q4_1", "Q5_0"])))
        model = models.load(path, dtype="int8")
    elif rng.random() < 0.7:
        model.quantize("int8")
    model.tokenizer = byte_level()
    return model, rng.integers(0, config["vocab_size"], int(rng.choice([1, 2, 7, 20])))


def test_drawn_language_models_have_the_bits_of_baseline(browser, kernels, tmp_path):
    rng, packs, wanted = np.random.default_rng(53), [], []
    with using("baseline"):
        for n in range(30):
            model, ids = drawn_model(rng, tmp_path / f"{n}.gguf")
            wanted.append((model.logits(ids), model.generate(ids, 6).tolist()))
            pack = packed(model, "drawn", model.dtype)
            packs.append({"pack": in_base64(pack), "ids": ids.tolist(), "more": 6})
    found = compute(browser, kernels, SCRIPTS, "readPack", COMPUTE, packs)
    pairs = enumerate(zip(found, wanted, strict=True))
    different = [
        n
        for n, ((logits, greedy), (own, answer)) in pairs
        if base64.b64decode(logits) != own.tobytes() or greedy != answer
    ]
    assert different == []


def test_the_page_of_a_gpt_runs_a_model_with_a_tokenizer(visit, kernels, tmp_path):
    page = visit(LIVE_PAGES["gpt"](read_kernels(kernels), "en").html)
    page.get_by_text("12 heads: computed").wait_for()
    model = models.load(save_language_model(tmp_path / "small"), dtype="int8")
    (tmp_path / "small.sapack").write_bytes(packed(model, "small", "int8"))
    page.locator("input[type=file]").set_input_files(tmp_path / "small.sapack")
    page.locator("strong", has_text="small").wait_for()
    text = "hello there, naïve"
    page.get_by_label("Prompt").fill(text)
    ids = model.tokenizer.encode(text).ids
    page.locator("[data-looked]").wait_for()
    p = probabilities(model.logits(np.array(ids))[-1], sampling(1.0))
    assert bars(page)[0][1] == pytest.approx(p.max(), abs=0.00051)
    assert page.locator(".sa-written button").count() == len(ids)
    assert page.locator(".sa-switch").filter(visible=True).count() == 0  # weights of int8 stay as they are
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("a second").wait_for()
    # Its context is 128 tokens.
    assert page.locator(".sa-added").count() == len(model.generate(np.array(ids), 128 - len(ids)))
    page.locator(".sa-tour [data-do='tour next']").first.click()
    page.locator(".sa-guesses button").first.click()
    page.locator(".sa-yes").wait_for()
