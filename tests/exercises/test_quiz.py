"""The quiz: it asks first, finds out, and keeps both."""

import io
import json
import subprocess
import sys

import pytest

from benchmarks.harness.command import errors_in_one_line
from exercises import quiz
from tests.helpers import ROOT, clean_environment

pytestmark = pytest.mark.slow


def answered(*arguments, **how):
    command = [sys.executable, "exercises/quiz.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, **how)


@pytest.mark.nightly
def test_memory_is_predicted_and_computed(tmp_path):
    """On tp 2 a rank needs more than half of one rank's memory; what was typed wrong is asked for again."""
    record = tmp_path / "new" / "quiz.jsonl"
    done = answered("tp2", "--json", str(record), input="half\n0.3\n")
    assert done.returncode == 0, done.stderr
    assert "'half' is no number above 0" in done.stdout and "times too small" in done.stdout
    assert "what each rank holds" in done.stdout
    line = json.loads(record.read_text())
    assert line["question"] == "tp2" and line["predicted"] == 0.3 and 0.5 < line["found"][0] < 0.65


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["tp3"], "there is no question tp3: take some of bf16"), (["tp2", "--answers", "1", "2"], "2 answers for 1"),
        (["tp2", "--answers", "-1"], "is no number above 0"), (["tp2"], "nobody answers: give --answers"),
    ],
)  # fmt: skip
def test_errors_are_one_line(tmp_path, capsys, monkeypatch, arguments, told):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit) as end, errors_in_one_line():
        quiz.main([*arguments, "--json", str(tmp_path / "quiz.jsonl")])
    shown = capsys.readouterr().err
    assert end.value.code == 2 and told in shown and shown.count("\n") == 1, shown
    assert not (tmp_path / "quiz.jsonl").exists()


@pytest.mark.parametrize(
    "said, found, told",
    [
        (1.5, [1.3, 1.4, 1.6], "right"), (1.5, [1.45, 1.46, 1.47], "right"), (3.0, [1.5], "2.0 times too large"),
        (0.5, [0.9, 1.0, 1.1], "2.0 times too small"),
    ],
)  # fmt: skip
def test_a_prediction_is_judged_by_what_was_found(said, found, told):
    assert told in quiz.verdict(said, found)


def test_speeds_are_ratios_within_a_round(monkeypatch):
    """Each round runs the plain training and the other one; more ranks have as many times the batch."""
    ran = []

    def run(rung, flags, iterations, samples, folder, limit):
        ran.append(rung)
        return {"samples_per_sec": 10.0 * len(ran)}

    monkeypatch.setattr(quiz, "run", run)
    monkeypatch.setattr(quiz, "training_samples", lambda: 100)
    assert quiz.speeds(("--amp_mode=bf16",), ranks=2) == [2.0, 4 / 3, 6 / 5]
    assert [rung.ranks for rung in ran] == 3 * [1, 2] and ran[1].batch == 2 * ran[0].batch
    assert "--amp_mode=bf16" == ran[1].flags[-1]
    monkeypatch.setattr(quiz, "run", lambda *_: {"skipped": "no GPU here"})
    with pytest.raises(ValueError, match="does not run here: no GPU here"):
        quiz.speeds(())
