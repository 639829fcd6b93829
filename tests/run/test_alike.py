"""All ranks see the same data and the same configuration, or none trains."""

import os
import shutil

import numpy as np
import pytest

import evaluate
import train
from tests.forecast.evaluations import flags
from tests.helpers import losses, run_folder, run_ranks, tiny_flags
from utils.forecast.settings import load_evaluation


def second_has(more: list[str], argv: list[str]) -> None:
    """Be a rank that trains; the second one is told more."""
    train.start(train.main, [*argv, *(more if os.environ["RANK"] == "1" else [])], train.load_config)


def second_evaluates(more: list[str], argv: list[str]) -> None:
    argv = [*argv, *(more if os.environ["RANK"] == "1" else [])]
    train.start(evaluate.main, argv, lambda argv: load_evaluation(argv)[1:])


@pytest.fixture
def other(tiny):
    """A copy of the data, as a node has one on its own disk."""
    return shutil.copytree(tiny, tiny.parent / f"{tiny.name}-copy")


def cut(other, kind):
    sorted((other / kind).glob("*.h5"))[-1].unlink()
    return other / kind


def changed(other, name):
    """Return a file of statistics of other numbers."""
    path = other / f"stats/{name}.npy"
    np.save(path, np.load(path) + 1)
    return path


CASES = [
    ("training files", lambda other: ["--train_data_path", cut(other, "train")]),
    ("validation files", lambda other: ["--valid_data_path", cut(other, "train")]),
    ("statistics", lambda other: ["--global_means_path", changed(other, "global_means")]),
    ("statistics", lambda other: ["--time_means_path", changed(other, "time_means")]),
    ("configuration", lambda other: ["--lr", "2e-3"]),
]


@pytest.mark.parametrize("what, more", CASES)
def test_a_rank_that_sees_something_else(tiny, other, what, more):
    done = run_ranks(2, second_has, [*map(str, more(other))], tiny_flags(tiny), timeout=90)
    assert [one.returncode for one in done] == [2, 2]
    (line,) = done[0].stderr.splitlines()
    assert f": error: rank 1: it has other {what} than rank 0: give all ranks the same" in line
    assert not (tiny / "runs").exists()


def test_a_run_to_go_on_with_is_left_as_it_is(tiny, other):
    """It would take the one rank for one that cannot read the checkpoint, and go on from an older one."""
    argv = tiny_flags(tiny, "--checkpoint_every", "1", "--keep_checkpoints", "9", "--expdir", str(tiny / "runs"))
    run_ranks(2, second_has, [], argv)
    folder = run_folder(argv, "2GPU")
    shutil.rmtree(folder / "checkpoints/00000004-validated")
    before = sorted(folder.rglob("*"))
    argv = [*argv, "--resume", "auto"]
    done = run_ranks(2, second_has, ["--train_data_path", str(cut(other, "train"))], argv)
    assert [one.returncode for one in done] == [2, 2] and sorted(folder.rglob("*")) == before
    done = run_ranks(2, second_has, ["--train_data_path", str(shutil.copytree(tiny / "train", other / "whole"))], argv)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr  # a copy that is whole
    assert len(losses(folder)) == 4


@pytest.mark.parametrize("what", ["times to start from", "checkpoints"])
def test_ranks_that_would_make_other_forecasts(trained, tmp_path, what):
    """The second lacks a file, or has found an older checkpoint."""
    shutil.copytree(trained / "valid", tmp_path / "valid")
    older = sorted((trained / "runs/tiny/1GPU/00/checkpoints").iterdir())[0]
    more = ["--checkpoint", str(older)] if what == "checkpoints" else ["--inf_data_path", str(cut(tmp_path, "valid"))]
    done = run_ranks(2, second_evaluates, more, flags(trained, "--out", str(tmp_path / "out")))
    assert [one.returncode for one in done] == [2, 2]
    assert f"rank 1: it has other {what} than rank 0" in done[0].stderr
