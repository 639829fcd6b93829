"""The exercises: the solution is right, the empty form is not, and usual mistakes get their hint."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

FOLDER = ROOT / "docs/exercises"


RIGHT = {
    "tensor_parallel_mlp": 10,  # what is right, on 2 and on 4 ranks
    "owned_adam": 8,
}


def check(path):
    command = [sys.executable, str(FOLDER / "check.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=580)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_the_solution_is_right(name):
    done = check(FOLDER / f"{name}_solution.py")
    told = done.stdout + done.stderr
    assert done.returncode == 0 and done.stdout.count("  right: ") == RIGHT[name] and "all right" in done.stdout, told


@pytest.mark.parametrize("name", RIGHT)
def test_the_empty_form_says_where_to_begin(name):
    done = check(FOLDER / f"{name}.py")
    assert done.returncode == 1 and "not yet: TODO 1" in done.stdout, done.stdout + done.stderr


MLP, ADAM = RIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, right, wrong, hint",
    [
        (MLP, "dist.all_reduce(x)", "pass", "y is a part of a sum"),
        (MLP, "        return Reduce.apply(", "        x = Reduce.apply(", "forward returns nothing"),
        (MLP, "dist.all_reduce(grad)", "pass", "lacks what the other ranks' hidden units give"),
        (
            MLP,
            "        return grad\n\n\nclass ParallelMLP",
            "        return 2 * grad\n\n\nclass ParallelMLP",
            "the gradient of x is 2 times too large",
        ),
        (MLP, "self.fc2_weight)) + self.fc2_bias", "self.fc2_weight, self.fc2_bias))", "fc2's bias 2 times"),
        (MLP, "fc2.weight.chunk(size, dim=1)", "fc2.weight.chunk(size, dim=0)", "B is cut along its inputs"),
        (ADAM, ", op=dist.ReduceOp.AVG", "", "the gradient is 2 times the mean: a sum"),
        (ADAM, "        self.own.grad = mean\n", "", "self.own has no gradient"),
        (ADAM, "            p.data.copy_(x.view_as(p))", "            pass", "what the owners computed must come back"),
        (ADAM, "row.chunk(self.size)[self.rank].clone()", "row.clone()", "owns 36 numbers of 35, and 18 are its part"),
        (
            ADAM,
            "chunk(self.size)[self.rank]",
            "chunk(self.size)[self.rank - 1]",
            "is not its stretch of the row",
        ),
        (
            ADAM,
            "        self.own.grad = mean\n",
            "        self.own.grad = mean\n        dist.all_reduce(torch.ones(1))\n",
            "one reduce-scatter and one all-gather are enough",
        ),
    ],
)
def test_a_mistake_gets_its_hint(tmp_path, name, right, wrong, hint):
    text = (FOLDER / f"{name}_solution.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace(right, wrong))
    done = check(tmp_path / "mine.py")
    assert text.count(right) == 1 and done.returncode == 1 and hint in done.stdout, done.stdout + done.stderr


def test_a_file_of_no_exercise(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    done = check(tmp_path / "mine.py")
    assert done.returncode == 1 and "has neither a ParallelMLP nor an OwnedAdam" in done.stdout, done.stdout
