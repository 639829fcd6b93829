"""Is the planner right? Steps that it predicts, and steps that were taken: `make plan-check`, about 20 minutes.

Runs of one, two and four ranks on this machine: first the machine is measured, for each number of ranks, then all is
predicted, and only then the runs are made. And runs of the system that this one comes from, on A100, as published
(tests/benchmarks/test_published.py). Writes benchmarks/results/plan.json, and a picture beside it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from matplotlib.figure import Figure  # noqa: E402

from benchmarks.harness.data import path_flags  # noqa: E402
from benchmarks.harness.record import write_record  # noqa: E402
from benchmarks.ladder import run  # noqa: E402
from benchmarks.planner.machine import Machine, load_machine, machine_of  # noqa: E402
from benchmarks.planner.measure import measure  # noqa: E402
from benchmarks.planner.ranking import outlook_of, outlooks  # noqa: E402
from benchmarks.rungs.rungs import Rung  # noqa: E402
from tests.benchmarks.test_published import predictions  # noqa: E402
from utils.config.reader import load_config  # noqa: E402
from utils.sample_data.write import write_shape  # noqa: E402

CHANNELS, ROWS, COLUMNS = 20, 64, 128
ITERATIONS, REPEATS = 20, 3
SMALL = ("--embed_dim=128", "--depth=4", "--num_heads=8")  # as in the section demo
WIDE = ("--embed_dim=384", "--depth=4", "--num_heads=8")  # as wide as base


@dataclass(frozen=True)
class Case:
    """A run of `ranks` ranks, each step of so many samples."""

    ranks: int
    batch: int
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        told = [flag.removeprefix("--") for flag in self.flags if flag not in SMALL[1:] + WIDE[1:]]
        return f"{self.ranks} rank(s), batch {self.batch}: {' '.join(told)}"


TP, CP = ("--tensor_parallel=2",), ("--context_parallel=2",)
CASES = [
    Case(1, 16, SMALL), Case(1, 8, WIDE), Case(1, 8, (*WIDE, "--activation_checkpoint=block")),
    Case(1, 16, ("--embed_dim=192", "--depth=6", "--num_heads=6")),
    Case(2, 16, SMALL), Case(2, 8, WIDE), Case(2, 8, (*WIDE, *TP)), Case(2, 8, (*WIDE, *CP)),
    Case(2, 8, (*WIDE, *CP, "--cp_attention=ulysses")), Case(2, 16, (*SMALL, *TP)),
    Case(2, 8, (*WIDE, "--shard=weights")),
    Case(4, 8, WIDE), Case(4, 8, (*WIDE, "--tensor_parallel=4")), Case(4, 8, (*WIDE, "--context_parallel=4")),
    Case(4, 8, (*WIDE, *TP, *CP)), Case(4, 8, (*WIDE, *TP)), Case(4, 8, (*WIDE, *CP)), Case(4, 16, SMALL),
]  # fmt: skip


COMMON = ("--config=base", "--img_size", str(ROWS), str(COLUMNS), "--enable_fused", "--device=cpu")


def predicted(case: Case, machine: Machine) -> float:
    """Return the samples per second that a case should have."""
    config, _ = load_config([*COMMON, *case.flags, f"--global_batch_size={case.batch}"], chapter=2)
    return case.batch / outlook_of(config, machine, case.ranks).seconds


def measured(case: Case, folder: Path) -> float:
    """Run a case; return its samples per second, in the second of two epochs."""
    rung = Rung("planner", case.name, case.flags, case.batch, script="train_mp.py", ranks=case.ranks)
    flags = [*COMMON, *path_flags(f"{folder}/data")]
    found = run(rung, flags, ITERATIONS, samples=ITERATIONS * case.batch, folder=folder / "runs", limit=600)
    if "samples_per_sec" not in found:
        raise ValueError(f"{case.name}: {found}")
    return found["samples_per_sec"]


def here() -> dict[str, dict[str, Any]]:
    """Return what was predicted and then measured of each case: the fastest of some rounds."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, most = Path(name), max(case.batch for case in CASES)
        write_shape(f"{folder}/data", (CHANNELS, ROWS, COLUMNS), samples=(ITERATIONS + 1) * most + 1)
        for ranks in sorted({case.ranks for case in CASES}):
            machine = machine_of(measure("cpu", ranks))
            cases = [case for case in CASES if case.ranks == ranks]
            for case in cases:
                found[case.name] = {"ranks": ranks, "predicted": predicted(case, machine), "rounds": []}
            for _ in range(REPEATS):
                for case in cases:
                    found[case.name]["rounds"].append(measured(case, folder))
            for case in cases:
                row = found[case.name]
                row["measured"] = max(row["rounds"])
                print(f"{case.name:90} {row['predicted']:8.1f} {row['measured']:8.1f} {error(row):+.1%}", flush=True)
    return found


def error(row: dict[str, Any]) -> float:
    return row["predicted"] / row["measured"] - 1


def best_of(found: dict[str, dict[str, Any]]) -> float:
    """Return how much slower the layout that should be the best is than the best, of one model on 4 ranks."""
    same = {case.name for case in CASES if (case.ranks, case.batch, case.flags[:3]) == (4, 8, WIDE)}
    rows = [row for name, row in found.items() if name in same]
    chosen = max(rows, key=lambda row: row["predicted"])
    return max(row["measured"] for row in rows) / chosen["measured"] - 1


def draw(ours: dict[str, dict], published: dict[str, dict], path: Path) -> None:
    """Draw what was measured against what was predicted."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for axes, rows, title in zip(
        figure.subplots(1, 2), (ours, published), ("here, on two CPU cores", "published, A100")
    ):
        x, y = ([row[key] for row in rows.values()] for key in ("predicted", "measured"))
        ends = [0.8 * min(x + y), 1.25 * max(x + y)]
        axes.plot(ends, ends, color="black", lw=1)
        axes.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], alpha=0.15, label="20%")
        axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], alpha=0.3, label="10%")
        axes.scatter(x, y, color="C3", s=18, zorder=3)
        axes.set(xscale="log", yscale="log", xlabel="samples/s predicted", ylabel="measured", title=title)
        axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the record, with a picture beside it")
    parser.add_argument("--published", action="store_true", help="only those; of the runs here those of the record")
    args = parser.parse_args()
    path = args.json
    figures: dict[str, float] = {}
    ours = json.loads(path.read_text())["here"] if args.published else here()
    config, _ = load_config(["--config=mp", "--global_batch_size=16384"], chapter=2)
    begin = time.perf_counter()
    figures["layouts of 16,384 ranks"] = len(outlooks(config, frozenset(), load_machine("perlmutter"), 16384))
    figures["seconds to rank them"] = time.perf_counter() - begin
    published = {name: row | {"measured": row["published"]} for name, row in predictions().items()}
    for where, rows in (("here", ours), ("published", published)):
        errors = [abs(error(row)) for row in rows.values() if not row.get("calibrated")]
        figures |= {f"{where}: runs": len(errors), f"{where}: worst error": max(errors)}
        figures[f"{where}: median error"] = statistics.median(errors)
    figures["here: best layout slower than the best by"] = best_of(ours)
    for name, value in figures.items():
        print(f"{name:60} {value:.3g}")
    if path:
        write_record(path, figures, {}, here=ours, published=published)
        draw(ours, published, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
