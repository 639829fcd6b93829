"""Batches: what is read of a data set, and where it goes.

Frames go straight from the files into a ring of buffers (utils/data/frames.py, utils/data/ring.py).

Shapes:  B samples of one iteration on one rank   C channels   H W rows, columns
"""

import time
import weakref
from collections import deque
from collections.abc import Callable
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
    target: Tensor  # [B, C_out, H, W], as stored
    counts: Tensor  # [B]: 1 for a sample, 0 for one that only fills the batch
    copied: torch.cuda.Event | None = None  # a copy to a GPU is done: until then nobody may write here
    is_normalised: bool = False  # on the device, by DALI
    is_shared: bool = False  # whole frames of some samples; other ranks read the others (utils/data/frame_sharing.py)


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

    both = True  # a batch has inputs and targets

    def __init__(self, samples: Samples, B: int, slots: int, how: Reading):
        (self.readers, self.pairs, self.dt), self.share = samples, how.share
        self.read_size = len(range(B)[how.share])
        self.ring = BatchRing(slots, self.read_size, self.readers, both=self.both)
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
        return ReaderProcess(len(self.batches), self.read_size, self.readers, self.ring.fd, self.both)


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
