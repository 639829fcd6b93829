"""What looks at a run while it trains: the clocks of `--report`, and the traces of `--profile torch`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from utils.config import Config
from utils.launch import Ended, Refused, World
from utils.model_summary import Layer
from utils.profiling import MemoryWatch
from utils.run_costs import RunCosts
from utils.step_profile import StepProfiler
from utils.system_watch import harmless
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
    ):
        self.config, self.report, self.steps = config, report, 0  # steps of this process
        self.profiled_after: int | None = None  # steps
        self.epoch_length = len(data.train_loader)
        self.costs: RunCosts | None = None
        self.trace: TorchProfile | None = None
        if config.report:
            self.costs = RunCosts(config, world, device, data, model, layers, iteration, report)
            self.profiler = StepProfiler(device, memory.tensors, report and self.costs.folder / "step_trace.json")
        if config.profile == "torch" and (report or config.profile_ranks == "all"):
            with harmless("--profile torch"):
                steps = tuple(config.profile_steps)
                self.trace = TorchProfile(folder / "profile", world.rank, device, steps, memory.tensors)

    @contextlib.contextmanager
    def step(self, is_last: bool) -> Iterator[None]:
        """Look at the step in this block; the report looks closely at the last one of an epoch, which is warm."""
        if self.costs:
            self.costs.time.step_begins()
        is_profiled = is_last and self._wants_profile()
        if is_profiled:
            with harmless("the profile of a step"):
                self.profiler.start()
            dist.barrier()  # no rank shall seem to be slow because its profiler was
        yield
        self.steps += 1
        if is_profiled:
            found, self.profiled_after = None, self.steps
            with harmless("the profile of a step"):
                found = self.profiler.stop()
            self.costs.keep(found)
        if self.trace:
            with harmless("--profile torch"):
                self.trace.step()

    def _wants_profile(self) -> bool:
        """Whether to profile this step: the same on all ranks. One that is recorded since is another step."""
        if self.costs is None or (self.config.profile == "torch" and self.steps < sum(self.config.profile_steps)):
            return False  # two profilers cannot work at once
        return self.profiled_after is None or self.profiled_after <= self.config.graph_warmup < self.steps

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
        with harmless("the end of a profile"):
            if self.trace:
                self.trace.close()
            if self.costs:
                self.profiler.close()
        if self.costs:
            if error is not None:
                self.record(iteration)
            self.costs.close()
            if self.report:
                self.costs.show()
