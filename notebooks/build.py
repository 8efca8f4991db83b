"""Make the notebooks from ``src/*.py``, execute them, and save them so that the same input gives the same bytes.

python notebooks/build.py                 all of them, also those of models/notebooks
python notebooks/build.py 3 4             those whose names begin with 3 or 4
python notebooks/build.py --check         change nothing; print what would differ

A source is Python in the percent format, which editors know as cells: ``# %%`` starts a cell of code and
``# %% [markdown]`` one of text, every line of which starts with ``# ``. Needs nbformat, nbclient and ipykernel.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
OF_MODELS = HERE.parent / "models/notebooks"  # which need the package selfattn-models
SOURCES = sorted([*HERE.glob("src/*.py"), *OF_MODELS.glob("src/*.py")], key=lambda path: path.name)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read_source(path: Path) -> Any:
    """Return a notebook with the cells of a source and without outputs."""
    notebook = nbformat.v4.new_notebook(metadata=METADATA)
    parts = re.split(r"^# %%(.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if parts[0].strip():
        raise ValueError(f"{path.name}: there is text before the first '# %%'")
    for n, (kind, text) in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
        if kind.strip() == "[markdown]":
            cell = nbformat.v4.new_markdown_cell(re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip())
        elif not kind.strip():
            cell = nbformat.v4.new_code_cell(text.strip())
        else:
            raise ValueError(f"{path.name}: '# %%{kind}' starts neither code nor [markdown]")
        cell.id = f"cell-{n}"
        notebook.cells.append(cell)
    return notebook


def execute(notebook: Any, last: str | None = None, folder: Path = HERE) -> str | None:
    """Run a notebook in a fresh kernel and keep its outputs.

    Parameters
    ----------
    notebook : NotebookNode
        Gets the outputs.
    last : str, optional
        Code to run at the end, which does not become part of the notebook.
    folder : Path
        Where the kernel runs, and finds files of models.

    Returns
    -------
    str or None
        What ``last`` printed.
    """
    if last is not None:
        notebook.cells.append(nbformat.v4.new_code_cell(last))
    NotebookClient(notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            cell.metadata.clear()
    notebook.metadata = nbformat.from_dict(METADATA)
    if last is None:
        return None
    return "".join(output.text for output in notebook.cells.pop().outputs)


def _joined(outputs: list[Any]) -> list[Any]:
    """Join the pieces of a stream, which was cut at random times. Warnings are errors."""
    joined: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            raise RuntimeError(f"a cell complains: {output.text}")
        if output.output_type == "stream" and joined and joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def as_text(notebook: Any) -> str:
    """Return the bytes of the file, as text."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    """Build the named notebooks; with --check, return how many differ from the saved ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="how the names start; all by default")
    parser.add_argument("--check", action="store_true", help="change nothing, say what would differ")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the files of models are")
    options = parser.parse_args()
    chosen = [p for p in SOURCES if not options.names or p.name.startswith(tuple(options.names))]
    if not chosen:
        parser.error(f"no source starts with {options.names}; there are {[p.stem for p in SOURCES]}")
    differing = 0
    for path in chosen:
        notebook = read_source(path)
        execute(notebook, folder=options.folder)
        text, saved = as_text(notebook), path.parents[1] / f"{path.stem}.ipynb"
        same = saved.exists() and saved.read_text(encoding="utf-8") == text
        differing += not same
        if not options.check:
            saved.write_text(text, encoding="utf-8")
        print(f"{saved.name}: {len(text.encode()) / 1000:.0f} kB, {'the same' if same else 'differs'}")
    return int(options.check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
