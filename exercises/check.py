"""Check a solution of an exercise on 2 and on 4 ranks, in float64.

    python docs/exercises/check.py docs/exercises/tensor_parallel_mlp.py    its ParallelMLP against the whole MLP
    python docs/exercises/check.py docs/exercises/owned_adam.py             its OwnedAdam against Adam of mean gradients

Prints what is right and, at the first thing that is not, what to think about. Exit code 0 if all is right.
"""

import contextlib
import copy
import importlib.util
import multiprocessing
import queue
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STARTING, CHECKING = 600, 60  # s: all ranks of one size together
DIM, HIDDEN = 8, 16
# name of the parameter, dim that is cut (None: not cut)
SLICES = {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1, "fc2_bias": None}


class Wrong(Exception):
    """What is not right yet."""


def load(path: str) -> ModuleType:
    """Return the file at `path` as a module."""
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(a, b) -> bool:
    return isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def check(path: str, rank: int, size: int) -> None:
    """Raise Wrong at the first thing that is not right."""
    calls: list[str] = []

    def counted(name: str):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:  # before the solution is loaded
        for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
            patches.enter_context(mock.patch(f"torch.distributed.{name}", counted(name)))
        solution = load(path)
        if hasattr(solution, "OwnedAdam"):
            compare_adam(solution.OwnedAdam, rank, size, calls)
        elif hasattr(solution, "ParallelMLP"):
            compare(solution.ParallelMLP, rank, size, calls)
        else:
            raise Wrong(f"{path} has neither a ParallelMLP nor an OwnedAdam: begin with the file of an exercise")


def compare_adam(owned_adam: type, rank: int, size: int, calls: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))  # 32 numbers
    model.register_parameter("more", nn.Parameter(torch.randn(3)))  # 35: they do not divide
    whole = copy.deepcopy(model)
    reference, optimizer = torch.optim.Adam(whole.parameters(), 0.1), owned_adam(model.parameters(), 0.1, rank, size)
    before = [p.detach().clone() for p in model.parameters()]
    check_part(optimizer.own.detach(), torch.cat([p.flatten() for p in before]), rank, size)
    data = torch.randn(3, size, 4, 3)  # of three steps, each rank's samples
    for step, batches in enumerate(data):
        gradients = []
        for batch in batches:
            gradients.append(torch.autograd.grad(loss_of(whole, batch), list(whole.parameters())))
        for p, *of_ranks in zip(whole.parameters(), *gradients):
            p.grad = torch.stack(of_ranks).mean(0)
        model.zero_grad(set_to_none=True)
        loss_of(model, batches[rank]).backward()
        calls.clear()
        optimizer.step()
        if step == 0:
            check_owner(optimizer, whole, rank, size, calls)
        reference.step()
        if all(torch.equal(p, x) for p, x in zip(model.parameters(), before)):
            raise Wrong("the parameters are what they were: what the owners computed must come back to all (TODO 4)")
        for (name, p), expected in zip(model.named_parameters(), whole.parameters()):
            if not close(p.detach(), expected.detach()):
                raise Wrong(f"after step {step + 1}, {name} is not what Adam makes of the mean gradients (TODO 4)")
    say(rank, "three steps are those of Adam on one process")


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).square().mean() + 1) * (model.more.square().sum() + 1)


def part_of(row: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return torch.cat([row, row.new_zeros(-len(row) % size)]).chunk(size)[rank]


def check_part(own: torch.Tensor, row: torch.Tensor, rank: int, size: int) -> None:
    expected = part_of(row, rank, size)
    if own.numel() > expected.numel():
        raise Wrong(
            f"a rank owns {own.numel()} numbers of {len(row)}, and {expected.numel()} are its part (TODO 1 and 2)"
        )
    if not close(own, expected):
        raise Wrong("what a rank owns is not its stretch of the row: rank 0 has the first, and so on (TODO 2)")
    say(rank, "each rank owns its part, and so the moments of that")


def check_owner(optimizer, whole: nn.Module, rank: int, size: int, calls: list[str]) -> None:
    expected = part_of(torch.cat([p.grad.flatten() for p in whole.parameters()]), rank, size)
    grad = optimizer.own.grad
    if grad is None:
        raise Wrong("self.own has no gradient: its step changes nothing (TODO 3)")
    if close(grad, size * expected):
        raise Wrong(f"the gradient is {size} times the mean: a sum; Adam hides that, the next reader does not (TODO 3)")
    if not close(grad, expected):
        raise Wrong("the gradient is not the mean over the ranks of this rank's part (TODO 3)")
    say(rank, "its gradient is the mean over the ranks")
    if sorted(calls) != ["all_gather_into_tensor", "reduce_scatter_tensor"]:
        raise Wrong(f"a step calls {', '.join(calls) or 'nothing'}: one reduce-scatter and one all-gather are enough")
    say(rank, "one reduce-scatter, one all-gather")


def compare(parallel_mlp: type[nn.Module], rank: int, size: int, sums: list) -> None:
    torch.manual_seed(0)
    fc1, fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
    x, g = torch.randn(2, 3, 5, DIM)  # B N D, and the gradient of the output
    g = g.transpose(0, 1).contiguous().transpose(0, 1)  # gradients are not always contiguous
    whole_x, x = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole_y = fc2(F.gelu(fc1(whole_x)))
    whole_y.backward(g)

    model = parallel_mlp(copy.deepcopy(fc1), copy.deepcopy(fc2), rank, size)
    whole = {"fc1_weight": fc1.weight, "fc1_bias": fc1.bias, "fc2_weight": fc2.weight, "fc2_bias": fc2.bias}
    own = {n: p if SLICES[n] is None else p.chunk(size, SLICES[n])[rank] for n, p in whole.items()}
    for name, slice_ in own.items():
        found = dict(model.named_parameters()).get(name)
        if found is None:
            raise Wrong(f"there is no parameter {name}: is it an nn.Parameter, and its name as asked?")
        if not close(found, slice_):
            raise Wrong(
                f"{name} is {list(found.shape)} and not this rank's {list(slice_.shape)}: B is cut along its inputs, "
                f"the hidden units; A and a along their outputs; b not at all"
            )
    say(rank, "each rank holds its slices")

    y = model(x)
    if y is None:
        raise Wrong("forward returns nothing")
    if not close(y, whole_y):
        if close(y - (size - 1) * fc2.bias, whole_y):
            raise Wrong(f"y holds fc2's bias {size} times: add it once, after the sum over the ranks")
        if not sums:
            raise Wrong("y is a part of a sum: each rank has multiplied by its own hidden units only (TODO 3)")
        raise Wrong("y differs from that of the whole MLP: look at the order of the mappings and layers (TODO 2)")
    forward = len(sums)
    say(rank, "the output is that of the whole MLP")
    y.backward(g)
    if not close(x.grad, whole_x.grad):
        if x.grad is not None and close(x.grad / size, whole_x.grad):
            raise Wrong(f"the gradient of x is {size} times too large: it is summed twice (TODO 5 and TODO 4)")
        raise Wrong("the gradient of x lacks what the other ranks' hidden units give (TODO 5)")
    say(rank, "the gradient of the input is whole")
    for name, dim in SLICES.items():
        expected = whole[name].grad if dim is None else whole[name].grad.chunk(size, dim)[rank]
        found = model.get_parameter(name).grad
        if not close(found, expected):
            times = found is not None and close(found / size, expected)
            raise Wrong(
                f"the gradient of {name} is "
                + (f"{size} times too large: what arrives in Reduce's backward is whole (TODO 4)" if times else "wrong")
            )
    say(rank, "the gradients of the weights are right")
    if (forward, len(sums)) != (1, 2):
        raise Wrong(
            f"{forward} all-reduce(s) in the forward and {len(sums) - forward} in the backward: 1 and 1 are enough"
        )
    say(rank, "one all-reduce in the forward, one in the backward")


def say(rank: int, what: str) -> None:
    if rank == 0:
        print(f"  right: {what}", flush=True)


def run(path: str, rank: int, size: int, folder: str, verdicts) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of functions that PyTorch renames
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size)
    verdicts.put(None)  # it is here
    try:
        check(path, rank, size)
        verdict = None
    except (Wrong, NotImplementedError) as error:
        verdict = str(error)
    except BaseException as error:  # sys.exit in a solution as well
        verdict = f"{type(error).__name__}: {error}"
    verdicts.put(verdict)
    dist.destroy_process_group()


def on_ranks(path: str, size: int, folder: str) -> str | None:
    """Check on `size` ranks; return what is wrong on the first that says so, or None."""
    context = multiprocessing.get_context("spawn")
    verdicts = context.Queue()
    ranks = [context.Process(target=run, args=(path, r, size, folder, verdicts), daemon=True) for r in range(size)]
    for process in ranks:
        process.start()
    try:
        for seconds in [STARTING] * size + [CHECKING] * size:
            if wrong := verdicts.get(timeout=seconds):  # as they come: the others may wait for the one that failed
                return wrong
    except queue.Empty:
        return "the ranks wait for each other: do all of them call the same collectives, in the same order?"
    finally:
        for process in ranks:
            process.kill()


def main(path: str) -> int:
    for size in (2, 4):
        print(f"{size} ranks", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            wrong = on_ranks(path, size, folder)
        if wrong:
            print(f"  not yet: {wrong}")
            return 1
    print("all right: it is the whole one, shared out")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".py") or not Path(sys.argv[1]).is_file():
        sys.exit("check.py: name the file of your solution, such as docs/exercises/tensor_parallel_mlp.py")
    sys.exit(main(sys.argv[1]))
