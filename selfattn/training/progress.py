"""What a training shows while it runs: lines, those of the tutorial for triplets, and a bar."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from selfattn._extras import progress_bar, seen

if TYPE_CHECKING:
    from selfattn.training.loop import Step, Training


class Progress:
    """Prints lines, and moves a bar if there is one.

    Parameters
    ----------
    training : Training
        At the place where it begins.
    bar : bool or None
        None means: where somebody sees it, if tqdm is installed.
    log_every : int or None
    epochs, steps : int or None
        After how many of them, of those from the start, the training ends.
    timed : bool
        Whether lines have the learning rate, the rate and the time that remains. Those of the tutorial have not.
    """

    def __init__(
        self,
        training: Training,
        bar: bool | None,
        log_every: int | None,
        epochs: int | None,
        steps: int | None,
        *,
        timed: bool,
    ) -> None:
        self.log_every, self.timed, self.endless = log_every, timed, training.source.endless
        self.start = len(training.history.step_losses)
        of_epochs = None if epochs is None or training.steps is None else epochs * training.steps
        known = [number for number in (steps, of_epochs) if number is not None]
        self.total = max(min(known), self.start) if known else None
        self.began = time.monotonic()
        self.bar: Any = None
        if bar or (bar is None and find_spec("tqdm") is not None and seen()):
            self.bar = progress_bar(
                extra="text", total=self.total, initial=self.start, unit="step", dynamic_ncols=True
            )
        if log_every is not None and self.start:
            self._print(f"Going on after {_place(training)}")

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
            self._print(self._line(told))
        if told.average_loss is not None:
            self._print(f"--- Epoch {told.epoch} completed. Average Loss: {told.average_loss:.4f} ---")
        if told.validation_loss is not None:
            self._print(f"--- Validation after {told.number} steps. Loss: {told.validation_loss:.4f} ---")

    def _line(self, told: Step) -> str:
        whole = self.total if self.endless else told.steps
        parts = [f"Step [{told.step}/{whole}]" if whole else f"Step {told.step}", f"Loss: {told.loss:.4f}"]
        if not self.endless:
            parts.insert(0, f"Epoch [{told.epoch}/{told.epochs}]" if told.epochs else f"Epoch {told.epoch}")
        if self.timed:
            pace = (time.monotonic() - self.began) / (told.number - self.start)  # seconds a step
            parts += [f"LR: {told.lr:.4g}", f"{1 / pace:.3g} steps/s" if pace < 1 else f"{pace:.3g} s/step"]
            if self.total is not None:
                parts.append(f"{duration(pace * (self.total - told.number))} left")
        return ", ".join(parts)

    def _print(self, line: str) -> None:
        if self.bar is None or sys.stdout is None:
            print(line, flush=True)
        else:
            self.bar.write(line)  # above the bar


def _place(training: Training) -> str:
    done = training.step_of_epoch
    if training.source.endless:
        return f"step {done}"
    return f"epoch {training.epoch}, step {done}" if done else f"epoch {training.epoch}"


def duration(seconds: float) -> str:
    """Write a time as minutes and seconds, 1:05, or hours, minutes and seconds, 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
