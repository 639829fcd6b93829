"""64 ranks of a small model on this machine: they train, lose one, go on with 48, and wait for one that is slow.

    python tests/proofs/many_ranks.py [--ranks 64 --then 48] [--json FILE]      some four minutes on 2 cores

All is in float64, and compared with one process. (What a start costs by the number of ranks: benchmarks/startup.py.)
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from benchmarks.harness.record import write_record  # noqa: E402
from tests.helpers import records, run_folder, tiny_flags, write_data  # noqa: E402
from tests.proofs.injections import KILL, At  # noqa: E402
from tests.proofs.interruptions import Grid, Ranks, in_dtype, worst_error  # noqa: E402
from utils.observers import Observer  # noqa: E402
from utils.run.run import Run  # noqa: E402

SLOWER = 100


@dataclass
class Slow(Observer):
    """One rank sleeps before each step."""

    rank: int
    seconds: float

    def begin(self, run: Run) -> None:
        self.run = run

    def before_step(self, left: int) -> None:
        if self.run.job.world.rank == self.rank:
            time.sleep(self.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--then", type=int, default=48, help="ranks that go on when one is lost")
    parser.add_argument("--json", type=Path, help="file for the record")
    args = parser.parse_args()
    batch = 3 * args.ranks
    if batch % args.then:
        parser.error(f"a batch of {batch} does not divide among {args.then} ranks")
    flags = [
        f"--global_batch_size={batch}",
        "--num_iters=8",
        "--checkpoint_every=2",
        "--dropout=0",
        "--lr_schedule=none",
    ]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_data(Path(name), train={"2001": 2 * batch + 1}, valid={"2003": 9})
        log = folder / "log"

        def run(
            ranks: int, number: str, *faults: Observer, more: tuple[str, ...] = ()
        ) -> tuple[Path, list[int], float]:
            argv = tiny_flags(folder, *flags, "--run_num", number, *more)
            start = time.perf_counter()
            codes = Ranks(Grid(ranks), argv, log, (in_dtype(torch.float64), *faults)).wait(timeout=500)
            return run_folder(argv, f"{ranks}GPU"), codes, time.perf_counter() - start

        def check(path: Path, codes: list[int], what: str) -> None:
            assert set(codes) == {0}, log.read_text()[-5000:]
            figures[f"{what}: error"] = error = max(worst_error(path, serial))
            assert error < 1e-12, f"{what}: {error}"
            print(f"{what}: {error:.1e} from one process", flush=True)

        serial, codes, _ = run(1, "serial")
        assert codes == [0], log.read_text()
        path, codes, figures["all: seconds"] = run(args.ranks, "all")
        check(path, codes, f"{args.ranks} ranks")
        lost, codes, figures["lost: seconds"] = run(args.ranks, "lost", At(KILL, rank=args.ranks - 1, iteration=5))
        assert set(codes) == {1, -9} and codes.count(-9) == 1, codes
        _, codes, figures["gone on: seconds"] = run(args.then, "lost", more=("--resume", "auto"))
        check(lost, codes, f"{args.ranks} ranks, one lost, {args.then} that went on")
        assert [line["iteration"] for line in records(lost, "resume")] == [4]
        step = figures["step: seconds"] = batch / records(path, "epoch")[-1]["samples_per_sec"]
        own = step * min(len(os.sched_getaffinity(0)), args.ranks) / args.ranks  # of one rank: they share the cores
        slow, codes, figures["one slow: seconds"] = run(args.ranks, "slow", Slow(args.ranks // 2, (SLOWER - 1) * own))
        check(slow, codes, f"{args.ranks} ranks, one {SLOWER} times slower")
        figures["slow step: seconds"] = batch / records(slow, "epoch")[-1]["samples_per_sec"]
    for name, value in figures.items():
        print(f"{name:60s} {value:.3g}")
    if args.json:
        write_record(args.json, figures | {"ranks": args.ranks, "then": args.then}, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
