"""Horizontal derivatives of fields on the sphere, by finite differences."""

import numpy as np
import torch
from torch import Tensor

POLE = 1e-6  # of cos(latitude): no direction is east there
ROUNDED = 0.1  # of a step between two columns


def columns_apart(longitude: np.ndarray) -> np.ndarray:
    """Return how far each column is from the next one, and the last from the first, [W], in degrees, 0 to 360."""
    steps = np.diff(longitude.astype(np.float64), append=float(longitude[0])) % 360
    return min(steps, 360 - steps, key=np.sum)  # eastward, or westward


def go_round(longitude: np.ndarray) -> bool:
    """Do these columns go once round the globe, in even steps? They may be rounded."""
    even = 360 / len(longitude)
    return bool(len(longitude) > 2 and abs(columns_apart(longitude) - even).max() <= ROUNDED * even)


def check_round(longitude: np.ndarray, key: str) -> None:
    """Raise ValueError, with the remedy, where they do not: the configuration's `key` asks for it."""
    W = len(longitude)
    if W < 3:
        raise ValueError(f"{key} needs 3 columns or more, and there are {W}: leave it out")
    if not go_round(longitude):
        apart = columns_apart(longitude)
        raise ValueError(
            f"{key} goes round the globe, and its {W} columns lie from {apart.min():g} to {apart.max():g} degrees "
            f"apart, not {360 / W:g}: take all columns (--img_size, --patch_size), or leave it out"
        )


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
        before, here, after = _weights(p) * weights
        # A point's neighbours; and, for the backward pass, the points whose neighbour it is.
        transposed = np.append(before[1:], 0), here, np.insert(after[:-1], 0, 0)
        chosen = np.stack([east * weights, before, here, after, *transposed])[:, rows.start : rows.stop, None]
        self.factors = torch.tensor(chosen, device=device, dtype=torch.get_default_dtype())  # 7 h 1

    def __call__(self, x: Tensor) -> Tensor:
        return _Gradient.apply(x, self.factors)


class _Gradient(torch.autograd.Function):
    """By hand, since each of its steps would be a pass through memory, and one more in the backward."""

    @staticmethod
    def forward(ctx, x, factors):
        ctx.save_for_backward(factors)
        east, *north = factors[:4]
        return torch.cat([_east(x) * east, _north(x, *north)], dim=-3)

    @staticmethod
    def backward(ctx, grad):
        (factors,) = ctx.saved_tensors
        east, north = grad.chunk(2, dim=-3)
        after, here, before = factors[4:]
        return _north(north, before, here, after).sub_(_east(east).mul_(factors[0])), None


def _east(x: Tensor) -> Tensor:
    return x.roll(-1, -1).sub_(x.roll(1, -1))


def _north(x: Tensor, before: Tensor, here: Tensor, after: Tensor) -> Tensor:
    out = x * here
    out[..., 1:, :].addcmul_(x[..., :-1, :], before[1:])
    out[..., :-1, :].addcmul_(x[..., 1:, :], after[:-1])
    return out


def _weights(p: np.ndarray) -> np.ndarray:
    """Return the weights of the row before, the row itself and the row after in df/dp, [3, H]."""
    step = np.diff(p)
    before, here, after = found = np.zeros((3, len(p)))
    a, b = -step[:-1], step[1:]  # where both neighbours stand, seen from a row
    before[1:-1], after[1:-1], here[1:-1] = -b / (a * (a - b)), -a / (b * (b - a)), -(a + b) / (a * b)
    here[0], after[0] = -1 / step[0], 1 / step[0]
    before[-1], here[-1] = -1 / step[-1], 1 / step[-1]
    return found
