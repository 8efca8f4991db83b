"""Joins a view's scripts, styles and data: to one HTML file, which fetches nothing, or to a notebook's output."""

from __future__ import annotations

import base64
import functools
import os
import posixpath
import re
import webbrowser
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from selfattn import _disk
from selfattn._extras import import_extra
from selfattn.views.language import PLURALS, VIEWS, say
from selfattn.views.writing import Array, letters, number, script_data, short, text

# Matches what is removed from scripts: types within a line, other comments, indentation.
_NOT_CODE = re.compile(r"\s*/\*\* @\w+ [^*\n]*\*/(?= )|^\s*/\*.*?\*/\n|^\s+", re.DOTALL | re.MULTILINE)

_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:class|const|function) (\w+))", re.MULTILINE)

# Sizes in the picture of weights.
CELL, LETTER, GAP, LINE = 48, 7, 24, 20  # pixels
MAX_SIDE, MAX_TOKEN, MAX_MATRICES = 32, 12, 4

Matrix: TypeAlias = tuple[str, Array, list[str], list[str], set[tuple[int, int]]]

# A view's script looks for views in the document, so it runs after the element is added.
_ESM = """\
export default {
  render({ model, el }) {
    el.innerHTML = model.get("style_sheet") + model.get("body").replace(' data-alone=""', "");
    el.addEventListener("sa-chosen", ({ detail }) => {
      model.set("chosen", detail);
      model.save_changes();
    });
    const start = () => {
      if (!el.isConnected) return requestAnimationFrame(start);
      CODE
    };
    requestAnimationFrame(start);
  },
};
"""

STILL = (
    "This is a still picture. File, Trust Notebook starts the page in a notebook, and so does running the cell; "
    "elsewhere a browser that runs scripts does."
)

# No network. Forms and the address to which links refer have no default.
POLICY = (
    "default-src 'none'; form-action 'none'; base-uri 'none'; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)


@dataclass(frozen=True, repr=False)
class Document:
    """A view as HTML, and as a picture for programs that do not show HTML.

    Attributes
    ----------
    title : str
    body : str
        One element of class ``sa-view``, without script.
    svg : str
    fragment : str
        What notebooks show: body, style and script.
    html : str
        A whole document, which needs no network.
    below : tuple of Document
        Views that follow in the whole document, such as a second half.
    links : tuple of (rel, language, address, name), to other pages of a folder
    """

    title: str
    body: str
    svg: str
    lang: str = "en"
    below: tuple[Document, ...] = field(default=(), kw_only=True)
    links: tuple[tuple[str, str, str, str], ...] = field(default=(), kw_only=True)

    about: ClassVar[str] = ""  # what the picture shows
    styles: ClassVar[tuple[str, ...]] = ()
    scripts: ClassVar[tuple[str, ...]] = ()
    policy: ClassVar[str] = POLICY

    @property
    def fragment(self) -> str:
        """The view with style and script."""
        plain = self.body.replace(' data-alone=""', "")
        return f"<div>{style(*self.styles)}{self._still}{plain}{script(*self.scripts)}</div>"

    @property
    def _still(self) -> str:
        """What is seen where scripts do not run: a sentence that says so, the picture, and what the picture shows."""
        if not self.svg:
            return ""
        picture = base64.b64encode(self.svg.encode("utf-8", "backslashreplace")).decode()
        lang = self.lang if self.lang in PLURALS else "en"
        return (
            f'<div class="sa-still"><p>{text(say(STILL, lang))}</p>'
            f'<p><img alt="{text(self.title)}" src="data:image/svg+xml;base64,{picture}"></p>'
            f"<p><b>{text(self.title)}</b> {text(say(self.about, lang)) if self.about else ''}</p></div>"
        )

    @property
    def html(self) -> str:
        """The whole document."""
        parts = (self, *self.below)
        styles = dict.fromkeys(name for part in parts for name in part.styles)
        scripts = dict.fromkeys(name for part in parts for name in part.scripts)
        bodies = "\n".join(part._still + part.body for part in parts)
        links = "".join(
            f'<link rel="{rel}" hreflang="{lang}" href="{href}" title="{text(name)}">\n'
            for rel, lang, href, name in self.links
        )
        return (
            f'<!DOCTYPE html>\n<html lang="{text(self.lang)}">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{self.policy}">\n'
            f'<title>{text(self.title)}</title>\n<link rel="icon" href="data:,">\n{links}{style(*styles)}\n</head>\n'
            f'<body class="sa-page">\n{bodies}\n{script(*scripts)}\n</body>\n</html>\n'
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title!r}, {len(self.html.encode()) / 1000:.0f} kB>"

    def _repr_html_(self) -> str:
        return self.fragment

    def _repr_svg_(self) -> str | None:
        return self.svg or None

    def widget(self) -> Any:
        """Return the view as a notebook widget, which reports the user's choices to Python.

        ``widget.chosen`` is a dict of the last choice, such as the token and the head; ``widget.observe(function,
        "chosen")`` calls a function at each choice. Without a running kernel, :attr:`fragment` shows the same.

        Returns
        -------
        anywidget.AnyWidget

        Raises
        ------
        ImportError
            anywidget is not installed; the extra ``viz`` brings it.
        """
        base: Any = import_extra("anywidget", "viz").AnyWidget
        traitlets = import_extra("traitlets", "viz")

        class View(base):  # type: ignore[misc]
            _esm = _ESM.replace("CODE", code(*self.scripts))
            body = traitlets.Unicode(self.body).tag(sync=True)
            style_sheet = traitlets.Unicode(style(*self.styles)).tag(sync=True)
            chosen = traitlets.Dict({}).tag(sync=True)

        return View()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the document to a file, in UTF-8, and return its path; a file of that name is replaced as a whole."""
        path = Path(path)
        _disk.write_file(path, self.html.encode())
        return path

    def open(self, path: str | os.PathLike[str]) -> Path:
        """Write the document and show it in a browser."""
        path = self.save(path)
        webbrowser.open(path.resolve().as_uri())
        return path


def script(*names: str) -> str:
    """Return a script element that runs the files of these names; without any, nothing.

    Examples
    --------
    >>> script("kit/page.js").startswith("<script>(function $script() {")
    True
    """
    return f"<script>{code(*names)}</script>" if names else ""


@functools.cache
def code(*names: str) -> str:
    """Return code that runs these files, after those that they import, in strict mode.

    A page is one file, which is opened from disk, so its scripts cannot be modules of a browser: each becomes a
    function, which takes what it imports and returns what it exports. The function of all has a name, so that a page
    can give it to a worker.
    """
    found: dict[str, str] = {}
    for name in names:
        _add_module(found, name)
    return f'(function $script() {{\n"use strict";\n{"".join(found.values())}}})();'


def _add_module(found: dict[str, str], name: str) -> None:
    """Add a file's function to those in ``found``, after those of the files that it imports."""
    if name in found:
        return
    source, takes = _read(name), []
    for names, path in _IMPORT.findall(source):
        other = _imported(name, path)
        _add_module(found, other)
        takes.append((f"{{{' '.join(names.split())}}}", _variable(other)))
    plain = _NOT_CODE.sub("", _IMPORT.sub("", source))
    gives = _EXPORT.findall(plain)
    found[name] = (
        f"const {_variable(name)} = (({', '.join(names for names, _ in takes)}) => {{\n{_EXPORT.sub('', plain)}"
        f"return {{ {', '.join(gives)} }};\n}})({', '.join(module for _, module in takes)});\n"
    )


def _imported(name: str, path: str) -> str:
    """Return the name of the file that the file ``name`` imports as ``path``, which may be one of this package."""
    package, _, file = name.rpartition(":")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
    if found.startswith("../"):
        return found.partition(f"{VIEWS.replace('.', '/')}/")[2]
    return f"{package}:{found}" if package else found


def _variable(name: str) -> str:
    """Return the variable of a file's exports: no two files of a page have one name."""
    return f"${posixpath.basename(name.replace(':', '/')).removesuffix('.js')}"


def style(*names: str) -> str:
    """Return a style element with the kit's rules, then those of the files of these names."""
    return f"<style>{''.join(map(_read, ('kit/kit.css', *names)))}</style>"


def _read(name: str) -> str:
    """Return the text of a file of this package, or of another one's, as in ``package:file``."""
    package, _, file = name.rpartition(":")
    return resources.files(package or VIEWS).joinpath(*file.split("/")).read_text(encoding="utf-8")


def drawn_by_script(
    kind: str, lang: str, title: str, shown: str, data: Any, numbers: bytes | None = None, name: str = ""
) -> str:
    """Return the body of a view of class ``kind`` that its script draws.

    It has HTML to show until then, and the view's data and numbers. ``name`` is short: a button to the
    view, if a document has several.
    """
    packed = "" if numbers is None else base64.b64encode(zlib.compress(numbers, 9)).decode()
    more = f'\n<script type="application/octet-stream" class="sa-bytes">{packed}</script>' if packed else ""
    return (
        f'<div class="sa-view {kind}" data-alone="" lang="{lang}" data-name="{text(name)}">'
        f"<h1>{text(title)}</h1>\n{shown}\n{script_data(data)}{more}\n</div>"
    )


def weights_svg(matrices: Sequence[Matrix], title: str, notes: Sequence[str] = ()) -> str:
    """Draw the first four matrices of weights side by side, each with its first rows and columns; darker is more.

    Names are above the matrices, notes below all; numbers at ``blanks`` are not shown.
    """
    drawn, left, height = [], 0, LINE
    for name, data, rows, columns, blanks in matrices[:MAX_MATRICES]:
        shown = data[:MAX_SIDE, :MAX_SIDE]
        labels = [[short(label, MAX_TOKEN) for label in axis[:MAX_SIDE]] for axis in (rows, columns)]
        beside, cell = (max([CELL, *(LETTER * letters(label) + GAP for label in axis)]) for axis in labels)
        above = f'<text x="{beside}" y="{LINE}" font-weight="bold">{text(name)}</text>' if name else ""
        grid = _grid(shown, labels[0], labels[1], beside, cell, blanks)
        drawn.append(f'<g transform="translate({left} 0)">{above}{grid}</g>')
        left += beside + max(shown.shape[1] * cell, LETTER * letters(name)) + GAP
        height = max(height, 3 * LINE + shown.shape[0] * CELL)
    below = ""
    for note in notes:
        height += LINE
        below += f'<text x="{GAP}" y="{height}">{text(note)}</text>'
        left = max(left, LETTER * letters(note) + 2 * GAP)
    return svg_picture(max(left, 1), height + GAP, title, "".join(drawn) + below)


def stacked(pictures: Sequence[tuple[str, str]], title: str) -> str:
    """Put pictures of :func:`weights_svg` one below the other, each with its heading; leave out empty ones."""
    parts, wide, height = [], 1, 0
    for heading, picture in pictures:
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
        if size is None or "<rect x=" not in picture:
            continue
        height += 2 * LINE
        parts.append(
            f'<text x="{GAP}" y="{height - GAP / 2}" font-size="15" font-weight="bold">{text(heading)}</text>'
            + picture.replace("<svg ", f'<svg y="{height}" ', 1)
        )
        wide = max(wide, int(size[1]), 2 * GAP + (LETTER + 2) * letters(heading))
        height += int(size[2])
    return svg_picture(max(wide, 1), max(height, 1), title, "".join(parts))


def svg_picture(wide: int, high: int, title: str, drawn: str) -> str:
    """Return an SVG of what is drawn, on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{text(title)}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>{drawn}</svg>'
    )


def _grid(
    data: Array, rows: list[str], columns: list[str], left: int, cell: int, blanks: set[tuple[int, int]]
) -> str:
    top = 2 * LINE + 4
    parts = [
        f'<text x="{left + (j + 0.5) * cell}" y="{top - 6}" text-anchor="middle">{text(name)}</text>'
        for j, name in enumerate(columns)
    ]
    for i, row in enumerate(data):
        y = top + i * CELL
        parts.append(f'<text x="{left - 8}" y="{y + CELL / 2 + 4}" text-anchor="end">{text(rows[i])}</text>')
        for j, weight in enumerate(row):
            x, blank = left + j * cell, (i, j) in blanks
            opacity = 0.0 if blank else float(np.clip(np.nan_to_num(weight), 0, 1))
            written = "____" if blank else number(float(weight), 2, 3)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{CELL - 2}" fill="#5b8ee0" '
                f'fill-opacity="{opacity:.3f}" stroke="#888"/>'
                f'<text x="{x + cell / 2}" y="{y + CELL / 2 + 4}" text-anchor="middle">{written}</text>'
            )
    return "".join(parts)
