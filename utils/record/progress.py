"""How far a run is, in lines of the log, where no terminal draws a bar."""

import logging
import sys
import time
from typing import Any

from utils.observers import EpochRecord, Observer

SAID_EVERY = 10  # seconds


class Pulse:
    """Says when a line is due: every few seconds, and never where a terminal shows a bar."""

    def __init__(self):
        self.is_wanted, self.last = not sys.stderr.isatty(), time.monotonic()

    def restart(self) -> None:
        """Begin to wait anew."""
        self.last = time.monotonic()

    def is_due(self) -> bool:
        """Return whether it is time, and begin to wait anew if so."""
        if not self.is_wanted or time.monotonic() - self.last < SAID_EVERY:
            return False
        self.restart()
        return True


class Progress(Observer):
    """Lines such as `iteration 40 of 600, loss 0.31, 120 samples/s, 5 min left`; the time is that of training alone."""

    def __init__(self):
        self.pulse, self.loss = Pulse(), ""
        self.mark: tuple[int, float] | None = None  # the iteration that a stretch of training begins after, and when
        self.iteration = 0  # done; 0 before this process has done one
        self.validated = 0  # batches of the validation in progress

    def begin(self, run: Any) -> None:
        """Read how long the run is."""
        self.config, data = run.job.config, run.job.data
        self.validation_batches = len(data.valid_loader) * (1 if self.config.ema_decay is None else 2)

    def step_is_known(self, record: dict[str, Any]) -> None:
        """Keep a loss for the next line."""
        self.loss = f", loss {record['loss']:.4g}"

    def before_step(self, left: int) -> None:
        """Begin a stretch of training where a validation has ended one."""
        if self.mark is None and self.iteration:
            self._begin()

    def after_step(self, iteration: int, left: int) -> None:
        """Say how far the training is, if it is time."""
        self.iteration, config = iteration, self.config
        if self.mark is None:  # what is compiled in a first iteration tells nothing of those to come
            self._begin()
        elif self.pulse.is_due():
            (before, then), now = self.mark, time.monotonic()
            speed, self.mark = (iteration - before) / (now - then), (iteration, now)
            done, todo = (
                config.mean_steps(range(*part)) for part in ((before, iteration), (iteration, config.num_iters))
            )
            logging.info(
                "iteration %d of %d%s, %.4g samples/s, %s left",
                *(iteration, config.num_iters, self.loss, speed * config.global_batch_size),
                in_words((config.num_iters - iteration) / speed * todo / done),
            )

    def _begin(self) -> None:
        self.mark = self.iteration, time.monotonic()
        self.pulse.restart()

    def after_validation_batch(self, iteration: int) -> None:
        """Say how far the validation is, if it is time."""
        self.validated += 1
        if self.pulse.is_due():
            logging.info("validation: %d of %d batches", self.validated, self.validation_batches)

    def after_first_validation(self, record: EpochRecord, example: tuple) -> None:
        """Begin anew, as after an epoch."""
        self.after_epoch(record, example)

    def after_epoch(self, record: EpochRecord, example: tuple) -> None:
        """Begin anew: a validation is no training."""
        self.mark, self.validated = None, 0


def in_words(seconds: float) -> str:
    """Return a time in its largest unit: 40 s, 5 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
