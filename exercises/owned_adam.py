"""Exercise: share Adam out among data parallel ranks. Fill in TODO 1 to 4; this tells what is next:

    python exercises/check.py exercises/owned_adam.py

All ranks hold the same parameters, and after the backward pass each has the gradient of its own samples. DDP would add
these up on all ranks, and all would take the same step. Here each rank owns a part, a stretch of all numbers in a row.

Think first: who needs the mean of which gradients? Which numbers must a rank have after the step that it has not
computed? `dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)` leaves on rank i the mean over the ranks of
the i-th part of `whole`; `dist.all_gather_into_tensor(whole, part)` is the way back. (Rajbhandari et al. 2020. Ours is
distributed/sharding.py, a solution of this page is solutions/owned_adam.py.)
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist  # noqa: F401 - you will need it
from torch import Tensor, nn


class OwnedAdam:
    """Adam, of which each rank does a part.

    Args:
        parameters: the same on all ranks.
        rank, size: this rank, and how many there are. The number of numbers need not divide by `size`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, rank: int, size: int):
        self.parameters, self.rank, self.size = list(parameters), rank, size
        self.own = nn.Parameter(self.part(self.in_a_row([p.detach() for p in self.parameters])))
        self.adam = torch.optim.Adam([self.own], lr)

    def in_a_row(self, tensors: list[Tensor]) -> Tensor:
        raise NotImplementedError("TODO 1: all numbers in a row, and zeros until the length divides by self.size")

    def part(self, row: Tensor) -> Tensor:
        raise NotImplementedError("TODO 2: this rank's part of the row, a tensor of its own")

    def step(self) -> None:
        raise NotImplementedError(
            "TODO 3: this rank's part of the mean of all gradients becomes self.own.grad; then self.adam.step()"
        )
        # TODO 4: gather all parts into a row, and give each of self.parameters its numbers: p.data.copy_(...).
        # A row splits with row.split([p.numel() for p in self.parameters] + [what was added]).
