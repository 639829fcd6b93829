"""What training changes, as tensors of the same names and shapes on every grid of ranks.

    model.NAME                     a parameter
    ema.NAME                       its moving average, with --ema_decay
    optimizer.NAME.exp_avg ...     what the optimiser keeps for it
    random.cpu.RANK  random.cuda.RANK      generators of a rank, not moved to another grid
    random.NAME                    a generator that draws the same on all ranks

A parameter that holds several matrices, one below the other, is stored with these apart, [3, D, ...]: each is sliced by
itself. A rank of a tensor parallel group holds a slice of some tensors, and with `--shard` a part of that. It is handed
to torch.distributed.checkpoint with its place in the whole tensor (utils/checkpoint/boxes.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from utils.checkpoint import store as checkpoint
from utils.checkpoint.boxes import Boxes, Place
from utils.checkpoint.info import Unreachable, Unreadable
from utils.ema import MovingAverage
from utils.errors import Refused
from utils.optimizers import init_moments, kept_of
from utils.ranks.agree import first_message
from utils.shards import own, part_of


@dataclass(eq=False)
class TrainingState:
    """The weights, the optimiser and the random numbers of a run, on this rank. (A run keeps the scaler's state.)

    Raises Refused for a model that keeps more than parameters, such as running means: they would be lost.
    """

    model: nn.Module  # on this rank, before DDP wraps it
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema_decay: float | None = None  # of the moving average of the weights; None for none
    stacked: Mapping[str, int] = field(default_factory=dict)  # parameters that hold several matrices: how many
    shared_generators: Mapping[str, torch.Generator] = field(default_factory=dict)  # which draw the same on all ranks
    # The parameters that are cut over the tensor parallel ranks, with the dim, and the group of these ranks.
    slices: tuple[Mapping[nn.Parameter, int], dist.ProcessGroup | None] = ({}, None)

    def __post_init__(self):
        kept = self.model.state_dict()
        if buffer := next((name for name, _ in self.model.named_buffers() if name in kept), None):
            raise Refused(
                f"the model keeps {buffer}, a buffer, and checkpoints hold parameters only: register it with "
                f"persistent=False if it never changes; for a norm take one without running means (GroupNorm)"
            )
        self.average = None if self.ema_decay is None else MovingAverage(self.model, self.ema_decay)
        # As they are now: while weights are gathered, the model has others.
        self.parameters = dict(self.model.named_parameters())
        self.places = {name: self._place(name, p) for name, p in self.parameters.items()}
        self.host: dict[str, Tensor] = {}  # copies in the host's memory, allocated once

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, their average and optimiser, by name; views of what the model and the optimiser hold."""
        init_moments(self.optimizer)
        weights = {name: own(p) for name, p in self.parameters.items()}
        average = {}
        if self.average:
            weights, average = self.average.tensors()
        found = {f"model.{name}": x for name, x in weights.items()} | {f"ema.{name}": x for name, x in average.items()}
        for name, p in self.parameters.items():
            for key, value in kept_of(self.optimizer, p).items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    def copy_to_host(self) -> None:
        """Copy everything to the host. On a GPU the copy is launched, and not waited for: see `wait_for_copy`."""
        random = {name: generator.get_state() for name, generator in self.generators().items()}
        for name, x in {**self.tensors(), **random}.items():
            if name not in self.host:
                self.host[name] = host_memory(x, pin=x.is_cuda)
            self.host[name].copy_(x, non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def wait_for_copy(self) -> None:
        """Wait until the copies are on the host; any thread may call this."""
        if self.copied is not None:
            torch.cuda.set_device(self.copied.device)  # of this thread: the first GPU belongs to another rank
            self.copied.synchronize()

    def generators(self) -> dict[str, torch.Generator]:
        """Return the random number generators, by the names that their states have in a checkpoint."""
        found = {f"random.{name}": generator for name, generator in self.shared_generators.items()}
        found[f"random.cpu.{dist.get_rank()}"] = torch.default_generator
        if torch.cuda.is_initialized():
            found[f"random.cuda.{dist.get_rank()}"] = torch.cuda.default_generators[torch.cuda.current_device()]
        return found

    def shards(self) -> dict[str, Tensor]:
        """Return the host's copies as torch.distributed.checkpoint takes them: each with its place in the whole."""
        self.wait_for_copy()
        return {name: self._as_shard(name, x) for name, x in self.host.items()}

    def _place(self, name: str, p: nn.Parameter) -> Place:
        sliced, group = self.slices
        shared_dim, first = part_of(p)
        place = Place(tuple(p.shape), self.stacked.get(name, 1), shared_dim=shared_dim, first=first)
        if p in sliced:
            place = place._replace(dim=sliced[p], index=dist.get_rank(group), count=dist.get_world_size(group))
        return place

    def _as_shard(self, name: str, x: Tensor) -> Tensor:
        parameter = _parameter(name)
        p = self.parameters.get(parameter)
        if p is None or x.shape != own(p).shape:  # a generator; what an optimiser keeps in another shape
            return x
        place = self.places[parameter]
        if isinstance(p, DTensor) or place.count > 1:
            return Boxes(place.whole, place.boxes(x), x.dtype)
        return x.view(place.whole)

    def load(self, folder: Path, same_ranks: bool) -> None:
        """Set everything to what a checkpoint holds. Raises Unreadable, on all ranks; then nothing has changed.

        Args:
            same_ranks: each rank does what it did then, and goes on with its random numbers. On another grid a rank
                begins new ones.
        """
        self.copy_to_host()
        known, generators = self._metadata(folder), self.generators()
        there = known.state_dict_metadata
        restored = {f"random.{name}" for name in self.shared_generators} | (generators.keys() if same_ranks else set())
        # Of another kind of device a state has another size.
        restored = {name for name in restored if name in there and there[name].size == self.host[name].shape}
        shards = {n: x for n, x in self.shards().items() if n in restored or not n.startswith("random.")}
        checkpoint.load(folder, shards, known=known)
        for name, x in self.tensors().items():
            x.copy_(self.host[name])
        for name in restored:
            generators[name].set_state(self.host[name])

    def _metadata(self, folder: Path) -> Metadata:
        """Return what a checkpoint holds. Raises Unreadable, on all ranks."""
        error = known = None
        try:
            known = checkpoint.metadata(folder)
        except Unreadable as found:
            error = found
        for kind in (Unreachable, Unreadable):
            if told := first_message(str(error) if isinstance(error, kind) else None):
                raise kind(told)
        return known


def _parameter(name: str) -> str:
    """Return the name of the parameter that a tensor of a checkpoint belongs to."""
    kind, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if kind == "optimizer" else rest


def host_memory(x: Tensor, pin: bool) -> Tensor:
    """Return memory of the host for a copy of x: pinned, if asked to and possible, and nobody waits for the copy."""
    try:
        return torch.empty_like(x, device="cpu", pin_memory=pin)
    except RuntimeError:  # nodes limit how much can be pinned
        if not pin:
            raise
        return torch.empty_like(x, device="cpu")
