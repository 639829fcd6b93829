"""The trace of a step without data: is it what ranks do? Held to the model's formulas, and to real ranks."""

import os
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import train
from benchmarks.harness.memory import LiveMemory
from benchmarks.planner.trace import Rank, join_fake, serial_model, trace
from benchmarks.proof.cases import EVERY, grids
from tests.distributed.test_communication import BATCH, DIM, TOKENS, expected
from tests.helpers import run_ranks, tiny_flags
from utils.comm import Grid
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.data.loss_weights import distance
from utils.measure.operations import Recorder, communication
from utils.ranks.start import join
from utils.ranks.world import find_world

CPU = torch.device("cpu")
EVERY_GRID = [grid for ranks in EVERY for grid in grids(ranks)]


def flags_of(grid):
    found = [f"--{name}={value}" for name, value in grid.items() if not isinstance(value, bool) and name != "dp"]
    return [*found, "--sequence_parallel" if grid["sequence_parallel"] else "--no_sequence_parallel"]


@pytest.mark.nightly
def test_every_grid_of_the_certificate(tmp_path):
    """Operations of the forward pass are those of `ViT.flops`, shared out; the backward pass takes twice as many.

    What is sent is what the docstrings of distributed/ say; over dp-cp each gradient goes once.
    """
    assert len(EVERY_GRID) == 88
    common = tiny_flags(tmp_path, "--num_heads=8", "--local_batch_size", str(BATCH))
    serial = serial_model(load_config(common)[0], Fields.blank(load_config(common)[0])).flops()
    patches = 2 * 2 * 3 * 16 * DIM  # FLOPs of a token in the embedding and the head
    for grid in EVERY_GRID:
        dp, tp, cp = grid["dp"], grid["tensor_parallel"], grid["context_parallel"]
        if grid["cp_attention"] == "ulysses" and 8 // tp % cp:
            continue
        found = trace(dp, [*common, *flags_of(grid)], memory=False)
        flops = found.flops()
        assert found.tokens == TOKENS // cp // (tp if grid["sequence_parallel"] else 1), grid
        own = (serial - TOKENS * patches) / (tp * cp) + found.tokens * patches
        forward = flops["forward", "product"] + flops["forward", "attention"]
        assert forward == BATCH * own, grid
        embedding = BATCH * found.tokens * patches / 2  # its input needs no gradient
        assert flops["backward", "product"] == 2 * flops["forward", "product"] - embedding, grid
        assert flops["backward", "attention"] == 2.5 * flops["forward", "attention"], grid
        count, size = communication(found.operations)
        gradients = size.pop(("dp-cp", "all_reduce"), 0)
        assert gradients == (4 * found.parameters if dp * cp > 1 else 0), grid
        count.pop(("dp-cp", "all_reduce"), 0)
        told = {(f"{axes} {kind}", "count"): n for (axes, kind), n in count.items()}
        told |= {(f"{axes} {kind}", "bytes"): n for (axes, kind), n in size.items()}
        ulysses = grid["cp_attention"] == "ulysses"
        assert told == expected(tp, cp, grid["sequence_parallel"], False, ulysses, "none"), grid


MODES = [
    [], ["--sp_regather", "--amp_mode=bf16"], ["--cp_attention=ulysses", "--mlp_chunks=2"],
    ["--cp_regather", "--cp_head_groups=2"],
    ["--activation_checkpoint=block", "--no_sequence_parallel", "--accumulation_steps=2"],
]  # fmt: skip


def signature(operations):
    """What can be compared: the number of operations of each kind, with what they compute, move and send.

    Inside DDP nobody can look. Gloo copies what it has reduced and scattered.
    """
    before = [None, *operations]
    return Counter(
        (op.kind, op.phase, op.module, op.name, op.dtype, op.read, op.written, op.flops, op.sizes, op.axes, op.sent)
        for op, last in zip(operations, before)
        if op.axes != "dp-cp" and not (op.name == "copy_" and last.name == "reduce_scatter")
    )


def on_real_ranks(folder):
    """Take steps of each mode on 4 ranks, with data; rank 0 compares them with the trace."""
    world = find_world(os.environ)
    join(world)
    real = []
    for mode in MODES:
        flags = tiny_flags(folder, "--tensor_parallel=2", "--context_parallel=2", "--local_batch_size=4", *mode)
        config, grid = load_config(flags, chapter=2)[0].with_batches(1), Grid(4, world.rank, 2, 2)
        grid.create_groups(config.longest_wait)
        rank = Rank(config, grid)
        held = (*rank.model.parameters(), *rank.model.buffers(), *rank.batch, rank.buckets.memory)
        with LiveMemory() as live:
            rank.step()
            live.peak = live.now
            rank.step()
        with rank.recorder:
            rank.step()
        real.append((flags, rank.recorder.operations, live.peak + sum(x.nbytes for x in held)))
    dist.destroy_process_group()
    if world.rank == 0:
        for flags, operations, peak in real:
            found = trace(1, flags)
            assert signature(operations) == signature(found.operations), flags
            assert sum(found.peak.values()) == pytest.approx(peak, rel=0.1), flags


@pytest.mark.nightly
def test_four_real_ranks_do_what_the_trace_says(tmp_path):
    for done in run_ranks(4, on_real_ranks, tmp_path):
        assert done.returncode == 0, done.stderr


def test_buckets_are_those_of_ddp(tmp_path):
    """Of parameters that fill several."""
    for done in run_ranks(2, on_two_ranks, tmp_path):
        assert done.returncode == 0, done.stderr


def on_two_ranks(folder):
    world = find_world(os.environ)
    join(world)
    flags = tiny_flags(folder, "--embed_dim=256", "--bucket_cap_mb=2", "--accumulation_steps=2")
    config, grid = load_config(flags, chapter=2)[0].with_batches(2), Grid(2, world.rank)
    grid.create_groups(config.longest_wait)
    rank, sent = Rank(config, grid), []
    with rank.recorder:
        rank.step()
    simulated = [op.sent for op in rank.recorder.operations if op.axes == "dp-cp"]
    for hook in rank.buckets.hooks:
        hook.remove()

    def count(_, bucket):
        sent.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    del rank.model.no_sync
    rank.model.zero_grad(set_to_none=True)
    parallel = train.data_parallel(rank.model, config, grid.get_group("dp-cp"))
    parallel.register_comm_hook(None, count)
    loss = distance(config, Fields.blank(config), rank.shard, CPU)
    train.forward_backward(parallel, *rank.batch, scaler=rank.scaler, config=config, distance=loss)
    assert len(simulated) > 3 and sent == simulated
    dist.destroy_process_group()


def test_operations_are_counted_as_they_move():
    with Recorder() as recorder:
        x = torch.ones(4, 8)  # 128 bytes
        x.view(8, 4).T[1:]  # a view
        x.add_(1)  # reads and writes
        torch.empty(4, 8).copy_(x[:1].expand(4, 8))  # reads a row
        torch._foreach_mul_([x], 2)  # returns nothing
        x @ x.T
        x.to(torch.bfloat16)
    found = [(op.name, op.read, op.written, op.flops, op.sizes) for op in recorder.operations]
    assert found == [
        ("ones", 0, 128, 0, ()), ("add_", 128, 128, 0, ()), ("copy_", 32, 128, 0, ()),
        ("_foreach_mul_", 128, 128, 0, ()), ("mm", 256, 64, 256, (1, 4, 8, 4)), ("_to_copy", 128, 64, 0, ()),
    ]  # fmt: skip
    assert {op.phase for op in recorder.operations} == {"forward"}


def test_what_is_not_known_is_not_left_out():
    """A group that nobody named, and a kind of collective that nobody knows."""
    join_fake(4)
    try:
        with pytest.raises(KeyError), Recorder():
            dist.all_reduce(torch.ones(2))
        with pytest.raises(KeyError), Recorder({dist.group.WORLD.group_name: "dp"}):
            dist.broadcast(torch.ones(2), 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.nightly
def test_16384_ranks_in_20_seconds():
    begin = time.perf_counter()
    found = trace(1024, ["--config=mp", "--local_batch_size=1", "--tensor_parallel=4", "--context_parallel=4"])
    assert found.summary()["ranks"] == 16384 and time.perf_counter() - begin < 20
