"""Files that anyone may have made: what is read lies where it should, is of a size, and lets nobody wait. No torch."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINKED_FILES = "LINKED_FILES"  # 1 in the environment: links, and HDF5 files, may lead out of their folder
LARGEST_TEXT = 2**26  # bytes
LARGEST_NUMBER = 2**63  # of whole ones


def check_kind(path: Path) -> None:
    """Raise ValueError for a pipe, a socket or a device: who opens one may wait for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is no file, but a pipe, a socket or a device: copy what it gives into a file")


def may_link() -> bool:
    """Does the user trust what lies out of the folder of a file that names it?"""
    return os.environ.get(LINKED_FILES) == "1"


def check_own(folder: Path) -> None:
    """Raise ValueError where a folder that others may have made holds pipes, or links that lead out of it.

    Processes read and write there by names that they know: a link of such a name would lead them elsewhere.
    """
    root, left = os.path.realpath(folder), [str(folder)]
    while left:
        try:
            entries = [*os.scandir(left.pop())]
        except FileNotFoundError:  # another process is at work here
            continue
        except OSError as error:
            raise ValueError(f"cannot list {error.filename} ({error.strerror}): mend that") from None
        for entry in entries:
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if os.path.commonpath([root, target]) != root and not may_link():
                    raise ValueError(
                        f"{entry.path} is a link to {target}, out of its folder: put there what it leads to, or, if "
                        f"you trust the folder, set {LINKED_FILES}=1"
                    )
            elif entry.is_dir():
                left.append(entry.path)
            elif not entry.is_file():  # asks no storage: the folder says so
                check_kind(Path(entry.path))


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Return what a file of text holds.

    Raises ValueError for a pipe, for more than `most` bytes, and for what is no UTF-8; OSError as any reader.
    """
    check_kind(path)
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{path} has {size:,} bytes: no such file has more than {most:,}")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return what a file of JSON holds. Raises ValueError as `read_text`, for other text, and for huge numbers."""
    try:
        return from_json(read_text(path), str(path))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def from_json(content: str, of: str = "a text") -> Any:
    """Return what a text of JSON says. Raises ValueError, and for huge numbers, and RecursionError."""

    def number(text: str) -> int:
        if len(text) > 20 or abs(int(text)) >= LARGEST_NUMBER:
            raise ValueError(f"{of} has a number of {len(text)} digits")
        return int(text)

    return json.loads(content, parse_int=number)


# What a value of JSON must be, for those who read it.


def is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < LARGEST_NUMBER


def is_number(x: Any) -> bool:
    """A number, or what is none: a loss may be."""
    return isinstance(x, int | float) and not isinstance(x, bool)


def is_finite(x: Any) -> bool:
    return is_number(x) and math.isfinite(x)


def is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def is_text(x: Any) -> bool:
    return isinstance(x, str)


def holds(**entries: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return what tells a dict with such entries, whatever else it has."""
    return lambda x: isinstance(x, dict) and all(name in x and fits(x[name]) for name, fits in entries.items())


def list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list) and all(map(fits, x))
