"""Check a solution of the exercise: its ParallelMLP on 2 and on 4 ranks against the whole MLP, in float64.

    python docs/exercises/check.py docs/exercises/tensor_parallel_mlp.py

Prints what is right and, at the first thing that is not, what to think about. Exit code 0 if all is right.
"""

import copy
import importlib.util
import multiprocessing
import queue
import sys
import tempfile
from pathlib import Path
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


def load(path: str):
    """Return the ParallelMLP of the file at `path`."""
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ParallelMLP


def close(a, b) -> bool:
    return isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def check(path: str, rank: int, size: int) -> None:
    """Raise Wrong at the first thing that is not right."""
    sums, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sums.append(tensor)
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch("torch.distributed.all_reduce", counted):  # before the solution is loaded
        compare(load(path), rank, size, sums)


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
    print("all right: this MLP is the whole one, shared out")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".py") or not Path(sys.argv[1]).is_file():
        sys.exit("check.py: name the file of your solution, such as docs/exercises/tensor_parallel_mlp.py")
    sys.exit(main(sys.argv[1]))
