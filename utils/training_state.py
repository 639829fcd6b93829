"""What training changes, as tensors of the same names and shapes on every grid of ranks.

    model.NAME                     a parameter
    ema.NAME                       its moving average, with --ema_decay
    optimizer.NAME.exp_avg ...     what Adam keeps for it
    random.cpu.RANK  random.cuda.RANK  random.drop_path      generators; not moved to another grid, but for the last

A rank of a tensor parallel group holds a slice of some of them. It is handed to torch.distributed.checkpoint as part
of a DTensor, which knows where in the whole tensor the slice lies.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from utils import checkpoint
from utils.launch import first_message
from utils.moving_average import MovingAverage


class TrainingState:
    """The weights, the optimiser and the random numbers of a run, on this rank; the scaler goes along (utils/run.py).

    Args:
        model: the model on this rank, before DDP wraps it.
        sliced: parameters that are cut over the tensor parallel ranks, with the dim.
        group: these ranks.
        ema_decay: of the moving average of the weights; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        sliced: Mapping[nn.Parameter, int] | None = None,
        group: dist.ProcessGroup | None = None,
        ema_decay: float | None = None,
    ):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.group = group
        self.average = None if ema_decay is None else MovingAverage(model, ema_decay)
        self.sliced = {name: sliced[p] for name, p in model.named_parameters() if p in sliced} if sliced else {}
        self.mesh: DeviceMesh | None = None
        self.host: dict[str, Tensor] = {}  # copies in the host's memory, allocated once

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, their average and optimiser, by name; views of what the model and the optimiser hold."""
        init_moments(self.optimizer)
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        average = {}
        if self.average:
            weights, average = self.average.tensors()
        found = {f"model.{name}": x for name, x in weights.items()} | {f"ema.{name}": x for name, x in average.items()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state[p].items():
                found[f"optimizer.{name}.{key}"] = value
        return {name: x.unflatten(0, (3, -1)) if checkpoint.QKV in name and x.ndim else x for name, x in found.items()}

    def copy_to_host(self) -> None:
        """Copy everything to the host. On a GPU the copy is launched, and not waited for: see `wait_for_copy`."""
        for name, x in {**self.tensors(), **self.generators()}.items():
            if name not in self.host:
                self.host[name] = host_memory(x, pin=x.is_cuda)
            self.host[name].copy_(x, non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def wait_for_copy(self) -> None:
        """Wait until the copies are on the host; any thread may call this."""
        if self.copied is not None:
            torch.cuda.set_device(self.copied.device)  # of this thread: the first GPU belongs to another rank
            self.copied.synchronize()

    def generators(self) -> dict[str, Tensor]:
        """Return the state of the random number generators."""
        rank = dist.get_rank()
        states = {f"random.cpu.{rank}": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
        paths = getattr(self.model, "generator", None)
        if paths is not None:
            states["random.drop_path"] = paths.get_state()
        return states

    def shards(self) -> dict[str, Tensor]:
        """Return the host's copies as torch.distributed.checkpoint takes them: slices as parts of DTensors."""
        self.wait_for_copy()
        return {name: self._as_shard(name, x) for name, x in self.host.items()}

    def _as_shard(self, name: str, x: Tensor) -> Tensor:
        kind, _, rest = name.partition(".")
        parameter = rest.rpartition(".")[0] if kind == "optimizer" else rest
        if parameter not in self.sliced or not x.ndim or dist.get_world_size(self.group) == 1:
            return x
        if self.mesh is None:
            self.mesh = DeviceMesh.from_group(self.group, "cpu")
        dim = self.sliced[parameter] + (checkpoint.QKV in name)
        return DTensor.from_local(x, self.mesh, [Shard(dim)], run_check=False)

    def load(self, folder: Path, same_ranks: bool) -> None:
        """Set everything to what a checkpoint holds. Raises Unreadable, on all ranks; then nothing has changed.

        Args:
            same_ranks: each rank does what it did then, and goes on with its random numbers. On another grid a rank
                begins new ones.
        """
        self.copy_to_host()
        there = self._metadata(folder)
        rank = dist.get_rank()
        own = {f"random.cpu.{rank}", f"random.cuda.{rank}"} & there.keys() if same_ranks else set()
        generator = torch.Generator(next(self.model.parameters()).device)
        has_paths = "random.drop_path" in there and hasattr(self.model, "generator")
        if has_paths and there["random.drop_path"].size == generator.get_state().shape:  # of the same kind of device
            self.host["random.drop_path"] = generator.get_state()
            own.add("random.drop_path")
        shards = self.shards()
        checkpoint.load(folder, {n: x for n, x in shards.items() if n in own or not n.startswith("random.")})
        for name, x in self.tensors().items():
            x.copy_(self.host[name])
        if f"random.cpu.{rank}" in own:
            torch.set_rng_state(self.host[f"random.cpu.{rank}"])
        if f"random.cuda.{rank}" in own & self.host.keys():
            torch.cuda.set_rng_state(self.host[f"random.cuda.{rank}"])
        if "random.drop_path" in own:
            self.model.generator = generator
            generator.set_state(self.host["random.drop_path"])

    def _metadata(self, folder: Path) -> dict[str, Any]:
        """Return what a checkpoint holds. Raises Unreadable, on all ranks."""
        error, there = None, {}
        try:
            there = checkpoint.metadata(folder)
        except checkpoint.Unreadable as found:
            error = str(found)
        if error := first_message(error):
            raise checkpoint.Unreadable(error)
        return there


def host_memory(x: Tensor, pin: bool) -> Tensor:
    """Return memory of the host for a copy of x: pinned, if asked to and possible, and nobody waits for the copy."""
    try:
        return torch.empty_like(x, device="cpu", pin_memory=pin)
    except RuntimeError:  # nodes limit how much can be pinned
        if not pin:
            raise
        return torch.empty_like(x, device="cpu")


def init_moments(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser create what it keeps for each parameter, as zeros, where it has not done so yet.

    It does in its first step: one with gradients and a learning rate of 0 changes nothing else.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
    if not parameters:
        return
    kept = [p.grad for p in parameters], [group["lr"] for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for p, grad in zip(parameters, kept[0]):
        p.grad = grad
        for value in optimizer.state[p].values():
            value.zero_()
    for group, lr in zip(optimizer.param_groups, kept[1]):
        group["lr"] = lr
