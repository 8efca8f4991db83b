"""`selfattn steps` and `selfattn pages`: what they write, where, what they open, and what they refuse."""

import re
from pathlib import Path

import numpy as np
import pytest
from pages import Reader, data_of, matrices

from selfattn import views
from selfattn.cli import pages as cli_pages
from selfattn.steps.layers import layer_steps
from selfattn.views import live_pages

X = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
ATTENTION = {"query": X, "key": X, "value": X}
RNG = np.random.default_rng(0)
LAYER = {"inputs": X, **{name: RNG.standard_normal((2, 2)) for name in ("W_query", "W_key", "W_value")}}


@pytest.fixture(autouse=True)
def opened(monkeypatch, tmp_path):
    """No browser is opened; the list has the addresses."""
    monkeypatch.chdir(tmp_path)
    addresses = []
    monkeypatch.setattr("webbrowser.open", lambda address: addresses.append(address) or True)
    return addresses


def test_open_shows_what_was_written(tmp_path, opened, monkeypatch, run):
    assert run("steps", 4).out == "illustrated.html\n" and opened == []
    html = (tmp_path / "illustrated.html").read_text(encoding="utf-8")
    assert html == views.tutorial_page("illustrated").html
    run("steps", "illustrated", "--open")
    assert opened == [(tmp_path / "illustrated.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert "no browser; open illustrated.html yourself" in run("steps", "illustrated", "--open").err


def test_attention_from_a_file(tmp_path, run):
    np.savez(tmp_path / "mine.npz", **ATTENTION, tokens=["sky", "is", "blue"], is_causal=True, scale=0.5)
    run("steps", "mine.npz")
    html = (tmp_path / "mine.html").read_text(encoding="utf-8")
    assert data_of(html)["labels"]["t0"] == ["sky", "is", "blue"]
    np.testing.assert_array_equal(matrices(html)["scaled_scores"], 0.5 * X @ X.T)
    assert np.isneginf(matrices(html)["masked_scores"][0, 1:]).all()


def test_a_layer_from_a_file(tmp_path, run):
    norm = {"norm_weight": np.array([1.0, 2.0]), "norm_eps": 1e-3}
    np.savez(tmp_path / "layer.npz", **LAYER, num_heads=2, residual=True, b_value=np.ones(2), **norm)
    run("steps", "layer.npz", "--tokens", "a <b> c")
    html = (tmp_path / "layer.html").read_text(encoding="utf-8")
    assert data_of(html)["labels"]["t0"] == ["a", "<b>", "c"]
    steps = layer_steps(
        **LAYER, num_heads=2, residual=True, b_value=np.ones(2), norm=(norm["norm_weight"], None, 1e-3)
    )
    np.testing.assert_array_equal(matrices(html)["norm"], steps.norm)


def test_every_option_of_a_file_is_passed_on(tmp_path):
    options = {
        "attn_mask": np.ones((3, 3), np.bool_),
        "bias": np.eye(3),
        "offset_bias": np.arange(5.0),
        "is_causal": True,
        "causal": "upper_left",
        "scale": 2.0,
        "softcap": 3.0,
        "window": (1, 1),
        "key_lengths": 3,
        "alibi_slopes": 0.5,
        "sinks": 0.25,
        "enable_gqa": False,
        "dropout_p": 0.5,
        "rng": 1,
        "key_tokens": ["x", "y", "z"],
    }
    assert set(options) | {"tokens"} == {*cli_pages.OPTIONS, *cli_pages.DROPOUT, *cli_pages.TOKENS}
    np.savez(tmp_path / "mine.npz", **ATTENTION, **options)
    arrays = cli_pages._read(tmp_path / "mine.npz")
    given = {name: value for name, value in options.items() if name != "key_tokens"}
    expected = views.steps_page(cli_pages.attention_steps(X, X, X, **given), key_tokens=options["key_tokens"])
    assert cli_pages.page_of_arrays(arrays).html == expected.html


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"query": X, "key": X}, "value missing; there are query, key"),
        ({**ATTENTION, "W_out": X}, "W_out not known; the names are query, key, value"),
        ({**ATTENTION, "W_query": X}, "inputs, W_key, W_value missing"),
        ({}, "missing; there are no arrays"),
        ({**ATTENTION, "tokens": ["a"]}, "1 tokens do not fit the 3 rows"),
        ({**ATTENTION, "tokens": [1, 2, 3]}, "tokens is int64 .* not a list of strings"),
        ({**ATTENTION, "key": X[:, :1]}, r"\(3, 1\)"),
        ({name: np.array(["a"]) for name in ATTENTION}, "query"),
        ({name: np.zeros((1000, 300)) for name in ATTENTION}, "numbers"),
        ({name: np.zeros((100_000, 1)) for name in ATTENTION}, "10000000000 scores"),
        (
            {"inputs": np.zeros((100_000, 1)), **{f"W_{x}": np.eye(1) for x in ("query", "key", "value")}},
            "10000000000 scores",
        ),
        ({**ATTENTION, "query": np.zeros((10**11, 0, 2))}, "it is empty, but would take hours"),
    ],
)
def test_bad_arrays(arrays, message, tmp_path, run):
    np.savez(tmp_path / "mine.npz", **arrays)
    error = run("steps", "mine.npz", code=1).err
    assert error.startswith("selfattn steps: mine.npz: ") and error.count("\n") == 1
    assert re.search(message, error)
    assert not (tmp_path / "mine.html").exists()


@pytest.mark.parametrize(
    ("source", "text", "compare", "other"),
    [
        ("1", "money bank mud", "loan bank", "water"),
        ("2", "we saw the boat", "a loan at the bank", "sea"),
        ("3", "blue is sky", None, "green"),
        ("4", "my river bank", None, "moon"),
        ("5", "I love you", None, "hate"),
    ],
)
def test_every_tutorial_takes_a_text_and_an_exercise(source, text, compare, other, run):
    more = [] if compare is None else ["--compare", compare]
    run("steps", source, "--text", text, *more, "--exercise", "--out", "page.html")
    written = Path("page.html").read_text(encoding="utf-8")
    assert data_of(written)["labels"]["t0"] == text.split()
    assert any(node["blanks"] for node in data_of(written)["nodes"])
    assert "sa-tour-data" not in written.split("<script>")[0] and not re.search(
        r"The numbers for (?!\{)[^.]* were made up", written
    )
    # Made numbers, which are the same each time.
    run("steps", source, "--text", f"{text} {other} {other}", "--out", "page.html")
    written = Path("page.html").read_text(encoding="utf-8")
    assert f"The numbers for {other} were made up for this page." in written
    found = matrices(written)
    given = next(found[name] for name in ("embeddings", "inputs", "query.0") if name in found)
    np.testing.assert_array_equal(given[-1], given[-2])


def test_files_that_are_not_arrays(tmp_path, run):
    (tmp_path / "text.npz").write_text("no zip")
    (tmp_path / "empty.npz").write_text("")
    np.savez(tmp_path / "objects.npz", **{name: np.array([{}]) for name in ATTENTION})
    np.savez(tmp_path / "cut.npz", **ATTENTION)
    whole = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, X)
    for name in ("text", "empty", "objects", "cut", "one", "missing"):
        assert run("steps", f"{name}.npz", code=1).err.startswith(f"selfattn steps: {name}.npz: ")
    error = run("steps", "illustrated", "--out", tmp_path / "no" / "such.html", code=1).err
    assert "No such file or directory" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: TUTORIAL|FILE.npz"),
        (["6"], "'6' is neither a tutorial (1 first_principles,"),
        (["12"], "'12' is neither a tutorial"),
        (["3", "--compare", "sky"], "it needs --text"),
        (["3", "--text", "sky", "--tokens", "sky"], "give one of them"),
        (["mine.npz", "--compare", "a b"], "not for a FILE.npz"),
        (["illustrated", "--out", "-", "--open"], "--open needs a file"),
        (["mine.npz", "--out", "mine.npz"], "would replace what is shown"),
    ],
)
def test_wrong_usage(arguments, message, tmp_path, run):
    np.savez(tmp_path / "mine.npz", **ATTENTION)
    before = (tmp_path / "mine.npz").read_bytes()
    assert message in run("steps", *arguments, code=2).err
    assert (tmp_path / "mine.npz").read_bytes() == before


# ---- selfattn pages


def test_all_pages_link_to_each_other(tmp_path, opened, run, monkeypatch):
    monkeypatch.setattr(live_pages, "KERNELS", tmp_path / "not built")
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "illustrated.html").write_text("mine")
    assert "illustrated.html exists and is not a page of selfattn's" in run("pages", "class", code=1).err
    assert len(list((tmp_path / "class").iterdir())) == 1
    (tmp_path / "class" / "illustrated.html").unlink()
    (tmp_path / "no.wasm").write_bytes(b"\0asm")
    (tmp_path / "old.wasm").write_bytes(b"\0asm selfattn kernels 0 of commit abc")
    for name, message in (
        ("no", "is not the core in WebAssembly"),
        ("old", "belongs to another version of selfattn"),
    ):
        assert message in run("pages", "class", "--kernels", f"{name}.wasm", code=1).err
    (line,) = run("pages", "class", "--open").err.splitlines()
    assert "all pages but the live ones" in line and "install clang-14, lld-14" in line
    assert opened == [(tmp_path / "class" / "index.html").as_uri()]
    start, *others = sorted((tmp_path / "class").iterdir(), key=lambda path: path.name != "index.html")
    links = [a["href"] for tag, a in Reader(start.read_text(encoding="utf-8")).elements if tag == "a"]
    assert sorted(links) == sorted(path.name for path in others) and len(links) == 11
    for path in others:
        elements = Reader(path.read_text(encoding="utf-8")).elements
        assert [a["href"] for tag, a in elements if tag == "link" and a["rel"] == "up"] == ["index.html"]


def test_live_pages_are_of_the_packages_kernels_or_of_those_given(tmp_path, run, monkeypatch):
    """Only a browser runs the kernels: pages know them by how their file begins, and by what it says."""
    for name, said in (("package", b"1.2.0, commit unknown"), ("given", b"1.2.1, commit abc-changed")):
        content = b"\0asm selfattn kernels %b of %b\0" % (live_pages.INTERFACE, said)
        (tmp_path / f"{name}.wasm").write_bytes(content)
    monkeypatch.setattr(live_pages, "KERNELS", tmp_path / "not built")
    run("pages", tmp_path / "plain")
    monkeypatch.setattr(live_pages, "KERNELS", tmp_path / "package.wasm")
    assert run("pages", tmp_path / "package").err == ""
    run("pages", tmp_path / "given", "--kernels", tmp_path / "given.wasm")
    names = ("plain", "package", "given")
    plain, package, given = ({path.name for path in (tmp_path / name).iterdir()} for name in names)
    assert package - plain == {"gpt.html", "training.html", "playground.html"} and plain < package == given
    start = Reader((tmp_path / "package/index.html").read_text(encoding="utf-8"))
    assert {a["href"] for tag, a in start.elements if tag == "a"} == package - {"index.html"}
    for page in package - plain:
        for name, built in (("package", "1.2.0."), ("given", "1.2.1, commit abc-changed.")):
            html = (tmp_path / name / page).read_text(encoding="utf-8")
            assert f'"built":"Computed in this tab by the kernels of selfattn {built}"' in html
