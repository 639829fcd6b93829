"""A solution of collective_gradients.py:

python exercises/check.py exercises/solutions/collective_gradients.py
"""

import torch
import torch.distributed as dist
from torch import Tensor


def joined(x: Tensor, size: int) -> Tensor:
    whole = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


class Reduce(torch.autograd.Function):
    """Parts of a sum, added up: all ranks have the same then, and do the same."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class AllGather(torch.autograd.Function):
    """Pieces [n, ...], joined to [size * n, ...]; each rank uses them in a way of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, rank: int, size: int) -> Tensor:
        ctx.size = size
        return joined(x, size)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        own = grad.new_empty(grad.shape[0] // ctx.size, *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous())
        return own, None, None


class Gather(torch.autograd.Function):
    """Pieces [n, ...], joined to [size * n, ...]; all ranks do the same with them."""

    @staticmethod
    def forward(ctx, x: Tensor, rank: int, size: int) -> Tensor:
        ctx.rank, ctx.size = rank, size
        return joined(x, size)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.size)[ctx.rank], None, None
