"""The progress of a training: printed lines, which for triplets are as in the tutorial, and a bar."""

from __future__ import annotations

import logging
import sys
import time
from importlib.util import find_spec
from typing import Any

from selfattn._extras import bar_is_seen, progress_bar
from selfattn.training.state import Step, TrainingState

logger = logging.getLogger("selfattn.training")


class Progress:
    """Prints and logs lines every ``log_every`` steps, and moves a bar.

    ``bar`` None shows one on a terminal or in a notebook, if tqdm is installed. Lines of triplets, those of the
    tutorial, are without the learning rate, the rate of steps and the time that remains.
    """

    def __init__(self, training: TrainingState, bar: bool | None, log_every: int | None) -> None:
        self.log_every, self.endless = log_every, training.source.endless
        self.timed, epochs = not training.objective.of_triplets, training.epochs
        self.start = len(training.history.step_losses)
        per_epoch = training.steps_per_epoch
        of_epochs = None if epochs is None or per_epoch is None else epochs * per_epoch
        known = [number for number in (training.total_steps, of_epochs) if number is not None]
        self.total = max(min(known), self.start) if known else None
        self.began = time.monotonic()
        self.bar: Any = None
        if bar or (bar is None and find_spec("tqdm") is not None and bar_is_seen()):
            self.bar = progress_bar(
                extra="text", total=self.total, initial=self.start, desc="train", unit=" steps"
            )
        if log_every is not None and self.start:
            done = training.steps_of_epoch
            place = f"step {done}" if self.endless else f"epoch {training.epoch}"
            place += f", step {done}" if done and not self.endless else ""
            self._print(f"Continuing after {place}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, step: Step) -> None:
        """Show a step."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {step.loss:.4f}", refresh=False)
            self.bar.update()
        if self.log_every is None:
            return
        if step.step % self.log_every == 0:
            self._print(self._line(step))
        if step.average_loss is not None:
            self._print(f"--- Epoch {step.epoch} completed. Average Loss: {step.average_loss:.4f} ---")
        if step.validation_loss is not None:
            self._print(f"--- Validation after {step.number} steps. Loss: {step.validation_loss:.4f} ---")
        if step.score is not None:
            self._print(f"--- Evaluation after {step.number} steps. Score: {step.score:.4f} ---")

    def _line(self, step: Step) -> str:
        total = self.total if self.endless else step.steps
        parts = [f"Step [{step.step}/{total}]" if total else f"Step {step.step}", f"Loss: {step.loss:.4f}"]
        if not self.endless:
            parts.insert(0, f"Epoch [{step.epoch}/{step.epochs}]" if step.epochs else f"Epoch {step.epoch}")
        if self.timed:
            pace = (time.monotonic() - self.began) / (step.number - self.start)  # seconds per step
            parts += [f"LR: {step.lr:.4g}", f"{1 / pace:.3g} steps/s" if pace < 1 else f"{pace:.3g} s/step"]
            if self.total is not None:
                parts.append(f"{duration(pace * (self.total - step.number))} left")
        return ", ".join(parts)

    def _print(self, line: str) -> None:
        logger.info(line)
        if self.bar is None or sys.stdout is None:
            print(line, flush=True)
        else:
            self.bar.write(line)  # above the bar


def duration(seconds: float) -> str:
    """Write a time as minutes and seconds, 1:05, or hours, minutes and seconds, 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
