"""Optional libraries, which are imported when they are first needed."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any


class _Log:
    """Standard error that ignores errors: it is missing or closed, its disk is full, its reader has ended."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write a text, and ignore errors."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush, and ignore errors."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


def progress_bar(*args: Any, extra: str, **settings: Any) -> Any:
    """Return a bar of tqdm that ignores errors of writing; on terminals and in notebooks tqdm ignores them."""
    tqdm = import_extra("tqdm.auto", extra).tqdm
    return tqdm(*args, **settings, **({} if seen() else {"file": _Log()}))


def seen() -> bool:
    """Return whether a bar would be seen: on a terminal or in a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    try:
        return type(shell).__name__ == "ZMQInteractiveShell" or sys.stderr.isatty()
    except (AttributeError, ValueError):  # standard error is missing, as in a daemon, or closed
        return False


def import_extra(module: str, extra: str | None) -> Any:
    """Import a module; the ImportError names what is missing, and selfattn's extra with it, or its package for None."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:  # of the module, of one that it imports, or of a newer version
        missing = error.name or module
        wanted = missing.partition(".")[0] if extra is None else f"selfattn[{extra}]"
        raise ImportError(f"this needs {missing}, which is not installed: pip install '{wanted}'") from None
