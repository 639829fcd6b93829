"""What benchmarks/step.py counts: FLOPs, memory; and that saving memory changes no result."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import step
from benchmarks.harness.bench import REFERENCE, Bench
from benchmarks.harness.memory import LiveMemory, mlp_peak
from networks.vit import ViT

ON_CPU = [*REFERENCE, "--device=cpu"]
SMALL = [*ON_CPU, "--depth=2", "--local_batch_size=2"]


def test_flops_are_those_of_all_matrix_products():
    """The counter of PyTorch sees the plain formula of attention; SDPA on a CPU it does not see."""
    counted = {}
    for kernel in ("math", "auto"):
        bench = Bench([*SMALL, "--attention", kernel])
        with FlopCounterMode(display=False) as counter:
            bench.step(*bench.batch)
        counted[kernel] = counter.get_total_flops()
    assert counted["math"] == bench.flops()
    assert bench.flops() - counted["auto"] == 2 * 2 * 3 * 4 * 128**2 * 192
    assert Bench(ON_CPU).flops() / 8 == pytest.approx(2.58e9, rel=1e-3)


def test_parts_of_a_step_add_up_and_its_memory_is_that_of_its_tensors():
    bench = Bench([*SMALL, "--accumulation_steps=2"])
    times = bench.run_step()
    assert times["forward"] + times["backward"] + times["optimizer"] == pytest.approx(times["step"])
    assert min(times.values()) > 0
    memory = bench.memory()
    size = 4 * sum(p.numel() for p in bench.model.parameters())
    assert memory["weights"] == memory["gradients"] == size and memory["optimizer"] == pytest.approx(2 * size, rel=1e-3)
    assert memory["peak"] > 4 * size + memory["activations"]
    # In a block a token keeps the inputs of both norms and of the four matrices, q, k, v, and GELU's input.
    deeper = Bench([*SMALL, "--accumulation_steps=2", "--depth=3"]).memory()
    kept = 2 * 128 * 192 * 4 * (1 + 1 + 1 + 1 + 1 + 4 + 3 + 4)
    assert deeper["activations"] - memory["activations"] == pytest.approx(kept, rel=0.02)


def test_live_memory_counts_what_is_alive():
    x = torch.zeros(1000)
    with LiveMemory() as live:
        a = x + 1
        b = a.view(10, 100).t()  # a view is no new memory
        assert live.now == 4000
        c = (x * 2) * 3  # the product in the middle is dropped
        assert (live.now, live.peak) == (8000, 12000)
        del a, c
        assert live.now == 4000
        b.add_(1)
        del b
        assert (live.now, live.peak) == (0, 12000)


@pytest.mark.slow
def test_checkpoints_and_chunks_save_what_chapter_1_says():
    held = {}
    for flags in ((), ("--activation_checkpoint=block",), ("--activation_checkpoint=mlp",), ("--mlp_chunks=4",)):
        held[flags] = Bench([*ON_CPU, *flags]).memory()["activations"]
    plain, block, mlp, chunks = held.values()
    assert block <= 0.35 * plain and mlp <= 0.55 * plain and chunks <= 0.55 * plain
    for training in (False, True):
        assert mlp_peak(4, training) <= 0.4 * mlp_peak(1, training)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("savers", [dict(activation_checkpoint="block"), dict(activation_checkpoint="mlp"),
                                    dict(mlp_chunks=5), dict(activation_checkpoint="block", mlp_chunks=3)])  # fmt: skip
def test_saving_memory_changes_no_gradient(savers, dropout):
    """With dropout the second computation must draw the same numbers (chunks draw others than the whole: left out)."""
    if dropout and "mlp_chunks" in savers:
        savers = {"activation_checkpoint": "block"}
    results = []
    for more in ({}, savers):
        torch.manual_seed(0)
        model = ViT((16, 24), 4, 3, 2, 32, 3, 4, dropout=dropout, drop_path=dropout, **more).double()
        x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
        y = model(x)
        y.square().sum().backward()
        with torch.no_grad():
            validated = model.eval()(x)
        results.append([y, validated, *(p.grad for p in model.parameters())])
    for plain, saved in zip(*results):
        torch.testing.assert_close(plain, saved, rtol=1e-12, atol=1e-12 * plain.abs().max().item())


def test_each_round_has_a_peak_of_its_own(monkeypatch):
    """A run measures it once, a benchmark in each round: the machine may have slowed down."""
    monkeypatch.setattr(step, "STEPS", 1)
    (found,) = step.compare({"one": SMALL}).values()
    assert len(set(found["peaks"])) == step.ROUNDS == len(found["rounds"])
