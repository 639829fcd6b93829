"""Collectives and their gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exercises.checks.common import Wrong, close, load_counted, say

MINUTES, DEFINES, SIZES = 30, "AllGather", (2, 4)
AFTER = "2-model-parallel.md#mappings-collectives-with-a-gradient"
HINTS = """
Reduce: y = x0 + x1, so a small change of x0 changes y, on all ranks, by the same. The gradient of x0 is that of y,
and each rank has it already. How many messages does that take?

all_reduce works in place, and autograd's tensor must stay as it is: send a clone, contiguous.

AllGather: a change of x1 changes what rank 0 computes and what rank 1 computes. Each knows its own part of the
gradient of all pieces. The parts must be added up, and the owner of a piece needs the sum for that piece alone.

Adding up and leaving each its piece is one collective: reduce_scatter_tensor.

Gather: all ranks compute the same, and that is one use. Each has the whole gradient of all pieces; of these it needs
its own. Adding up would count one use size times.
"""


@dataclass
class Case:
    """A mapping between two products: what is computed with it, and on one process."""

    name: str
    parallel: Callable[[Tensor], Tensor]  # of this rank's x: the loss as this rank sees it
    whole: Callable[[list[Tensor]], Tensor]  # of all ranks' x: the one loss
    output: Callable[[Tensor], Tensor]  # what the mapping returns
    expected: Tensor
    calls: tuple[list[str], list[str]]  # forward, backward


def check(path: str, rank: int, size: int) -> None:
    """Each mapping's output, then its gradient against that of the one loss on one process, then what it sends."""
    solution, calls = load_counted(path)
    torch.manual_seed(0)
    xs = list(torch.randn(size, 3, 2, 5).transpose(2, 3))  # not contiguous
    same, own = torch.randn(3, 5, 2), torch.randn(size, size * 3, 5, 2)  # weights: of all ranks, of each
    joined = torch.cat(xs)
    reduce = solution.Reduce.apply
    all_gather, gather = (lambda x, f=f: f.apply(x, rank, size) for f in (solution.AllGather, solution.Gather))
    cases = (
        Case(
            "Reduce", lambda x: (same * reduce(x)).square().sum(), lambda xs: (same * sum(xs)).square().sum(),
            reduce, sum(xs), (["all_reduce"], []),
        ),
        Case(
            "AllGather", lambda x: (own[rank] * all_gather(x)).square().sum(),
            lambda xs: sum((w * torch.cat(xs)).square().sum() for w in own), all_gather, joined,
            (["all_gather_into_tensor"], ["reduce_scatter_tensor"]),
        ),
        Case(
            "Gather", lambda x: (own[0] * gather(x)).square().sum(),
            lambda xs: (own[0] * torch.cat(xs)).square().sum(), gather, joined, (["all_gather_into_tensor"], []),
        ),
    )  # fmt: skip
    for case in cases:
        compare(case, xs, rank, size, calls)


def compare(case: Case, xs: list[Tensor], rank: int, size: int, calls: list[str]) -> None:
    x, name = xs[rank].contiguous(), case.name
    todo = {"Reduce": (1, 2), "AllGather": (3, 4), "Gather": (5, 6)}[name]
    out = case.output(x)
    if not torch.equal(x, xs[rank]):
        raise Wrong(f"{name} changes its input: collectives in place want a clone (TODO {todo[0]})")
    if not close(out, case.expected):
        told = (
            "nothing" if out is None else f"{list(out.shape)}" if out.shape != case.expected.shape else "other numbers"
        )
        raise Wrong(f"{name} returns {told}, where {list(case.expected.shape)} was expected (TODO {todo[0]})")
    case.output(xs[rank].float())  # not contiguous, and of another dtype than the default
    say(rank, f"{name}: the output")
    whole = [x.clone().requires_grad_() for x in xs]
    expected = torch.autograd.grad(case.whole(whole), whole)[rank]
    x = xs[rank].clone().requires_grad_()
    calls.clear()
    loss = case.parallel(x)
    forward = list(calls)
    loss.backward()
    check_gradient(name, x.grad, expected, case, size, todo[1])
    say(rank, f"{name}: the gradient is that of one loss")
    if (forward, calls[len(forward) :]) != case.calls:
        told = [", ".join(part) or "nothing" for part in (forward, calls[len(forward) :])]
        needed = [", ".join(part) or "nothing" for part in case.calls]
        raise Wrong(
            f"{name}: the numbers are right, but it sends more than it must. Forward {told[0]}, backward {told[1]}; "
            f"enough: forward {needed[0]}, backward {needed[1]} (TODO {todo[0]}, {todo[1]})"
        )
    say(rank, f"{name}: no message too many")


def check_gradient(name: str, found: Tensor | None, expected: Tensor, case: Case, size: int, todo: int) -> None:
    if found is None:
        raise Wrong(f"{name}: no gradient arrives at its input (TODO {todo})")
    if close(found, expected):
        return
    if close(found, size * expected):
        why = {
            "Reduce": "all ranks had the whole gradient, and it was added up once more",
            "AllGather": "what arrives at each rank is a part, and it was added up more than once",
            "Gather": "all ranks do the same, that is one use, and it was counted for each of them",
        }[name]
        raise Wrong(f"{name}: the gradient is {size} times too large: {why} (TODO {todo})")
    if close(size * found, expected):
        raise Wrong(f"{name}: the gradient is {size} times too small: a sum, and no mean (TODO {todo})")
    if name == "AllGather":
        raise Wrong(
            "AllGather: the gradient lacks what the other ranks' uses give, or is another rank's: each rank knows a "
            f"part of the gradient of all pieces (TODO {todo})"
        )
    raise Wrong(f"{name}: the gradient is not that of this rank's input: whose is it? (TODO {todo})")
