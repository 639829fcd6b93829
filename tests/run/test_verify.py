"""Ranks that should hold the same weights: a flipped bit on one of them is found, and that rank is named."""

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
import train_mp
from distributed.helpers import sum_in_order
from tests.helpers import losses, run_folder, run_here, run_ranks, tiny_flags
from tests.marks import at_night
from utils.checkpoint import store as checkpoint
from utils.observers import Observer
from utils.run.run import Run
from utils.run.verify import Verifier, sum_of_bits

FLAGS = ("--num_iters=12", "--limit_nsamples=12", "--global_batch_size=6", "--keep_checkpoints=99")
# script, the name of its folder, flags; the rank that will be wrong, and those that hold the same
GRIDS = {
    "dp 3": ("train", "3GPU", [], 2, [0, 1]),
    "dp 2": ("train", "2GPU", [], 1, [0]),
    "tp 2 x dp 2": ("train_mp", "2MP", ["--tensor_parallel=2"], 3, [1]),
    "cp 4": ("train_mp", "4MP", ["--context_parallel=4"], 1, [0, 2, 3]),
}
IN_ORDER = {f"tp 4 x dp 2{also}": ["--tensor_parallel=4", *flags] for also, flags in {
    "": [], ", clipped": ["--clip_grad_norm=1e-3"], ", plain": ["--no_sequence_parallel", "--clip_grad_norm=1e-3"],
}.items()}  # fmt: skip


@dataclass
class Flip(Observer):
    """Flips a bit of a number that one rank holds, after an iteration: the last one could be rounded away in a step."""

    rank: int
    iteration: int
    name: str = "model.blocks.1.mlp.fc1.weight"

    def begin(self, run: Run) -> None:
        self.run = run

    def after_step(self, iteration: int, left: int) -> None:
        if self.run.job.world.rank == self.rank and iteration == self.iteration:
            self.run.state.tensors()[self.name].view(torch.int32).view(-1)[5] ^= 1 << 12


def trained(script: str, argv: list[str], faults: list[Observer]) -> None:
    """Train on one of several ranks."""
    module = {"train": train, "train_mp": train_mp}[script]
    module.start(partial(module.main, observers=faults), argv, partial(module.load_config, chapter=3))


def run_all(tiny: Path, grid: str, number: str, faults: list[Observer], *flags: str) -> tuple[Path, list[int], str]:
    """Train on a grid; return the folder of the run, the exit codes, and what it said."""
    script, name, more, *_ = GRIDS[grid]
    argv = tiny_flags(tiny, *FLAGS, *more, f"--run_num={number}", *flags)
    done = run_ranks(4 if script == "train_mp" else int(name[0]), trained, script, argv, faults)
    folder = tiny / "runs/tiny" / name / number
    return folder, [one.returncode for one in done], (folder / "out.log").read_text() + done[0].stderr


MOST = "tp 2 x dp 2"  # the others at night


@pytest.mark.parametrize("grid", [MOST, *(at_night(x) for x in GRIDS if x != MOST)])
@pytest.mark.slow
def test_a_flipped_bit_on_one_rank_is_found_and_named(tiny, grid):
    """Within the number of steps that was asked for; and replicas that compute rightly agree to the last bit."""
    *_, wrong, others = GRIDS[grid]
    right, codes, _ = run_all(tiny, grid, "right", [], "--verify_every=1")
    plain, *_ = run_all(tiny, grid, "plain", [])
    assert not any(codes) and losses(right) == losses(plain)
    _, codes, said = run_all(tiny, grid, "wrong", [Flip(wrong, 7)], "--verify_every=3", "--checkpoint_every=None")
    assert set(codes) == {2} and "Traceback" not in said
    assert f"differ in {Flip.name} after 9 iterations, and agreed after 6" in said  # the next multiple of 3
    if len(others) > 1:
        assert f"rank {wrong} on " in said and f"the {len(others)} others that hold the same weights" in said
        assert "the former computed wrongly; leave that node out" in said
    else:
        first, second = sorted([*others, wrong])
        assert re.search(rf"rank {first} on \S+, rank {second} on \S+ differ", said)
        assert "one of them computed wrongly" in said


def trained_on_two_nodes(argv: list[str]) -> None:
    """Train on one of eight ranks, the last four of which add up in another order, as another node may."""
    add_up, further = dist.all_reduce, int(os.environ["RANK"]) >= 4

    def all_reduce(x: torch.Tensor, *args: object, **options: object) -> object:
        done = add_up(x, *args, **options)
        if further and x.is_floating_point() and "group" in options and options["group"].size() == 4:
            x.mul_(1 + 2**-22)
        return done

    with mock.patch.object(dist, "all_reduce", all_reduce):
        trained("train_mp", argv, [])


@pytest.mark.nightly
@pytest.mark.parametrize("grid", IN_ORDER)
def test_sums_over_tensor_parallel_ranks_have_the_same_bits_on_each_node(tiny, grid):
    """An all-reduce that adds up in another order there is no rank that computes wrongly."""
    argv = tiny_flags(tiny, *FLAGS, *IN_ORDER[grid], "--num_heads=4", "--global_batch_size=2", "--verify_every=1")
    for done in reversed(run_ranks(8, trained_on_two_nodes, argv)):
        assert done.returncode == 0, done.stderr[-2000:]


def summed(size: int) -> None:
    dist.init_process_group("gloo")
    x = torch.arange(size, dtype=torch.float64) + 100 * dist.get_rank()
    found = sum_in_order(x, dist.group.WORLD)
    assert found.tolist() == [3 * i + 300 for i in range(size)]
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_sums_in_order(size):
    for done in run_ranks(3, summed, size):
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", [Flip.name, "optimizer.pos_embed.exp_avg"])
def test_replicas_that_differ_are_not_saved(tiny, name):
    """They are compared before each checkpoint; the one before is there to go on from."""
    folder, codes, said = run_all(tiny, "dp 2", "00", [Flip(0, 7, name)], "--verify_every=100", "--checkpoint_every=2")
    assert set(codes) == {2} and "after 8 iterations, and agreed after 6" in said
    assert max(path.name for path in checkpoint.find(folder / "checkpoints")) == "00000006-validated"
    _, codes, said = run_all(tiny, "dp 2", "00", [], "--verify_every=1", "--checkpoint_every=2", "--resume=auto")
    assert not any(codes) and "Resumed after 6 iterations" in said and len(losses(folder)) == 12


@dataclass
class FlipInValidation(Flip):
    """The weights were compared after the same iteration."""

    def after_step(self, iteration: int, left: int) -> None:
        pass

    def after_validation_batch(self, iteration: int) -> None:
        super().after_step(iteration, 0)
        self.iteration = -1 if iteration == self.iteration else self.iteration  # once


@pytest.mark.parametrize("iteration, found", [(0, 1), (6, 6)])  # before the first step, and at the end of an epoch
def test_replicas_that_a_validation_changed_are_not_saved(tiny, iteration, found):
    flags = "--verify_every=1", "--checkpoint_every=2", "--validate_first"
    folder, codes, said = run_all(tiny, "dp 2", "00", [FlipInValidation(0, iteration)], *flags)
    assert set(codes) == {2} and f"after {found} iterations, and agreed after {iteration}" in said
    assert not [path for path in checkpoint.find(folder / "checkpoints") if path.name >= f"{iteration:08}-validated"]


@dataclass
class FlipForAMoment(Flip):
    """The bit is back when the sum is made."""

    def begin(self, run: Run) -> None:
        (verifier,) = (observer for observer in run.observers if isinstance(observer, Verifier))
        ask = verifier.ask

        def asked(iteration: int) -> None:
            super(FlipForAMoment, self).after_step(iteration, 0)
            ask(iteration)
            super(FlipForAMoment, self).after_step(iteration, 0)

        self.run, verifier.ask = run, asked

    def after_step(self, iteration: int, left: int) -> None:
        pass


def test_a_difference_that_is_gone_again_is_told(tiny):
    _, codes, said = run_all(tiny, "dp 3", "00", [FlipForAMoment(1, 6)], "--verify_every=3", "--checkpoint_every=None")
    assert set(codes) == {2} and "differed after 6 iterations, and agree again: one of them computed wrongly" in said


@dataclass
class FlipOnHost(Observer):
    """What one rank knows of the sums is wrong in one bit, once: that of rank 2, so nobody else sees it."""

    def begin(self, run: Run) -> None:
        (verifier,) = (observer for observer in run.observers if isinstance(observer, Verifier))
        ask = verifier.ask

        def asked(iteration: int) -> None:
            ask(iteration)
            if run.job.world.rank == 0 and iteration == 6:
                verifier.on_host[2] ^= 1

        verifier.ask = asked


def test_a_bit_of_what_is_compared(tiny):
    """It is read again: a rank that went its own way would wait for the others."""
    folder, codes, _ = run_all(tiny, "dp 3", "00", [FlipOnHost()], "--verify_every=3", "--checkpoint_every=None")
    assert not any(codes) and len(losses(folder)) == 12
    told = "rank 0 read sums of bits that were wrong for a moment: the memory of "
    assert (folder / "out.log").read_text().count(told) == 1


@pytest.mark.nightly
def test_where_there_is_no_replica_it_is_said(tiny):
    folder = run_here(tiny_flags(tiny, "--verify_every=1"))
    said = "verify_every compares nothing: no two ranks hold the same weights"
    assert said in (folder / "out.log").read_text()
    for more, script in (
        (["--noddp"], "train"),
        (["--shard=gradients"], "train_mp"),
        (["--tensor_parallel=2"], "train_mp"),
    ):
        argv = tiny_flags(tiny, *FLAGS, *more, "--verify_every=1")
        for done in run_ranks(2, trained, script, argv, []):
            assert done.returncode == 0, done.stderr
        name = "2GPU" if script == "train" else "2MP" if "tensor" in more[0] else "1MP"
        assert said in (run_folder(argv, name) / "out.log").read_text()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count, start", [(8, 0), (7, 0), (6, 1), (1, 3)])
def test_the_sum_of_bits_is_that_of_all_words(dtype, count, start):
    """Whatever their number, and wherever they begin; a flipped bit changes it."""
    whole = (100 * torch.randn(16, dtype=torch.float64)).to(dtype)
    x = whole[start : start + count]
    before = sum_of_bits(x)
    bits = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()])
    for i in range(count):
        for bit in (0, 3, 8 * x.element_size() - 2):
            bits[i] ^= 1 << bit
            assert sum_of_bits(x) != before
            bits[i] ^= 1 << bit
    assert sum_of_bits(x) == before
