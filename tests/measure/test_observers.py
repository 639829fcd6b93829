"""What looks at a run never ends it: whatever fails there is a warning."""

import json
import os
import re
import signal
import time
from functools import partial
from unittest import mock

import psutil
import pytest
import torch
from torch.profiler import profile

import train
from tests.helpers import losses, records, run_folder, run_here, run_ranks, tiny_flags, wait_until
from tests.measure.slowed import run_slowed
from utils.errors import Ended
from utils.measure import costs as run_costs
from utils.measure import machine, profiles, step_profile, system_table
from utils.measure.machine import SystemWatch
from utils.measure.step_profile import StepProfiler
from utils.measure.traces import TorchProfile
from utils.observers import Observer
from utils.ranks.stop import StopRequests

FULL = OSError(28, "No space left on device")
TRACED = ["--profile", "torch", "--profile_steps", "1", "0", "1"]


def failing(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    "owner, name, error, flags, warning",
    [
        (StepProfiler, "start", RuntimeError("no profiler"), [], "the profile of a step failed (no profiler)"),
        (step_profile, "read_trace", ValueError("not JSON"), [], "the profile of a step failed (not JSON)"),
        (TorchProfile, "__init__", FULL, TRACED, "--profile torch failed ([Errno 28]"),
        (TorchProfile, "_write", FULL, TRACED, "--profile torch failed ([Errno 28]"),
        (SystemWatch, "__init__", psutil.AccessDenied(), [], "looking at the machine failed"),
        (SystemWatch, "take", psutil.AccessDenied(), [], "looking at the machine failed"),
        (run_costs, "summary_table", KeyError("x"), [], "the report failed"),
        (run_costs.tables, "write_csv", FULL, [], "The tables of the report are not written"),
    ],
)
def test_training_goes_on_without_what_fails(tiny, monkeypatch, owner, name, error, flags, warning):
    plain = run_here(tiny_flags(tiny, "--run_num", "plain"))
    monkeypatch.setattr(owner, name, failing(error))
    folder = run_here(tiny_flags(tiny, "--report", *flags))
    assert losses(folder) == losses(plain)
    log = (folder / "out.log").read_text()
    assert log.count(f"WARNING {warning}") == (2 if name == "take" else 1) and "DONE ---- rank 0" in log
    assert ("Verdict: This run is bound by " in log) == (name != "summary_table")
    monkeypatch.undo()
    again = run_here(tiny_flags(tiny, "--report", "--run_num", "again"))  # nothing is left switched on
    assert "Operators of one step" in (again / "out.log").read_text()


def test_a_rank_whose_profile_fails_holds_up_nobody(tiny):
    argv = tiny_flags(tiny, "--report", "--checkpoint_every", "None")
    results = run_ranks(2, run_slowed, "no profile of rank 0", "train.py", argv)
    assert [done.returncode for done in results] == [0, 0], results[0].stderr
    report = json.loads((run_folder(argv, "2GPU") / "report/report.json").read_text())
    assert "operators" not in report and "verdict" in report


def test_no_rank_steps_before_all_profilers_have_begun(tiny, monkeypatch):
    """Else one whose profiler starts slowly would seem to be the slowest rank."""
    told, start, barrier, step = [], StepProfiler.start, torch.distributed.barrier, train.forward_backward
    monkeypatch.setattr(StepProfiler, "start", lambda self: told.append("start") or start(self))
    monkeypatch.setattr(torch.distributed, "barrier", lambda *args: told.append("barrier") or barrier(*args))
    monkeypatch.setattr(train, "forward_backward", lambda *args, **more: told.append("step") or step(*args, **more))
    run_here(tiny_flags(tiny, "--report"))
    assert told[told.index("start") :][:3] == ["start", "barrier", "step"]


@pytest.mark.parametrize("flags, waits", [(["--report"], 2), ([*TRACED[:3], "1", "1", "2"], 1)])
def test_a_gpu_is_waited_for_around_a_profile_alone(tiny, monkeypatch, flags, waits):
    """Around the report's step; not between the steps of a trace, which shows how they overlap."""
    told = []
    monkeypatch.setattr(profiles, "synchronize", told.append)
    run_here(tiny_flags(tiny, "--num_iters", "6", *flags))
    assert len(told) == waits


def test_a_run_that_stops_in_its_profiled_step(tiny):
    """The clock stops it after the last step of the first epoch, which is the one that is profiled."""
    argv = tiny_flags(tiny, "--report", "--num_iters", "6")
    original, steps = train.forward_backward, []

    def one_step(*args, **kwargs):
        steps.append(1)
        return original(*args, **kwargs)

    with (
        mock.patch.object(train, "forward_backward", one_step),
        mock.patch("utils.ranks.stop.StopRequests.agree", lambda *_: (len(steps) == 2, False)),
        pytest.raises(Ended),
    ):
        run_here(argv)
    assert not torch.autograd._profiler_enabled()
    folder = run_here([*argv, "--resume", "auto"])
    assert [event["epoch"] for event in records(folder, "time")] == [1, 1, 2, 3]
    assert "Operators of one step" in (folder / "out.log").read_text()


@pytest.mark.parametrize("flags", [["--num_iters", "1"], ["--num_iters", "2"], ["--global_batch_size", "21"]])
def test_short_runs(tiny, flags):
    """A single iteration, a single epoch, epochs of one iteration: what is not known is not told."""
    folder = run_here(tiny_flags(tiny, "--report", *flags))
    report = json.loads((folder / "report/report.json").read_text())
    steps = len(losses(folder))
    assert ("operators" in report) == (steps > 1)
    assert report["verdict"].startswith("This run is bound by " if steps > 1 else "No step but the first")
    setup = [row["seconds"] for row in report["time"] if row["part"] == "setup"]
    forward = [row["seconds"] for row in report["time"] if row["part"] == "forward"]
    assert setup[0] > 0 and not any(setup[1:]) and (sum(forward) > 0) == (steps > 1)
    assert sum(row["iterations"] for row in report["time"] if row["part"] == "setup") == steps


class Told(Observer):
    """Told to stop between an epoch and its validation, which has several batches."""

    def after_training(self, record):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_only_validates(tiny):
    """Nothing of this process is training."""
    argv = tiny_flags(tiny, "--report", "--num_iters", "10", "--global_batch_size", "2")
    with pytest.raises(Ended):
        run_here(argv, partial(train.main, observers=[Told()]))
    folder = run_here([*argv, "--resume", "auto"])
    assert "DONE ---- rank 0" in (folder / "out.log").read_text()
    assert records(folder, "resume")[0]["iteration"] == 10 and records(folder, "time")[-1]["iterations"] == 0


def test_the_time_of_profiles_is_no_training(tiny, monkeypatch):
    """An epoch's speed does not tell of it."""
    monkeypatch.setattr(StepProfiler, "stop", lambda self: time.sleep(1))
    folder = run_here(tiny_flags(tiny, "--report", "--num_iters", "6"))
    epochs, parts = records(folder, "epoch"), [event["seconds"] for event in records(folder, "time")]
    for epoch, seconds in zip(epochs, parts, strict=True):
        assert 16 / epoch["samples_per_sec"] + seconds["profiling"] <= sum(seconds.values())
    assert max(seconds["profiling"] for seconds in parts) >= 1


def test_a_figure_that_cannot_be_known_is_left_out(monkeypatch):
    asked = []

    def power(device):
        asked.append(device)
        raise RuntimeError("NVML: not supported")

    monkeypatch.setattr(machine, "GPU", {"gpu_use": lambda device: 0.5, "gpu_watts": power})
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: {"lo": None})
    monkeypatch.setattr(machine, "INTERVAL", 0.01)
    watch = SystemWatch(torch.device("cuda"))
    wait_until(lambda: len(watch.samples["gpu_use"]) > 2)
    found = watch.take()
    watch.close()
    assert found["gpu_use"] == 0.5 and len(asked) == 1 and not {"joules", "sent_gb"} & set(found)


def test_an_epoch_shorter_than_a_look_has_the_one_before(monkeypatch):
    monkeypatch.setattr(machine, "GPU", {"gpu_use": lambda device: 0.5, "gpu_watts": lambda device: 100.0})
    watch = SystemWatch(torch.device("cuda"))
    wait_until(lambda: "gpu_watts" in watch.newest)
    found = [watch.take() for _ in range(3)]
    watch.close()
    assert all(one["gpu_use"] == 0.5 and one["joules"] == 100 * one["seconds"] for one in found)
    monkeypatch.setattr(machine, "INTERVAL", 0.01)
    time.sleep(0.1)
    assert "gpu_use" not in watch.take()  # a driver that has stopped to answer


def test_energy(tiny, monkeypatch):
    """Watts over time are joules, and those of all ranks go over the samples."""
    monkeypatch.setattr(machine, "GPU", {"gpu_watts": lambda device: 200.0})
    monkeypatch.setattr(machine, "INTERVAL", 0.01)
    watch = SystemWatch(torch.device("cuda"))
    wait_until(lambda: "gpu_watts" in watch.newest)
    found = watch.take()
    watch.close()
    assert found["joules"] == pytest.approx(200 * found["seconds"])
    monkeypatch.setattr(SystemWatch, "take", lambda self: {"joules": 80.0})
    folder = run_here(tiny_flags(tiny, "--report"))
    assert [event["joules_per_sample"] for event in records(folder, "system")] == [5.0, 5.0]  # 2 steps of 8


def test_readers_that_end_and_begin(monkeypatch):
    """A process counts with what it did since the last look; one that ends takes nothing away."""
    watch = SystemWatch(torch.device("cpu"))
    watch.close()
    looks = iter(
        [
            {("cpu_seconds", 1): 9.0},
            {("cpu_seconds", 1): 10.0, ("cpu_seconds", 2): 50.0, ("sent_gb", 0): 7.0},
            {("cpu_seconds", 1): 12.0, ("cpu_seconds", 3): 1.0, ("sent_gb", 0): 9.0},
        ]
    )
    monkeypatch.setattr(watch, "_counters", lambda: next(looks))
    watch.take()
    assert watch.take()["sent_gb"] == 0  # it was not known before, and is the node's of many days
    found = watch.take()
    assert found["cores"] * found["seconds"] == pytest.approx(3) and found["sent_gb"] == 2


def test_what_ranks_tell_together():
    """Each figure in its way; what one of the GPUs does not tell is not there."""
    told = [
        {"cores": 2.0, "memory_gb": 1.0, "sent_gb": 5.0, "gpu_use": 0.5, "joules": 30.0},
        {"cores": 1.0, "memory_gb": 3.0, "sent_gb": 5.0, "gpu_use": 0.7},
        {"cores": 1.0, "memory_gb": 2.0, "sent_gb": 4.0, "gpu_use": 0.6, "joules": 30.0},
    ]
    assert system_table.together(told, ["a", "a", "b"]) == {
        "cores": 4.0, "memory_gb": 3.0, "sent_gb": 9.0, "gpu_use": pytest.approx(0.6),
    }  # fmt: skip


def test_ranks_and_nodes_have_lines_of_their_own():
    """Means over the epochs; of many ranks the log has those with least and most to do."""
    one = [{"cores": float(i), "memory_gb": 1.0, "gpu_use": i / 10, "disk_free_gb": 9.0 - i} for i in range(4)]
    two = [{name: 2 * x for name, x in rank.items()} for rank in one]
    rows = system_table.rank_rows([one, two], ["a", "a", "b", "b"])
    assert [row["cores"] for row in rows] == [0, 1.5, 3, 4.5] and "joules" not in rows[0]
    nodes = system_table.node_rows(rows)
    assert [(row["node"], row["cores"], row["memory_gb"], row["disk_free_gb"]) for row in nodes] == [
        ("a", 1.5, 3.0, 12.0), ("b", 7.5, 3.0, 9.0),
    ]  # fmt: skip
    text = "\n".join(system_table.lines([], rows, slice(0, None), on_gpu=False))
    assert "Each rank and its GPU, means of an epoch:" in text and "Of 2 nodes, each with its ranks together:" in text
    assert "       3 b                    4.500         1.500         0.450" in text
    many = system_table.rank_rows([one * 8], [f"node{i // 4}" for i in range(32)])
    text = "\n".join(system_table.lines([], many, slice(0, None), on_gpu=False))
    assert "The ranks with least and most gpu_use of 32 (all: system_ranks.csv), means of an epoch:" in text
    assert len(re.findall(r"^ +\d+ node\d", text, re.M)) == 8
    alone = "\n".join(system_table.lines([], rows[:1], slice(0, None), on_gpu=False))
    assert "Each rank" not in alone and "nodes" not in alone


@pytest.mark.parametrize("flags", [["--report"], ["--profile", "torch", "--profile_steps", "1", "1", "2"]])
def test_no_collective_is_under_way_when_a_profiler_stops(tiny, flags):
    """One that it saw begin, and that ends later, writes into memory that the profiler has freed."""
    order, settle, stop = [], StopRequests.settle, profile.stop_trace
    with (
        mock.patch.object(StopRequests, "settle", lambda self: (order.append("settle"), settle(self))),
        mock.patch.object(profile, "stop_trace", lambda self: (order.append("stop"), stop(self))),
    ):
        run_here(tiny_flags(tiny, "--num_iters", "6", *flags))
    assert order == ["stop", "settle", "stop"]  # the first is `use_profiler_once`, before the first step
