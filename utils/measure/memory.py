"""What a rank's memory holds: weights, gradients, optimiser, activations."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from utils.device import cached_gb, memory_gb, peak_memory_gb
from utils.ema import MovingAverage
from utils.optimizers import kept_of
from utils.shards import own


@dataclass(eq=False)
class MemoryWatch:
    """Looks at the memory in use before and after a training step's first forward pass, when told to look again.

    Inside a captured graph nobody can look: the figures stay those of the step before.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    average: MovingAverage | None
    looks: bool = False  # true: again
    before_forward: float = 0.0
    after_forward: float = 0.0
    activations: float | None = None

    def __post_init__(self):
        self.model.register_forward_pre_hook(self._before)
        self.model.register_forward_hook(self._after)

    def _before(self, *_: Any) -> None:
        if self.looks and torch.is_grad_enabled():
            self.before_forward = memory_gb(self.device)

    def _after(self, *_: Any) -> None:
        if self.looks and torch.is_grad_enabled():
            self.after_forward, self.looks = memory_gb(self.device), False
            # On a CPU later passes use memory that the process kept. On a GPU the first one makes workspaces, too.
            if self.device.type == "cuda" or self.activations is None:
                self.activations = max(self.after_forward - self.before_forward, 0.0)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live longer than a step, by part."""
        parts = {
            "weights": [own(x) for x in (*self.model.parameters(), *self.model.buffers())],
            "gradients": [own(p.grad) for p in self.model.parameters() if p.grad is not None],
            "optimizer": [x for p in self.optimizer.state for x in kept_of(self.optimizer, p).values()],
        }
        return parts | ({"average": list(self.average.average.values())} if self.average else {})

    def in_use(self) -> dict[str, float]:
        """Return the memory of each part now, in GiB: what does not last counts as activations."""
        parts = self._lasting()
        return parts | {"activations": max(memory_gb(self.device) - sum(parts.values()), 0.0)}

    def _lasting(self) -> dict[str, float]:
        return {name: sum(t.nbytes for t in tensors) / 2**30 for name, tensors in self.tensors().items()}

    def parts(self) -> dict[str, float]:
        """Return the memory of each part in GiB; on a CPU, activations and peak are what the process grew to.

        Activations are what the first forward pass leaves for the backward pass. `cached` is what a GPU's allocator
        holds beyond the tensors.
        """
        parts = self._lasting()
        parts |= {"activations": self.activations or 0.0, "peak": peak_memory_gb(self.device)}
        if self.device.type == "cuda":
            parts["cached"] = cached_gb(self.device)
        return parts
