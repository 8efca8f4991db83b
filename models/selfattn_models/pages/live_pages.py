"""Live pages of models: an encoder and a language model, which compute in the browser with the core's kernels."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar

import numpy as np

from selfattn import files, nn
from selfattn.text import WhitespaceTokenizer
from selfattn.tutorials import embedding_model, load
from selfattn.views.document import Document
from selfattn.views.gpt import PROMPT, page_gpt
from selfattn.views.language import VIEWS
from selfattn.views.live_pages import MOST_RIBBONS, Kernels, LivePage, live_page
from selfattn_models.pages.texts import ENCODER, LANGUAGE_MODEL, PACKAGE, own


@dataclass(frozen=True, repr=False)
class _Encoder(LivePage):
    styles: ClassVar[tuple[str, ...]] = own("explorer.css", "live/encoder.css")
    scripts: ClassVar[tuple[str, ...]] = own("live/encoder_page.js")


def _encoder(kernels: Kernels, lang: str) -> Document:
    data = {
        "toy": {name: base64.b64encode(content).decode() for name, content in _toy().items()},
        "sentences": load("sentence_embeddings")["sentences"],
        "ribbons": MOST_RIBBONS,
        "site": "encoder.zip",
        "code": 'models.save(models.load("all-MiniLM-L6-v2", dtype="int8"), "minilm-int8")',
    }
    return live_page(_Encoder, "encoder", ENCODER, kernels, lang, data, PACKAGE)


@dataclass(frozen=True, repr=False)
class _LanguageModel(LivePage):
    styles: ClassVar[tuple[str, ...]] = own("explorer.css", "live/language.css")
    scripts: ClassVar[tuple[str, ...]] = own("live/language_page.js")


def _language_model(kernels: Kernels, lang: str) -> Document:
    model, alphabet = page_gpt()
    letters = resources.files(VIEWS).joinpath("data", "gpt.npz").read_bytes()
    settings = {
        "alphabet": list(alphabet),
        "heads": model.num_heads,
        "layers": model.num_layers,
        "context": model.max_seq_len,
        "eps": getattr(model.norm, "eps", 1e-5),
        "activation": "gelu",
    }
    data = {
        "letters": base64.b64encode(letters).decode(),
        "settings": settings,
        "prompt": PROMPT,
        "ribbons": MOST_RIBBONS,
    }
    return live_page(_LanguageModel, "language", LANGUAGE_MODEL, kernels, lang, data, PACKAGE)


def _toy() -> dict[str, bytes]:
    """Return the files of the second tutorial's model with two heads.

    The model knows the tutorial's words and has zeros for others.
    """
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
}


def live_pages(kernels: Kernels, lang: str) -> Iterator[tuple[str, Document]]:
    """Yield the live pages of a language by the names of their files."""
    for name, page in LIVE_PAGES.items():
        yield name, page(kernels, lang)
