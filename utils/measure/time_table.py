"""Where the time of a run went, part by part, and on which rank it took longest (`--report`)."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from utils.spans import ELSEWHERE, span, start_timeline

# In the order of the table, with what the names do not say.
PARTS = {
    "data wait": "the loader was not ready",
    "data copy": "to the device, and normalised",
    "forward": "",
    "backward": "",
    "communication": "waits for other ranks and what they send, where it is not hidden behind computing",
    "optimizer": "norm, clipping, Adam",
    "step": "in a step, between the parts above; a recorded step",
    "validation": "",
    "checkpoint": "copies, and waits for the save before",
    "logging": "records and pictures; the other ranks wait for them",
    "profiling": "what it takes to look at a step",
    "setup": "until the first step is done, which compiles",
    ELSEWHERE: "between steps",
}


class TimeReport:
    """Takes the time of each part of each epoch, its validation included. All ranks call the same methods.

    Args:
        model: whose communication is to be seen; None where nobody asks for times: only iterations are counted.
        iteration: iterations done so far.
        write: on rank 0, called with each record: the means over ranks, in seconds, and for each part the rank where
            it took longest.
    """

    def __init__(
        self, model: nn.Module | None, device: torch.device, iteration: int,
        write: Callable[[dict[str, Any]], None] | None,
    ):  # fmt: skip
        self.clock = None if model is None else start_timeline(device, model)
        self.write, self.iteration = write, iteration
        self.records: list[dict[str, Any]] = []
        self.ranks: list[dict[str, list[float]]] = []  # of each record: the seconds of each part on every rank
        self.begin = time.perf_counter()
        self.is_set_up = False
        if self.clock:
            self.clock.enter("setup")

    def step_is_done(self) -> None:
        if self.clock and not self.is_set_up:
            self.clock.leave()
        self.is_set_up = True

    def record(self, epoch: int, iteration: int) -> None:
        """Record the time since the last record: an epoch, or what was done of it. On a GPU it waits for the device."""
        mine = self.clock.take() if self.clock else {}
        now = time.perf_counter()
        mine["wall"], self.begin = now - self.begin, now
        ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
        with span("profiling"):
            dist.all_gather_object(ranks, mine)
        times = {name: [rank.get(name, 0.0) for rank in ranks] for name in (*PARTS, "wall")}
        means = {name: sum(values) / len(values) for name, values in times.items()}
        record = {"event": "time", "epoch": epoch, "iteration": iteration, "iterations": iteration - self.iteration}
        record |= {"wall": means.pop("wall"), "seconds": means}
        record["longest"] = {part: max(times[part]) for part in PARTS}
        record["longest_rank"] = {part: times[part].index(max(times[part])) for part in PARTS}
        self.iteration = iteration
        self.records.append(record)
        self.ranks.append(times)
        if self.write and self.clock:
            self.write(record)

    @property
    def warm(self) -> slice:
        """The records after the first that has iterations of this process, if there are any; else all."""
        first = next((i for i, record in enumerate(self.records) if record["iterations"]), 0)
        return slice(first + 1 if self.records[first + 1 :] else 0, None)

    @property
    def iterations(self) -> int:
        """Iterations that the warm records know the parts of: the first of this process is setup."""
        done = sum(record["iterations"] for record in self.records[self.warm])
        return done - (self.is_set_up and self.warm.start == 0)

    def by_rank(self) -> dict[str, list[float]]:
        """Return the seconds of each part on every rank, over the same records."""
        ranks = self.ranks[self.warm]
        return {part: [sum(rank) for rank in zip(*(times[part] for times in ranks))] for part in PARTS}

    def table(self) -> Iterator[str]:
        """Yield the lines of a table of the warm records."""
        records, iterations = self.records[self.warm], self.iterations
        wall = sum(record["wall"] for record in records)
        first = " after the first epoch of this process" if self.warm.start else " after the first, which is the setup"
        yield f"Time of {iterations} iterations{first}, and what belongs to them: {wall:.2f} s, mean over ranks"
        yield "(longest: seconds on the rank where a part took most, epoch by epoch)"
        yield "  part            seconds   share  ms/iteration  longest"
        for part, meaning in PARTS.items():
            seconds, longest = (sum(record[key][part] for record in records) for key in ("seconds", "longest"))
            share, milliseconds = 100 * seconds / wall, 1e3 * seconds / max(iterations, 1)
            yield f"  {part:13} {seconds:9.3f} {share:6.1f}% {milliseconds:13.3f} {longest:8.3f}  {meaning}".rstrip()
        total = sum(sum(record["seconds"].values()) for record in records)
        yield f"  {'sum':13} {total:9.3f} {100 * total / wall:6.1f}%"
