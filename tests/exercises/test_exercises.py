"""The exercises: solutions are right, empty forms say where to begin, and what people answer gets its hint."""

import pytest

from exercises import check
from tests.exercises.mistakes import MISTAKES
from tests.helpers import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "exercises"


def checked(path, capsys):
    """Return the exit code of a check, and what it printed."""
    code = check.main([str(path)])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("name", check.EXERCISES)
def test_the_solution_is_right(name, capsys):
    code, told = checked(FOLDER / f"solutions/{name}.py", capsys)
    assert code == 0 and told.count("  right: ") >= 3 and told.endswith("all right\n"), told


@pytest.mark.parametrize("name", check.EXERCISES)
def test_the_empty_form_says_where_to_begin(name, capsys):
    code, told = checked(FOLDER / f"{name}.py", capsys)
    assert code == 1 and "not yet: TODO 1" in told, told


def test_each_has_mistakes():
    assert MISTAKES.keys() == set(check.EXERCISES) and min(map(len, MISTAKES.values())) >= 3


@pytest.mark.parametrize("name, number", [(name, i) for name, found in MISTAKES.items() for i in range(len(found))])
def test_a_mistake_gets_its_hint(tmp_path, name, number, capsys):
    """Each on the least number of ranks: one of them, or two."""
    right, wrong, hint = MISTAKES[name][number]
    size = min(getattr(check.checks_of(name), "SIZES", (1,)))
    path = solution_with(tmp_path, name, {right: wrong.replace("{size}", str(size))})
    code, told = checked(path, capsys)
    assert code == 1 and hint.replace("{size}", str(size)) in told, f"{wrong}\n{told}"


def test_another_solution_is_right(tmp_path, capsys):
    """Lists of tensors in place of one that is joined: as many messages."""
    changes = {
        "    whole = x.new_empty(size * x.shape[0], *x.shape[1:])\n": "    parts = list(x.new_empty(size, *x.shape))\n",
        "    dist.all_gather_into_tensor(whole, x.contiguous())\n": "    dist.all_gather(parts, x.contiguous())\n",
        "    return whole\n": "    return torch.cat(parts)\n",
        "_tensor(own, grad.contiguous())": "(own, [*grad.contiguous().chunk(ctx.size)])",
    }
    code, told = checked(solution_with(tmp_path, "collective_gradients", changes), capsys)
    assert code == 0, told


def test_a_path_through_another_folder(tmp_path, capsys):
    """The lines of a file are known by its path."""
    right, wrong, hint = MISTAKES["safe_checkpoint"][1]
    (tmp_path / "other").mkdir()
    path = solution_with(tmp_path, "safe_checkpoint", {right: wrong})
    code, told = checked(path.parent / "other" / ".." / path.name, capsys)
    assert code == 1 and hint in told, told


@pytest.mark.parametrize("name", check.EXERCISES)
def test_each_tells_its_own_command(name):
    form, solution = ((FOLDER / where / f"{name}.py").read_text() for where in ("", "solutions"))
    assert f"\n    python exercises/check.py exercises/{name}.py\n" in form
    assert f"python exercises/check.py exercises/solutions/{name}.py\n" in solution


@pytest.mark.parametrize("body, told", [("raise NotImplementedError", "not filled in yet"), ("exit()", "SystemExit")])
def test_what_ends_without_a_word_is_not_right(tmp_path, capsys, body, told):
    (tmp_path / "mine.py").write_text(f"class Prefetcher:\n    def __init__(self, *_):\n        {body}\n")
    code, said = checked(tmp_path / "mine.py", capsys)
    assert code == 1 and told in said, said


def solution_with(tmp_path, name, changes):
    """The file of a solution in which something stands instead of something else."""
    text = (FOLDER / f"solutions/{name}.py").read_text()
    for right, wrong in changes.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def test_ranks_that_wait_for_each_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "CHECKING", 4)
    monkeypatch.setattr(check, "QUIET", 1)
    changes = {"dist.all_reduce(x)": "dist.all_reduce(x) if dist.get_rank() else dist.recv(x, 1)"}
    code, told = checked(solution_with(tmp_path, "collective_gradients", changes), capsys)
    assert code == 1 and "nothing for 1 s; it ends after 4" in told and "the ranks wait for each other" in told, told


def test_what_is_right_is_said_before_what_is_not(tmp_path, capsys):
    """Also where another rank comes first to the place that is empty."""
    changes = {
        "        return grad\n": "        __import__('time').sleep(dist.get_rank() == 0)\n        return grad\n",
        "        ctx.size = size\n": "        raise NotImplementedError('TODO 3')\n",
    }
    code, told = checked(solution_with(tmp_path, "collective_gradients", changes), capsys)
    assert code == 1 and told.count("  right: Reduce: ") == 3 and "not yet: TODO 3" in told, told


def test_each_has_hints_and_minutes(capsys):
    assert check.main([]) == 0
    told = capsys.readouterr().out
    for name in check.EXERCISES:
        assert f"exercises/{name}.py" in told and len(check.hints_of(name)) >= 3
        assert 10 <= check.checks_of(name).MINUTES <= 60
    assert check.main([str(FOLDER / "late_rank.py"), "--hint", "2"]) == 0
    told = capsys.readouterr().out
    assert "1 of 5" in told and "2 of 5" in told and "3 of 5" not in told


@pytest.mark.parametrize(
    "text, told",
    [
        ("x = 1\n", "has none of Prefetcher, "), ("def attend(:\n", "is not Python yet: line 1"),
        (None, "cannot read"), ("\0", "is not Python"),
    ],
)  # fmt: skip
def test_nothing_to_check(tmp_path, capsys, text, told):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    code, shown = checked(path, capsys)
    assert code == 2 and told in shown and shown.count("\n") == 1, shown
