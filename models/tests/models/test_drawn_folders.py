"""Files with drawn settings against Transformers: equal results, an error or a warning, never another result without
one.
"""

import collections

import pytest

drawn_folders = pytest.importorskip(
    "drawn_folders", reason="expected values come from PyTorch, Transformers and sentence-transformers"
)
pytest.importorskip("accelerate", reason="Transformers needs it to read GGUF files")


def check(kind, first, count, tmp_path):
    found = collections.defaultdict(list)
    for seed in range(first, first + count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        word, about = drawn_folders.verdict(seed, folder, kind)
        found[word].append(about)
    assert not found["DIFFERENT"], "\n".join(found["DIFFERENT"])
    assert len(found["equal"]) > count / 3, {word: len(each) for word, each in found.items()}


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_folders(first, tmp_path):
    check(drawn_folders.Draw, first, 30, tmp_path)


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_gguf_files(first, tmp_path):
    check(drawn_folders.DrawGGUF, first, 30, tmp_path)


def test_decoders_that_make_embeddings(tmp_path):
    check(drawn_folders.DrawEmbedder, 0, 40, tmp_path)
