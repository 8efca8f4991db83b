"""Live pages: they compute with the core's kernels, in WebAssembly, which `make -C csrc wasm-library` builds for them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from selfattn.views.document import KIT, POLICY, Document, drawn_by_script
from selfattn.views.language import in_language
from selfattn.views.texts import PLAYGROUND
from selfattn.views.writing import text

INTERFACE = b"1"  # of csrc/wasm/api.c
_BUILT = re.compile(rb"selfattn kernels (\d+) of commit ([\w-]+)")


class Kernels(NamedTuple):
    """The core in WebAssembly, and the commit that it was built from."""

    wasm: bytes
    commit: str


def read_kernels(path: str | os.PathLike[str]) -> Kernels:
    """Read what ``make -C csrc wasm-library`` builds; another file, or one of another version, is a ValueError."""
    wasm = Path(path).read_bytes()
    built = _BUILT.search(wasm) if wasm.startswith(b"\0asm") else None
    if built is None:
        raise ValueError(f"{path} is not the core in WebAssembly, which make -C csrc wasm-library builds")
    if built[1] != INTERFACE:
        raise ValueError(
            f"{path} belongs to another version of selfattn: build it again, with make -C csrc wasm-library"
        )
    return Kernels(wasm, built[2].decode())


@dataclass(frozen=True, repr=False)
class LivePage(Document):
    """A page that computes in a worker, of its own script, and may fetch a model from its own site."""

    policy: ClassVar[str] = (
        POLICY.replace("script-src", "script-src 'wasm-unsafe-eval'")
        + "; worker-src blob:; connect-src 'self'"
    )
    live: ClassVar[tuple[str, ...]] = (*KIT, "kit/heat.js", "live/kernel.js", "live/worker.js")


@dataclass(frozen=True, repr=False)
class _Playground(LivePage):
    styles: ClassVar[tuple[str, ...]] = ("live/playground.css",)
    scripts: ClassVar[tuple[str, ...]] = (*LivePage.live, "own_words.js", "live/playground.js")


def _playground(kernels: Kernels, lang: str) -> Document:
    captions = in_language(PLAYGROUND, lang)
    without = f"<noscript><p>{text(captions['no script'])}</p></noscript>"
    data = {"captions": captions, "commit": kernels.commit}
    return _Playground(
        captions["title"],
        drawn_by_script("sa-playground", lang, captions["title"], without, data, kernels.wasm),
        "",
        lang,
    )


#: The live pages by the names of their files, in the order of the start page.
LIVE_PAGES: dict[str, Callable[[Kernels, str], Document]] = {"playground": _playground}


def live_pages(kernels: Kernels, lang: str) -> Iterator[tuple[str, Document]]:
    """Yield the live pages of a language by the names of their files."""
    for name, page in LIVE_PAGES.items():
        yield name, page(kernels, lang)
