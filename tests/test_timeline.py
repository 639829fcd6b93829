"""Where the time goes: each moment belongs to one part, and the parts add up to the whole."""

import csv
import re

import pytest
import torch

from tests.helpers import ROOT, losses, records, run_folder, run_here, run_ranks, tiny_flags
from utils import performance, timeline
from utils.timeline import Timeline, span


@pytest.fixture
def clock(monkeypatch):
    """A timeline on a clock that each look moves on by one second."""
    seconds = iter(range(1000))
    monkeypatch.setattr(Timeline, "_now", lambda self: float(next(seconds)))
    found = Timeline(torch.device("cpu"))
    monkeypatch.setattr(timeline, "timeline", found)
    return found


def test_a_part_inside_another_is_not_the_others(clock):
    with span("step 7"):
        with span("data copy in 7"):
            pass
        with span("forward"), span("communication"):
            pass
    assert clock.take() == {"other": 2, "step": 3, "data copy": 1, "forward": 2, "communication": 1}
    assert clock.take() == {"other": 1}


def test_after_the_last_gradient_a_backward_pass_waits_for_other_ranks(clock):
    with span("backward"):
        clock.gradient_is_there()
        clock.gradient_is_there()
        with span("communication"):  # of a mapping, between gradients
            pass
        clock.gradient_is_there()
    assert clock.take() == {"other": 2, "backward": 4, "communication": 2}
    with span("backward"):
        pass
    assert clock.take() == {"other": 2, "backward": 1}


def test_a_validation_is_one_part_but_for_its_records(clock):
    with span("validation"):
        with span("data wait"):
            pass
        with span("checkpoint"):
            pass
    assert clock.take() == {"other": 2, "validation": 4, "checkpoint": 1}


def test_a_span_ends_where_its_block_is_left_by_an_error(clock):
    with pytest.raises(ZeroDivisionError), span("forward"):
        raise ZeroDivisionError
    assert clock.parts == ["other"]


def check_times(folder, epochs):
    events = records(folder, "time")
    assert [event["epoch"] for event in events] == [event["epoch"] for event in records(folder, "epoch")]
    assert len(events) == epochs and sum(event["iterations"] for event in events) == events[-1]["iteration"]
    for event in events:
        assert list(event["seconds"]) == list(performance.PARTS)
        assert sum(event["seconds"].values()) == pytest.approx(event["wall"], rel=0.03)
        assert all(event["longest"][part] >= seconds for part, seconds in event["seconds"].items())
    with (folder / "report/time.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(float(row["seconds"]) for row in rows) == pytest.approx(sum(e["wall"] for e in events), rel=0.03)
    log = (folder / "out.log").read_text()
    shares = re.findall(r"(\d+\.\d)%.*\n", log[log.rindex("Time of ") :])
    assert len(shares) == len(performance.PARTS) + 1 and abs(float(shares[-1]) - 100) < 3
    return events


def test_the_times_of_a_run_add_up(tiny):
    plain = run_here(tiny_flags(tiny, "--run_num", "plain", "--num_iters", "6"))
    folder = run_here(tiny_flags(tiny, "--report", "--num_iters", "6"))
    assert losses(folder) == losses(plain) and not records(plain, "time") and not (plain / "report").exists()
    events = check_times(folder, epochs=3)
    for part in ("data wait", "forward", "backward", "optimizer", "validation", "checkpoint", "logging"):
        assert all(event["seconds"][part] > 0 for event in events), part
    assert timeline.timeline is None


def test_the_times_of_a_run_that_goes_on(tiny):
    argv = tiny_flags(tiny, "--report", "--num_iters", "6")
    folder = run_here(argv)
    run_here([*argv, "--resume", str(folder / "checkpoints/00000004-validated")])
    assert len(records(folder, "resume")) == 1
    check_times(folder, epochs=3)


@pytest.mark.parametrize(
    "script, flags, name",
    [("train.py", [], "2GPU"), ("train_mp.py", ["--tensor_parallel=2"], "2MP")],
)
def test_ranks_wait_for_each_other(tiny, script, flags, name):
    argv = tiny_flags(tiny, "--report", "--num_iters", "6", *flags)
    for done in run_ranks(2, [str(ROOT / script), *argv]):
        assert done.returncode == 0, done.stderr
    for event in check_times(run_folder(argv, name), epochs=3):
        assert event["seconds"]["communication"] > 0.01 * event["seconds"]["forward"]
        assert event["longest_rank"]["logging"] == 0
