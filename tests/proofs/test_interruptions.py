"""Whatever ends a run: one plain command goes on with it, and it ends as if nothing had happened."""

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from tests.helpers import run_folder, tiny_flags, wait_until, write_data
from tests.proofs import interruptions
from tests.proofs.injections import FAULTS, KILL, At, Fault, InSave, InValidation, Send
from tests.proofs.interruptions import (
    FLAGS,
    GRIDS,
    Grid,
    Ranks,
    check_equal,
    disturbed,
    moved,
    undisturbed,
    worst_error,
)
from utils.checkpoint import store as checkpoint
from utils.run.saving import Saving

# Each fault on one grid here, one of them in the quick tests, some in CI; and all on all in fault_matrix.py.
LOST = "00000008 was not written ("
CASES = [
    pytest.param(
        name, list(GRIDS)[i % len(GRIDS)], marks=pytest.mark.nightly if i % 6 else [pytest.mark.slow] * (i > 0)
    )
    for i, name in enumerate(FAULTS)
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with data, and a function that returns the run on a grid that nothing disturbed."""
    folder = write_data(tmp_path_factory.mktemp("runs"))
    return folder, cache(lambda name: undisturbed(GRIDS[name], folder, f"whole{GRIDS[name].ranks}"))


@pytest.mark.parametrize("fault, grid", CASES)
def test_a_run_that_was_interrupted_ends_as_if_nothing_had_happened(whole, fault, grid):
    folder, runs = whole
    path, _ = disturbed(GRIDS[grid], FAULTS[fault], folder, fault.replace(" ", "-"))
    check_equal(path, runs(grid))


@contextlib.contextmanager
def late(log: Path) -> Iterator[None]:
    """Be away in a save for longer than the others wait."""
    wait_until(lambda: LOST in log.read_text())
    yield


@pytest.mark.parametrize("part", range(4))
def test_runs_whose_values_are_no_numbers_are_not_equal(monkeypatch, part):
    """Wherever they stand: `max` drops those that are not first."""
    one = torch.ones(3)
    whole = [1.0, 2.0], [1.0], [1.0, 3.0], {"a": one, "b": one}
    bad = [*whole]
    bad[part] = {"a": one, "b": one * math.nan} if part == 3 else [*whole[part][:-1], math.nan]
    monkeypatch.setattr(interruptions, "_values", {"whole": whole, "bad": bad}.get)
    assert max(worst_error("whole", "whole")) == 0 and max(worst_error("bad", "whole")) == math.inf


def test_a_record_keeps_no_number_as_null(tmp_path, monkeypatch):
    lines = [{"event": "step", "iteration": 1, "loss": None, "grad_norm": 1.0}]
    monkeypatch.setattr(interruptions, "records", lambda _, event: lines if event == "step" else [])
    monkeypatch.setattr(interruptions.checkpoint, "find", lambda _: [tmp_path])
    monkeypatch.setattr(interruptions.checkpoint, "read", lambda *_: {})
    losses, norms, scores, _ = interruptions._values(tmp_path)
    assert math.isnan(losses[0]) and norms == [1.0] and scores == []


def test_what_runs_recorded_is_compared_to_the_last_digit(monkeypatch):
    whole = [1.0, 2.0], [1.0], [1.0, 3.0], {"a": torch.ones(3)}
    monkeypatch.setattr(interruptions, "_values", {"whole": whole, "other": ([1.0, 2.0 + 1e-12], *whole[1:])}.get)
    assert worst_error("other", "whole") == (pytest.approx(5e-13, rel=1e-3, abs=0), 0)


def deaf() -> None:
    """Do not hear that the checkpoint of iteration 8 is written: rank 0 is the one that knows."""
    original, calls = checkpoint._share, []

    def share(*args: object) -> object:
        calls.append(None)
        if len(calls) == 6:  # two in each save
            raise RuntimeError("no answer")
        return original(*args)

    checkpoint._share = share


@pytest.mark.parametrize("name", ["late", "deaf"])
@pytest.mark.nightly
def test_saves_go_on_after_one_in_which_the_ranks_lost_each_other(whole, name):
    folder, runs = whole
    fault = InSave(partial(late, folder / "late.log"), rank=-1) if name == "late" else deaf
    lost = Fault((fault, At(KILL, 0, 13)), {-9, 1}, 12, LOST)
    path, _ = disturbed(GRIDS["dp 2"], lost, folder, name, "--comm_timeout=8s")
    check_equal(path, runs("dp 2"))


def die_validated() -> None:
    """Be killed when a validation is recorded, and its checkpoint not yet written."""
    Saving.after_epoch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_validation_that_is_done_twice_is_on_the_board_once(whole):
    folder, runs = whole
    argv, log = tiny_flags(folder, *FLAGS, "--run_num", "twice", "--resume=auto"), folder / "log"
    stop = InValidation(Send(signal.SIGTERM))  # twice at the same place: the same checkpoint
    for code, *fault in ((75, stop), (75, stop), (-9, die_validated), (0,)):
        assert Ranks(Grid(1), argv, log, tuple(fault)).wait() == [code], log.read_text()
    check_equal(run_folder(argv), runs("1 process"))


@pytest.mark.parametrize(
    "grid", [Grid(1, 4, 1, ("--no_sequence_parallel",)), Grid(1, 2, 2, ("--parallel_order=dp-cp-tp",))]
)
@pytest.mark.nightly
def test_a_run_goes_on_on_another_grid_and_back(tmp_path, grid):
    folder = write_data(tmp_path)
    serial = undisturbed(Grid(1), folder, "serial", "--dropout=0", dtype=torch.float64)
    assert max(worst_error(moved(grid, folder, "moved", "--dropout=0", dtype=torch.float64), serial)) < 1e-12
