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
from tests.proofs.interruptions import (  # noqa: E402
    GRIDS,
    MOVED,
    Grid,
    begun_and_ended,
    check_equal,
    disturbed,
    moved,
    undisturbed,
    worst_error,
)  # fmt: skip

GRADIENTS, WEIGHTS = ("--shard=gradients",), ("--shard=weights",)
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
    "(1, 1, 4), shared gradients": (Grid(1, 1, 4, GRADIENTS),),
    "(1, 2, 2), shared weights": (Grid(1, 2, 2, WEIGHTS),),
}
# Of 4 ranks: (dp, tp, cp), half of them shared out.
LAYOUTS = {
    "(4, 1, 1)": Grid(4, 1, 1), "(2, 2, 1)": Grid(2, 2, 1), "(1, 2, 2)": Grid(1, 2, 2), "(1, 1, 4)": Grid(1, 1, 4),
    "(4, 1, 1) G": Grid(4, 1, 1, GRADIENTS), "(2, 2, 1) W": Grid(2, 2, 1, WEIGHTS),
    "(1, 1, 4) G": Grid(1, 1, 4, GRADIENTS),
    "(1, 2, 2) W": Grid(1, 2, 2, (*WEIGHTS, "--parallel_order=cp-dp-tp")),
}  # fmt: skip


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
        pairs, apart = layouts(folder)
    print(*failed, *far, *apart, sep="\n")
    count = len(FAULTS) * len(GRIDS)
    print(f"{count - len(failed)} of {count} faults left no trace; {len(moves) - len(far)} of {len(moves)} grids are")
    print(f"within 1e-12 (float64) and 1e-5 (float32); {time.perf_counter() - start:.0f} s")
    if path and not failed and not far and not apart:
        worst = {f"worst_float{bits}": max(both[i] for both in moves.values()) for i, bits in enumerate((64, 32))}
        worst |= {"worst_layouts": max(max(row.values()) for row in pairs.values())}
        found = {"faults": rows, "grids": moves, "layouts": pairs}
        write_record(path, {"faults": count, "kinds": len(FAULTS), **worst}, {}, **found)
    return bool(failed or far or apart)


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
    """Return the errors in float64 and float32 from where each grid took over, and the runs beyond the bounds."""
    rows, far = {}, []
    for i, (title, (grid, *flags)) in enumerate(GRIDS_TO.items()):
        errors, is_far = [], False
        for dtype in (torch.float64, torch.float32):
            flags = ["--dropout=0", *flags]
            one = undisturbed(Grid(1), folder, f"one-{i}-{dtype}", *flags, dtype=dtype)
            path = moved(grid, folder, f"moved-{i}-{dtype}", *flags, dtype=dtype)
            kinds = 2 if dtype == torch.float64 else 1
            errors.append(max(worst_error(path, one, MOVED)[:kinds]))
            is_far |= not max(worst_error(path, one)[:kinds]) < {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
        rows[title], told = errors, "{}: {:.1e} in float64, {:.1e} in float32".format(title, *errors)
        if is_far:
            far.append(told)
        print(told, flush=True)
    return rows, far


def layouts(folder: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the errors in float64 of each pair of layouts, from where the second took over, and runs beyond bounds."""
    flags = "--dropout=0", "--num_iters=8"
    serial = undisturbed(Grid(1), folder, "layouts", *flags, dtype=torch.float64)
    rows, far = {}, []
    for i, (begun, first) in enumerate(LAYOUTS.items()):
        rows[begun] = {}
        for j, (ended, then) in enumerate(LAYOUTS.items()):
            path = begun_and_ended(first, then, folder, f"layouts-{i}-{j}", *flags)
            rows[begun][ended] = max(worst_error(path, serial, MOVED))
            if not (whole := max(worst_error(path, serial))) < 1e-12:
                far.append(f"{begun}, then {ended}: {whole:.1e}")
            if i == j:  # bit for bit
                check_equal(path, undisturbed(first, folder, f"layouts-{i}", *flags, dtype=torch.float64))
        print(begun, *(f"{error:.1e}" for error in rows[begun].values()), flush=True)
    return rows, far


if __name__ == "__main__":
    sys.exit(main())
