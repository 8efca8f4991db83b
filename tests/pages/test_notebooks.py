"""The notebooks, executed: they compute what the tutorials print, and show what is saved."""

import ast
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from selfattn import tutorials

REASON = "executing notebooks needs the extra docs"
nbformat = pytest.importorskip("nbformat", reason=REASON)
pytest.importorskip("nbclient", reason=REASON)
pytest.importorskip("ipykernel", reason=REASON)

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_spec = importlib.util.spec_from_file_location("notebooks_build", NOTEBOOKS / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

NAMES = [path.stem for path in build.SOURCES]
notebooks = pytest.mark.parametrize("name", NAMES)

RESULTS = """\
import json as _json
print(_json.dumps(results, default=lambda array: array.tolist()))
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Execute a notebook once: the notebook with fresh outputs, and its dictionary `results`."""
    done = {}
    environment = {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),  # no start-up files
        "PYTHONSAFEPATH": "1",
    }
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)

    def execute(name):
        if name not in done:
            notebook = build.read_source(NOTEBOOKS / "src" / f"{name}.py")
            done[name] = notebook, json.loads(build.execute(notebook, last=RESULTS))
        return done[name]

    yield execute
    patch.undo()


def saved(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def test_there_is_one_for_each_tutorial():
    assert [name[0] for name in NAMES] == list("1234567")  # the last two continue from there
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NAMES)


@notebooks
def test_the_saved_cells_are_those_of_the_source(name):
    source, notebook = build.read_source(NOTEBOOKS / "src" / f"{name}.py"), saved(name)
    cells = [[(cell.id, cell.cell_type, cell.source) for cell in some.cells] for some in (source, notebook)]
    assert cells[0] == cells[1], "run notebooks/build.py"
    assert notebook.metadata == build.METADATA
    assert not any(cell.metadata for cell in notebook.cells)
    runs = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert runs == list(range(1, len(runs) + 1))


@notebooks
def test_nothing_but_selfattn_and_numpy_is_imported(name):
    tree = ast.parse((NOTEBOOKS / "src" / f"{name}.py").read_text(encoding="utf-8"))
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {module.partition(".")[0] for module in modules} == {"numpy", "selfattn"}


@notebooks
def test_links_lead_to_files(name):
    text = "\n".join(cell.source for cell in saved(name).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (NOTEBOOKS / target).exists(), target


NUMBER = re.compile(r"[-−]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")


def alike(a, b):
    """Whether two texts differ at most in the last place of numbers, as between two kinds of CPU."""
    if a == b:
        return True
    if NUMBER.split(a) != NUMBER.split(b):
        return False
    return all(map(numbers_alike, NUMBER.findall(a), NUMBER.findall(b)))


def numbers_alike(a, b):
    if a == b:
        return True
    places = [len(text.partition("e")[0].partition(".")[2]) for text in (a, b)]
    exponent = int(a.partition("e")[2] or 0)
    x, y = (float(text.replace("−", "-")) for text in (a, b))
    # The second bound is for HTML attributes, which hold all seventeen digits.
    return abs(x - y) <= max(1.5 * 10.0 ** (exponent - min(places)), 1e-9 * abs(x))


def shown(cell):
    """Return the visible outputs of a cell by kind, without scripts, since the tables show all their numbers."""
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            yield output.name, output.text
        else:
            for kind, text in sorted(output.data.items()):
                yield kind, re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)


@notebooks
def test_the_outputs_are_those_saved(executed, name):
    for new, old in zip(executed(name)[0].cells, saved(name).cells, strict=True):
        assert [kind for kind, _ in shown(new)] == [kind for kind, _ in shown(old)], new.source
        for (kind, text), (_, before) in zip(shown(new), shown(old), strict=True):
            assert alike(text, before), f"{kind} of {new.source!r}; run notebooks/build.py"


def printed_in(tutorial):
    """The names of the tensors that a tutorial prints."""
    data = tutorials.load(tutorial)
    if "printed" not in data:
        return {name for name, step in data.items() if isinstance(step, dict) and "printed" in step}
    return {*data["printed"], *data.get("computed_not_printed", ())}


@pytest.mark.parametrize(
    ("name", "compared"),
    [
        ("1_first_principles", printed_in("first_principles")),
        ("2_sentence_embeddings", {"block, heads: 1", "block, heads: 2", "sentence embedding", "confidence"}),
        ("3_basics", printed_in("basics_notebook")),
        ("4_illustrated", printed_in("illustrated")),
        ("5_attention_module", {"no mask", "padding", "dead row", "masked NaN"}),
        ("6_gpt", {"losses", "spoken", "chances", "rat", "cat"}),
        ("7_classifier", {"losses", "right", "whole", "changed"}),
    ],
)
def test_a_notebook_compares_everything_that_its_tutorial_prints(executed, name, compared):
    """A notebook fails if a number differs (tested below); this test checks that it compares all numbers."""
    assert set(executed(name)[1]) == compared


def test_the_trained_model_takes_from_the_word_that_shows_the_topic(executed):
    """The notebook's text claims this, and a new run does not change the text."""
    notebook, _ = executed("2_sentence_embeddings")
    (output,) = (cell.outputs[0].text for cell in notebook.cells if "untrained, trained in" in cell.source)
    lines = output.splitlines()
    for tokens, _, after in zip(lines[0::3], lines[1::3], lines[2::3], strict=True):
        weights = dict(zip(tokens.split(), map(float, after.split()[1:]), strict=True))
        assert max(weights, key=weights.get) in {"stream", "mud", "money", "loan"}
        assert max(weights.values()) > 0.8


def test_the_gpt_learned_the_rhyme_and_looks_at_the_verb(executed):
    """The notebook's text claims this."""
    _, results = executed("6_gpt")
    rhyme = "/ killed the rat that / ate the malt that / lay in the house that Jack built."
    assert results["spoken"] == rhyme
    assert results["losses"][-1] < 0.15
    weights = {name: np.array(results[name])[0, 1] for name in ("rat", "cat")}  # layer 0, head 1
    words = ["This", "is", "the", "dog", "that", "/", "worried", "the", "cat", "that", "/", "killed", "the"]
    assert weights["rat"][[words.index("worried"), words.index("killed")]].sum() > 0.7
    assert weights["cat"][words.index("worried")] > 0.6


def test_the_classifier_learned_what_not_and_but_mean(executed):
    _, results = executed("7_classifier")
    assert results["right"] > 0.97
    whole, changed = results["whole"], results["changed"]
    assert whole < -3 and min(changed["not"], changed["lovely"]) > 3
    assert all(abs(changed[word] - whole) < 0.5 for word in ("food", "good", "music"))


def test_a_wrong_number_stops_the_notebook(tmp_path, executed):
    source = (NOTEBOOKS / "src" / "3_basics.py").read_text(encoding="utf-8")
    wrong = tmp_path / "3_basics.py"
    wrong.write_text(source.replace("[-0.0271, -0.384]", "[-0.0281, -0.384]"), encoding="utf-8")
    with pytest.raises(build.CellExecutionError, match="AssertionError"):
        build.execute(build.read_source(wrong))


@pytest.mark.parametrize(
    ("source", "message"), [("x = 1\n# %%\nx\n", "before the first"), ("# %% [raw]\n# x\n", r"\[raw\]")]
)
def test_bad_sources(tmp_path, source, message):
    path = tmp_path / "wrong.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        build.read_source(path)
