"""The training loss: weights of channels, of levels, of latitudes (`--loss weighted`), gradients (`--loss_gradient`).

The rule `auto` is that of swin_v2_weather and Makani: 1 for the temperature at 2 m, 0.1 for the other fields near the
ground, a thousandth of the pressure on levels in hPa, 0.01 for the rest. (On levels theirs knows z, u, v, t, r and q;
here others there count alike.)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from utils.config.settings import Config
from utils.data.fields import Fields
from utils.data.files import check_each_once
from utils.data.token_shard import TokenShard
from utils.data.variables import meant, variable
from utils.loss import relative_l2, relative_norm
from utils.sphere import HorizontalGradient, check_round

AUTO, PRESSURE = "auto", "pressure"
NEAR_GROUND = ("u10", "v10", "u100", "v100", "sp", "msl", "tcwv")


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _root(weights: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor(weights, device=device, dtype=torch.get_default_dtype()).sqrt()


def distance(
    config: Config, fields: Fields, tokens: TokenShard, device: torch.device,
    total: Callable[[Tensor], Tensor] = _as_it_is, rows: Callable[[Tensor], Tensor] = _as_it_is,
) -> Callable[[Tensor, Tensor], Tensor]:  # fmt: skip
    """Return the distance of forecasts from targets that training makes small, for the tokens of this rank.

    With `loss_gradient` W it is the relative L2 distance of the fields and W times that of their horizontal gradients,
    whose squares are weighted by area.

    Args:
        total: adds up the sums of the ranks that hold parts of an image.
        rows: gives this rank's part of an image its surroundings: `input_rows` of `tokens.with_overlap(1)`.

    Raises ValueError where gradients are asked for, and the columns do not go round the globe.
    """

    weighted = None
    if config.loss == "weighted":
        weighted = _root(loss_weights(config, fields), device)
        if tokens.shards > 1:
            rows_read = weighted[:, tokens.rows.start : tokens.rows.stop]
            weighted = tokens.cut(rows_read.expand(-1, -1, config.img_size[1]))
    plain = partial(relative_l2, total=total, root=weighted)
    if not config.loss_gradient:
        return plain
    check_round(fields.longitude, "loss_gradient")
    near, area = tokens.with_overlap(1), np.cos(np.deg2rad(fields.latitude.astype(np.float64))).clip(min=0)
    gradient = HorizontalGradient(fields.latitude, config.img_size[1], near.input_rows, device, area**0.5)
    channels = None
    if config.loss == "weighted":
        of_channels = loss_weights(replace(config, loss_latitude=False), fields)[:, :1]
        channels = _root(of_channels, device).repeat(2, 1, 1)  # of what points east, then north

    def with_gradients(forecast: Tensor, target: Tensor) -> Tensor:
        slopes = (near.own(gradient(rows(x))) for x in (forecast - target, target))
        return plain(forecast, target) + config.loss_gradient * relative_norm(*slopes, total, channels)

    return with_gradients


def loss_weights(config: Config, fields: Fields) -> np.ndarray:
    """Return the weights [C_out, H, 1], of mean 1.

    Raises ValueError for channels that are no forecast, weights that are no numbers or below 0, and where all are 0.
    """
    names = fields.out_names
    channels = np.array(_auto(names) if config.loss_channels == (AUTO,) else _given(config.loss_channels or (), names))
    if config.loss_levels == PRESSURE:  # what has no level counts as if it lay at 1000 hPa
        channels = channels * [(variable(meant(name, names)).level or 1000) / 1000 for name in names]
    if not channels.sum() > 0:
        raise ValueError("loss_channels are all 0: there is nothing to learn; give one of them a weight")
    rows = np.ones(len(fields.latitude))
    if config.loss_latitude:
        rows = np.cos(np.deg2rad(fields.latitude.astype(np.float64))).clip(min=0)
    return (channels / channels.mean())[:, None, None] * (rows / rows.mean())[:, None]


def _auto(names: list[str]) -> list[float]:
    def weight(name: str) -> float:
        known = variable(meant(name, names))
        if known.level is not None:
            return 0.001 * known.level
        return 1.0 if known.short == "t2m" else 0.1 if known.short in NEAR_GROUND else 0.01

    return [weight(name) for name in names]


def _given(texts: tuple[str, ...], names: list[str]) -> list[float]:
    """Return the weights of NAME=WEIGHT, 1 for the channels that are not named. Raises ValueError."""
    weights = dict.fromkeys(names, 1.0)
    check_each_once([text.partition("=")[0] for text in texts], "loss_channels")
    for text in texts:
        name, _, value = text.partition("=")
        if name not in weights:
            raise ValueError(f"loss_channels names {name!r}, and the forecast channels are {', '.join(names)}")
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = -1
        if not 0 <= weights[name] < np.inf:
            raise ValueError(f"loss_channels has {text!r}: it takes auto, or NAME=WEIGHT with a weight of 0 or more")
    return list(weights.values())
