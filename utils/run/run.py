"""One run: where it stands, and whom it tells. What every run needs beside the lesson."""

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from utils.checkpoint.state import TrainingState
from utils.config.settings import Config
from utils.data.batches import Batch
from utils.data.dataset import Job
from utils.data.fields import Fields
from utils.device import peak_memory_gb
from utils.errors import Ended
from utils.measure.clock import EpochClock, profiler_window
from utils.measure.layers import summarise
from utils.measure.memory import MemoryWatch
from utils.measure.profiles import Profiles
from utils.measure.rates import Rates
from utils.measure.verdict import out_of_memory
from utils.observers import EpochRecord, Observer
from utils.ranks.agree import all_ranks_agree
from utils.record.progress import Progress
from utils.record.steps import StepRecords
from utils.run.alike import check_alike
from utils.run.folder import RunFolder, open_run_folder
from utils.run.nonfinite import NonfiniteGuard
from utils.run.saving import NO_BEST, keepers_of, resume
from utils.spans import in_span, span


class Run:
    """Counts the iterations, and tells its observers of each step and each epoch.

    Losses stay on the device and travel to the host a few at a time: the loop never waits for the step in progress.

    Args:
        build_model: makes the model as it is on one device.
        name: the folder of the run that tells its size; `<ranks>GPU` by default.
        observers: are told after those that every run has.
    """

    def __init__(
        self,
        job: Job,
        build_model: Callable[[Config, Fields, torch.device], nn.Module],
        name: str | None = None,
        observers: Iterable[Observer] = (),
    ):
        self.job, self.build_model = job, build_model
        self.iteration = self.epochs = 0  # optimiser steps done; epochs, validation included
        self.losses: list[float] = []  # of the epoch in progress
        self.validates_first = False  # before the first step, and has still to do it
        self.steps = StepRecords(job.world.size)
        self.guard = NonfiniteGuard(job.config, job.data, self.log)
        self.observers: list[Observer] = []
        self.more_observers = observers
        self.logger = None  # a RunLogger, on rank 0
        self.memory: MemoryWatch | None = None
        check_alike(job)
        found: list[RunFolder | None] = [None]
        with all_ranks_agree():
            if job.world.rank == 0:
                # Matplotlib and TensorBoard: other ranks need not read them
                from utils.record.run_logger import RunLogger

                found[0], self.lock = open_run_folder(job.config, name or f"{job.world.size}GPU")
                self.logger = RunLogger(found[0].path, job)
        dist.broadcast_object_list(found)
        (self.found,) = found
        self.folder = self.found.path

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError) and self.memory:
            error.add_note(out_of_memory(self.job.world.rank, self.memory.in_use(), self.job.config))
        with contextlib.ExitStack() as files:  # closed whatever happens
            if self.logger:
                files.callback(self.lock.close)
                files.callback(self.logger.close_files, error)
            for observer in self.observers:
                observer.close(error)
            if kind is None:
                self.log("DONE ---- rank %d", self.job.world.rank)

    def log(self, message: str, *args: Any) -> None:
        """Log a line, on rank 0."""
        if self.logger:
            logging.info(message, *args)

    def begin(self, state: TrainingState, remarks: list[str]) -> None:
        """Describe the run, and set `state` to that of the checkpoint that it goes on from.

        Raises Ended where the run is finished already, and Refused where no checkpoint can be read.
        """
        self.state, newest, config = state, self.found.newest, self.job.config
        if newest and newest["is_finished"]:
            self.log("%s is finished: all %d iterations are done", self.folder, config.num_iters)
            raise Ended(0)
        for remark in (*remarks, *self.found.remarks):
            self.log(remark)
        if self.logger:
            self.logger.describe(state.model)
        resumed, best = resume(self, self.found) if self.found.checkpoints else (None, NO_BEST)
        self.validates_first = config.validate_first and not self.iteration
        with all_ranks_agree():
            if self.logger:
                self.logger.open_records(self.iteration, self.epochs, resumed)
        self.log("Scaffolding memory high watermark: %.3f GiB", peak_memory_gb(self.job.device))
        self.memory = MemoryWatch(state.model, state.optimizer, self.job.device, state.average)
        keepers = keepers_of(config, resumed, best)
        profiles = Profiles(lambda: summarise(self.build_model, config, self.job.data.fields))
        shown = [Progress(), *([Rates()] if "speed" in config.report else [])] if self.logger else []
        for observer in filter(None, (self.logger, *shown, self.guard, *keepers, profiles, *self.more_observers)):
            observer.begin(self)
            self.observers.append(observer)
        self.log("Starting Training Loop...")

    @property
    def left(self) -> int:
        """Iterations left in the epoch in progress."""
        end = min((self.epochs + 1) * len(self.job.data.train_loader), self.job.config.num_iters)
        return end - self.iteration

    @property
    def should_stop(self) -> bool:
        """Whether all iterations are done, and validated."""
        return self.epochs * len(self.job.data.train_loader) >= self.job.config.num_iters

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, or of what is left of it; then tell of its speed and loss."""
        if self.validates_first:  # there are none before that
            self.record, self.epoch_end = EpochRecord.before_training(self.memory.parts()), time.perf_counter()
            return
        loader, epoch, left = self.job.data.train_loader, self.epochs, self.left
        self.memory.looks = True
        clock, aside = EpochClock(), self._aside()
        bar = tqdm(total=left, desc=f"epoch {epoch + 1}", leave=False, disable=None if self.logger else True)
        with bar, profiler_window(epoch + 1, self.job.world.rank):
            reader = loader.epoch(epoch, self.iteration - epoch * len(loader))
            for batch in clock.batches(reader, left):
                for observer in self.observers:
                    observer.before_step(self.left)
                yield batch
                bar.update()
            self._tell_of_steps(self.steps.flush())
        clock.stop(self._aside() - aside)
        self.epoch_end = clock.end
        self.record = EpochRecord(
            epoch=epoch + 1,
            iteration=self.iteration,
            train_loss=statistics.fmean(self.losses or [math.nan]),
            # A run that was stopped between an epoch and its validation has no speed to tell.
            samples_per_sec=left * self.job.config.global_batch_size / clock.total if left else None,
            data_wait_frac=clock.wait_fraction if left else None,
            first_iteration_sec=clock.first_end - clock.start if left else None,
            memory_gb=self.memory.parts(),
            iterations=left,
            seconds=clock.total,
        )
        for observer in self.observers:
            observer.after_training(self.record)

    def _aside(self) -> float:
        """Return the seconds that observers took to look: they are no training."""
        return sum(observer.aside for observer in self.observers)

    def after_step(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Count an iteration, keep its loss (mean over this rank's samples) and gradient norm, save if it is time.

        Raises Ended, on all ranks after the same iteration, where a signal or the clock stops the run.
        """
        self.iteration += 1
        if self.state.average:
            with span("optimizer"):
                self.state.average.update(self.iteration)
        self._tell_of_steps(self.steps.keep(self.iteration, lr, loss, grad_norm))
        for observer in self.observers:
            observer.after_step(self.iteration, self.left)

    def settle(self) -> None:
        """Wait for what this rank and the others have under way to say to each other."""
        for observer in self.observers:
            observer.settle()

    def know_all_losses(self) -> None:
        """Wait for the losses up to here: a checkpoint counts when they are known to be finite."""
        self._tell_of_steps(self.steps.flush())

    @in_span("logging")
    def _tell_of_steps(self, records: list[dict[str, Any]]) -> None:
        """Tell of iterations whose losses have come to the host. Raises Refused, on all ranks, where one is the end."""
        for record in records:
            if math.isfinite(record["loss"]):
                self.losses.append(record["loss"])
            for observer in self.observers:
                observer.step_is_known(record)

    def weights(self) -> Iterator[str]:
        """Yield what to validate: `raw`, then `ema`, while the model has the average in place of its weights."""
        yield "raw"
        if self.state.average:
            with self.state.average.in_place():
                yield "ema"

    def validation_batches(self) -> Iterator[Batch]:
        """Yield all validation batches. A signal stops the run here, too: it will then validate when it is resumed."""
        with span("validation"):  # until the last batch is done
            for batch in self.job.data.valid_loader.epoch():
                yield batch
                for observer in self.observers:
                    observer.after_validation_batch(self.iteration)

    def after_epoch(self, validations: dict[str, tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]]) -> None:
        """Tell of a validation: of each kind of weights the scores, and an example (input, target, forecast)."""
        (scores, example), data, record = validations["raw"], self.job.data, self.record
        names, stds = data.fields.out_names, data.fields.stds[data.fields.outputs].tolist()
        record.validation_seconds = time.perf_counter() - self.epoch_end
        self.guard.check_validation(scores["loss"])
        reading = data.train_loader.samples_per_sec
        record.peak_memory_gb = peak_memory_gb(self.job.device)
        record.valid_samples_per_sec = scores["samples"] * len(validations) / record.validation_seconds
        record.loader_samples_per_sec = reading and reading * data.num_shards
        record.set_scores({kind: found for kind, (found, _) in validations.items()}, names, stds)
        is_first, self.validates_first = self.validates_first, False
        if not is_first:
            self.losses, self.epochs = [], self.epochs + 1
        for observer in self.observers:
            (observer.after_first_validation if is_first else observer.after_epoch)(record, example)
