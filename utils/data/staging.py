"""Copy the data to storage in the node before training: a shared file system is then read once, in long stretches.

A file keeps its path below the stage folder, so several data sets can lie there, and what is there already is used
again, once its checksum is found to be that of what was copied. The ranks of a node copy different files at the same
time; none of them has to know of the others.
"""

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from utils.checksum import Checksum, checksum
from utils.data.files import Files, stamp
from utils.data.hdf5 import is_linked
from utils.files import lock, part_of, whole

PIECE = 16 * 2**20  # bytes copied at a time
REPORT_EVERY = 10  # s
STARTED = time.time()  # of this process: all ranks are there before one of them begins to copy


def stage(files: Files, used: Iterable[int], folder: str) -> Files:
    """Copy the files numbered `used` below `folder`, and return `files` with the paths of the copies.

    A copy has the size and the date of its original; one that has not, of an earlier run perhaps, is made anew. Rank 0
    prints the progress. Raises ValueError where the folder cannot be written or is too small, and where an original is
    no longer the file that was looked at.
    """
    paths, used = list(files.paths), sorted({int(i) for i in used})
    copies = {Path(paths[i]): Path(folder, *Path(paths[i]).resolve().parts[1:]) for i in used}
    stamps = {Path(paths[i]): files.stamps[i] for i in used}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        progress = _Progress(copies, folder)
        progress.check_space()
        for original in copies:
            _check(original, stamps[original])
            if is_linked(original):
                raise ValueError(
                    f"{original} takes values from other files, which are not copied: leave --stage_dir out"
                )
        todo, rank = list(copies.items()), dist.get_rank() if dist.is_initialized() else 0
        for original, copy in todo[rank % len(todo) :] + todo[: rank % len(todo)]:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with lock(Path(f"{copy}.lock"), wait=True):  # the system gives it back if this process dies
                if is_same(original, copy) and not is_whole(copy):
                    print(f"Staging: {copy} has changed since it was copied: copied again", file=sys.stderr, flush=True)
                    copy.unlink()
                if not is_same(original, copy):
                    _copy(original, copy, stamps[original], progress)
            _check(original, stamps[original])
    except OSError as error:
        where = error.filename or folder
        raise ValueError(
            f"cannot copy the data to stage_dir {folder!r} ({where}: {error.strerror}): give another folder "
            f"in the node that you may write to, or leave --stage_dir out"
        ) from None
    progress.report(done=True)
    for i in used:
        paths[i] = str(copies[Path(paths[i])])
    of_copies = list(files.stamps)
    for i in used:
        of_copies[i] = stamp(paths[i])
    return replace(files, paths=tuple(paths), stamps=tuple(of_copies))


def _check(original: Path, seen: tuple[int, int]) -> None:
    """Raise ValueError where a file is not the one whose head was read: its values may begin elsewhere."""
    if stamp(original) != seen:
        raise ValueError(f"{original} is another file than at the start: begin again when nobody writes it any more")


def is_same(original: Path, copy: Path) -> bool:
    """Is `copy` a complete copy of `original`?"""
    try:
        (size, date), (size_there, date_there) = stamp(original), stamp(copy)
    except FileNotFoundError:
        return False
    return size == size_there and abs(date - date_there) < 2e9  # ns: some file systems count in pairs of seconds


def is_whole(copy: Path) -> bool:
    """Are the bytes of a copy those that were copied? One rank of a node reads them; the others take its word."""
    known = _checksum_file(copy)
    try:
        if known.stat().st_mtime < STARTED:
            if int(known.read_text()) != checksum(copy):
                return False
            os.utime(known)
        return True
    except (OSError, ValueError):  # of version 0.1.0, or damaged
        return False


def _checksum_file(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.checksum")


def _copy(original: Path, copy: Path, seen: tuple[int, int], progress: "_Progress") -> None:
    """Copy a file; it gets its name when it is complete. Nobody waits for the disk: the next job copies anew."""
    with whole(copy, sync=False) as part:
        found = Checksum(original.stat().st_size)
        with original.open("rb") as source, part.open("wb") as target:
            while piece := source.read(PIECE):
                target.write(piece)
                found.add(piece)
                progress.report()
        if checksum(part) != found.value:
            raise OSError(errno.EIO, "it reads otherwise than it was written", str(copy))
        shutil.copystat(original, part)
        _check(original, seen)
        _checksum_file(copy).write_text(str(found.value))


class _Progress:
    """How much of the copies is there, made by whichever rank of this node."""

    def __init__(self, copies: dict[Path, Path], folder: str):
        self.copies, self.folder = copies, folder
        self.total = sum(original.stat().st_size for original in copies)
        self.start = self.reported = time.perf_counter()
        self.before = self.copied()

    def copied(self) -> int:
        """Return the bytes that are there."""
        total = 0
        for original, copy in self.copies.items():
            with contextlib.suppress(FileNotFoundError):  # another rank may just have renamed it
                total += stamp(copy if is_same(original, copy) else part_of(copy))[0]
        return total

    def check_space(self) -> None:
        """Raise ValueError where the rest does not fit."""
        missing, free = self.total - self.before, shutil.disk_usage(self.folder).free
        if missing > free:
            raise ValueError(
                f"stage_dir {self.folder!r} has {free / 1e9:.1f} GB free, and the data need {missing / 1e9:.1f} GB: "
                f"give a larger one, use less with --limit_nsamples, or leave --stage_dir out"
            )

    def report(self, done: bool = False) -> None:
        """Print, now and then, how far it is."""
        now = time.perf_counter()
        if (not done and now < self.reported + REPORT_EVERY) or (dist.is_initialized() and dist.get_rank()):
            return
        self.reported, copied = now, self.copied()
        speed = (copied - self.before) / max(now - self.start, 1e-9) / 1e9
        print(
            f"Staging: {copied / 1e9:.2f} of {self.total / 1e9:.2f} GB in {self.folder}, {speed:.2f} GB/s",
            file=sys.stderr,
            flush=True,
        )
