"""Forecasts, and the moving average of the weights, on a GPU."""

import json

import numpy as np
import pytest
import torch

import evaluate
import train_mp_graphs
from tests.checkpoint.test_moving_average import AVERAGED, average_by_hand, weights
from tests.helpers import call_here, run_here, tiny_flags, write_data

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("flags", [[], ["--amp_mode", "bf16"], ["--amp_mode", "fp16"], ["--enable_jit"]])
def test_a_gpu_finds_the_skill_that_a_cpu_finds(tmp_path, flags):
    write_data(tmp_path, valid={"2003": 20})
    run = run_here(tiny_flags(tmp_path, "--num_iters", "20", "--ema_decay", "0.9", "--device", "cpu"))
    argv = ["--checkpoint", str(run), "--inf_data_path", str(tmp_path / "valid"), "--lead_hours", "24"]
    found = []
    for device, more in (("cpu", []), ("cuda", flags)):
        call_here(evaluate.main, [*argv, "--out", str(tmp_path / device), "--device", device, *more])
        found.append(json.loads((tmp_path / device / "skill.json").read_text())["scores"])
    for source in ("persistence", "model", "ema", "climatology"):
        for name in ("ch0", "ch1", "ch2"):
            cpu, gpu = (np.array(x[source]["rmse"]["area"][name]) for x in found)
            np.testing.assert_allclose(gpu, cpu, rtol=2e-2 if "--amp_mode" in flags else 1e-3)


@pytest.mark.parametrize("flags", [[], ["--graph_optimizer"]])
def test_the_average_beside_a_recorded_step(tiny, flags):
    """It is updated outside of the recording, and lies in place for a validation without changing addresses."""
    argv = tiny_flags(tiny, *AVERAGED, "--amp_mode", "bf16", "--graph_warmup", "3", *flags)
    with torch.cuda.stream(torch.cuda.current_stream()):  # which comes back afterwards
        folder = run_here(argv, train_mp_graphs.main, "1MP")
    plain = tiny_flags(tiny, *AVERAGED)  # the same weights are drawn
    expected = average_by_hand(plain, folder)
    for name, x in weights(folder, 8, "ema").items():
        torch.testing.assert_close(x.double(), expected[name], rtol=1e-5, atol=1e-7)
