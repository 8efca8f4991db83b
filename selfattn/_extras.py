"""Libraries that selfattn does without until somebody uses what needs them."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class _Nowhere:
    """A stream for what nobody sees."""

    def write(self, text: str) -> None:
        """Forget it."""

    def flush(self) -> None:
        """Do nothing."""


def progress_bar(*args: Any, extra: str, **settings: Any) -> Any:
    """Make a bar of tqdm, also where there is no standard error, as for a daemon."""
    tqdm = import_extra("tqdm.auto", extra).tqdm
    return tqdm(*args, **settings, **({"file": _Nowhere()} if sys.stderr is None else {}))


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
