"""Where the time of a run went, part by part and rank by rank (`--report`)."""

import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from utils import timeline

# In the order of the table, with what the names do not say.
PARTS = {
    "data wait": "the loader was not ready",
    "data copy": "to the device, and normalised",
    "forward": "",
    "backward": "",
    "communication": "waits for other ranks, and for what they send; not what is hidden behind computing",
    "optimizer": "norm, clipping, Adam",
    "step": "in a step, between the parts above; a recorded step",
    "validation": "",
    "checkpoint": "copies, and waits for the save before",
    "logging": "records and pictures",
    timeline.ELSEWHERE: "between steps; setup, in the first epoch",
}


class TimeReport:
    """Takes the time of each part of each epoch, its validation included. All ranks call the same methods.

    Args:
        write: on rank 0, called with the record of each epoch, which names for each part the mean over ranks and the
            rank where it took longest, in seconds.
    """

    def __init__(self, model: nn.Module, device: torch.device, write: Callable[[dict[str, Any]], None] | None):
        self.clock = timeline.start_timeline(device, model)
        self.write = write
        self.records: list[dict[str, Any]] = []
        self.begin = time.perf_counter()

    def epoch(self, epoch: int, iteration: int, iterations: int) -> None:
        """End an epoch of so many iterations, the last of which is `iteration`. On a GPU it waits for the device."""
        mine = self.clock.take()
        wall, self.begin = time.perf_counter() - self.begin, time.perf_counter()
        ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        parts = {part: [rank.get(part, 0.0) for rank in ranks] for part in PARTS}
        record = {"event": "time", "epoch": epoch, "iteration": iteration, "iterations": iterations, "wall": wall}
        record["seconds"] = {part: sum(times) / len(times) for part, times in parts.items()}
        record["longest"] = {part: max(times) for part, times in parts.items()}
        record["longest_rank"] = {part: times.index(max(times)) for part, times in parts.items()}
        self.records.append(record)
        if self.write:
            self.write(record)

    def close(self) -> None:
        timeline.stop_timeline()

    def table(self) -> Iterator[str]:
        """Yield the lines of a table of all epochs of this process but its first, if there are more."""
        records = self.records[1:] or self.records
        wall, iterations = (sum(record[key] for record in records) for key in ("wall", "iterations"))
        some = "1 epoch" if len(records) == 1 else f"{len(records)} epochs"
        rest = " (without the first one of this process)" if self.records[1:] else ""
        yield f"Time of {some}{rest}, {iterations} iterations, {wall:.2f} s; seconds, share, ms an iteration, longest:"
        for part, meaning in PARTS.items():
            seconds, longest = (sum(record[key][part] for record in records) for key in ("seconds", "longest"))
            share, milliseconds = 100 * seconds / wall, 1e3 * seconds / max(iterations, 1)
            yield f"  {part:13} {seconds:9.3f} {share:5.1f}% {milliseconds:9.3f} {longest:9.3f}   {meaning}".rstrip()
        total = sum(sum(record["seconds"].values()) for record in records)
        yield f"  {'sum':13} {total:9.3f} {100 * total / wall:5.1f}%"


def write_times(folder: Path) -> Path:
    """Write `report/time.csv` of all epochs in the metrics.jsonl of a run's folder, and return its path.

    A line an epoch and part: seconds as the mean over ranks, of the rank where it took longest, and which one.
    """
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    path = folder / "report/time.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["epoch", "iteration", "iterations", "wall", "part", "seconds", "longest", "longest_rank"])
        for line in lines:
            if line["event"] == "time":
                head = [line[key] for key in ("epoch", "iteration", "iterations", "wall")]
                table.writerows(
                    [*head, part, *(line[key][part] for key in ("seconds", "longest", "longest_rank"))]
                    for part in line["seconds"]
                )
    return path
