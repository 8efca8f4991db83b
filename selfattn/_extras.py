"""Optional libraries, which are imported when they are first needed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SECONDS = 5  # between lines
MODELS_MISSING = (
    "{name} is in the package selfattn-models, which is not installed: pip install selfattn-models "
    "(in a clone of the repository: pip install ./models)"
)
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
    """Return a bar of tqdm.

    If it would not be seen, a line every few seconds has what is done, the rate and what remains.
    """
    tqdm = import_extra("tqdm.auto", extra).tqdm
    unseen = {"file": _Lines(), "mininterval": SECONDS, "bar_format": STATE}
    return tqdm(*args, **settings, **({"dynamic_ncols": True} if bar_is_seen() else unseen))


@contextlib.contextmanager
def bar(progress: bool, total: int | None, name: str) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar if ``progress``; the function that this yields adds a number of texts to the bar."""
    if not progress:
        yield lambda count: None
        return
    with progress_bar(extra="text", total=total, desc=name, unit=" texts") as shown:
        yield shown.update


def bar_is_seen() -> bool:
    """Return whether a bar would be seen: on a terminal or in a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    try:
        return type(shell).__name__ == "ZMQInteractiveShell" or sys.stderr.isatty()
    except (AttributeError, ValueError):  # standard error is missing, as in a daemon, or closed
        return False


def import_extra(module: str, extra: str | None = None, *, package: str = "") -> Any:
    """Import a module; the ImportError says what to install.

    That is selfattn's extra, the package, or the module that is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:  # of the module, of one that it imports, or of a newer version
        missing = error.name or module
        wanted = f"selfattn[{extra}]" if extra else package or missing.partition(".")[0]
        raise ImportError(f"this needs {missing}, which is not installed: pip install '{wanted}'") from None


class _OtherName(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a submodule by the name that it had here as the module that it is.

    So ``selfattn.models.bert`` is no second copy.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name, self.module = name, module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a specification for a submodule of the module that has moved."""
        return ModuleSpec(name, self) if name.startswith(f"{self.name}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its own name."""
        found = importlib.import_module(self.module + spec.name.removeprefix(self.name))
        self.spec = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification again, which the import system has replaced; it has run already."""
        module.__spec__ = self.spec


def import_models(name: str, module: str) -> None:
    """Make the module ``name`` of selfattn another name of a module of the package selfattn-models.

    Its submodules become other names of that module's submodules.

    What has moved to that package keeps its name here. Without the package, the ImportError has the line that
    installs it.
    """
    sys.modules[name] = models_module(name, module)
    sys.meta_path.insert(0, _OtherName(name, module))


def named_in_models(module: str, name: str, moved: Mapping[str, str]) -> Any:
    """Return an attribute of a module that has moved: ``moved`` has the modules of selfattn-models by names."""
    if name not in moved:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(models_module(f"{module}.{name}", moved[name]), name)


def models_module(name: str, module: str) -> Any:
    """Import a module of the package selfattn-models; ``name`` is what the ImportError says is missing without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(MODELS_MISSING.format(name=name)) from None
