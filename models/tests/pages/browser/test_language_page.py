"""The page of a language model has the bits of "baseline", writes on, and names what it cannot run."""

import base64
import re
from importlib import resources

import numpy as np
import pytest
from gguf_files import write
from instruction_sets import using
from page_driver import then

import selfattn_models as models
from selfattn.engine.sampling import probabilities, sampling
from selfattn.views.gpt import page_gpt
from selfattn.views.language import VIEWS
from selfattn.views.live_pages import read_kernels
from selfattn_models.pages.live_pages import LIVE_PAGES
from selfattn_models.pages.texts import own

wait = pytest.importorskip("playwright.sync_api").expect
SCRIPTS = ("live/kernel.js", *own("live/readers.js", "live/language_model.js"))
COMPUTE = """async ([wasm, letters, settings, texts, files]) => {
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const text = (array) => btoa(
        new Uint8Array(array.buffer, array.byteOffset, array.byteLength)
            .reduce((all, byte) => all + String.fromCharCode(byte), ""),
    );
    const kernel = await Kernel.load(bytes(wasm)), found = [];
    const entry = async (path, content) => {
        const files = await readModel([{ path, file: new Blob([bytes(content)]) }]);
        return [...files.values()][0];
    };
    const read = async ({ description }, ids, more) => {
        const model = kernel.transformer(description), cache = model.cache(ids.length + more), greedy = [];
        found.push(text(model.logits(model.forward(ids).rows, false)));
        let input = ids;
        while (greedy.length < more) {
            const { rows } = model.forward(input, { cache }), logits = model.logits(rows.slice(-description.d));
            greedy.push(logits.indexOf(Math.max(...logits)));
            input = greedy.slice(-1);
        }
        cache.free();
        model.free();
        return greedy;
    };
    const letterModel = await readLetters(await entry("letters.npz", letters), settings);
    for (const each of texts) await read(letterModel, letterModel.tokenizer.encode(each).ids, 1);
    const answers = [];
    for (const { file, ids } of files) {
        const llama = await readLlama(await entry("drawn.gguf", file), () => {});
        answers.push(await read(llama, ids, 6));
    }
    return [found, answers];
}"""
TEXTS = ["i", "in the beginning ", "And he said; Behold, the"]


def drawn_file(rng, path):
    """Write a drawn Llama as GGUF, in one of the kinds that the package gguf makes."""
    key_heads = int(rng.integers(1, 3))
    heads, width = key_heads * int(rng.integers(1, 3)), 2 * int(rng.choice([1, 4, 8, 16]))
    config = {
        "model_type": "llama",
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
    state = models.LlamaForCausalLM(config, rng=int(rng.integers(1 << 30))).state_dict()
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    write(path, config, state, str(rng.choice(["F32", "F16", "Q8_0", "Q4_1", "Q5_0"])))
    return rng.integers(0, config["vocab_size"], int(rng.choice([1, 2, 7, 20])))


def test_drawn_language_models_have_the_bits_of_baseline(browser, kernels, tmp_path):
    rng, files, wanted, answers = np.random.default_rng(53), [], [], []
    model, alphabet = page_gpt()
    settings = {
        "alphabet": list(alphabet),
        "heads": model.num_heads,
        "layers": model.num_layers,
        "context": model.max_seq_len,
        "eps": model.layers[0].norm1.eps,
        "activation": "gelu",
    }
    with using("baseline"):
        wanted += [model(np.array([alphabet.index(c) for c in text.lower()])) for text in TEXTS]
        for n in range(30):
            ids = drawn_file(rng, path := tmp_path / f"{n}.gguf")
            drawn = models.load(path, dtype="int8")
            wanted.append(drawn.logits(ids))
            answers.append(drawn.generate(ids, 6).tolist())
            files.append({"file": base64.b64encode(path.read_bytes()).decode(), "ids": ids.tolist()})
    page = browser.new_page()
    code = then(SCRIPTS, "Object.assign(globalThis, { Kernel, readModel, readLetters, readLlama });")
    # Drawn files have no tokenizer.
    page.add_script_tag(content=code.replace("ggufTokenizer(metadata, entry.path)", "null"))
    letters = base64.b64encode(resources.files(VIEWS).joinpath("data", "gpt.npz").read_bytes()).decode()
    found, greedy = page.evaluate(
        COMPUTE, [base64.b64encode(kernels.read_bytes()).decode(), letters, settings, TEXTS, files]
    )
    page.close()
    pairs = enumerate(zip(found, wanted, strict=True))
    assert [n for n, (got, own) in pairs if base64.b64decode(got) != own.tobytes()] == []
    assert greedy == answers


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
    page.get_by_role("status").get_by_text("notes.gguf").wait_for()
