"""What several tests need: small data sets, and runs on one or several ranks."""

import contextlib
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist

from utils.checkpoint.info import INFO, read_info, write_info
from utils.files import read_events

# Ranks are forked from a server that has imported the scripts already: a start takes a tenth of a second.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["train", "train_mp", "tests.proofs.interruptions", "tests.proofs.injections"])

ROOT = Path(__file__).resolve().parent.parent
ERA5 = ROOT.parent / "shared/data/era5_djf"
STEP = 6 * 3600


def fields(steps: int, channels: int, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Smooth waves that move, and some noise, float32 [steps, channels, rows, columns]."""
    rng = np.random.default_rng(seed)
    t, y, x = np.arange(steps), np.linspace(0, np.pi, rows), np.arange(columns) * 2 * np.pi / columns
    waves = [
        np.sin((c + 1) * x[None, None] - 0.3 * (c + 1) * t[:, None, None] + seed) * np.sin(y)[None, :, None]
        for c in range(channels)
    ]
    noise = 0.1 * rng.standard_normal((steps, channels, rows, columns))
    return (5 * np.stack(waves, axis=1) + noise + np.arange(channels)[:, None, None]).astype(np.float32)


def write_file(path: Path, data: np.ndarray, start: int | None = 0, names: list[str] | None = None, **layout) -> None:
    """Write one file of the training layout; `start` is the first time, None for a file without `time`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        stored = file.create_dataset("fields", data=data, **layout)
        if start is not None:
            file["time"] = start + STEP * np.arange(len(data))
        if names:
            stored.attrs["channel_names"] = names
            stored.attrs["units"] = ["m s-1"] * len(names)


def write_data(
    folder: Path,
    train: dict[str, int] | None = None,
    valid: dict[str, int] | None = None,
    channels: int = 3,
    rows: int = 17,
    columns: int = 32,
    names: list[str] | None = None,
    constant: int | None = None,
    **layout,
) -> Path:
    """Write train/, valid/ and stats/ under `folder`: files by stem with their number of steps.

    `constant` is a channel that stays as it is in time; `layout` goes to h5py.
    """
    sets = {"train": train or {"2001": 14, "2002": 9}, "valid": valid or {"2003": 8}}
    written = {}
    for kind, files in sets.items():
        for i, (stem, steps) in enumerate(files.items()):
            data = fields(steps, channels, rows, columns, seed=i + 10 * (kind == "valid"))
            if constant is not None:
                data[:, constant] = fields(1, 1, rows, columns)[0]
            written[kind, stem] = data
            write_file(folder / kind / f"{stem}.h5", data, start=STEP * 1000 * i, names=names, **layout)
    every = np.concatenate([data for (kind, _), data in written.items() if kind == "train"]).astype(np.float64)
    stats = folder / "stats"
    stats.mkdir(exist_ok=True)
    np.save(stats / "global_means.npy", every.mean((0, 2, 3), keepdims=True).astype(np.float32))
    np.save(stats / "global_stds.npy", every.std((0, 2, 3), keepdims=True).astype(np.float32))
    np.save(stats / "time_means.npy", every.mean(0, keepdims=True).astype(np.float32))
    return folder


TINY = """
tiny: &tiny
  embed_dim: 32
  depth: 2
  num_heads: 4
  patch_size: 4
  img_size: [16, 32]
  n_in_channels: 3
  n_out_channels: 3
  train_data_path: /data/train
  valid_data_path: /data/valid
  time_means_path: /data/stats/time_means.npy
  global_means_path: /data/stats/global_means.npy
  global_stds_path: /data/stats/global_stds.npy
  global_batch_size: 8
  num_iters: 4
  lr: 1E-3
  plot_channels: []  # pictures take most of the time of such a run
"""


def tiny_flags(folder: Path, *flags: str) -> list[str]:
    """Return the command line of a small model on the data in `folder`, with its runs beside the data."""
    config = folder / "tiny.yaml"
    if not config.exists():  # for all ranks at once
        part = folder / f"tiny.{os.getpid()}"
        part.write_text(TINY)
        part.rename(config)
    here = [
        "--yaml_config",
        str(config),
        "--config",
        "tiny",
        "--data_dir",
        str(folder),
        "--expdir",
        str(folder / "runs"),
    ]
    return [*here, *flags]


def run_here(argv: list[str], main=None, name: str = "1GPU") -> Path:
    """Run a chapter's main, by default train.py's, in this process, a group of one; return the run's folder."""
    import train

    call_here(main or train.main, argv)
    return run_folder(argv, name)


def call_here(main, argv: list[str]) -> None:
    """Call the main of a script in this process, a group of one."""
    from utils.ranks.world import World

    with group_of_one():
        main(World(), argv)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Let this process be the only rank; signals do afterwards what they did before."""
    from utils.ranks.start import join
    from utils.ranks.stop import SIGNALS
    from utils.ranks.world import World

    join(World())
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        dist.destroy_process_group()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def resume_here(argv: list[str], iteration: int, main=None, name: str = "1GPU") -> tuple[list, list]:
    """Run to the end; then once more from a checkpoint. Return the losses of both, from there on."""
    # 5 iterations an epoch
    argv = [*argv, "--global_batch_size", "4", "--checkpoint_every", str(iteration), "--keep_checkpoints", "99"]
    folder = run_here(argv, main, name)
    whole = losses(folder)[iteration:]
    run_here([*argv, "--resume", str(folder / f"checkpoints/{iteration:08d}")], main, name)
    assert len(records(folder, "resume")) == 1
    return whole, losses(folder)[iteration:]


def run_folder(argv: list[str], name: str = "1GPU") -> Path:
    """Return the folder of the run that `argv` starts."""
    value = {flag: argv[i + 1] for i, flag in enumerate(argv) if flag in ("--expdir", "--config", "--run_num")}
    return Path(value["--expdir"]) / value["--config"] / name / value.get("--run_num", "00")


def records(folder: Path, event: str) -> list[dict]:
    """Return the lines of metrics.jsonl of one kind."""
    return [line for line in read_events(folder / "metrics.jsonl") if line["event"] == event]


def losses(folder: Path) -> list[float]:
    """Return the loss of each iteration."""
    return [line["loss"] for line in records(folder, "step")]


def norms(folder: Path) -> list[float | None]:
    """Return the norm of the gradient of each iteration."""
    return [line["grad_norm"] for line in records(folder, "step")]


def free_port() -> int:
    """Return a port below those that a system hands out itself: no connection can take it meanwhile.

    Linux begins at 32768, gVisor at 16000.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 15900)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def wait_until(done, seconds: float = 300) -> None:
    """Wait for a condition, which `done()` tells; fail after so many seconds without it."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Is there such a process, other than a dead one that nobody has asked for yet?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without any launcher's variables, one thread a rank."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMIX_", "GROUP_", "TORCHELASTIC")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def run_ranks(
    ranks: int, command: list[str] | Callable, *args, timeout: float = 300
) -> list[subprocess.CompletedProcess]:
    """Run `python command`, or `command(*args)`, on several ranks of this machine, set up by environment variables.

    A rank that hangs is killed and fails the test.
    """
    env = clean_environment(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with tempfile.TemporaryDirectory() as folder:
        files = [[Path(folder, f"{rank}.{kind}") for kind in ("out", "err")] for rank in range(ranks)]
        processes = [
            SERVER.Process(
                target=_be_rank, args=(command, args, {**env, "RANK": str(r), "LOCAL_RANK": str(r)}, *files[r])
            )
            for r in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            end = time.monotonic() + timeout  # the first one has waited for the server
            for process in processes:
                process.join(max(end - time.monotonic(), 0))
            told = [[of_ours(file.read_text()) for file in both] for both in files]
            codes = [process.exitcode for process in processes]
            assert None not in codes, f"hangs: {command}\n{told}"
            return [subprocess.CompletedProcess(command, code, *both) for code, both in zip(codes, told)]
        finally:
            for process in processes:
                process.kill()


def of_ours(told: str) -> str:
    """Return what was printed without the lines of gloo, which that of torch 2.8 prints."""
    return re.sub(r"^\[Gloo\] .*\n", "", told, flags=re.MULTILINE)


def _be_rank(command: list[str] | Callable, args: tuple, env: dict[str, str], out: Path, err: Path) -> None:
    """Do in this process what `python command` does in a new one, or call a function."""
    os.environ.clear()
    os.environ.update(env)
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    if callable(command):
        sys.argv = [command.__name__]
        command(*args)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(command[1], {"__name__": "__main__"})
    elif command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def change_info(folder: Path, **entries) -> None:
    """Change what a checkpoint says of itself, as a run would have written it."""
    info = read_info(folder)
    (folder / INFO).unlink()
    write_info(folder, info | entries)


class Evil:
    """Runs a shell command when it is unpickled: it makes the file `path`."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)
