"""What data parallel ranks would all hold, shared out among them: gradients and optimiser, or the weights, too.

Each rank owns a part of every parameter, and of its moments. Before a block runs, its weights are gathered; after its
backward pass gradients are reduced and scattered, so that each owner has the mean of its part, and takes Adam's step
for it. That is PyTorch's fully_shard (Zhao et al. 2023, PyTorch FSDP), an edition of ZeRO (Rajbhandari et al. 2020).
"""

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Shard

from networks.vit import ViT
from utils.comm import Grid
from utils.config.settings import Config

# PyTorch keeps a mesh for the life of a process and takes it for another of the same ranks and names: that of a run
# before, whose groups are gone. So each has a name of its own.
MESHES = itertools.count()


def share_out(model: ViT, config: Config, grid: Grid, device: torch.device, mesh: DeviceMesh | None = None) -> ViT:
    """Share out what `config.shard` says over dp-cp, in place, and return the model.

    `gradients` keeps a block's weights from its forward pass to its backward pass, so a step sends what
    DistributedDataParallel sends: an all-gather and a reduce-scatter are an all-reduce. `weights` gathers them once
    more in the backward pass: 1.5 times the bytes, and no rank holds more than the weights of some blocks, once this
    is done.

    Args:
        mesh: of the dp-cp group, where there is one already.

    Raises ValueError where the model is compiled as one.
    """
    if config.shard == "none" or grid.get_size("dp-cp") == 1:
        return model
    if "forward" in vars(model):
        raise ValueError(
            f"compile_modules takes the whole model as one, and shard {config.shard} gathers its weights block by "
            f"block: take --compile_modules Block"
        )
    mesh = mesh or mesh_of(grid.get_group("dp-cp"), device)
    keeps = config.shard == "gradients"
    cut = partial(_dim_to_cut, mesh.size())
    options = {"mesh": mesh, "reshard_after_forward": not keeps, "shard_placement_fn": cut}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.no_sync = Scattering(model, keeps).no_sync
    # It warns of outputs that are views, lest somebody changes them in place: nobody does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return model


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return a mesh of the ranks of a dp-cp group."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"dp-cp {next(MESHES)}",))


def _dim_to_cut(ranks: int, p: nn.Parameter) -> Shard | None:
    """Return the dim to cut: the first (None), but of [1, N, D] the last of those that divide evenly."""
    even = [dim for dim in range(1, p.ndim) if p.shape[dim] % ranks == 0]
    return Shard(even[-1]) if p.shape[0] == 1 and even else None


class Scattering:
    """When the gradients of a shared model are reduced and scattered: once a step, if weights are kept for it.

    Not in a pass under `no_sync`. In a forecast of several steps a block runs several times: where weights are kept,
    its gradients add up on this rank until the backward pass of its first run, which comes last. (By itself
    `fully_shard` scatters after each run. That holds less meanwhile, so it stays where weights are shared out, too.)
    """

    def __init__(self, model: ViT, keeps: bool):
        self.model, self.keeps, self.waits = model, keeps, False
        self.runs: Counter[nn.Module] | None = None  # of each block in this forward pass
        if keeps:
            model.register_forward_pre_hook(lambda *_: self._set_runs(Counter()))
            model.register_forward_hook(lambda *_: self._leave())
            for block in model.blocks:
                block.register_forward_hook(self._has_run)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add up whole gradients on this rank, as DDP's `no_sync` does, and send nothing."""
        self.waits = True
        self._scatter(self.model, False)
        try:
            yield
        finally:
            self.waits = False
            self._scatter(self.model, True)

    def _scatter(self, module: nn.Module, now: bool, recurse: bool = True) -> None:
        module.set_requires_gradient_sync(now, recurse=recurse)
        module.set_reshard_after_backward(now or not self.keeps, recurse=recurse)

    def _set_runs(self, runs: Counter | None) -> None:
        self.runs = runs

    def _leave(self) -> None:
        self.runs = None
        if torch.is_grad_enabled():
            return
        # No backward pass will drop the gathered weights. While they are there, `model.parameters()` are these, and
        # what changes the parts or their gradients, such as `zero_grad`, would miss them.
        for module in (*self.model.blocks, self.model):
            module.reshard()

    def _has_run(self, block: nn.Module, _: tuple, out: Tensor) -> None:
        if self.runs is None or not out.requires_grad or self.waits:  # None: it is computed again
            return
        self.runs[block] += 1
        if self.runs[block] == 1:
            out.register_hook(lambda _: self._scatter(block, True, recurse=False))
        else:
            self._scatter(block, False, recurse=False)
