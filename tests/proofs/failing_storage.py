"""A storage that fails for a while, under the data, the checkpoints, the records and the pictures of a run.

    python tests/proofs/failing_storage.py [--json FILE]       all cases: some ten minutes

Each case trains while calls on some files fail (failing_storage.c), and then goes on with a storage that works. It must
end as documented, with one line that says why; and what is there in the end must be what it is without a fault.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.record import write_record  # noqa: E402
from tests.helpers import ROOT, clean_environment, records, run_folder, tiny_flags, write_data  # noqa: E402
from tests.proofs.interruptions import FLAGS, check_equal  # noqa: E402
from utils.measure.tables import markdown  # noqa: E402
from utils.observers import Observer  # noqa: E402

# The folder below that of the data, and the calls that fail there.
TARGETS = {
    "data": ("train", "open read"),
    "checkpoints": ("{run}/checkpoints", "open read write sync rename"),
    "records": ("{run}/metrics.jsonl", "open read write sync rename"),
    "pictures": ("{run}/pictures", "open write rename"),
    "all of the run's folder": ("{run}/", "open write sync rename"),
    "a run to go on with": ("{run}", "open read list stat"),
}
KINDS = ("EIO", "ENOSPC", "ESTALE", "EINTR", "SHORT")
# Which calls: each seventh from the beginning, or all of some iterations (a checkpoint follows 8, a validation 10). A
# run to go on with was stopped after 7; then all until 11 fail, from the beginning on.
TIMES = {"now and then": (7, 0, 99), "iterations 7 to 11": (1, 7, 11)}
NEVER = (99, 99)
SHOWN = (*FLAGS, "--plot_channels=ch0")
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
            self.path.unlink()


def build(folder: Path) -> Path:
    """Return the library. Raises OSError or CalledProcessError where there is no compiler."""
    out = folder / "failing_storage.so"
    source = Path(__file__).with_suffix(".c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(out), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return out


def train_here(switch: Path, first: int, last: int | None, argv: list[str]) -> None:
    """Be the process that trains."""
    import train

    if not first:
        switch.touch()
    train.start(partial(train.main, observers=[Switch(switch, first, last)]), argv, train.load_config)


def trained(argv: list[str], switch: Path, when: tuple[int, int | None], **env: str) -> subprocess.CompletedProcess:
    """Train in a process of its own, while the storage fails; return its code, and what it told."""
    code = "import sys, pathlib; from tests.proofs.failing_storage import train_here as t\n"
    code += f"t(pathlib.Path(sys.argv[1]), *{when}, sys.argv[2:])"
    command = [sys.executable, "-c", code, str(switch), *argv]
    env = clean_environment(OMP_NUM_THREADS="1", **env)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def case(folder: Path, library: Path, whole: Path, target: str, kind: str, time: str) -> str:
    """Train while the storage fails, and go on; return how the first process ended.

    Raises AssertionError where it did not end as it should, or what is there in the end is not as without a fault.
    """
    name = f"{target}-{kind}-{time}".replace(" ", "-")
    count = folder / f"{name}.count"
    # A call that a signal interrupts is repeated: all of them would never end.
    argv, switch = tiny_flags(folder, *SHOWN, "--run_num", name), folder / f"{name}.switch"
    run, (where, calls), (every, *when) = run_folder(argv), TARGETS[target], TIMES[time]
    every = max(every, 3 * (kind == "EINTR"))
    if target == "a run to go on with":
        assert trained(argv, switch, (7, None)).returncode == 75
        argv, when = [*argv, "--resume=auto"], [0, when[1]]
    done = trained(
        argv, switch, tuple(when), LD_PRELOAD=str(library), FAILING_PATH=str(folder / where.format(run=run)),
        FAILING_WITH=kind, FAILING_CALLS=calls, FAILING_EVERY=str(every), FAILING_SWITCH=str(switch),
        FAILING_COUNT=str(count),
    )  # fmt: skip
    told = done.stderr + done.stdout
    assert count.exists(), f"{name}: no call failed"
    assert done.returncode in CODES and "Traceback" not in told, f"{name}: {done.returncode}\n{told}"
    switch.unlink(missing_ok=True)
    errors = [line for line in told.splitlines() if " ERROR " in line or ": error: " in line]
    assert len(errors) == (done.returncode == 2), f"{name}: {done.returncode}\n{told}"
    assert done.returncode != 74 or "The last checkpoint was not written" in told, f"{name}:\n{told}"
    again = trained([*argv, "--resume=auto"], switch, NEVER)
    assert again.returncode == 0, f"{name}: {again.returncode}\n{told}\n---\n{again.stderr}"
    last = records(run, "step")[-1]["iteration"]
    assert last == records(whole, "step")[-1]["iteration"], name
    check_equal(run, whole)
    return str(done.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--only", nargs="+", default=[], help="words of the cases to try")
    args = parser.parse_args()
    wanted = [
        one for one in itertools.product(TARGETS, KINDS, TIMES) if all(word in " ".join(one) for word in args.only)
    ]
    if not wanted:
        parser.error(f"no case has the words {args.only}: they are of {', '.join([*TARGETS, *KINDS, *TIMES])}")
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = write_data(Path(name).resolve())
        argv = tiny_flags(folder, *SHOWN, "--run_num", "whole")
        assert trained(argv, folder / "none", NEVER).returncode == 0
        library, whole = build(folder), run_folder(argv)
        futures = {one: pool.submit(case, folder, library, whole, *one) for one in wanted}
        failed = 0
        for (target, kind, time), future in futures.items():
            try:
                result = future.result()
            except Exception as error:
                result, failed = "WRONG", failed + 1
                traceback.print_exception(error)
                print(f"{target}, {kind}, {time}: {error}", file=sys.stderr)
            found.setdefault(f"{target}, {time}", {})[kind] = result
    print(
        "The exit code of a run whose storage fails" + "; all went on to what they are without a fault" * (not failed)
    )
    print(markdown(["", *KINDS], ([row, *(x.get(kind, "") for kind in KINDS)] for row, x in found.items())))
    if args.json and not failed:
        write_record(args.json, {"cases": len(futures)}, {}, storage=found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
