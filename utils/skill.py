"""Skill of forecasts: what is kept of each, and the scores made of it.

Of each forecast, lead time and channel a few spatial means are kept, its *moments*: of the error e = f - t, of the
anomalies a = f - c and b = t - c from a climatology c, and of their products. All scores are made of them afterwards.

Shapes:  N forecasts (initial times)   K lead times   C channels   H W rows, columns
         A weightings of the rows   M moments   R resamples
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from utils.metrics import latitude_weights

MOMENTS = ("e", "ee", "a", "aa", "ab", "b", "bb")
WEIGHTINGS = ("cos", "area")
SCORES = ("rmse", "mean_rmse", "bias", "acc", "activity")
RESAMPLES = 1000
INTERVAL = 0.95


def area_weights(latitude: np.ndarray) -> np.ndarray:
    """Return the areas of the cells around each latitude [H], normalised to mean 1: sin(upper edge) - sin(lower edge).

    The edges lie half way between rows, the outermost at the poles (Rasp et al. 2024, WeatherBench 2). `latitude` is
    in degrees, rising or falling.
    """
    angle = np.deg2rad(np.asarray(latitude, np.float64))
    pole = np.pi / 2 * np.sign(angle[0] - angle[-1])
    edges = np.concatenate([[pole], (angle[:-1] + angle[1:]) / 2, [-pole]])
    areas = np.abs(np.diff(np.sin(edges)))
    return areas / areas.mean()


def row_weights(latitude: np.ndarray) -> Tensor:
    """Return both weightings of the rows, [H, A] in float64: each adds up to 1."""
    both = latitude_weights(torch.tensor(latitude, dtype=torch.float64)), torch.from_numpy(area_weights(latitude))
    return torch.stack(both, dim=1) / len(latitude)


def moments(forecast: Tensor, truth: Tensor, climatology: Tensor, weights: Tensor) -> Tensor:
    """Return the moments of one forecast, [C, A, M] in float64; all fields are [C, H, W] in units, in float64."""
    e, a, b = forecast - truth, forecast - climatology, truth - climatology
    rows = torch.stack([x.mean(dim=-1) for x in (e, e * e, a, a * a, a * b, b, b * b)])  # M C H
    return torch.einsum("mch,ha->cam", rows, weights)


def scores(moments: np.ndarray) -> dict[str, np.ndarray]:
    """Return what is averaged over forecasts for each score, [...]; `moments` are [..., M].

    `rmse` is the mean square still (see `finish`).
    """
    e, ee, a, aa, ab, _, bb = np.moveaxis(moments, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # climatology has no anomaly, and no correlation
        acc = np.where(aa > 0, ab / np.sqrt(aa * bb), np.nan)
    spread = np.sqrt(np.maximum(aa - a * a, 0))
    return {"rmse": ee, "mean_rmse": np.sqrt(ee), "bias": e, "acc": acc, "activity": spread}


def finish(score: str, mean: np.ndarray) -> np.ndarray:
    """Return a score of the mean over forecasts of what `scores` gives."""
    return np.sqrt(mean) if score == "rmse" else mean


def resampled_counts(forecasts: int, block: int, seed: int = 0) -> np.ndarray:
    """Return how often each resample draws each forecast, [R, N].

    Blocks of forecasts that follow each other are drawn, round the end to the beginning (Politis and Romano 1992, the
    circular block bootstrap): weather lasts for days, so neighbours say the same and must be drawn together.
    """
    rng = np.random.default_rng(seed)
    block = min(max(block, 1), forecasts)
    starts = rng.integers(forecasts, size=(RESAMPLES, -(-forecasts // block)))
    drawn = (starts[..., None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :forecasts] % forecasts
    return np.stack([np.bincount(row, minlength=forecasts) for row in drawn])


def summarise(all_moments: Callable[[], Iterator[np.ndarray]], forecasts: int, block: int) -> dict[str, np.ndarray]:
    """Return each score with its interval, [3, ...]: value, low, high; and `gain`.

    `gain` is the RMSE over that of the first source, persistence, resample by resample: the two see the same weather.

    Args:
        all_moments: yields the moments of each forecast, [K, S, C, A, M] with S sources, in order.
        block: forecasts that are drawn together.
    """
    counts = np.concatenate([np.ones((1, forecasts), int), resampled_counts(forecasts, block)])  # the first row: all
    sums: dict[str, np.ndarray] = {}
    for n, kept in enumerate(all_moments()):
        for name, values in scores(kept).items():
            weighted = counts[:, n].reshape(-1, *[1] * values.ndim) * values
            sums[name] = sums[name] + weighted if name in sums else weighted
    means = {name: finish(name, total / forecasts) for name, total in sums.items()}
    means["gain"] = means["rmse"] / means["rmse"][:, :, :1]
    return {name: _with_interval(values) for name, values in means.items()}


def _with_interval(values: np.ndarray) -> np.ndarray:
    """Return the first of [1 + R, ...], and the bounds between which the middle 95% of the others lie."""
    tail = (1 - INTERVAL) / 2
    return np.stack([values[0], *np.quantile(values[1:], [tail, 1 - tail], axis=0)])
