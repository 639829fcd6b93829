"""The clock of an epoch, and the window that Nsight Systems sees."""

import contextlib
import time
from collections.abc import Iterator

import torch

from utils.data.batches import Batch
from utils.spans import nsight_window, span

PROFILED_EPOCH = 4  # past compilation and the first reads


class EpochClock:
    """Takes the time of one epoch's training, in seconds, while it hands on the epoch's batches."""

    def __init__(self):
        self.waited = 0.0  # for batches, after the first: that one waits for the reader to start
        self.aside = 0.0
        self.start = self.end = time.perf_counter()
        self.first_batch = self.first_end = self.start

    def batches(self, reader: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Yield `count` batches of `reader`."""
        for done in range(count):
            asked = time.perf_counter()
            with span("data wait"):
                batch = next(reader)
            if done == 0:
                self.first_batch = time.perf_counter()
            else:
                self.waited += time.perf_counter() - asked
            yield batch
            if done == 0:
                self.first_end = time.perf_counter()

    def stop(self, aside: float = 0.0) -> None:
        """Say that the epoch is over; seconds `aside` were no training, but looks at it."""
        self.end, self.aside = time.perf_counter(), aside

    @property
    def total(self) -> float:
        """From the start to the end."""
        return self.end - self.start - self.aside

    @property
    def wait_fraction(self) -> float:
        """The share of the time after the first batch that was spent waiting for batches."""
        return self.waited / (self.end - self.first_batch - self.aside)


def profiler_window(epoch: int, rank: int) -> contextlib.AbstractContextManager:
    """Open the capture range of `nsys profile -c cudaProfilerApi` over the fourth epoch of rank 0."""
    if epoch == PROFILED_EPOCH and rank == 0 and torch.cuda.is_available():
        return nsight_window()
    return contextlib.nullcontext()
