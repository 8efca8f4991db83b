"""The commands ``selfattn steps`` and ``pages``: a page of a tutorial or of arrays, all pages.

This module also has how a command writes a page.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import webbrowser
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _disk, views
from selfattn._disk import LONGEST_NAME
from selfattn.cli import streams
from selfattn.cli.parser import EXIT_CODES, Command, Parser, UsageError
from selfattn.cli.plugins import load_plugin
from selfattn.functional._options import StepsOptions, names_of
from selfattn.steps.attention import AttentionSteps, attention_steps
from selfattn.steps.layers import layer_steps
from selfattn.views.document import Document
from selfattn.views.language import PLURALS
from selfattn.views.live_pages import NO_KERNELS, packaged_kernels
from selfattn.views.page import Page, steps_page
from selfattn.views.tutorial_pages import NUMBERED, TUTORIAL_PAGES, tutorial_page

__all__ = ["COMMANDS", "WHAT", "add_out", "check_out", "page_of_arrays", "written"]

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

# Names of arrays in a file.
ATTENTION = ("query", "key", "value")
LAYER = ("inputs", "W_query", "W_key", "W_value")
PARTS = (
    "b_query",
    "b_key",
    "b_value",
    "key_inputs",
    "value_inputs",
    "num_heads",
    "W_out",
    "b_out",
    "residual",
)
NORM = ("norm_weight", "norm_bias", "norm_eps")
OPTIONS = (
    "attn_mask",
    "is_causal",
    *(name for name in names_of(StepsOptions) if name not in ("block_mask", "rng")),
)
DROPOUT = ("dropout_p", "rng")
TOKENS = ("tokens", "key_tokens")
MOST_BYTES = 2**28
MOST_SCORES = 2**24
PAGE = b'<body class="sa-page">', "a page of selfattn's"
MOST_UNICODE = 0x10FFFF

STEPS_EPILOG = f"""\
tutorials, by number or name:
{"".join(f"  {n}  {name}{chr(10)}" for n, name in NUMBERED.items())}
arrays of a file, as numpy.savez(file, name=array, ...) writes them:
  attention    {", ".join(ATTENTION)}
  or a layer   {", ".join(LAYER)};
               if it has them {", ".join(PARTS[:6])},
               {", ".join(PARTS[6:] + NORM)}
  with both    {", ".join(OPTIONS[:5])},
               {", ".join(OPTIONS[5:])},
               {", ".join(DROPOUT + TOKENS)}

examples:
  selfattn steps 3 --open
  selfattn steps 1 --text "money bank mud" --exercise
  selfattn steps illustrated --out illustrated.html
  selfattn steps mine.npz --tokens "sky is blue" --exercise
  selfattn steps mine.npz --out - | wc -c
{EXIT_CODES}"""


def page_of_arrays(
    arrays: Arrays, tokens: Sequence[str] | None = None, *, exercise: bool = False, lang: str = "en"
) -> Page:
    """Compute the steps of attention, or of a layer, from named arrays, and show them on a page.

    ``selfattn steps --help`` lists the names; ``tokens`` replaces those in ``arrays``. Missing or unknown names, and
    arrays that the steps or the page refuse, are a TypeError or a ValueError.

    Examples
    --------
    >>> x = np.eye(2)
    >>> page = page_of_arrays({"query": x, "key": x, "value": x, "tokens": np.array(["river", "bank"])})
    >>> "river" in page.html
    True
    """
    for name in TOKENS:
        array = arrays.get(name, np.array([""]))
        if array.dtype.kind != "U" or array.ndim != 1:
            raise TypeError(f"{name} is {array.dtype} of shape {array.shape}, not a list of strings")
    names = {name: arrays[name].tolist() for name in TOKENS if name in arrays}
    if tokens is not None:
        names["tokens"] = list(tokens)
    steps, keys = _steps(arrays), names.get("key_tokens")
    return steps_page(steps, names.get("tokens"), key_tokens=keys, exercise=exercise, lang=lang)


def _steps(arrays: Arrays) -> AttentionSteps:
    required = LAYER if "inputs" in arrays or "W_query" in arrays else ATTENTION
    allowed = (*required, *OPTIONS, *DROPOUT, *TOKENS, *(PARTS + NORM if required is LAYER else ()))
    missing = [name for name in required if name not in arrays]
    unknown = [name for name in arrays if name not in allowed]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; there are {', '.join(arrays) or 'no arrays'}")
    if unknown:
        raise ValueError(f"{', '.join(unknown)} not known; the names are {', '.join(allowed)}")
    rows, columns = ("inputs", "inputs") if required is LAYER else ("query", "key")
    scores = math.prod(arrays[rows].shape[:-1]) * math.prod(arrays[columns].shape[-2:-1])
    if scores > MOST_SCORES:
        raise ValueError(f"there are {scores} scores; a page shows every number, of {MOST_SCORES} at most")
    passed_on = arrays.keys() - {*NORM, *TOKENS}
    given = {name: _plain(name, array) for name, array in arrays.items() if name in passed_on}
    if required is ATTENTION:
        return attention_steps(**given)
    if any(name in arrays for name in NORM):
        eps = arrays.get("norm_eps", np.array(1e-5))
        given["norm"] = (arrays.get("norm_weight"), arrays.get("norm_bias"), eps.item())
    return layer_steps(**given)


def _plain(name: str, array: npt.NDArray[Any]) -> Any:
    """Return a single number or text as Python's own, and a window as a pair."""
    if name == "window":
        return tuple(array.tolist())
    return array.item() if array.ndim == 0 else array


def _read(source: str) -> dict[str, npt.NDArray[Any]]:
    """Read an .npz; nothing in it is unpickled."""
    content = streams.read(source)
    # NumPy would take any other beginning for a pickle.
    if not content.startswith((b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY")):
        raise ValueError("it is not an .npz file, as numpy.savez writes it")
    try:
        file = np.load(io.BytesIO(content), allow_pickle=False)
    except NotImplementedError as error:
        raise ValueError(f"Python cannot read this kind of archive: {error}") from None
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise ValueError("it holds one array without a name; numpy.savez writes arrays with names")
    with file:
        members = file.zip.infolist() if file.zip else []
        size = sum(member.file_size for member in members)
        if size > MOST_BYTES:
            raise ValueError(f"it holds {size} bytes; a page shows every number, of {MOST_BYTES} at most")
        return {name: _array(file, name) for name in file.files}


def _array(file: np.lib.npyio.NpzFile, name: str) -> npt.NDArray[Any]:
    try:
        array = file[name]
    except Exception as error:  # NumPy passes on what Python's parser, zlib and others raise
        raise ValueError(f"{name} is damaged: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is not an array")
    if array.size == 0 and math.prod(max(1, n) for n in array.shape) > MOST_SCORES:
        raise ValueError(f"{name} has the shape {array.shape}: it is empty, but would take hours")
    is_text = array.dtype.kind == "U" and array.size
    if is_text and np.ascontiguousarray(array).view(np.uint32).max() > MOST_UNICODE:
        raise ValueError(f"{name} is damaged: it has characters that Unicode does not have")
    return array


def _add_steps(parser: Parser) -> None:
    source = "one of the tutorials, or a file of arrays; - is standard input"
    parser.add_argument("source", metavar="TUTORIAL|FILE.npz", help=source)
    add_out(parser, "NAME.html")
    for name, what in (
        ("--text", "other words for a tutorial, or the tokens of a FILE.npz, separated by spaces"),
        ("--compare", "a second text for a tutorial, to compare with --text"),
        ("--tokens", "the same as --text"),
    ):
        parser.add_argument(name, metavar="TEXT", type=streams.sentence, help=what)
    parser.add_argument("--exercise", action="store_true", help="with blanks to predict, and answers")


def _page(options: argparse.Namespace) -> tuple[str, Page]:
    """Return the name of the page, and the page."""
    if options.text is not None and options.tokens is not None:
        raise UsageError("--text and --tokens are the same; give one of them")
    text = options.tokens if options.text is None else options.text
    name = NUMBERED.get(options.source, options.source)
    both = {"exercise": options.exercise, "lang": options.lang}
    if name in TUTORIAL_PAGES:
        if options.compare is not None and text is None:
            raise UsageError("--compare is a second text: it needs --text")
        return name, tutorial_page(name, text=text, compare=options.compare, **both)
    path = Path(options.source)
    if options.source != streams.DASH and path.suffix.lower() != ".npz" and not os.path.exists(path):
        known = ", ".join(f"{n} {name}" for n, name in enumerate(TUTORIAL_PAGES, 1))
        raise UsageError(f"{options.source!r} is neither a tutorial ({known}) nor a file")
    if options.compare is not None:
        raise UsageError("--compare is for a tutorial, not for a FILE.npz")
    tokens = None if text is None else text.split()
    name = "steps" if options.source == streams.DASH else path.stem
    return name, page_of_arrays(_read(options.source), tokens, **both)


def _run_steps(options: argparse.Namespace) -> int:
    check_out(options)
    if options.out is not None and streams.is_same(options.out, options.source):
        raise UsageError(f"--out {options.out} would replace what is shown")
    at = options.source
    try:
        name, page = _page(options)
        at = options.out or f"{name}.html"
        path = None
        if options.out != streams.DASH:
            while len(os.fsencode(name)) + len(".html") > LONGEST_NAME:
                name = name[:-1]
            path = page.save(options.out or _default_file(f"{name}.html", *PAGE))
    except (OSError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        streams.tell(f"selfattn steps: {at}: {reason}")
        return 1
    _show("steps", page, path, options.open)
    return 0


def _add_pages(parser: Parser) -> None:
    where = "where to write; made if it does not exist"
    parser.add_argument("folder", metavar="DIR", type=streams.folder, help=where)
    several = "the language of the pages, or several, which link to one another; default: en"
    parser.add_argument("--lang", choices=PLURALS, nargs="+", default=["en"], help=several)
    built = "another core in WebAssembly for the live pages, from make -C csrc wasm-library"
    parser.add_argument("--kernels", metavar="FILE.wasm", type=Path, help=built)
    own = "models that get a page each, which runs them: folders or .gguf files (needs selfattn-models)"
    parser.add_argument("--model", metavar="MODEL", type=Path, nargs="+", default=[], help=own)
    parser.add_argument("--open", action="store_true", help="show the start page in a browser")


def _run_pages(options: argparse.Namespace) -> int:
    kernels = options.kernels or packaged_kernels()
    start = views.write_pages(options.folder, lang=options.lang, kernels=kernels, packs=_packs(options.model))
    if kernels is None:
        streams.tell(
            f"selfattn pages: wrote all pages but the live ones: {NO_KERNELS}, or give --kernels FILE.wasm"
        )
    _announce("pages", start, options.open)
    return 0


def _packs(models: Sequence[Path]) -> dict[str, bytes]:
    """Return the packs of models by names that files can have."""
    found: dict[str, bytes] = {}
    for path in models:
        name = re.sub(r"[^\w.-]+", "-", os.path.basename(os.path.abspath(path)).removesuffix(".gguf"))
        if name in found:
            raise UsageError(f"two models have the name {name}")
        packed = load_plugin("pages.model", "selfattn pages --model")
        found[name] = packed(path, name)
        streams.tell(f"selfattn pages: {path}: a pack of {len(found[name]) / 1e6:.1f} MB")
    return found


def add_out(parser: Parser, default: str) -> None:
    """Add ``--lang``, ``--out`` and ``--open``."""
    parser.add_argument("--lang", choices=PLURALS, default="en", help="the language of the page; default: en")
    what = f"where to write; - is standard output; default: {default}"
    parser.add_argument("--out", metavar="FILE", type=streams.target, help=what)
    parser.add_argument("--open", action="store_true", help="show the page in a browser")


def check_out(options: argparse.Namespace) -> None:
    """Refuse ``--open`` without a file."""
    if options.open and options.out == streams.DASH:
        raise UsageError("--open needs a file; --out - writes none")


def _default_file(name: str, mark: bytes, kind: str) -> Path:
    """Return the path of a name; refuse an existing file without the mark of a page of that kind."""
    path = Path(name)
    if os.path.lexists(path) and not _disk.has_mark(path, mark):
        raise FileExistsError(f"{path} exists and is not {kind}; --out chooses another file")
    return path


def written(command: str, page: Document, options: argparse.Namespace, *default: Any, at: str = "") -> int:
    """Save a page where ``--out`` says, or as the ``default`` that :func:`_default_file` takes.

    Show it, in a browser ``at`` a place, and return the exit code.
    """
    path = None
    if options.out != streams.DASH:
        path = page.save(options.out or _default_file(*default))
    _show(command, page, path, options.open, at)
    return 0


def _show(command: str, page: Document, path: Path | None, in_browser: bool, at: str = "") -> None:
    """Print where a page has been saved, and open it; without a path, print the page."""
    if path is None:
        streams.write(streams.DASH, page.html.encode())
    else:
        _announce(command, path, in_browser, at)


def _announce(command: str, path: Path, in_browser: bool, at: str = "") -> None:
    print(path)
    if in_browser and not webbrowser.open(path.resolve().as_uri() + at):
        streams.tell(f"selfattn {command}: there is no browser; open {path} yourself")


#: The description of a command that writes a page.
WHAT = "Write a page that shows {}: one HTML file that needs\nno network."
COMMANDS = {
    "steps": Command(
        WHAT.format("every number of every step of attention"), STEPS_EPILOG, _add_steps, _run_steps
    ),
    "pages": Command(
        "Write all pages and a start page, index.html, for a web server or a\nUSB stick: every link is relative.",
        EXIT_CODES,
        _add_pages,
        _run_pages,
    ),
}
