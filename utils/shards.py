"""Tensors that data parallel ranks share out, as PyTorch's fully_shard makes them (`--shard`)."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def own(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor, all of one that is not shared out: changed in place, the tensor changes."""
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()


def whole(x: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks, which call this together."""
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def part_of(x: Tensor) -> tuple[int, int]:
    """Return the dim along which a tensor is shared out, and where this rank's part begins; 0 and 0 where it is not.

    Parts are those of `torch.chunk`: all as large as the first, but the last ones.
    """
    if not isinstance(x, DTensor):
        return 0, 0
    (placement,) = x.placements
    rows, ranks = x.shape[placement.dim], x.device_mesh.size()
    return placement.dim, min(-(-rows // ranks) * x.device_mesh.get_local_rank(), rows)
