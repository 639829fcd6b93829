"""Every fault on every grid: `make faults`, some minutes. Writes docs/faults.md where all went well.

python tests/proofs/fault_matrix.py [--report docs/faults.md]
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers import write_data  # noqa: E402
from tests.proofs.injections import FAULTS  # noqa: E402
from tests.proofs.interruptions import GRIDS, Grid, check_equal, disturbed, moved, undisturbed, worst_error  # noqa: E402

HEAD = """# What a run survives

Written by `make faults`. Each cell is a run of 14 iterations, with a checkpoint every 4 and after each validation (5,
10 and 14). It was disturbed after iteration 7 (all ranks killed: after 9; in validation: after 5; in mid-save: in the
checkpoint of iteration 8), and then went on with one plain command, `--resume auto`. The cell says after how many
iterations it went on, and the exit codes of the ranks that were disturbed (-9: killed).

A cell stands here only if the weights, the optimiser's state and all records (each iteration once, its loss, its
gradient norm, the validations, TensorBoard's curves) are equal, bit for bit, to those of a run that nothing disturbed.

"""


MOVES = """
## On another grid

A run of the same 14 iterations began on (dp, tp, cp) = (2, 2, 1), was stopped in its first validation, went on with
another grid, was stopped after iteration 8, and finished on the first one. Largest difference from one process that
nothing disturbed, over the largest value: in float64 of losses, gradient norms, validation losses, weights and Adam's
moments; in float32 of the first three. (Weights in float32 are as far from one process as those of a run that stays on
its grid. The key part of the bias of qkv is farthest: its gradient is rounding alone, and Adam divides it by its size.)

| grid | float64 | float32 |
| --- | --- | --- |
"""
# train.py draws DropPath's numbers from the generator of each rank, so they are others on another grid.
GRIDS_TO = {
    "1 process, train.py, no DropPath": (Grid(1), "--drop_path=0"),
    "(1, 1, 1)": (Grid(1, 1, 1),),
    "(1, 4, 1)": (Grid(1, 4, 1),),
    "(1, 1, 4)": (Grid(1, 1, 4),),
    "(4, 1, 1)": (Grid(4, 1, 1),),
    "(1, 2, 2)": (Grid(1, 2, 2),),
    "(1, 4, 1), no sequence parallelism": (Grid(1, 4, 1, ("--no_sequence_parallel",)),),
    "(1, 2, 2), order dp-cp-tp": (Grid(1, 2, 2, ("--parallel_order=dp-cp-tp",)),),
}


def main() -> int:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of each restart
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, help="file for the tables")
    report = parser.parse_args().report
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = write_data(Path(name))
        rows, failed = faults(folder)
        moves, far = grids(folder)
    print(*failed, *far, sep="\n")
    count = len(FAULTS) * len(GRIDS)
    print(f"{count - len(failed)} of {count} faults left no trace; {len(moves) - len(far)} of {len(moves)} grids are")
    print(f"within 1e-12 (float64) and 1e-5 (float32); {time.perf_counter() - start:.0f} s")
    if report and not failed and not far:
        head = [f"| fault | {' | '.join(GRIDS)} |", "| --- |" + " --- |" * len(GRIDS)]
        report.write_text(HEAD + "\n".join([*head, *rows]) + f"\n\n{count} cases.\n" + MOVES + "\n".join(moves) + "\n")
    return bool(failed or far)


def faults(folder: Path) -> tuple[list[str], list[str]]:
    """Return the rows of the table, and what failed."""
    rows, failed = [], []
    whole = {name: undisturbed(grid, folder, f"whole-{grid.ranks}") for name, grid in GRIDS.items()}
    for fault in FAULTS:
        cells = []
        for grid in GRIDS:
            try:
                path, codes = disturbed(GRIDS[grid], FAULTS[fault], folder, f"{fault}-{grid}".replace(" ", "-"))
                check_equal(path, whole[grid])
                cells.append(f"from {FAULTS[fault].resumes}; exit {', '.join(map(str, sorted(set(codes))))}")
            except AssertionError as error:
                cells.append("FAILED")
                failed.append(f"{fault}, {grid}: {error}")
            print(f"{fault:32} {grid:12} {cells[-1]}", flush=True)
        rows.append(f"| {fault} | {' | '.join(cells)} |")
    return rows, failed


def grids(folder: Path) -> tuple[list[str], list[str]]:
    """Return the rows of the table, and those beyond the bounds."""
    rows, far = [], []
    for i, (title, (grid, *flags)) in enumerate(GRIDS_TO.items()):
        errors = []
        for dtype in (torch.float64, torch.float32):
            flags = ["--dropout=0", *flags]
            one = undisturbed(Grid(1), folder, f"one-{i}-{dtype}", *flags, dtype=dtype)
            told, tensors = worst_error(moved(grid, folder, f"moved-{i}-{dtype}", *flags, dtype=dtype), one)
            errors.append(max(told, tensors) if dtype == torch.float64 else told)
        rows.append(f"| {title} | {errors[0]:.1e} | {errors[1]:.1e} |")
        if not (errors[0] < 1e-12 and errors[1] < 1e-5):
            far.append(rows[-1])
        print(rows[-1], flush=True)
    return rows, far


if __name__ == "__main__":
    sys.exit(main())
