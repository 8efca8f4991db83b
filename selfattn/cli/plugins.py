"""Commands of other packages, which they name in the entry-point group ``selfattn.commands``.

``train.gpt`` is ``selfattn train gpt``; ``train.from``, ``info.file`` and ``pages.model`` are what commands of the core
do with an option.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from selfattn._extras import MODELS_MISSING

#: The commands of the package selfattn-models, which `app` names where that package is not installed.
IN_MODELS = ("chat", "embed", "evaluate", "explore", "generate", "index", "map", "search", "train.gpt")


def plugins() -> dict[str, EntryPoint]:
    """Return the entry points by name; of two with one name the first counts."""
    return {each.name: each for each in reversed(tuple(entry_points(group="selfattn.commands")))}


def load_plugin(name: str, what: str) -> Any:
    """Load what another package calls ``name``.

    Without it the ImportError says which package has ``what``, and how to install it.
    """
    found = plugins().get(name)
    if found is None:
        raise ImportError(MODELS_MISSING.format(name=what))
    return found.load()
