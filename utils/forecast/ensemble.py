"""Ensembles: several forecasts of the same weather. How they begin, and what is kept and made of them.

Members are forecasts by several models, or by one from states that differ a little. A good ensemble's mean errs less
than a member, and its members differ from each other as much as the truth from them.

Shapes:  M members   B forecasts of one batch   N forecasts (initial times)   K lead times   C channels
         H W rows, columns   A weightings of the rows   R resamples
"""

import numpy as np
import torch
from torch import Tensor

from utils.data.frames import FrameReader
from utils.data.variables import missing
from utils.errors import ReadError
from utils.forecast.skill import resamples, with_interval

KEPT = ("variance", "crps")
MEAN, CONTROL, MEMBER = "mean", "control", "member"  # names of its forecasts; members are numbered


class Perturbations:
    """Differences of two states of the same files, drawn at random: changes in the patterns of the weather itself.

    Random field perturbations (Magnusson, Nycander and Kallen 2009, Tellus A 61, 194-209). Members come in pairs, to
    one of which a difference is added, and from the other taken away.

    Args:
        reader: of the inputs.
        size: factor of the differences, which else vary as the weather does.
        scale: standard deviation of each input, 0 for those that stay as they are, [C_in].
    """

    def __init__(self, reader: FrameReader, size: float, scale: np.ndarray, device: torch.device):
        self.reader, self.size, self.device = reader, size, device
        self.factor = np.divide(size / 2**0.5, scale, out=np.zeros(len(scale)), where=scale > 0)[:, None, None]
        self.frames = [(file, t) for file, steps in enumerate(reader.files.steps) for t in range(steps)]

    def at(self, forecasts: list[int], member: int) -> Tensor:
        """Return what a member, counted from 0, adds to the normalised states of some forecasts, [B, C_in, H, W].

        The same for a forecast whoever makes it, and in whatever batch.
        """
        found = []
        for forecast in forecasts:
            draw = np.random.default_rng([forecast, member // 2]).choice(len(self.frames), 2, replace=False)
            a, b = (self._read(*self.frames[i]) for i in draw)
            found.append((a - b) * self.factor * (-1) ** member)
        return torch.from_numpy(np.stack(found)).to(self.device, torch.get_default_dtype())

    def _read(self, file: int, t: int) -> np.ndarray:
        """Return a state in float64, [C_in, H, W]. Raises ReadError, also for one that lacks values."""
        frame = self.reader.read_frame(file, t).astype(np.float64)
        if (bad := missing(frame)).any():
            c, y, x = np.argwhere(bad)[0]
            raise ReadError(
                f"{self.reader.files.paths[file]}: frame {t}, input {c}, row {y}, column {x} is {frame[c, y, x]}, and "
                f"ensembles take differences of all frames: mend the file, or leave it out"
            )
        return frame


def ensemble_moments(members: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Return means over space of the members' variance, and of their fair CRPS, [C, A, 2] in float64.

    With y the truth and x the members, the CRPS is the mean of |x - y| less half the mean of |x - x'| over all pairs of
    two different ones: fair to ensembles of few members (Ferro 2014).

    Args:
        members: [M, C, H, W] in units, in float64, two or more.
        truth: [C, H, W].
        weights: of the rows, [H, A], each adding up to 1.
    """
    M = len(members)
    ranked = members.sort(dim=0).values
    factors = 2 * torch.arange(M, dtype=members.dtype, device=members.device) - M + 1  # of a sum over all pairs
    pairs = torch.einsum("m,mchw->chw", factors, ranked) / (M * (M - 1))
    crps = (members - truth).abs().mean(dim=0) - pairs
    rows = torch.stack([members.var(dim=0), crps]).mean(dim=-1)  # 2 C H
    return torch.einsum("mch,ha->cam", rows, weights)


def rank_histogram(members: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Return the part of the globe where 0, 1, ... M members lie below the truth, [C, M + 1].

    Flat for members that cannot be told from the truth (Hamill 2001); NaN where a member is not finite. `weights` are
    of the rows, [H].
    """
    rank = (members < truth).sum(dim=0)  # C H W
    found = torch.stack([(rank == r).double().mean(dim=-1) @ weights for r in range(len(members) + 1)], dim=-1)
    return found.where(members.isfinite().all(dim=0).flatten(1).all(dim=1)[:, None], torch.nan)


def summarise_ensemble(kept: np.ndarray, squares: np.ndarray, members: int, block: int) -> dict[str, np.ndarray]:
    """Return each score with its interval, [3, K, C, A]: value, low, high.

    `spread` is the root of the mean variance, `spread_skill` that over the RMSE of the ensemble's mean, times
    sqrt((M + 1) / M): 1 for members that cannot be told from the truth (Fortin et al. 2014).

    Args:
        kept: of each forecast, [N, K, C, A, 2].
        squares: mean square errors of the ensemble's mean, [N, K, C, A].
        block: forecasts that are drawn together.
    """
    N = len(kept)
    drawn = resamples(N, block) / N  # 1 + R, N

    def means(x: np.ndarray) -> np.ndarray:
        return (drawn @ x.reshape(N, -1)).reshape(-1, *x.shape[1:])

    variance, crps = (means(kept[..., i]) for i in range(len(KEPT)))
    spread = np.sqrt(variance)
    with np.errstate(divide="ignore", invalid="ignore"):  # of a mean without an error
        ratio = np.sqrt((members + 1) / members) * spread / np.sqrt(means(squares))
    found = {"spread": spread, "crps": crps, "spread_skill": ratio}
    return {name: with_interval(values, N, block) for name, values in found.items()}
