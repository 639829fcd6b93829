"""Faults to put into runs (interruptions.py): on the ranks, in a save, in the folder; and what each must lead to."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from utils.checkpoint import store as checkpoint
from utils.observers import EpochRecord, Observer
from utils.record import boards
from utils.run.run import Run
from utils.run.saving import Saving

# On the ranks: each looks at the run, or is called on every rank before it starts.


@dataclass
class At(Observer):
    """Something that happens to one rank, or to all, after an iteration (checkpoints follow 4, 5, 8, 10 and 12)."""

    do: Callable[[Run], None]
    rank: int | None = None
    iteration: int = 7

    def begin(self, run: Run) -> None:
        self.run = run

    def after_step(self, iteration: int, left: int) -> None:
        world = self.run.job.world
        if iteration != self.iteration or self.rank is not None and world.rank != self.rank % world.size:
            return
        (saving,) = (observer for observer in self.run.observers if isinstance(observer, Saving))
        if writer := saving.checkpointer.thread:
            writer.join()  # then what is there is known
        self.do(self.run)


@dataclass
class InValidation(Observer):
    """Something that happens to all ranks before the validation after an iteration."""

    do: Callable[[Run], None]
    iteration: int = 5  # the first one

    def begin(self, run: Run) -> None:
        self.run = run
        if not self.iteration:
            self.do(run)

    def after_training(self, record: EpochRecord) -> None:
        if record.iteration == self.iteration:
            self.do(self.run)


@dataclass(frozen=True)
class InSave:
    """Something that happens to one rank while it writes its third checkpoint, that of iteration 8."""

    around: Callable[[], contextlib.AbstractContextManager]
    rank: int = 0

    def __call__(self) -> None:
        if int(os.environ["RANK"]) != self.rank % int(os.environ["WORLD_SIZE"]):
            return
        original, calls = checkpoint.dcp.save, []

        def save(*args: object, **options: object) -> None:
            calls.append(None)
            with self.around() if len(calls) == 3 else contextlib.nullcontext():
                original(*args, **options)

        checkpoint.dcp.save = save


@dataclass(frozen=True)
class InPicture:
    """Kills rank 0 when half of its n-th picture is written."""

    n: int

    def __call__(self) -> None:
        original, paths = boards.imsave, []

        def half(path: Path, *args: object, **options: object) -> None:
            original(path, *args, **options)
            paths.append(path)
            if len(paths) == self.n:
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        boards.imsave = half


@dataclass(frozen=True)
class Send:
    """A signal, to this process."""

    number: int

    def __call__(self, _: Run) -> None:
        os.kill(os.getpid(), self.number)


def make_unwritable(this: Run) -> None:
    """Nothing can be written where checkpoints go. (For root no folder is read-only: here it is no folder.)"""
    if this.logger:
        (this.folder / "checkpoints").rename(this.folder / "kept")
        (this.folder / "checkpoints").touch()


@contextlib.contextmanager
def killed() -> Iterator[None]:
    """Kill this process when it writes a file of the checkpoint."""

    def half(_: object, file: BinaryIO, *args: object, **options: object) -> None:
        file.write(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    yield


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """A disk without room: no file grows beyond 20 kB. (Python ignores the signal SIGXFSZ: writing fails.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What happens to the folder of a run between two processes.


def nothing(_: Path) -> None:
    pass


def truncate(folder: Path) -> None:
    """Cut a file of the newest checkpoint to half its size."""
    file = sorted(checkpoint.find(folder / "checkpoints")[0].glob("*.distcp"))[0]
    os.truncate(file, file.stat().st_size // 2)


def lose_shard(folder: Path) -> None:
    """Remove a file of the newest checkpoint."""
    sorted(checkpoint.find(folder / "checkpoints")[0].glob("*.distcp"))[-1].unlink()


def make_writable(folder: Path) -> None:
    (folder / "checkpoints").unlink()
    (folder / "kept").rename(folder / "checkpoints")


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Args:
        on_ranks: observers of the run, and what is called on each rank before it starts.
        codes: exit codes that a rank may have.
        resumes: iterations done in the checkpoint that the next process goes on from.
        says: what the log or the terminal tells.
        then: what happens to the folder before the next process.
    """

    on_ranks: tuple[Observer | Callable[[], None], ...]
    codes: set[int]
    resumes: int
    says: str
    then: Callable[[Path], None] = nothing


STOP, KILL = At(Send(signal.SIGTERM)), Send(signal.SIGKILL)
# A rank that is asked to stop after iteration 7 tells the others in the 8th, and all stop after the 9th. A rank that
# is killed takes the others with it: they end with 1.
FAULTS = {
    "SIGTERM": Fault((STOP,), {75}, 9, "Stopping after 9 of 14 iterations: SIGTERM"),
    "SIGUSR1, one rank": Fault((At(Send(signal.SIGUSR1), rank=-1),), {75}, 9, "Stopping after 9 of 14 iterations: "),
    "SIGINT": Fault((At(Send(signal.SIGINT)),), {75}, 9, "Stopping after 9 of 14 iterations: SIGINT"),
    "SIGTERM in validation": Fault((InValidation(Send(signal.SIGTERM)),), {75}, 5, "Stopping after 5 of 14 iter"),
    "SIGKILL, one rank": Fault((At(KILL, rank=-1),), {-9, 1}, 5, ""),
    "SIGKILL, all ranks": Fault((At(KILL, iteration=9),), {-9, 1}, 8, ""),
    "SIGKILL in mid-save": Fault((InSave(killed),), {-9, 1}, 5, ""),
    "SIGKILL in mid-save, last rank": Fault((InSave(killed, rank=-1),), {-9, 1}, 5, ""),
    "disk full in mid-save": Fault((InSave(full_disk), At(KILL, 0, 9)), {-9, 1}, 5, "00000008 was not written"),
    "newest checkpoint truncated": Fault((STOP,), {75}, 8, " bytes, not ", truncate),
    "shard missing": Fault((STOP,), {75}, 8, "No such file", lose_shard),
    "folder unwritable": Fault((At(make_unwritable),), {74}, 5, "The last checkpoint was not written", make_writable),
}
