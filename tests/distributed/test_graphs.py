"""Chapter 3 without a GPU: a stand-in records the step and replays it, and the losses are those of the eager loop."""

import dataclasses
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

import train
import train_mp
import train_mp_graphs
from distributed.graphs import Captured, check_capture
from distributed.helpers import GridScaler
from tests.distributed.recorded_graph import RecordedGraph, always_ddp
from tests.helpers import ROOT, losses, norms, resume_here, run_folder, run_here, run_ranks, tiny_flags
from utils.comm import Grid
from utils.config.reader import load_config
from utils.ranks.start import start

WARMUP = 3


def graphs(world, argv):
    """train_mp_graphs.main, but for its checks of the device."""
    capture = partial(train_mp_graphs.capture, graph=RecordedGraph)
    train_mp.main(world, argv, chapter=3, transform=capture)


def run_both(tiny, *flags):
    """Return the folders of an eager run and one that is recorded after three iterations, with these flags."""
    flags = ["--device", "cpu", *flags]
    flags = [f for f in flags if f != "--graph_optimizer"], flags
    eager = run_here(tiny_flags(tiny, *flags[0]), main=train_mp.main, name="1MP")
    graphed = tiny_flags(tiny, *flags[1], "--run_num", "graph", "--graph_warmup", str(WARMUP))
    return eager, run_here(graphed, main=graphs, name="1MP")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--amp_mode", "bf16", "--clip_grad_norm", "0.5", "--accumulation_steps", "2"],
        ["--amp_mode", "fp16", "--drop_path", "0.5"],
        ["--graph_optimizer", "--enable_fused", "--clip_grad_norm", "0.5", "--warmup", "4"],
        ["--graph_optimizer", "--enable_fused", "--amp_mode", "fp16"],
        ["--dropout", "0.2", "--graph_optimizer", "--enable_fused"],
        ["--activation_checkpoint", "block", "--mlp_chunks", "2", "--graph_optimizer", "--enable_fused"],
        ["--rollout_steps", "2", "--rollout_from", "4", "--patch_overlap", "2", "--activation_checkpoint", "step"],
        ["--rollout_steps", "2", "--rollout_from", "4", "--graph_optimizer", "--enable_fused"],
    ],
    ids=lambda flags: " ".join(flags) or "plain",
)
def test_a_recorded_step_gives_the_losses_of_the_eager_one(tiny, flags):
    eager, graphed = run_both(tiny, *flags, "--num_iters", "9")
    if "--graph_optimizer" in flags:  # the learning rate is a float32 tensor then
        np.testing.assert_allclose(losses(graphed), losses(eager), rtol=1e-6)
        np.testing.assert_allclose(norms(graphed), norms(eager), rtol=1e-5)
    else:
        assert losses(graphed) == losses(eager) and norms(graphed) == norms(eager)
    log = (graphed / "out.log").read_text()
    assert log.count("CUDA graph of the step: recorded") == 1 + ("--rollout_steps" in flags)  # one for each length
    assert ("CUDA graph of the update: recorded" in log) == ("--graph_optimizer" in flags)
    assert len(set(losses(eager))) == 9


def test_ddp_is_recorded_on_one_rank(tiny, monkeypatch):
    monkeypatch.setattr(train_mp, "data_parallel", always_ddp)
    eager, graphed = run_both(tiny, "--amp_mode", "bf16", "--graph_optimizer", "--enable_fused", "--num_iters", "9")
    np.testing.assert_allclose(losses(graphed), losses(eager), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--graph_optimizer", "--enable_fused", "--amp_mode", "fp16"]])
def test_a_recorded_run_goes_on_from_a_checkpoint(tiny, flags):
    flags = ["--device", "cpu", "--num_iters", "12", "--graph_warmup", "3", "--drop_path", "0.5", *flags]
    whole, resumed = resume_here(tiny_flags(tiny, *flags), 4, graphs, "1MP")
    assert resumed == whole and len(set(whole)) == 8


class LargeScale(GridScaler):
    """A scaler that begins at 2^34: fp16 gradients overflow."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.load_state_dict({**self.state_dict(), "scale": 2.0**34})


@pytest.mark.parametrize("more", [[], ["--graph_optimizer"]])
def test_fp16_overflows_skip_the_same_steps(tiny, monkeypatch, more):
    """The scale halves with every overflow: a recording reads it anew each time, and skips as the loop does."""
    monkeypatch.setattr(train_mp, "GridScaler", LargeScale)
    flags = ["--amp_mode", "fp16", "--enable_fused", "--num_iters", "16", "--global_batch_size", "2", *more]
    eager, graphed = run_both(tiny, *flags, "--limit_nsamples_val", "1")
    finite = [norm is not None for norm in norms(eager)]
    assert [norm is not None for norm in norms(graphed)] == finite
    assert finite[WARMUP + 1 :].count(False) > 5 and finite[-1]
    np.testing.assert_allclose(losses(graphed), losses(eager), rtol=1e-6)


def eager_and_recorded(world, argv):
    """Two runs, `eager` and `graph`."""
    train_mp.main(world, [*(flag for flag in argv if flag != "--graph_optimizer"), "--run_num", "eager"])
    graphs(world, [*argv, "--run_num", "graph", "--graph_warmup", "12"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, flags",
    [
        ("4MP", ["--tensor_parallel=2", "--context_parallel=2", "--drop_path=0.3", "--accumulation_steps=2"]),
        ("2MP", ["--tensor_parallel=2", "--amp_mode=bf16", "--enable_fused", "--graph_optimizer"]),
    ],
)
def test_collectives_are_replayed_too(tiny, name, flags):
    argv = tiny_flags(tiny, *flags, "--device=cpu", "--num_iters=16", "--global_batch_size=4")
    for done in run_ranks(4, start, eager_and_recorded, argv):
        assert done.returncode == 0, done.stderr
    eager, graphed = (run_folder([*argv, "--run_num", run_num], name) for run_num in ("eager", "graph"))
    assert "CUDA graph of the step: recorded" in (graphed / "out.log").read_text()
    rtol = 1e-4 if "--amp_mode=bf16" in flags else 1e-6
    np.testing.assert_allclose(losses(graphed), losses(eager), rtol=rtol)
    np.testing.assert_allclose(norms(graphed), norms(eager), rtol=10 * rtol)


def test_a_captured_function_runs_is_recorded_and_replayed():
    calls = []

    def double(x):
        calls.append(None)
        return 2 * x

    function = Captured(double, "step", 2, lambda: RecordedGraph([]), log=lambda line: None)
    results = [function(torch.full((3,), float(i))) for i in range(6)]
    assert len(calls) == 3  # two to warm up, one to record
    assert [r.tolist() for r in results] == [[2.0 * i] * 3 for i in range(6)]  # none overwrote another
    results = [function(torch.full((2,), float(i))) for i in range(4)]  # another shape: once more from the beginning
    assert len(calls) == 6 and [r.tolist() for r in results] == [[2.0 * i] * 2 for i in range(4)]
    function.launched, _ = 98, function(torch.zeros(5))
    for _ in range(4):
        function(torch.zeros(5))
    assert len(calls) == 6 + 4 + 1  # DDP looks at its timing after 99 and 100: it is recorded one later


@pytest.mark.parametrize("fused", [True, False])
def test_what_asks_the_host_cannot_be_recorded(fused):
    """Why fp16 without the fused optimiser is refused with --graph_optimizer: the scaler looks for overflows itself."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.Adam([weight], fused=fused), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    recording = RecordedGraph([]).record()
    with (
        nullcontext() if fused else pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        recording,
    ):
        train.update_weights(optimizer, scaler, load_config([])[0], 1e-3)


@pytest.mark.parametrize(
    "flags, dp, found",
    [
        (["--num_iters", "20"], 1, "num_iters 20 leaves nothing to replay after graph_warmup 20"),
        (["--graph_warmup", "10"], 2, "graph_warmup is 10: DistributedDataParallel waits .* take 11 or more"),
        (
            ["--enable_jit", "--compile_mode", "max-autotune"],
            1,
            "max-autotune records CUDA graphs of its own",
        ),
        (["--dropout", "0.1", "--mlp_chunks", "2"], 1, "dropout 0.1 with activation_checkpoint, mlp_chunks or cp_re"),
        (["--graph_optimizer", "--amp_mode", "fp16"], 1, "graph_optimizer with fp16, .* add --enable_fused"),
    ],
)
def test_what_cannot_be_recorded_is_refused(tiny, flags, dp, found):
    config, _ = load_config(tiny_flags(tiny, "--num_iters", "99", *flags), chapter=3)
    grid = Grid(dp, 0)
    with pytest.raises(ValueError, match=found):
        check_capture(config, grid, torch.device("cuda"))
    with pytest.raises(ValueError, match="CUDA graphs, and the device is cpu: run train_mp.py"):
        check_capture(config, grid, torch.device("cpu"))
    mended = dataclasses.replace(
        config, num_iters=99, graph_warmup=11, compile_mode="default", dropout=0.0, enable_fused=True
    )
    check_capture(mended, grid, torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_so_in_one_line(tiny):
    command = [sys.executable, "train_mp_graphs.py", *tiny_flags(tiny)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "CUDA graphs, and the device is cpu: run train_mp.py" in done.stderr and not (tiny / "runs").exists()
