"""Files and folders: there whole or not at all, locked by one process, JSON that any reader takes. No torch."""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def whole(path: Path, sync: bool = True) -> Iterator[Path]:
    """Yield a path beside `path`, for a file that takes that name if the body succeeds; else it goes.

    `sync` brings it to the disk before: what has the name is then whole after a power cut, too.
    """
    part = part_of(path)
    try:
        yield part
        complete(path, sync)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def part_of(path: Path) -> Path:
    """Return where something lies that is not whole yet."""
    return path.with_name(f"{path.name}.part")


def complete(path: Path, sync: bool = True) -> None:
    """Give what is written aside, a file or a folder of files that are on the disk, its name."""
    if sync:
        to_disk(part_of(path))
    part_of(path).rename(path)
    if sync:
        to_disk(path.parent)


def to_disk(path: Path) -> None:
    """Make the disk know what a file holds, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    with whole(path) as part:
        part.write_text(text, newline="")


def lock(path: Path, wait: bool = False) -> TextIO | None:
    """Take a lock for this process, until it ends or closes the file that is returned; None where another one has it.

    A file system without locks locks nothing, unless one shall `wait`: then OSError says so. The lock is one of
    processes, and lost when this one closes any file opened from the same path. (The package filelock, which comes with
    torch, writes a file where there are no locks: that outlives a process that is killed, and would keep the next out.)
    """
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    except OSError:
        if wait:
            raise
    return file


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON: lists for arrays, null for what is not finite, for which JSON has no word."""

    def clean(item: Any) -> Any:
        if hasattr(item, "tolist"):  # of numpy, of torch
            item = item.tolist()
        if isinstance(item, dict):
            return {key: clean(x) for key, x in item.items()}
        if isinstance(item, (list, tuple)):
            return [clean(x) for x in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(clean(value), indent=indent, allow_nan=False)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, but half a line that a process left when it was killed."""
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def cut_records(path: Path, iteration: int, epochs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Remove the records of metrics.jsonl that a resumed run will write again: those after a checkpoint.

    Returns the records that stay, and those removed.
    """
    kept: list[dict[str, Any]] = []
    void: list[dict[str, Any]] = []
    for event in read_events(path) if path.exists() else ():
        validates = event["event"] == "epoch" or "validation_rate" in event  # at the iteration that it tells of
        stays = event["iteration"] <= iteration and (not validates or event["epoch"] <= epochs)
        (kept if stays else void).append(event)
    write_text(path, "".join(to_json(event) + "\n" for event in kept))
    return kept, void
