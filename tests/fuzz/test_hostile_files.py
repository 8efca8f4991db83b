"""Any content of a file works or is a clear error. tests/support/fuzzing.py has the functions that read files.

Here each target reads its good files, what was once found, and some hostile ones; `tools/fuzz` tries others for hours.
"""

import pytest

pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")

import fuzzing


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_good_files_are_read(name, tmp_path):
    fuzzing.read_good_files(fuzzing.TARGETS[name], tmp_path)


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_what_was_found_once(name):
    for content in fuzzing.known(name):
        fuzzing.check(fuzzing.TARGETS[name], content)


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_hostile_files(name):
    fuzzing.check_drawn(fuzzing.TARGETS[name], fuzzing.known(name))
