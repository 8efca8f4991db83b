"""What a training shows while it runs: the tutorial's lines, and a bar."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from selfattn._extras import import_extra

if TYPE_CHECKING:
    from selfattn.training.loop import Step


class Progress:
    """Prints lines, and moves a bar if there is one.

    Parameters
    ----------
    bar : bool or None
        None means: where somebody sees it, if tqdm is installed.
    log_every : int or None
    epochs, steps : int
    epoch, done_steps : int
        Where the training begins.
    """

    def __init__(
        self, bar: bool | None, log_every: int | None, epochs: int, steps: int, epoch: int, done_steps: int
    ) -> None:
        self.log_every = log_every
        self.bar: Any = None
        if bar or (bar is None and find_spec("tqdm") is not None and seen()):
            tqdm = import_extra("tqdm.auto", "text").tqdm
            start = epoch * steps + done_steps
            self.bar = tqdm(total=max(epochs * steps, start), initial=start, unit="step", dynamic_ncols=True)
        if log_every is not None and (epoch or done_steps):
            self._print(
                f"Going on after epoch {epoch}, step {done_steps}"
                if done_steps
                else f"Going on after epoch {epoch}"
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self, told: Step) -> None:
        """Show one step."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {told.loss:.4f}", refresh=False)
            self.bar.update()
        if self.log_every is None:
            return
        if told.step % self.log_every == 0:
            self._print(
                f"Epoch [{told.epoch}/{told.epochs}], Step [{told.step}/{told.steps}], Loss: {told.loss:.4f}"
            )
        if told.average_loss is not None:
            self._print(f"--- Epoch {told.epoch} completed. Average Loss: {told.average_loss:.4f} ---")

    def _print(self, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.write(line)  # above the bar


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
