"""Exercise: make the MLP of a transformer block tensor parallel. Fill in TODO 1 to 5; this tells what is next:

    python exercises/check.py exercises/tensor_parallel_mlp.py

The MLP is  y = gelu(x A^T + a) B^T + b.  Each of the ranks shall hold an equal part of the hidden units: some rows of A
and of a, and the same columns of B. All ranks get the same x and shall return the same y.

Think first: what does each rank's product with its columns of B lack? Which collective mends that? Then the backward
pass: each rank computes the gradient of x through its own hidden units only. `dist.all_reduce(t)` adds up t over all
ranks, in place; t must be contiguous, and is best a copy of what you were given. (Shoeybi et al. 2019, section 3. Our
own layers are in distributed/layers.py, a solution of this page in solutions/tensor_parallel_mlp.py.)
"""

import torch
import torch.distributed as dist  # noqa: F401 - you will need it
import torch.nn.functional as F  # noqa: F401
from torch import Tensor, nn


class Copy(torch.autograd.Function):
    """The mapping before the first layer: x goes into all ranks' slices."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise NotImplementedError("TODO 5: grad is this rank's part of the gradient of x")


class Reduce(torch.autograd.Function):
    """The mapping after the second layer: each rank has a part of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        raise NotImplementedError("TODO 3: return the whole sum")

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise NotImplementedError("TODO 4: every rank has the same grad already")


class ParallelMLP(nn.Module):
    """This rank's part of an MLP.

    Args:
        fc1, fc2: the layers of the whole MLP, `nn.Linear`, with the weights A [hidden, D] and B [D, hidden].
        rank, size: this rank, and how many there are; `size` divides the hidden units.
    """

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear, rank: int, size: int):
        super().__init__()
        # TODO 1: self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias: parameters with this rank's slices.
        # chunk() cuts, and clone() makes a tensor of its own. Which of the four is not cut?
        raise NotImplementedError("TODO 1: slice the weights")

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("TODO 2: Copy.apply, the two layers with a GELU between, Reduce.apply, the bias")
