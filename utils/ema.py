"""The moving average of a model's weights, with which it often forecasts better (`--ema_decay`).

After each step of the optimiser average = decay x average + (1 - decay) x weights. (Polyak and Juditsky 1992 average
all steps alike; an exponential average forgets the beginning.) The decay begins lower, min(decay, (1 + t) / (10 + t))
after t steps, so that a short run does not keep the weights that were drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage:
    """The average of the weights that this rank holds: of a sliced weight its slice."""

    def __init__(self, model: nn.Module, decay: float):
        self.parameters, self.decay = dict(model.named_parameters()), decay
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.is_in_place = False

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take the weights in, after so many steps."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        get_ema_multi_avg_fn(decay)(list(self.average.values()), list(self.parameters.values()), steps)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the average as its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self.parameters.items():
            weights = p.clone()
            p.copy_(self.average[name])
            self.average[name].copy_(weights)
        self.is_in_place = not self.is_in_place

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights and their average, by name, whichever of them the model has."""
        held = {name: p.detach() for name, p in self.parameters.items()}
        return (self.average, held) if self.is_in_place else (held, self.average)
