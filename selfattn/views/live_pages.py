"""Live pages: they compute with the core's kernels, in WebAssembly.

A build of the package has the kernels for them, as `make -C csrc wasm-library` builds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from selfattn import _disk
from selfattn.views.document import POLICY, Document, drawn_by_script
from selfattn.views.language import VIEWS, fill, in_language
from selfattn.views.texts import PLAYGROUND, TRAINING
from selfattn.views.writing import text

MOST_RIBBONS = 40  # tokens whose ribbons are drawn
KERNELS = Path(__file__).with_name("data") / "selfattn.wasm"  # setup.py writes it, where Clang can build it
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


def live_page(
    kind: type[LivePage],
    name: str,
    texts: Mapping[str, str],
    kernels: Kernels,
    lang: str,
    data: Mapping[str, Any],
    package: str = VIEWS,
) -> Document:
    """Return the page ``sa-name``, whose script gets its captions, the kernels and ``data``.

    ``package`` has its languages.
    """
    captions = in_language(texts, lang, package)
    without = f"<noscript><p>{text(captions['no script'])}</p></noscript>"
    sentence = captions["built from" if kernels.commit == "unknown" else "built from commit"]
    built = fill(sentence, lang, version=kernels.version, commit=kernels.commit)
    given = {"captions": captions, "built": built, **data}
    body = drawn_by_script(f"sa-{name}", lang, captions["title"], without, given, kernels.wasm)
    return kind(captions["title"], body, "", lang)


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


#: The live pages by the names of their files, in the order of the start page.
LIVE_PAGES: dict[str, Callable[[Kernels, str], Document]] = {
    "training": _training,
    "playground": _playground,
}


def live_pages(kernels: Kernels, lang: str) -> Iterator[tuple[str, Document]]:
    """Yield the live pages of a language by the names of their files."""
    for name, page in LIVE_PAGES.items():
        yield name, page(kernels, lang)
