"""The page of a language model has the bits of "baseline", writes on, and names what it cannot run."""

import base64
import math
import re

import numpy as np
import pytest
from gguf_files import write
from instruction_sets import using

from selfattn import models, nn, optim
from selfattn.engine.sampling import probabilities, sampling
from selfattn.views.gpt import page_gpt
from selfattn.views.live_pages import LIVE_PAGES, read_kernels
from tests.pages.browser.test_encoder_page import VIEWS

wait = pytest.importorskip("playwright.sync_api").expect
SCRIPTS = ("compute.js", "live/kernel.js", "live/readers.js", "live/language_model.js")
COMPUTE = """async ([wasm, letters, settings, texts, files]) => {
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const text = (array) => btoa(new Uint8Array(array.buffer, array.byteOffset, array.byteLength).reduce((all, byte) => all + String.fromCharCode(byte), ""));
    const kernel = await Kernel.load(bytes(wasm)), found = [];
    const entry = async (path, content) => [...(await readModel([{ path, file: new Blob([bytes(content)]) }])).values()][0];
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
    for (const { file, ids } of files) answers.push(await read(await readLlama(await entry("drawn.gguf", file), () => {}), ids, 6));
    return [found, answers];
}"""
TEXTS = ["i", "in the beginning ", "And he said; Behold, the"]


def drawn_file(rng, path):
    """Write a drawn Llama as GGUF, in one of the kinds that the package gguf makes."""
    key_heads = int(rng.integers(1, 3))
    heads, width = key_heads * int(rng.integers(1, 3)), 2 * int(rng.choice([1, 4, 8, 16]))
    config = {
        "model_type": "llama", "vocab_size": int(rng.integers(20, 70)), "hidden_size": heads * width,
        "num_hidden_layers": int(rng.integers(1, 4)), "num_attention_heads": heads, "num_key_value_heads": key_heads,
        "intermediate_size": int(rng.choice([32, 96, 160])), "max_position_embeddings": 64, "initializer_range": 0.3,
        "tie_word_embeddings": bool(rng.integers(2)),
    }  # fmt: skip
    state = models.LlamaForCausalLM(config, rng=int(rng.integers(1 << 30))).state_dict()
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    write(path, config, state, str(rng.choice(["F32", "F16", "Q8_0", "Q4_1", "Q5_0"])))
    return rng.integers(0, config["vocab_size"], int(rng.choice([1, 2, 7, 20])))


def test_drawn_language_models_have_the_bits_of_baseline(browser, kernels, tmp_path):
    pytest.importorskip("gguf")
    rng, files, wanted, answers = np.random.default_rng(53), [], [], []
    model, alphabet = page_gpt()
    settings = {
        "alphabet": list(alphabet), "heads": model.num_heads, "layers": model.num_layers, "context": model.max_seq_len,
        "eps": model.layers[0].norm1.eps, "activation": "gelu",
    }  # fmt: skip
    with using("baseline"):
        wanted += [model(np.array([alphabet.index(c) for c in text.lower()])) for text in TEXTS]
        for n in range(30):
            ids = drawn_file(rng, path := tmp_path / f"{n}.gguf")
            drawn = models.load(path, dtype="int8")
            wanted.append(drawn.logits(ids))
            answers.append(drawn.generate(ids, 6).tolist())
            files.append({"file": base64.b64encode(path.read_bytes()).decode(), "ids": ids.tolist()})
    page = browser.new_page()
    code = "".join((VIEWS / name).read_text() for name in SCRIPTS)
    names = "Kernel, readModel, readLetters, readLlama"
    page.add_script_tag(
        content=f"{code}globalThis.ggufTokenizer = () => null; Object.assign(globalThis, {{ {names} }});"
    )
    letters = base64.b64encode((VIEWS / "data/gpt.npz").read_bytes()).decode()
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


TRAIN = """async ([wasm, settings, arrays, batches, lr]) => {
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const text = (array) => btoa(new Uint8Array(array.buffer, array.byteOffset, array.byteLength).reduce((all, byte) => all + String.fromCharCode(byte), ""));
    const of = (name) => new Float32Array(bytes(arrays[name]).buffer);
    const trainer = new Trainer(await Kernel.load(bytes(wasm)), settings, of);
    const losses = batches.map((batch) => trainer.train(batch, lr));
    const after = trainer.parameters.map(({ parameter, layer }, n) => [parameter, layer, text(trainer.arrays[n])]);
    return [losses, after];
}"""


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_training_are_those_of_python(browser, kernels, seed):
    """AdamW and the passes are the core's; the loss is the page's, so its gradient may be off by an eps of its size."""
    rng = np.random.default_rng(seed)
    heads, layers = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    vocabulary, context = int(rng.integers(5, 40)), 12
    width, lr = heads * int(rng.choice([4, 8])), 0.01
    batches = rng.integers(0, vocabulary, (3, 2, context + 1))
    settings = {
        "alphabet": [str(n) for n in range(vocabulary)], "heads": heads, "layers": layers, "context": context,
        "width": width, "eps": 1e-5, "activation": "gelu",
    }  # fmt: skip
    with using("baseline"):
        model = nn.GPT(
            vocabulary, d_model=width, num_layers=layers, num_heads=heads, max_seq_len=context, rng=seed
        )
        start = {name: array.copy() for name, array in model.state_dict().items()}
        optimizer, losses = optim.AdamW(model.parameters(), lr=lr), []
        for batch in batches:
            logits, pullback = model.vjp(batch[:, :-1])
            loss, loss_pullback = nn.CrossEntropyLoss().vjp(
                logits.reshape(-1, vocabulary), batch[:, 1:].ravel()
            )
            losses.append(float(loss))
            optimizer.step(pullback(loss_pullback(1.0).reshape(logits.shape)))
    page = browser.new_page()
    scripts = ("compute.js", *SCRIPTS[1:], "live/training.js")
    code = "".join((VIEWS / name).read_text() for name in scripts)
    page.add_script_tag(content=f"{code}Object.assign(globalThis, {{ Kernel, Trainer }});")
    arrays = {name: base64.b64encode(array.tobytes()).decode() for name, array in start.items()}
    wasm = base64.b64encode(kernels.read_bytes()).decode()
    found, after = page.evaluate(TRAIN, [wasm, settings, arrays, batches.tolist(), lr])
    page.close()
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    state = model.state_dict()
    names = {"positions": "position_embedding.weight", "table": "token_embedding.weight"}
    names |= {"final_norm": "norm.weight", "up": "linear1.weight", "down.bias": "linear2.bias"}
    for parameter, layer, content in after:
        if parameter in names:
            name = names[parameter] if layer < 0 else f"layers.{layer}.{names[parameter]}"
            got = np.frombuffer(base64.b64decode(content), np.float32).reshape(state[name].shape)
            # A step is at most lr wide, whatever the gradient; where it is near 0 its sign may turn.
            assert np.mean(np.abs(got - state[name]) > 1e-4 * lr) < 0.01, name
            assert np.abs(got - start[name]).max() > lr / 2


def test_the_page_trains_until_it_is_paused(visit, kernels):
    page = visit(LIVE_PAGES["training"](read_kernels(kernels), "en").html)
    page.locator("[data-begun]").wait_for()
    page.get_by_role("button", name="One step").click()
    page.get_by_text("1 step;").wait_for()
    page.get_by_role("button", name="Train").click()
    page.locator("[data-step]").wait_for()
    wait(page.locator(".sa-training")).to_have_attribute(
        "data-step", re.compile(r"^[2-9]\d$|^\d{3,}$"), timeout=60_000
    )
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("a second").wait_for()
    first, last = map(float, re.findall(r"\d+\.\d+", page.locator(".sa-means").first.inner_text()))
    assert abs(first - math.log(23)) < 0.3 and last < first
    assert len(page.locator(".sa-written").inner_text()) > 60
    for pause in (50, 150, 400):  # a text typed while steps run begins anew
        page.get_by_role("button", name="Train").click()
        page.wait_for_timeout(pause)
        page.locator("textarea").fill(f"{pause} other letters, and the same letters again")
        wait(page.get_by_role("button", name="Train")).to_be_visible()
        wait(page.get_by_role("status").first).to_contain_text("drawn at random")
        wait(page.locator(".sa-means").first).to_have_text("No step yet.")
