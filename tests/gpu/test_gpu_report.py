"""Profiles and reports where a GPU does the work. Skipped elsewhere; `pytest -m gpu` runs these."""

import gzip
import importlib.util
import json
import pickle
import re
import subprocess
import sys

import pytest
import torch

import train_mp_graphs
from benchmarks import doctor, ladder
from benchmarks.harness.bench import Bench
from benchmarks.harness.data import PLAIN
from tests.helpers import ROOT, clean_environment, losses, run_folder, run_here, tiny_flags, wait_until
from tests.measure.test_timeline import check_times
from utils.measure.machine import SystemWatch
from utils.measure.memory_timeline import parts_at_peak
from utils.measure.step_profile import StepProfiler
from utils.spans import span

pytestmark = pytest.mark.gpu

MIDDLE = [*PLAIN, "--img_size", "64", "128", "--embed_dim=384", "--depth=6", "--num_heads=6", "--residual"]


def on_gpu(tiny, *flags):
    return tiny_flags(tiny, "--device", "cuda", "--num_iters", "6", *flags)


def record_here(argv):
    with torch.cuda.stream(torch.cuda.current_stream()):  # which comes back afterwards
        return run_here(argv, train_mp_graphs.main, "1MP")


def report_of(folder):
    return json.loads((folder / "report/report.json").read_text())


def test_memory_by_part_adds_up_to_the_allocators_peak():
    bench = Bench([*MIDDLE, "--device=cuda", "--local_batch_size=8"])
    bench.is_timed = False
    for _ in range(2):
        bench.step(*bench.batch)
        bench.update(1e-3)
    moments = [x for state in bench.optimizer.state.values() for x in state.values()]

    def known():
        gradients = [p.grad for p in bench.model.parameters()]
        return {"weights": list(bench.model.parameters()), "gradients": gradients, "optimizer": moments}

    profiler = StepProfiler(bench.device, known, None)
    before = [x.clone() for x in bench.batch]
    profiler.start()
    torch.cuda.reset_peak_memory_stats()
    with span("step 1"):
        before = [x.clone() for x in bench.batch]  # the last batch goes
        bench.step(*before)
        with span("optimizer"):
            bench.update(1e-3)
    found, peak = profiler.stop(), torch.cuda.max_memory_allocated()
    parts = parts_at_peak(found.blocks)
    assert sum(parts.values()) == pytest.approx(peak, rel=0.05)
    weights = sum(p.numel() * p.element_size() for p in bench.model.parameters())
    assert parts["weights"] == weights and parts["optimizer"] >= 2 * weights
    assert parts["activations"] > weights


def test_a_report_sees_the_kernels(tiny):
    folder = run_here(on_gpu(tiny, "--report"))
    assert losses(folder) == pytest.approx(losses(run_here(on_gpu(tiny, "--run_num", "plain"))), rel=1e-5)
    check_times(folder, epochs=[1, 2, 3])
    report = report_of(folder)
    operators = {row["operator"]: row for row in report["operators"]}
    step = sum(row["seconds"] for row in report["time"] if row["part"] in ("forward", "backward", "optimizer")) / 6
    assert 0 < sum(row["seconds"] for row in report["operators"]) < step
    assert operators["aten::addmm"]["seconds"] > 0 and operators["aten::addmm"]["calls"] > 0
    memory = {row["part"]: row["bytes"] for row in report["memory"]}
    assert set(memory) >= {"weights", "optimizer", "activations", "cached"}
    assert memory["sum"] == pytest.approx(memory["allocator"], rel=0.05)
    # A model of two small blocks on a large GPU: the host is what it waits for.
    assert report["verdict"].startswith("This run is bound by launching: ")


def test_a_report_of_a_recorded_step(tiny):
    """The step that is profiled in the end is a recorded one, and nobody is advised to record it."""
    folder = record_here(on_gpu(tiny, "--report", "--graph_warmup", "3"))
    report = report_of(folder)
    assert "train_mp_graphs.py" not in report["verdict"]
    assert "cudaGraphLaunch" in (folder / "report/step_trace.json").read_text()
    recorded = [row["seconds"] for row in report["time"] if row["part"] == "step" and row["epoch"] == 3]
    assert recorded[0] > 0


@pytest.mark.parametrize("run, flags", [(run_here, []), (record_here, ["--graph_warmup", "2"])])
def test_traces_and_snapshots(tiny, run, flags):
    folder = run(on_gpu(tiny, "--profile", "torch", "--profile_steps", "3", "1", "2", *flags))
    (path,) = (folder / "profile").glob("rank0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(e.get("cat") == "kernel" for e in events)
    with (folder / "profile/rank0_memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"] and any(snapshot["device_traces"])
    assert (folder / "profile/rank0_memory.png").stat().st_size > 1000


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="needs pip install nvidia-ml-py")
def test_the_gpu_tells_its_use_memory_and_power():
    device = torch.device("cuda", 0)
    held = torch.zeros(2**28, device=device)  # 1 GiB
    watch = SystemWatch(device)
    for _ in range(50):
        held.add_(1)
    torch.cuda.synchronize()
    wait_until(lambda: "gpu_watts" in watch.newest, seconds=20)
    found = watch.take()
    watch.close()
    assert found["gpu_memory_gb"] >= 1 and 0 <= found["gpu_use"] <= 1
    assert 5 < found["joules"] / found["seconds"] < 2000  # watts


def test_the_log_names_what_the_gpu_tells(tiny):
    log = (run_here(on_gpu(tiny, "--report")) / "out.log").read_text()
    assert re.search(r"gpu_use +\d", log) or "pip install nvidia-ml-py" in log
    assert re.search(r"allocator +\d+\.\d+ +its peak in the same step", log)


def test_the_doctor_knows_the_gpu(tiny, capsys):
    doctor.main(tiny_flags(tiny))
    told = capsys.readouterr().out
    name, memory = re.escape(torch.cuda.get_device_name(0)), torch.cuda.mem_get_info(0)[1] / 2**30
    assert re.search(rf"GPU 0: {name}, capability \d+\.\d+, {memory:.0f} GiB", told)
    assert f"it has {memory:.1f} GiB" in told and "CUDA " in told and "no GPU" not in told


@pytest.mark.timeout(600)  # nine processes, two of which compile
def test_the_ladder_has_the_rungs_of_a_gpu(tiny, tmp_path):
    argv = [*tiny_flags(tiny)[:6], "--global_batch_size=4", "--rungs", "TF32", "alone: fp16", "graphs"]
    ladder.main([*argv, "--iterations=5", "--repeats=1", "--nproc=1", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rungs"]
    assert {row["name"] for row in rows} >= {"+ TF32", "TF32", "fp16", "+ graphs", "graphs"}
    assert not [row["without"] for row in rows if "without" in row]
    assert all(row["loss_change"] < 0.1 and row["memory_gb"] > 0 for row in rows)  # fp16 leaves out some first steps


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_follows_one_gpu(tiny):
    argv = on_gpu(tiny, "--no_tf32", "--run_num", "dp")
    command = [sys.executable, "benchmarks/data_parallel.py", *argv]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True)
    one = losses(run_here(on_gpu(tiny, "--no_tf32")))
    assert losses(run_folder(argv)) == pytest.approx(one, rel=1e-5)
