"""Interrupt runs at random moments, many times: `make soak`, some 15 minutes.

    python tests/proofs/soak.py [--interruptions 200] [--seed 0] [--minutes 30]

A run is started, and after a random time something random happens to it; then it is started again, until it is
finished. In every other run the grid of ranks changes each time. Afterwards all must be as if nothing had happened.
"""

import argparse
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers import run_folder, tiny_flags, write_data  # noqa: E402
from tests.proofs.interruptions import Grid, Ranks, check_equal, in_dtype, newest_iteration, worst_error  # noqa: E402
from utils.checkpoint import store as checkpoint  # noqa: E402

HOME = [Grid(1), Grid(2), Grid(1, 2, 2)]
WANDERING = [Grid(1, 1, 1), Grid(2, 1, 1), Grid(1, 2, 1), Grid(1, 1, 2), Grid(1, 2, 2), Grid(2, 2, 1)]
FLAGS = ("--global_batch_size=2", "--num_iters=40", "--checkpoint_every=3", "--drop_path=0.1")
# 75 stopped and saved, 0 finished; before training begins a signal ends a process as it ends any other.
CODES = {0, 75, 1, *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))}


def main() -> int:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each restart
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interruptions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30, help="stop after this time")
    given = parser.parse_args()
    dice, start = random.Random(given.seed), time.monotonic()
    interruptions = runs = 0
    with tempfile.TemporaryDirectory() as name:
        folder = write_data(Path(name))
        references = {grid: _reference(grid, folder) for grid in HOME}
        serial = _reference(Grid(1), folder, "--dropout=0", dtype=torch.float64)
        while interruptions < given.interruptions and time.monotonic() < start + 60 * given.minutes:
            grids = WANDERING if runs % 2 else [dice.choice(HOME)]
            told, count = _run(grids, folder, f"run{runs}", dice)
            # A process that ended before its first checkpoint may have left a folder, too, of another grid's name.
            folders = list(folder.glob(f"runs/tiny/*/run{runs}"))
            (path,) = (path for path in folders if checkpoint.find(path / "checkpoints"))
            if runs % 2:
                error = max(worst_error(path, serial))
                assert error < 1e-12, f"run {runs}: {error}"
                result = f"{error:.1e} from one process"
            else:
                check_equal(path, references[grids[0]])
                result = "bit-equal"
            interruptions, runs = interruptions + count, runs + 1
            print(f"run {runs:3}: {count} interruptions ({told}): {result}; {interruptions} in all", flush=True)
            for path in folders:
                shutil.rmtree(path)
    minutes = (time.monotonic() - start) / 60
    print(f"{interruptions} interruptions of {runs} runs, seed {given.seed}, {minutes:.1f} minutes: no inconsistency")
    if interruptions < given.interruptions:
        print(f"the time was up before {given.interruptions}: raise --minutes", file=sys.stderr)
    return int(interruptions < given.interruptions)


def _reference(grid: Grid, folder: Path, *flags: str, dtype: torch.dtype = torch.float32) -> Path:
    argv = tiny_flags(folder, *FLAGS, *(flags or ["--dropout=0.1"]), "--run_num", f"whole-{dtype}-{grid.ranks}")
    assert Ranks(grid, argv, folder / "whole.log", (in_dtype(dtype),)).wait() == [0] * grid.ranks
    return run_folder(argv, grid.folder)


def _run(grids: list[Grid], folder: Path, name: str, dice: random.Random) -> tuple[str, int]:
    """Interrupt a run until it is finished; return what happened, and how often."""
    wanders = len(grids) > 1
    flags = ["--dropout=0"] if wanders else ["--dropout=0.1"]
    argv = [*tiny_flags(folder, *FLAGS, *flags, "--run_num", name), "--resume", "auto"]
    happened, before, log = [], 0, folder / f"{name}.log"
    while True:
        grid = dice.choice(grids)
        ranks = Ranks(grid, argv, log, (in_dtype(torch.float64 if wanders else torch.float32),))
        time.sleep(dice.uniform(0.1, 4))
        if ranks.are_running():
            what, number, who = dice.choice(
                [
                    ("TERM", signal.SIGTERM, None),
                    ("USR1", signal.SIGUSR1, None),
                    ("INT", signal.SIGINT, None),
                    ("TERM one", signal.SIGTERM, dice.randrange(grid.ranks)),
                    ("KILL one", signal.SIGKILL, dice.randrange(grid.ranks)),
                    ("KILL", signal.SIGKILL, None),
                    ("USR1, KILL", signal.SIGUSR1, None),
                ]
            )
            ranks.send(number, who)
            if what == "USR1, KILL":  # while it saves
                time.sleep(dice.uniform(0, 0.3))
                ranks.send(signal.SIGKILL)
            happened.append(what)
        codes = ranks.wait()
        assert set(codes) <= CODES, f"{codes}\n{log.read_text()[-5000:]}"
        there = newest_iteration(folder.glob(f"runs/tiny/*/{name}"))
        assert there >= before, f"the newest checkpoint was {before}, and is {there}"
        before = there
        if set(codes) == {0}:
            return ", ".join(happened), len(happened)


if __name__ == "__main__":
    sys.exit(main())
