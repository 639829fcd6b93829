"""What loss and optimiser need to know of the grid: whole images, gradients, their norm, and overflows on any rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distributed.mappings import all_gather, all_to_all, reduce
from distributed.parallelize import find_borders
from utils.comm import Grid
from utils.config.settings import Config
from utils.data.token_shard import TokenShard
from utils.shards import own
from utils.spans import communication, span


def sliced_dims(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the parameters of which each tp rank holds a slice, with the dim that is cut; all others are replicas."""
    layers = (module for module in model.modules() if hasattr(module, "sliced"))
    return {getattr(layer, name): dim for layer in layers for name, dim in layer.sliced.items()}


def share_loss(config: Config, grid: Grid, shard: TokenShard, device: torch.device) -> dict[str, Callable]:
    """Return what brings the rest of an image into the loss of this rank's tokens: `total` and, if needed, `rows`.

    A norm is a root of sums over all tokens. Every rank has the loss of whole images, and the gradient of its part.
    """
    shared = {"total": partial(reduce, group=shard.group)}
    if config.loss_gradient and shard.shards > 1:
        shared["rows"] = find_borders(config, grid, shard.with_overlap(1), device).rows_of
    return shared


class TensorParallelGradients:
    """The gradients of a parallel model, after its backward pass and DDP's averaging.

    Communication over tp in each step: `norm` sums one number; `sync` the gradients of all replicas, once, where the
    tokens are sharded over tp.

    Args:
        in_order: add up in the order of the ranks, where data parallel replicas are compared to the last bit
            (`--verify_every`). An all-reduce adds up in an order that the library chooses by how it reaches the ranks:
            two tp groups, on two nodes, may differ.
    """

    def __init__(self, model: nn.Module, grid: Grid, tokens_over_tp: bool, in_order: bool = False):
        sharded = sliced_dims(model)
        self.is_sharded = [p in sharded for p in model.parameters()]
        self.replicas = [p for p in model.parameters() if p not in sharded] if tokens_over_tp else []
        self.group, self.owners = grid.get_group("tp"), grid.get_group("dp-cp")
        self.are_shared_out = isinstance(model, FSDPModule)
        self.in_order = in_order and self.group.size() > 2  # a + b is b + a

    @torch.no_grad()
    @communication
    def sync(self) -> None:
        """Add up the gradients of replicas over tp: each rank's tokens gave a part of them."""
        if self.replicas:
            grads = [own(p.grad) for p in self.replicas]
            flat = torch.cat([g.flatten() for g in grads])
            if self.in_order:
                flat = sum_in_order(flat, self.group)
            else:
                dist.all_reduce(flat, group=self.group)
            for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
                grad.copy_(part.view_as(grad))

    def norm(self, grads: list[Tensor]) -> Tensor:
        """Return the norm of the whole model's gradient; `grads` are in the order of the parameters."""
        replicas, shards = (
            nn.utils.get_total_norm([own(g) for g, s in zip(grads, self.is_sharded) if s == sharded]).square()
            for sharded in (False, True)
        )
        if self.are_shared_out:
            replicas, shards = reduce(torch.stack([replicas, shards]), self.owners)
        whole = sum_in_order(shards[None], self.group)[0] if self.in_order else reduce(shards, self.group)
        return (replicas + whole).sqrt()


def sum_in_order(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' vectors, with the same bits in any group: each rank adds up a part, all collect."""
    whole = nn.functional.pad(flat, (0, -len(flat) % group.size()))
    parts = all_to_all(whole.view(group.size(), -1), 0, 0, group)
    return all_gather(sum(parts), 0, group)[: len(flat)]


class GridScaler(torch.amp.GradScaler):
    """A GradScaler that skips a step on all ranks of a model if a gradient is not finite on one of them.

    Each tp rank sees only its slices. Without this, one rank would skip a step that the others take.

    PyTorch has no public place for this: `_unscale_grads_` is private. Where a version of PyTorch no longer calls it,
    the certificate's fp16 runs fail (tests/proofs/mutations/certificate.txt: "an overflow is not shared").

    Communication over `group` in each step: an all-reduce of one number.
    """

    def __init__(self, device: str, group: dist.ProcessGroup, **options: Any):
        super().__init__(device, **options)
        self.group = group

    def _unscale_grads_(self, *args, **kwargs) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        for overflow in found.values():
            with span("communication"):
                dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.group)
        return found
