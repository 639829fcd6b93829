"""Runs that are interrupted and go on: used by test_interruptions.py, fault_matrix.py and soak.py."""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from tests.helpers import SERVER, clean_environment, free_port, records, run_folder, tiny_flags
from tests.proofs.injections import At, Fault, Send
from utils.checkpoint import store as checkpoint
from utils.checkpoint.info import read_info
from utils.observers import Observer


@dataclass(frozen=True)
class Grid:
    """The ranks of train.py, or, where tp and cp are given, those of train_mp.py."""

    dp: int
    tp: int | None = None
    cp: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.dp * (self.tp or 1) * (self.cp or 1)

    @property
    def script(self) -> str:
        return "train_mp" if self.tp else "train"

    @property
    def folder(self) -> str:
        return f"{self.tp * self.cp}MP" if self.tp else f"{self.dp}GPU"

    @property
    def argv(self) -> list[str]:
        sizes = [f"--tensor_parallel={self.tp}", f"--context_parallel={self.cp}"] if self.tp else []
        return [*sizes, *self.flags]


GRIDS = {
    "1 process": Grid(1), "dp 2": Grid(2), "dp 4": Grid(4), "tp 2 x cp 2": Grid(1, 2, 2),
    "cp 2, shared gradients": Grid(1, 1, 2, ("--shard=gradients",)),
    "dp 2 x tp 2, shared weights": Grid(2, 2, 1, ("--shard=weights",)),
}  # fmt: skip
# 5 iterations an epoch; validation after 5, 10 and 14; dropout, so that random numbers count.
FLAGS = ("--global_batch_size=4", "--num_iters=14", "--checkpoint_every=4", "--dropout=0.1", "--drop_path=0.1")
MOVED = 5  # the iteration that a run has when it goes on with another grid


class Ranks:
    """The ranks of a run, each a process. The faults are observers, or are called on each of them before it starts."""

    def __init__(self, grid: Grid, argv: list[str], log: Path, faults: tuple[Observer | Callable[[], None], ...] = ()):
        env = clean_environment(WORLD_SIZE=str(grid.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        self.log = log
        self.processes = [
            SERVER.Process(
                target=_run_rank,
                args=(grid.script, [*argv, *grid.argv], {**env, "RANK": str(r), "LOCAL_RANK": str(r)}, log, faults),
            )
            for r in range(grid.ranks)
        ]
        for process in self.processes:
            process.start()

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def are_running(self) -> bool:
        return all(process.exitcode is None for process in self.processes)

    def are_hanging(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def wait(self, timeout: float = 300) -> list[int]:
        """Return the exit codes. Ranks that hang are killed, and the test fails."""
        end = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.join(max(end - time.monotonic(), 0))
            if self.are_hanging():
                self.send(signal.SIGQUIT)  # each says where it stands
                time.sleep(2)
            assert not self.are_hanging(), f"hangs:\n{self.log.read_text()}"
            return [process.exitcode for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


def _run_rank(script: str, argv: list[str], env: dict[str, str], log: Path, faults: tuple) -> None:
    os.environ.clear()
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGQUIT, file=2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
    module = sys.modules[script]
    sys.argv = [f"{script}.py", *argv]
    watching = [fault for fault in faults if isinstance(fault, Observer)]
    for fault in faults:
        if fault not in watching:
            fault()
    module.start(partial(module.main, observers=watching), argv, partial(module.load_config, chapter=3))


def in_dtype(dtype: torch.dtype) -> Callable[[], None]:
    """Train in this dtype."""
    return partial(torch.set_default_dtype, dtype)


def undisturbed(grid: Grid, folder: Path, name: str, *flags: str, dtype: torch.dtype = torch.float32) -> Path:
    """Train without a fault; return the run's folder."""
    argv = tiny_flags(folder, *FLAGS, *flags, "--run_num", name)
    assert Ranks(grid, argv, folder / "whole.log", (in_dtype(dtype),)).wait() == [0] * grid.ranks, (
        folder / "whole.log"
    ).read_text()
    return run_folder(argv, grid.folder)


def disturbed(grid: Grid, fault: Fault, folder: Path, name: str, *flags: str) -> tuple[Path, list[int]]:
    """Train with a fault, then go on with one plain command; return the run's folder, and the fault's exit codes.

    Raises AssertionError where the exit codes, what is told, or the place to go on from are not as they should be.
    """
    argv, log = tiny_flags(folder, *FLAGS, *flags, "--run_num", name), folder / f"{name}.log"
    path = run_folder(argv, grid.folder)
    codes = Ranks(grid, argv, log, fault.on_ranks).wait()
    assert set(codes) <= fault.codes, f"{codes}\n{log.read_text()}"
    fault.then(path)
    went_on = Ranks(grid, [*argv, "--resume", "auto"], log).wait()
    told = log.read_text()
    assert went_on == [0] * grid.ranks and fault.says in told, told
    assert [line["iteration"] for line in records(path, "resume")] == [fault.resumes], told
    return path, codes


def moved(grid: Grid, folder: Path, name: str, *flags: str, dtype: torch.dtype, home: Grid = Grid(2, 2, 1)) -> Path:
    """Begin on the grid `home`, stop, go on with another one, stop, and finish at home; return the run's folder."""
    argv, log = tiny_flags(folder, *FLAGS, *flags, "--run_num", name), folder / f"{name}.log"
    stops = (At(Send(signal.SIGTERM), iteration=4), At(Send(signal.SIGTERM), iteration=6))
    for where, code, *stop in ((home, 75, stops[0]), (grid, 75, stops[1]), (home, 0)):
        codes = Ranks(where, [*argv, "--resume", "auto"], log, (in_dtype(dtype), *stop)).wait()
        assert codes == [code] * where.ranks, log.read_text()
    path = run_folder(argv, home.folder)
    assert [line["iteration"] for line in records(path, "resume")] == [MOVED, 8]  # in a validation, and in an epoch
    return path


def begun_and_ended(first: Grid, then: Grid, folder: Path, name: str, *flags: str) -> Path:
    """Begin on one grid, stop in the first validation, and go on with another one, in float64; return the folder."""
    argv, log = tiny_flags(folder, *FLAGS, *flags, "--run_num", name), folder / f"{name}.log"
    for grid, code, *stop in ((first, 75, At(Send(signal.SIGTERM), iteration=4)), (then, 0)):
        codes = Ranks(grid, [*argv, "--resume", "auto"], log, (in_dtype(torch.float64), *stop)).wait()
        assert codes == [code] * grid.ranks, log.read_text()
    path = run_folder(argv, first.folder)
    assert [line["iteration"] for line in records(path, "resume")] == [MOVED]
    return path


def newest_iteration(run_folders: Iterable[Path]) -> int:
    """Return how far the newest complete checkpoint is; 0 where there is none."""
    found = [folder for run in run_folders for folder in checkpoint.find(run / "checkpoints")]
    return max((read_info(folder)["iteration"] for folder in found), default=0)


def worst_error(path: Path, serial: Path, after: int = 0) -> tuple[float, float]:
    """Return the largest difference of two runs over the largest value: of what they recorded, and of their tensors.

    It is infinite where one of them has a value that is no number.

    Args:
        after: leave out what was recorded up to this iteration, but for the validation that follows it.
    """
    losses, norms, scores, one = _values(path, after)
    expected = _values(serial, after)
    assert one.keys() == expected[3].keys()
    wide = torch.float64  # torch's default rounds to 8 digits
    assert [*map(len, (losses, norms, scores))] == [*map(len, expected[:3])]
    told = max(
        _error(torch.tensor(a, dtype=wide), torch.tensor(b, dtype=wide))
        for a, b in zip((losses, norms, scores), expected)
    )
    return told, max(_error(one[name], expected[3][name]) for name in one)


def _values(run: Path, after: int = 0) -> tuple[list[float], list[float], list[float], dict[str, torch.Tensor]]:
    steps, epochs = records(run, "step"), records(run, "epoch")
    assert [line["iteration"] for line in steps] == list(range(1, len(steps) + 1))  # each once
    newest = checkpoint.find(run / "checkpoints")[0]
    tensors = checkpoint.read(newest, "model.") | checkpoint.read(newest, "optimizer.")
    told = [[s[key] for s in steps[after:]] for key in ("loss", "grad_norm")]
    told.append([e["valid_loss"] for e in epochs if e["iteration"] >= after])
    return *([math.nan if x is None else x for x in values] for values in told), tensors  # a record has null for NaN


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double(), other.double()
    if torch.equal(one, other):
        return 0.0
    error = float((one - other).abs().max() / other.abs().max())
    return error if math.isfinite(error) else math.inf  # max() would drop what is no number


def check_equal(path: Path, whole: Path) -> None:
    """Raise AssertionError unless two runs left the same: each iteration once, the same numbers, the same weights."""
    steps = records(whole, "step")
    assert records(path, "step") == steps and [s["iteration"] for s in steps] == list(range(1, len(steps) + 1))
    keys = ("epoch", "iteration", "train_loss", "valid_loss", "valid_rmse")
    epochs, expected = ([[e[k] for k in keys] for e in records(run, "epoch")] for run in (path, whole))
    assert epochs == expected and [e[0] for e in epochs] == list(range(1, len(epochs) + 1))
    board = EventAccumulator(str(path / "logs"))
    board.Reload()
    assert [e.step for e in board.Scalars("Loss/step")] == [s["iteration"] for s in steps]
    for tag in ("Loss/valid", "Loss/train", "RMSE(ch1)/valid"):
        assert [e.step for e in board.Scalars(tag)] == [e[1] for e in epochs], tag
    assert not list((path / "checkpoints").glob("*.part")) and not list((path / "checkpoints").glob("*.void"))
    final, expected = (_values(run)[3] for run in (path, whole))
    assert final.keys() == expected.keys() and all(torch.equal(final[name], expected[name]) for name in final)
