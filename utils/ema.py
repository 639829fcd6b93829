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

from utils.shards import own


class MovingAverage:
    """The average of the weights that this rank holds: of a sliced weight its slice, of one shared out its part."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: own(p) for name, p in model.named_parameters()}
        self.average = {name: x.clone() for name, x in self.weights.items()}
        self.is_in_place = False

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take the weights in, after so many steps."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        get_ema_multi_avg_fn(decay)(list(self.average.values()), list(self.weights.values()), steps)

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
        for name, x in self.weights.items():
            weights = x.clone()
            x.copy_(self.average[name])
            self.average[name].copy_(weights)
        self.is_in_place = not self.is_in_place

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights and their average, by name, whichever of them the model has."""
        return (self.average, self.weights) if self.is_in_place else (self.weights, self.average)
