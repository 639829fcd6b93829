"""Adam shared out among data parallel ranks."""

import copy

import torch
from torch import nn

from exercises.checks.common import Wrong, close, load_counted, say

MINUTES, DEFINES, SIZES = 40, "OwnedAdam", (2, 4)
AFTER = "2-model-parallel.md#sharing-out-what-data-parallel-ranks-hold"
HINTS = """
Each rank owns a stretch of all numbers in a row; it alone keeps the moments of that stretch, and takes its step. So
it needs the mean gradient of its stretch only.

torch.cat of flattened tensors is the row. How many zeros make its length divide by size? -length % size.

row.chunk(size)[rank] is a view into the row: clone() makes a tensor of the rank's own.

reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG) gives each rank its part of the mean: no all-reduce.

After self.adam.step() each rank has new numbers of its own part alone: all_gather_into_tensor(row, part) collects
all, row.split(...) cuts, and p.data.copy_(x.view_as(p)) brings each home.
"""


def check(path: str, rank: int, size: int) -> None:
    """Three steps against Adam of the mean gradients on one process."""
    solution, calls = load_counted(path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))  # 32 numbers
    model.register_parameter("more", nn.Parameter(torch.randn(3)))  # 35: they do not divide
    whole = copy.deepcopy(model)
    reference, optimizer = (
        torch.optim.Adam(whole.parameters(), 0.1),
        solution.OwnedAdam(model.parameters(), 0.1, rank, size),
    )
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
