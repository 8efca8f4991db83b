"""The core in a browser has the bits of "baseline"; the playground shows what its Python computes, and says what went
wrong."""

import base64
import re

import numpy as np
import pytest
from instruction_sets import using
from page_driver import CONTRASTS, compute, in_base64

import selfattn as sa
from selfattn.views.live_pages import LIVE_PAGES, read_kernels

# Runs attention without and with gradients: the results in base 64, or the name of an error.
COMPUTE = """
    const compute = ({ type, types, ...call }) => {
        for (const [name, kind] of Object.entries(types)) call[name] = new globalThis[kind](bytes(call[name]).buffer);
        const plain = kernel.attention({ ...call, seed: BigInt(call.seed), gradOut: null, weights: true });
        const found = kernel.attention({ ...call, seed: BigInt(call.seed) });
        return [plain.out, plain.weights, found.out, found.dQuery, found.dKey, found.dValue].map(text);
    };
    const zeros = (query, key, value) => ({
        query: new Float32Array(query), key: new Float32Array(key), value: new Float32Array(value),
    });
    const refused = [
        { L: 30000, S: 30000, ...zeros(30000, 30000, 30000), weights: true },
        { L: 2, S: 1, ...zeros(2, 3, 1) },
        { L: 1, S: 1, heads: 3, keyHeads: 2, ...zeros(3, 2, 2) },
    ];
    const names = refused.map((call) => {
        try {
            return kernel.attention(call).out.length;
        } catch (error) {
            return error.name;
        }
    });
    const imports = WebAssembly.Module.imports(new WebAssembly.Module(bytes(wasm)));
    return [given.map(compute), names, imports.length, kernel.text(kernel.core.built_from())];"""


def packed(call):
    """Return a call with its arrays in base 64, and their types in JavaScript."""
    names = {"f4": "Float32Array", "f8": "Float64Array", "b1": "Uint8Array"}
    types = {n: names[a.dtype.str[1:]] for n, a in call.items() if isinstance(a, np.ndarray)}
    return call | {n: in_base64(call[n].tobytes()) for n in types} | {"types": types}


def drawn_call(rng):
    """Return a call of kernel.js, and what Python computes."""
    dtype, numbers = rng.choice([np.float32, np.float64]), [1, 2, 3, 4, 8, 17, 32, 64]
    keys, heads = (n := int(rng.choice([1, 1, 2, 3]))), n * int(rng.choice([1, 1, 2, 4]))
    L, E, Ev = int(rng.choice([1, 2, 3, 8, 16, 33, 65, 130])), *rng.choice(numbers, 2).tolist()
    S = int(rng.choice([L, L, 1, 5, 63, 64, 65, 300]))
    shapes = {"query": (heads, L, E), "key": (keys, S, E), "value": (keys, S, Ev), "gradOut": (heads, L, Ev)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    mask = [None, None, rng.random((L, S)) < 0.7, rng.standard_normal((L, S)).astype(dtype)][rng.integers(4)]
    seed, given = int(rng.integers(2**63)), (*arrays.values(),)[:3]
    some = {
        "softcap": float(rng.uniform(1, 30)),
        "slopes": rng.random(heads).tolist(),
        "sinks": rng.standard_normal(heads).tolist(),
        "causal": str(rng.choice(["upper_left", "lower_right"])),
        "window": [None, int(rng.integers(40))],
        "scale": -0.7,
        "dropout": 0.3,
    }
    some = {name: value for name, value in some.items() if rng.random() < 0.4}
    names = {"slopes": "alibi_slopes", "dropout": "dropout_p"}
    options = {names.get(name, name): value for name, value in some.items()}
    options |= {"attn_mask": mask, "rng": seed, "enable_gqa": heads > keys}
    out, weights = sa.scaled_dot_product_attention(*given, return_weights=True, **options)
    kept, pullback = sa.scaled_dot_product_attention_vjp(*given, **options)
    call = arrays | some | {"seed": str(seed), "L": L, "S": S, "heads": heads, "keyHeads": keys}
    gradients = pullback(arrays["gradOut"])
    return packed(call if mask is None else call | {"mask": mask}), [out, weights, kept, *gradients]


def test_attention_in_a_browser_have_the_bits_of_baseline(browser, kernels):
    rng = np.random.default_rng(53)
    with using("baseline"):
        cases = [drawn_call(rng) for _ in range(100)]
    calls = [call for call, _ in cases]
    found, refused, imports, built = compute(browser, kernels, ["live/kernel.js"], "", COMPUTE, calls)
    for (call, wanted), got in zip(cases, found, strict=True):
        assert [base64.b64decode(text) for text in got] == [array.tobytes() for array in wanted], call
    assert refused == ["memory", "sizes", "sizes"] and imports == 0
    _, version, commit = read_kernels(kernels)
    assert version == sa.__version__ and built.endswith(f" of {version}, commit {commit}")


@pytest.fixture(scope="module")
def playground(kernels):
    page = LIVE_PAGES["playground"](read_kernels(kernels), "en")
    assert len(page.html.encode()) < 600_000
    return page


HEAR = (
    "document.addEventListener('sa-chosen', "
    "({ detail }) => { window.heard = { ...detail, numbers: [...detail.numbers] } })"
)


@pytest.mark.parametrize(
    ("typed", "width", "scheme"),
    [
        (
            {
                "heads": "4",
                "key heads": "2",
                "window to the left": "3",
                "softcap": "2",
                "dropout": "0.2",
                "seed of dropout": "7",
            },
            390,
            "dark",
        ),
        ({"ALiBi’s slope": "0.5", "scale": "0.3"}, 1280, "light"),
        ({"Query": "1 0 2\n0.5 1 1"}, 768, "light"),
    ],
)
def test_the_playground_shows_what_its_python_computes(opened, playground, typed, width, scheme):
    page = opened(playground, width=width, color_scheme=scheme)
    page.evaluate(HEAR)
    page.get_by_label("Input").select_option(index=int("Query" in typed))
    page.get_by_label("A word attends to").select_option(index=2 if "Query" in typed else 1)
    for name, value in typed.items():
        page.get_by_label(name, exact=name != "Query").first.fill(value)
    page.locator(".sa-heat td.sa-tinted").nth(1).click()  # closes the pair 0, 1
    spaces = [{}, {}]
    for kind in ("dQuery", "dKey", "dValue", "out", "scores", "weights"):
        name = re.sub("d([A-Z])", lambda match: f"d_{match[1].lower()}", kind)
        page.locator(f"[data-do={kind}]").click()
        page.wait_for_function("kind => window.heard?.shown === kind", arg=kind)
        shown = np.array(page.evaluate("heard.numbers.map((x) => Number.isFinite(x) ? x : -1e30)"))
        if not spaces[0]:
            for space, pre in zip(spaces, page.locator("pre").all_inner_texts(), strict=True):
                with using("baseline"):
                    exec(pre, space)
            assert "mask[[0], [1]] = False" in pre
        ours, plain = (space.get(name) for space in spaces)
        if ours is not None:
            assert shown.astype(ours.dtype).tobytes() == ours[0].tobytes(), name
        # Sums have at most 16 terms, and no term is larger than the largest of all.
        plain, eps = np.nan_to_num(plain, neginf=-1e30), np.finfo(spaces[0]["out"].dtype).eps
        size = np.abs(plain[plain > -1e30]).max()
        np.testing.assert_allclose(shown, plain[0].ravel(), rtol=64 * eps, atol=64 * eps * size)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert min(ratio for _, ratio in page.evaluate(CONTRASTS)) >= 4.5


def test_a_long_text_is_a_picture_and_faults_are_sentences(opened, playground):
    page = opened(playground, width=1280)
    line, words = page.locator(".sa-line"), page.get_by_role("textbox", name="Words")
    words.fill("a rose is a rose " * 160)
    page.wait_for_selector("canvas")
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    assert line.inner_text().startswith("a (row 0) gives weight 0.")
    page.get_by_label("heads", exact=True).fill("two")
    assert line.inner_text() == "“two” is not a valid value for heads."
    page.get_by_label("heads", exact=True).fill("1")
    words.fill("word " * 5000)
    assert line.inner_text() == "A text has 1 to 4,096 words here, not 5000."


def test_one_sentence_says_what_to_do_without_webassembly_or_a_worker(browser, playground, tmp_path):
    path = playground.save(tmp_path / "page.html")
    for script, said in [
        ("delete globalThis.WebAssembly", "This browser cannot run WebAssembly"),
        (
            "const { Worker } = globalThis; "
            "globalThis.Worker = function (url) { return (globalThis.last = new Worker(url)); }",
            "The computation has ended",
        ),
    ]:
        page = browser.new_page()
        page.clock.install()
        page.add_init_script(script)
        page.goto(path.as_uri())
        if "last" in script:
            page.wait_for_selector("[data-computed]")
            page.evaluate("last.terminate()")
            page.get_by_role("textbox", name="Words").fill("one two")
            page.clock.fast_forward(61_000)
        page.wait_for_selector(f".sa-fault:has-text('{said}')")
        if "last" in script:
            page.get_by_role("textbox", name="Words").fill("one two three")
            page.wait_for_selector(".sa-line:not(.sa-fault):has-text('3 × 3 pairs')")
        page.close()
