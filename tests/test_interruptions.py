"""Whatever ends a run: one plain command goes on with it, and it ends as if nothing had happened."""

import pytest
import torch

from tests.helpers import write_data
from tests.interruptions import FAULTS, GRIDS, Grid, check_equal, disturbed, moved, undisturbed, worst_error

# Each fault on one grid here, and all on all in fault_matrix.py.
CASES = [(name, list(GRIDS)[i % len(GRIDS)]) for i, name in enumerate(FAULTS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with data, and the run on each grid that nothing disturbed."""
    folder = write_data(tmp_path_factory.mktemp("runs"))
    return folder, {name: undisturbed(grid, folder, f"whole{grid.ranks}") for name, grid in GRIDS.items()}


@pytest.mark.parametrize("fault, grid", CASES)
def test_a_run_that_was_interrupted_ends_as_if_nothing_had_happened(whole, fault, grid):
    folder, runs = whole
    path, _ = disturbed(GRIDS[grid], FAULTS[fault], folder, fault.replace(" ", "-"))
    check_equal(path, runs[grid])


@pytest.mark.parametrize(
    "grid", [Grid(1, 4, 1, ("--no_sequence_parallel",)), Grid(1, 2, 2, ("--parallel_order=dp-cp-tp",))]
)
def test_a_run_goes_on_on_another_grid_and_back(tmp_path, grid):
    folder = write_data(tmp_path)
    serial = undisturbed(Grid(1), folder, "serial", "--dropout=0", dtype=torch.float64)
    assert max(worst_error(moved(grid, folder, "moved", "--dropout=0", dtype=torch.float64), serial)) < 1e-12
