"""`--profile torch`: some steps under torch.profiler, as traces, and what is in memory meanwhile."""

import csv
import gzip
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import profile, schedule, tensorboard_trace_handler

from utils.measure.memory_timeline import memory_blocks, memory_moments, storages, timeline
from utils.measure.step_profile import activities


@dataclass(eq=False)
class TorchProfile:
    """Counts the steps of a process, and records those that `--profile_steps` names.

    For each rank that records, the folder gets `rank<r>.<time>.pt.trace.json.gz` (for TensorBoard's profiler plugin,
    Perfetto and Holistic Trace Analysis), `rank<r>_memory.png` and `.csv` (bytes of each part over time), and on a GPU
    `rank<r>_memory.pickle`, which https://pytorch.org/memory_viz draws.
    """

    folder: Path
    rank: int
    device: torch.device
    steps: tuple[int, int, int]  # to wait, to warm the profiler up, and to record
    known: Callable[[], dict[str, Iterable[Tensor]]]  # gives the tensors that live longer than a step, by part
    stacks: bool = False  # whether events say which line of code called them
    done: int = 0

    def __post_init__(self):
        self.folder.mkdir(exist_ok=True)
        wait, warmup, active = self.steps
        self.begin, self.end = wait + warmup, sum(self.steps)
        self.before: dict = {}
        self.profiler: profile | None = profile(
            activities=activities(self.device),
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
            with_stack=self.stacks,
            acc_events=True,
        )
        self._look()
        self.profiler.start()

    @property
    def is_at_work(self) -> bool:
        """Whether it records or warms up: two profilers cannot do so at once."""
        return self.done < self.end

    def step(self) -> None:
        """Say that a step is done. Raises OSError where there is no room for the trace."""
        if not self.is_at_work:
            return
        self.done += 1
        self._look()
        self.profiler.step()
        if not self.is_at_work:
            self.profiler.stop()
            self.profiler = None  # it holds all events

    def close(self) -> None:
        """End it; a run that was stopped before that has no trace, or one of less steps."""
        if self.is_at_work:
            logging.warning("--profile torch: the run ended after %d of %d steps of it", self.done, self.end)
            self.done = self.end
            self.profiler.stop()
            self.profiler = None

    def _look(self) -> None:
        if self.done == self.begin:
            self.before = storages(self.known(), self.device)
            if self.device.type == "cuda":
                # Documented, underscore and all; tests/gpu/test_gpu_report.py reads the snapshot.
                stacks = "all" if self.stacks else "python"  # those of C++, too
                torch.cuda.memory._record_memory_history(max_entries=10**6, stacks=stacks)

    def _write(self, profiler: profile) -> None:
        name = f"rank{self.rank}"
        if self.device.type == "cuda":
            try:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}_memory.pickle"))
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        tensorboard_trace_handler(str(self.folder), name, use_gzip=True)(profiler)
        newest = max(self.folder.glob(f"{name}.*.pt.trace.json.gz"))
        events = json.loads(gzip.decompress(newest.read_bytes()))["traceEvents"]
        annotations = [e for e in events if e.get("cat") == "user_annotation"]
        moments, parts = timeline(memory_blocks(memory_moments(events, self.device.type), annotations, self.before))
        with (self.folder / f"{name}_memory.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("ms", *parts), *zip(moments, *parts.values())])
        from utils.plots import memory_figure  # Matplotlib: other ranks need not read it

        figure = memory_figure(moments, parts, f"Memory of {self.end - self.begin} step(s), rank {self.rank}")
        figure.savefig(self.folder / f"{name}_memory.png")
