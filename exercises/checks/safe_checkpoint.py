"""A checkpoint that survives a kill: killed at each line, and in the middle of what it writes."""

import contextlib
import errno
import hashlib
import io
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from exercises.checks.common import Wrong, load, say

MINUTES, DEFINES = 40, "save_checkpoint"
AFTER = "4-long-runs.md#what-a-checkpoint-is"
HINTS = """
torch.save to the name that load_checkpoint reads would cut the good file to nothing first, and then fill it. Write to
another name, in the same folder, and give it the right name when it is whole.

os.replace(new, old) works where `old` is there: there is no need to remove it first, and no moment without it.

A rename can reach the disk before the bytes of the file do: then, after a power failure, the right name holds nothing.
So between writing and renaming: file.flush(), os.fsync(file.fileno()).

Let load_checkpoint read one name only, and let save_checkpoint always write to the same other name: what a kill leaves
is never read, and written over by the next save. FileNotFoundError says that there is none.
"""
KILLED, RAISED = 9, 3  # how the process of a save ends
MOST = 500  # moments of a save


class Kills:
    """Ends this process at the n-th moment.

    Moments are: before each line that a file runs, half way through each torch.save, and when a file was emptied.

    Writes to `log` where that was, and a digest of all that was brought to the disk: after a power failure the rest is
    lost. With `is_full` half a torch.save is an error of the disk.
    """

    def __init__(self, path: str, folder: Path, log: Path, n: float, is_full: bool = False):
        self.path, self.folder, self.log, self.left, self.is_full = os.path.abspath(path), folder, log, n, is_full
        self.save, self.fsync = torch.save, os.fsync

    def note(self, kind: str, what: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{kind} {what}\n")

    def moment(self, where: str) -> None:
        self.left -= 1
        if self.left < 0:
            self.note("killed", where)
            os._exit(KILLED)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        if frame.f_code.co_filename != self.path:
            return None
        if event == "line":
            self.moment(f"before line {frame.f_lineno}")
        return self.trace

    def audit(self, event: str, arguments: tuple) -> None:
        """Who opens a file to write it anew empties it first: so does who copies onto it."""
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and (arguments[2] or 0) & os.O_TRUNC:
            path = Path(arguments[0])
            if path.parent == self.folder and path.is_file() and path.stat().st_size:
                os.truncate(path, 0)
                self.moment(f"when {path.name} was opened for writing, and so emptied")

    def torch_save(self, found: Any, f: Any, *args, **kwargs) -> None:
        """Save in two halves, and let the system have both."""
        whole = io.BytesIO()
        self.save(found, whole, *args, **kwargs)
        data = whole.getvalue()
        is_name = isinstance(f, (str, os.PathLike))
        with open(f, "wb") if is_name else contextlib.nullcontext(f) as file:
            file.write(data[: len(data) // 2])
            file.flush()
            self.moment("half way through torch.save")
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            file.write(data[len(data) // 2 :])

    def synced(self, fd: int) -> None:
        self.fsync(fd)
        for path in files_of(self.folder):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                self.note("synced", digest(path))


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state_of(step: int) -> dict[str, Tensor]:
    return {"weight": torch.full((16, 16), float(step)), "bias": torch.arange(8.0) + step}


@dataclass
class Trial:
    """A folder, and what happens to it."""

    solution: ModuleType
    path: str  # of the solution
    folder: Path
    log: Path

    def save(self, step: int, n: float = math.inf, is_full: bool = False) -> int:
        """Save in a process of its own, killed at the n-th moment; return how it ended."""
        child = os.fork()
        if not child:
            kills = Kills(self.path, self.folder, self.log, n, is_full)
            torch.save, os.fsync = kills.torch_save, kills.synced
            sys.addaudithook(kills.audit)
            sys.settrace(kills.trace)
            try:
                self.solution.save_checkpoint(self.folder, step, state_of(step))
            except BaseException as error:
                sys.settrace(None)
                kills.note("raised", f"{type(error).__name__}: {error}")
                os._exit(RAISED)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def told(self, kind: str) -> list[str]:
        """Return what the log says of a kind."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == kind]

    def clean(self, step: int) -> None:
        """Save, and nothing happens."""
        if self.save(step):
            raise Wrong(f"save_checkpoint raises {self.told('raised')[-1]}")

    def lose_power(self) -> None:
        """Take from each file what was not brought to the disk: half of it."""
        kept = set(self.told("synced"))
        for path in files_of(self.folder):
            if digest(path) not in kept:
                os.truncate(path, path.stat().st_size // 2)

    def load(self) -> tuple[Any, str]:
        """Return what load_checkpoint finds, and in words why it is none."""
        try:
            found = self.solution.load_checkpoint(self.folder)
        except NotImplementedError:
            raise
        except Exception as error:
            return None, f"load_checkpoint raises {type(error).__name__}"
        return found, "load_checkpoint finds none" if found is None else "load_checkpoint finds something else"


def is_state(found: Any, step: int) -> bool:
    """Is this the checkpoint of a step?"""
    if not (isinstance(found, tuple) and len(found) == 2 and found[0] == step and isinstance(found[1], dict)):
        return False
    expected = state_of(step)
    return found[1].keys() == expected.keys() and all(torch.equal(found[1][k], x) for k, x in expected.items())


def check(path: str, rank: int, size: int) -> None:
    solution = load(path)
    torch.set_default_dtype(torch.float32)
    with tempfile.TemporaryDirectory() as name:
        trials = (fresh(solution, path, Path(name) / str(i)) for i in itertools.count())
        plainly(next(trials), rank)
        moments = killed(trials, rank)
        without_power(trials, moments, rank)
        full(next(trials), rank)
        again(next(trials), moments, rank)


def fresh(solution: ModuleType, path: str, folder: Path) -> Trial:
    (folder / "run").mkdir(parents=True)
    return Trial(solution, path, folder / "run", folder / "log")


def plainly(trial: Trial, rank: int) -> None:
    found, _ = trial.load()
    if found is not None:
        raise Wrong(f"in an empty folder load_checkpoint finds {found}: None says that there is none (TODO 1)")
    for step in (1, 2):
        trial.clean(step)
        found, why = trial.load()
        if not is_state(found, step):
            raise Wrong(f"after a save of step {step}, {why}: (step, state) was expected (TODO 1 and 2)")
    say(rank, "what is saved, is found")


def killed(trials: Iterator[Trial], rank: int) -> int:
    """Kill a second save at each of its moments; return how many there are."""
    for n in range(MOST):
        trial = next(trials)
        trial.clean(1)
        if trial.save(2, n) != KILLED:
            break
        found, why = trial.load()
        if not (is_state(found, 1) or is_state(found, 2)):
            raise Wrong(
                f"killed {trial.told('killed')[-1]}, {why}: neither the new nor the old one is whole. Is the good file "
                "touched before the new one is complete (TODO 2), or is a part taken for a whole (TODO 1)?"
            )
    say(rank, f"killed at each of {n} moments, it finds the old one or the new one")
    return n


def without_power(trials: Iterator[Trial], moments: int, rank: int) -> None:
    """The same, where the power fails: what was not brought to the disk is lost."""
    for n in [*range(moments), math.inf]:
        trial = next(trials)
        trial.clean(1)
        trial.save(2, n)
        trial.lose_power()
        found, why = trial.load()
        if not (is_state(found, 2) or (n < moments and is_state(found, 1))):
            when = f"{trial.told('killed')[-1]}" if n < moments else "after it returned"
            raise Wrong(
                f"the power fails {when}, and {why}: a new name was on the disk, and the bytes of its file were not "
                "(TODO 3)"
            )
    say(rank, "nor does a power failure harm it")


def full(trial: Trial, rank: int) -> None:
    """A disk that is full is an error, and harms nothing."""
    trial.clean(1)
    code = trial.save(2, is_full=True)
    found, why = trial.load()
    if not is_state(found, 1):
        raise Wrong(f"the disk was full, and {why}: the old checkpoint must stay")
    if code != RAISED:
        raise Wrong(
            "the disk was full, and save_checkpoint returns as if all were well: who calls it must hear of that"
        )
    say(rank, "a full disk is an error, and the old one stays")


def again(trial: Trial, moments: int, rank: int) -> None:
    """Killed again and again: leftovers do not pile up."""
    trial.clean(1)
    usual = len(files_of(trial.folder))
    for step in range(2, 12):
        trial.save(step, step * moments // 12)
    trial.clean(12)
    if not is_state(trial.load()[0], 12):
        raise Wrong("after ten killed saves, a good one is not found: a leftover stands in its way")
    left = len(files_of(trial.folder))
    if left > usual + 1:
        raise Wrong(
            f"after ten killed saves and a good one there are {left} files, {usual} are usual: the disk fills up"
        )
    say(rank, "leftovers do not pile up")
