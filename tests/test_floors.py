"""A file of selfattn imports only from its own floor or a lower one; so do files of C, which never call each other in a
circle.

The package selfattn-models has floors of its own. selfattn never imports it by a statement: names that have moved there
are doors, which load it when they are asked for. It imports public names of selfattn alone.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

import selfattn

# From the lowest up.
FLOORS = (
    (
        "_check",
        "_gradient_tuples",
        "_version",
        "_drawing",
        "_cpus",
        "_disk",
        "_docs",
        "_extras",
        "_interrupt",
        "config",
        "reference",
        "_core",
    ),
    ("functional", "text", "random"),
    ("engine",),
    ("steps",),
    ("nn", "optim", "files"),
    ("training", "tutorials", "tape"),
    ("views", "diagnosis", "interop", "models", "search"),
    ("cli", "__main__"),
)
HEIGHTS = {name: height for height, floor in enumerate(FLOORS) for name in floor}
# Of selfattn_models; all other files are below these.
MODEL_FLOORS = (("readings",), ("search",), ("interop", "pages"), ("cli",))
PACKAGE = Path(selfattn.__file__).parent
MODELS = Path(__file__).parents[1] / "models" / "selfattn_models"
MODEL_HEIGHTS = {path.stem: 0 for path in MODELS.glob("*.py")} | {
    name: height for height, floor in enumerate(MODEL_FLOORS, 1) for name in floor
}
# A package's `__init__` imports from all floors; through selfattn's `_draw`, `steps` use `views` in a notebook.
ROOF = "__init__"
# What loads selfattn_models by its name, and the files that may.
LOADERS = ("import_models", "named_in_models", "models_module")
DOORS = {
    "_extras.py",
    "models.py",
    "search.py",
    "interop/bertopic.py",
    "interop/dask/__init__.py",
    "interop/langchain.py",
    "interop/sentence_transformers.py",
    "interop/sklearn.py",
    "views/__init__.py",
    "views/gpt.py",
}


def imports(tree, path, package):
    """Yield the lines and full names of a file's imports, also in functions, TYPE_CHECKING, `import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [package, *path.parent.parts][: len(path.parts) + 1 - node.level]
            base = node.module or "" if not node.level else ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and called(node.func).endswith(("import_module", "__import__")):
            names = [beginning(node.args[0])]
        else:
            continue
        yield from ((node.lineno, name) for name in names)


@functools.cache
def parsed(text):
    return ast.parse(text)


def called(function):
    """Return the last name of a function that is called: of `importlib.import_module` it is `import_module`."""
    return getattr(function, "attr", None) or getattr(function, "id", "")


def beginning(node):
    """Return a string, or what an f-string begins with; of anything else nothing is known."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0] if node.values else node
    return node.value if isinstance(node, ast.Constant) else ""


def upward(text, inside, package, heights):
    """Yield what a file imports from a floor above its own.

    The package's `__init__`, which imports from all floors, is on the highest, with the commands.
    """
    own, highest = inside.parts[0].removesuffix(".py"), max(heights.values())
    for line, full in imports(parsed(text), inside, package):
        _, name, *_ = [*full.split("."), ""]
        if own != ROOF and full.partition(".")[0] == package and heights.get(name, highest) > heights[own]:
            yield f"{package}/{inside}:{line}: {own} imports {name or package}, which is on a higher floor"


def files(folder):
    found = [
        (path.relative_to(folder), path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))
    ]
    if not found:
        pytest.skip("the sources are not here")
    return found


def test_every_file_has_a_floor():
    found, models = (
        {inside.parts[0].removesuffix(".py") for inside, _ in files(each)} for each in (PACKAGE, MODELS)
    )
    assert found - {ROOF} <= set(HEIGHTS)
    assert set(MODEL_HEIGHTS) <= models


PACKAGES = {"selfattn": (PACKAGE, HEIGHTS), "selfattn_models": (MODELS, MODEL_HEIGHTS)}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_up(package):
    folder, heights = PACKAGES[package]
    wrong = [each for inside, text in files(folder) for each in upward(text, inside, package, heights)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "place", "names"),
    [
        ("from selfattn import nn\nfrom selfattn.text import x", "selfattn/engine/a.py", ["nn"]),
        ("import selfattn as sa", "selfattn/nn/a.py", ["selfattn"]),
        ("from selfattn import softmax", "selfattn/views/a.py", ["softmax"]),
        ("import selfattn as sa", "selfattn/cli/a.py", []),
        ("def f():\n    from .. import __version__", "selfattn/nn/a.py", ["__version__"]),
        ("import selfattn_models as models", "selfattn_models/search/a.py", ["selfattn_models"]),
        ("import selfattn as sa", "selfattn_models/search/a.py", []),
        ("def f():\n    import selfattn.views.page", "selfattn/training/a.py", ["views"]),
        ("from ..cli import app", "selfattn/views/a.py", ["cli"]),
        ("from .x import cli", "selfattn/views/a.py", []),
        ("import_module('selfattn.cli')", "selfattn/nn.py", ["cli"]),
        ("import_module(f'selfattn.views.{x}')", "selfattn/nn.py", ["views"]),
        ("from selfattn import models", "selfattn/files.py", ["models"]),
        ("import selfattn.search", "selfattn/training/a.py", ["search"]),
        ("from selfattn import models", "selfattn/interop/a.py", []),
        ("import selfattn.cli", "selfattn/__init__.py", []),
        ("from selfattn_models import readings", "selfattn_models/bert.py", ["readings"]),
        ("if TYPE_CHECKING:\n    import selfattn_models.search", "selfattn_models/readings.py", ["search"]),
        ("from selfattn_models.cli.models import x", "selfattn_models/pages/a.py", ["cli"]),
        ("from selfattn_models.interop.dask import x", "selfattn_models/search/a.py", ["interop"]),
        ("from selfattn_models.search import Index", "selfattn_models/interop/a.py", []),
        ("from selfattn_models.pages import explorer", "selfattn_models/cli/a.py", []),
        ("from selfattn_models import bert", "selfattn_models/gpt2.py", []),
    ],
)
def test_an_import_that_goes_up_is_found(text, place, names):
    package, _, inside = place.partition("/")
    found = upward(text, Path(inside), package, PACKAGES[package][1])
    assert [each.split(" imports ")[1].split(",")[0] for each in found] == names


def imports_of(found, package):
    """Return which files of a package each file imports, by their places in it, all but the package's `__init__`."""
    inner = [(inside, text) for inside, text in found if inside != Path("__init__.py")]
    places = {place_of(inside, package): inside.as_posix() for inside, _ in inner}
    calls = {}
    for inside, text in inner:
        others = set()
        for _, name in imports(parsed(text), inside, package):
            if name.endswith("."):  # an f-string: any file of the folder
                others |= {place for known, place in places.items() if known.startswith(name)}
            else:
                others.add(file_of(name, places))
        calls[inside.as_posix()] = others - {None, inside.as_posix()}
    return calls


def file_of(name, places):
    """Return the file of a module, or of what a module has; None if it is of another package."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name)


def place_of(inside, package):
    return ".".join([package, *inside.with_suffix("").parts]).removesuffix(".__init__")


def folders_of(calls):
    """Return which folders, and files next to them, import each other, of what :func:`imports_of` returns."""
    found = {}
    for place, others in calls.items():
        own = place.partition("/")[0]
        found.setdefault(own, set()).update({other.partition("/")[0] for other in others} - {own})
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other(package):
    """An import in a function counts, and one for type checkers: a reader must know both files."""
    calls = imports_of(files(PACKAGES[package][0]), package)
    assert any(calls.values()), "no imports are found"
    for each in (calls, folders_of(calls)):
        assert not circle(each), {name: each[name] & {*circle(each)} for name in circle(each)}


@pytest.mark.parametrize(
    ("low", "found"),
    [
        ("", []),
        ("from p.x import high", ["x/high.py", "x/low.py", "x/middle.py"]),
        ("from . import high", ["x/high.py", "x/low.py", "x/middle.py"]),
        ("def f():\n    import p.x.middle", ["x/low.py", "x/middle.py"]),
        ("if TYPE_CHECKING:\n    from p.x.middle import M", ["x/low.py", "x/middle.py"]),
        ("import_module(f'p.x.{name}')", ["x/high.py", "x/low.py", "x/middle.py"]),
        ("from p.x import f", ["x/__init__.py", "x/high.py", "x/low.py", "x/middle.py"]),
        ("from p import f", []),
    ],
)
def test_a_circle_of_imports_is_found(low, found):
    texts = {
        "__init__.py": "from p.x import f",
        "x/__init__.py": "from p.x.high import f",
        "x/high.py": "import p.x.middle",
        "x/middle.py": "from p.x.low import f",
        "x/low.py": low,
    }
    calls = imports_of([(Path(place), text) for place, text in texts.items()], "p")
    assert circle(calls) == found
    assert not circle(folders_of(calls))


def test_a_circle_of_folders_is_found():
    texts = {
        "__init__.py": "",
        "x/a.py": "import p.y.b",
        "x/b.py": "",
        "y/a.py": "def f():\n    import p.x.b",
        "y/b.py": "",
    }
    calls = imports_of([(Path(place), text) for place, text in texts.items()], "p")
    assert not circle(calls)
    assert circle(folders_of(calls)) == ["x", "y"]


# ---- the two packages


def models_in_the_core(text, inside):
    """Yield where a file of selfattn imports selfattn_models, or loads it although it is not a door."""
    tree = parsed(text)
    for line, name in imports(tree, inside, "selfattn"):
        if name.partition(".")[0] == "selfattn_models":
            yield f"selfattn/{inside}:{line}: imports {name}"
    for node in ast.walk(tree):
        name = called(node.func) if isinstance(node, ast.Call) else ""
        if name in LOADERS and inside.as_posix() not in DOORS:
            yield f"selfattn/{inside}:{node.lineno}: {name} in a file that is not a door"


# Of named tuples, and public although they begin with an underscore.
OF_TUPLES = ("_asdict", "_fields", "_make", "_replace")


def private(name):
    parts = [part for part in name.split(".") if part not in OF_TUPLES]
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in parts)


def of_the_core(name):
    return name.partition(".")[0] == "selfattn"


def loads_the_core(node):
    """Return whether a node is a call that imports a module of selfattn by its name."""
    is_load = isinstance(node, ast.Call) and called(node.func).endswith("import_module")
    return is_load and of_the_core(str(beginning(node.args[0])))


def private_in_the_models(text, inside):
    """Yield where a file of selfattn_models uses a private name of selfattn.

    It imports the name, or takes it as an attribute of what it imports.
    """
    tree = parsed(text)
    for line, name in imports(tree, inside, "selfattn_models"):
        if of_the_core(name) and private(name):
            yield f"selfattn_models/{inside}:{line}: imports {name}"
    bound = set(names_of_the_core(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                chain, root = [root.attr, *chain], root.value
            known = loads_the_core(root) or getattr(root, "id", None) in bound
            if known and private(node.attr):
                yield f"selfattn_models/{inside}:{node.lineno}: uses {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr":
            root, name = node.args[0], beginning(node.args[1])
            if ast.unparse(root).partition(".")[0] in bound and private(str(name)):
                yield f"selfattn_models/{inside}:{node.lineno}: uses {ast.unparse(node)}"


def names_of_the_core(tree):
    """Yield the names by which a file knows what it imports from selfattn."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            each = [(alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names]
            yield from (name for name, module in each if of_the_core(module))
        elif isinstance(node, ast.ImportFrom) and not node.level and of_the_core(node.module):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and loads_the_core(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_selfattn_does_not_import_the_models():
    wrong = [each for inside, text in files(PACKAGE) for each in models_in_the_core(text, inside)]
    assert not wrong, "\n".join(wrong)


def test_doors_are_doors():
    """A file of the list that loads nothing is none."""
    for place in DOORS - {"_extras.py"}:
        text = (PACKAGE / place).read_text(encoding="utf-8")
        assert re.search(rf"\b({'|'.join(LOADERS)})\(", text), place


def test_the_models_use_public_names():
    wrong = [each for inside, text in files(MODELS) for each in private_in_the_models(text, inside)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("import selfattn_models", "a.py", 1),
        ("from selfattn_models.search import Index", "cli/a.py", 1),
        ("if TYPE_CHECKING:\n    import selfattn_models as models", "models.py", 1),
        ("def f():\n    from selfattn_models import load", "a.py", 1),
        ("x = import_module('selfattn_models.bert')", "a.py", 1),
        ("importlib.import_module(f'selfattn_models.{x}')", "a.py", 1),
        ("import_models(__name__, 'selfattn_models')", "models.py", 0),
        ("import_models(__name__, 'selfattn_models')", "files.py", 1),
        ("_extras.models_module('x', 'selfattn_models')", "nn/a.py", 1),
        ("find_spec('selfattn_models')", "__init__.py", 0),
        ("import selfattn.models", "a.py", 0),
    ],
)
def test_an_import_of_the_models_is_found(text, place, found):
    assert len(list(models_in_the_core(text, Path(place)))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from selfattn._check import Array", 1),
        ("from selfattn import _core, nn", 1),
        ("import selfattn._disk as disk", 1),
        ("if TYPE_CHECKING:\n    from selfattn.engine.weights import _x", 1),
        ("import_module('selfattn._core')", 1),
        ("import selfattn as sa\nsa._core.f()", 1),
        ("from selfattn import files as disk\ndisk._place(x)", 1),
        ("def f():\n    import selfattn.nn.gpt\n    return selfattn.nn.gpt._x", 1),
        ("import_module('selfattn.files')._x", 1),
        ("x = import_module('selfattn.files')\nx._place", 1),
        ("import selfattn\ngetattr(selfattn, '_core')", 1),
        ("import selfattn\nselfattn.__version__", 0),
        ("from selfattn import nn\nnn.Linear.__name__", 0),
        ("from selfattn_models._folder import Config", 0),
        ("from selfattn_models import _keywords\n_keywords._x", 0),
        ("from . import _keywords\n_keywords._x", 0),
        ("from selfattn.engine import Array\nself._core", 0),
    ],
)
def test_a_private_name_of_selfattn_is_found(text, found):
    assert len(list(private_in_the_models(text, Path("bert.py")))) == found


# ---- the C

SOURCES = Path(__file__).parents[1] / "csrc"
# A comment, a string, or a character.
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
# A definition at the left margin that is not static: a function with its body, or data with its value.
DEFINED = re.compile(
    r"^(?!static|typedef|extern|#)[A-Za-z][^;{}=]*?\b(sa_\w+)(?:\([^;{}]*\) \{|(?:\[\])? = )", re.MULTILINE
)


# From the lowest up. On the ground are selfattn.h and selfattn.c.
C_FLOORS = ("simd", "kernels", "isa", "runtime", "drivers", ("python", "wasm"), "tests")
C_HEIGHTS = {
    folder: height
    for height, floor in enumerate(C_FLOORS, 1)
    for folder in ([floor] if isinstance(floor, str) else floor)
}


def upward_in_c(folder):
    """Yield what a file includes, or calls, from a floor above its own."""
    texts = {
        path.relative_to(folder): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.[ch]"))
        if path.relative_to(folder).parts[0] != "build"
    }

    def height(path):
        return C_HEIGHTS[path.parts[0]] if len(path.parts) > 1 else 0

    # A declaration is no call.
    code = {path: re.sub(r"\bextern [^;]*;", "", NO_CODE.sub('""', text)) for path, text in texts.items()}
    above = {
        name: path
        for path in texts
        if path.suffix == ".c" and path.parts[0] != "tests"  # which redefine what they emulate
        for name in DEFINED.findall(code[path])
    }
    for path, text in texts.items():
        for name in re.findall(r'^ *# *include "([^"]+)"', text, re.MULTILINE):
            if height(Path(name)) > height(path):
                yield f"csrc/{path} includes {name}, which is on a higher floor"
        if path.suffix == ".c" or height(path) in (C_HEIGHTS["simd"], C_HEIGHTS["kernels"]):
            for name in sorted({*re.findall(r"\bsa_\w+", code[path])} & above.keys()):
                if height(above[name]) > height(path):
                    yield f"csrc/{path} uses {name} of {above[name]}, which is on a higher floor"


def test_no_include_or_call_goes_up():
    if not SOURCES.exists():
        pytest.skip("the sources are not here")
    wrong = [*upward_in_c(SOURCES)]
    assert not wrong, "\n".join(wrong)


def test_what_goes_up_in_c_is_found(tmp_path):
    for place, text in {
        "selfattn.h": "/* sa_run() */ int sa_run(int x);\n",
        "simd/macros.h": '#include "selfattn.h"\n',
        "kernels/a.h": '#include "simd/macros.h"\n#include "drivers/b.h"\n',
        "kernels/x/c.h": "int y = sa_run(1);\n",
        "drivers/b.h": '#include "kernels/a.h"\n',
        "drivers/b.c": '#include "drivers/b.h"\nint sa_run(int x) {\n    return x;\n}\n',
        "python/d.c": '#include "drivers/b.h"\nint z = sa_run(1);\n',
    }.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(text)
    assert [*upward_in_c(tmp_path)] == [
        "csrc/kernels/a.h includes drivers/b.h, which is on a higher floor",
        "csrc/kernels/x/c.h uses sa_run of drivers/b.c, which is on a higher floor",
    ]


def names_of(folder):
    """What each file of a folder defines, and all names in it."""
    texts = {
        path.name: NO_CODE.sub('""', path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.c"))
    }
    return {
        name: (set(DEFINED.findall(text)), set(re.findall(r"\bsa_\w+", text))) for name, text in texts.items()
    }


def calls_of(files):
    return {
        name: {other for other, (defined, _) in files.items() if other != name and defined & used}
        for name, (_, used) in files.items()
    }


def circle(calls):
    """Return the files of circles: those that remain after removing files that call no others, or that none calls."""
    left = dict(calls)
    while True:
        called = set().union(*left.values())
        ends = [name for name, others in left.items() if not others & left.keys() or name not in called]
        if not ends:
            return sorted(left)
        for name in ends:
            del left[name]


@pytest.mark.parametrize("folder", ["drivers", "python"])
def test_no_files_call_each_other(folder):
    if not SOURCES.exists():
        pytest.skip("the sources are not here")
    calls = calls_of(names_of(SOURCES / folder))
    assert any(calls.values()), "no calls are found"
    assert not circle(calls), calls


def test_a_circle_is_found(tmp_path):
    (tmp_path / "a.c").write_text("int sa_low(int x) { return x; }\nconst int sa_table[] = {1};\n")
    (tmp_path / "b.c").write_text(
        "/* sa_high */\nint\nsa_middle(int x) {\n    return sa_low(x) + sa_table[0];\n}\n"
    )
    (tmp_path / "c.c").write_text("int sa_high(int x) { return sa_middle(x); }\n")
    assert not circle(calls_of(names_of(tmp_path)))
    (tmp_path / "a.c").write_text("int sa_low(int x) { return sa_high(x); }\n")
    assert circle(calls_of(names_of(tmp_path))) == ["a.c", "b.c", "c.c"]
