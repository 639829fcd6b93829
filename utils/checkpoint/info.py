"""info.json of a checkpoint: all that a run needs beside tensors. What it says is checked before anyone uses it."""

import json
import re
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.checkpoint.storage import METADATA, check_regular
from utils.checksum import checksum
from utils.files import patiently, write_text

FORMAT = 2  # 1, of version 0.1.0, had no checksums
INFO = "info.json"
CHECKSUM, METADATA_CHECKSUM = "checksum of this file", f"checksum of {METADATA}"


class Unreadable(ValueError):
    """A checkpoint that is damaged or incomplete."""


def is_name(text: str) -> bool:
    """Is this the name of a checkpoint's folder?"""
    return re.fullmatch(r"[0-9]{8,}(-validated)?", text) is not None


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_best(x: Any) -> bool:
    """The best checkpoint lies beside this one."""
    if not isinstance(x, dict) or {"loss", "name"} - x.keys():
        return False
    nothing = x["loss"] is None and x["name"] is None
    return nothing or (_is_number(x["loss"]) and _is_text(x["name"]) and is_name(x["name"]))


def _is_files(x: Any) -> bool:
    """Files of this folder, and their sizes."""
    return isinstance(x, dict) and all(re.fullmatch(r"[\w.]+", name) and _is_count(size) for name, size in x.items())


def _holds(**entries: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and all(name in x and fits(x[name]) for name, fits in entries.items())


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list) and all(map(fits, x))


ENTRIES = {
    "iteration": _is_count, "epochs": _is_count, "is_finished": _is_flag, "epoch_losses": _list_of(_is_number),
    "skipped": _is_count, "scaler": _holds(), "train_samples": _is_count, "best": _is_best, "files": _is_files,
    "layout": _holds(ranks=_is_count, tensor_parallel=_is_count, context_parallel=_is_count), "data": _holds(),
    "written": _is_number, "config": _holds(num_iters=_is_count, amp_mode=_is_text), "versions": _holds(torch=_is_text),
}  # fmt: skip


def write_info(folder: Path, info: dict[str, Any]) -> None:
    """Write info.json, once all other files are there: it has their sizes, and checksums. Raises OSError."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    told = {**info, "format": FORMAT, "written": time.time(), "files": sizes}
    told[METADATA_CHECKSUM] = checksum(folder / METADATA)
    write_text(folder / INFO, json.dumps({**told, CHECKSUM: _checksum(told)}, indent=1))


def read_info(folder: Path) -> dict[str, Any]:
    """Return the info of a complete checkpoint. Raises Unreadable, with the file at fault, for another one."""
    try:
        return patiently(lambda: _read_info(folder))
    except OSError as error:
        raise Unreadable(f"{error.filename or folder}: {error.strerror or error}") from None


def _read_info(folder: Path) -> dict[str, Any]:
    try:
        check_regular(folder / INFO)
        info = json.loads((folder / INFO).read_text())
        format = info["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable(f"{folder} is not complete ({type(error).__name__} in {INFO})") from None
    if format not in (1, FORMAT):
        raise Unreadable(f"{folder} has format {format}, and this code reads {FORMAT}")
    if format == FORMAT and info.pop(CHECKSUM, None) != _checksum(info):
        raise Unreadable(f"{folder / INFO} has another checksum than when it was written")
    info.setdefault("written", folder.stat().st_mtime)  # seconds since 1970; the first format did not say
    for name, fits in ENTRIES.items():
        if name not in info or not fits(info[name]):
            raise Unreadable(f"{folder / INFO}: {name} is {str(info.get(name))[:80]!r}, which no run writes")
    for name, size in {METADATA: None, **info["files"]}.items():
        check_regular(folder / name)
        found = (folder / name).stat().st_size
        if found != size:
            raise Unreadable(f"{folder / name} has {found:,} bytes, not {size or 0:,}")
    try:
        if format == FORMAT and checksum(folder / METADATA) != info.get(METADATA_CHECKSUM):
            raise Unreadable(f"{folder / METADATA} has another checksum than when it was written")
    except EOFError as error:
        raise Unreadable(f"{folder / METADATA}: {error}") from None
    return info


def _checksum(info: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(info, sort_keys=True).encode())
