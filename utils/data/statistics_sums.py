"""What statistics are made of: sums over the frames of training files, in float64, from the values as stored.

Shapes: C channels, H W latitudes, longitudes.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.data.statistics import NAMES
from utils.files import whole, write_text


class StatisticsSums:
    """`add` every frame once; then `write`.

    Args:
        shape: of a frame, (C, H, W).
    """

    FILES = ("global_means", "global_stds", "time_means", "time_diff_stds")
    SUMS = ("sum", "square_sum", "diff_sum", "diff_square_sum", "frames", "differences")

    def __init__(self, shape: tuple[int, int, int]):
        self.frames = self.differences = 0
        self.sum = torch.zeros(shape, dtype=torch.float64)
        self.square_sum, self.diff_sum, self.diff_square_sum = torch.zeros(3, shape[0], dtype=torch.float64)

    def add(self, frame: Tensor, before: Tensor | None) -> None:
        """Add a frame [C, H, W] on the CPU, and its change from the one before it, None where there is none."""
        # A channel at a time stays in the processor's cache: for large frames twice as fast or more.
        for channel, values in enumerate(frame):
            wide = values.double()
            self.sum[channel] += wide
            self.square_sum[channel] += wide.square().sum()
            if before is not None:
                change = wide.sub_(before[channel])
                self.diff_sum[channel] += change.sum()
                self.diff_square_sum[channel] += change.square_().sum()
        self.frames += 1
        self.differences += before is not None

    def save(self, path: Path) -> None:
        """Keep the sums so far, complete or not at all; `load` goes on from there."""
        with whole(path) as part, part.open("wb") as file:
            np.savez(file, **{name: getattr(self, name) for name in self.SUMS})

    def load(self, path: Path) -> None:
        """Go on from the sums that were kept."""
        with np.load(path) as kept:
            for name in self.SUMS:
                setattr(self, name, torch.from_numpy(kept[name]) if kept[name].ndim else int(kept[name]))

    def statistics(self) -> dict[str, Tensor]:
        """Return the statistics by the names of their files, [1, C, 1, 1] or [1, C, H, W], float32."""
        points = self.sum[0].numel()
        time_means = self.sum / self.frames
        means = time_means.mean((1, 2))
        # The mean of squares less the square of the mean: float64 has digits to spare for a float32 result.
        variance = self.square_sum / (self.frames * points) - means.square()
        diff_count = max(self.differences, 1) * points
        diff_variance = self.diff_square_sum / diff_count - (self.diff_sum / diff_count).square()
        stds, diff_stds = (x.clamp(min=0).sqrt() for x in (variance, diff_variance))
        found = means[:, None, None], stds[:, None, None], time_means, diff_stds[:, None, None]
        return {name: value[None].float() for name, value in zip(self.FILES, found)}

    def write(self, folder: Path, channels: list[str] | tuple[str, ...], leave: tuple[str, ...] = ()) -> None:
        """Write the files of statistics, but those to `leave`, and the names of the channels."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in self.statistics().items():
            if name not in leave:
                with whole(folder / f"{name}.npy") as part, part.open("wb") as file:
                    np.save(file, value.numpy())
        if not leave or (folder / NAMES).exists():  # of those that were there nobody knows more than before
            write_text(folder / NAMES, "\n".join(channels) + "\n")
