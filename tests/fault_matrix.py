"""Every fault on every grid: `make faults`, some minutes. Writes docs/faults.md where all went well.

    python tests/fault_matrix.py [--report docs/faults.md]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers import write_data  # noqa: E402
from tests.interruptions import FAULTS, GRIDS, Fault, Grid, check_equal, disturbed, undisturbed  # noqa: E402

HEAD = """# What a run survives

Written by `make faults`. Each cell is a run of 14 iterations, with a checkpoint every 4 and after each validation (5,
10 and 14). It was disturbed after iteration 7 (in validation: after 5; in mid-save: in the checkpoint of iteration 8),
and then went on with one plain command, `--resume auto`. The cell says after how many iterations it went on, and the
exit codes of the ranks that were disturbed (-9: killed).

A cell stands here only if the weights, the optimiser's state and all records (each iteration once, its loss, its
gradient norm, the validations, TensorBoard's curves) are equal, bit for bit, to those of a run that nothing disturbed.

"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, help="file for the table")
    report = parser.parse_args().report
    start, failed, rows = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as name:
        folder = write_data(Path(name))
        whole = {name: undisturbed(grid, folder) for name, grid in GRIDS.items()}
        for fault in FAULTS:
            cells = []
            for grid in GRIDS:
                try:
                    told = _cell(GRIDS[grid], FAULTS[fault], folder, f"{fault}-{grid}".replace(" ", "-"), whole[grid])
                except AssertionError as error:
                    told = "FAILED"
                    failed.append(f"{fault}, {grid}: {error}")
                cells.append(told)
                print(f"{fault:32} {grid:12} {told}", flush=True)
            rows.append(f"| {fault} | {' | '.join(cells)} |")
    print(*failed, sep="\n")
    count = len(FAULTS) * len(GRIDS)
    print(f"{count - len(failed)} of {count} cases are as if nothing had happened, {time.perf_counter() - start:.0f} s")
    if report and not failed:
        head = [f"| fault | {' | '.join(GRIDS)} |", "| --- |" + " --- |" * len(GRIDS)]
        report.write_text(HEAD + "\n".join([*head, *rows]) + f"\n\n{count} cases, none failed.\n")
    return bool(failed)


def _cell(grid: Grid, fault: Fault, folder: Path, name: str, whole: Path) -> str:
    path, codes = disturbed(grid, fault, folder, name)
    check_equal(path, whole)
    return f"from {fault.resumes}; exit {', '.join(map(str, sorted(set(codes))))}"


if __name__ == "__main__":
    sys.exit(main())
