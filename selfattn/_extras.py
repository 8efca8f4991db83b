"""Libraries that selfattn does without until somebody uses what needs them."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, extra: str | None) -> Any:
    """Import a module, or say which extra of selfattn brings it (None: it has to be installed by itself).

    Raises
    ------
    ImportError
        It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.partition(".")[0]
        wanted = package if extra is None else f"selfattn[{extra}]"
        raise ImportError(f"this needs {package}, which is not installed: pip install '{wanted}'") from None
