"""What the doors for texts share: their model, given as a folder or as what ``models.load`` returned."""

from __future__ import annotations

import os
from typing import Any

from selfattn import models, nn
from selfattn.models._text_encoder import TextEncoder


def as_encoder(given: Any) -> Any:
    """Return an encoder of texts, loaded if it is a folder."""
    model = models.load(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(model, TextEncoder | nn.EmbeddingModel):
        raise TypeError(f"{given} is a {type(model).__name__}, which makes no embeddings of texts")
    return model
