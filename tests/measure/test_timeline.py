"""Where the time goes: each moment belongs to one part, and the parts add up to the whole."""

import csv
import functools
import importlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from distributed import mappings
from tests.helpers import ROOT, clean_environment, losses, records, run_folder, run_here, run_ranks, tiny_flags
from utils import spans
from utils.errors import Ended
from utils.measure import time_table as time_report
from utils.ranks.start import start
from utils.spans import Timeline, span


@pytest.fixture
def clock(monkeypatch):
    """A timeline on a clock that each look moves on by one second."""
    seconds = iter(range(1000))
    monkeypatch.setattr(Timeline, "_now", lambda self: float(next(seconds)))
    found = Timeline(torch.device("cpu"))
    monkeypatch.setattr(spans, "timeline", found)
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


def test_a_span_ends_where_its_block_is_left_by_an_error(clock, monkeypatch):
    with pytest.raises(ZeroDivisionError), span("forward"):
        monkeypatch.setattr(Timeline, "_now", None)  # a device that failed is not asked
        raise ZeroDivisionError
    assert clock.parts == ["other"]


def test_ranges_of_nsight_systems_have_the_same_names(monkeypatch):
    """Each is closed, also where its block is left by an error. Where nobody looks, nothing is done."""
    told = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    assert span("step 3") is span("step 4")
    monkeypatch.setattr(spans, "nsight", True)
    with pytest.raises(ZeroDivisionError), span("step 3"):
        with span("data copy in 3"):
            pass
        with span("forward"):
            raise ZeroDivisionError
    assert told == ["step 3", "data copy in 3", "end", "forward", "end", "end"]


def test_a_tool_that_takes_names_harms_no_build_without_them():
    code = "from utils import spans\nwith spans.span('x'): print(spans.nsight, end='')"
    env = clean_environment(NSYS_PROFILING_SESSION_ID="1")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == str(bool(torch.version.cuda or torch.version.hip)), done.stderr


def test_a_record_knows_the_slowest_rank(clock, monkeypatch):
    """Rank 1 took longer to go forward, rank 0 to go back."""

    def gather(ranks, mine):
        ranks[:] = [{"forward": 1.0, "backward": 3.0, "wall": 5.0}, {"forward": 2.0, "backward": 1.0, "wall": 5.0}]

    monkeypatch.setattr(time_report.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(time_report.dist, "all_gather_object", gather)
    told = []
    report = time_report.TimeReport(torch.nn.Identity(), torch.device("cpu"), 0, told.append)
    report.record(1, 4)
    (record,) = told
    assert [record["longest_rank"][part] for part in ("forward", "backward")] == [1, 0]
    assert [record["longest"][part] for part in ("forward", "backward")] == [2, 3] and record["seconds"][
        "forward"
    ] == 1.5
    assert report.by_rank()["forward"] == [1, 2]


def check_times(folder, epochs):
    """The times of a run that was to the end have these epochs, and add up."""
    events = records(folder, "time")
    assert [event["epoch"] for event in events] == epochs
    assert sum(event["iterations"] for event in events) == events[-1]["iteration"] == len(losses(folder))
    for event in events:
        assert list(event["seconds"]) == list(time_report.PARTS)
        # The clock of all and those of the parts are read one after the other, on each rank.
        assert sum(event["seconds"].values()) == pytest.approx(event["wall"], abs=0.01 + 0.03 * event["wall"])
        assert all(event["longest"][part] >= seconds for part, seconds in event["seconds"].items())
    with (folder / "report/time.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["seconds"]) for row in rows] == [x for event in events for x in event["seconds"].values()]
    log = (folder / "out.log").read_text()
    shares = re.findall(r"(\d+\.\d)%.*\n", log[log.rindex("Time of ") :])
    assert len(shares) == len(time_report.PARTS) + 1 and abs(float(shares[-1]) - 100) < 3
    return events


def test_the_times_of_a_run_add_up(tiny):
    plain = run_here(tiny_flags(tiny, "--run_num", "plain", "--num_iters", "6"))
    folder = run_here(tiny_flags(tiny, "--report", "--num_iters", "6"))
    assert losses(folder) == losses(plain) and not records(plain, "time") and not (plain / "report").exists()
    events = check_times(folder, epochs=[1, 2, 3])
    for part in ("data wait", "forward", "backward", "optimizer", "validation", "checkpoint", "logging"):
        assert all(event["seconds"][part] > 0 for event in events), part
    assert spans.timeline is None


def test_the_times_of_a_run_that_goes_on(tiny):
    """What was done of an epoch until it was interrupted counts, too."""
    argv = tiny_flags(tiny, "--report", "--num_iters", "6", "--checkpoint_every", "3")
    folder = run_here(argv)
    run_here([*argv, "--resume", str(folder / "checkpoints/00000004-validated")])
    assert len(records(folder, "resume")) == 1
    check_times(folder, epochs=[1, 2, 3])
    argv = tiny_flags(tiny, "--report", "--num_iters", "10", "--global_batch_size", "4", "--run_num", "slow")
    with pytest.raises(Ended):
        run_here([*argv, "--time_limit", "0.5s"], main=slowly)
    (stopped,) = records(folder.with_name("slow"), "time")
    assert stopped["epoch"] == 1 and stopped["iterations"] == stopped["iteration"] == 2 and stopped["wall"] > 1.2
    run_here([*argv, "--resume", "auto"])
    check_times(folder.with_name("slow"), epochs=[1, 1, 2])


def slowly(world, argv):
    """train.main with steps of 0.6 s."""
    original = train.forward_backward

    def slow(*args, **kwargs):
        time.sleep(0.6)
        return original(*args, **kwargs)

    with mock.patch.object(train, "forward_backward", slow):
        train.main(world, argv)


def count_collectives(script, argv):
    """Run a script, and print as JSON in which part of the timeline each collective began that its thread waits for.

    (Of those that PyTorch's functions start; DDP has its own.) And how many gradients the timeline was told of.
    """
    parts = Counter()

    def counted(collective):
        @functools.wraps(collective)
        def call(*args, **kwargs):
            if spans.timeline is not None and not kwargs.get("async_op"):
                parts[spans.timeline.parts[-1]] += 1
            return collective(*args, **kwargs)

        return call

    for owner, names in (
        (dist, ("all_reduce", "all_to_all_single")),
        (mappings, ("all_gather_single", "reduce_scatter_single")),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))
    told = Timeline.gradient_is_there
    with mock.patch.object(Timeline, "gradient_is_there", autospec=True, side_effect=told) as gradients:
        start(importlib.import_module(script.removesuffix(".py")).main, argv)
    print(json.dumps({"parts": parts, "gradients": gradients.call_count}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, flags, name, gradients",  # of 30 parameters in 6 steps; DDP settles its buckets with one pass more
    [
        ("train.py", ["--accumulation_steps=2"], "2GPU", 30 * (2 * 6 + 1)),
        ("train_mp.py", ["--tensor_parallel=2"], "2MP", 30 * 6),
        ("train_mp.py", ["--context_parallel=2", "--cp_attention=ulysses", "--amp_mode=bf16"], "2MP", 30 * (6 + 1)),
    ],
)
def test_all_that_a_step_sends_is_communication(tiny, script, flags, name, gradients):
    argv = tiny_flags(tiny, "--num_iters", "6", *flags)
    folders = []
    for run_num, more in (("plain", []), ("report", ["--report"])):
        results = run_ranks(2, count_collectives, script, [*argv, "--run_num", run_num, *more])
        assert [done.returncode for done in results] == [0, 0], results[0].stderr
        folders.append(run_folder([*argv, "--run_num", run_num], name))
    for done in results:
        seen = json.loads(done.stdout.splitlines()[-1])
        assert set(seen["parts"]) <= {"communication", "validation", "setup"} and seen["parts"]["validation"] > 0
        assert (
            script == "train.py" or seen["parts"]["communication"] > 5 * 2 * 4
        )  # steps but the first, blocks, in each
        assert seen["gradients"] == gradients
    plain, report = folders
    assert losses(report) == losses(plain)
    for event in check_times(report, epochs=[1, 2, 3]):
        assert event["longest_rank"].keys() == event["seconds"].keys() and event["seconds"]["communication"] > 0
