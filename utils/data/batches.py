"""Batches: what is read of a data set, and where it goes.

Frames go straight from the files into a ring of buffers (utils/data/frames.py, utils/data/ring.py).

Shapes:  B samples of one iteration on one rank   K steps of a forecast   C channels   H W rows, columns
         C_in C_out those that a model reads, and forecasts   C_f those that it reads and does not forecast: forced ones
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.data.frames import FrameReader
from utils.data.read_ahead import Read
from utils.data.read_worker import ReaderProcess
from utils.data.ring import BatchRing


@dataclass
class Batch:
    """What the reader gives, raw and on the host. It is valid until the next one is asked for: buffers are reused."""

    inp: Tensor  # [B, C_in, H, W], as stored; of the samples and rows that this rank reads
    target: Tensor  # after each step, [K, B, C_out, H, W], as stored
    forced: Tensor  # after each step but the last, [K-1, B, C_f, H, W], as stored; it may be empty
    counts: Tensor  # [B]: 1 for a sample, 0 for one that only fills the batch
    times: Tensor  # of the inputs, in seconds since 1970-01-01, in float64, [B]; NaN where the files store none
    copied: torch.cuda.Event | None = None  # a copy to a GPU is done: until then nobody may write here
    is_normalised: bool = False  # on the device, by DALI
    is_shared: bool = False  # whole frames of some samples; other ranks read the others (utils/data/frame_sharing.py)


class Samples(NamedTuple):
    """The samples of a data set, pairs (state, state `dt` steps later), and what reads them."""

    readers: tuple[FrameReader, ...]  # of the inputs, of the targets, and of what is forced
    pairs: np.ndarray  # rows (file, t): the steps that the samples begin with, [n, 2]
    dt: int
    steps_at: Callable[[int], int] = lambda iteration: 1  # steps of a forecast in each iteration
    longest: int = 1  # the most of them


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

    both = True  # a batch has inputs and what comes later

    def __init__(self, samples: Samples, B: int, slots: int, how: Reading):
        self.readers, self.pairs, self.dt, self.share = samples.readers, samples.pairs, samples.dt, how.share
        self.read_size, self.steps = len(range(B)[how.share]), 1
        self.counts = self.frames_of(samples.longest)
        self.ring = BatchRing(slots, self.read_size, self.readers, both=self.both, counts=self.counts)
        self.durations: deque[float] = deque(maxlen=1000)  # s, of the last reads
        self.times = np.empty((slots, B))
        self.batches = [
            Batch(
                *map(torch.from_numpy, frames),
                counts=torch.empty(B),
                times=torch.from_numpy(times),
                is_shared=how.share != slice(None),
            )
            for frames, times in zip(self.ring.frames, self.times)
        ]
        if how.pin and self.ring.nbytes:
            pin_memory(self.ring.memory)

    @staticmethod
    def frames_of(steps: int) -> tuple[int, int, int]:
        """Return how many frames of inputs, targets and what is forced there is room for, for each sample."""
        return 1, steps, steps - 1

    def jobs(self, slot: int, samples: np.ndarray, steps: int) -> list[Read]:
        """Return the reads for a batch. -1 fills its place with the first sample: shapes and norms stay sound."""
        batch, (_, *later), B = self.batches[slot], self.ring.frames[slot], self.read_size
        batch.counts[:] = torch.from_numpy(samples >= 0)
        self.note_times(slot, self.pairs[np.maximum(samples, 0)])
        batch.target, batch.forced = (
            torch.from_numpy(frames[: count * B].reshape(count, B, *frames.shape[1:]))
            for frames, count in zip(later, (steps, steps - 1))
        )
        self.steps = steps
        return [
            Read(slot, part, (k - 1) * B + place if part else place, int(file), int(t) + k * self.dt, request)
            for place, (file, t) in enumerate(self.pairs[np.maximum(samples, 0)[self.share]])
            for part, k in parts_of(steps)
            for request in self.readers[part].requests
        ]

    def note_times(self, slot: int, frames: Iterable[tuple[int, int]]) -> None:
        """Note when the states of a batch are valid, rows (file, t)."""
        times = self.readers[0].files.times
        for b, (file, t) in enumerate(frames):
            self.times[slot, b] = np.nan if times[file] is None else times[file][t]

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
        slots = len(self.batches)
        return ReaderProcess(slots, self.read_size, self.readers, self.ring.fd, self.both, self.counts)


def parts_of(steps: int) -> list[tuple[int, int]]:
    """Return what a sample of `steps` steps has: (0 inputs, 1 targets, 2 what is forced; after so many steps)."""
    return [(0, 0), *((1, k) for k in range(1, steps + 1)), *((2, k) for k in range(1, steps))]


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
