"""What the soak takes for a documented end of a run's processes."""

import pytest

from tests.proofs.soak import check_end

GONE = "train.py: error: rank 1: rank 0 is gone, and this one ends too; it was at train.py:1: step()"


@pytest.mark.parametrize(
    "what, codes, told",
    [
        ("", [0, 0], ""), ("STOP, CONT one", [0, 0], ""), ("TERM", [75, 75], ""), ("TERM", [-15, -15], ""),
        ("KILL in a save", [-9, 1], GONE), ("USR1, KILL", [-10, -9], ""), ("full disk", [74, 74], ""),
        ("INT", [1], "Traceback"),
    ],
)  # fmt: skip
def test_documented_ends(what, codes, told):
    check_end(what, codes, told)


@pytest.mark.parametrize(
    "what, codes, told",
    [
        ("", [0, 75], ""), ("STOP, CONT", [75], ""), ("TERM", [2], ""), ("TERM", [-9], ""), ("full disk", [1], GONE),
        ("KILL one", [-9, 1], ""), ("KILL one", [-9, 1], f"Traceback\n{GONE}"),
    ],
)  # fmt: skip
def test_other_ends(what, codes, told):
    with pytest.raises(AssertionError):
        check_end(what, codes, told)
