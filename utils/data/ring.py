"""Batches in memory: a ring of buffers, allocated once, that readers fill in turn.

The memory is shared with the processes that read (utils/data/read_worker.py), and a GPU can copy from it directly
once it is pinned. It is no file in /dev/shm, whose size containers limit. This file imports no torch: such a process
imports it.

Shapes:  B samples of one batch on one rank   C channels   H W rows, columns, as read
"""

import errno
import math
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np

from utils.data.frames import FrameReader


class BatchRing:
    """`slots` buffers of B samples each.

    Args:
        readers: who reads the inputs, who the targets, and who what is forced at later steps.
        fd: the memory of a ring that another process made; None makes a new one.
        both: a buffer holds inputs and what comes later; otherwise either of them, in the same memory.
        counts: frames of each reader for a sample.

    Raises OSError where the machine has not enough memory.
    """

    def __init__(
        self, slots: int, batch: int, readers: tuple[FrameReader, ...], fd: int | None = None, both: bool = True,
        counts: tuple[int, int, int] = (1, 1, 0),
    ):  # fmt: skip
        frames = [batch * count for count in counts]
        sizes = [n * int(np.prod(r.shape)) * r.files.dtype.itemsize for n, r in zip(frames, readers)]
        starts = [0, both * sizes[0], both * sizes[0] + sizes[1]]
        size = max(sizes[0], starts[2] + sizes[2])
        self.nbytes = slots * size
        length = max(self.nbytes, 1)  # a rank may have nothing to read
        try:
            self.fd = allocate(length) if fd is None else fd
        except OSError as error:
            raise OSError(
                f"{slots} batches of {size / 1e9:.2f} GB do not fit into memory ({error.strerror}): "
                f"lower --local_batch_size or --num_data_workers"
            ) from None
        weakref.finalize(self, os.close, self.fd)
        # All pages are put in place now: the first batches would otherwise take several times as long.
        memory = mmap.mmap(self.fd, length, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self.memory = np.frombuffer(memory, np.uint8)
        # Of each slot: inputs [B, C_in, H, W], targets and what is forced, those of one time after those of another.
        self.frames: list[list[np.ndarray]] = []
        for slot in range(slots):
            self.frames.append([])
            for reader, start, part, count in zip(readers, starts, sizes, frames):
                flat = self.memory[slot * size + start :][:part].view(reader.files.dtype)
                self.frames[-1].append(flat.reshape(count, *reader.shape))


def allocate(length: int) -> int:
    """Return a file descriptor of memory that has no name: as good as a file, and gone with its last user."""
    if length > available():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))  # else the system would end some process
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("batches")
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError:
            os.close(fd)
            raise
        return fd
    with tempfile.TemporaryFile() as file:  # macOS
        file.truncate(length)
        return os.dup(file.fileno())


def available() -> float:
    """Return the bytes of memory that are free, or could be; infinity where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf
