"""Weights of the training loss (`--loss weighted`): of channels, of levels, of latitudes.

The rule `auto` is that of swin_v2_weather and Makani: 1 for the temperature at 2 m, 0.1 for the other fields near the
ground, a thousandth of the pressure on levels in hPa, 0.01 for the rest.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from utils.config.settings import Config
from utils.data.fields import Fields
from utils.data.token_shard import TokenShard
from utils.data.variables import variable
from utils.loss import relative_l2

AUTO, PRESSURE = "auto", "pressure"
NEAR_GROUND = ("u10m", "v10m", "u100m", "v100m", "u10", "v10", "u100", "v100", "sp", "msl", "tcwv")


def distance(config: Config, fields: Fields, tokens: TokenShard, device: torch.device) -> Callable:
    """Return the distance of forecasts from targets that training makes small, for the tokens of this rank."""
    if config.loss == "relative_l2":
        return relative_l2
    root = torch.tensor(loss_weights(config, fields), device=device, dtype=torch.get_default_dtype()).sqrt()
    if tokens.shards > 1:
        rows = slice(tokens.rows.start, tokens.rows.stop)
        root = tokens.cut(root[:, rows].expand(-1, -1, config.img_size[1]))
    return partial(relative_l2, root=root)


def loss_weights(config: Config, fields: Fields) -> np.ndarray:
    """Return the weights [C_out, H, 1], of mean 1.

    Raises ValueError for channels that are no forecast, weights that are no numbers or below 0, and where all are 0.
    """
    names = fields.out_names
    channels = np.array(_auto(names) if config.loss_channels == (AUTO,) else _given(config.loss_channels or (), names))
    if config.loss_levels == PRESSURE:  # what has no level counts as if it lay at 1000 hPa
        channels = channels * [(variable(name).level or 1000) / 1000 for name in names]
    if not channels.sum() > 0:
        raise ValueError("loss_channels are all 0: there is nothing to learn; give one of them a weight")
    rows = np.ones(len(fields.latitude))
    if config.loss_latitude:
        rows = np.cos(np.deg2rad(fields.latitude.astype(np.float64))).clip(min=0)
    return (channels / channels.mean())[:, None, None] * (rows / rows.mean())[:, None]


def _auto(names: list[str]) -> list[float]:
    def weight(name: str) -> float:
        if name == "t2m":
            return 1.0
        if name in NEAR_GROUND:
            return 0.1
        level = variable(name).level
        return 0.01 if level is None or name[0] not in "zuvtrq" else 0.001 * level

    return [weight(name) for name in names]


def _given(texts: tuple[str, ...], names: list[str]) -> list[float]:
    """Return the weights of NAME=WEIGHT, 1 for the channels that are not named. Raises ValueError."""
    weights = dict.fromkeys(names, 1.0)
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
