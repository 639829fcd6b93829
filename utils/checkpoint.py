"""Checkpoints: all that a run needs to go on, on any number of ranks; complete, or not there at all.

    checkpoints/00000128/               after 128 iterations
    checkpoints/00000250-validated/     after 250, and a validation
        *.distcp  .metadata             tensors (utils/training_state.py), by torch.distributed.checkpoint
        info.json                       all that is no tensor, and the sizes of these files

Every rank writes its part, aside: into 00000128.part. It is synced to the disk, info.json last, and then renamed.
"""

import argparse
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from utils.files import complete, part_of, whole, write_text

FORMAT = 1
INFO = "info.json"

FAILURES = (Exception, dcp.CheckpointException)  # the second is none of the first


class Unreadable(ValueError):
    """A checkpoint that is damaged or incomplete."""


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
        shards: returns this rank's part; called when all ranks are here.
        sync: called on rank 0 before the checkpoint counts.
    """
    part, is_main = part_of(folder), dist.get_rank(group) == 0
    error = None
    try:
        if is_main:
            remove(folder.parent.glob("*.part"))  # of a process that was killed, of ranks that lost each other
        _share(None, group)
        # Copying ahead is for tensors on a GPU: it would wait for the GPU now and then.
        writer = dcp.FileSystemWriter(part, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        dcp.save(shards(), storage_writer=writer, process_group=group)
        if is_main:
            sync()
            _complete(folder, info)
    except FAILURES as found:  # of any rank: dcp raises on all of them
        error = _reason(found)
    error = _share(error, group)
    if error:
        if is_main:
            remove([part])
        raise OSError(error)


def _complete(folder: Path, info: dict[str, Any]) -> None:
    """Give a checkpoint whose tensors are written its info and its name."""
    part = part_of(folder)
    sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
    write_text(part / INFO, json.dumps({"format": FORMAT, **info, "files": sizes}, indent=1))
    complete(folder)


def _share(error: str | None, group: dist.ProcessGroup) -> str | None:
    """Return the first rank's error, on all ranks."""
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    return next(filter(None, errors), None)


def _reason(error: BaseException) -> str:
    """Return the cause of an error in one line: dcp's own names every rank with its traceback."""
    while isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_info(folder: Path) -> dict[str, Any]:
    """Return the info of a complete checkpoint. Raises Unreadable, with the file at fault, for another one."""
    try:
        info = json.loads((folder / INFO).read_text())
        files = info["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{folder} is not complete ({type(error).__name__} in {INFO})") from None
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise Unreadable(f"{folder / name}: {error.strerror}") from None
        if found != size:
            raise Unreadable(f"{folder / name} has {found:,} bytes, not {size:,}")
    if info["format"] != FORMAT:
        raise Unreadable(f"{folder} has format {info['format']}, and this code reads {FORMAT}")
    return info


def metadata(folder: Path) -> dict[str, Any]:
    """Return dcp's description of each tensor, with `size` and `properties.dtype`, by name. Raises Unreadable."""
    try:
        return dict(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    except FAILURES as error:  # a damaged file can raise anything
        raise Unreadable(f"{folder / '.metadata'}: {_reason(error)}") from None


def load(folder: Path, shards: dict[str, Tensor], alone: bool = False) -> None:
    """Fill `shards` in place from a checkpoint of any grid; `alone`, on one process, with whole tensors.

    Raises Unreadable, on all ranks, if it fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(shards, storage_reader=dcp.FileSystemReader(folder), no_dist=alone)
    except FAILURES as error:
        raise Unreadable(f"{folder}: {_reason(error)}") from None


def read(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, whole, on one process. Raises Unreadable."""
    found = {name: x for name, x in metadata(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in found.items()}
    load(folder, tensors, alone=True)
    return tensors


def read_weights(folder: Path, kind: str = "model") -> dict[str, Tensor]:
    """Return the weights in a checkpoint, or their moving average (`ema`), as a model on one device names them.

    Raises Unreadable.
    """
    weights = {name.removeprefix(f"{kind}."): x for name, x in read(folder, f"{kind}.").items()}
    # Matrices that the model has one below the other lie apart. Checkpoints that do not say which have only these.
    stacked = read_info(folder).get("stacked", [name for name in weights if ".qkv." in name])
    return {name: x.flatten(0, 1) if name in stacked else x for name, x in weights.items()}


def name(iteration: int, is_validated: bool) -> str:
    """Return the name of a checkpoint's folder. In the order of names, a later one follows an earlier one."""
    return f"{iteration:08d}" + "-validated" * is_validated


def is_name(text: str) -> bool:
    """Is this the name of a checkpoint's folder?"""
    return re.fullmatch(r"\d{8,}(-validated)?", text) is not None


def find(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, damaged ones too, the newest first."""
    return sorted((path for path in folder.glob("*") if is_name(path.name)), reverse=True)


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


def export(source: Path, out: Path, best: bool = False, ema: bool = False) -> str:
    """Write the weights of a checkpoint, of a run the newest complete one or the best, to one file; or their average.

    The file is that of `torch.save(model.state_dict())` on a single device: `torch.load(out, weights_only=True)`.
    Returns a line that says so. Raises ValueError where there is no such checkpoint, or `out` cannot be written.
    """
    folder, info = choose(source, best)
    weights = read_weights(folder, "ema" if ema else "model")
    if not weights:
        raise ValueError(
            f"{folder} holds no moving average of weights: leave --ema out (it takes --ema_decay in training)"
        )
    try:
        with whole(out) as part:
            torch.save(weights, part)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot write {out} ({_reason(error)}): give another file") from None
    total = sum(x.numel() for x in weights.values())
    return f"{folder}: wrote {total:,} weights after {info['iteration']} iterations to {out}"


def inspect(source: Path) -> str:
    """Return what the checkpoints of a run hold, a line each; of one checkpoint also its tensors.

    Raises ValueError where there is none.
    """
    folders = [source] if is_name(source.name) else find(source / "checkpoints")
    if not folders:
        raise ValueError(f"{source} holds no checkpoint: give the folder of a run, or one of its checkpoints")
    lines = []
    for folder in folders:
        try:
            info = read_info(folder)
        except Unreadable as error:
            lines.append(f"{folder.name:18}  damaged: {error}")
            continue
        layout, best = info["layout"], info["best"]
        size = sum(info["files"].values())
        grid = f"tp {layout['tensor_parallel']}, cp {layout['context_parallel']}"
        notes = ["finished"] * info["is_finished"]
        if best["name"] == folder.name:
            notes.append(f"the best, with a validation loss of {best['loss']:.6f}")
        lines.append(
            f"{folder.name:18}  {info['iteration']} of {info['config']['num_iters']} iterations, "
            f"validated epochs: {info['epochs']}, {size / 1e6:,.1f} MB by {layout['ranks']} rank(s) ({grid}), "
            f"torch {info['versions']['torch']}" + "".join(f"; {note}" for note in notes)
        )
        if folder == source:
            lines += [f"  {name:60} {list(x.size)}" for name, x in metadata(folder).items()]
    return "\n".join(lines)


def choose(source: Path, best: bool) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that a path means, with its info. Raises ValueError."""
    if is_name(source.name):
        return source, read_info(source)
    why = "give the folder of a run, or one of its checkpoints"
    for folder in find(source / "checkpoints"):
        try:
            info = read_info(folder)
        except Unreadable as error:
            why = str(error)
            continue
        if best and info["best"]["name"] is None:
            raise ValueError(f"{source} was not validated yet: leave --best out")
        if best and folder.name != info["best"]["name"]:
            return choose(folder.with_name(info["best"]["name"]), best=False)
        return folder, info
    raise ValueError(f"{source} has no complete checkpoint: {why}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m utils.checkpoint", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, help in (
        ("inspect", "show the checkpoints of a run, or what one holds"),
        ("export", "write the weights of a checkpoint, of a run the newest or the best, to one file"),
    ):
        sub = commands.add_parser(command, help=help)
        sub.add_argument("source", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints")
    sub.add_argument("out", type=Path, metavar="FILE", help="file to write, such as weights.pt")
    sub.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    sub.add_argument("--ema", action="store_true", help="the moving average of the weights")
    given = vars(parser.parse_args(argv))
    try:
        print(globals()[given.pop("command")](**given))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
