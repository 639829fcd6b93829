"""Skill of the forecasts of a validation set: RMSE, anomaly correlation, persistence, per channel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from utils.loss import relative_l2
from utils.spans import in_span

Total = Callable[[Tensor], Tensor]


def latitude_weights(latitude: Tensor) -> Tensor:
    """Return cos(latitude) [H], normalised to mean 1. `latitude` is in degrees."""
    weights = torch.cos(torch.deg2rad(latitude)).clamp(min=0)
    return weights / weights.mean()


def _whole(sums: Tensor) -> Tensor:
    return sums


def weighted_rmse(forecast: Tensor, target: Tensor, weights: Tensor, total: Total = _whole) -> Tensor:
    """Return the square root of the weighted mean square over space, [B, C].

    `forecast` and `target` are [B, C, H, W]; `weights` [H, W] add up to 1 over the whole image. Where several ranks
    hold parts of an image, `total` adds up their sums.
    """
    return total(((forecast - target).square() * weights).sum(dim=(-2, -1))).sqrt()


def weighted_acc(
    forecast: Tensor, target: Tensor, climatology: Tensor, weights: Tensor, total: Total = _whole
) -> Tensor:
    """Return the anomaly correlation, [B, C]: the weighted cosine of the two anomalies from `climatology` [C, H, W].

    The anomalies are not centred in space (Rasp et al. 2020, WeatherBench, appendix A). `weights` and `total` are those
    of `weighted_rmse`.
    """
    f, t = forecast - climatology, target - climatology
    sums = torch.stack([(a * b * weights).sum(dim=(-2, -1)) for a, b in ((f, t), (f, f), (t, t))])
    product, f_norm, t_norm = total(sums)
    return product / (f_norm * t_norm).sqrt()


@dataclass(eq=False)
class Scores:
    """Sums over the samples of a validation set, kept on the device until `reduce`."""

    weights: Tensor  # of the grid points, adding up to 1 over the whole image, [H, W]
    climatology: Tensor | None  # normalised time means of the forecast channels, [C, H, W]; without: no ACC
    origins: Tensor  # the input channel that each forecast channel persists from, -1 where there is none, [C]
    total: Total = _whole  # adds up sums over the ranks that hold parts of the same image
    group: dist.ProcessGroup | None = None  # the ranks whose samples differ; all ranks by default

    def __post_init__(self):
        device, wide = self.weights.device, torch.promote_types(self.weights.dtype, torch.float32)
        self.persistence = self.origins.clamp(min=0)
        # Rows: loss, number of samples (both in column 0); then RMSE, ACC and persistence's RMSE per channel.
        self.sums = torch.zeros(5, len(self.origins), device=device, dtype=wide)

    def update(self, forecast: Tensor, inp: Tensor, target: Tensor, counts: Tensor) -> None:
        """Add a batch; samples whose entry of `counts` [B] is 0 only pad it, and count for nothing."""
        forecast, target = forecast.to(self.sums.dtype), target.to(self.sums.dtype)
        real = counts > 0

        def count(values: Tensor) -> Tensor:  # sliced away with `where`: 0 x NaN would be NaN
            return torch.where(real[:, None] if values.dim() == 2 else real, values, 0).sum(dim=0)

        self.sums[0, 0] += count(relative_l2(forecast, target, total=self.total))
        self.sums[1, 0] += real.sum()
        same = inp.index_select(1, self.persistence)
        self.sums[2] += count(weighted_rmse(forecast, target, self.weights, total=self.total))
        if self.climatology is not None:
            self.sums[3] += count(weighted_acc(forecast, target, self.climatology, self.weights, total=self.total))
        self.sums[4] += count(weighted_rmse(same.to(self.sums.dtype), target, self.weights, total=self.total))

    @in_span("validation")
    def reduce(self) -> dict[str, float | list[float | None] | None]:
        """Return the means over all samples of all ranks: `loss`, and `rmse`, `acc`, `persistence` per channel."""
        dist.all_reduce(self.sums, group=self.group)
        sums, origins = torch.vstack([self.sums, self.origins]).cpu().split([5, 1])
        rmse, acc, persistence = (sums[2:] / sums[1, 0]).tolist()
        return {
            "loss": (sums[0, 0] / sums[1, 0]).item(),
            "samples": int(sums[1, 0]),
            "rmse": rmse,
            "acc": None if self.climatology is None else acc,
            "persistence": [x if origin >= 0 else None for x, origin in zip(persistence, origins[0].tolist())],
        }
