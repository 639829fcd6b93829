"""The folder of a run: made anew, or found again with what a run left in it.

<expdir>/<config>/<N>{GPU,MP}/<run_num>/  out.log  config.yaml  metrics.jsonl  logs/  pictures/  checkpoints/ lock owner
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from utils.checkpoint import store as checkpoint
from utils.checkpoint.info import Unreachable, Unreadable, read_info
from utils.config.settings import Config, affecting
from utils.errors import ReadError
from utils.files import folders_in, lock, write_text
from utils.reading import check_own, read_text

BEGINS = ", which begins"  # after the name of an owner that has not begun to train


@dataclass
class RunFolder:
    """Where a run's files lie, and its checkpoints, the newest first: complete ones with their info, others without."""

    path: Path
    checkpoints: list[tuple[Path, dict[str, Any] | None]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def newest(self) -> dict[str, Any] | None:
        """The info of the newest complete checkpoint."""
        return next((info for _, info in self.checkpoints if info), None)


def open_run_folder(config: Config, name: str) -> tuple[RunFolder, TextIO]:
    """Return the folder of a run, a new one or the one to go on in, and its lock.

    Raises ValueError where it cannot be written, leads elsewhere by links, or another run is at work in it, where there
    is nothing to resume, and where a key that decides training has changed. ReadError where a folder cannot be listed,
    or the storage of a checkpoint fails: who knows what it holds?
    """
    if config.run_num in ("", ".", "..", "checkpoints") or "/" in config.run_num or not config.run_num.isprintable():
        raise ValueError(f"run_num is {config.run_num!r}: it names one folder, such as 00; use --expdir for paths")
    found = _find(config, name)
    if found is None:
        found = make_run_folder(config, name)
        held = lock_run(found.path)
        if config.resume == "auto":
            found.remarks.append(f"Nothing to resume: no run {config.run_num!r} of {config.config!r} has a checkpoint")
    else:
        check_own(found.path)
        held, seen = lock_run(found.path), found.path
        found = _find(config, name)  # once more: until now another process may have been at work here
        if found is None or found.path != seen:
            raise ValueError(f"{seen} changed while it was opened: start again")
        if found.newest:
            check_same_training(found.path, found.newest["config"], config)
    try:
        write_text(found.path / "config.yaml", config.to_yaml())
        sign(found.path, is_claim=False)
    except OSError as error:
        raise ValueError(f"cannot write to {found.path} ({error.strerror}): a run goes on in its own folder") from None
    return found, held


def make_run_folder(config: Config, name: str) -> RunFolder:
    """Create `<expdir>/<config>/<name>/<run_num>/` and return it; an old folder of that name is renamed aside.

    Raises ValueError where it cannot be written, and where a process is at work in the old one: a run, or an evaluation
    in a folder of its own in there.
    """
    path = Path(config.expdir) / config.config / name / config.run_num
    found = RunFolder(path)
    try:
        if path.exists():
            with contextlib.ExitStack() as locked:  # until it has its new name
                for folder in (path, *(file.parent for file in path.glob("*/lock"))):
                    locked.enter_context(lock_run(folder))
                old = _read_run(path).newest
                aside = rename_aside(path)
            go_on = f"; to go on with it: --resume {aside}" if old and not old["is_finished"] else ""
            found.remarks.append(f"Renamed the earlier run to {aside}{go_on}")
        (path / "logs").mkdir(parents=True)
    except ReadError:
        raise
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}): choose another --expdir, or --run_num") from None
    return found


def rename_aside(path: Path) -> Path:
    """Rename a folder to the first free of `<name>.1`, `<name>.2`, ... and return that."""
    return path.rename(next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}.{n}")).exists()))


def lock_run(path: Path, remedy: str = "choose another --run_num") -> TextIO:
    """Take the folder for this process, as utils.files.lock does. Raises ValueError where another process has it."""
    file = lock(path / "lock")
    if file is None:
        owners = _owners(path) or ["another process"]
        raise ValueError(f"{path} is in use by {owners[-1]}: wait for its end, or {remedy}")
    there = path / "lock"
    if not there.exists() or not os.path.samestat(os.fstat(file.fileno()), there.stat()):
        file.close()  # of a folder that has another name by now
        raise ValueError(f"{path} changed while it was opened: start again")
    return file


def _owners(path: Path) -> list[str]:
    """Return what the processes that worked on a run wrote about themselves, a line each, the last one last.

    Not into the lock: whoever closes a file loses the locks that it has on it.
    """
    file = path / "owner"
    return read_text(file).splitlines() if file.exists() else []


def sign(path: Path, is_claim: bool = True) -> None:
    """Write who works here, after those that did before.

    A Slurm job that starts again looks for its claim, and goes on with the newest checkpoint there. So a run claims its
    folder only when the checkpoints after the one that it goes on from are set aside.
    """
    process = f"{_job()}process {os.getpid()} on {socket.gethostname()}"
    before = [line for line in _owners(path) if line != process + BEGINS]
    write_text(path / "owner", "\n".join([*before, process + BEGINS * (not is_claim), ""]))


def _job() -> str:
    """Return what a Slurm job writes about itself; nothing outside Slurm."""
    return f"job {os.environ['SLURM_JOB_ID']}, " if "SLURM_JOB_ID" in os.environ else ""


def _find(config: Config, name: str) -> RunFolder | None:
    """Return the run to go on with, as `resume` says; None for a new one."""
    if own := _find_own(config, name):
        return own
    if config.resume == "none":
        return None
    if config.resume != "auto":
        return _find_at(Path(config.resume))
    grids = folders_in(Path(config.expdir, config.config))
    return _newest(path / config.run_num for path in grids if re.fullmatch(r"\d+(GPU|MP)", path.name))


def _find_own(config: Config, name: str) -> RunFolder | None:
    """Return the run that this Slurm job began in an earlier life, with all its checkpoints.

    It goes on with it whatever `resume` says, and even if another job has renamed it aside meanwhile. Of several, in
    a job that runs one grid after the other, the one of this grid.
    """
    if not _job() or os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    places = [(grid, config.run_num) for grid in folders_in(Path(config.expdir, config.config))]
    if config.resume not in ("auto", "none"):
        given = _run_of(Path(config.resume))
        places.append((given.parent, given.name))
    folders = [
        path
        for place, run_num in places
        for path in folders_in(place)
        if re.fullmatch(re.escape(run_num) + r"(\.\d+)*", path.name)
        and any(owner.startswith(_job()) and not owner.endswith(BEGINS) for owner in _owners(path))
    ]
    return _newest(path for path in folders if path.parent.name == name) or _newest(folders)


def _newest(folders: Iterable[Path]) -> RunFolder | None:
    """Return the run with the newest checkpoint; one of which none is complete only where there is no other."""
    runs = [run for run in map(_read_run, folders) if run.checkpoints]
    return max(runs, key=lambda run: (run.newest is not None, _saved(run)), default=None)


def _saved(run: RunFolder) -> float:
    """Return when the newest checkpoint was written: the files' date may be that of a copy."""
    return run.newest["written"] if run.newest else run.checkpoints[0][0].stat().st_mtime


def _find_at(path: Path) -> RunFolder:
    """Return the run at this path: its folder, or one of its checkpoints. Raises ValueError where there is none."""
    run = _read_run(_run_of(path))
    if path.parent.name == "checkpoints":
        run.checkpoints = [(found, info) for found, info in run.checkpoints if found.name == path.name]
    if not run.checkpoints:
        raise ValueError(
            f"cannot resume from {path}, which {'holds no checkpoint' if path.exists() else 'is not there'}: "
            f"give the folder of a run, or one of its checkpoints"
        )
    return run


def _run_of(path: Path) -> Path:
    """Return the folder of a run, of which this is the path, or that of its checkpoints, or of one of them."""
    if path.parent.name == "checkpoints":
        return path.parent.parent
    return path.parent if path.name == "checkpoints" else path


def _read_run(path: Path) -> RunFolder:
    run = RunFolder(path)
    folders = checkpoint.find(path / "checkpoints")
    for folder in folders:
        info = None
        try:
            info = read_info(folder)
            if folder.with_name(str(info["best"]["name"])) not in folders:  # a better one came later, and is lost
                info["best"] = {"loss": None, "name": None}
        except Unreachable as error:
            raise ReadError(f"{error}: mend that, or wait for its storage") from None
        except Unreadable as error:
            if not run.newest:
                run.remarks.append(f"Checkpoint left out: {error}")
        run.checkpoints.append((folder, info))
    return run


def check_same_training(path: Path, old: dict[str, Any], config: Config) -> None:
    """Raise ValueError where a key that decides training differs from `old`, the run's configuration so far."""
    for key in affecting("training"):  # of the data, their number is compared: see Run
        before = old.get(key, getattr(Config, key))  # a key that its code did not know yet
        before, now = (list(x) if isinstance(x, tuple) else x for x in (before, getattr(config, key)))
        if before != now:
            raise ValueError(
                f"{path} was trained with {key} {before}, and now it is {now}: a resumed run keeps it; "
                f"set it back, or begin a new run with its weights (python -m utils.checkpoint export, --init_from)"
            )
