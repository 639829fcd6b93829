"""The exercises: the solution is right, the empty form is not, and usual mistakes get their hint."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

FOLDER = ROOT / "docs/exercises"


def check(path):
    command = [sys.executable, str(FOLDER / "check.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=580)


@pytest.mark.slow
def test_the_solution_is_right():
    done = check(FOLDER / "tensor_parallel_mlp_solution.py")
    assert done.returncode == 0 and done.stdout.count("  right: ") == 10 and "all right" in done.stdout, (
        done.stdout + done.stderr
    )


def test_the_empty_form_says_where_to_begin():
    done = check(FOLDER / "tensor_parallel_mlp.py")
    assert done.returncode == 1 and "not yet: TODO 1" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "right, wrong, hint",
    [
        ("dist.all_reduce(x)", "pass", "y is a part of a sum"),
        ("        return Reduce.apply(", "        x = Reduce.apply(", "forward returns nothing"),
        ("dist.all_reduce(grad)", "pass", "lacks what the other ranks' hidden units give"),
        (
            "        return grad\n\n\nclass ParallelMLP",
            "        return 2 * grad\n\n\nclass ParallelMLP",
            "the gradient of x is 2 times too large",
        ),
        ("self.fc2_weight)) + self.fc2_bias", "self.fc2_weight, self.fc2_bias))", "fc2's bias 2 times"),
        ("fc2.weight.chunk(size, dim=1)", "fc2.weight.chunk(size, dim=0)", "B is cut along its inputs"),
    ],
)
def test_a_mistake_gets_its_hint(tmp_path, right, wrong, hint):
    text = (FOLDER / "tensor_parallel_mlp_solution.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace(right, wrong))
    done = check(tmp_path / "mine.py")
    assert text.count(right) == 1 and done.returncode == 1 and hint in done.stdout, done.stdout + done.stderr
