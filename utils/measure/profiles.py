"""The clocks of `--report`, and the traces of `--profile torch`: what looks at a run while it trains."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from utils.device import synchronize
from utils.errors import Ended, Refused, harmless
from utils.measure.costs import RunCosts
from utils.measure.first_profile import use_profiler_once
from utils.measure.layers import Layer
from utils.measure.module_times import ObserverTimes
from utils.measure.step_profile import StepProfiler
from utils.measure.traces import TorchProfile
from utils.observers import EpochRecord, Observer
from utils.spans import span


class Profiles(Observer):
    """Those that the configuration asks for. What goes wrong here is a warning, and training goes on.

    Args:
        layers: returns those of the model as it would be on one device.
    """

    def __init__(self, layers: Callable[[], list[Layer]]):
        self.layers = layers
        self.steps = 0  # of this process
        self.costs: RunCosts | None = None
        self.trace: TorchProfile | None = None
        self.is_profiled = self.is_profiling = False
        self.mark: float | None = None  # when the last step was done; None at the beginning of an epoch

    def begin(self, run: Any) -> None:
        """Begin to look, by `run.memory` at the tensors that last."""
        self.config, self.device, self.logger, self.settle_all = run.job.config, run.job.device, run.logger, run.settle
        self.run, config = run, self.config
        # Recorded steps are other steps: where the run is long enough, one of those.
        left = config.num_iters - run.iteration
        self.earliest = config.graph_warmup + 1 if left > config.graph_warmup + 1 else 1
        if config.report or config.profile == "torch":
            with harmless("the profiler"):
                use_profiler_once(self.device)
        if config.report:
            layers = self.layers() if "model" in config.report else []
            self.costs = RunCosts(run.job, run.state.model, layers, run.iteration, run.logger)
            trace = self.logger and self.costs.folder / "step_trace.json"
            self.profiler = StepProfiler(self.device, run.memory.tensors, trace, run.state.model)
        if config.profile == "torch" and (self.logger or config.profile_ranks == "all"):
            with harmless("--profile torch"):
                steps, rank = tuple(config.profile_steps), run.job.world.rank
                place, stacks = run.folder / "profile", config.profile_stacks
                self.trace = TorchProfile(place, rank, self.device, steps, run.memory.tensors, stacks)

    def before_step(self, left: int) -> None:
        """Let the report look closely at the last step of an epoch."""
        if self.steps == 0 and self.costs and self.costs.wants("time"):
            self.costs.observers = ObserverTimes(self.run.observers)
        self.is_profiling = left == 1 and self._wants_profile()
        if self.is_profiling:
            synchronize(self.device)  # what a GPU has still to do is training
            with self._aside():
                with harmless("the profile of a step"):
                    self.profiler.start()
                dist.barrier()  # no rank shall seem to be slow because its profiler was
            self.mark = time.perf_counter()

    def after_step(self, iteration: int, left: int) -> None:
        """End the profile of the step, and count it for the traces."""
        self.steps += 1
        if self.costs:
            self.costs.time.step_is_done()
        if self.is_profiling:
            self.is_profiled, self.is_profiling, found = True, False, None
            synchronize(self.device)
            took = time.perf_counter() - self.mark
            with self._aside():
                self.settle_all()
                if self.profiler.is_on:
                    with harmless("the profile of a step"):
                        found = self.profiler.stop()
                self.costs.keep(found, took)
        elif self.costs and self.mark is not None:
            self.costs.usual.append(time.perf_counter() - self.mark)
        last = sum(self.config.profile_steps)
        if self.config.profile == "torch" and self.steps <= last:
            if self.steps == last:  # not before: a trace shows how steps overlap
                synchronize(self.device)
            with self._aside():
                if self.steps == last:
                    self.settle_all()
                if self.trace:
                    with harmless("--profile torch"):
                        self.trace.step()
                if self.steps == last:
                    dist.barrier()  # the others wait here for those that write, and nowhere else
        self.mark = time.perf_counter() if left else None

    def _wants_profile(self) -> bool:
        """Whether to profile this step: the same on all ranks. The first one of a process compiles."""
        is_wanted = self.costs is not None and self.costs.wants("time", "memory", "operators")
        if not is_wanted or self.is_profiled or self.steps < self.earliest:
            return False
        return self.config.profile != "torch" or self.steps >= sum(self.config.profile_steps)  # one at a time

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Take the time of what is no training."""
        begin = time.perf_counter()
        with span("profiling"):
            yield
        self.aside += time.perf_counter() - begin

    def after_epoch(self, record: EpochRecord, example: tuple) -> None:
        """Record what was used since the last record."""
        if self.costs:
            with span("logging"):  # the others wait for rank 0, which draws
                dist.barrier()
            self._record()

    def _record(self) -> None:
        iteration, length = self.run.iteration, len(self.run.job.data.train_loader)
        self.costs.record(max(-(-iteration // length), 1), iteration)

    def close(self, error: BaseException | None) -> None:
        """End all. Where all ranks leave together, at the end or on the way, rank 0 shows what was found."""
        if not (error is None or isinstance(error, Ended | Refused)):
            if self.costs:
                self.costs.close()
            return  # a device that failed is not asked, and other ranks may be gone
        if self.trace:
            with harmless("--profile torch"):
                self.trace.close()
        if self.costs:
            with harmless("the profile of a step"):
                self.profiler.close()
            if error is not None:
                self._record()
            self.costs.close()
            if self.logger:
                with harmless("the report"):
                    self.costs.show()
