"""Live pages of models, which compute in the browser: an encoder, and a language model in the page of a GPT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from selfattn import nn
from selfattn.text import WhitespaceTokenizer
from selfattn.tutorials import embedding_model, load
from selfattn.views.document import Document
from selfattn.views.gpt import PROMPT, page_gpt
from selfattn.views.live_pages import (
    MOST_RIBBONS,
    GPTPage,
    Kernels,
    LivePage,
    language_page,
    live_page,
)
from selfattn.views.packs import gpt_pack, kind_of, pack_data
from selfattn_models.packs import packed
from selfattn_models.pages.texts import ENCODER, PACKAGE, own

COMMAND = "selfattn pages DIR --model {}"  # makes the page of a model


@dataclass(frozen=True, repr=False)
class _Encoder(LivePage):
    styles: ClassVar[tuple[str, ...]] = own("explorer.css", "live/encoder.css")
    scripts: ClassVar[tuple[str, ...]] = own("live/encoder_page.js")


def _encoder(kernels: Kernels, lang: str, name: str = "", pack: bytes = b"") -> Document:
    data = {
        **_data(packed(_toy(), ""), name, pack),
        "sentences": load("sentence_embeddings")["sentences"],
        "ribbons": MOST_RIBBONS,
        "code": COMMAND.format("all-MiniLM-L6-v2"),
    }
    return live_page(_Encoder, "encoder", ENCODER, kernels, lang, data, PACKAGE)


@dataclass(frozen=True, repr=False)
class _GPT(GPTPage):
    scripts: ClassVar[tuple[str, ...]] = own("live/language_page.js")


def _gpt(kernels: Kernels, lang: str, name: str = "", pack: bytes = b"") -> Document:
    return language_page(_GPT, _data(gpt_pack(*page_gpt()), name, pack), PROMPT, kernels, lang)


def _data(own: bytes, name: str, pack: bytes) -> dict[str, Any]:
    """Return a page's own pack, or a model's; the page has its own one while it fetches the model's."""
    return pack_data("", own) | (pack_data(name, pack) if pack else {})


def _toy() -> nn.EmbeddingModel:
    """Return the second tutorial's model with two heads; it knows the tutorial's words and has zeros for others."""
    state = embedding_model("two_heads", np.float32).state_dict()
    name, words = "embedding_layer.weight", ["<unk>", *load("sentence_embeddings")["words"]]
    state[name] = np.vstack([np.zeros_like(state[name][:1]), state[name]])
    model = nn.EmbeddingModel(
        WhitespaceTokenizer(words), len(words), state[name].shape[1], max_seq_len=16, num_heads=2
    )
    model.load_state_dict(state)
    return model


#: The live pages by the names of their files, in the order of the start page.
LIVE_PAGES: dict[str, Callable[..., Document]] = {
    "encoder": _encoder,
    "gpt": _gpt,
}


def live_pages(kernels: Kernels, lang: str) -> Iterator[tuple[str, Document]]:
    """Yield the live pages of a language by the names of their files."""
    for name, page in LIVE_PAGES.items():
        yield name, page(kernels, lang)


def pack_page(kernels: Kernels, lang: str, name: str, pack: bytes) -> Document:
    """Return the page of a pack of a name: inside, or next to the page."""
    page = _encoder if kind_of(pack) == "encoder" else _gpt
    return page(kernels, lang, name, pack)
