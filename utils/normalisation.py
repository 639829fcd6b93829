"""Normalisation: fields as they are stored become (x - mean) / std, on the device."""

import torch
from torch import Tensor

from utils.fields import Fields


class Normaliser:
    """Normalises channel by channel, in the dtype of the statistics.

    Args:
        mean, std: [1, C, 1, 1].
        compiled: make one pass over the data of it: a cast, a difference and a quotient.
    """

    def __init__(self, mean: Tensor, std: Tensor, compiled: bool = False):
        self.mean, self.std = mean, std
        self.compute = torch.compile(normalise, fullgraph=True, dynamic=False) if compiled else normalise
        self.casts: dict[torch.Size, Tensor] = {}  # kept: on a CPU, fresh memory costs more than the arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [B, C, H, W] normalised: in place, or where it has another dtype, in a buffer that is used again."""
        if x.dtype == self.mean.dtype:
            return self.compute(x, self.mean, self.std)
        if x.shape not in self.casts:
            self.casts[x.shape] = self.mean.new_empty(x.shape)
        return self.compute(x, self.mean, self.std, self.casts[x.shape])


def normalisers(fields: Fields, device: torch.device, compiled: bool) -> list[Normaliser]:
    """Return those of a model's inputs, and of its forecasts."""
    return [
        Normaliser(
            *(
                torch.tensor(x[used], device=device, dtype=torch.get_default_dtype()).view(1, -1, 1, 1)
                for x in (fields.means, fields.stds)
            ),
            compiled,
        )
        for used in (fields.inputs, fields.outputs)
    ]


def normalise(x: Tensor, mean: Tensor, std: Tensor, out: Tensor | None = None) -> Tensor:
    """Return (x - mean) / std in `out`, or in place."""
    field = x if out is None else out.copy_(x)
    return field.sub_(mean).div_(std)
