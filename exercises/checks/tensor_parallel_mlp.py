"""The MLP of a transformer block, tensor parallel."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from exercises.checks.common import Wrong, close, load_counted, say

MINUTES, DEFINES, SIZES = 45, "ParallelMLP", (2, 4)
AFTER = "2-model-parallel.md#tensor-parallelism-splitting-weights"
HINTS = """
A unit of the hidden layer is a row of `A` (fc1.weight), an entry of `a` (fc1.bias), and a column of `B` (fc2.weight).
`b` belongs to the outputs: all ranks have it.

Each rank's product with its columns of `B` is one part of a sum over all hidden units. What adds parts up?

After the sum all ranks compute the same with the same numbers. So the gradient that arrives at Reduce is whole on
each rank, and it is the gradient of each part as well.

Copy: each rank used x with weights of its own, and knows the gradient through these alone. The whole is the sum.

`b` is added once, behind the sum: in front of it, it would be there once for each rank.
"""
DIM, HIDDEN = 8, 16
# name of the parameter, dim that is cut (None: not cut)
SLICES = {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1, "fc2_bias": None}


def check(path: str, rank: int, size: int) -> None:
    """Output, gradients and collectives against the whole MLP on one process."""
    solution, sums = load_counted(path)
    torch.manual_seed(0)
    fc1, fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
    x, g = torch.randn(2, 3, 5, DIM)  # B N D, and the gradient of the output
    g = g.transpose(0, 1).contiguous().transpose(0, 1)  # gradients are not always contiguous
    whole_x, x = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole_y = fc2(F.gelu(fc1(whole_x)))
    whole_y.backward(g)

    model = solution.ParallelMLP(copy.deepcopy(fc1), copy.deepcopy(fc2), rank, size)
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
