"""`selfattn pages` with the package of models: its pages are next to the core's, and on the start page."""

import pytest
from language_folders import save_language_model
from pages import Reader

from selfattn import nn
from selfattn.text import WhitespaceTokenizer
from selfattn.views import first_page, live_pages, packs, write_pages
from selfattn_models import save

LESSONS = ["first_principles", "sentence_embeddings", "basics_notebook", "illustrated", "attention_module"]
OF_THE_CORE = [name + end for name in LESSONS for end in ("", "_exercise")]


@pytest.mark.parametrize("live", [False, True])
def test_all_pages_are_written_and_link_to_each_other(live, tmp_path, request, run, monkeypatch):
    kernels = request.getfixturevalue("kernels") if live else tmp_path / "not built"
    monkeypatch.setattr(live_pages, "KERNELS", kernels)
    run("pages", tmp_path / "class")
    names = [*OF_THE_CORE, "teacher", "explorer"]
    if live:
        names += ["training", "playground", "gpt", "encoder"]
    found = {
        path.stem: Reader(path.read_text(encoding="utf-8")).elements
        for path in (tmp_path / "class").iterdir()
    }
    start = found.pop("index")
    assert sorted(found) == sorted(names)
    assert sorted(a["href"] for tag, a in start if tag == "a") == sorted(f"{name}.html" for name in names)
    for elements in found.values():
        assert [a["href"] for tag, a in elements if tag == "link" and a["rel"] == "up"] == ["index.html"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_has_a_page_of_its_own(inside, tmp_path, kernels, run, monkeypatch):
    for module in (first_page, packs):
        monkeypatch.setattr(module, "MOST_INSIDE", 10**6 if inside else 1000)
    small = nn.EmbeddingModel(WhitespaceTokenizer(["sea"]), 1, 4, max_seq_len=4, rng=0)
    save(small, tmp_path / "my small")
    language = save_language_model(tmp_path / "language")
    monkeypatch.chdir(tmp_path / "my small")
    said = run("pages", tmp_path / "class", "--kernels", kernels, "--model", ".", language)[1]
    assert "my small: a pack of 0.0 MB" in said.replace("pages: .:", "pages: my small:")
    pages = tmp_path / "class"
    assert (pages / "language.sapack").exists() is not inside
    for name, kind in (("my-small", "sa-encoder"), ("language", "sa-gpt")):
        found = (pages / f"{name}.html").read_text(encoding="utf-8")
        assert f'class="sa-view {kind}"' in found and (f'"address":"{name}.sapack"' in found) is not inside
        assert f'href="{name}.html"' in (pages / "index.html").read_text(encoding="utf-8")
    run("pages", pages, "--kernels", kernels, "--model", language)  # replaces them
    if not inside:
        pack = (pages / "language.sapack").read_bytes()
        (pages / "language.sapack").write_bytes(b"mine")
        with pytest.raises(FileExistsError, match="not a pack"):
            write_pages(pages, kernels=kernels, packs={"language": pack})


def test_names_that_are_taken_are_refused(tmp_path, kernels):
    pack = packs.gpt_pack(nn.GPT(2, 4, 1, 1, max_seq_len=4, rng=0), "ab")
    with pytest.raises(ValueError, match="the name 'encoder' already"):
        write_pages(tmp_path / "new", kernels=kernels, packs={"encoder": pack})
    with pytest.raises(ValueError, match="expected a pack"):
        write_pages(tmp_path / "new", kernels=kernels, packs={"mine": b"GGUF"})
    assert not (tmp_path / "new").exists()
