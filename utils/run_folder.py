"""The folder of a run: made anew, or found again with what a run left in it.

<expdir>/<config>/<N>GPU/<run_num>/    out.log  config.yaml  metrics.jsonl  logs/  pictures/  checkpoints/  lock
"""

import fcntl
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from utils import checkpoint
from utils.checkpoint import Unreadable
from utils.config import Config

# What a resumed run may not change: all that decides which numbers training gives. (Rounding may differ.)
TRAINING_KEYS = (
    *("seed", "embed_dim", "depth", "num_heads", "patch_size", "dropout", "drop_path", "residual"),
    *("img_size", "dt", "n_in_channels", "n_out_channels", "in_channels", "out_channels", "limit_nsamples"),
    *("num_iters", "global_batch_size", "lr", "lr_schedule", "warmup", "clip_grad_norm"),
)


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


def open_run_folder(config: Config, name: str) -> RunFolder:
    """Return the folder of a run, as `resume` asks: a new one, or the one to go on in.

    Raises ValueError where it cannot be written or another run is at work in it, where there is nothing to resume, and
    where a key that decides training has changed.
    """
    if config.run_num in ("", ".", "..") or "/" in config.run_num:
        raise ValueError(f"run_num is {config.run_num!r}: it names one folder, such as 00; use --expdir for paths")
    found = None
    if config.resume == "auto":
        found = _find_newest(config)
    elif config.resume != "none":
        found = _find_at(Path(config.resume))
    if found is None:
        return RunFolder(make_run_folder(config, name))
    if found.newest:
        check_same_training(found.path, found.newest["config"], config)
    return found


def make_run_folder(config: Config, name: str) -> Path:
    """Create `<expdir>/<config>/<name>/<run_num>/` and return it; an old folder of that name is renamed aside."""
    path = Path(config.expdir) / config.config / name / config.run_num
    try:
        if path.exists():
            lock_run(path).close()
            aside = next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}.{n}")).exists())
            path.rename(aside)
        (path / "logs").mkdir(parents=True)
        config.save(path / "config.yaml")
    except OSError as error:
        raise ValueError(f"cannot write the run folder {path} ({error.strerror}): choose another --expdir") from None
    return path


def lock_run(path: Path) -> TextIO:
    """Take the folder for this process, until it ends or closes the file that is returned.

    Raises ValueError where another process has it. A file system without locks locks nothing.
    """
    file = (path / "lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise ValueError(
            f"{path} is in use by {file.read().strip() or 'another process'}: wait for its end, or choose another "
            f"--run_num"
        ) from None
    except OSError:
        pass
    job = f"job {os.environ['SLURM_JOB_ID']}, " if "SLURM_JOB_ID" in os.environ else ""
    file.truncate(0)
    file.write(f"{job}process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _find_newest(config: Config) -> RunFolder | None:
    """Return the run with the newest checkpoint, of those with this name on any number of ranks."""
    runs = [_read_run(path) for path in Path(config.expdir, config.config).glob(f"*/{config.run_num}")]
    runs = [run for run in runs if run.checkpoints]
    return max(runs, key=lambda run: run.checkpoints[0][0].stat().st_mtime, default=None)


def _find_at(path: Path) -> RunFolder:
    """Return the run of a path: its folder, or one of its checkpoints."""
    if checkpoint.is_name(path.name) and path.parent.name == "checkpoints":
        run = _read_run(path.parent.parent)
        run.checkpoints = [(found, info) for found, info in run.checkpoints if found.name == path.name]
    else:
        run = _read_run(path)
    if not run.checkpoints:
        raise ValueError(
            f"cannot resume from {path}, which holds no checkpoint: give the folder of a run, or one of its checkpoints"
        )
    return run


def _read_run(path: Path) -> RunFolder:
    run = RunFolder(path)
    for folder in checkpoint.find(path / "checkpoints"):
        info = None
        try:
            info = checkpoint.read_info(folder)
        except Unreadable as error:
            if not any(older for _, older in run.checkpoints):
                run.remarks.append(f"Checkpoint left out: {error}")
        run.checkpoints.append((folder, info))
    return run


def check_same_training(path: Path, old: dict[str, Any], config: Config) -> None:
    """Raise ValueError where a key that decides training differs from `old`, the run's configuration so far."""
    new = {key: list(x) if isinstance(x := getattr(config, key), tuple) else x for key in TRAINING_KEYS}
    for key in TRAINING_KEYS:
        if key in old and old[key] != new[key]:
            raise ValueError(
                f"{path} was trained with {key} {old[key]}, and now it is {new[key]}: a resumed run keeps it; "
                f"set it back, or start another run with --resume none"
            )
