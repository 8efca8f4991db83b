"""The documentation runs: doctests of everything public, code in Markdown files; signatures agree with the stub."""

import ast
import importlib
import importlib.util
import inspect
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from doc_checks import (
    check_code,
    check_examples_of_module,
    check_links,
    modules_with_examples,
    names_of_no_file,
    run_examples,
)
from processes import run_script

import selfattn as sa
from selfattn import _core, functional, nn, optim
from selfattn.functional import _options

ROOT = Path(__file__).parents[2]
MODULES = modules_with_examples(ROOT, "selfattn")
PUBLIC = {name: getattr(sa, name) for name in sorted({*sa.__all__, *functional.__all__, "AttentionSteps"})}
CALLABLES = {name: thing for name, thing in PUBLIC.items() if callable(thing)}
SECTIONS = [
    "Parameters",
    "Returns",
    "Attributes",
    "Raises",
    "Warns",
    "See Also",
    "Notes",
    "References",
    "Examples",
]
IN_MODELS = ("models", "search")  # names of the package of models
FOLDERS = ["csrc", "docs", "notebooks"]  # folders whose pages a reader opens
MARKDOWN = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in ROOT.glob(f"{name}/**/*.md"))])


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
    check_examples_of_module(name)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_in_markdown(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_code(path)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_markdown_lead_somewhere(path):
    check_links(path)


def test_files_that_contributing_names_exist():
    lacking = names_of_no_file(ROOT, ROOT / "CONTRIBUTING.md")
    assert lacking == ["csrc/isa/NAME.c", "csrc/simd/NAME.h"]


def test_the_table_of_names_of_the_tape_is_that_of_its_operations():
    spec = importlib.util.spec_from_file_location("tape_names", ROOT / "tools/tape_names.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page_with_table(text) == text, "run `python tools/tape_names.py`"


# Functions of the core whose signatures and docstrings stand in selfattn/functional; small arguments of each.
X = np.arange(12.0).reshape(3, 4) / 7
DESCRIBED_IN_PYTHON = {
    "scaled_dot_product_attention": (X, X, X),
    "softmax": (X,),
    "log_softmax": (X,),
    "layer_norm": (X, 4),
    "rms_norm": (X, 4),
    "gelu": (X,),
    "apply_rotary_emb": (X, X[:, :2], X[:, 2:]),
}
# The core's calls, and the options that Python passes to them.
CALLS = {
    "scaled_dot_product_attention": _options.AttentionOptions,
    "_attention_forward": _options.AttentionOptions,
    "_attention_backward": _options.AttentionOptions,
    "_attention_jvp": _options.AttentionOptions,
    "_attention_hvp": _options.AttentionOptions,
    "_cached_attention": _options.CacheOptions,
    "_varlen_attention": _options.VarlenOptions,
    "_varlen_forward": _options.VarlenOptions,
    "_varlen_backward": _options.VarlenOptions,
}


@pytest.mark.parametrize("name", DESCRIBED_IN_PYTHON)
def test_the_core_takes_the_parameters_that_python_describes_with_their_defaults(name):
    function, arguments = getattr(_core, name), DESCRIBED_IN_PYTHON[name]
    parameters = inspect.signature(function).parameters
    required = dict(zip(parameters, arguments, strict=False))
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    assert parameters.keys() == required.keys() | defaults.keys()
    np.testing.assert_array_equal(function(*arguments), function(**required, **defaults))


def test_every_option_is_a_row_of_the_cores_table():
    table = _core._attention_parameters()
    shown = inspect.signature(sa.scaled_dot_product_attention).parameters
    assert list(table) == list(shown)
    for name, p in shown.items():
        assert table[name] == ("" if p.default is p.empty else f"={p.default!r}")
    assert {*table} - {*_options.AttentionOptions.__annotations__} == {
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        *("return_lse", "return_weights", "out"),
    }


@pytest.mark.parametrize("call", CALLS)
def test_the_core_takes_the_options_that_python_passes(call):
    for name in _options.names_of(CALLS[call]):
        with pytest.raises(TypeError, match="missing required argument"):
            getattr(_core, call)(**{name: None})


def stub_functions():
    tree = ast.parse((ROOT / "selfattn" / "_core.pyi").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_stub_names_what_the_extension_has():
    functions = {name for name, thing in vars(_core).items() if callable(thing)}
    assert functions == set(stub_functions())


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_the_stub_agrees_with_the_signature(name):
    function = getattr(_core, name)
    shown = function.__text_signature__ is not None and name not in DESCRIBED_IN_PYTHON
    if shown:
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
        sa.scaled_dot_product_attention_vjp: (x, x, x),
        sa.varlen_attention: (x, x, x, at, at),
        sa.varlen_attention_vjp: (x, x, x, at, at),
        sa.additive_attention: (x, x, x, np.eye(4), np.eye(4), np.ones(4)),
        sa.additive_attention_vjp: (x, x, x, np.eye(4), np.eye(4), np.ones(4)),
        sa.attention_steps: (x, x, x),
        sa.KVCache(1, 2, 4, dtype=np.float64).attend: (y, y, y),
    }
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
    if name in vars(_core) and section:
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
    """The reference imports only the named tuples of gradients.

    Steps and tutorials may import the reference, since they show it.
    """
    for path in sorted((ROOT / "selfattn").rglob("*.py")):
        imported = [f"{name}." for name in modules_imported_by(path) if name.startswith("selfattn")]
        of_reference = [name for name in imported if name.startswith("selfattn.reference.")]
        folder = path.relative_to(ROOT / "selfattn").parts[0]
        if folder == "reference":
            assert {name.split(".")[1] for name in imported} <= {"reference", "_gradient_tuples"}, path
        elif folder not in ("steps", "tutorials.py", "__init__.py"):
            assert not of_reference, path
    script = "import sys, selfattn.nn, selfattn.training; print('selfattn.reference' in sys.modules)"
    assert run_script(script) == "False"


def test_the_top_level_lists_what_a_newcomer_calls():
    listed = dir(sa)
    assert len(listed) <= 34
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
        assert thing.__module__.startswith(("selfattn.functional.", "selfattn._gradient_tuples"))


def test_modules_are_loaded_when_they_are_first_used():
    paths = (ROOT / "selfattn").iterdir()
    names = [path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()]
    script = f"""
    import sys
    import selfattn as sa

    loaded = set(sys.modules)
    assert not {{"selfattn.nn", "selfattn.steps", "selfattn.models", "selfattn.views", "selfattn.cli"}} & loaded
    for name in {[name for name in names if not name.startswith("_") and name not in IN_MODELS]}:
        assert getattr(sa, name) is sys.modules[f"selfattn.{{name}}"]
    try:
        sa.softmin
    except AttributeError as error:
        print(error)
    """
    assert run_script(script) == "module 'selfattn' has no attribute 'softmin'"
