"""Standard streams and files of a command, whether closed, full, not a terminal, or of any encoding; ``-`` is a stream.

If a standard descriptor is closed when a program starts, the next file that it opens gets this descriptor, and would
then get what is printed. So closed descriptors are opened on the null device first.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from selfattn import _disk
from selfattn.text import is_text

DASH = "-"
_OF_MODELS = (
    "config.json",
    "*_config.json",
    "config_*.json",
    "modules.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "*.gguf",
    "options.json",
)


class _StandardOutput:
    """The standard output that the program was started with."""

    closed = False


def prepare() -> None:
    """Make the three standard streams usable, also if they were closed when the program started."""
    _StandardOutput.closed = _is_closed(sys.stdout)
    if not all(map(_is_open, range(3))):
        while (null := os.open(os.devnull, os.O_RDWR)) < 3:  # a new file gets the lowest free number
            pass
        os.close(null)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if _is_closed(getattr(sys, name)):
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="replace"))  # noqa: SIM115
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # for characters that a terminal cannot show
        if sys.platform == "win32":  # which would write in a code page, and \r\n
            reconfigure(encoding="utf-8", newline="\n")


# The control characters of C0 and C1 but a tab and the end of a line, and those that turn the direction of a text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Write control characters as Python does in quotes: a terminal would obey them, and the text may be anyone's."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class _Visible:
    """A stream to which control characters are written visibly.

    On standard error a return to the line's begin stays at the begin of a text: progress bars write that there.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        returns = text[: len(text) - len(text.lstrip("\r"))] if self is sys.stderr else ""
        self.stream.write(returns + visible(text[len(returns) :]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def made_visible() -> Iterator[None]:
    """Make control characters visible in what goes to standard error, and to standard output if it is a terminal.

    What is piped stays as it is.
    """
    with contextlib.ExitStack() as changes:
        if is_terminal(sys.stdout):
            changes.enter_context(contextlib.redirect_stdout(_Visible(sys.stdout)))
        changes.enter_context(contextlib.redirect_stderr(_Visible(sys.stderr)))
        yield


def with_colours() -> contextlib.AbstractContextManager[Any]:
    """Let the package's own codes of colours through to standard output; for output without others' text."""
    return contextlib.redirect_stdout(sys.stdout.stream if isinstance(sys.stdout, _Visible) else sys.stdout)


def _is_closed(stream: Any) -> bool:
    return stream is None or bool(getattr(stream, "closed", False))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def results() -> Any:
    """Return standard output, for the results of a command; an OSError if it was closed when the program started."""
    if _StandardOutput.closed:
        raise OSError(errno.EBADF, "standard output is closed, and the result would be lost")
    return sys.stdout


def abandon(stream: Any) -> None:
    """Drop output that cannot be written, to a closed pipe or a full disk.

    Python would complain at exit, or exit with 120.
    """
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, AttributeError, ValueError):  # a stream without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def tell(message: str) -> None:
    """Write a line to standard error, if that is possible."""
    with contextlib.suppress(OSError, ValueError):  # full, or closed
        print(message, file=sys.stderr, flush=True)


def fail(program: str, error: BaseException) -> int:
    """Write an error to standard error; return the exit code."""
    tell(f"{program}: error: {str(error) or type(error).__name__}")  # a MemoryError may have no message
    return 1


@contextlib.contextmanager
def saved_at_the_end(save: Callable[[], None], out: Path) -> Iterator[None]:
    """Save what a training has made when it ends, or when Ctrl-C has ended it, which is then told."""
    from selfattn.training import Interrupted  # imports the models

    try:
        yield
    except Interrupted:
        save()
        tell(f"\nstopped; the model as it is now is in {out}, and --resume continues the training")
        raise
    save()


def is_terminal(stream: Any) -> bool:
    """Tell whether a stream, which may be any object with a write method, is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None, a minimal stream, or a closed one
        return False


class Input:
    """Standard input as a file of bytes; it may be any stream of text."""

    def read(self) -> bytes:
        """Read standard input to its end."""
        stream = getattr(sys.stdin, "buffer", None)
        return sys.stdin.read().encode() if stream is None else bytes(stream.read())

    def __str__(self) -> str:
        return "standard input"


def lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty, each at once.

    Another program may be waiting for the answer.

    A line that is not UTF-8 is a ValueError.
    """
    stream = getattr(sys.stdin, "buffer", None)
    for number, line in enumerate(sys.stdin if stream is None else stream, 1):
        try:
            text = line if isinstance(line, str) else line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            where = f"byte 0x{line[error.start]:02x} in line {number}"
            raise ValueError(f"standard input is not UTF-8: {where}") from None
        yield from (part for part in map(str.strip, text.replace("\r", "\n").split("\n")) if part)


def source(file: str) -> str | Input:
    """Return the file to read: a path, or standard input for ``-``. A path without a file is a FileNotFoundError."""
    if file != DASH and not os.path.exists(file):
        raise FileNotFoundError(f"there is no file {file}; expected a UTF-8 text, or - for standard input")
    return Input() if file == DASH else file


def read(file: str | os.PathLike[str]) -> bytes:
    """Read a file, or standard input."""
    return Input().read() if os.fspath(file) == DASH else _disk.read_input(Path(file))


def write(file: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, which appears whole or not at all, or standard output; a pipe or a device is written into."""
    if os.fspath(file) == DASH:
        stream = results()
        stream.flush()
        if isinstance(getattr(stream, "buffer", None), io.FileIO):  # unbuffered: a write may be partial
            with os.fdopen(os.dup(stream.fileno()), "wb") as buffered:
                buffered.write(content)
        elif hasattr(stream, "buffer"):
            stream.buffer.write(content)
            stream.buffer.flush()
        else:
            stream.write(content.decode("utf-8", "backslashreplace"))
        return
    _disk.write_file(Path(file), content)


def target(text: str) -> str:
    """Take a file to write; return ``-`` for any name of standard output, such as ``/dev/stdout``."""
    if not text:
        raise argparse.ArgumentTypeError("must be the name of a file, or - for standard output, not ''")
    if text.endswith(("/", os.sep)):
        raise argparse.ArgumentTypeError(f"must be a file, and {text!r} is the name of a folder")
    return DASH if _disk.descriptor_of(text) == 1 and text != DASH else text


def folder(text: str) -> Path:
    """Take the name of a folder, which is empty if it comes from a shell's unset variable."""
    if not text:
        raise argparse.ArgumentTypeError("must be the name of a folder, not ''")
    return Path(text)


def sentence(text: str) -> str:
    """Take an argument as text; in a locale of ASCII, other bytes arrive as halves of surrogate pairs."""
    if is_text(text):
        return text
    given: bytes | str = text
    with contextlib.suppress(UnicodeError):
        given = os.fsencode(text)  # fails if the text is not from a command line
        return given.decode()
    raise argparse.ArgumentTypeError(f"must be UTF-8, not {given!r}")


def check_not_of(model: str | os.PathLike[str], file: str | os.PathLike[str] | None) -> None:
    """Refuse to overwrite a model that is read: a ValueError if the file is the model, or a file of its folder."""
    place, model = Path(file or ""), Path(model)
    if file is None or not place.is_file():
        return
    inside = model.is_dir() and model.resolve() in place.resolve().parents
    if is_same(place, model) or (inside and any(fnmatch(place.name, name) for name in _OF_MODELS)):
        raise ValueError(f"--out {file} would replace a part of the model")


def check(file: str | os.PathLike[str] | None) -> None:
    """Check before the work that :func:`write` will be possible; else an OSError says why."""
    if file is None:
        return
    if os.fspath(file) == DASH:
        results()
        return
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has the name of the file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    place = Path(os.path.realpath(path))  # the target of a link is written
    if not place.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(place.parent))
    for written in [place] * place.exists() + [place.parent] * (not _disk.is_special(path)):
        if not os.access(written, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write", str(written))


def is_same(one: str | os.PathLike[str], other: str | os.PathLike[str] | None) -> bool:
    """Tell whether two names are of one existing file."""
    try:
        return other is not None and os.path.samefile(one, other) and Path(one).is_file()
    except OSError:
        return False
