"""Libraries that selfattn does without until somebody uses what needs them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any


class _Log:
    """Standard error that forgets what it cannot take: there is none, its disk is full, its reader is gone."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write it or forget it."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.write(text)

    def flush(self) -> None:
        """Write what has been kept or leave it."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


def progress_bar(*args: Any, extra: str, **settings: Any) -> Any:
    """Make a bar of tqdm, which ends no work where it cannot be written; on terminals and in notebooks tqdm sees to that itself."""
    tqdm = import_extra("tqdm.auto", extra).tqdm
    return tqdm(*args, **settings, **({} if seen() else {"file": _Log()}))


def seen() -> bool:
    """Tell whether a bar would be seen: on a terminal or in a notebook."""
    notebook = (
        "IPython" in sys.modules
        and type(sys.modules["IPython"].get_ipython()).__name__ == "ZMQInteractiveShell"
    )
    try:
        return notebook or sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, as for a daemon; it knows no better, or is closed
        return False


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
