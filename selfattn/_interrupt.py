"""Ctrl-C that waits until a block of code has ended."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DelayedInterrupt:
    """Within the block the first Ctrl-C only sets ``requested``; the second raises at once.

    With ``raises`` the end of the block raises the KeyboardInterrupt. Signals reach only the main thread; a handler
    that the program has set stays.
    """

    def __init__(self, raises: bool = False) -> None:
        self.requested = False
        self._raises = raises
        self._before: Any = None

    def __enter__(self) -> DelayedInterrupt:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.default_int_handler(number, frame)
        self.requested = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.requested and self._raises:
            raise KeyboardInterrupt
