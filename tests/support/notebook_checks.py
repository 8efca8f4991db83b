"""How the tests of notebooks execute a folder of them once each, and what every notebook must hold."""

import ast
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

REASON = "executing notebooks needs the extra docs"
nbformat = pytest.importorskip("nbformat", reason=REASON)
pytest.importorskip("nbclient", reason=REASON)
pytest.importorskip("ipykernel", reason=REASON)

_spec = importlib.util.spec_from_file_location(
    "notebooks_build", Path(__file__).parents[2] / "notebooks" / "build.py"
)
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

LAST = "import json as _json\nprint(_json.dumps({}, default=lambda array: array.tolist()))"
NUMBER = re.compile(r"[-−]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")


class Notebooks:
    """The notebooks of a folder, and what is compared of each; a kernel runs in the folder or in ``within``."""

    def __init__(self, folder, results, *, within=None, runnable=lambda cells: cells):
        self.folder, self.results, self.within, self.runnable = folder, results, within or folder, runnable
        self.done = {}

    @property
    def names(self):
        return sorted(path.stem for path in self.folder.glob("src/*.py"))

    def source(self, name):
        return build.read_source(self.folder / "src" / f"{name}.py")

    def saved(self, name):
        return nbformat.read(self.folder / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)

    def executed(self, name):
        """Execute a notebook once: the notebook with fresh outputs, and its dictionary `results`."""
        if name not in self.done:
            notebook = self.source(name)
            notebook.cells = self.runnable(notebook.cells)
            last = LAST.format(self.results[name])
            self.done[name] = notebook, json.loads(build.execute(notebook, last, self.within))
        return self.done[name]

    def executing(self, tmp_path_factory):
        """Yield `executed` in an environment of its own: the body of a fixture."""
        environment = {
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),  # no start-up files
            "PYTHONSAFEPATH": "1",
        }
        patch = pytest.MonkeyPatch()
        for name, value in environment.items():
            patch.setenv(name, value)
        yield self.executed
        patch.undo()

    def assert_saved(self, name):
        """The saved cells are those of the source."""
        source, notebook = self.source(name), self.saved(name)
        cells = [
            [(cell.id, cell.cell_type, cell.source) for cell in some.cells] for some in (source, notebook)
        ]
        assert cells[0] == cells[1], "run notebooks/build.py"
        assert notebook.metadata == build.METADATA
        assert not any(cell.metadata for cell in notebook.cells)
        runs = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
        assert runs == list(range(1, len(runs) + 1))

    def imported(self, name):
        """Return the packages that a notebook imports."""
        tree = ast.parse((self.folder / "src" / f"{name}.py").read_text(encoding="utf-8"))
        modules = [
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        ]
        modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return {module.partition(".")[0] for module in modules}

    def assert_links(self, name):
        """Links lead to files."""
        text = "\n".join(cell.source for cell in self.saved(name).cells if cell.cell_type == "markdown")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            assert (self.folder / target).exists(), target

    def assert_outputs(self, name):
        """The outputs are those saved."""
        both = zip(self.executed(name)[0].cells, self.runnable(self.saved(name).cells), strict=True)
        for new, old in both:
            assert [kind for kind, _ in shown(new)] == [kind for kind, _ in shown(old)], new.source
            for (kind, text), (_, before) in zip(shown(new), shown(old), strict=True):
                assert alike(text, before), f"{kind} of {new.source!r}; run notebooks/build.py"

    def assert_lesson(self, name):
        """A lesson begins with ribbons, and has no tolerances."""
        first, *others = (cell for cell in self.executed(name)[0].cells if cell.cell_type == "code")
        imports = re.findall(r"^(?:from \S+ )?import (.*)$", first.source, re.MULTILINE)
        assert len(imports) == 1 and "," not in imports[0]
        assert "sa-view" in first.outputs[0].data["text/html"]
        assert not re.search(r"\bassert\b|allclose|atol|results", "\n".join(cell.source for cell in others))


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
