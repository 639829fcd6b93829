"""On a GPU: the machine is measured, and a step of `base` takes what the planner says."""

import gc
import statistics

import pytest
import torch

from benchmarks.harness.bench import Bench
from benchmarks.planner.machine import machine_of
from benchmarks.planner.measure import measure
from benchmarks.planner.ranking import outlook_of
from utils.config.reader import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def machine():
    """What this GPU can do: that takes a minute."""
    return machine_of(measure("cuda", 1))


@pytest.mark.parametrize("mode", ["none", "bf16"])
def test_a_step_takes_what_the_planner_says(mode, machine):
    """Within 20%, on the GPU that was measured before."""
    flags = ["--config=base", f"--amp_mode={mode}", "--local_batch_size=8", "--enable_fused", "--plot_channels=None"]
    bench = Bench(flags)
    gc.collect()  # what ran here before counts no more
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        bench.run_step()
    took = statistics.median(bench.run_step()["step"] for _ in range(10))
    config = load_config(flags)[0]
    found = outlook_of(config, machine, 1)
    assert found.seconds == pytest.approx(took, rel=0.2), found.parts
    held = torch.cuda.max_memory_allocated()
    assert found.bytes == pytest.approx(held, rel=0.15), found.memory
