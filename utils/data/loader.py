"""The data loader: batches in the order of an epoch, read in the loop or ahead of it (utils/data/read_ahead.py)."""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from statistics import fmean

import numpy as np

from utils.data.batches import Batch, BatchReader, Reading, Samples, parts_of
from utils.data.order import SampleOrder
from utils.data.read_ahead import ReadAhead
from utils.data.variables import missing


class Loader:
    """The batches of one data set for one shard, epoch by epoch.

    Args:
        in_use: batches that stay as they are, the one given out last among them.
    """

    def __init__(self, samples: Samples, order: SampleOrder, how: Reading = Reading(), in_use: int = 1):
        self.order, self.in_use, self.steps_at = order, in_use, samples.steps_at
        self.is_direct = all(reader.is_direct for reader in samples.readers)
        self.depth = (self.is_direct and how.num_workers and how.read_depth) or how.num_workers  # reads at once
        B = order.batch_size // order.num_shards
        requests = len(range(B)[how.share]) * sum(len(samples.readers[part].requests) for part, _ in parts_of(1))
        # Read ahead: one batch that is ready, and as many as it takes to keep all readers busy.
        ahead = 1 + max(1, -(-self.depth // max(requests, 1))) if self.depth else 0
        self.reader = BatchReader(samples, B, in_use + ahead, how)
        self.stream: Iterator[Batch] | None = None
        self.next = 0  # the iteration that `stream` gives next, counted from the first epoch

    def __len__(self) -> int:
        """Iterations of an epoch."""
        return len(self.order)

    def epoch(self, epoch: int = 0, first: int = 0) -> Iterator[Batch]:
        """Read the batches of an epoch, from iteration `first` of it; a batch is valid until the next is asked for.

        Raises ReadError for a file that cannot be read, and for a reader process that ended.
        """
        begin = epoch * len(self) + first
        # The stream goes on into the next epoch by itself. In validation every epoch is the same.
        away = begin - self.next
        if self.stream is None or (away if self.order.shuffle else away % len(self)):
            if self.stream is not None:
                self.stream.close()
            self.stream, self.next = self.stream_from(begin), begin
        for _ in range(len(self) - first):
            try:
                batch = next(self.stream)
            except BaseException:
                self.stream = None  # it is at its end
                raise
            self.next += 1
            yield batch

    @property
    def samples_per_sec(self) -> float | None:
        """What the readers give when nobody keeps them waiting, by the time of their last reads.

        On one data-parallel rank; None where it reads nothing.
        """
        durations, reader = list(self.reader.durations), self.reader
        if not durations:
            return None
        reads = reader.read_size * sum(len(reader.readers[part].requests) for part, _ in parts_of(reader.steps))
        return max(self.depth, 1) * len(reader.batches[0].counts) / (reads * fmean(durations))

    def stream_from(self, iteration: int) -> Iterator[Batch]:
        """Return batches without end, from an iteration on."""
        order = zip(self.order.from_iteration(iteration), map(self.steps_at, itertools.count(iteration)))
        if not self.depth:
            return read_in_turn(self.reader, order)
        return read_ahead(self.reader, order, self.depth, self.in_use)

    def find_nonfinite(self, epoch: int, iteration: int) -> str | None:
        """Read a batch again and name the file, index and channel of its first missing value: not finite, or huge."""
        for sample in self.order.epoch(epoch)[iteration]:
            file, t = self.reader.pairs[max(sample, 0)]
            for part, k in parts_of(self.steps_at(epoch * len(self) + iteration)):
                reader, step = self.reader.readers[part], t + k * self.reader.dt
                frame = reader.read_frame(file, step)
                bad = np.argwhere(missing(frame))
                if len(bad):
                    c, y, x = bad[0]
                    channel = next(first + c - start for start, first, n in reader.runs if start <= c < start + n)
                    where = f"fields[{step}, {channel}, {reader.rows[y]}, {x}]"
                    return f"{reader.files.paths[file]}, {where} is {frame[c, y, x]}"
        return None


def read_in_turn(reader: BatchReader, order: Iterator[tuple]) -> Iterator[Batch]:
    """Read each batch when it is asked for; `order` gives what makes its jobs."""
    for slot, samples in zip(itertools.cycle(range(len(reader.batches))), order):
        for job in reader.jobs(slot, *samples):
            reader.read(job)
        yield reader.batches[slot]


def read_ahead(reader: BatchReader, order: Iterator[tuple], depth: int, in_use: int) -> Iterator[Batch]:
    """Read batches before they are asked for, `depth` reads at once."""
    with contextlib.ExitStack() as stack:  # left when the iterator is closed or dropped
        if all(frames.is_direct for frames in reader.readers):
            reads = [reader.read] * depth
        else:
            reads = [reader.read_in(stack.enter_context(reader.start_process())) for _ in range(depth)]
        ahead = stack.enter_context(ReadAhead(len(reader.batches), reads, lambda slot: reader.jobs(slot, *next(order))))
        slots: deque[int] = deque()
        while True:
            slots.append(ahead.take())
            yield reader.batches[slots[-1]]
            if len(slots) == in_use:
                ahead.release(slots.popleft())
