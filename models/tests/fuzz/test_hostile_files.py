"""Any content of a file works or is a clear error. `fuzzing_models.py` has the functions that read files.

Here each target reads its good files, what was once found, and some hostile ones; `tools/fuzz` tries others for hours.
"""

import fuzzing
import fuzzing_models
import pytest


@pytest.mark.parametrize("name", fuzzing_models.TARGETS)
def test_good_files_are_read(name, tmp_path):
    target = fuzzing_models.TARGETS[name]
    seeds = target.seeds()
    if name == "search":  # each is a file of one of two indexes, which are read whole
        seeds = seeds[:1] + seeds[-1:]
    fuzzing.read_good_files(target, tmp_path, seeds)


@pytest.mark.parametrize("name", fuzzing_models.TARGETS)
def test_what_was_found_once(name):
    target = fuzzing_models.TARGETS[name]
    for content in fuzzing_models.known(name)[len(target.seeds()) :]:
        fuzzing.check(target, content)


@pytest.mark.parametrize("name", fuzzing_models.TARGETS)
def test_hostile_files(name):
    """A model is loaded, used, saved and loaded again in each try, so these are few."""
    fuzzing.check_drawn(fuzzing_models.TARGETS[name], fuzzing_models.known(name), fuzzing.TRIES // 6)
