"""Files and folders: there whole or not at all, locked by one process, JSON that any reader takes. No torch."""

import errno
import fcntl
import json
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from utils.errors import ReadError
from utils.reading import check_kind, from_json, holds, is_count, is_text

T = TypeVar("T")
is_event = holds(event=is_text, iteration=is_count)  # what each line of metrics.jsonl is
LARGEST_RECORDS = 2**31  # bytes of a metrics.jsonl: five million lines
NAMED = 10  # lines of one that are damaged
FAILS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)  # the last two: a client is cut off
CHECKED = re.compile(r'(\{.*), "crc32": "([0-9a-f]{8})"\}')


@contextmanager
def whole(path: Path, sync: bool = True) -> Iterator[Path]:
    """Yield a path beside `path`, for a file that takes that name if the body succeeds; else it goes.

    `sync` brings it to the disk before: what has the name is then whole after a power cut, too.
    """
    part = part_of(path)
    if part.is_symlink():  # who wrote there would write elsewhere
        part.unlink()
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


def seen(path: str | Path) -> list[str | int]:
    """Return where a file lies, and what changes when it does; also of a folder of files, as Zarr writes them."""
    status = [file.stat() for file in Path(path).rglob("*") if file.is_file()] or [Path(path).stat()]
    total, newest = sum(one.st_size for one in status), max(one.st_mtime_ns for one in status)
    return [str(Path(path).resolve()), len(status), total, newest]


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder; none where it is not there.

    Raises ReadError where it cannot be listed, or lies behind a link that leads nowhere: what a storage does not show
    now may be there. (`glob` finds nothing behind such a link.) Such links in it count as folders.
    """
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir() or _leads_nowhere(entry.path)]
    except FileNotFoundError:
        if link := next(filter(_leads_nowhere, (folder, *folder.parents)), None):
            raise ReadError(f"{link} is a link to what is not there: mend that, or wait for its storage") from None
        return []
    except OSError as error:
        raise ReadError(f"cannot list {folder} ({error.strerror}): mend that, or wait for its storage") from None


def _leads_nowhere(path: str | Path) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def storage_fails(error: BaseException) -> bool:
    """Is it an error of the storage, or of the way to it, that may pass? It says nothing of the file."""
    return isinstance(error, OSError) and error.errno in FAILS


def patiently(read: Callable[[], T]) -> T:
    """Return what `read` does; where its storage fails, it is called again after half a second, and after two more."""
    for pause in (0.5, 2):
        try:
            return read()
        except OSError as error:
            if not storage_fails(error):
                raise
        time.sleep(pause)
    return read()


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
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
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


def to_line(event: dict[str, Any]) -> str:
    """Return a line of metrics.jsonl. Its last entry is the checksum of the line without it."""
    text = to_json(event)
    return f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def read_events(path: Path, fits: Callable[[Any], bool] = is_event) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, or of another file that `to_line` wrote.

    Half a line that a process left when it was killed is none.
    Lines that are not what was written are left out, and named in the log. (Those of version 0.1.0 have no checksum.)
    Raises ValueError for a pipe, and for more bytes than any run writes.

    Args:
        fits: tells a record from what is none.
    """
    check_kind(path)
    if (size := path.stat().st_size) > LARGEST_RECORDS:
        raise ValueError(f"{path} has {size:,} bytes: no such file has more than {LARGEST_RECORDS:,}")
    damaged, events, lines = 0, [], path.read_bytes().decode(errors="replace").split("\n")
    has_checksums = any(map(_has_checksum, lines))
    for number, line in enumerate(lines, 1):
        found = CHECKED.fullmatch(line)
        try:
            if has_checksums and not (found and zlib.crc32(f"{found[1]}}}".encode()) == int(found[2], 16)):
                raise ValueError
            event = from_json(f"{found[1]}}}" if found else line)
            if not fits(event):
                raise ValueError
            events.append(event)
        except (ValueError, RecursionError):
            if number < len(lines) or CHECKED.match(line):
                damaged += 1
                if damaged <= NAMED:
                    logging.warning("%s: line %d is damaged, and left out", path, number)
    if damaged > NAMED:
        logging.warning("%s: so are %d more lines", path, damaged - NAMED)
    return events


def _has_checksum(line: str) -> bool:
    """Does a line end as `to_line` ends it? One of the characters may be another one."""
    end = f"{line[-22:-10]}{line[-2:]}"
    return len(line) > 22 and sum(a != b for a, b in zip(end, ', "crc32": ""}')) <= 1


def cut_records(path: Path, iteration: int, epochs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Remove the records of metrics.jsonl that a resumed run will write again: those after a checkpoint.

    Returns the records that stay, and those removed.
    """
    kept: list[dict[str, Any]] = []
    void: list[dict[str, Any]] = []
    if path.exists():
        events = read_events(path)
    else:
        events = []
        logging.warning("%s is not there: what it told up to iteration %d is lost", path, iteration)
    for event in events:
        validates = event["event"] == "epoch" or "validation_rate" in event  # at the iteration that it tells of
        epoch = event.get("epoch")
        stays = event["iteration"] <= iteration and (not validates or (is_count(epoch) and epoch <= epochs))
        (kept if stays else void).append(event)
    write_text(path, "".join(map(to_line, kept)))
    return kept, void
