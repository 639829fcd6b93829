"""The ladder: its rungs, what is compared with what, what noise is, and that it goes on where it stopped."""

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from benchmarks import ladder, ladder_report
from benchmarks.harness import call as calls
from benchmarks.harness.call import call, end_on_signals, reason
from benchmarks.rungs.rungs import DATA_PARALLEL, all_rungs, chosen, lacks
from benchmarks.rungs.runs import Runs, evaluate, standard_error
from tests.helpers import ROOT, is_running, losses, run_folder, run_here, tiny_flags, wait_until
from utils.ranks import start

RUNGS = all_rungs(4, 8)


def result(speed, losses=(1.0, 0.5)):
    figures = {"memory_gb": 1.0, "mfu": 0.5, "data_wait_frac": 0.1, "first_iteration_sec": 3.0, "iteration_sec": 1.0}
    return {"samples_per_sec": speed, "losses": list(losses), **figures}


def test_each_rung_stands_on_one_above_it():
    keys = [rung.key for rung in RUNGS]
    assert len(set(keys)) == len(keys)
    for i, rung in enumerate(RUNGS):
        assert rung.below is None or rung.below in keys[:i]
    by_key = dict(zip(keys, RUNGS))
    assert by_key["steps: + bf16"].flags == (*by_key["steps: + fused"].flags, "--amp_mode=bf16")
    assert by_key["weak scaling: 4 ranks"].batch == 32 and by_key["strong scaling: 4 ranks"].batch == 8
    assert {rung.table for rung in RUNGS} == set(ladder_report.TITLES)
    assert {rung.key for rung in all_rungs(1, 8) if rung.table not in ("steps", "alone")} == {"weak scaling: 2 ranks"}
    passes = [rung.needs for batch in (1, 8) for rung in all_rungs(1, batch) if rung.name == "two passes"]
    assert passes == ["2 samples", None]
    orders = [[rung.needs for rung in all_rungs(n, 8) if "-dp" in rung.name] for n in (2, 4)]
    assert orders == [["4 ranks"] * 2, [None] * 2]


def test_words_choose_rungs_and_what_they_stand_on(monkeypatch):
    monkeypatch.setattr(ladder.torch.cuda, "device_count", lambda: 0)
    names = [rung.name for rung in chosen(RUNGS, ["fused"]) if rung.table == "steps"]
    assert names == ["baseline", "the same again", "+ prefetch", "+ TF32", "+ fused"]  # TF32 needs a GPU
    with pytest.raises(ValueError, match="no rung is called 'atention'"):
        chosen(RUNGS, ["atention"])


@pytest.fixture
def runs(tmp_path):
    """Of a baseline and of those that stand on it, in three rounds."""
    found = Runs(tmp_path / "runs.jsonl", {"flags": []})
    speeds = {
        "steps: baseline": (10, 12, 11), "steps: the same again": (10.5, 12.4, 11.5), "steps: + workers": (20, 22, 24),
        "steps: + prefetch": (19, 26, 28), "steps: + fused": (19.5, 26.6, 28.6), "alone: bf16": (30, 36, 33),
    }  # fmt: skip
    for key, values in speeds.items():
        for number, speed in enumerate(values):
            losses = (1.0, 0.5 + 1e-3 * (key == "alone: bf16"))
            found.add(next(rung for rung in RUNGS if rung.key == key), number, result(speed, losses))
    found.add(next(rung for rung in RUNGS if rung.key == "steps: + TF32"), 0, {"skipped": "no tensor cores"})
    return found


def measured_of(runs):
    return {key: line for key, line in runs.done.items() if "losses" in line}


def rows_of(runs):
    return {f"{row['table']}: {row['name']}": row for row in evaluate(RUNGS, runs)}


def test_gains_and_their_noise(runs):
    rows = rows_of(runs)
    workers = rows["steps: + workers"]
    assert workers["samples_per_sec"] == 22 and workers["range"] == [20, 24]
    assert workers["gain"] == 2 and workers["gain_range"] == [22 / 12, 24 / 11] and not workers["is_noise"]
    assert rows["steps: + prefetch"]["is_noise"] and rows["steps: + prefetch"]["gain"] > 1.15  # its range holds 1
    assert rows["steps: + fused"]["below"] == "+ prefetch"  # not TF32, which was skipped
    assert rows["steps: + fused"]["is_noise"]  # above 1 each time, but by less than twice 3%
    assert rows["alone: bf16"]["gain"] == 3 and rows["alone: bf16"]["loss_change"] == pytest.approx(2e-3)
    assert rows["steps: + workers"]["loss_change"] == 0 and workers["compile_sec"] == 2
    assert (
        rows["steps: + TF32"]["without"] == "skipped: no tensor cores" and rows["steps: + bf16"]["without"] == "not run"
    )


ABOUT = {"config": "demo", "device": "a <CPU>", "cores": 2, "torch": "2.13", "commit": "abc", "standard_error": 0.05}


def test_what_is_written(runs, tmp_path):
    rows = evaluate(RUNGS, runs)
    ladder_report.write(tmp_path / "ladder_demo.json", rows, ABOUT)
    record = json.loads((tmp_path / "ladder_demo.json").read_text())
    assert record["figures"]["gain of steps: + workers"] == 2 and record["rungs"] == rows
    table = (tmp_path / "ladder_demo.md").read_text()
    assert table.startswith("a <CPU>, 2 cores, PyTorch 2.13, commit abc: `python ")
    assert "`. A gain's standard error, by rungs that are the same command: 5.0%.\n" in table
    assert (
        "+ workers | 22.0 | 2.00 | baseline | 1.83 to 2.18 |" in table
        and "+ TF32 | skipped: no tensor cores |" in table
    )
    assert '| <a id="ladder-demo-steps-workers"></a>+ workers |' in table
    assert "| 1.17, noise | + workers |" in table
    assert (tmp_path / "ladder_demo.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "ladder_demo.html").read_text()
    assert "a &lt;CPU&gt;" in page and "data:image/png;base64," in page and not re.search(r"(src|href)=\"http", page)
    page, records = ROOT / "docs/ladder.md", ROOT / "benchmarks/results"
    ladder_report.check_place(page, records / "ladder_demo.json")
    for record in (records / "ladder_demo_gpu.json", tmp_path / "ladder_demo.json"):
        with pytest.raises(ValueError, match="write lines of <!-- from: ladder_demo"):
            ladder_report.check_place(page, record)


def test_runs_of_another_ladder_are_not_mixed(runs, tmp_path):
    again = Runs(tmp_path / "runs.jsonl", {"flags": []})
    assert again.done == measured_of(runs)
    with pytest.raises(ValueError, match=r"another ladder \(flags changed\)"):
        Runs(tmp_path / "runs.jsonl", {"flags": ["--depth=3"]})


def test_identical_commands_tell_how_sure_a_gain_is(runs):
    """Those of the same flags, ranks and script; without any, nothing is known."""
    by_key = {rung.key: rung for rung in RUNGS}
    last, one, script = (
        by_key[f"{key}"] for key in ("steps: + compile", "weak scaling: 1 rank", "model parallel: 1 rank")
    )
    again = [math.log(ratio) ** 2 for ratio in (10.5 / 10, 12.4 / 12, 11.5 / 11)]
    assert standard_error(RUNGS, runs) == pytest.approx(1.25 * math.sqrt(sum(again) / 3 / 3))
    for rung, speeds in ((last, (10, 10, 10)), (one, (15, 40, 12)), (script, (90, 90, 90))):  # of another script
        for number, speed in enumerate(speeds):
            runs.add(rung, number, result(speed))
    again += [math.log(ratio) ** 2 for ratio in (1.5, 4, 1.2)]
    assert standard_error(RUNGS, runs) == pytest.approx(1.25 * math.sqrt(sum(again) / 6 / 3))
    assert standard_error([by_key["alone: bf16"]], runs) is None


def test_what_failed_is_tried_again(runs, tmp_path):
    fused = next(rung for rung in RUNGS if rung.key == "alone: fused")
    runs.add(fused, 0, {"failed": "no memory"})
    assert rows_of(runs)["alone: fused"]["without"] == "failed: no memory"
    assert ("alone: fused", 0) not in Runs(tmp_path / "runs.jsonl", {"flags": []}).done


@pytest.mark.parametrize(
    "ranks, gpus, nodes, share",
    [(1, 4, 2, "1 1 1 64"), (4, 4, 2, "1 4 4 16"), (8, 4, 2, "2 8 4 16"), (2, 0, 2, "2 2 1 64"), (8, 0, 2, "2 8 4 16")],
)
def test_inside_a_job_srun_starts_the_ranks(monkeypatch, ranks, gpus, nodes, share):
    """Nodes are filled one after another, where there are GPUs, and each rank has its part of the cores."""
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": str(nodes), "SLURM_CPUS_ON_NODE": "64"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(calls.shutil, "which", lambda name: "/usr/bin/srun")
    monkeypatch.setattr(calls.torch.cuda, "device_count", lambda: gpus)
    command, env = calls.launch("train.py", ranks)
    assert command[0] == "srun" and "--overlap" in command and command[-1] == "train.py"
    values = [part.split("=")[1] for part in command if part.startswith(("--nodes", "--ntasks", "--cpus"))]
    assert " ".join(values) == share and env["OMP_NUM_THREADS"] == share.split()[-1]
    assert calls.all_devices() == max(gpus, 1) * nodes and "--gpus-per-node" not in " ".join(command)
    monkeypatch.setenv("SLURM_GPUS", "8")  # of all nodes: a step on one of them would wait for them
    command, env = calls.launch("train.py", ranks)
    assert f"--gpus-per-node={gpus}" in command and "SLURM_GPUS" not in env


def test_data_parallel_is_train_py_with_another_wrapper(tiny, monkeypatch):
    """On a CPU DataParallel hands everything to the one model: here two in turns stand for replicas on GPUs."""
    passes = []

    def forward(self: nn.DataParallel, *args: torch.Tensor) -> torch.Tensor:
        passes.append(len(args))
        return torch.cat([self.module(*part) for part in zip(*(x.chunk(2) for x in args))])

    monkeypatch.setattr(nn.DataParallel, "forward", forward)
    monkeypatch.setattr(start, "start", lambda main, argv, load: run_here(argv, main))
    steps = ["--rollout_steps=2", "--global_batch_size=4"]
    one, argv = losses(run_here(tiny_flags(tiny, *steps))), tiny_flags(tiny, *steps, "--run_num", "dp")
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", *argv])
    runpy.run_path(str(ROOT / DATA_PARALLEL), run_name="__main__")
    assert losses(run_folder(argv)) == pytest.approx(one, rel=1e-5) and {*passes} == {1, 2}


def test_half_a_line_of_an_interrupted_ladder_is_forgotten(runs, tmp_path):
    Runs(tmp_path / "runs.jsonl", {"flags": []})  # without what was skipped
    whole = (tmp_path / "runs.jsonl").read_text()
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"rung": "steps: + compile", "rou')
    assert Runs(tmp_path / "runs.jsonl", {"flags": []}).done == measured_of(runs)
    assert (tmp_path / "runs.jsonl").read_text() == whole
    (tmp_path / "empty.jsonl").write_text('{"fla')
    assert Runs(tmp_path / "empty.jsonl", {"flags": []}).done == {}


def test_why_a_run_failed_in_one_line():
    ours = "train.py: error: lr is -1.0: it takes a number above 0"
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    trace = "Traceback (most recent call last):\n  File x\nRuntimeError: no memory\n\nKeyError: 'a'"
    assert reason(f"some warning\n{ours}\n{launcher}\n===\n") == ours
    assert reason(f"{trace}\n{launcher}\n  train.py FAILED\n") == "RuntimeError: no memory"
    assert reason("killed\n") == "killed" and reason("") == "no message"
    killed = "traceback : Signal 9 (SIGKILL) received by PID 1"
    assert reason(f"{launcher}\n  train.py FAILED\n-----\n  {killed}\n=====\n") == killed


def test_too_few_samples_are_a_reason_to_skip(tmp_path):
    found = ladder.run(RUNGS[0], [], 9, 2 * RUNGS[0].batch, tmp_path, 1)
    assert found == {"skipped": "16 samples are less than 5 batches of 8"}


@pytest.mark.parametrize(
    "then, limit, error", [("wait", 3, subprocess.TimeoutExpired), ("kill -TERM $PPID; wait", 300, SystemExit)]
)
def test_nothing_is_left_of_a_run_that_takes_too_long_or_is_ended(tmp_path, then, limit, error):
    pid, handlers = tmp_path / "pid", {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    end_on_signals()
    try:
        with pytest.raises(error):
            call(["bash", "-c", f"sleep 600 & echo $! > {pid}; {then}"], dict(os.environ), limit)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    wait_until(lambda: not is_running(int(pid.read_text())))


def test_a_shell_on_another_machine_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(ValueError, match="job 7 runs elsewhere than this shell"):
        ladder.main(["--config=demo"])


@pytest.mark.parametrize("flags, words", [(["--nproc=0"], "nproc is 0: it takes 1"), (["--iterations=4"], "takes 5")])
def test_numbers_that_make_no_ladder(flags, words):
    with pytest.raises(ValueError, match=words):
        ladder.main(["--config=demo", *flags])


def test_a_baseline_that_does_not_run_ends_the_ladder(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "run", lambda *args: {"failed": "no memory"})
    with pytest.raises(ValueError, match=r"the baseline has no figures \(failed: no memory\): give flags"):
        ladder.main([*tiny_flags(tiny)[:6], "--json", str(tmp_path / "out.json")])


def test_what_the_model_cannot_do_is_skipped(tiny, tmp_path):
    rung = next(rung for rung in all_rungs(2, 3) if rung.name == "baseline")
    found = ladder.run(rung, [*tiny_flags(tiny)[:6], "--dt=99"], 5, 99, tmp_path / "runs", 300)
    assert found["skipped"].startswith("train.py: error: ") and "dt" in found["skipped"]


def test_data_parallel_needs_the_gpus_of_one_node(monkeypatch):
    needs = next(rung.needs for rung in all_rungs(4, 8) if rung.script == DATA_PARALLEL)
    for gpus, missing in ((0, "needs 4 GPUs, and here are 0"), (2, "needs 4 GPUs, and here are 2"), (4, None)):
        monkeypatch.setattr(ladder.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert lacks(needs) == missing


def test_links_are_switched_off_by_the_environment(tmp_path, monkeypatch, runs):
    """Those of DDP and of tensor parallelism; a run with other links is another command, not noise."""
    rungs = [rung for rung in RUNGS if rung.table == "links"]
    by_key = {rung.key: rung for rung in RUNGS}
    assert [rung.below for rung in rungs] == ["weak scaling: 4 ranks", "model parallel: tp 4"]
    for rung in rungs:
        below = by_key[rung.below]
        assert (rung.flags, rung.script, rung.batch, rung.ranks) == (below.flags, below.script, below.batch, 4)
        assert lacks(rung.needs, rung.ranks) == f"needs 4 GPUs, and here are {ladder.torch.cuda.device_count()}"
    told = []
    monkeypatch.setattr(ladder, "lacks", lambda *_: None)
    monkeypatch.setattr(ladder, "call", lambda command, env, limit: told.append(env) or (1, "", "a.py: error: no"))
    for rung in (*rungs, by_key["weak scaling: 4 ranks"]):
        ladder.run(rung, [], 5, 999, tmp_path / "runs", 1)
    assert [env.get("NCCL_P2P_DISABLE") for env in told] == ["1", "1", None]
    pair = rungs[0], by_key[rungs[0].below]
    for number in range(3):
        for speed, rung in zip((5.0, 10.0), pair):
            runs.add(rung, number, result(speed))
    assert standard_error(list(pair), runs) is None
    (row,) = [row for row in evaluate(RUNGS, runs) if row["table"] == "links" and "without" not in row]
    assert row["script"] == "NCCL_P2P_DISABLE=1 train.py" and row["gain"] == 0.5


@pytest.mark.nightly
def test_a_ladder_that_was_interrupted_goes_on(tiny, tmp_path, monkeypatch, capsys):
    flags = [*tiny_flags(tiny)[:6], "--global_batch_size=4"]
    argv = [*flags, "--rungs", "alone: fused", "DALI", "--iterations=5", "--repeats=1"]
    argv += ["--json", str(tmp_path / "out.json")]
    original, started = ladder.run, []

    def run(rung, *args):
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(rung.key)
        return original(rung, *args)

    monkeypatch.setattr(ladder, "run", run)
    with pytest.raises(KeyboardInterrupt):
        ladder.main(argv)
    monkeypatch.setattr(ladder, "run", original)
    ladder.main(argv)
    lines = [json.loads(line) for line in (tmp_path / "out.runs.jsonl").read_text().splitlines()[1:]]
    keys = [line["rung"] for line in lines]
    assert keys[:2] == started == ["steps: baseline", "alone: fused"] and len(set(keys)) == len(keys)
    assert (
        keys[-1] == "steps: the same again"
        and lines[0]["losses"] == lines[-1]["losses"]
        and len(lines[0]["losses"]) == 10
    )
    assert not (tmp_path / "out.runs").exists()
    assert json.loads((tmp_path / "out.json").read_text())["about"]["standard_error"] > 0
    assert ">fused |" in capsys.readouterr().out
