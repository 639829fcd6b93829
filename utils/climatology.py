"""What the weather is usually like: what anomalies are counted from.

By default the mean over the training years (`time_means`). With `--climatology` the means of each day of the year, as
WeatherBench 2 has them: a variable for each channel, [dayofyear, latitude, longitude], if need be with `hour` as well.
xarray reads it (NetCDF, Zarr): `pip install -r requirements-prepare.txt`.
"""

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.archive_file import open_archive

if TYPE_CHECKING:
    from utils.weather_fields import WeatherFields


class Climatology:
    """The usual state of the forecast channels at any time, in units.

    Args:
        fields: the channels and the grid.
        path: a climatology for days of the year; None for the mean over time.

    Raises ValueError, in one line, for a file that cannot be read, that lacks a channel or a day, or has another grid.
    """

    def __init__(self, fields: "WeatherFields", path: str | None):
        self.fields, self.path = fields, path
        self.name = "time_means" if path is None else Path(path).name
        if path is not None:
            self._open(path)

    def _open(self, path: str) -> None:
        fields = self.fields
        if not fields.has_time:
            raise ValueError(f"climatology {path} is by date, and the files store no time: leave it out")
        (dataset,) = open_archive(path)
        axes = {"dayofyear", "latitude", "longitude"} | ({"hour"} & set(dataset.dims))
        for name in fields.out_names:
            if name not in dataset or set(dataset[name].dims) != axes:
                there = ", ".join(str(name) for name in dataset.data_vars)
                raise ValueError(
                    f"{path} has no {name!r} of [dayofyear, latitude, longitude]: it holds {there}; "
                    f"give each channel a variable of its name"
                )
        try:
            self.dataset = dataset.sel(latitude=fields.latitude, longitude=fields.longitude, method="nearest")
        except KeyError as error:
            raise ValueError(f"{path} has no {error}: it must be on the grid of the data") from None
        for axis in ("latitude", "longitude"):
            if not np.allclose(self.dataset[axis], getattr(fields, axis), atol=1e-3):
                raise ValueError(f"{path} has another {axis} than the data: bring it to the same grid")
        days = set(dataset.dayofyear.values.tolist())
        if not days >= set(range(1, 366)):
            raise ValueError(f"{path} holds {len(days)} days of the year: it must hold 365 or 366")

    def at(self, seconds: int | None) -> np.ndarray:
        """Return it for a time, [C, H, W] in float64."""
        if self.path is None:
            return self.fields.time_means.astype(np.float64)
        date = datetime.fromtimestamp(seconds, tz=timezone.utc)
        where = {"dayofyear": date.timetuple().tm_yday}
        if "hour" in self.dataset.dims:
            where["hour"] = date.hour
        day = self.dataset.sel(where, method="nearest")  # 365 where there is no 366, the nearest hour
        return np.stack([day[name].transpose("latitude", "longitude").values for name in self.fields.out_names]).astype(
            np.float64
        )
