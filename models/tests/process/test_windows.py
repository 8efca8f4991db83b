"""The package on a Linux that lacks what Windows lacks (support/windows.py of the core's tests)."""

from processes import run_script

WINDOWS = "from windows import become_windows; become_windows()\n"
IMPORTS = """
    import importlib, pkgutil
    import selfattn_models

    for module in pkgutil.walk_packages(selfattn_models.__path__, "selfattn_models."):
        if ".interop." not in module.name and not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                print(error)
"""
INDEX = """
    import pathlib
    import numpy as np
    from selfattn_models import search

    vectors = np.random.default_rng(0).standard_normal((40, 8), np.float32)
    texts = [f"text {n}" for n in range(40)]
    encode = lambda texts: vectors[: len(texts)]
    index = search.Index.create("index", encode, dtype="int8")
    for round in range(2):
        reader = search.Index.open("index", encode)  # keeps what it has mapped
        index.add(texts[20 * round : 20 * round + 20], vectors=vectors[20 * round : 20 * round + 20])
        (found,) = index.search(vectors[20 * round + 3], k=1)
        assert found.text == texts[20 * round + 3], found
        assert len(reader.search(vectors[3], k=3)) == 3
    index.delete([found.id])
    assert len(index) == 39
    reader = search.Index.open("index", encode)
    reader.search(vectors[3], k=1)
    index.vacuum()
    try:
        index.vacuum()
    except OSError as error:
        assert "let it search again" in str(error), error
    else:
        raise SystemExit("files of a reader would be forgotten")
    for each in (reader, index, search.Index.open("index", encode)):
        assert len(each) == 39 and each.search(vectors[3], k=1)[0].text == "text 3"
    del reader, each
    for _ in range(3):  # nobody reads the old files any more; those of the last vacuum stay until the next
        index.vacuum()
        index.add(["another"], vectors=vectors[:1] * 2)
    index.copy("copy")
    numbers = [
        {path.name.partition("-")[2] for path in pathlib.Path(folder).iterdir() if "-" in path.name}
        for folder in ("index", "copy")
    ]
    assert [*map(len, numbers)] == [2, 1], numbers
"""


def test_imports():
    """Whatever an import lacks is another library."""
    for line in run_script(IMPORTS, prelude=WINDOWS).splitlines():
        assert "pip install" in line or "No module named" in line, line


def test_index(tmp_path, monkeypatch):
    """Files that a reader has mapped stay until nobody does; what is read and written is the same."""
    monkeypatch.chdir(tmp_path)
    run_script(INDEX, prelude=WINDOWS)
