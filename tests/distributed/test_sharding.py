"""Gradients, optimiser and weights shared out over data parallel ranks: what a rank holds and sends, its checkpoints,
its moving average, and what is refused. That training is the same is the certificate's to prove (`shared ...`)."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from benchmarks.planner.trace import trace
from benchmarks.simulate import simulate
from distributed.graphs import check_capture
from distributed.helpers import TensorParallelGradients, sliced_dims
from distributed.parallelize import check_parallel, parallelize, shard_tokens
from distributed.sharding import share_out
from tests.helpers import ROOT, records, run_folder, run_ranks, tiny_flags
from utils.checkpoint import store
from utils.checkpoint.boxes import Place
from utils.checkpoint.state import TrainingState
from utils.comm import Grid
from utils.compiler import compile_modules
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.optimizers import build_optimizer
from utils.ranks.start import join
from utils.ranks.world import find_world

CPU = torch.device("cpu")
SIZES = [
    "--img_size", "16", "40", "--patch_size=4", "--embed_dim=18", "--num_heads=2", "--depth=2", "--n_in_channels=3",
    "--n_out_channels=2", "--global_batch_size=4",
]  # fmt: skip
LAYOUTS = [
    [], ["--tensor_parallel=2"], ["--tensor_parallel=2", "--context_parallel=2"], ["--context_parallel=4"],
    ["--shard=gradients"], ["--shard=weights", "--tensor_parallel=2"], ["--shard=gradients", "--context_parallel=4"],
    ["--shard=weights", "--tensor_parallel=2", "--context_parallel=2", "--parallel_order=cp-dp-tp"],
]  # fmt: skip


def state_on(*flags: str) -> TrainingState:
    """Return weights, optimiser and average of a small model on the grid of these flags; on 4 ranks."""
    config = load_config([*SIZES, "--ema_decay=0.9", *flags], chapter=2)[0]
    grid = Grid(4, dist.get_rank(), config.tensor_parallel, config.context_parallel, config.parallel_order)
    grid.create_groups()
    shard = shard_tokens(config, grid)
    model = parallelize(train.build_model(config, Fields.blank(config)), config, grid, shard, CPU)
    share_out(model, config, grid, CPU)
    slices = sliced_dims(model), grid.get_group("tp")
    return TrainingState(model, build_optimizer(model, config), None, 0.9, model.stacked(), slices=slices)


def values(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in state.tensors().items()}


def save(state: TrainingState, folder: Path) -> None:
    state.copy_to_host()
    store.save(folder, state.shards, {}, dist.group.WORLD)


def on_layouts(folder: str) -> None:
    """Save numbers on one layout, load them on each, save them there, and load each of these on each."""
    folder = Path(folder)
    join(find_world(os.environ))
    states = [state_on(*flags) for flags in LAYOUTS]
    generator = torch.Generator().manual_seed(3)
    for x in states[0].tensors().values():  # whole, and alike on all ranks
        x.copy_(torch.rand(x.shape, generator=generator))
    save(states[0], folder / "00000000")
    first = store.read(folder / "00000000", "")
    known = []
    for number, state in enumerate(states, 1):
        state.load(folder / "00000000", same_ranks=False)
        known.append(values(state))
        save(state, folder / f"{number:08}")
        there = store.read(folder / f"{number:08}", "")
        for name in first:
            if not name.startswith("random."):
                assert torch.equal(first[name], there[name]), (name, LAYOUTS[number - 1])
    for number in range(1, len(states) + 1):
        for flags, state, expected in zip(LAYOUTS, states, known):
            for x in state.tensors().values():
                x.zero_()
            state.load(folder / f"{number:08}", same_ranks=False)
            for name, x in state.tensors().items():
                assert torch.equal(x, expected[name]), (name, LAYOUTS[number - 1], flags)
    dist.destroy_process_group()


@pytest.mark.nightly
def test_a_checkpoint_of_each_layout_is_read_on_each(tmp_path):
    for done in run_ranks(4, on_layouts, str(tmp_path)):
        assert done.returncode == 0, done.stderr[-3000:]


def test_boxes_of_matrices_that_lie_one_below_the_other():
    """12 rows are three matrices of 4, the upper or lower half of 8; five rows of them begin in the first."""
    place = Place((12, 2), stacked=3, dim=0, index=1, count=2, shared_dim=0, first=3)
    x = torch.arange(10.0).view(5, 2)
    assert place.whole == (3, 8, 2)
    assert [(corner, view.tolist()) for corner, view in place.boxes(x)] == [
        ((0, 7, 0), [[[0, 1]]]), ((1, 4, 0), [[[2, 3], [4, 5], [6, 7], [8, 9]]])
    ]  # fmt: skip
    assert place.boxes(x[:0]) == []
    across = Place((1, 5, 8), shared_dim=2, first=4)
    assert [corner for corner, _ in across.boxes(torch.ones(1, 5, 4))] == [(0, 0, 4)]


def parts_on(ranks: int) -> None:
    """What a rank holds of weights and moments, and the norm of parts, against that of whole gradients."""
    join(find_world(os.environ))
    config = load_config([*SIZES, "--embed_dim=96", "--shard=gradients"], chapter=2)[0]
    grid = Grid(ranks, dist.get_rank())
    grid.create_groups()
    serial = train.build_model(config, Fields.blank(config))
    size = sum(p.numel() for p in serial.parameters())
    model = share_out(parallelize(serial, config, grid, shard_tokens(config, grid), CPU), config, grid, CPU)
    optimizer = build_optimizer(model, config)
    state = TrainingState(model, optimizer, None, None, model.stacked())
    held = {kind: 0 for kind in ("model", "exp_avg", "exp_avg_sq")}
    for name, x in state.tensors().items():
        kind = name.rpartition(".")[2] if name.startswith("optimizer") else "model"
        held[kind] = held.get(kind, 0) + x.numel()
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        assert held[kind] <= 1.02 / ranks * size, (kind, held[kind], size)
    x = torch.randn(2, 3, *model.shape, generator=torch.Generator().manual_seed(4))
    model(x).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    whole = torch.stack([g.full_tensor().norm() for g in grads]).norm()
    torch.testing.assert_close(TensorParallelGradients(model, grid, False).norm(grads), whole)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_part(ranks):
    for done in run_ranks(ranks, parts_on, ranks):
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.nightly
def test_what_is_sent_and_held_on_256_ranks():
    """Bytes of DDP, or 1.5 times; and the peaks: what all held is now held once."""
    flags = ["--config=mp", "--local_batch_size=1", "--tensor_parallel=4", "--context_parallel=4"]
    plain, gradients, weights = (simulate(16, [*flags, f"--shard={s}"]) for s in ("none", "gradients", "weights"))
    sent = plain["sent"]["dp-cp"]
    assert gradients["sent"]["dp-cp"] == pytest.approx(sent, rel=0.001)
    assert weights["sent"]["dp-cp"] == pytest.approx(1.5 * sent, rel=0.01)
    assert plain["peak"] > 950e6 and gradients["peak"] < 500e6 and weights["peak"] < 400e6
    assert gradients["after_forward"]["Optstate"] <= 1.02 / 64 * plain["after_forward"]["Optstate"]


@pytest.mark.parametrize("dp, cp", [(4, 1), (1, 4)])
def test_what_is_sent_where_a_group_is_that_of_another_axis_too(dp, cp):
    flags = ["--config=demo", "--depth=1", f"--context_parallel={cp}", "--rollout_steps=1", "--rollout_from=0"]
    found = {shard: simulate(dp, [*flags, f"--shard={shard}"])["sent"] for shard in ("none", "gradients", "weights")}
    for axis in ("tp", "cp"):
        assert found["weights"][axis] == pytest.approx(found["none"][axis], rel=1e-4)  # but two numbers of the norm
    assert found["gradients"]["dp-cp"] == pytest.approx(found["none"]["dp-cp"], rel=0.02)
    assert 1.05 * found["none"]["dp-cp"] < found["weights"]["dp-cp"] <= 1.52 * found["none"]["dp-cp"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--activation_checkpoint=block"], ["--accumulation_steps=2"]])
def test_a_forecast_of_several_steps_sends_gradients_once(more):
    flags = ["--config=demo", "--depth=2", "--rollout_steps=4", "--rollout_from=0", *more]
    traces = {s: trace(4, [*flags, f"--shard={s}"], memory=False) for s in ("none", "gradients", "weights")}
    found = {shard: traces[shard].summary() for shard in traces}
    sent = {shard: found[shard]["sent"]["dp-cp"] for shard in found}
    assert sent["gradients"] == pytest.approx(sent["none"], rel=0.02) and sent["weights"] > 2.5 * sent["none"]
    blocks = 2 + 1  # and the rest
    assert found["gradients"]["count"]["dp-cp reduce_scatter"] == blocks


@pytest.mark.nightly
def test_steps_after_a_validation_are_those_of_ddp(tiny):
    """Passes without gradients must leave nothing behind: neither weights nor, beside them, gradients of before."""
    found = {}
    for shard in ("none", "gradients", "weights"):
        argv = tiny_flags(tiny, "--num_iters=6", "--validate_first", "--shard", shard, "--run_num", f"after {shard}")
        for done in run_ranks(2, [str(ROOT / "train_mp.py"), *argv]):
            assert done.returncode == 0, done.stderr[-3000:]
        folder = run_folder(argv, "1MP")
        assert len(records(folder, "epoch")) == 3 + 1  # with the one before the first step
        found[shard] = [(step["loss"], step["grad_norm"]) for step in records(folder, "step")]
    torch.testing.assert_close(torch.tensor(found["gradients"]), torch.tensor(found["none"]), rtol=1e-5, atol=0)
    assert found["weights"] == found["gradients"]


@pytest.mark.nightly
def test_averages_and_validations_are_those_of_ddp(tiny):
    found = {}
    flags = ["--num_iters=6", "--ema_decay=0.5", "--accumulation_steps=2", "--report", "--clip_grad_norm=1"]
    for shard in ("none", "gradients", "weights"):
        argv = tiny_flags(tiny, *flags, "--shard", shard, "--run_num", shard)
        for done in run_ranks(2, [str(ROOT / "train_mp.py"), *argv]):
            assert done.returncode == 0, done.stderr[-3000:]
            assert "Warning" not in done.stderr
        folder = run_folder(argv, "1MP")
        log = (folder / "out.log").read_text()
        epochs = records(folder, "epoch")
        found[shard] = [(event["valid_loss"], event["valid_loss_ema"], event["train_loss"]) for event in epochs]
        memory = epochs[-1]["memory_gb"]
    told = re.search(r"([\d,]+) parameters on each rank.*\n.*Shared out: weights; rank 0 owns ([\d,]+)", log)
    whole, owned = (int(number.replace(",", "")) for number in told.groups())
    assert owned == pytest.approx(whole / 2, rel=0.01)
    torch.testing.assert_close(torch.tensor(found["gradients"]), torch.tensor(found["none"]), rtol=1e-5, atol=0)
    assert found["weights"] == found["gradients"] and len(found["none"]) == 3
    assert memory["optimizer"] == pytest.approx(2 * memory["weights"], rel=0.1)  # parts, both


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--shard=weights", "--noddp"], "noddp with shard weights: .* leave --noddp out"),
        (["--shard=gradients", "--optimizer=Adafactor"], "Adafactor looks at whole weights, and shard gradients"),
    ],
)
def test_what_it_cannot_is_refused(flags, words):
    config, _ = load_config(["--num_heads", "4", *flags], chapter=2)
    with pytest.raises(ValueError, match=words):
        check_parallel(config, Grid(2, 0))


def test_graphs_and_a_model_compiled_as_one_are_refused():
    config, remarks = load_config([*SIZES, "--shard=weights", "--bucket_cap_mb=1", "--num_iters=99"], chapter=3)
    assert "bucket_cap_mb changes nothing without --shard none" in remarks
    with pytest.raises(ValueError, match="shard weights has not been recorded yet.*run train_mp.py"):
        check_capture(config, Grid(2, 0), torch.device("cuda"))
    model = train.build_model(config, Fields.blank(config))
    compile_modules(model, ["ViT"], "default")
    with pytest.raises(ValueError, match="compile_modules takes the whole model as one, and shard weights"):
        share_out(model, config, Grid(2, 0), CPU)
