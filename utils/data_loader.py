"""The data loader: which samples make a batch, in which order, on which rank, and who reads them.

An epoch's order is a function of (seed, epoch) alone. A global batch is the next `global_batch_size` entries of it,
and each rank takes its equal slice: every number of ranks sees the same global batches.

Frames go straight from the files into a ring of batch buffers (utils/frame_reader.py, utils/batch_ring.py), in the
loop or ahead of it (utils/read_ahead.py).

Shapes:  B samples of one iteration on one rank   C channels   H W rows, columns
"""

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.batch_ring import BatchRing
from utils.frame_reader import FrameReader
from utils.read_ahead import Read, ReadAhead
from utils.read_worker import ReaderProcess


@dataclass
class Batch:
    """What the reader gives, raw and on the host. It is valid until the next one is asked for: buffers are reused."""

    inp: Tensor  # [B, C_in, H, W], as stored; of the samples and rows that this rank reads
    target: Tensor  # [B, C_out, H, W], as stored
    counts: Tensor  # [B]: 1 for a sample, 0 for one that only fills the batch
    copied: torch.cuda.Event | None = None  # a copy to a GPU is done: until then nobody may write here
    is_normalised: bool = False  # on the device, by DALI
    is_shared: bool = False  # whole frames of some samples; other ranks read the others (utils/frame_sharing.py)


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the samples in an epoch, the same on every rank."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def shard(order: np.ndarray, global_batch: int, num_shards: int, shard_id: int) -> np.ndarray:
    """Return the samples of each iteration for one shard, [iterations, global_batch / num_shards].

    The last global batch is filled up with -1 where the samples run out.
    """
    iterations = -(-len(order) // global_batch)
    padded = np.full(iterations * global_batch, -1)
    padded[: len(order)] = order
    return padded.reshape(iterations, num_shards, global_batch // num_shards)[:, shard_id]


@dataclass(frozen=True)
class SampleOrder:
    """Which samples each iteration takes, on one shard.

    With `shuffle`, for training, every epoch has a new order, and a tail shorter than a batch is dropped. Without, for
    validation, every sample comes once, in order.
    """

    num_samples: int
    batch_size: int  # of all shards
    shuffle: bool
    seed: int = 0
    num_shards: int = 1
    shard_id: int = 0

    def __len__(self) -> int:
        """Iterations of an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole if self.shuffle else whole + (rest > 0)

    def epoch(self, epoch: int) -> np.ndarray:
        """Return the samples of each iteration of an epoch, [iterations, B]; -1 fills a batch up."""
        n = self.num_samples
        order = epoch_order(n, self.seed, epoch)[: len(self) * self.batch_size] if self.shuffle else np.arange(n)
        return shard(order, self.batch_size, self.num_shards, self.shard_id)

    def from_iteration(self, iteration: int) -> Iterator[np.ndarray]:
        """Yield the samples of one iteration after another, from `iteration` of epoch 0 on, without end."""
        while True:
            epoch, first = divmod(iteration, len(self))
            for samples in self.epoch(epoch)[first:]:
                yield samples
                iteration += 1


class Samples(NamedTuple):
    """The samples of a data set, pairs (state, state `dt` steps later), and what reads them."""

    readers: tuple[FrameReader, FrameReader]  # of the inputs, and of the targets
    pairs: np.ndarray  # rows (file, t): the steps that the samples begin with, [n, 2]
    dt: int


@dataclass(frozen=True)
class Reading:
    """How samples are read.

    Args:
        num_workers: 0 reads when the loop asks. 1 and more read ahead: as threads from contiguous files, as processes
            from those that HDF5 must read.
        read_depth: reads under way at once from contiguous files; as many as workers by default.
        pin: let a GPU copy from the buffers while the host goes on.
        share: which places of a batch are read here, by default all.
    """

    num_workers: int = 0
    read_depth: int | None = None
    pin: bool = False
    share: slice = field(default_factory=lambda: slice(None))


class BatchReader:
    """Reads the samples of a batch into a slot of a ring.

    Args:
        B: samples of a batch.
        slots: batches that there is room for.

    Raises OSError where the buffers do not fit into memory.
    """

    def __init__(self, samples: Samples, B: int, slots: int, how: Reading):
        (self.readers, self.pairs, self.dt), self.share = samples, how.share
        self.read_size = len(range(B)[how.share])
        self.ring = BatchRing(slots, self.read_size, self.readers)
        self.durations: deque[float] = deque(maxlen=1000)  # s, of the last reads
        self.batches = [
            Batch(*map(torch.from_numpy, frames), torch.empty(B), is_shared=how.share != slice(None))
            for frames in self.ring.frames
        ]
        if how.pin and self.ring.nbytes:
            pin_memory(self.ring.memory)

    def jobs(self, slot: int, samples: np.ndarray) -> list[Read]:
        """Return the reads for a batch. -1 fills its place with the first sample: shapes and norms stay sound."""
        self.batches[slot].counts[:] = torch.from_numpy(samples >= 0)
        return [
            Read(slot, part, place, int(file), int(t) + part * self.dt, request)
            for place, (file, t) in enumerate(self.pairs[np.maximum(samples, 0)[self.share]])
            for part, reader in enumerate(self.readers)
            for request in reader.requests
        ]

    def read(self, job: Read) -> None:
        """Carry out a job in this process."""
        self._wait(job)
        frame = self.ring.frames[job.slot][job.part][job.place]
        start = time.perf_counter()
        self.readers[job.part].read(job.file, job.t, frame, job.request)
        self.durations.append(time.perf_counter() - start)

    def read_in(self, process: ReaderProcess) -> Callable[[Read], None]:
        """Return a function that lets a process carry out a job."""

        def read(job: Read) -> None:
            self._wait(job)
            start = time.perf_counter()
            process.read(*job[:-1])
            self.durations.append(time.perf_counter() - start)

        return read

    def _wait(self, job: Read) -> None:
        """Wait until the last batch in this slot has been copied to the GPU."""
        copied = self.batches[job.slot].copied
        if copied is not None:
            torch.cuda.set_device(copied.device)  # a thread starts with GPU 0, and would take memory there
            copied.synchronize()

    def start_process(self) -> ReaderProcess:
        """Start a process that can carry out jobs."""
        return ReaderProcess(len(self.batches), self.read_size, self.readers, self.ring.fd)


class Loader:
    """The batches of one data set for one shard, epoch by epoch.

    Args:
        in_use: batches that stay as they are, the one given out last among them.
    """

    def __init__(self, samples: Samples, order: SampleOrder, how: Reading = Reading(), in_use: int = 1):
        self.order, self.in_use = order, in_use
        self.is_direct = all(reader.is_direct for reader in samples.readers)
        self.depth = (self.is_direct and how.num_workers and how.read_depth) or how.num_workers  # reads at once
        B = order.batch_size // order.num_shards
        requests = len(range(B)[how.share]) * sum(len(reader.requests) for reader in samples.readers)
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
        reads = reader.read_size * sum(len(frames.requests) for frames in reader.readers)
        return max(self.depth, 1) * len(reader.batches[0].counts) / (reads * fmean(durations))

    def stream_from(self, iteration: int) -> Iterator[Batch]:
        """Return batches without end, from an iteration on."""
        order = self.order.from_iteration(iteration)
        if not self.depth:
            return read_in_turn(self.reader, order)
        return read_ahead(self.reader, order, self.depth, self.in_use)

    def find_nonfinite(self, epoch: int, iteration: int) -> str | None:
        """Read a batch again and name the file, index and channel of its first value that is not finite."""
        for sample in self.order.epoch(epoch)[iteration]:
            file, t = self.reader.pairs[max(sample, 0)]
            for reader, step in zip(self.reader.readers, (t, t + self.reader.dt)):
                frame = reader.read_frame(file, step)
                bad = np.argwhere(~np.isfinite(frame))
                if len(bad):
                    c, y, x = bad[0]
                    channel = next(first + c - start for start, first, n in reader.runs if start <= c < start + n)
                    where = f"fields[{step}, {channel}, {reader.rows[y]}, {x}]"
                    return f"{reader.files.paths[file]}, {where} is {frame[c, y, x]}"
        return None


def read_in_turn(reader: BatchReader, order: Iterator[np.ndarray]) -> Iterator[Batch]:
    """Read each batch when it is asked for."""
    for slot, samples in zip(itertools.cycle(range(len(reader.batches))), order):
        for job in reader.jobs(slot, samples):
            reader.read(job)
        yield reader.batches[slot]


def read_ahead(reader: BatchReader, order: Iterator[np.ndarray], depth: int, in_use: int) -> Iterator[Batch]:
    """Read batches before they are asked for, `depth` reads at once."""
    with contextlib.ExitStack() as stack:  # left when the iterator is closed or dropped
        if all(frames.is_direct for frames in reader.readers):
            reads = [reader.read] * depth
        else:
            reads = [reader.read_in(stack.enter_context(reader.start_process())) for _ in range(depth)]
        ahead = stack.enter_context(ReadAhead(len(reader.batches), reads, lambda slot: reader.jobs(slot, next(order))))
        slots: deque[int] = deque()
        while True:
            slots.append(ahead.take())
            yield reader.batches[slots[-1]]
            if len(slots) == in_use:
                ahead.release(slots.popleft())


def pin_memory(memory: np.ndarray) -> None:
    """Register `memory` with CUDA: it stays where it is, and a GPU copies from it without the host's help."""
    runtime = torch.cuda.cudart()
    try:
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)))
    except RuntimeError as error:
        raise OSError(
            f"the GPU cannot use {memory.nbytes / 1e9:.2f} GB of batches ({error}): lower --local_batch_size or "
            f"--num_data_workers, or raise the limit of locked memory (ulimit -l)"
        ) from None
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
