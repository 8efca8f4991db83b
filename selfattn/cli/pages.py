"""Where the pages of ``selfattn steps`` and ``selfattn explore`` go: a file, standard output, a browser."""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path

from selfattn.cli import streams
from selfattn.cli.parser import Parser, UsageError
from selfattn.views.document import Document


def add_out(parser: Parser, default: str) -> None:
    """Add ``--out`` and ``--open``."""
    what = f"where to write; - is standard output; default: {default}"
    parser.add_argument("--out", metavar="FILE", type=streams.target, help=what)
    parser.add_argument("--open", action="store_true", help="show the page in a browser")


def check_out(options: argparse.Namespace) -> None:
    """Refuse ``--open`` without a file."""
    if options.open and options.out == streams.DASH:
        raise UsageError("--open needs a file; --out - writes none")


def default_file(name: str, mark: bytes, complaint: str) -> Path:
    """Return the path of a name; refuse an existing file without the mark of a page."""
    path = Path(name)
    if os.path.lexists(path) and not (path.is_file() and mark in path.read_bytes()):
        raise FileExistsError(f"{path} exists and is {complaint}")
    return path


def show(command: str, page: Document, path: Path | None, in_browser: bool) -> None:
    """Print where a page has been saved, and open it; without a path, print the page."""
    if path is None:
        streams.write(streams.DASH, page.html.encode())
        return
    print(path)
    if in_browser and not webbrowser.open(path.resolve().as_uri()):
        streams.tell(f"selfattn {command}: there is no browser; open {path} yourself")
