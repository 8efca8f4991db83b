"""Ctrl-C that waits until something has been done as a whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DelayedInterrupt:
    """Within it the first Ctrl-C only asks; the second does not wait. Who asks finds it in ``requested``.

    Signals reach the main thread alone; handlers of others stay.

    Parameters
    ----------
    raises : bool, default False
        Whether leaving raises the KeyboardInterrupt that was asked for.
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
