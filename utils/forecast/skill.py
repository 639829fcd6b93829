"""Skill of forecasts: what is kept of each, and the scores made of it.

Of each forecast, lead time and channel a few spatial means are kept, its *moments*: of the error e = f - t, of the
anomalies a = f - c and b = t - c from a climatology c, and of their products. All scores are made of them afterwards.

Shapes:  N forecasts (initial times)   K lead times   C channels   H W rows, columns
         A weightings of the rows   M moments   R resamples
"""

import itertools
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from utils.metrics import latitude_weights

MOMENTS = ("e", "ee", "a", "aa", "ab", "b", "bb")
OF_ANOMALIES = ("acc", "acc_pooled", "activity", "truth_activity")  # scores that need a climatology
WEIGHTINGS = ("cos", "area")
RESAMPLES = 1000
INTERVAL = 0.95
CHUNK = 64  # forecasts that are added up at once


def area_weights(latitude: np.ndarray) -> np.ndarray:
    """Return the areas of the cells around each latitude [H], normalised to mean 1: sin(upper edge) - sin(lower edge).

    The edges lie half way between rows. The outermost are the poles, as in WeatherBench 2 (Rasp et al. 2024), where
    they are no more than a row away, as on a globe whose last row is cropped; else half a row out.

    `latitude` is in degrees, rising or falling.
    """
    angle = np.deg2rad(np.asarray(latitude, np.float64))
    edges = (angle[:-1] + angle[1:]) / 2
    first, last = (_outer_edge(angle[i], angle[i] - angle[j]) for i, j in ((0, 1), (-1, -2)))
    areas = np.abs(np.diff(np.sin([first, *edges, last])))
    return areas / areas.mean()


def _outer_edge(row: float, step: float) -> float:
    pole = np.copysign(np.pi / 2, step)
    return pole if abs(pole - row) < 1.6 * abs(step) else row + step / 2


def row_weights(latitude: np.ndarray) -> Tensor:
    """Return both weightings of the rows, [H, A] in float64: each adds up to 1."""
    both = latitude_weights(torch.tensor(latitude, dtype=torch.float64)), torch.from_numpy(area_weights(latitude))
    return torch.stack(both, dim=1) / len(latitude)


def moments(forecast: Tensor, truth: Tensor, climatology: Tensor, weights: Tensor) -> Tensor:
    """Return the moments of one forecast, [C, A, M] in float64; all fields are [C, H, W] in units, in float64."""
    e, a, b = forecast - truth, forecast - climatology, truth - climatology
    dot = torch.linalg.vecdot
    sums = [e.sum(dim=-1), dot(e, e), a.sum(dim=-1), dot(a, a), dot(a, b), b.sum(dim=-1), dot(b, b)]
    rows = torch.stack(sums) / e.shape[-1]  # M C H
    return torch.einsum("mch,ha->cam", rows, weights)


def scores(moments: np.ndarray) -> dict[str, np.ndarray]:
    """Return what is averaged over forecasts for each score, [...]; `moments` are [..., M].

    `rmse` is the square still: its root comes after the mean. `ab`, `aa` and `bb` become `acc_pooled`.
    """
    e, ee, a, aa, ab, b, bb = np.moveaxis(moments, -1, 0)
    with np.errstate(invalid="ignore"):  # climatology has no anomaly, and no correlation
        acc = ab / np.sqrt(aa * bb)
    spread, truth = (np.sqrt(np.maximum(square - mean * mean, 0)) for mean, square in ((a, aa), (b, bb)))
    found = {"rmse": ee, "mean_rmse": np.sqrt(ee), "bias": e, "acc": acc}
    return found | {"activity": spread, "truth_activity": truth, "ab": ab, "aa": aa, "bb": bb}


def resampled_counts(forecasts: int, block: int, seed: int = 0) -> np.ndarray:
    """Return how often each resample draws each forecast, [R, N].

    Blocks of forecasts that follow each other are drawn, round the end to the beginning (Politis and Romano 1992, the
    circular block bootstrap): weather lasts for days, so neighbours say the same and must be drawn together.
    """
    rng = np.random.default_rng(seed)
    counts = np.empty((RESAMPLES, forecasts), np.uint16)
    for row in counts:
        starts = rng.integers(forecasts, size=-(-forecasts // block))
        drawn = (starts[:, None] + np.arange(block)).reshape(-1)[:forecasts] % forecasts
        row[:] = np.bincount(drawn, minlength=forecasts)
    return counts


def resamples(forecasts: int, block: int) -> np.ndarray:
    """Return how often each forecast counts: once, and then in each resample, [1 + R, N]."""
    return np.concatenate([np.ones((1, forecasts), np.uint16), resampled_counts(forecasts, block)])


def with_interval(values: np.ndarray, forecasts: int, block: int) -> np.ndarray:
    """Return a value with its interval, [3, ...], of itself and its resamples, [1 + R, ...]."""
    tail = (1 - INTERVAL) / 2
    found = np.stack([values[0], *np.quantile(values[1:], [tail, 1 - tail], axis=0)])
    if forecasts < 3 * block:
        found[1:] = np.nan
    return found


def summarise(kept: Iterable[np.ndarray], forecasts: int, block: int) -> dict[str, np.ndarray]:
    """Return each score with its interval, [3, K, S, C, A]: value, low, high.

    With S sources, the first of them persistence. `rmse_over_persistence` is taken resample by resample: the two see
    the same weather. Where there are less than three blocks there is no interval, and its bounds are NaN.

    Args:
        kept: the moments of each forecast, [K, S, C, A, M], in order.
        block: forecasts that are drawn together.
    """
    counts = resamples(forecasts, block)
    sums: dict[str, np.ndarray] = {}
    forecast, kept = 0, iter(kept)
    while chunk := list(itertools.islice(kept, CHUNK)):
        moments = np.stack(chunk)
        drawn = counts[:, forecast : forecast + len(chunk)].astype(np.float64)
        forecast += len(chunk)
        for name, values in scores(moments).items():
            part = (drawn @ values.reshape(len(values), -1)).reshape(-1, *values.shape[1:])
            sums[name] = sums[name] + part if name in sums else part
    means = {name: total / forecasts for name, total in sums.items()}
    means["rmse"] = np.sqrt(means["rmse"])
    ab, aa, bb = (means.pop(name) for name in ("ab", "aa", "bb"))
    with np.errstate(invalid="ignore"):  # climatology has no anomaly
        means["acc_pooled"] = ab / np.sqrt(aa * bb)
    means["rmse_over_persistence"] = means["rmse"] / means["rmse"][:, :, :1]
    return {name: with_interval(x, forecasts, block) for name, x in means.items()}


def zonal_spectrum(field: Tensor, weights: Tensor) -> Tensor:
    """Return the power at each zonal wavenumber, [..., W // 2 + 1], in units squared.

    The squares of the Fourier coefficients along each row, averaged over the rows. Over all wavenumbers they add up to
    the mean square of the field (Parseval), so a forecast that is too smooth lies below the truth at large ones.

    Args:
        field: [..., H, W], rows that go once round the globe; of others it is the power of waves along a row.
        weights: of the rows, adding up to 1, [H].
    """
    W = field.shape[-1]
    power = torch.fft.rfft(field, dim=-1, norm="forward").abs().square()
    # Each wavenumber stands for its negative one, too, but for 0 and the last one of an even number of columns.
    power[..., 1 : (W + 1) // 2] *= 2
    return torch.einsum("...hk,h->...k", power, weights)
