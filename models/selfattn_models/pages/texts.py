"""Every sentence and label of these pages by its name, from `languages/en.json` here and of selfattn's pages."""

from __future__ import annotations

from selfattn.views.language import read
from selfattn.views.texts import LIVE, MODELS, TOOLS

PACKAGE = "selfattn_models.pages"  # which has the files of these pages
_ENGLISH = read("en", PACKAGE)
EXPLORER: dict[str, str] = TOOLS | MODELS | _ENGLISH["explorer"]
MAP: dict[str, str] = TOOLS | _ENGLISH["map"]
START: dict[str, str] = _ENGLISH["start"]
ENCODER: dict[str, str] = EXPLORER | LIVE | _ENGLISH["encoder"]


def own(*names: str) -> tuple[str, ...]:
    """Return names of files of this package, as the styles and scripts of a `Document` have them."""
    return tuple(f"{PACKAGE}:{name}" for name in names)
