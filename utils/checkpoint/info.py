"""info.json of a checkpoint: all that a run needs beside tensors. What it says is checked before anyone uses it."""

import json
import re
import time
import zlib
from pathlib import Path
from typing import Any

from utils.checkpoint.storage import METADATA, check_regular
from utils.checksum import checksum
from utils.files import patiently, storage_fails, write_text
from utils.reading import holds, is_count, is_finite, is_flag, is_number, is_text, list_of, read_json

FORMAT = 3  # 1, of version 0.1.0, had no checksums; those of tensors were others in 2, and are passed over
INFO = "info.json"
CHECKSUM, METADATA_CHECKSUM = "checksum of this file", f"checksum of {METADATA}"


class Unreadable(ValueError):
    """A checkpoint that is damaged or incomplete."""


class Unreachable(Unreadable):
    """A checkpoint whose storage fails, for longer than a moment: it may be whole."""


def unreadable(place: str | Path, error: BaseException, told: str) -> Unreadable:
    """Return what an error means for a checkpoint."""
    return (Unreachable if storage_fails(error) else Unreadable)(f"{place}: {told}")


def is_name(text: str) -> bool:
    """Is this the name of a checkpoint's folder?"""
    return re.fullmatch(r"[0-9]{8,19}(-validated)?", text) is not None


def is_checkpoint(path: Path) -> bool:
    """Is this a checkpoint's folder, by its name? A run may have such a name, too, and has checkpoints of its own."""
    return is_name(path.name) and not (path / "checkpoints").is_dir()


def _is_best(x: Any) -> bool:
    """The best checkpoint lies beside this one."""
    if not isinstance(x, dict) or {"loss", "name"} - x.keys():
        return False
    nothing = x["loss"] is None and x["name"] is None
    return nothing or (is_finite(x["loss"]) and is_text(x["name"]) and is_name(x["name"]))


def _is_files(x: Any) -> bool:
    """Files of this folder, and their sizes."""
    return isinstance(x, dict) and all(re.fullmatch(r"[\w.]+", name) and is_count(size) for name, size in x.items())


_is_scaler = holds(
    scale=is_finite, growth_factor=is_finite, backoff_factor=is_finite, growth_interval=is_count,
    _growth_tracker=is_count,
)  # fmt: skip
ENTRIES = {
    "iteration": is_count, "epochs": is_count, "is_finished": is_flag, "epoch_losses": list_of(is_number),
    "skipped": is_count, "scaler": lambda x: x == {} or _is_scaler(x), "train_samples": is_count, "best": _is_best,
    "files": _is_files, "layout": holds(ranks=is_count, tensor_parallel=is_count, context_parallel=is_count),
    "data": holds(), "written": is_number, "config": holds(num_iters=is_count, amp_mode=is_text),
    "versions": holds(torch=is_text), "stacked": lambda x: x is None or list_of(is_text)(x),
    "valid_samples": lambda x: x is None or is_count(x),
}  # fmt: skip


def write_info(folder: Path, info: dict[str, Any]) -> None:
    """Write info.json, once all other files are there: it has their sizes, and checksums. Raises OSError."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    told = {**info, "format": FORMAT, "written": time.time(), "files": sizes}
    told[METADATA_CHECKSUM] = checksum(folder / METADATA)
    write_text(folder / INFO, json.dumps({**told, CHECKSUM: _checksum(told)}, indent=1))


def read_info(folder: Path) -> dict[str, Any]:
    """Return the info of a complete checkpoint. Raises Unreadable, with the file at fault, for another one.

    Of that Unreachable where the storage fails.
    """
    try:
        return patiently(lambda: _read_info(folder))
    except OSError as error:
        raise unreadable(error.filename or folder, error, error.strerror or str(error)) from None


def _read_info(folder: Path) -> dict[str, Any]:
    try:
        check_regular(folder / INFO)
        info = read_json(folder / INFO)
        format, known = info["format"], info.pop(CHECKSUM, None)
        found = _checksum(info)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{folder} is not complete ({type(error).__name__} in {INFO})") from None
    if format not in range(1, FORMAT + 1):
        raise Unreadable(f"{folder} has format {format!r}, and this code reads {FORMAT}")
    if format > 1 and known != found:
        raise Unreadable(f"{folder / INFO} has another checksum than when it was written")
    info.setdefault("written", folder.stat().st_mtime)  # seconds since 1970; the first format did not say
    for name in ("stacked", "valid_samples"):  # they did not always say
        info.setdefault(name, None)
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
