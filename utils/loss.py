"""The training loss."""

import torch
from torch import Tensor


def relative_l2(forecast: Tensor, target: Tensor) -> Tensor:
    """Return ||forecast - target|| / ||target|| for each sample, [B], in float32 or wider.

    Both are [B, C, H, W], normalised. The norms run over channels and grid points.
    """
    wide = torch.promote_types(forecast.dtype, torch.float32)
    forecast, target = forecast.to(wide).flatten(1), target.to(wide).flatten(1)
    return torch.linalg.vector_norm(forecast - target, dim=1) / torch.linalg.vector_norm(target, dim=1)
