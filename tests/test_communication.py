"""Communication, counted: collectives and bytes by group and step, held to the formulas in the layers' docstrings."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.simulate import join_fake, simulate
from networks.vit import ViT
from tests.helpers import tiny_flags

DEPTH, DIM, BATCH, TOKENS = 2, 32, 3, 32  # of the tiny model below
BLOCK_REPLICAS = 6 * DIM  # two norms, the biases of proj and fc2
OTHER_REPLICAS = (3 * 16 * DIM + DIM) + TOKENS * DIM + 2 * DIM + 3 * 16 * DIM  # embedding, positions, norm, head


def expected(tp, cp, sequence_parallel, regather, ulysses, bytes_of_a_number):
    """The docstrings of distributed/layers.py and helpers.py, as arithmetic: {group and kind: (count, bytes)}."""
    s = BATCH * (TOKENS // cp) * DIM * bytes_of_a_number
    q = s // tp
    found = {}
    if tp > 1 and sequence_parallel:
        gathers = 6 if regather else 4  # forward: qkv, fc1. Backward: proj, fc2 and, where asked for, qkv, fc1 again
        found["tp all_gather"] = (gathers * DEPTH, gathers * DEPTH * s)
        found["tp reduce_scatter"] = (4 * DEPTH, 4 * DEPTH * s)
        replicas = 4 * (DEPTH * BLOCK_REPLICAS + OTHER_REPLICAS)
        found["tp all_reduce"] = (2, replicas + 4)  # gradients of the replicas, all at once, and a norm
    elif tp > 1:
        found["tp all_reduce"] = (4 * DEPTH + 1, 4 * DEPTH * s + 4)
    if cp > 1 and ulysses:
        found["cp all_to_all"] = (4 * DEPTH, 8 * DEPTH * q)
    elif cp > 1:
        found["cp all_gather"] = found["cp reduce_scatter"] = (DEPTH, DEPTH * 2 * cp * q)
    loss = (1, 2 * BATCH * 4)  # two sums for each sample, in float32
    if tp > 1 and cp > 1 and sequence_parallel:
        found["tp-cp all_reduce"] = loss
    elif cp > 1:
        found["cp all_reduce"] = loss
    elif tp > 1 and sequence_parallel:
        count, size = found["tp all_reduce"]  # with cp 1, tp-cp is the group of tp
        found["tp all_reduce"] = (count + loss[0], size + loss[1])
    return found


@pytest.mark.parametrize("amp", ["none", "bf16"])
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
    per_group = {key: (n, found["bytes"][key]) for key, n in found["count"].items()}
    assert per_group == expected(tp, cp, sequence_parallel, regather, ulysses, 4 if amp == "none" else 2)
    if tp == 1:
        assert found["parameters"] == DEPTH * (12 * DIM**2 + 13 * DIM) + OTHER_REPLICAS


def test_data_parallelism_sends_each_gradient_once():
    join_fake(4)
    try:
        model = ViT((16, 32), 4, 3, 3, DIM, DEPTH, 4)
        parallel, sent = DistributedDataParallel(model), []

        def hook(state, bucket):
            sent.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        parallel.register_comm_hook(None, hook)
        parallel(torch.randn(2, 3, 16, 32)).sum().backward()
        assert sum(sent) == sum(p.numel() for p in model.parameters())
    finally:
        dist.destroy_process_group()
