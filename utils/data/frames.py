"""How a frame gets from a file into a batch: no copy on the way, nothing read that is not needed.

Contiguous files are read without HDF5: `preadv` at the place of the numbers, by as many threads as one likes. All
other files (chunked, compressed, another byte order) go through HDF5, which serves one thread of a process at a time.

This file imports no torch: a process that only reads starts in a fraction of a second (utils/data/read_worker.py).

Shapes:  C channels   H W rows, columns, as read
"""

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import h5py
import numpy as np

from utils.data.files import Files, stamp
from utils.errors import ReadError
from utils.files import patiently

LARGEST_GAP = 1 / 16  # of what is wanted: a smaller gap is read as well, one request is cheaper than two
CHANNELS_AT_ONCE = 500  # in one request: the system takes 1,024 pieces, and a gap is one, too


class Request(NamedTuple):
    """A stretch of a frame that one read fetches."""

    start: int  # its first byte, counted from the beginning of the frame
    channels: range  # of the output: where it goes
    gap: int  # bytes between channels that nobody wants


class OpenFiles:
    """The files of a data set that a process has open: each is opened when it is first needed, and once."""

    def __init__(self, files: Files):
        self.files, self.lock, self.opened = files, threading.Lock(), {}
        self.stale: list[int] = []  # not closed yet: another thread may be reading, and the number would be used again
        self.end = weakref.finalize(self, _close, self.opened, self.stale)

    def __reduce__(self):
        return OpenFiles, (self.files,)  # an open file does not travel to another process

    def direct(self, file: int) -> int:
        """Return a file descriptor."""
        return self._get(file, lambda path: os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def forget(self, file: int) -> None:
        """Open a file anew at its next read: the server knows nothing of this descriptor any more."""
        with self.lock:
            if file in self.opened:
                self.stale.append(self.opened.pop(file))

    def hdf5(self, file: int) -> tuple[h5py.Dataset, int]:
        """Return the fields of an HDF5 file, and its file descriptor."""
        return self._get(file, open_hdf5)

    def _get(self, file: int, open_: Callable):
        with self.lock:
            if file not in self.opened:
                if stamp(self.files.paths[file]) != self.files.stamps[file]:
                    raise OSError("it is another file than at the start")
                self.opened[file] = open_(self.files.paths[file])
            return self.opened[file]


def _close(opened: dict[int, int | tuple[h5py.Dataset, int]], stale: list[int]) -> None:
    for file in (*opened.values(), *stale):
        os.close(file) if isinstance(file, int) else file[0].file.close()


def open_hdf5(path: str) -> tuple[h5py.Dataset, int]:
    """Open a file for reads of single frames in any order; return its fields, and its file descriptor."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_sieve_buf_size(0)  # by default HDF5 reads 64 KB at least: three times a row of patches
    access.set_cache(0, 0, 0, 1.0)  # no cache of chunks: in shuffled order none is read twice
    access.set_file_locking(False, True)  # shared file systems lock slowly or not at all
    fields = h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))["fields"]
    return fields, fields.file.id.get_vfd_handle()  # of the file that they lie in


class FrameReader:
    """Reads chosen channels and rows of single frames.

    Args:
        files: the files.
        channels: channel indices, in the order wanted.
        rows: the rows to read. There may be none: such a rank's shard of the tokens is all padding.
        columns: the number of columns, from the first.
        opened: the open files, where another reader uses the same.
    """

    def __init__(self, files: Files, channels: list[int], rows: range, columns: int, opened: OpenFiles | None = None):
        self.opened = opened or OpenFiles(files)
        self.files, self.rows, self.shape = files, rows, (len(channels), len(rows), columns)
        self.runs = consecutive(channels)
        # A cropped row leaves a gap after every row: HDF5 fetches those better.
        self.is_direct = None not in files.offsets and columns == files.shape[2] and hasattr(os, "preadv")
        self.requests = list(self._plan()) if self.is_direct else [None] * bool(channels)

    def _plan(self) -> Iterator[Request]:
        """The requests for a frame of a contiguous file."""
        _, H, W = self.files.shape
        row = W * self.files.dtype.itemsize
        wanted, gap = len(self.rows) * row, (H - len(self.rows)) * row
        for position, channel, length in self.runs if self.rows else ():
            at_once = CHANNELS_AT_ONCE if gap <= LARGEST_GAP * wanted else 1
            for i in range(0, length, at_once):
                channels = range(position + i, position + min(i + at_once, length))
                yield Request((channel + i) * H * row + self.rows.start * row, channels, gap)

    def read(self, file: int, t: int, out: np.ndarray, request: Request | None) -> None:
        """Fill the part of `out` [C, H, W] that `request`, one of `requests`, stands for, with frame `t` of a file.

        Raises ReadError for a file that is gone, too short or damaged, and where its storage fails for longer than a
        moment (HDF5 does not wait).
        """
        if not self.rows:
            return
        try:
            if request is None:
                self._read_hdf5(file, t, out)
            else:
                patiently(lambda: self._read_direct(file, t, out, request))
        except (OSError, RuntimeError, LookupError, ValueError, TypeError) as error:  # HDF5 raises any of them
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ReadError(
                f"{self.files.paths[file]}: frame {t} cannot be read ({reason}): "
                f"did the file change during the run? Mend it or copy it again"
            ) from None

    def read_frame(self, file: int, t: int) -> np.ndarray:
        """Return frame `t` of a file, [C, H, W]. Raises ReadError."""
        frame = np.empty(self.shape, self.files.dtype)
        for request in self.requests:
            self.read(file, t, frame, request)
        return frame

    def _read_direct(self, file: int, t: int, out: np.ndarray, request: Request) -> None:
        fd = self.opened.direct(file)
        first = request.channels.start
        if request.gap:
            unwanted = np.empty(request.gap, np.uint8)
            pieces = [piece for c in request.channels for piece in (out[c], unwanted)][:-1]
        else:
            pieces = [out[first : request.channels.stop]]
        left = [memoryview(piece).cast("B") for piece in pieces]
        frame_bytes = int(np.prod(self.files.shape)) * self.files.dtype.itemsize
        at = self.files.offsets[file] + t * frame_bytes + request.start
        while left:
            try:
                got = os.preadv(fd, left, at)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    self.opened.forget(file)
                raise
            if got == 0:
                raise OSError(f"it ends at byte {at:,}")
            at += got
            while left and got >= len(left[0]):  # usually all of it came at once
                got -= len(left.pop(0))
            if left:
                left[0] = left[0][got:]

    def _read_hdf5(self, file: int, t: int, out: np.ndarray) -> None:
        fields, fd = self.opened.hdf5(file)
        rows, W = slice(self.rows.start, self.rows.stop), self.shape[-1]
        for position, channel, length in self.runs:
            source = np.s_[t, channel : channel + length, rows, :W]
            fields.read_direct(out, source, np.s_[position : position + length, :, :])
        size = os.fstat(fd).st_size
        if size < self.files.stamps[file][0]:  # HDF5 fills with zeros what is no longer there
            raise OSError(f"it ends at byte {size:,}")


def consecutive(channels: list[int]) -> list[tuple[int, int, int]]:
    """Group channels into runs (position in the output, first channel, length) that lie side by side in a file."""
    runs: list[tuple[int, int, int]] = []
    for position, channel in enumerate(channels):
        if runs and channel == runs[-1][1] + runs[-1][2]:
            start, first, length = runs[-1]
            runs[-1] = (start, first, length + 1)
        else:
            runs.append((position, channel, 1))
    return runs
