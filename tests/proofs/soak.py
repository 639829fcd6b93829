"""Interrupt runs at random moments, many times: `make soak`, 2,000 interruptions in some two hours on two cores.

    python tests/proofs/soak.py [--interruptions 2000] [--seed 0] [--rows 2] [--minutes 180] [--json FILE] [--more]

A run is started, and after a random time something random happens to it: a signal; all of it, or one rank, is stopped
for a while, or killed, at any moment or in a phase of the step, of a save, of a validation, of a picture; the disk is
full, or lets nobody write; or slow, all the time. Then it is started again, until it is finished. In every other run
the grid of ranks changes each time. Some of the runs are evaluated, by one rank or two, and that is killed, or one of
the two. Afterwards all must be as if nothing had happened. Rows of runs go side by side: the machine is busy, and
nothing happens when one expects it. Where the time was too short, the record keeps what there was, and `make soak
SOAK=--more` goes on with the next seed, at the same commit: with other code begin anew.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path

import matplotlib.image
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.record import commit_of_code, write_record  # noqa: E402
from tests.helpers import ROOT, clean_environment, free_port, run_folder, tiny_flags, write_data  # noqa: E402
from tests.proofs.injections import InPicture, InSave, killed  # noqa: E402
from tests.proofs.interruptions import Grid, Ranks, check_equal, in_dtype, newest_iteration, worst_error  # noqa: E402
from utils import spans  # noqa: E402
from utils.checkpoint import store as checkpoint  # noqa: E402

SHARED = ("--shard=gradients",), ("--shard=weights",)
HOME = [Grid(1), Grid(2), Grid(1, 2, 2), *(Grid(2, 1, 1, shared) for shared in SHARED)]
WANDERING = [Grid(1, 1, 1), Grid(2, 1, 1), Grid(1, 2, 1), Grid(1, 1, 2), Grid(1, 2, 2), Grid(2, 2, 1)]
WANDERING += [Grid(2, 1, 1, SHARED[0]), Grid(1, 1, 2, SHARED[1]), Grid(2, 2, 1, SHARED[1])]
# A rank that is killed before its neighbour knows it is missed after comm_timeout, which is less than a start may take.
FLAGS = ("--global_batch_size=2", "--num_iters=40", "--checkpoint_every=3", "--drop_path=0.1", "--comm_timeout=2m")
# What the processes may end with, beside 0, by what happened. 75: stopped and saved; 74: the last checkpoint was not
# written; 2: the folder could not be written to; 1: another rank is gone. Before training begins a signal ends a
# process as it ends any other.
ENDS = {
    "TERM": {75, -signal.SIGTERM, 1}, "USR1": {75, -signal.SIGUSR1, 1}, "INT": {75, -signal.SIGINT, 1},
    "KILL": {-signal.SIGKILL, 1}, "disk": {74, 2},
}  # fmt: skip
PHASES = ("data wait", "data copy", "forward", "backward", "communication", "optimizer", "checkpoint", "validation")
PHASES += ("logging",)  # of records


@dataclass
class KillIn:
    """Kills one rank when it enters a part of the run for the n-th time. It stands where the report's clock does."""

    part: str
    rank: int
    left: int

    def __call__(self) -> None:
        if int(os.environ["RANK"]) == self.rank:
            spans.timeline = self

    def enter(self, part: str) -> None:
        self.left -= part == self.part
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None: ...

    def gradient_is_there(self) -> None: ...

    def model_begins(self) -> None: ...


@dataclass(frozen=True)
class SlowDisk:
    """Each sync takes up to 0.2 s more, and each read of the data up to 0.02 s."""

    seed: int

    def __call__(self) -> None:
        dice = random.Random(self.seed)

        def slow(call: Callable, most: float) -> Callable:
            def later(*args):
                time.sleep(dice.uniform(0, most))
                return call(*args)

            return later

        os.fsync, os.preadv = slow(os.fsync, 0.2), slow(os.preadv, 0.02)


def stopped(ranks: Ranks, rank: int | None, seconds: float) -> None:
    """Stop one rank or all, and let them go on."""
    ranks.send(signal.SIGSTOP, rank)
    time.sleep(seconds)
    ranks.send(signal.SIGCONT, rank)


def full_disk(ranks: Ranks, seconds: float) -> None:
    """No file grows beyond 20 kB for a while."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for soft in (20_000, limits[0]):
        for process in ranks.processes:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, limits[1]))
        time.sleep(seconds if soft == 20_000 else 0)


def read_only(folders: list[Path], seconds: float) -> None:
    """Checkpoints cannot be written for a while. (For root no folder is read-only: here it is no folder.)"""
    there = [path / "checkpoints" for path in folders if (path / "checkpoints").is_dir()]
    for path in there:
        path.rename(path.with_name("kept"))
        path.touch()
    time.sleep(seconds)
    for path in there:
        path.unlink()
        path.with_name("kept").rename(path)


def signals(
    dice: random.Random, ranks: Ranks, folders: Callable[[], list[Path]], have_joined: Callable[[], bool]
) -> str:
    """Do something random to a run; return what. One rank alone is hit when all have joined.

    For one that never comes the others wait ten minutes: launchers end such jobs.
    """
    one, short = dice.randrange(len(ranks.processes)), dice.uniform(0.1, 1)
    kinds = {
        "TERM": lambda: ranks.send(signal.SIGTERM),
        "USR1": lambda: ranks.send(signal.SIGUSR1),
        "INT": lambda: ranks.send(signal.SIGINT),
        "TERM one": lambda: ranks.send(signal.SIGTERM, one),
        "KILL one": lambda: ranks.send(signal.SIGKILL, one),
        "KILL": lambda: ranks.send(signal.SIGKILL),
        "USR1, KILL": lambda: (ranks.send(signal.SIGUSR1), time.sleep(short / 3), ranks.send(signal.SIGKILL)),
        "STOP, CONT": lambda: stopped(ranks, None, short),
        "STOP, CONT one": lambda: stopped(ranks, one, short),
        "STOP one, KILL": lambda: (ranks.send(signal.SIGSTOP, one), time.sleep(short), ranks.send(signal.SIGKILL)),
        "full disk": lambda: full_disk(ranks, short),
        "full disk, KILL": lambda: (full_disk(ranks, short), ranks.send(signal.SIGKILL)),
        "read-only disk": lambda: read_only(folders(), short),
    }
    what = dice.choice(list(kinds))
    while " one" in what and ranks.are_running() and not have_joined():
        time.sleep(0.05)
    kinds[what]()
    return what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interruptions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=2, help="rows of runs that go side by side")
    parser.add_argument("--minutes", type=float, default=180, help="stop after this time")
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--more", action="store_true", help="add to the record, until --interruptions are in it")
    given = parser.parse_args()
    before = json.loads(given.json.read_text()) if given.more and given.json and given.json.exists() else {}
    at, start = commit_of_code(), time.monotonic()
    parts, is_known = before.get("parts", []), at != "unknown" and not at.endswith("-dirty")
    if given.more and not (parts and is_known and all(part["commit"] == at for part in parts)):
        there = ", ".join(part["commit"] for part in parts) or "nothing"
        parser.error(
            f"--more adds to a record of the same commit, and {given.json} has {there}, not {at}: leave it out"
        )
    left = given.interruptions - sum(part["interruptions"] for part in parts)
    if left <= 0:
        parser.error(f"{given.json} has {given.interruptions} interruptions: there are no --more to add")
    given.seed = max([given.seed, *(part["seed"] + 1 for part in parts)])
    rows = range(given.rows)
    counts = [left // given.rows + (i < left % given.rows) for i in rows]
    seeds = [given.rows * given.seed + i for i in rows]
    with ProcessPoolExecutor(given.rows, get_context("spawn")) as pool:
        found = list(pool.map(partial(soak, end=start + 60 * given.minutes), counts, seeds))
    happened, runs, evaluations, slow = (sum(part, start=type(part[0])()) for part in zip(*found))
    minutes, count = (time.monotonic() - start) / 60, happened.total()
    print(f"{count} interruptions of {runs} runs, seed {given.seed}, {minutes:.1f} minutes: no inconsistency")
    print(", ".join(f"{kind} {number}" for kind, number in happened.most_common()))
    figures = {"interruptions": count, "runs": runs, "evaluations": evaluations, "slow": slow, "minutes": minutes}
    parts.append({"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": at, "seed": given.seed, **figures})
    happened += Counter(before.get("happened"))
    if given.json:
        totals = {name: sum(part[name] for part in parts) for name in figures} | {"kinds": len(happened)}
        write_record(given.json, totals, {}, happened=dict(happened.most_common()), parts=parts)
    if count < left:
        print(f"the time was up {left - count} before {given.interruptions}: go on with --more", file=sys.stderr)
    return int(count < left)


def soak(interruptions: int, seed: int, end: float) -> tuple[Counter, int, int, int]:
    """Interrupt runs so many times; return what happened, and how many runs, evaluations, starts on a slow disk."""
    try:
        return _soak(interruptions, seed, end)
    except BaseException:  # at once: the other rows go on, and it would be told after them
        traceback.print_exc()
        raise


def _soak(interruptions: int, seed: int, end: float) -> tuple[Counter, int, int, int]:
    """Raise AssertionError where a run is not as if nothing had happened."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each restart
    dice, happened = random.Random(seed), Counter()
    runs = evaluations = slow = 0
    with tempfile.TemporaryDirectory() as name:
        folder = write_data(Path(name))
        references = {grid: reference(grid, folder) for grid in HOME}
        serial = reference(Grid(1), folder, "--dropout=0", dtype=torch.float64)
        skill = evaluated(references[HOME[0]], folder, random.Random(0), most=0)[0]
        while happened.total() < interruptions and time.monotonic() < end and parent_process().is_alive():
            grids = WANDERING if runs % 2 else [dice.choice(HOME)]
            told, slower = run(grids, folder, f"run{runs}", dice)
            # A process that ended before its first checkpoint may have left a folder, too, of another grid's name.
            folders = list(folder.glob(f"runs/tiny/*/run{runs}"))
            found = [path for path in folders if checkpoint.find(path / "checkpoints")]
            assert len(found) == 1, f"run {runs}: {told} left {found}:\n{(folder / f'run{runs}.log').read_text()}"
            (path,) = found
            if runs % 2:
                error = max(worst_error(path, serial))
                assert error < 1e-12, f"run {runs}: {error}"
                result = f"{error:.1e} from one process"
            else:
                check_equal(path, references[grids[0]])
                result = "bit-equal"
                if grids[0] == HOME[0]:
                    found, kills = evaluated(path, folder, dice, ranks=dice.randint(1, 2))
                    assert found == skill, f"run {runs}: its evaluation differs"
                    told, evaluations = [*told, *kills], evaluations + 1
            for picture in path.glob("pictures/*.png"):
                matplotlib.image.imread(picture)  # it is whole
            happened, runs, slow = happened + Counter(told), runs + 1, slow + slower
            print(f"{seed}: run {runs:3}: {', '.join(told)}: {result}; {happened.total()} in all", flush=True)
            for path in folders:
                shutil.rmtree(path)
    return happened, runs, evaluations, slow


def reference(grid: Grid, folder: Path, *flags: str, dtype: torch.dtype = torch.float32) -> Path:
    """Return the folder of a run to which nothing happened."""
    name = f"whole-{dtype}-{grid.ranks}{''.join(grid.flags)}"
    argv = tiny_flags(folder, *FLAGS, *(flags or ["--dropout=0.1"]), "--run_num", name)
    assert Ranks(grid, argv, folder / "whole.log", (in_dtype(dtype),)).wait() == [0] * grid.ranks
    return run_folder(argv, grid.folder)


def run(grids: list[Grid], folder: Path, name: str, dice: random.Random) -> tuple[list[str], int]:
    """Interrupt a run until it is finished; return what happened, and how many starts were on a slow disk."""
    wanders = len(grids) > 1
    flags = ["--dropout=0"] if wanders else ["--dropout=0.1"]
    argv = [*tiny_flags(folder, *FLAGS, *flags, "--run_num", name), "--resume", "auto"]
    happened, before, slow, log = [], 0, 0, folder / f"{name}.log"

    def folders() -> list[Path]:
        return list(folder.glob(f"runs/tiny/*/{name}"))

    while True:
        grid = dice.choice(grids)
        rank, faults = dice.randrange(grid.ranks), [in_dtype(torch.float64 if wanders else torch.float32)]
        what = dice.choice(["signal"] * 5 + ["phase"] * 3 + ["save"] * 2 + ["picture"])
        shown = ["--plot_channels=ch0"] * (what == "picture")  # a picture takes longer than all else of such a run
        if what == "phase":
            part = dice.choice(PHASES)
            faults.append(KillIn(part, rank, dice.randrange(1, 40 if part in PHASES[:6] else 6)))
        elif what == "save":
            faults.append(InSave(killed, rank))
        elif what == "picture":
            faults.append(InPicture(dice.randrange(1, 3)))
        if dice.random() < 0.2:
            faults.append(SlowDisk(dice.randrange(1000)))
            slow += 1
        known, told = len(happened), log.stat().st_size if log.exists() else 0
        ranks = Ranks(grid, [*argv, *shown], log, tuple(faults))
        if what == "signal":
            time.sleep(dice.uniform(0.1, 3))
            if ranks.are_running():
                happened.append(
                    signals(dice, ranks, folders, lambda told=told: log.exists() and log.stat().st_size > told)
                )
        try:
            codes = ranks.wait()
        except AssertionError as error:
            raise AssertionError(f"{grid}, {faults}, {what}, {happened}: {error}") from None
        if what != "signal" and -signal.SIGKILL in codes:
            happened.append(f"KILL in {part if what == 'phase' else f'a {what}'}")
        check_end(", ".join(happened[known:]), codes, log.read_bytes()[told:].decode())
        there = newest_iteration(folders())
        assert there >= before, f"the newest checkpoint was {before}, and is {there}"
        before = there
        if set(codes) == {0}:
            return happened, slow


def check_end(what: str, codes: list[int], told: str) -> None:
    """Raise AssertionError where processes did not end as documented where `what` happened; empty: nothing did."""
    expected = {0}.union(*(more for word, more in ENDS.items() if word in what))
    assert set(codes) <= expected, f"{what}: {codes}\n{told}"
    if "INT" not in what:  # which ends a start as it ends any Python program
        assert "Traceback" not in told, f"{what}: {codes}\n{told}"
        assert 1 not in codes or " is gone" in told, f"{what}: {codes}\n{told}"


def evaluated(path: Path, folder: Path, dice: random.Random, ranks: int = 1, most: int = 3) -> tuple[dict, list[str]]:
    """Evaluate a run, all ranks or one of them killed at random until it is done; return its scores, and each kill."""
    argv = ["--checkpoint", path, "--inf_data_path", folder / "valid", "--lead_hours", "24", "--out", path / "found"]
    command, kills = [sys.executable, ROOT / "evaluate.py", *argv], []
    while True:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        what = ""
        with (folder / f"evaluation-{path.name}.log").open("w+") as log:
            processes = [
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    env=clean_environment(RANK=str(i), LOCAL_RANK=str(i), **env),
                )
                for i in range(ranks)
            ]
            if len(kills) < most:  # once all are here: for one that never comes the others wait ten minutes
                while log.tell() == 0 and processes[0].poll() is None:
                    time.sleep(0.1)
                    log.seek(0, os.SEEK_END)
                time.sleep(dice.uniform(0, 4))
                if all(process.poll() is None for process in processes):
                    one = dice.randrange(ranks + 1)  # or all
                    for process in processes if one == ranks else [processes[one]]:
                        process.kill()
                    what = "evaluation, KILL" if one == ranks or ranks == 1 else "evaluation, KILL one"
            try:
                codes = [process.wait(timeout=300) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            log.seek(0)
            check_end(what, codes, log.read())
        if set(codes) == {0}:
            return json.loads((path / "found/skill.json").read_text())["scores"], kills
        kills.append(what)


if __name__ == "__main__":
    sys.exit(main())
