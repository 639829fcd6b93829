"""A storage that fails for a while: some of the cases that failing_storage.py tries."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import run_folder, tiny_flags, write_data
from tests.proofs import failing_storage as proof
from tests.proofs.failing_storage import NEVER, SHOWN, case, command_case, trained

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler (cc)")
CASES = [
    ("data", "EIO", "iterations 7 to 11", "2"),
    ("checkpoints", "ENOSPC", "now and then", "74"),
    ("records", "ESTALE", "iterations 7 to 11", "0"),
    ("pictures", "ENOSPC", "iterations 7 to 11", "0"),
    ("all of the run's folder", "EIO", "iterations 7 to 11", "0"),
    ("a run to go on with", "ESTALE", "iterations 7 to 11", "2"),
    ("staged files", "EROFS", "now and then", "2"),
]
OTHERS = [
    ("evaluate.py", "model", "EIO"),
    ("forecast.py", "data", "ESTALE"),
    ("prepare_data", "what it writes", "EROFS"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A folder with data, the library, and a run whose storage works."""
    folder = write_data(tmp_path_factory.mktemp("runs"))
    argv = tiny_flags(folder, *SHOWN, "--run_num", "whole")
    assert trained(argv, folder / "none", NEVER)[0] == [0]
    proof.write_archive(folder / "archive.nc")
    return folder, proof.build(folder), run_folder(argv)


WHEN = {"checkpoints": pytest.mark.slow}  # the others at night


@pytest.mark.parametrize(
    "target, kind, time, code", [pytest.param(*case, marks=WHEN.get(case[0], pytest.mark.nightly)) for case in CASES]
)
def test_a_run_whose_storage_fails_goes_on_as_if_it_had_not(whole, target, kind, time, code):
    assert case(*whole, target, kind, time) == code


@pytest.mark.nightly
@pytest.mark.parametrize("name, target, kind", OTHERS)
def test_other_commands_whose_storage_fails(whole, name, target, kind):
    assert command_case(*whole, name, target, kind) == "2"


def test_each_target_is_tried():
    assert {target for target, *_ in CASES} == proof.TARGETS.keys() and {
        name for name, *_ in OTHERS
    } == proof.COMMANDS.keys()
    rows = [row for row, kind in proof.all_cases() if kind == proof.KINDS[0]]
    assert (
        len(rows) * len(proof.KINDS) == len(proof.all_cases())
        and sum("2 ranks" in row for row in rows) == len(proof.TARGETS) - 1
    )
