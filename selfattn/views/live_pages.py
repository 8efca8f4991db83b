"""Live pages: they compute with the core's kernels, in WebAssembly.

A build of the package has the kernels for them, as `make -C csrc wasm-library` builds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from selfattn import _disk
from selfattn.views.document import POLICY, Document, drawn_by_script
from selfattn.views.gpt import PROMPT, given_gpt, next_letters
from selfattn.views.language import VIEWS, fill, in_language
from selfattn.views.packs import gpt_pack, pack_data
from selfattn.views.texts import GPT_TEXTS, PLAYGROUND, TOUR, TRAINING
from selfattn.views.writing import text

if TYPE_CHECKING:
    from selfattn.nn.gpt import GPT

MOST_RIBBONS = 40  # tokens whose ribbons are drawn
KERNELS = Path(__file__).with_name("data") / "selfattn.wasm"  # setup.py writes it, where Clang can build it
NO_KERNELS = (
    "this build of selfattn has no core in WebAssembly; install clang-14, lld-14, wasi-libc and "
    "libclang-rt-14-dev-wasm32 and build it again"
)
INTERFACE = b"2"  # of csrc/wasm/api.c
_BUILT = re.compile(rb"selfattn kernels (\d+) of (?:(\S+), )?commit ([\w-]+)")


class Kernels(NamedTuple):
    """The core in WebAssembly, and the version and the commit that it was built from."""

    wasm: bytes
    version: str
    commit: str  # "unknown" if it was built outside a checkout


def packaged_kernels() -> Path | None:
    """Return the path of the core in WebAssembly that this build of the package has; None if it has none."""
    return KERNELS if KERNELS.is_file() else None


def read_kernels(path: str | os.PathLike[str]) -> Kernels:
    """Read what ``make -C csrc wasm-library`` builds; another file, or one of another version, is a ValueError."""
    wasm = _disk.read(Path(path))
    built = _BUILT.search(wasm) if wasm.startswith(b"\0asm") else None
    if built is None:
        raise ValueError(f"{path} is not the core in WebAssembly, which make -C csrc wasm-library builds")
    if built[1] != INTERFACE:
        raise ValueError(
            f"{path} belongs to another version of selfattn: build it again, with make -C csrc wasm-library"
        )
    return Kernels(wasm, built[2].decode(), built[3].decode())


@dataclass(frozen=True, repr=False)
class LivePage(Document):
    """A page that computes in a worker, of its own script, and may fetch a model from its own site."""

    policy: ClassVar[str] = (
        POLICY.replace("script-src", "script-src 'wasm-unsafe-eval'")
        + "; worker-src blob:; connect-src 'self'"
    )


_Page = TypeVar("_Page", bound=LivePage)


def live_page(
    kind: type[_Page],
    name: str,
    texts: Mapping[str, str],
    kernels: Kernels,
    lang: str,
    data: Mapping[str, Any],
    package: str = VIEWS,
    svg: str = "",
) -> _Page:
    """Return the page ``sa-name``, of a ``kind``, whose script gets its captions, the kernels and ``data``.

    ``package`` has its languages.
    """
    captions = in_language(texts, lang, package)
    without = f"<noscript><p>{text(captions['no script'])}</p></noscript>"
    sentence = captions["built from" if kernels.commit == "unknown" else "built from commit"]
    built = fill(sentence, lang, version=kernels.version, commit=kernels.commit)
    given = {"captions": captions, "built": built, **data}
    body = drawn_by_script(f"sa-{name}", lang, captions["title"], without, given, kernels.wasm)
    return kind(captions["title"], body, svg, lang)


@dataclass(frozen=True, repr=False)
class _Playground(LivePage):
    styles: ClassVar[tuple[str, ...]] = ("live/playground.css",)
    scripts: ClassVar[tuple[str, ...]] = ("live/playground.js",)


def _playground(kernels: Kernels, lang: str) -> Document:
    return live_page(_Playground, "playground", PLAYGROUND, kernels, lang, {})


@dataclass(frozen=True, repr=False)
class _Training(LivePage):
    styles: ClassVar[tuple[str, ...]] = ("live/training.css",)
    scripts: ClassVar[tuple[str, ...]] = ("live/training_page.js",)


def _training(kernels: Kernels, lang: str) -> Document:
    settings = {"heads": 4, "layers": 2, "width": 64, "context": 64, "eps": 1e-5, "activation": "gelu"}
    data = {"settings": settings, "ribbons": MOST_RIBBONS}
    return live_page(_Training, "training", TRAINING, kernels, lang, data)


@dataclass(frozen=True, repr=False)
class GPTPage(LivePage):
    """The page of :func:`gpt_page`: shows itself in a notebook; ``page.save(path)`` writes a file."""

    styles: ClassVar[tuple[str, ...]] = ("live/gpt.css",)
    scripts: ClassVar[tuple[str, ...]] = ("live/gpt.js",)


def gpt_page(
    model: GPT | str | os.PathLike[str] | None = None,
    alphabet: Sequence[str] | None = None,
    prompt: str = PROMPT,
    *,
    lang: str = "en",
) -> GPTPage:
    """Run a GPT inside a page.

    Type a prompt, see which letters every head attends to and which letter comes next, and change the model.

    Heads can be switched off and weights changed; the text that the model writes changes with them. The core in
    WebAssembly computes, without a network.

    Parameters
    ----------
    model : nn.GPT or path, optional
        Of float32, with at most a million parameters; or the folder that ``selfattn train gpt`` wrote. None: the
        character model of the package.
    alphabet : sequence of str, optional
        The letter, or the piece of text, of each id. A model that is not in a folder needs it.
    prompt : str
        The first text of the page.
    lang : {"en", "de", "fr"}
        The language of the page; the model writes what it was trained to write.

    Returns
    -------
    GPTPage

    Raises
    ------
    TypeError
        The model is not an nn.GPT.
    ValueError
        A model that the page does not compute, an alphabet of another size, or a prompt with other letters.
    FileNotFoundError
        This build of the package has no core in WebAssembly.

    Examples
    --------
    >>> page = gpt_page(prompt="the lord is ")  # doctest: +SKIP
    >>> page.save("gpt.html")  # doctest: +SKIP
    """
    found = given_gpt(model, alphabet, prompt)
    if (core := packaged_kernels()) is None:
        raise FileNotFoundError(f"gpt_page needs the core in WebAssembly: {NO_KERNELS}")
    return gpt_document(*found, prompt, read_kernels(core), lang)


def gpt_document(
    model: GPT, alphabet: list[str], ids: list[int], prompt: str, kernels: Kernels, lang: str
) -> GPTPage:
    """Return the page of a GPT, its letters and the ids of a prompt, which :func:`given_gpt` has checked."""
    captions = in_language(GPT_TEXTS, lang)
    svg = next_letters(model, ids, alphabet, captions["title"], captions["picture"])
    pack = pack_data("", gpt_pack(model, alphabet))
    return language_page(GPTPage, pack, prompt, kernels, lang, svg)


def language_page(
    kind: type[GPTPage], pack: Mapping[str, Any], prompt: str, kernels: Kernels, lang: str, svg: str = ""
) -> GPTPage:
    """Return the page of a language model's pack, which :func:`packs.pack_data` has made data."""
    data = {**pack, "prompt": prompt, "tour": in_language(TOUR, lang)}
    return live_page(kind, "gpt", GPT_TEXTS, kernels, lang, data, svg=svg)


def _gpt(kernels: Kernels, lang: str) -> Document:
    return gpt_document(*given_gpt(None, None, PROMPT), PROMPT, kernels, lang)


#: The live pages by the names of their files, in the order of the start page.
LIVE_PAGES: dict[str, Callable[[Kernels, str], Document]] = {
    "gpt": _gpt,
    "training": _training,
    "playground": _playground,
}


def live_pages(kernels: Kernels, lang: str) -> Iterator[tuple[str, Document]]:
    """Yield the live pages of a language by the names of their files."""
    for name, page in LIVE_PAGES.items():
        yield name, page(kernels, lang)
