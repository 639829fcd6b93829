"""What the weather is usually like: what anomalies are counted from.

By default the mean over the training years (`time_means`), where that is known. With `--climatology` the means of each
day of the year: a variable for each channel, by its name, of [dayofyear, latitude, longitude], if need be with `hour`
as well. xarray reads it (NetCDF, Zarr): `pip install -r requirements-prepare.txt`.

Shapes:  C channels   H W rows, columns
"""

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.data.fields import Fields
from utils.data.variables import missing
from utils.errors import ReadError
from utils.prepare_data.archive_file import open_archive
from utils.prepare_data.stored import check_stored


class Climatology:
    """The usual state of the forecast channels at any time, in units, in float64 on the device.

    Args:
        fields: the channels and the grid.
        path: a climatology for days of the year; None for the mean over time.
        days: are kept in memory.

    Its name is None where nothing is known: then it is 0, and no forecast, and there are no anomalies.

    Raises ValueError, in one line, for a file that cannot be read, that lacks a channel or a day, or has another grid.
    """

    def __init__(self, fields: Fields, path: str | None, device: torch.device, days: int):
        self.fields, self.path, self.device = fields, path, device
        self.name = None if path is None else Path(path).name
        shape = len(fields.outputs), len(fields.latitude), len(fields.longitude)
        self.time_means = torch.zeros(shape, dtype=torch.float64, device=device)  # of what is not known
        if path is None and fields.time_means is not None:
            self.name = "time_means"
            self.time_means = torch.from_numpy(fields.time_means.astype(np.float64)).to(device)
        # Forecasts of one batch ask for the same days, one step after the other. On the host, which has more room.
        self._read = lru_cache(maxsize=days)(self._read_day)
        if path is not None:
            self._open(path)

    def _open(self, path: str) -> None:
        fields = self.fields
        if not fields.has_time:
            raise ValueError(f"climatology {path} is by date, and the files store no time: leave it out")
        datasets = open_archive(path)
        dataset = datasets[0]
        axes = {"dayofyear", "latitude", "longitude"} | ({"hour"} & set(dataset.dims))
        for axis in axes & {"hour"}:
            if dataset[axis].dtype.kind not in "iuf":
                raise ValueError(f"{path} has an hour that is no number: it takes 0 to 23")
            if not ((dataset[axis] >= 0) & (dataset[axis] < 24)).all():
                raise ValueError(f"{path} has an hour of {dataset[axis].values.max():g} or below 0: it takes 0 to 23")
        for name, units in zip(fields.out_names, fields.units):
            if (
                len(datasets) > 1
                or name not in dataset
                or set(dataset[name].dims) != axes
                or axes - set(dataset.indexes)
            ):
                there = ", ".join(str(name) for name in dataset.data_vars)
                raise ValueError(
                    f"{path} has no {name!r} of [dayofyear, latitude, longitude], each with its values: it holds "
                    f"{there}; give each channel a variable of its name"
                )
            check_stored(path, name)
            here, other = (str(x).replace("**", "") for x in (units, dataset[name].attrs.get("units", units)))
            if units and other != here:
                raise ValueError(f"{path} has {name} in {other}, and the data in {units}: bring it to the same units")
        for axis in sorted(axes):
            index = dataset.indexes[axis]
            if not (index.is_unique and (index.is_monotonic_increasing or index.is_monotonic_decreasing)):
                raise ValueError(f"{path} has a {axis} in no order, or a value twice: sort it first")
        self.file = dataset
        self.dataset = dataset.sel(latitude=fields.latitude, longitude=fields.longitude, method="nearest")
        for axis in ("latitude", "longitude"):
            if not np.allclose(self.dataset[axis], getattr(fields, axis), atol=1e-3):
                raise ValueError(f"{path} has another {axis} than the data: bring it to the same grid")
        days = dataset.dayofyear.values.tolist()
        if sorted(days) not in ([*range(1, 366)], [*range(1, 367)]):
            raise ValueError(f"{path} holds {len(days)} days of the year: it must hold 1 to 365, or 366, each once")

    def close(self) -> None:
        """Close the file."""
        if self.path is not None:
            self.file.close()

    def at(self, seconds: int | None) -> Tensor:
        """Return it for a time, [C, H, W]. Raises ReadError where it cannot be read, or lacks values."""
        if self.path is None:
            return self.time_means
        date, hour = datetime.fromtimestamp(seconds, tz=UTC), None
        if "hour" in self.dataset.dims:  # the nearest one, which may be the first of the next day
            away = [(h - date.hour + 12) % 24 - 12 for h in self.dataset.hour.values.tolist()]
            date += timedelta(hours=min(away, key=abs))
            hour = date.hour
        return self._read(date.timetuple().tm_yday, hour).to(self.device, non_blocking=True)

    def _read_day(self, day: int, hour: int | None) -> Tensor:
        where = {"dayofyear": day} | ({} if hour is None else {"hour": hour})
        at_day = self.dataset.sel(where, method="nearest")  # 365 where there is no 366
        try:
            values = [at_day[name].transpose("latitude", "longitude").values for name in self.fields.out_names]
        except (OSError, RuntimeError, ValueError) as error:
            raise ReadError(f"cannot read {self.path} ({error}): copy it again") from None
        values = np.stack(values).astype(np.float64)
        if (bad := missing(values)).any():
            c, y, x = np.argwhere(bad)[0]
            raise ReadError(
                f"{self.path}: day {day} of the year, {self.fields.out_names[c]!r}, row {y}, column {x} is "
                f"{values[c, y, x]:g}: fill it, or leave the climatology out"
            )
        usual = torch.from_numpy(values)
        return usual.pin_memory() if self.device.type == "cuda" else usual
