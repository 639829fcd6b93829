"""What looks at a run while it trains: the clocks of `--report`, and the traces of `--profile torch`."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from utils.config import Config
from utils.errors import Ended, Refused, harmless
from utils.launch import World
from utils.model_summary import Layer
from utils.profiling import MemoryWatch, synchronize
from utils.run_costs import RunCosts
from utils.step_profile import StepProfiler, activities
from utils.timeline import span
from utils.torch_profile import TorchProfile
from utils.weather_data import WeatherData


class Observers:
    """Those that the configuration asks for. All ranks call the same methods.

    What goes wrong here is a warning, and training goes on.

    Args:
        memory: knows the tensors that last.
        layers: those of the model as it would be on one device.
        iteration: iterations done so far.
        folder: of the run.
        report: on rank 0, what writes the run's files.
        settle: waits for the collectives under way; called before a profiler stops.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        data: WeatherData,
        model: nn.Module,
        memory: MemoryWatch,
        layers: list[Layer],
        iteration: int,
        folder: Path,
        report: Any | None,
        settle: Callable[[], None],
    ):
        self.config, self.device, self.report, self.settle = config, device, report, settle
        self.steps, self.seconds = 0, 0.0  # of this process; and what it took to look at them
        self.epoch_length = len(data.train_loader)
        self.costs: RunCosts | None = None
        self.trace: TorchProfile | None = None
        # Recorded steps are other steps: where the run is long enough, one of those.
        left = config.num_iters - iteration
        self.earliest = config.graph_warmup + 1 if left > config.graph_warmup + 1 else 1
        self.is_profiled = False
        if device.type == "cuda" and (config.report or config.profile == "torch"):
            # A graph that is recorded before the profiler first runs may crash under it (pytorch issue 75504).
            with harmless("the profiler"), profile(activities=activities(device)):
                pass
        if config.report:
            self.costs = RunCosts(config, world, device, data, model, layers, iteration, report)
            self.profiler = StepProfiler(device, memory.tensors, report and self.costs.folder / "step_trace.json")
        if config.profile == "torch" and (report or config.profile_ranks == "all"):
            with harmless("--profile torch"):
                steps = tuple(config.profile_steps)
                self.trace = TorchProfile(folder / "profile", world.rank, device, steps, memory.tensors)

    @contextlib.contextmanager
    def step(self, is_last: bool) -> Iterator[None]:
        """Look at the step in this block; the report looks closely at the last one of an epoch."""
        is_profiled = is_last and self._wants_profile()
        if is_profiled:
            synchronize(self.device)  # what a GPU has still to do is training
            with self._aside():
                with harmless("the profile of a step"):
                    self.profiler.start()
                dist.barrier()  # no rank shall seem to be slow because its profiler was
        yield
        self.steps += 1
        if self.costs:
            self.costs.time.step_is_done()
        if is_profiled:
            self.is_profiled, found = True, None
            synchronize(self.device)
            with self._aside():
                self.settle()
                if self.profiler.is_on:
                    with harmless("the profile of a step"):
                        found = self.profiler.stop()
                self.costs.keep(found)
        if self.config.profile == "torch" and self.steps <= sum(self.config.profile_steps):
            if self.steps == sum(self.config.profile_steps):  # not before: a trace shows how steps overlap
                synchronize(self.device)
            with self._aside():
                if self.steps == sum(self.config.profile_steps):
                    self.settle()
                if self.trace:
                    with harmless("--profile torch"):
                        self.trace.step()
                if self.steps == sum(self.config.profile_steps):
                    dist.barrier()  # the others wait here for those that write, and nowhere else

    def _wants_profile(self) -> bool:
        """Whether to profile this step: the same on all ranks. The first one of a process compiles."""
        if self.costs is None or self.is_profiled or self.steps < self.earliest:
            return False
        return self.config.profile != "torch" or self.steps >= sum(self.config.profile_steps)  # one at a time

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Take the time of what is no training."""
        begin = time.perf_counter()
        with span("profiling"):
            yield
        self.seconds += time.perf_counter() - begin

    def record(self, iteration: int) -> None:
        """Record what was used since the last record: an epoch, or what was done of it."""
        if self.costs:
            self.costs.record(max(-(-iteration // self.epoch_length), 1), iteration)

    def close(self, iteration: int, error: BaseException | None) -> None:
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
                self.record(iteration)
            self.costs.close()
            if self.report:
                with harmless("the report"):
                    self.costs.show()
