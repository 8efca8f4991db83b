"""A file of selfattn imports only from its own floor or a lower one; the floors are listed from the lowest up."""

import ast
from pathlib import Path

import selfattn

FLOORS = (
    ("_check", "_disk", "_docs", "_extras", "_interrupt", "_timing", "config", "reference", "_core"),
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
