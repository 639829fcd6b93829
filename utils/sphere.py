"""Horizontal derivatives of fields on the sphere, by finite differences."""

import numpy as np
import torch
from torch import Tensor

POLE = 1e-6  # of cos(latitude): no direction is east there


class HorizontalGradient:
    """The gradient of fields [..., C, h, W] on the sphere of radius 1: what points east, then north, [..., 2 C, h, W].

    With longitude l and latitude p, east is (1 / cos p) df/dl, north df/dp, in units of the field per radian (Holton &
    Hakim 2013, An Introduction to Dynamic Meteorology, section 4.4; divide by the earth's radius for metres).

    East takes the neighbours on both sides, round the globe: the error is dl^2 / 6 times f's third derivative, over
    cos p; on a pole itself it is 0. North takes both neighbours with Lagrange's weights, which for even rows are plain
    central differences: second order, too. The first and the last row have one neighbour: first order there.

    Args:
        latitude: of all rows of the image, in degrees, [H].
        columns: W; they go once round the globe, evenly.
        rows: which rows of the image a field holds, h of them; a first or last one that is no row of the image's edge
            lacks its neighbour, and its derivative means nothing.
        weights: factors of the derivatives in each row, [H].
    """

    def __init__(
        self, latitude: np.ndarray, columns: int, rows: range, device: torch.device, weights: np.ndarray | float = 1.0
    ):
        p = np.deg2rad(latitude.astype(np.float64))
        spacing = 2 * np.pi / columns
        cos = np.cos(p)
        east = np.divide(1, 2 * spacing * cos, out=np.zeros_like(cos), where=cos > POLE)
        north = np.stack(_weights(p))
        chosen = (np.concatenate([east[None], north]) * weights)[:, rows.start : rows.stop, None]  # 4 h 1
        self.east, *self.north = torch.tensor(chosen, device=device, dtype=torch.get_default_dtype())

    def __call__(self, x: Tensor) -> Tensor:
        east = (x.roll(-1, -1) - x.roll(1, -1)) * self.east
        before, here, after = self.north
        north = x * here
        north[..., 1:, :] += x[..., :-1, :] * before[1:]
        north[..., :-1, :] += x[..., 1:, :] * after[:-1]
        return torch.cat([east, north], dim=-3)


def _weights(p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weights of the row before, the row itself and the row after in df/dp, [H] each."""
    step = np.diff(p)
    before, here, after = np.zeros((3, len(p)))
    a, b = -step[:-1], step[1:]  # where both neighbours stand, seen from a row
    before[1:-1], after[1:-1], here[1:-1] = -b / (a * (a - b)), -a / (b * (b - a)), -(a + b) / (a * b)
    here[0], after[0] = -1 / step[0], 1 / step[0]
    before[-1], here[-1] = -1 / step[-1], 1 / step[-1]
    return before, here, after
