"""Communication, counted: collectives and bytes by group and step, held to the formulas in the layers' docstrings."""

import collections
import json
from functools import partial

import pytest
import torch
import torch.distributed as dist

import train
from benchmarks.planner.trace import join_fake, trace
from benchmarks.simulate import GRIDS, simulate
from distributed.helpers import TensorParallelGradients, share_loss
from distributed.parallelize import is_sequence_parallel, parallelize, shard_tokens
from networks.vit import ViT
from tests.helpers import ROOT, group_of_one, tiny_flags
from tests.marks import at_night
from train import data_parallel, forward_backward
from train_mp import make_step
from utils.comm import Grid
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.loss import relative_l2

pytestmark = pytest.mark.slow

DEPTH, DIM, BATCH, TOKENS = 2, 32, 3, 32  # of the tiny model below
BLOCK_REPLICAS = 6 * DIM  # two norms, the biases of proj and fc2
OTHER_REPLICAS = (3 * 16 * DIM + DIM) + TOKENS * DIM + 2 * DIM + 3 * 16 * DIM  # embedding, positions, norm, head


def expected(tp, cp, sequence_parallel, regather, ulysses, amp):
    """The docstrings of distributed/layers.py and helpers.py, as arithmetic: {group and kind: (count, bytes)}."""
    s = BATCH * (TOKENS // cp) * DIM * (4 if amp == "none" else 2)
    q = s // tp
    found = collections.Counter()

    def add(group, kind, count, size):
        found[f"{group} {kind}", "count"] += count
        found[f"{group} {kind}", "bytes"] += size

    if tp > 1 and sequence_parallel:
        gathers = 6 if regather else 4  # forward: qkv, fc1. Backward: proj, fc2 and, where asked for, qkv, fc1 again
        add("tp", "all_gather", gathers * DEPTH, gathers * DEPTH * s)
        add("tp", "reduce_scatter", 4 * DEPTH, 4 * DEPTH * s)
        add("tp", "all_reduce", 1, 4 * (DEPTH * BLOCK_REPLICAS + OTHER_REPLICAS))  # gradients of replicas, all at once
    elif tp > 1:
        add("tp", "all_reduce", 4 * DEPTH, 4 * DEPTH * s)
    if cp > 1 and ulysses:
        add("cp", "all_to_all", 4 * DEPTH, 8 * DEPTH * q)
    elif cp > 1:
        add("cp", "all_gather", DEPTH, DEPTH * 2 * cp * q)
        add("cp", "reduce_scatter", DEPTH, DEPTH * 2 * cp * q)
    if tp > 1:
        add("tp", "all_reduce", 1, 4)  # the norm of the slices
    model = "tp-cp" if tp > 1 and cp > 1 else "cp" if cp > 1 else "tp"
    tokens = {"tp-cp": "tp-cp" if sequence_parallel else "cp", "tp": "tp" if sequence_parallel else None, "cp": "cp"}
    if tokens.get(model):
        add(tokens[model], "all_reduce", 1, 2 * BATCH * 4)  # the loss: two sums for each sample, in float32
    if amp == "fp16":
        add(model, "all_reduce", 1, 4)  # whether a gradient overflowed
    return +found


@pytest.mark.parametrize("amp", ["none", at_night("bf16"), "fp16"])
@pytest.mark.parametrize(
    "tp, cp, sequence_parallel, regather, ulysses",
    [
        (1, 1, False, False, False),
        (4, 1, False, False, False),
        (4, 1, True, False, False),
        (4, 1, True, True, False),
        (1, 4, False, False, False),
        (1, 4, False, False, True),
        (2, 2, True, False, False),
        (2, 2, False, False, True),
        (2, 2, True, True, True),
    ],
)
def test_a_step_sends_what_the_formulas_say(tmp_path, tp, cp, sequence_parallel, regather, ulysses, amp):
    flags = ["--tensor_parallel", str(tp), "--context_parallel", str(cp), "--local_batch_size", str(BATCH)]
    flags += ["--amp_mode", amp, "--cp_attention", "ulysses" if ulysses else "gather"]
    flags += ["--sequence_parallel" if sequence_parallel else "--no_sequence_parallel"]
    flags += ["--sp_regather"] if regather else []
    found = simulate(2, tiny_flags(tmp_path, *flags))
    counted = {(key, what): n for what in ("count", "bytes") for key, n in found[what].items() if key[:5] != "dp-cp"}
    assert counted == expected(tp, cp, sequence_parallel, regather, ulysses, amp)
    if tp == 1:
        assert found["parameters"] == DEPTH * (12 * DIM**2 + 13 * DIM) + OTHER_REPLICAS


@pytest.mark.parametrize("groups", [1, 2])
def test_gathering_again_sends_half_as_much_again_and_keeps_less(tmp_path, groups):
    flags = tiny_flags(tmp_path, "--context_parallel=4", "--local_batch_size", str(BATCH), "--no_residual")
    before, found = simulate(1, flags), simulate(1, [*flags, "--cp_regather", f"--cp_head_groups={groups}"])
    own = 2 * BATCH * TOKENS // 4 * DIM * 4  # bytes of a rank's k and v
    assert before["bytes"]["cp all_gather"] == DEPTH * 4 * own
    assert found["bytes"]["cp all_gather"] == 2 * before["bytes"]["cp all_gather"]
    assert found["bytes"]["cp reduce_scatter"] == before["bytes"]["cp reduce_scatter"]
    assert found["count"]["cp all_gather"] == 2 * groups * DEPTH
    assert found["flops"] == before["flops"]  # attention is not computed again
    kept = before["after_forward"]["Activation"] - found["after_forward"]["Activation"]
    joined = (groups > 1) * own / 2  # the groups' results, as one
    assert kept == DEPTH * (3 * own - joined)  # (of 4 own, the shard is kept)


def test_gathering_again_for_the_formula_keeps_no_table(tmp_path):
    """Attention of plain products is computed again, with what is gathered for it."""
    flags = tiny_flags(tmp_path, "--context_parallel=4", "--attention=math", "--dropout=0.1")
    before, found = simulate(1, flags), simulate(1, [*flags, "--cp_regather"])
    table = 8 * 4 * TOKENS**2 // 4 * 4  # bytes of 4 heads' weights, for the batch
    kept = before["after_forward"]["Activation"] - found["after_forward"]["Activation"]
    assert kept > DEPTH * table
    assert found["flops"]["forward product"] == before["flops"]["forward product"]
    assert found["flops"]["backward product"] > before["flops"]["backward product"]


def test_groups_of_heads_are_gathered_in_time(tmp_path):
    """Each while the one before is computed; where they are gathered again, in their turn: one is whole at a time."""
    shape = ["--img_size", "64", "128", "--embed_dim=64", "--num_heads=8", "--depth=1", "--local_batch_size=1"]
    flags = tiny_flags(tmp_path, *shape, "--context_parallel=8")

    def order(*more):
        operations = trace(1, [*flags, "--cp_head_groups=8", *more], memory=False).operations
        kinds = [(op.kind, op.axes) for op in operations if op.phase == "forward"]
        return ["attend" if kind == "attention" else "gather" for kind, axes in kinds if kind == "attention" or axes]

    assert order()[:16] == ["gather"] + 7 * ["gather", "attend"] + ["attend"]
    assert order("--cp_regather")[:16] == 8 * ["gather", "attend"]
    peaks = [sum(trace(1, [*flags, "--cp_regather", f"--cp_head_groups={n}"]).peak.values()) for n in (1, 8)]
    assert peaks[0] - peaks[1] > 0.5 * 2 * 512 * 64 * 4  # of the bytes of k and v of all heads


@pytest.mark.parametrize("amp", ["none", at_night("bf16")])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("tp, cp", [at_night(1, 2), at_night(1, 4), (2, 2)])
def test_borders_cost_what_the_formula_says(tmp_path, tp, cp, steps, amp):
    """Rank 0 has the northernmost rows: a border of `overlap` rows, which 2 shards send to each other.

    With kept means each step sums a number for each sample, forwards and backwards.
    """
    common = ["--tensor_parallel", str(tp), "--context_parallel", str(cp), "--local_batch_size", str(BATCH)]
    common += ["--amp_mode", amp, "--rollout_steps", str(steps), "--conserve_mean", "ch1"]
    found, without = (simulate(1, tiny_flags(tmp_path, *common, "--patch_overlap", str(overlap))) for overlap in (2, 0))
    group = "tp-cp" if tp > 1 else "cp"
    border = BATCH * 3 * 2 * 32  # C_out channels, 2 rows of 32 columns
    half = 4 if amp == "none" else 2
    exchanged = 2 * steps * border * half + 2 * (steps - 1) * border * 4  # forecasts are float32
    assert found["count"][f"{group} all_to_all"] == 2 * steps + 2 * (steps - 1)
    assert found["bytes"][f"{group} all_to_all"] == exchanged
    sums = 2 * steps * BATCH * 4 + 2 * steps * BATCH * 4  # two of each sample for the loss, one each way for the mean
    for kind in ("count", "bytes"):
        assert f"{group} all_to_all" not in without[kind]
        assert found[kind][f"{group} all_reduce"] == without[kind][f"{group} all_reduce"]
    assert found["bytes"][f"{group} all_reduce"] == sums


@pytest.mark.parametrize("cp", [1, 2])
def test_ddp_sends_each_gradient_once_a_step_over_dp_cp(tmp_path, cp, monkeypatch):
    """With two parts of the batch: the first one waits."""
    monkeypatch.setattr(train, "settle_buckets", lambda model: model)  # the fake ranks do not answer
    flags = ["--tensor_parallel", "2", "--context_parallel", str(cp), "--accumulation_steps", "2"]
    config = load_config(tiny_flags(tmp_path, *flags), chapter=2)[0].with_batches(2)
    join_fake(4 * cp)
    try:
        grid = Grid(4 * cp, 0, tp=2, cp=cp)
        grid.create_groups()
        shard = shard_tokens(config, grid)
        serial = ViT((16, 32), 4, 3, 3, DIM, DEPTH, 4)
        model = parallelize(serial, config, grid, shard, torch.device("cpu"))
        parallel, sent = data_parallel(model, config, grid.get_group("dp-cp")), []
        assert (
            dist.get_process_group_ranks(parallel.process_group) == grid.get_ranks("dp-cp") and len(model.blocks) == 2
        )

        def hook(_, bucket):
            sent.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        parallel.register_comm_hook(None, hook)
        gradients = TensorParallelGradients(model, grid, is_sequence_parallel(config, grid))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        serial_step = partial(forward_backward, parallel, scaler=scaler, config=config)
        distance = partial(relative_l2, **share_loss(config, grid, shard, torch.device("cpu")))
        step = make_step(serial_step, grid, gradients, distance)
        for _ in range(2):
            sent.clear()
            inp, target = torch.randn(2, 4, 3, *shard.shape)
            step(inp, target[None], inp.new_empty(0, 4, 0, *shard.shape))
            assert sum(sent) == sum(p.numel() for p in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.nightly
def test_sequence_parallelism_keeps_a_third_of_the_activations(tmp_path):
    """At full size: what chapter 2 says, and its record."""
    record = json.loads((ROOT / "benchmarks/results/simulate.json").read_text())
    held = {}
    for name in ("one rank", "tp 4"):
        found = simulate(*GRIDS[name])
        assert found["peak"] == pytest.approx(record["grids"][name]["peak"], rel=0.01)
        held[name] = found["after_forward"]["Activation"]
    assert held["tp 4"] <= 0.36 * held["one rank"]


def test_the_moving_average_is_counted(tmp_path):
    without, found = (
        simulate(1, tiny_flags(tmp_path, "--tensor_parallel=2", *more)) for more in ([], ["--ema_decay=0.9"])
    )
    assert found["peak"] - without["peak"] == 4 * found["parameters"]


def test_a_gpus_kernel_is_simulated_where_there_is_no_gpu(tmp_path):
    """The doctor asks, for a run with --attention cudnn. Fused kernels keep no table, with dropout neither."""
    held = [
        simulate(1, tiny_flags(tmp_path, "--attention", kernel, "--dropout", "0.1"))["peak"]
        for kernel in ("cudnn", "efficient", "flash", "math")
    ]
    assert held[0] == held[1] == held[2] < held[3]


def saved_bytes(model, config):
    """The bytes that a forward pass keeps for the backward, each storage once."""
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    device = torch.device("cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), train.autocast(config, device):
        model(torch.randn(2, 3, *config.img_size)).sum()
    return sum(kept.values())


@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_a_rank_alone_holds_what_chapter_1_holds(tmp_path, amp):
    """No copy of k and v, or of anything else, where there is nobody to share with."""
    config = load_config(tiny_flags(tmp_path, "--amp_mode", amp))[0].with_batches(1)
    fields, grid = Fields.blank(config), Grid(1, 0)
    serial = saved_bytes(train.build_model(config, fields), config)
    with group_of_one():
        grid.create_groups()
        shard = shard_tokens(config, grid)
        model = parallelize(train.build_model(config, fields), config, grid, shard, torch.device("cpu"))
        assert saved_bytes(model, config) == serial


@pytest.mark.parametrize("name", ["Adafactor", "Adam8bit"])
def test_an_optimiser_that_keeps_less_is_simulated_as_adam(name):
    flags = ["--config=base", "--depth=1", "--local_batch_size=1", "--img_size", "32", "64"]
    assert simulate(1, [*flags, f"--optimizer={name}"])["peak"] == simulate(1, flags)["peak"]
