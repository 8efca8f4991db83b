"""The page of a language model has the bits of "baseline", writes on, and names what it cannot run."""

import base64
import re

import numpy as np
import pytest
from gguf_files import write
from instruction_sets import using
from page_driver import then
from small_tokenizers import byte_level

import selfattn_models as models
from selfattn.engine.sampling import probabilities, sampling
from selfattn.views.gpt import page_gpt
from selfattn.views.live_pages import read_kernels
from selfattn.views.packs import gpt_pack
from selfattn_models.packs import packed
from selfattn_models.pages.live_pages import LIVE_PAGES

wait = pytest.importorskip("playwright.sync_api").expect
SCRIPTS = ("live/kernel.js", "live/pack.js")
COMPUTE = """async ([wasm, packs]) => {
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const text = (array) => btoa(
        new Uint8Array(array.buffer, array.byteOffset, array.byteLength)
            .reduce((all, byte) => all + String.fromCharCode(byte), ""),
    );
    const kernel = await Kernel.load(bytes(wasm)), found = [];
    for (const { pack, ids, more } of packs) {
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
    return found;
}"""
TEXTS = ["i", "in the beginning ", "And he said; Behold, the"]


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
    letters, alphabet = page_gpt()
    texts = [np.array([alphabet.index(c) for c in text.lower()]) for text in TEXTS]
    drawn = [(letters, ids, 1) for ids in texts]
    with using("baseline"):
        drawn += [(*drawn_model(rng, tmp_path / f"{n}.gguf"), 6) for n in range(30)]
        for model, ids, more in drawn:
            logits = model(ids) if model is letters else model.logits(ids)
            wanted.append((logits, model.generate(ids, more).tolist()))
            pack = gpt_pack(letters, alphabet) if model is letters else packed(model, "drawn", model.dtype)
            packs.append({"pack": base64.b64encode(pack).decode(), "ids": ids.tolist(), "more": more})
    page = browser.new_page()
    page.add_script_tag(content=then(SCRIPTS, "Object.assign(globalThis, { Kernel, readPack });"))
    found = page.evaluate(COMPUTE, [base64.b64encode(kernels.read_bytes()).decode(), packs])
    page.close()
    pairs = enumerate(zip(found, wanted, strict=True))
    different = [
        n
        for n, ((logits, greedy), (own, answer)) in pairs
        if base64.b64decode(logits) != own.tobytes() or greedy != answer
    ]
    assert different == []


def test_the_page_says_what_comes_next_and_writes(visit, kernels, tmp_path):
    page = visit(LIVE_PAGES["language_model"](read_kernels(kernels), "en").html)
    text = page.locator("textarea")
    page.locator("[data-looked]").wait_for()
    model, alphabet = page_gpt()
    for each in TEXTS[1:]:
        text.fill(each)
        page.locator(f'[data-looked="{each}"]').wait_for()
        p = probabilities(
            model(np.array([alphabet.index(c) for c in each.lower()]))[-1], sampling(0.8, top_p=0.9)
        )
        first = page.locator(".sa-bars-list li").first.inner_text().split()
        assert first == [alphabet[p.argmax()].replace(" ", "␣"), f"{p.max():.3f}"]
    page.get_by_role("button", name="Next token").click()
    wait(text).to_have_value(re.compile(f"^{re.escape(TEXTS[-1])}.$", re.DOTALL))
    page.get_by_role("button", name="Write on").click()
    page.get_by_text("a second").wait_for()
    assert len(text.input_value()) > 60
    text.fill("naïve")
    page.get_by_text("does not know ï").wait_for()
    (tmp_path / "notes.gguf").write_bytes(b"no model")
    page.locator("input[type=file]").set_input_files(tmp_path / "notes.gguf")
    page.get_by_role("status").get_by_text("selfattn pages DIR --model notes.gguf").wait_for()
