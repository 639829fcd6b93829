"""How fast training and validation go, as series within epochs (`--report speed`)."""

import time
from typing import Any

from utils.observers import EpochRecord, Observer

STEPS, SECONDS = 50, 10.0  # a point after so many steps, or so long, whichever comes first; and at the end of an epoch


class Rates(Observer):
    """Writes a `rate` record for each stretch of steps, on rank 0, without what it took to look at them.

    A rate is that of all ranks together, by the host's clock: on a GPU the host may be some steps ahead.
    """

    def begin(self, run: Any) -> None:
        """Read how large batches are."""
        self.run, data = run, run.job.data
        self.training_batch = run.job.config.global_batch_size
        self.validation_batch = run.job.config.local_batch_size * data.num_shards
        self.validation_batches, self.validation_samples = len(data.valid_loader), len(data.valid_pairs)
        self.kind, self.steps, self.samples, self.mark = "", 0, 0, 0.0
        self.validated = 0  # batches of the validation in progress

    def before_step(self, left: int) -> None:
        """Begin a stretch with the first step of an epoch."""
        if self.kind != "training":
            self._begin("training")

    def after_step(self, iteration: int, left: int) -> None:
        """Count a training step."""
        self._count(self.training_batch, iteration, not left)

    def after_validation_batch(self, iteration: int) -> None:
        """Count a batch of a validation: of each kind of weights it is a series of its own."""
        if self.kind != "validation":  # nobody tells of its beginning: this batch is not counted
            self._begin("validation")
            self.validated = 1
        else:
            self.validated += 1
            left = self.validation_samples - (self.validated - 1) * self.validation_batch  # the last batch is filled up
            self._count(min(self.validation_batch, left), iteration, self.validated == self.validation_batches)
        if self.validated == self.validation_batches:
            self.kind = ""

    def after_epoch(self, record: EpochRecord, example: tuple) -> None:
        """End the series: pictures are drawn now."""
        self.kind = ""

    after_first_validation = after_epoch

    def _begin(self, kind: str) -> None:
        self.kind, self.steps, self.samples, self.mark = kind, 0, 0, self._now()

    def _now(self) -> float:
        return time.perf_counter() - sum(observer.aside for observer in self.run.observers)

    def _count(self, batch: int, iteration: int, is_last: bool) -> None:
        self.steps, self.samples = self.steps + 1, self.samples + batch
        seconds = self._now() - self.mark
        if self.steps >= STEPS or seconds >= SECONDS or is_last:
            rate = {f"{self.kind}_rate": self.samples / seconds}
            epoch = self.run.epochs + (self.kind == "training" or not self.run.validates_first)
            self.run.logger.costs({"event": "rate", "epoch": epoch, "iteration": iteration, **rate, "seconds": seconds})
            self._begin(self.kind)
