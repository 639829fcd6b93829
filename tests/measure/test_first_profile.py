"""What the profiler would say about itself is kept from the terminal, and nothing else is."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT, tiny_flags
from utils.measure.first_profile import without_lines


@pytest.mark.slow
def test_a_profiled_run_says_nothing_of_the_profiler(tiny):
    flags = ["--profile", "torch", "--profile_steps", "0", "1", "1", "--report", "--num_iters", "4"]
    command = [sys.executable, "train.py", *tiny_flags(tiny, *flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    others = [line for line in done.stderr.splitlines() if "INFO" not in line]
    assert others == []


def test_other_lines_come_after_the_block_in_order(capfd):
    with pytest.raises(ValueError), without_lines(b"old block"):
        os.write(2, b"one\nan old block of memory\ntwo\nno end")
        assert capfd.readouterr().err == ""
        raise ValueError
    os.write(2, b" of line\n")
    assert capfd.readouterr().err == "one\ntwo\nno end of line\n"
