"""What selfattn says where the package selfattn-models is missing: one line that installs it, and no more is lost.

It is hidden in a process, so that the tests are the same where it is installed.
"""

import json

import pytest
from processes import run_script

INSTALL = "pip install selfattn-models"
TITLE = f"with the package selfattn-models ({INSTALL}; in a clone: pip install ./models):\n"
HIDE = """
import importlib.metadata, sys

class Hiding:  # a finder of modules that does not find that package
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] == "selfattn_models"
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
importlib.metadata.entry_points = lambda **of: importlib.metadata.EntryPoints()
"""


def commands(*lines):
    """Run commands in one process where the package is missing; return the code, output and errors of each."""
    script = """
    import contextlib, io, json
    from selfattn import cli
    for line in sys.argv[1:]:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = cli.main(line.split())
        print(json.dumps([code, out.getvalue(), errors.getvalue()]))
    """
    return list(map(json.loads, run_script(script, *lines, prelude=HIDE).splitlines()))


COMMANDS = {
    "search m t.txt sea": "search",
    "embed m sea": "embed",
    "index place m t.txt": "index",
    "evaluate m t.txt": "evaluate",
    "generate m.gguf hello": "generate",
    "chat m.gguf": "chat",
    "map m t.txt": "map",
    "explore m sea": "explore",
    "explore --help": "explore",
    "train gpt x.txt --out z": "train gpt",
    "train x.txt --from y --out z": "train --from",
    "info x.gguf": "info FILE.gguf",
    "pages class --model m": "pages --model",
}


def test_commands_say_where_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("the sea was calm\n" * 40)
    for what, (code, out, errors) in zip(COMMANDS.values(), commands(*COMMANDS), strict=True):
        assert (code, out) == (1, "")
        (line,) = errors.splitlines()
        assert line.startswith("selfattn") and INSTALL in line
        assert f"selfattn {what} is in the package selfattn-models" in line
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


MODULES = [
    "models",
    "models.readings",
    "search",
    "search.index",
    "interop.sentence_transformers",
    "interop.sklearn",
    "interop.langchain",
    "interop.bertopic",
]
NAMES = [
    ("selfattn", "models"),
    ("selfattn", "search"),
    ("selfattn.views", "explorer"),
    ("selfattn.views", "Explorer"),
    ("selfattn.views", "corpus_map"),
    ("selfattn.views", "CorpusMap"),
    ("selfattn.interop", "sklearn"),
]


def test_an_import_is_an_error_that_says_where_it_is():
    statements = [f"import selfattn.{module}" for module in MODULES]
    for module, name in NAMES:
        statements += [f"from {module} import {name}", f"import {module}; {module}.{name}"]
    script = f"""
    for statement in {statements * 2}:  # also the second time
        try:
            exec(statement)
        except ImportError as error:
            print(error)
    """
    lines = run_script(script, prelude=HIDE).splitlines()
    assert len(lines) == 2 * len(statements)
    for line, statement in zip(lines, statements * 2, strict=True):
        assert line.startswith("selfattn.") and "is in the package selfattn-models" in line, statement
        assert INSTALL in line, statement


def test_encoding_with_dask_is_an_error_that_says_where_it_is():
    pytest.importorskip("dask.array")
    pytest.importorskip("distributed")
    script = """
    try:
        from selfattn.interop.dask import encode
    except ImportError as error:
        print(error)
    """
    assert INSTALL in run_script(script, prelude=HIDE)


def test_what_is_there_is_listed():
    """A module that is missing is not among the names: `inspect.getmembers` and help() ask for each."""
    script = """
    import inspect, selfattn
    names = [name for name, _ in inspect.getmembers(selfattn)]
    print("nn" in names, "models" in names, "search" in names, hasattr(selfattn.views, "other"))
    """
    assert run_script(script, prelude=HIDE) == "True False False False"


def test_help_names_the_package():
    ((code, out, errors),) = commands("--help")
    assert (code, errors) == (0, "")
    own, _, further = out.partition(TITLE)
    listed = further.splitlines()[0].strip()
    assert listed == "chat, embed, evaluate, explore, generate, index, map, search, train gpt"
    assert all(f"    {name} " in own for name in ("steps", "pages", "train", "info"))


def test_what_needs_no_models_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, _, errors in commands("--no-timing", "info", "steps 1", "train --help"):
        assert code == 0, errors
