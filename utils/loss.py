"""The training loss."""

from collections.abc import Callable

import torch
from torch import Tensor


def relative_l2(
    forecast: Tensor, target: Tensor, total: Callable[[Tensor], Tensor] = lambda sums: sums, root: Tensor | None = None
) -> Tensor:
    """Return ||forecast - target|| / ||target|| for each sample, [B] or [K, B], in float32 or wider.

    Both are [B, C, H, W] or, after each of K steps, [K, B, C, H, W], normalised. The norms run over channels and grid
    points. Where several ranks hold parts of an image, `total` adds up their sums. `root`, [C, H, W] or with ones in
    place of some, holds the roots of the weights of squares. Raises ValueError where the shapes differ.
    """
    if forecast.shape != target.shape:  # it would be repeated to fit
        raise ValueError(f"the model forecasts {list(forecast.shape)}, and the target is {list(target.shape)}")
    wide = torch.promote_types(forecast.dtype, torch.float32)
    target = target.to(wide)
    return relative_norm(forecast - target, target, total, root)


def relative_norm(
    error: Tensor, size: Tensor, total: Callable[[Tensor], Tensor] = lambda sums: sums, root: Tensor | None = None
) -> Tensor:
    """Return ||error|| / ||size|| for each sample; shapes, `total` and `root` are those of `relative_l2`."""
    if root is not None:
        error, size = error * root, size * root
    # A norm for each row first: it writes no squares to memory, and short sums keep their digits.
    rows = torch.stack([torch.linalg.vector_norm(x, dim=-1) for x in (error, size)])  # 2 B C H
    error, size = total(rows.square().sum(dim=(-2, -1)))
    # A forecast without any error has the gradient 0, not infinity.
    return (error.clamp(min=torch.finfo(size.dtype).tiny) / size).sqrt()
