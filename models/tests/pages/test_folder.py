"""`selfattn pages` with the package of models: its pages are next to the core's, and on the start page."""

import pytest
from pages import Reader

from selfattn.views import live_pages

LESSONS = ["first_principles", "sentence_embeddings", "basics_notebook", "illustrated", "attention_module"]
OF_THE_CORE = [name + end for name in LESSONS for end in ("", "_exercise")] + ["gpt"]


@pytest.mark.parametrize("live", [False, True])
def test_all_pages_are_written_and_link_to_each_other(live, tmp_path, request, run, monkeypatch):
    kernels = request.getfixturevalue("kernels") if live else tmp_path / "not built"
    monkeypatch.setattr(live_pages, "KERNELS", kernels)
    run("pages", tmp_path / "class")
    names = [*OF_THE_CORE, "explorer"]
    if live:
        names += ["training", "playground", "encoder", "language_model"]
    found = {
        path.stem: Reader(path.read_text(encoding="utf-8")).elements
        for path in (tmp_path / "class").iterdir()
    }
    start = found.pop("index")
    assert sorted(found) == sorted(names)
    assert sorted(a["href"] for tag, a in start if tag == "a") == sorted(f"{name}.html" for name in names)
    for elements in found.values():
        assert [a["href"] for tag, a in elements if tag == "link" and a["rel"] == "up"] == ["index.html"]
