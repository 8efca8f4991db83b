"""The page of training: its steps are Python's, it trains until it is paused, a chosen head shows its weights."""

import base64
import math
import re

import numpy as np
import pytest
from instruction_sets import using
from page_driver import compute, in_base64

from selfattn import nn, optim
from selfattn.views.live_pages import LIVE_PAGES, read_kernels

wait = pytest.importorskip("playwright.sync_api").expect
SCRIPTS = ("live/kernel.js", "live/training.js")
OF = "const [settings, arrays, ...more] = given, of = (name) => new Float32Array(bytes(arrays[name]).buffer);"
TRAIN = """const trainer = new Trainer(kernel, settings, of), [batches, lr] = more;
    const losses = batches.map((batch) => trainer.train(batch, lr));
    return [losses, trainer.parameters.map(
        ({ parameter, layer }, n) => [parameter, layer, text(trainer.arrays[n])])];"""
LOOK = (
    "const look = new Trainer(kernel, settings, of).look(...more); return [look.tokens, [...look.weights]];"
)


def trained(browser, kernels, body, alphabet, model, arrays, *more):
    settings = {"heads": model.num_heads, "layers": len(model.layers), "context": model.max_seq_len}
    settings |= {"alphabet": list(alphabet), "width": model.d_model, "eps": 1e-5, "activation": "gelu"}
    arrays = {name: in_base64(array.tobytes()) for name, array in arrays.items()}
    return compute(browser, kernels, SCRIPTS, "Trainer", OF + body, [settings, arrays, *more])


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_training_are_those_of_python(browser, kernels, seed):
    """AdamW and the passes are the core's; the loss is the page's, so its gradient may be off by an eps of its size."""
    rng = np.random.default_rng(seed)
    heads, layers = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    vocabulary, context = int(rng.integers(5, 40)), 12
    width, lr = heads * int(rng.choice([4, 8])), 0.01
    batches = rng.integers(0, vocabulary, (3, 2, context + 1))
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
    alphabet = map(str, range(vocabulary))
    found, after = trained(browser, kernels, TRAIN, alphabet, model, start, batches.tolist(), lr)
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


def test_a_look_has_the_weights_of_the_model(browser, kernels):
    alphabet, sample = " abcd", "a cab, a dab"  # the alphabet's first letter is for what it does not know
    model = nn.GPT(5, d_model=12, num_layers=2, num_heads=3, max_seq_len=10, rng=0)
    for array in model.parameters().values():
        array[...] *= 20  # so that weights differ
    sample = sample.replace(",", "")
    tokens, weights = trained(browser, kernels, LOOK, alphabet, model, model.state_dict(), sample)
    ids = [alphabet.index(letter) for letter in sample[:10]]
    expected = np.stack([layer.weights for layer in model.steps(ids).layers])
    assert tokens == [alphabet[n].replace(" ", "␣") for n in ids] and expected[0, :, -1].max() > 0.5
    np.testing.assert_allclose(np.reshape(weights, expected.shape), expected, rtol=1e-4, atol=1e-6)


# Keeps the newest tokens and weights that the worker has sent.
LISTEN = """() => {
    const { Worker } = globalThis;
    globalThis.Worker = function (url) {
        const worker = new Worker(url);
        worker.addEventListener("message", ({ data }) => {
            const look = data.result ?? data.progress;
            if (look?.weights) globalThis.looked = { tokens: look.tokens, weights: [...look.weights] };
        });
        return worker;
    };
}"""


def test_a_chosen_head_and_letter_show_their_weights(browser, kernels, tmp_path):
    path = LIVE_PAGES["training"](read_kernels(kernels), "en").save(tmp_path / "page.html")
    page = browser.new_page(reduced_motion="reduce")  # a letter is marked at once
    page.add_init_script(f"({LISTEN})()")
    page.goto(path.as_uri())
    page.locator("[data-begun]").wait_for()
    page.get_by_label("Learning rate").select_option("0.01")
    page.get_by_role("button", name="Train").click()  # at first all weights of a letter are nearly equal
    many = re.compile(r"^[4-9]\d$|^\d{3,}$")
    wait(page.locator(".sa-training")).to_have_attribute("data-step", many, timeout=60_000)
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("a second").wait_for()
    tokens, weights = page.evaluate("[looked.tokens, looked.weights]")
    weights = np.reshape(weights, (2, 4, len(tokens), len(tokens)))
    assert "".join(tokens) == "the␣sun␣also␣rises,␣and␣" and np.ptp(weights[:, :, -1]) > 0.1
    maps, letters, caption = (page.locator(name) for name in (".sa-thumb", ".sa-to", ".sa-takes"))
    assert maps.count() == 2 * 4 and page.locator(".sa-heads canvas").count() == 2 * 4

    def check(head, i):
        pressed = maps.evaluate_all("all => all.map((each) => each.ariaPressed)")
        assert pressed == [str(n == head).lower() for n in range(8)]
        assert letters.evaluate_all("all => all.findIndex((each) => each.ariaPressed === 'true')") == i
        row = weights[head // 4, head % 4, i]
        largest = [f"{row[j]:.2f} to {tokens[j]}" for j in np.argsort(-row, kind="stable")[:3]]
        said = f"layer {head // 4}, head {head % 4}: {tokens[i]} gives weight {', '.join(largest)}"
        assert caption.inner_text() == said

    check(0, len(tokens) - 1)
    for head, i in ((5, 9), (2, 3), (7, 0)):
        maps.nth(head).click()
        letters.nth(i).click()
        check(head, i)
    maps.nth(0).focus()
    for head, key in ((0, "Enter"), (1, "Space"), (2, "Enter")):
        page.keyboard.press(key)
        check(head, 0)
        page.keyboard.press("Tab")
    letters.nth(0).focus()
    for i in (1, 2):
        page.keyboard.press("ArrowDown")
        check(2, i)
    page.close()
