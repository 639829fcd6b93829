"""Exercise: give collectives their gradients. Fill in TODO 1 to 6; this tells what is next:

    python exercises/check.py exercises/collective_gradients.py

There is one loss. The gradient of a tensor is the sum over all *different* uses of it, on all ranks; where all ranks do
the same with the same numbers, that is one use. Three mappings, by what the ranks do behind them:

    Reduce       each rank has a part of a sum; it is added up, and all ranks go on with the same
    AllGather    each rank has a piece; all get all pieces, and each uses them in a way of its own (other weights)
    Gather       the same forward, but behind it all ranks do the same

Think first, of two ranks and one number each. Reduce: y = x0 + x1, the loss is y^2. What is the gradient of x0, and
who knows it? AllGather: rank r has w_r, and the loss is w_0 (x0 + x1) + w_1 (x0 + x1). What does rank 0 know of the
gradient of x1? And with Gather, where all ranks have the same w, and the loss is w (x0 + x1)?

`dist.all_reduce(t)` adds up t over the ranks, in place. `dist.all_gather_into_tensor(whole, piece)` joins the pieces
along dim 0, `dist.reduce_scatter_tensor(piece, whole)` adds up and leaves each rank its piece of dim 0. Both write into
their first tensor, which you make with `x.new_empty(...)`: so it has the dtype and the device of x. All want contiguous
tensors (`x.contiguous()`). What backward needs, forward stores: `ctx.size = size`. (Korthikanti et al. 2022, section
4.2. Ours are in distributed/mappings.py.)
"""

import torch
import torch.distributed as dist  # noqa: F401 - you will need it
from torch import Tensor


class Reduce(torch.autograd.Function):
    """Parts of a sum, added up: all ranks have the same then, and do the same."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        raise NotImplementedError("TODO 1: the sum over the ranks; x itself must stay as it is")

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise NotImplementedError("TODO 2: grad is the gradient of the sum. All ranks have the same")


class AllGather(torch.autograd.Function):
    """Pieces [n, ...], joined to [size * n, ...]; each rank uses them in a way of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, rank: int, size: int) -> Tensor:
        raise NotImplementedError("TODO 3: all pieces, joined along dim 0")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        raise NotImplementedError("TODO 4: grad [size * n, ...] is what this rank's use gives to the pieces of all")
        # Return `..., None, None`: the numbers rank and size have no gradient.


class Gather(torch.autograd.Function):
    """Pieces [n, ...], joined to [size * n, ...]; all ranks do the same with them."""

    @staticmethod
    def forward(ctx, x: Tensor, rank: int, size: int) -> Tensor:
        raise NotImplementedError("TODO 5: as in AllGather")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        raise NotImplementedError("TODO 6: grad [size * n, ...] is whole already, and the same on all ranks")
