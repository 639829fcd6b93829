"""Whatever ends a run: one plain command goes on with it, and it ends as if nothing had happened."""

import pytest

from tests.helpers import write_data
from tests.interruptions import FAULTS, GRIDS, check_equal, disturbed, undisturbed

# Each fault on one grid here, and all on all in fault_matrix.py.
CASES = [(name, list(GRIDS)[i % len(GRIDS)]) for i, name in enumerate(FAULTS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with data, and the run on each grid that nothing disturbed."""
    folder = write_data(tmp_path_factory.mktemp("runs"))
    return folder, {name: undisturbed(grid, folder) for name, grid in GRIDS.items()}


@pytest.mark.parametrize("fault, grid", CASES)
def test_a_run_that_was_interrupted_ends_as_if_nothing_had_happened(whole, fault, grid):
    folder, runs = whole
    path, _ = disturbed(GRIDS[grid], FAULTS[fault], folder, fault.replace(" ", "-"))
    check_equal(path, runs[grid])
