"""A process that reads frames for another one, into memory that both share.

HDF5 serves one thread of a process at a time, decompression included: compressed files need processes. One of them
imports no torch, starts in a fraction of a second and takes some 50 MB.

ReaderProcess starts one, and gives it two file descriptors: a socket, and the memory.
"""

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from utils.data.frames import FrameReader
from utils.data.ring import BatchRing
from utils.errors import ReadError

# Of Ctrl-C and of schedulers: they go to every process of a job, and what to do is the parent's decision.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ROOT = Path(__file__).resolve().parents[2]
# This project's `utils`, and with -P the library's `signal`, whatever the folder holds that the run was started in.
START = "import sys; sys.path.insert(0, sys.argv[1]); from utils.data import read_worker as w; w.main(*sys.argv[2:])"


class ReaderProcess:
    """The process, as its parent sees it. It ends with its parent, whatever ends that.

    Args:
        slots, batch, readers, fd, layout: those of the ring.
    """

    def __init__(self, slots: int, batch: int, readers: tuple[FrameReader, ...], fd: int, *layout: object):
        try:
            self.connection, child = Pipe()
            self.process = self._start(child, fd)
        except OSError as error:
            raise ReadError(f"cannot start a reader process ({error}): lower --num_data_workers") from None
        self._ask(slots, batch, readers, *layout)

    @staticmethod
    def _start(child: Connection, fd: int) -> subprocess.Popen:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the child inherits that
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(ROOT), str(child.fileno()), str(fd)],
                pass_fds=(child.fileno(), fd),
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    # Keep memory that was freed. To ask the system for each chunk's buffer anew makes blosc2 five
                    # times slower (glibc; other systems ignore this).
                    "MALLOC_MMAP_MAX_": "0",
                    "MALLOC_TRIM_THRESHOLD_": str(2**40),
                },
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            child.close()

    def read(self, slot: int, part: int, place: int, file: int, t: int) -> None:
        """Fill frame `place` of the inputs (part 0), targets (1) or what is forced (2) of a slot. Raises ReadError."""
        self._ask(slot, part, place, file, t)
        try:
            error = self.connection.recv()
        except (EOFError, OSError):
            self._say_end()
        if error is not None:
            raise ReadError(error)

    def __enter__(self) -> "ReaderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.connection.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it hangs in a read
            self.process.kill()
            self.process.wait()

    def _ask(self, *message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            self._say_end()

    def _say_end(self) -> None:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ReadError(f"reader process {self.process.pid} {how}: out of memory? lower --num_data_workers") from None


def main(socket: str, memory: str) -> None:
    connection = Connection(int(socket))
    slots, batch, readers, *layout = connection.recv()
    ring = BatchRing(slots, batch, readers, int(memory), *layout)
    while True:
        try:
            slot, part, place, file, t = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent closed the connection, or is gone
            return
        error = None
        try:
            reader = readers[part]
            reader.read(file, t, ring.frames[slot][part][place], None)
        except ReadError as found:
            error = str(found)
        connection.send(error)
