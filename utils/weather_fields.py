"""The fields of a data set as a model sees them: grid, channels, statistics."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.config import Config
from utils.era5 import STORED_STEP_HOURS, Files, channel_indices, check_crop, load_stats
from utils.fields import Fields
from utils.normalisation import Normaliser
from utils.token_shard import TokenShard


class WeatherFields:
    """What a model's inputs and forecasts stand for, by configuration and files.

    Args:
        files: the files whose grid and channels these are.
        tokens: which tokens of each image this rank holds; all of them by default.

    Raises ValueError, in one line with the remedy, for whatever is wrong with the statistics, the crop or the channels
    asked for.
    """

    def __init__(
        self,
        config: Config,
        files: Files,
        device: torch.device = torch.device("cpu"),
        tokens: TokenShard | None = None,
    ):
        self.config, self.device = config, device
        self.fields = Fields.open(config, files)
        self.tokens = tokens or TokenShard(config.img_size, config.patch_size)
        seconds = files.step_seconds()
        self.has_time = seconds is not None
        self.step_hours = config.dt * (seconds / 3600 if self.has_time else STORED_STEP_HOURS)  # lead of a forecast
        C, H, W = files.shape
        rows, columns = self.img_size = config.img_size
        check_crop(files, self.img_size, config.patch_size)
        self.latitude, self.longitude = files.latitude[:rows], files.longitude[:columns]

        names, self.warning = files.names(config.channel_names)
        inputs = self.inputs = channel_indices(names, config.in_channels, config.n_in_channels, "in_channels")
        outputs = self.outputs = channel_indices(names, config.out_channels, config.n_out_channels, "out_channels")
        self.in_names, self.out_names = [names[c] for c in inputs], [names[c] for c in outputs]
        self.units = [files.units[c] for c in outputs]
        shown = config.plot_channels or self.out_names[:1]
        self.plot_channels = channel_indices(tuple(self.out_names), tuple(shown), 0, "plot_channels")
        # Where each forecast channel stands among the inputs: what persistence and a residual forecast start from.
        self.origins = [inputs.index(c) if c in inputs else -1 for c in outputs]
        if config.residual and -1 in self.origins:
            missing = self.out_names[self.origins.index(-1)]
            raise ValueError(f"residual needs every forecast channel among the inputs, and {missing!r} is not: add it")

        means = self.means = load_stats(config.global_means_path, [(1, C, 1, 1)], "global_means_path").reshape(C)
        stds = self.stds = load_stats(config.global_stds_path, [(1, C, 1, 1)], "global_stds_path").reshape(C)
        for c in inputs + outputs:
            if not stds[c] > 0:
                raise ValueError(
                    f"{config.global_stds_path} gives channel {names[c]!r} a standard deviation of {stds[c]}: "
                    f"it must be above 0; leave a constant channel out"
                )
        shapes = list(dict.fromkeys([(1, C, H, W), (1, C, rows, columns)]))
        self.time_means = load_stats(config.time_means_path, shapes, "time_means_path")[0, outputs, :rows, :columns]
        self.climatology = (self.time_means - means[outputs, None, None]) / stds[outputs, None, None]
        self.residual_scale = None
        if config.time_diff_stds_path is not None:
            if not config.residual:
                raise ValueError("time_diff_stds_path scales a residual forecast: add --residual, or leave it out")
            diffs = load_stats(config.time_diff_stds_path, [(1, C, 1, 1)], "time_diff_stds_path").reshape(C)
            self.residual_scale = (diffs[outputs] / stds[outputs]).tolist()
        self.normalise = [
            Normaliser(self._column(means[channels]), self._column(stds[channels]), config.enable_jit)
            for channels in (inputs, outputs)
        ]

    @property
    def hours(self) -> str:
        """The lead time in words."""
        return f"{self.step_hours:g} h" + ("" if self.has_time else " (assumed: the files store no time)")

    @property
    def description(self) -> dict[str, Any]:
        """What other files and statistics must have in common with these; None where nothing is known."""
        return {
            "input channels": self.in_names,
            "forecast channels": self.out_names,
            "units": self.units if any(self.units) else None,
            "step in hours": self.step_hours if self.has_time else None,
            "latitudes": [round(float(self.latitude[i]), 3) for i in (0, -1)],
            "longitudes": [round(float(self.longitude[i]), 3) for i in (0, -1)],
            "statistics": [
                self.means[self.inputs + self.outputs].tolist(),
                self.stds[self.inputs + self.outputs].tolist(),
                self.residual_scale,
            ],
        }

    def to_units(self, field: Tensor, channel: int) -> np.ndarray:
        """Return a normalised field [H, W] of forecast channel `channel` in its units, on the host."""
        c = self.outputs[channel]
        return field.double().cpu().numpy() * float(self.stds[c]) + float(self.means[c])

    def _column(self, values: np.ndarray) -> Tensor:
        return self._tensor(values).view(1, -1, 1, 1)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=torch.get_default_dtype())
