"""Live pages: they compute with the core's kernels, in WebAssembly, which `make -C csrc wasm-library` builds for them."""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from selfattn import files, nn
from selfattn.text import WhitespaceTokenizer
from selfattn.tutorials import embedding_model, load
from selfattn.views.document import KIT, POLICY, Document, drawn_by_script
from selfattn.views.explore import MOST_RIBBONS
from selfattn.views.gpt import PROMPT, page_gpt
from selfattn.views.language import in_language
from selfattn.views.texts import ENCODER, LANGUAGE_MODEL, PLAYGROUND, TRAINING
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


def _live_page(
    kind: type[LivePage],
    name: str,
    texts: Mapping[str, str],
    kernels: Kernels,
    lang: str,
    data: Mapping[str, Any],
) -> Document:
    """Return the page ``sa-name``, whose script gets its captions, the kernels and ``data``."""
    captions = in_language(texts, lang)
    without = f"<noscript><p>{text(captions['no script'])}</p></noscript>"
    given = {"captions": captions, "commit": kernels.commit, **data}
    body = drawn_by_script(f"sa-{name}", lang, captions["title"], without, given, kernels.wasm)
    return kind(captions["title"], body, "", lang)


@dataclass(frozen=True, repr=False)
class _Playground(LivePage):
    styles: ClassVar[tuple[str, ...]] = ("live/playground.css",)
    scripts: ClassVar[tuple[str, ...]] = (*LivePage.live, "own_words.js", "live/playground.js")


def _playground(kernels: Kernels, lang: str) -> Document:
    return _live_page(_Playground, "playground", PLAYGROUND, kernels, lang, {})


@dataclass(frozen=True, repr=False)
class _Encoder(LivePage):
    styles: ClassVar[tuple[str, ...]] = ("explorer.css", "live/encoder.css")
    scripts: ClassVar[tuple[str, ...]] = (
        *LivePage.live, "kit/ribbons.js", "explorer_parts.js", "explorer_off.js", "explorer.js",
        *(f"live/{name}.js" for name in ("readers", "tokenizers", "encoder", "explorer", "encoder_page")),
    )  # fmt: skip


def _encoder(kernels: Kernels, lang: str) -> Document:
    data = {
        "toy": {name: base64.b64encode(content).decode() for name, content in _toy().items()},
        "sentences": load("sentence_embeddings")["sentences"],
        "ribbons": MOST_RIBBONS,
        "site": "encoder.zip",
        "code": 'models.save(models.load("all-MiniLM-L6-v2", dtype="int8"), "minilm-int8")',
    }
    return _live_page(_Encoder, "encoder", ENCODER, kernels, lang, data)


@dataclass(frozen=True, repr=False)
class _LanguageModel(LivePage):
    styles: ClassVar[tuple[str, ...]] = ("explorer.css", "live/language.css")
    scripts: ClassVar[tuple[str, ...]] = (
        *_Encoder.scripts[:-1],
        "live/language_model.js",
        "live/language_page.js",
    )


def _language_model(kernels: Kernels, lang: str) -> Document:
    model, alphabet = page_gpt()
    letters = resources.files("selfattn.views").joinpath("data", "gpt.npz").read_bytes()
    settings = {
        "alphabet": list(alphabet), "heads": model.num_heads, "layers": model.num_layers, "context": model.max_seq_len,
        "eps": getattr(model.norm, "eps", 1e-5), "activation": "gelu",
    }  # fmt: skip
    data = {
        "letters": base64.b64encode(letters).decode(), "settings": settings, "prompt": PROMPT, "ribbons": MOST_RIBBONS,
    }  # fmt: skip
    return _live_page(_LanguageModel, "language", LANGUAGE_MODEL, kernels, lang, data)


@dataclass(frozen=True, repr=False)
class _Training(LivePage):
    styles: ClassVar[tuple[str, ...]] = ("explorer.css", "live/language.css")
    scripts: ClassVar[tuple[str, ...]] = (
        *_LanguageModel.scripts[:-1],
        "live/training.js",
        "live/training_page.js",
    )


def _training(kernels: Kernels, lang: str) -> Document:
    settings = {"heads": 4, "layers": 2, "width": 64, "context": 64, "eps": 1e-5, "activation": "gelu"}
    data = {"settings": settings, "ribbons": MOST_RIBBONS}
    return _live_page(_Training, "training", TRAINING, kernels, lang, data)


def _toy() -> dict[str, bytes]:
    """Return the files of the second tutorial's model with two heads, which knows the tutorial's words and has zeros for others."""
    state = embedding_model("two_heads", np.float32).state_dict()
    name, words = "embedding_layer.weight", ["<unk>", *load("sentence_embeddings")["words"]]
    state[name] = np.vstack([np.zeros_like(state[name][:1]), state[name]])
    model = nn.EmbeddingModel(
        WhitespaceTokenizer(words), len(words), state[name].shape[1], max_seq_len=16, num_heads=2
    )
    model.load_state_dict(state)
    with tempfile.TemporaryDirectory() as folder:
        files.save_model(model, folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


#: The live pages by the names of their files, in the order of the start page.
LIVE_PAGES: dict[str, Callable[[Kernels, str], Document]] = {
    "encoder": _encoder,
    "language_model": _language_model,
    "training": _training,
    "playground": _playground,
}


def live_pages(kernels: Kernels, lang: str) -> Iterator[tuple[str, Document]]:
    """Yield the live pages of a language by the names of their files."""
    for name, page in LIVE_PAGES.items():
        yield name, page(kernels, lang)
