"""Every fault on every grid, and every grid after another one: `make faults`, some minutes. docs/faults.md explains.

python tests/proofs/fault_matrix.py [--json FILE]      writes a record where all went well
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.record import write_record  # noqa: E402
from tests.helpers import write_data  # noqa: E402
from tests.proofs.injections import FAULTS  # noqa: E402
from tests.proofs.interruptions import GRIDS, Grid, check_equal, disturbed, moved, undisturbed, worst_error  # noqa: E402

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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the record")
    path = parser.parse_args().json
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = write_data(Path(name))
        rows, failed = faults(folder)
        moves, far = grids(folder)
    print(*failed, *far, sep="\n")
    count = len(FAULTS) * len(GRIDS)
    print(f"{count - len(failed)} of {count} faults left no trace; {len(moves) - len(far)} of {len(moves)} grids are")
    print(f"within 1e-12 (float64) and 1e-5 (float32); {time.perf_counter() - start:.0f} s")
    if path and not failed and not far:
        worst = {f"worst_float{bits}": max(both[i] for both in moves.values()) for i, bits in enumerate((64, 32))}
        write_record(path, {"faults": count, "kinds": len(FAULTS), **worst}, {}, faults=rows, grids=moves)
    return bool(failed or far)


def faults(folder: Path) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return what became of each fault, by grid, and what failed."""
    rows, failed = {}, []
    whole = {name: undisturbed(grid, folder, f"whole-{grid.ranks}") for name, grid in GRIDS.items()}
    for fault in FAULTS:
        rows[fault] = {}
        for grid in GRIDS:
            try:
                path, codes = disturbed(GRIDS[grid], FAULTS[fault], folder, f"{fault}-{grid}".replace(" ", "-"))
                check_equal(path, whole[grid])
                cell = f"from {FAULTS[fault].resumes}; exit {', '.join(map(str, sorted(set(codes))))}"
            except AssertionError as error:
                cell = "FAILED"
                failed.append(f"{fault}, {grid}: {error}")
            rows[fault][grid] = cell
            print(f"{fault:32} {grid:12} {cell}", flush=True)
    return rows, failed


def grids(folder: Path) -> tuple[dict[str, list[float]], list[str]]:
    """Return the errors in float64 and float32 of each grid, and those beyond the bounds."""
    rows, far = {}, []
    for i, (title, (grid, *flags)) in enumerate(GRIDS_TO.items()):
        errors = []
        for dtype in (torch.float64, torch.float32):
            flags = ["--dropout=0", *flags]
            one = undisturbed(Grid(1), folder, f"one-{i}-{dtype}", *flags, dtype=dtype)
            told, tensors = worst_error(moved(grid, folder, f"moved-{i}-{dtype}", *flags, dtype=dtype), one)
            errors.append(max(told, tensors) if dtype == torch.float64 else told)
        rows[title], told = errors, "{}: {:.1e} in float64, {:.1e} in float32".format(title, *errors)
        if not (errors[0] < 1e-12 and errors[1] < 1e-5):
            far.append(told)
        print(told, flush=True)
    return rows, far


if __name__ == "__main__":
    sys.exit(main())
