"""Checkpoints: all that a run needs to go on, on any number of ranks; complete, or not there at all.

    checkpoints/00000128/               after 128 iterations
    checkpoints/00000250-validated/     after 250, and a validation
        *.distcp  .metadata             tensors (utils/checkpoint/state.py), by torch.distributed.checkpoint
        info.json                       all that is no tensor, and the sizes of these files (utils/checkpoint/info.py)

Every rank writes its part, aside: into 00000128.part. It is synced to the disk, info.json last, and then renamed.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from utils.checkpoint.info import is_name, unreadable, write_info
from utils.checkpoint.storage import METADATA, Reader, Writer
from utils.errors import first_line
from utils.files import complete, folders_in, part_of, patiently

FAILURES = (Exception, dcp.CheckpointException)  # the second is none of the first


def save(
    folder: Path,
    shards: Callable[[], dict[str, Tensor]],
    info: dict[str, Any],
    group: dist.ProcessGroup,
    sync: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint; every rank of `group` calls this with its part.

    Raises OSError, on all ranks, if it fails.

    Args:
        shards: returns this rank's part.
        sync: called on rank 0 before the checkpoint counts.
    """
    part, is_main = part_of(folder), dist.get_rank(group) == 0
    error, own = None, {}
    try:
        if is_main:
            remove(folder.parent.glob("*.part"))  # of a process that was killed, of ranks that lost each other
            part.mkdir(exist_ok=True)  # dcp would make the run's folder, too, where that has another name by now
        own = shards()
    except FAILURES as found:
        error = reason(found)
    error = _share(error, group)  # before dcp waits for a rank that has no part to give
    try:
        if not error:
            dcp.save(own, storage_writer=Writer(part), process_group=group)
            if is_main:
                sync()
                write_info(part, info)
                complete(folder)
    except FAILURES as found:  # of any rank: dcp raises on all of them
        error = reason(found)
    error = _share(error, group)
    if error:
        if is_main:
            remove([part])
        raise OSError(error)


def _share(error: str | None, group: dist.ProcessGroup) -> str | None:
    """Return the first rank's error, on all ranks."""
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    return next(filter(None, errors), None)


def reason(error: BaseException) -> str:
    """Return the cause of an error in one line: dcp's own names every rank with its traceback."""
    return first_line(_cause(error))


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def metadata(folder: Path) -> Metadata:
    """Return dcp's description: of each tensor `size` and `properties.dtype`, where it lies. Raises Unreadable."""
    try:
        return patiently(Reader(folder).read_metadata)
    except FAILURES as error:  # a damaged file can raise anything
        raise unreadable(folder / METADATA, error, reason(error)) from None


def load(folder: Path, shards: dict[str, Tensor], alone: bool = False, known: Metadata | None = None) -> None:
    """Fill `shards` in place from a checkpoint of any grid, whose `metadata` several ranks know before.

    With `alone` one process fills whole tensors.

    Raises Unreadable, on all ranks, if it fails.
    """
    known = known or metadata(folder)

    def load_once() -> None:
        try:
            dcp.load(shards, storage_reader=Reader(folder, known), no_dist=alone)
        except FAILURES as error:
            raise _cause(error) from None  # the same on all ranks

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patiently(load_once)
    except FAILURES as error:
        raise unreadable(folder, error, first_line(error)) from None


def read(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, whole, on one process. Raises Unreadable."""
    known = metadata(folder)
    found = {name: x for name, x in known.state_dict_metadata.items() if name.startswith(prefix)}
    try:
        tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in found.items()}
    except RuntimeError as error:
        raise unreadable(folder / METADATA, error, first_line(error)) from None
    load(folder, tensors, alone=True, known=known)
    return tensors


def name(iteration: int, is_validated: bool) -> str:
    """Return the name of a checkpoint's folder. In the order of names, a later one follows an earlier one."""
    return f"{iteration:08d}" + "-validated" * is_validated


def find(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, damaged ones too, the newest first. Raises ReadError as `folders_in`."""
    return sorted((path for path in folders_in(folder) if is_name(path.name)), reverse=True)


def set_aside(folders: Iterable[Path]) -> None:
    """Rename checkpoints that no longer count: to remove them takes time, and half of one must not look like one."""
    for folder in folders:
        void = folder.with_name(f"{folder.name}.void")
        remove([void])
        folder.rename(void)


def remove(folders: Iterable[Path]) -> None:
    """Remove folders with all that is in them."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
