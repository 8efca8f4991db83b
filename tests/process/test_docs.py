"""The documentation runs: doctests of everything public, code in Markdown files; signatures agree with the stub."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pickle
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from processes import run_script

import selfattn as sa
from selfattn import _core, functional, nn, optim

ROOT = Path(__file__).parents[2]
# Folders that "coming from" pages load, as their readers would: tiny models with random weights, under these names.
MODELS_OF_PAGES = {"all-MiniLM-L6-v2": "BertModel", "ms-marco-MiniLM-L6-v2": "BertForSequenceClassification"}
# What a module's examples need beyond the tests' own packages.
EXTRAS = {
    "selfattn.views.plot": "matplotlib", "selfattn.interop.torch": "torch", "selfattn.interop.huggingface": "transformers",
    "selfattn.interop.sklearn": "sklearn", "selfattn.interop.jax": "jax", "selfattn.interop.autograd": "autograd",
    "selfattn.interop.langchain": "langchain_core", "selfattn.interop.bertopic": "bertopic", "selfattn.interop.dask": "distributed",
}  # fmt: skip
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "selfattn").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
PUBLIC = {name: getattr(sa, name) for name in sorted({*sa.__all__, *functional.__all__, "AttentionSteps"})}
CALLABLES = {name: thing for name, thing in PUBLIC.items() if callable(thing)}
ARCHITECTURE = ROOT / "docs/guide/adding_an_architecture.md"
SECTIONS = [
    "Parameters", "Returns", "Attributes", "Raises", "See Also", "Notes", "References", "Examples",
]  # fmt: skip
FOLDERS = ["csrc", "docs", "notebooks"]  # folders whose pages a reader opens
MARKDOWN = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in ROOT.glob(f"{name}/**/*.md"))])


class Finder(doctest.DocTestFinder):
    """A doctest finder that finds decorated functions too."""

    def _from_module(self, module, thing):
        return super()._from_module(module, inspect.unwrap(thing))


def run_examples(text, name, namespace, path=None, line=0):
    test = doctest.DocTestParser().get_doctest(text, namespace, name, str(path) if path else None, line)
    report = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)  # the test had a copy; the next block continues with these names
    assert not runner.failures, "".join(report)
    return runner.tries


@pytest.fixture(autouse=True)
def _as_it_was():
    """Examples may set threads and print options."""
    with np.printoptions():
        yield
    sa.set_num_threads(None)


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_of_public_names(name):
    namespace = (
        {}
        if type(PUBLIC[name]).__name__ == "builtin_function_or_method"
        else vars(importlib.import_module(getattr(PUBLIC[name], "__module__", None) or "selfattn")).copy()
    )
    assert run_examples(PUBLIC[name].__doc__, name, namespace) or inspect.isclass(PUBLIC[name])


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_modules(name):
    for module, needed in EXTRAS.items():
        if name.startswith(module):
            pytest.importorskip(needed)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner()
    for test in Finder().find(module):
        report = []
        runner.run(test, out=report.append)
        assert not runner.failures, "".join(report)


def small_tickets(day):
    """A table of forty texts, some of them alike."""
    words = ["the printer", "a screen", "no sound", "old water", "the sea", "a dark ship", "stones"]
    rows = [
        (f"{day}{n}", words[n % 7] + " burns" * (n % 3), "ab"[n % 2], "open" if n % 5 else "closed")
        for n in range(40)
    ]
    return "\n".join(map(",".join, [("id", "text", "product", "status"), *rows])) + "\n"


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_in_markdown(path, tmp_path, monkeypatch):
    """The ```python blocks of a file, one after the other, in one namespace: sessions (>>>) or plain code."""
    monkeypatch.chdir(tmp_path)
    if path.name == "search.md":
        pytest.importorskip("pandas")
        for day in ("tickets", "tomorrow"):
            (tmp_path / f"{day}.csv").write_text(small_tickets(day))
    if path.parent.name == "coming_from" or path.name in ("search.md", "fine_tuning.md"):
        folders = pytest.importorskip("text_folders")
        for name, kind in MODELS_OF_PAGES.items():
            folders.save_bert(tmp_path / name, 512, kind, num_labels=1)
    namespace, text = {"__name__": "__example__"}, path.read_text(encoding="utf-8")
    for block in re.finditer(r"^```(?:python|pycon)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line, code = text.count("\n", 0, block.start(1)), block[1]
        imported = re.findall(r"^ *(?:import|from) ([\w.]+)", code, re.MULTILINE)
        if not all(importlib.util.find_spec(EXTRAS.get(name, name).partition(".")[0]) for name in imported):
            continue  # a library is missing; blocks without it do not depend on this one
        if ">>> " in code:
            run_examples(code, path.name, namespace, path, line)
        else:
            exec(compile("\n" * line + code, str(path), "exec"), namespace)


def without_code(path):
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_markdown_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        if "://" not in target and not target.startswith("mailto:"):
            name, _, anchor = target.partition("#")
            page = path.parent / name if name else path
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), target


def test_files_that_contributing_names_exist():
    command = ["git", "ls-files"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not tracked:
        pytest.skip("this is no checkout")
    text = without_code(ROOT / "CONTRIBUTING.md") + without_code(ARCHITECTURE)
    named = {name.rstrip("/") for name in re.findall(r"`([\w./]+/[\w./]*|\w+\.(?:py|c|h|md))`", text)}
    lacking = [
        name for name in named if not re.search(rf"(^|/){re.escape(name)}($|/)", tracked, re.MULTILINE)
    ]
    assert sorted(lacking) == ["csrc/isa/NAME.c", "csrc/simd/NAME.h"]


def test_the_page_of_an_architecture_shows_its_file():
    assert f"```py\n{(ROOT / 'selfattn/models/qwen3.py').read_text()}```\n" in ARCHITECTURE.read_text()


def stub_functions():
    tree = ast.parse((ROOT / "selfattn" / "_core.pyi").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_stub_names_what_the_extension_has():
    functions = {name for name, thing in vars(_core).items() if callable(thing)}
    assert functions == set(stub_functions())


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_the_stub_agrees_with_the_signature(name):
    function = getattr(_core, name)
    if name in PUBLIC or function.__text_signature__ is not None:
        namespace = {}
        exec("from __future__ import annotations\n" + ast.unparse(stub_functions()[name]), namespace)
        of_stub, expected = (
            [(p.name, p.kind, p.default) for p in inspect.signature(each).parameters.values()]
            for each in (namespace[name], function)
        )
        assert of_stub == expected


def test_options_that_a_function_does_not_show_are_refused():
    """Unknown options are refused even by functions that pass all options to a function that has more."""
    x, y, at = np.ones((2, 3, 4)), np.ones((1, 2, 3, 4)), [0, 2]
    calls = {
        sa.scaled_dot_product_attention_vjp: (x, x, x), sa.scaled_dot_product_attention_forward: (x, x, x),
        sa.scaled_dot_product_attention_backward: (x, x, np.ones((2, 3, 2)), x, x, x),
        sa.varlen_attention: (x, x, x, at, at), sa.varlen_attention_vjp: (x, x, x, at, at),
        sa.additive_attention: (x, x, x, np.eye(4), np.eye(4), np.ones(4)),
        sa.additive_attention_vjp: (x, x, x, np.eye(4), np.eye(4), np.ones(4)),
        sa.attention_steps: (x, x, x), sa.KVCache(1, 2, 4, dtype=np.float64).attend: (y, y, y),
    }  # fmt: skip
    known = {"rng", "dropout_p", "block_mask", "key_lengths", "out", "return_weights"}
    known |= {"unrounded", "first_head"}
    for function, arguments in calls.items():
        function(*arguments)
        for name in (known - set(inspect.signature(function).parameters)) | {"window_size"}:
            said = rf"^{function.__qualname__}\(\) got an unexpected keyword argument '{name}'$"
            with pytest.raises(TypeError, match=said):
                function(*arguments, **{name: None})


def described():
    """Every public function, and the public attributes of public classes: names and objects."""
    found = {name: thing for name, thing in CALLABLES.items() if not inspect.isclass(thing)}
    classes = {
        getattr(module, name) for module in (sa, nn, optim, optim.lr_scheduler) for name in module.__all__
    }
    for cls in sorted(filter(inspect.isclass, classes), key=lambda cls: cls.__name__):
        for name, thing in vars(cls).items():
            is_method = inspect.isfunction(thing) or isinstance(thing, classmethod | staticmethod)
            if is_method and (not name.startswith("_") or name == "__and__"):
                found[f"{cls.__name__}.{name}"] = getattr(cls, name)
    return found


DESCRIBED = described()


@pytest.mark.parametrize("name", DESCRIBED)
def test_docstrings_have_their_sections_and_describe_every_parameter(name):
    """The methods of layers and optimisers have their examples in the class."""
    doc, signature = inspect.getdoc(DESCRIBED[name]), inspect.signature(DESCRIBED[name])
    assert doc and re.match(r"[A-Z].*[.)]$", doc.split("\n", maxsplit=1)[0]), "it begins with a sentence"
    sections = re.findall(r"^([A-Z][A-Za-z ]*)\n-{3,}$", doc, re.MULTILINE)
    assert sections == sorted(set(sections), key=SECTIONS.index)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    assert ("Parameters" in sections) == bool(parameters)
    assert "Examples" in sections or name.split(".")[0] not in PUBLIC
    returns_nothing = name.startswith(("set_", "check_")) or signature.return_annotation in (None, "None")
    assert "Returns" in sections or returns_nothing or ("." in name and not parameters)
    section = re.search(
        r"^Parameters\n-+\n(.*?)(?=^[A-Z][A-Za-z ]*\n-{3,}$|\Z)", doc, re.MULTILINE | re.DOTALL
    )
    heads = re.findall(r"^(?!\s)(.*(?:\n(?!\s).*)*)", section[1], re.MULTILINE) if section else []
    words = {word for head in heads for word in re.findall(r"\w+", head)}
    assert not [p.name for p in parameters if p.name not in words]
    named = [line.partition(" : ")[0] for head in heads for line in head.splitlines()]
    names = re.findall(r"\w+", "\n".join(named))
    assert len(names) == len(set(names)), "each is described once"
    if name in stub_functions() and section:
        for p in parameters:
            written = re.search(rf"^{p.name}\b.*default (\S+)$", section[1], re.MULTILINE)
            assert not written or ast.literal_eval(written[1]) == p.default


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(PUBLIC[name])])
def test_docstrings_of_classes_say_what_they_hold(name):
    assert re.search(r"^(Attributes|Parameters)\n-+$", inspect.getdoc(PUBLIC[name]), re.MULTILINE)


def modules_imported_by(path):
    """Return the modules that a file imports anywhere, and the names that it imports from them."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{name.name}" for name in node.names)


def test_nothing_imports_the_reference():
    """The reference imports of the rest of the package only how arguments become arrays and seeds, and the named tuples of gradients. Steps and tutorials may import the reference, since they show it."""
    for path in sorted((ROOT / "selfattn").rglob("*.py")):
        imported = [f"{name}." for name in modules_imported_by(path) if name.startswith("selfattn")]
        of_reference = [name for name in imported if name.startswith("selfattn.reference.")]
        folder = path.relative_to(ROOT / "selfattn").parts[0]
        if folder == "reference":
            others = {name for name in imported if name.split(".")[1] not in ("reference", "_gradients")}
            assert others <= {"selfattn._check.as_array.", "selfattn._check.seed_from_rng."}, path
        elif folder not in ("steps", "tutorials.py", "__init__.py"):
            assert not of_reference, path
    script = "import sys, selfattn.nn, selfattn.training; print('selfattn.reference' in sys.modules)"
    assert run_script(script) == "False"


def test_the_top_level_lists_what_a_newcomer_calls():
    listed = dir(sa)
    assert len(listed) <= 30
    assert not [name for name in listed if name.startswith("_") and name != "__version__"]
    assert set(sa.__all__) < set(listed)
    for name in listed:
        thing = getattr(sa, name)
        assert inspect.ismodule(thing) or name == "__version__" or name in sa.__all__
    namespace = {}
    exec("from selfattn import *", namespace)
    assert set(sa.__all__) == set(namespace) - {"__builtins__"}


@pytest.mark.parametrize("name", functional.__all__)
def test_the_top_level_still_has_every_function(name):
    """The function is the same object, and a class is pickled by the name of the module that defines it."""
    namespace = {}
    exec(f"from selfattn import {name}", namespace)
    thing = getattr(functional, name)
    assert namespace[name] is thing
    if inspect.isclass(thing):
        assert pickle.loads(pickle.dumps(thing)) is thing
        assert thing.__module__.startswith(("selfattn.functional.", "selfattn._gradients"))


def test_modules_are_loaded_when_they_are_first_used():
    paths = (ROOT / "selfattn").iterdir()
    names = [path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()]
    script = f"""
    import sys
    import selfattn as sa

    loaded = set(sys.modules)
    assert not {{"selfattn.nn", "selfattn.steps", "selfattn.models", "selfattn.views", "selfattn.cli"}} & loaded
    for name in {[name for name in names if not name.startswith("_")]}:
        assert getattr(sa, name) is sys.modules[f"selfattn.{{name}}"]
    try:
        sa.softmin
    except AttributeError as error:
        print(error)
    """
    assert run_script(script) == "module 'selfattn' has no attribute 'softmin'"
