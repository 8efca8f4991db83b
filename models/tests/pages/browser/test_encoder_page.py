"""The page of an encoder has the bits of "baseline", finds what is nearest, keeps choices while one types, and names
what it cannot run."""

import base64
import functools
import http.server
import threading

import numpy as np
import pytest
from instruction_sets import using
from page_driver import CONTRASTS, compute, in_base64
from pretrained_data import DATA
from small_tokenizers import word_piece

import selfattn as sa
import selfattn_models as models
from selfattn import nn
from selfattn.engine import weights
from selfattn.steps.transformer import states
from selfattn.views import packs
from selfattn.views.live_pages import read_kernels
from selfattn.views.packs import gpt_pack
from selfattn_models import _pipeline
from selfattn_models.packs import packed
from selfattn_models.pages.live_pages import LIVE_PAGES, pack_page
from selfattn_models.pages.texts import own

SCRIPTS = ("live/kernel.js", "live/pack.js", *own("live/encoder.js"))
SIZES = {
    "vocab_size": 2,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
FAMILIES = {
    "bert": models.BertModel,
    "distilbert": models.DistilBertModel,
    "roberta": models.RobertaModel,
    "camembert": models.RobertaModel,
}

COMPUTE = """const found = [];
    for (const { pack, reads } of given) {
        const encoder = await modelOf(bytes(pack), "drawn", "encoder", (pack) => new Encoder(kernel, pack));
        found.push(...reads.map((read) => Object.values(encoder.compute(read, true)).map(text)));
        encoder.model.free();
    }
    return found;"""


def drawn_encoder(rng):
    """Return a drawn encoder, and tokens to read."""
    heads, width = int(rng.choice([1, 2, 3])), int(rng.choice([2, 5, 16, 33]))
    d, family, vocabulary = heads * width, str(rng.choice(list(FAMILIES))), int(rng.integers(20, 60))
    names = "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act"
    if family == "distilbert":
        names = "dim n_layers n_heads hidden_dim activation"
    layers, hidden = int(rng.integers(1, 4)), int(rng.choice([8, 129, 260]))
    values = d, layers, heads, hidden, str(rng.choice(["gelu", "gelu_new", "relu", "silu"]))
    config = {"model_type": family, "vocab_size": vocabulary, "max_position_embeddings": 80}
    config |= dict(zip(names.split(), values, strict=True)) | {"initializer_range": 0.3}
    model = FAMILIES[family](config, rng=int(rng.integers(1 << 30)))
    for array in model.arrays.values():
        np.add(array, rng.normal(0, 0.1, array.shape), array, casting="same_kind")
    modes = ["mean", "cls", "max", "lasttoken"]
    model.pipeline.modes = tuple(rng.choice(modes, int(rng.choice([1, 1, 2])), replace=False).tolist())
    model.pipeline.after = [("2_Normalize", None)] if rng.random() < 0.5 else []
    model.pipeline.truncate_dim = d // 2 if rng.random() < 0.3 else None
    model.tokenizer = word_piece()
    lengths = rng.choice([1, 2, 3, 16, 17, 64], 2).tolist()
    reads = [{"ids": rng.integers(1, vocabulary, length).tolist()} for length in lengths]
    return model, reads


def computed(model, read):
    """The embedding, and the weights of all heads: layer by layer, by the functions of arrays."""
    ids, starts, modes = np.array(read["ids"]), np.array([0, len(read["ids"])]), model.pipeline.modes
    if len(modes) == 1 and modes[0] in _pipeline.IN_CORE:
        row = model._rows(ids, starts, _pipeline.IN_CORE[modes[0]])
    else:
        row = _pipeline.pool(model._rows(ids, starts), starts, modes, [0])
    settings, rows = model._inputs(model._built(len(ids))[0], ids, starts, None)
    shown = []
    for layer, x in zip(settings.layers, states(settings, rows), strict=False):
        q, k = (
            weights.multiply(x, own.weight, own.bias).reshape(len(x), layer.num_heads, -1).swapaxes(0, 1)
            for own in (layer.query, layer.key)
        )
        shown.append(sa.scaled_dot_product_attention(q, k, k, return_weights=True)[1])
    return model.pipeline.finish(row, None)[0], np.stack(shown)


def test_drawn_encoders_have_the_bits_of_baseline(browser, kernels):
    rng, drawn, wanted = np.random.default_rng(54), [], []
    with using("baseline"):
        for n in range(27):
            model, reads = drawn_encoder(rng)
            if n % 3:
                model.quantize("int8")
            wanted += [computed(model, read) for read in reads]
            pack = packed(model, "drawn", model.dtype)
            drawn.append({"pack": in_base64(pack), "reads": reads})
    found = compute(browser, kernels, SCRIPTS, "Encoder, modelOf", COMPUTE, drawn)
    different = [
        n
        for n, (pair, own) in enumerate(zip(found, wanted, strict=True))
        if [base64.b64decode(text) for text in pair] != [x.tobytes() for x in own]
    ]
    assert len(found) == 54 and different == []


@pytest.fixture
def typed(opened, kernels):
    page = LIVE_PAGES["encoder"](read_kernels(kernels), "en")
    assert len(page.html.encode()) < 600_000
    found = opened(page, width=390, color_scheme="dark")

    def write(text, *, side=0):
        """Type a sentence and wait until the page has looked at it."""
        found.get_by_role("textbox").nth(side).fill(text)
        found.wait_for_function(
            "text => document.querySelector('[data-looked]')?.dataset.looked.includes(text)", arg=text
        )
        return found

    return write


def near(page):
    page.locator(".sa-near li").first.wait_for()
    return [row.inner_text().split("\n") for row in page.locator(".sa-near li").all()]


def test_the_toy_knows_two_banks_and_keeps_what_was_chosen(typed):
    page = typed("the bank and the money")
    money = {"this money is in the account", "the clerk has cash", "the loan has interest"}
    assert {text for _, text in near(page)[:3]} == money
    page.get_by_role("option").nth(0).click()
    page.locator(".sa-text button", has_text="bank").click()
    page.get_by_role("button", name="only bank").click()
    page = typed("we saw the bank and the stream")
    assert page.get_by_role("option").nth(0).get_attribute("aria-selected") == "true"
    assert page.locator(".sa-text [aria-pressed=true]").inner_text() == "bank"
    assert page.get_by_role("button", name="only bank").get_attribute("aria-pressed") == "true"
    assert {text for _, text in near(page)[:3]} == {
        "the boat is in the water",
        "we saw fish in the stream",
        "the mud is near the reeds",
    }
    assert min(ratio for _, ratio in page.evaluate(CONTRASTS)) >= 4.5
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Compare").click()
    page = typed("the bank and the money", side=1)
    assert float(page.locator(".sa-fields strong").inner_text().split(": ")[1].replace("−", "-")) < 0


def test_what_is_no_pack_of_an_encoder_is_said_and_the_model_stays(typed):
    page = typed("the bank")
    letters = gpt_pack(nn.GPT(3, 4, 1, 1, max_seq_len=4, rng=0), "ab ")
    for name, content, said in (
        ("model.gguf", b"GGUF" * 9, "selfattn pages DIR --model model.gguf"),
        ("letters.sapack", letters, "a model of another kind, language"),
        ("cut.sapack", letters[:-64], "cut off"),
    ):
        page.locator("input[accept]").set_input_files(
            {"name": name, "mimeType": "application/octet-stream", "buffer": content}
        )
        page.locator("[role=status]", has_text=said).wait_for()
        page = typed(f"the bank {'and ' * len(said)}")


def test_a_packs_name_is_text(opened, kernels):
    name = "</script><img src=x onerror=alert(1)><b>{layers}*"
    model = models.BertModel(SIZES, rng=0)
    model.tokenizer = word_piece()
    page = opened(pack_page(read_kernels(kernels), "en", "mine", packed(model, name)))
    page.get_by_text("runs in this tab").wait_for()
    assert name in page.locator(".sa-model p").inner_text()
    assert page.locator("img, .sa-model b").count() == 0


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_page_fetches_the_pack_next_to_it_from_its_own_site(browser, kernels, tmp_path, monkeypatch):
    model = models.BertModel(SIZES, rng=0)
    model.tokenizer = word_piece()
    pack = packed(model, "mine")
    monkeypatch.setattr(packs, "MOST_INSIDE", len(pack) - 1)
    pack_page(read_kernels(kernels), "en", "mine", pack).save(tmp_path / "mine.html")
    (tmp_path / "mine.sapack").write_bytes(pack)
    page = browser.new_page()
    page.goto((tmp_path / "mine.html").as_uri())
    page.get_by_text("drop it onto this page").wait_for()
    handler = functools.partial(Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        page.goto(f"http://127.0.0.1:{server.server_port}/mine.html")
        page.get_by_text("mine runs in this tab: 3 layers, 6 heads").wait_for()
        server.shutdown()
    page.close()


@pytest.mark.skipif(
    not (DATA / "all-MiniLM-L6-v2/modules.json").exists(), reason="MiniLM is not on this disk"
)
def test_minilm_in_the_page_finds_what_python_finds(typed, tmp_path):
    with using("baseline"):
        model = models.load(DATA / "all-MiniLM-L6-v2", dtype="int8")
        models.pack(model, tmp_path / "minilm.sapack")
        query = "A storm at sea!"
        texts = [
            "The waves rose, and the ship sank.",
            "Tea with milk, naïvely brewed.",
            "Ein Sturm auf See 天気",
        ]
        wanted = sorted(
            zip(model.similarity(model.encode(query), model.encode(texts))[0].tolist(), texts, strict=True),
            reverse=True,
        )
    page = typed("the bank")
    page.locator("input[accept]").set_input_files(tmp_path / "minilm.sapack")
    page.locator(".sa-thumb").nth(71).wait_for()
    page.locator("textarea").fill("\n".join(texts))
    page = typed(query)
    page.locator(".sa-near li", has_text="Sturm").wait_for()
    assert near(page) == [[f"{score:.2f}".replace("-", "−"), text] for score, text in wanted]
    assert page.locator(".sa-text button").all_inner_texts() == model.tokens(query)
