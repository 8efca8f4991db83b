"""Any content of a file works or is a clear error. tests/support/fuzzing.py has the functions that read files.

Here each target reads its good files, what was once found, and some hostile ones; `tools/fuzz` tries others for hours.
"""

import os
import random

import pytest

pytest.importorskip("tokenizers", reason="the extra 'models' is not installed")
pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")

import fuzzing

# A thorough run tries more.
TRIES = 5000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 300


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_good_files_are_read(name, tmp_path):
    for n, content in enumerate(fuzzing.TARGETS[name].seeds()):
        folder = tmp_path / str(n)
        folder.mkdir()
        fuzzing.TARGETS[name].read(folder, content)  # raises nothing


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_what_was_found_once(name):
    for content in fuzzing.known(name):
        fuzzing.check(fuzzing.TARGETS[name], content)


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_hostile_files(name):
    target, draw, known = fuzzing.TARGETS[name], random.Random(0), fuzzing.known(name)
    for _ in range(TRIES):
        content = target.mutate(draw.choice(known), draw)
        try:
            fuzzing.check(target, content)
        except BaseException as error:
            error.add_note(f"the content was {content!r:.4000}")
            raise
