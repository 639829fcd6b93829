"""One run: where it stands, and what it records. What every run needs beside the lesson."""

import contextlib
import dataclasses
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from utils import checkpoint
from utils.checkpoint import Unreadable
from utils.config import Config
from utils.data_loader import Batch
from utils.errors import Ended, Refused
from utils.launch import World, all_ranks_agree, share_error
from utils.model_summary import summarise
from utils.nonfinite import NonfiniteGuard
from utils.observers import Observers
from utils.profiling import EpochClock, MemoryWatch, peak_memory_gb, profiler_window
from utils.records import StepRecords
from utils.run_folder import RunFolder, open_run_folder
from utils.saving import Saving
from utils.timeline import span
from utils.training_state import TrainingState
from utils.verdict import out_of_memory
from utils.weather_data import WeatherData


class Run:
    """Counts the iterations and keeps the records; has checkpoints saved, and says when to stop.

    Losses stay on the device and travel to the host a few at a time: the loop never waits for the step in progress.

    Args:
        build_model: makes of configuration and data the model as it is on one device.
        name: the folder of the run that tells its size; `<ranks>GPU` by default.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        data: WeatherData,
        build_model: Callable[[Config, WeatherData], nn.Module],
        name: str | None = None,
    ):
        self.config, self.world, self.device, self.data = config, world, device, data
        self.layers = summarise(build_model, config, data)
        self.iteration = 0  # optimiser steps done
        self.epochs = 0  # epochs done, validation included
        self.steps = StepRecords(world.size)
        self.epoch_losses: list[float] = []
        self.guard = NonfiniteGuard(config, data, self.log)
        self.is_first_epoch = True  # of this process
        self.report = None  # a Report, on rank 0
        self.saving: Saving | None = None
        self.memory: MemoryWatch | None = None
        self.observers: Observers | None = None
        found: list[RunFolder | None] = [None]
        with all_ranks_agree():
            if world.rank == 0:
                from utils.report import Report  # Matplotlib and TensorBoard: thousands of ranks need not read them

                found[0], self.lock = open_run_folder(config, name or f"{world.size}GPU")
                self.report = Report(found[0].path, config, world, device, data, self.layers[0].flops)
        dist.broadcast_object_list(found)
        (self.found,) = found
        self.folder = self.found.path

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        together = kind is None or issubclass(kind, (Ended, Refused))  # all ranks leave here
        if isinstance(error, torch.OutOfMemoryError) and self.memory:
            error.add_note(out_of_memory(self.world.rank, self.memory.in_use(), self.config))
        if self.saving and together:
            self.saving.close()
        with contextlib.ExitStack() as files:  # closed whatever happens
            if self.report:
                files.callback(self.lock.close)
                files.callback(self.report.close, error)
                if kind is None:
                    self.report.result()
            if self.observers:
                self.observers.close(self.iteration, error)
            if kind is None:
                self.log("DONE ---- rank %d", self.world.rank)

    def log(self, message: str, *args: Any) -> None:
        """Log a line, on rank 0."""
        if self.report:
            logging.info(message, *args)

    def begin(self, state: TrainingState, remarks: list[str]) -> None:
        """Describe the run, and set `state` to that of the checkpoint that it goes on from.

        Raises Ended where the run is finished already, and Refused where no checkpoint can be read.
        """
        self.state, newest = state, self.found.newest
        if newest and newest["is_finished"]:
            self.log("%s is finished: all %d iterations are done", self.folder, self.config.num_iters)
            raise Ended(0)
        for remark in (*remarks, *self.found.remarks):
            self.log(remark)
        if self.report:
            self.report.describe(state.model)
        resumed, best = self._resume() if self.found.checkpoints else (None, {"loss": None, "name": None})
        with all_ranks_agree():
            if self.report:
                there = checkpoint.find(self.folder / "checkpoints")
                # Those after it no longer count: said before the records of these iterations are cut.
                checkpoint.set_aside(path for path in there if resumed and path.name > resumed.name)
                self.report.open_records(self.iteration, self.epochs)
                if resumed:
                    self.report.write({"event": "resume", "iteration": self.iteration, "checkpoint": str(resumed)})
        if self.config.checkpoint_every is not None:
            sync = self.report.sync if self.report else None
            self.saving = Saving(
                self.config, self.world, self.folder, state, resumed, best, self._describe, sync, self.log
            )  # fmt: skip
        self.log("Scaffolding memory high watermark: %f GB.", peak_memory_gb(self.device))
        self.memory = MemoryWatch(state.model, state.optimizer, self.device, state.average)
        self.observers = Observers(
            self.config, self.world, self.device, self.data, state.model, self.memory, self.layers, self.iteration,
            self.folder, self.report, self._settle,
        )  # fmt: skip

    def _resume(self) -> tuple[Path, dict[str, Any]]:
        """Take the state from the newest checkpoint that can be read; return its folder, and which was the best."""
        for path, info in self.found.checkpoints:
            if info is None:
                continue
            if info["train_samples"] != len(self.data.train_pairs):
                share_error(
                    f"{self.folder} was trained on {info['train_samples']} samples, and now there are "
                    f"{len(self.data.train_pairs)}: give the same data, or start another run with --resume none"
                )
            try:
                self.state.load(path, same_ranks=info["layout"] == self._layout())
            except Unreadable as error:  # on all ranks
                self.log("Checkpoint left out: %s", error)
                continue
            self.iteration, self.epochs = info["iteration"], info["epochs"]
            self.epoch_losses, self.guard.skipped = info["epoch_losses"], info["skipped"]
            if info["config"]["amp_mode"] == self.config.amp_mode and info["scaler"]:
                self.state.scaler.load_state_dict(info["scaler"])
            self.log("Resumed after %d iterations from %s", self.iteration, path)
            return path, info["best"]
        raise Refused(f"no checkpoint of {self.folder} can be read (out.log says why): start anew with --resume none")

    def _settle(self) -> None:
        if self.saving:
            self.saving.requests.settle()

    def _layout(self) -> dict[str, Any]:
        """Return what decides which rank does what."""
        names = ("tensor_parallel", "context_parallel", "parallel_order", "sequence_parallel")
        return {"ranks": self.world.size, **{name: getattr(self.config, name) for name in names}}

    @property
    def left(self) -> int:
        """Iterations left in the epoch in progress."""
        end = min((self.epochs + 1) * len(self.data.train_loader), self.config.num_iters)
        return end - self.iteration

    @property
    def should_stop(self) -> bool:
        """Whether all iterations are done, and validated."""
        return self.epochs * len(self.data.train_loader) >= self.config.num_iters

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, or of what is left of it; then report its speed and loss."""
        loader, epoch, left = self.data.train_loader, self.epochs, self.left
        self.memory.look_again()
        clock, watched = EpochClock(), self.observers.seconds
        bar = tqdm(total=left, desc=f"epoch {epoch + 1}", leave=False, disable=None if self.report else True)
        with bar, profiler_window(epoch + 1, self.world.rank):
            reader = loader.epoch(epoch, self.iteration - epoch * len(loader))
            for done, batch in enumerate(clock.batches(reader, left), 1):
                with self.observers.step(is_last=done == left):
                    yield batch
                bar.update()
            self._write_steps(self.steps.flush())
        clock.stop(self.observers.seconds - watched)
        self.epoch_end = clock.end
        self.summary = {
            "event": "epoch",
            "epoch": epoch + 1,
            "iteration": self.iteration,
            "train_loss": statistics.fmean(self.epoch_losses or [math.nan]),
            # A run that was stopped between an epoch and its validation has no speed to tell.
            "samples_per_sec": left * self.config.global_batch_size / clock.total if left else None,
            "data_wait_frac": clock.wait_fraction if left else None,
            "first_iteration_sec": clock.first_end - clock.start if left else None,
            "memory_gb": self.memory.parts(),
        }
        if self.report:
            self.report.speed(self.summary, clock.total, left, self.memory.after_forward)
        if self.is_first_epoch and left:  # what compiles did so in its first iteration
            first = clock.first_end - clock.start
            rest = (clock.total - first) / max(left - 1, 1)
            self.log("  First iteration: %f sec, those after it: %f sec each", first, rest)
            self.is_first_epoch = False

    def after_step(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Count an iteration, keep its loss (mean over this rank's samples) and gradient norm, save if it is time.

        Raises Ended, on all ranks after the same iteration, where a signal or the clock stops the run.
        """
        self.iteration += 1
        if self.state.average:
            with span("optimizer"):
                self.state.average.update(self.iteration)
        self._write_steps(self.steps.keep(self.iteration, lr, loss, grad_norm))
        if self.saving:
            self.saving.after_step(self.iteration, is_last=self.left == 0)

    def weights(self) -> Iterator[str]:
        """Yield what to validate: `raw`, then `ema`, while the model has the average in place of its weights."""
        yield "raw"
        if self.state.average:
            with self.state.average.in_place():
                yield "ema"

    def validation_batches(self) -> Iterator[Batch]:
        """Yield all validation batches. A signal stops the run here, too: it will then validate when it is resumed."""
        with span("validation"):  # until the last batch is done
            for batch in self.data.valid_loader.epoch():
                yield batch
                if self.saving:
                    self.saving.stop_if_asked(self.iteration)

    def _describe(self) -> dict[str, Any]:
        """Return what a checkpoint says of the run, after all losses up to here are known to be finite."""
        self._write_steps(self.steps.flush())
        if self.report:
            self.report.send()  # a run that goes on from here has no more of them
        config = self.config
        return {
            "iteration": self.iteration,
            "epochs": self.epochs,
            "samples": self.iteration * config.global_batch_size,
            "is_validated": self.iteration == min(self.epochs * len(self.data.train_loader), config.num_iters),
            "is_finished": self.should_stop,
            "epoch_losses": list(self.epoch_losses),  # it grows while this is written
            "skipped": self.guard.skipped,
            "scaler": self.state.scaler.state_dict(),
            "layout": self._layout(),
            "train_samples": len(self.data.train_pairs),
            "data": self.data.description,
            "config": dataclasses.asdict(config),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }

    @span("logging")
    def _write_steps(self, steps: list[dict[str, Any]]) -> None:
        """Write the records of iterations. Raises Refused, on all ranks, where training broke down."""
        for step in steps:
            if self.report:
                self.report.step(step)
            if math.isfinite(step["loss"]):
                self.epoch_losses.append(step["loss"])
            self.guard.check_step(step["iteration"], step["loss"], step["grad_norm"])

    def after_epoch(self, validations: dict[str, tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]]) -> None:
        """Record a validation: of each kind of weights the scores, and an example (input, target, forecast).

        The best checkpoint is that of the lowest loss with the weights as they are.
        """
        scores, example = validations["raw"]
        duration = time.perf_counter() - self.epoch_end
        self.guard.check_validation(scores["loss"])
        if self.report:
            self.summary["peak_memory_gb"] = peak_memory_gb(self.device)
            self.summary["valid_samples_per_sec"] = scores["samples"] * len(validations) / duration
            reading = self.data.train_loader.samples_per_sec
            self.summary["loader_samples_per_sec"] = reading and reading * self.data.num_shards
            averaged = validations["ema"][0] if "ema" in validations else None
            self.report.validation(self.summary, scores, example, duration, averaged)
        self.epoch_losses = []
        self.epochs += 1
        told = [scores["loss"]]
        with span("logging"):  # the others wait for rank 0, which draws
            dist.broadcast_object_list(told)  # its last digit may differ from rank to rank, and all must save alike
        if self.saving:
            self.saving.after_validation(self.iteration, told[0], self.should_stop)
        self.observers.record(self.iteration)
