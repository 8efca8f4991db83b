"""Optional libraries, which are imported when they are first needed."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 5  # between lines
STATE = "{desc}: {n_fmt} of {total_fmt}{unit}, {rate_fmt}, {remaining} left{postfix}"


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


class _Lines(_Log):
    """The log for a bar that nobody would see: each state is a line."""

    last = ""

    def write(self, text: str) -> None:
        """Write what a bar writes, which begins by returning to the start of its line."""
        state = text.strip()
        if state and state.partition(",")[0] != self.last:  # tqdm may show a state twice
            self.last = state.partition(",")[0]
            super().write(f"{state}\n")


def progress_bar(*args: Any, extra: str, **settings: Any) -> Any:
    """Return a bar of tqdm; if it would not be seen, a line every few seconds has what is done, the rate and what remains."""
    tqdm = import_extra("tqdm.auto", extra).tqdm
    unseen = {"file": _Lines(), "mininterval": SECONDS, "bar_format": STATE}
    return tqdm(*args, **settings, **({"dynamic_ncols": True} if seen() else unseen))


@contextlib.contextmanager
def bar(progress: bool, total: int | None, name: str) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar if ``progress``; the function that this yields adds a number of texts to the bar."""
    if not progress:
        yield lambda count: None
        return
    with progress_bar(extra="models", total=total, desc=name, unit=" texts") as shown:
        yield shown.update


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
