"""A storage that fails for a while, under the data, the checkpoints, the records and the pictures of a run.

    python tests/proofs/failing_storage.py [--json FILE] [--only words]       all cases: some half an hour

Each case trains while calls on some files fail (failing_storage.c), and then goes on with a storage that works. It must
end as documented, with one line that says why; and what is there in the end must be what it is without a fault. So must
what other commands write that read a model or an archive, when they are given once more.
"""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.record import write_record  # noqa: E402
from tests.helpers import ROOT, clean_environment, free_port, records, run_folder, tiny_flags, write_data  # noqa: E402
from tests.proofs.interruptions import FLAGS, Grid, check_equal  # noqa: E402
from utils.measure.tables import markdown  # noqa: E402
from utils.observers import Observer  # noqa: E402

# The folder below that of the data, and the calls that fail there.
WRITING = "open read write sync close rename mkdir unlink"
TARGETS = {
    "data": ("train", "open read"),
    "checkpoints": ("{run}/checkpoints", WRITING),
    "records": ("{run}/metrics.jsonl", WRITING),
    "pictures": ("{run}/pictures", WRITING),
    "all of the run's folder": ("{run}/", WRITING.replace(" read", "")),
    "a run to go on with": ("{run}", "open read list stat"),
    "staged files": ("{run}.node", f"{WRITING} stat"),
}
KINDS = ("EIO", "ENOSPC", "ESTALE", "EROFS", "EINTR", "SHORT")
# Which calls: each seventh from the beginning, or all of some iterations (a checkpoint follows 8, a validation 10). A
# run to go on with was stopped after 7; then all until 11 fail, from the beginning on.
TIMES = {"now and then": (7, 0, 99), "iterations 7 to 11": (1, 7, 11)}
NEVER = (99, 99)
SHOWN = (*FLAGS, "--plot_channels=ch0")
ALONE, TOGETHER = Grid(1), Grid(2, 1, 1, ("--shard=gradients",))
CODES = {0, 2, 74}


@dataclass
class Switch(Observer):
    """Lets the storage fail from one iteration to another; from 0 on: before the run begins, too. None: it stops."""

    path: Path
    first: int
    last: int | None

    def after_step(self, iteration: int, left: int) -> None:
        if iteration == self.first and self.last is None:
            os.kill(os.getpid(), signal.SIGTERM)
        elif iteration == self.first:
            self.path.touch()
        elif iteration == self.last:
            self.path.unlink(missing_ok=True)


def build(folder: Path) -> Path:
    """Return the library. Raises OSError or CalledProcessError where there is no compiler."""
    out = folder / "failing_storage.so"
    source = Path(__file__).with_suffix(".c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(out), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return out


def failing(library: Path, paths: str, kind: str, calls: str, every: int, switch: Path) -> dict[str, str]:
    """Return the environment of a process whose storage fails while the file `switch` is there."""
    return {
        "LD_PRELOAD": str(library), "FAILING_PATH": paths, "FAILING_WITH": kind, "FAILING_CALLS": calls,
        "FAILING_EVERY": str(every), "FAILING_SWITCH": str(switch), "FAILING_COUNT": str(switch.with_suffix(".count")),
    }  # fmt: skip


def train_here(script: str, switch: Path, first: int, last: int | None, argv: list[str]) -> None:
    """Be a process that trains."""
    chapter = import_module(script)
    if not first:
        switch.touch()
    main, load = partial(chapter.main, observers=[Switch(switch, first, last)]), partial(chapter.load_config, chapter=3)
    chapter.start(main, argv, load)


def ran(commands: list[list[str]], **env: str) -> tuple[list[int], list[str]]:
    """Run commands at once, each a rank; return their codes, and what each of them told."""
    env = clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **env)
    ranks = [{"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": str(len(commands))} for i in range(len(commands))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    processes = [
        subprocess.Popen([sys.executable, *command], env={**env, **(rank if len(commands) > 1 else {})}, **pipes)
        for command, rank in zip(commands, ranks)
    ]
    try:
        with ThreadPoolExecutor(len(processes)) as pool:
            told = [*pool.map(lambda process: process.communicate(timeout=180)[0], processes)]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], told


def trained(
    argv: list[str], switch: Path, when: tuple[int, int | None], grid: Grid = ALONE, **env: str
) -> tuple[list[int], list[str]]:
    """Train, while the storage fails; return each rank's code, and what it told."""
    code = "import sys, pathlib; from tests.proofs.failing_storage import train_here as t\n"
    code += f"t({grid.script!r}, pathlib.Path(sys.argv[1]), *{when}, sys.argv[2:])"
    return ran([["-c", code, str(switch), *argv, *grid.argv]] * grid.ranks, OMP_NUM_THREADS="1", **env)


def check_end(codes: list[int], told: list[str], name: str) -> None:
    """Raise AssertionError where processes did not end as documented, each with a line that says why."""
    everything = f"{name}: {codes}\n" + "\n---\n".join(told)
    assert "Traceback" not in everything and set(codes) <= CODES, everything
    errors = [re.findall(r"^.* ERROR |^(?:.*: )?error: ", text, re.M) for text in told]
    assert max(map(len, errors)) <= 1 and any(errors) == (2 in codes), everything  # one of the ranks tells
    assert 74 not in codes or "The last checkpoint was not written" in everything, everything


def case(folder: Path, library: Path, whole: Path, target: str, kind: str, time: str, grid: Grid = ALONE) -> str:
    """Train while the storage fails, and go on; return how the first processes ended.

    Raises AssertionError where they did not end as they should, or what is there in the end is not as without a fault.
    """
    name = f"{target}-{kind}-{time}-{grid.ranks}".replace(" ", "-")
    argv, switch = tiny_flags(folder, *SHOWN, "--run_num", name), folder / f"{name}.switch"
    run, (where, calls), (every, *when) = run_folder(argv, grid.folder), TARGETS[target], TIMES[time]
    # A call that a signal interrupts is repeated: all of them would never end.
    every = max(every, 3 * (kind == "EINTR"))
    if target == "a run to go on with":
        codes, told = trained(argv, switch, (7, None), grid)
        assert set(codes) == {75}, told
        argv, when = [*argv, "--resume=auto"], [0, when[1]]
    elif target == "staged files":
        argv, when = [*argv, "--stage_dir", f"{run}.node"], [0, when[1]]
    env = failing(library, str(folder / where.format(run=run)), kind, calls, every, switch)
    codes, told = trained(argv, switch, tuple(when), grid, **env)
    assert switch.with_suffix(".count").exists(), f"{name}: no call failed"
    check_end(codes, told, name)
    switch.unlink(missing_ok=True)
    again, more = trained([*argv, "--resume=auto"], switch, NEVER, grid)
    assert set(again) == {0}, f"{name}: {again}\n{told}\n---\n{more}"
    assert records(run, "step")[-1]["iteration"] == records(whole, "step")[-1]["iteration"], name
    check_equal(run, whole)
    return ", ".join(map(str, sorted(set(codes))))


@dataclass(frozen=True)
class Command:
    """Another command, which reads files and writes a folder or a file `out`.

    Args:
        words: its words; {folder} is that of the data, {whole} a run.
        targets: where calls fail, and which; {hidden} is the folder that becomes `out`.
        made: returns what it wrote, to be compared.
        suffix: of `out`.
    """

    words: str
    targets: dict[str, tuple[str, str]]
    made: Callable[[Path], Any]
    suffix: str = ""


def arrays(out: Path) -> dict[str, list]:
    """Return all arrays of the HDF5 files of a folder, or of one."""
    found: dict[str, list] = {}
    for path in sorted(out.rglob("*.h5")) if out.is_dir() else [out]:
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item, path=path: (
                    found.update({f"{path.name}/{name}": item[()].tolist()}) if isinstance(item, h5py.Dataset) else None
                )
            )
    return found


MODEL = "{whole}/checkpoints", "open read"
COMMANDS = {
    "evaluate.py": Command(
        "evaluate.py --checkpoint {whole} --inf_data_path {folder}/valid --lead_hours 24 --out {out}",
        {"model": MODEL, "data": ("{folder}/valid", "open read"), "what it writes": ("{out}", WRITING)},
        lambda out: json.loads((out / "skill.json").read_text())["scores"],
    ),
    "forecast.py": Command(
        "forecast.py --checkpoint {whole} --initial {folder}/valid --lead_hours 24 --out {out}",
        {"model": MODEL, "data": ("{folder}/valid", "open read"), "what it writes": ("{out}", WRITING)},
        arrays,
        ".nc",
    ),
    "prepare_data": Command(
        "-m utils.prepare_data {folder}/archive.nc --memory_gb 1e-4 --out {out}",
        {"archive": ("{folder}/archive.nc", "open read"), "what it writes": ("{out}:{hidden}", f"{WRITING} stat")},
        arrays,
    ),
}


def write_archive(path: Path) -> None:
    axes = {
        "time": np.datetime64("2000-12-30", "ns") + np.arange(40) * np.timedelta64(6, "h"),
        "latitude": np.linspace(90, -90, 9),
        "longitude": np.arange(16) * 22.5,
    }
    values = np.random.default_rng(0).standard_normal((40, 9, 16)).astype(np.float32)
    xarray.Dataset({"t2m": (tuple(axes), values)}, axes).to_netcdf(path, encoding={"t2m": {"chunksizes": (1, 9, 16)}})


def command_case(folder: Path, library: Path, whole: Path, name: str, target: str, kind: str) -> str:
    """Run a command while each third call fails, and, where that ended it, once more; return its first code.

    Raises AssertionError where it did not end as it should, or made something else than without a fault.
    """
    command = COMMANDS[name]
    label = f"{name}-{target}-{kind}".replace(" ", "-")
    switch, out, undisturbed = (
        folder / f"{label}{end}" for end in (".switch", command.suffix, f"-whole{command.suffix}")
    )

    def words(out: Path) -> list[str]:
        return command.words.format(folder=folder, whole=whole, out=out).split()

    codes, told = ran([words(undisturbed)])
    assert codes == [0], told
    switch.touch()
    where, calls = command.targets[target]
    every = 2 if kind == "SHORT" else 3  # of reads and writes alone, of which there are less
    hidden = out.with_name(f".{out.name}-unfinished")
    where = where.format(folder=folder, whole=whole, out=out, hidden=hidden)
    env = failing(library, where, kind, calls, every, switch)
    codes, told = ran([words(out)], **env)
    assert switch.with_suffix(".count").exists(), f"{label}: no call failed"
    check_end(codes, told, label)
    if codes != [0]:
        again, more = ran([words(out)])
        assert again == [0], f"{label}: {codes}, then {again}\n{told}\n---\n{more}"
    assert command.made(out) == command.made(undisturbed), label
    return str(codes[0])


def all_cases() -> dict[tuple[str, str], tuple]:
    """Return each case by its row and column in the table, with what it is called with."""
    found: dict[tuple[str, str], tuple] = {}
    for target, kind, time in itertools.product(TARGETS, KINDS, TIMES):
        found[f"{target}, {time}", kind] = case, target, kind, time
        if time in ("now and then",) and target != "pictures":
            found[f"{target}, {time}, 2 ranks", kind] = case, target, kind, time, TOGETHER
    for name, command in COMMANDS.items():
        for target, kind in itertools.product(command.targets, KINDS):
            found[f"{name}: {target}", kind] = command_case, name, target, kind
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--only", nargs="+", default=[], help="words of the cases to try")
    args = parser.parse_args()
    wanted = {one: call for one, call in all_cases().items() if all(word in ", ".join(one) for word in args.only)}
    if not wanted:
        parser.error(f"no case has the words {args.only}: they are of {'; '.join(row for row, _ in all_cases())}")
    found: dict[str, dict[str, str]] = {}
    failed, failing_calls = 0, 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = write_data(Path(name).resolve())
        write_archive(folder / "archive.nc")
        library = build(folder)
        wholes = {}
        for grid in (ALONE, TOGETHER):
            argv = tiny_flags(folder, *SHOWN, "--run_num", "whole")
            assert set(trained(argv, folder / "none", NEVER, grid)[0]) == {0}
            wholes[grid] = run_folder(argv, grid.folder)
        futures: dict[tuple[str, str], Future] = {
            one: pool.submit(function, folder, library, wholes[TOGETHER if TOGETHER in given else ALONE], *given)
            for one, (function, *given) in wanted.items()
        }
        for (row, kind), future in futures.items():
            try:
                result = future.result()
            except Exception as error:
                result, failed = "WRONG", failed + 1
                traceback.print_exception(error)
            print(f"{row}, {kind}: {result}", file=sys.stderr, flush=True)
            found.setdefault(row, {})[kind] = result
        failing_calls = sum(path.stat().st_size for path in folder.glob("*.count"))
    print(
        "The exit code of a run whose storage fails" + "; all went on to what they are without a fault" * (not failed)
    )
    print(markdown(["", *KINDS], ([row, *(x.get(kind, "") for kind in KINDS)] for row, x in found.items())))
    print(f"{len(futures)} cases, in which {failing_calls:,} calls failed")
    if args.json and not failed:
        write_record(args.json, {"cases": len(futures), "failing calls": failing_calls}, {}, storage=found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
