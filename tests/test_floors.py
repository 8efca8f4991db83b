"""A file of selfattn imports only from its own floor or a lower one; files of C never call each other in a circle."""

import ast
import re
from pathlib import Path

import pytest

import selfattn

# From the lowest up.

FLOORS = (
    ("_check", "_gradients", "_disk", "_docs", "_extras", "_interrupt", "_timing", "config", "reference", "_core"),
    ("functional", "text", "random"), ("engine",), ("steps",), ("nn", "optim", "files"),
    ("models", "training", "tutorials"), ("views", "interop", "search"), ("cli", "benchmarks", "__main__"),
)  # fmt: skip
HEIGHTS = {name: height for height, floor in enumerate(FLOORS) for name in floor}
PACKAGE = Path(selfattn.__file__).parent
# The package's `__init__` imports from all floors; through its `_render`, `steps` use `views` in a notebook.
ROOF = "__init__"


def imported(tree, path):
    """Return the lines and modules of a file's imports of selfattn, also in functions, TYPE_CHECKING, `import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["selfattn", *path.parent.parts][: len(path.parts) + 1 - node.level]
            base = node.module or "" if not node.level else ".".join([*package, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("selfattn."))


def test_every_file_has_a_floor():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert found - {ROOF} <= set(HEIGHTS)


def test_no_import_goes_up():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        own = inside.parts[0].removesuffix(".py")
        if own == ROOF:
            continue
        for line, name in imported(ast.parse(path.read_text()), inside):
            if HEIGHTS.get(name, -1) > HEIGHTS[own]:
                wrong.append(f"selfattn/{inside}:{line}: {own} imports {name}, which is on a higher floor")
    assert not wrong, "\n".join(wrong)


# ---- the C of the drivers and of the binding

SOURCES = Path(__file__).parents[1] / "csrc"
# A comment, a string, or a character.
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
# A definition at the left margin that is not static: a function with its body, or data with its value.
DEFINED = re.compile(
    r"^(?!static|typedef|extern|#)[A-Za-z][^;{}=]*?\b(sa_\w+)(?:\([^;{}]*\) \{|(?:\[\])? = )", re.MULTILINE
)


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
    """Return files that call one another in a circle, if any: those that remain after removing files that call no others."""
    left = dict(calls)
    while ground := [name for name, others in left.items() if not others & left.keys()]:
        for name in ground:
            del left[name]
    return sorted(left)


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
