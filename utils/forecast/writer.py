"""Forecasts as files for other tools, in the layout of WeatherBench 2, written step by step as they come.

Each channel is a variable of [time, prediction_timedelta, latitude, longitude], where `time` is the one that a forecast
starts from; latitudes rise. `pip install -r requirements-prepare.txt` brings xarray, and what it writes with.

Shapes:  C channels   H W rows, columns
"""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from utils.files import complete, part_of
from utils.forecast.data import ForecastData

if TYPE_CHECKING:
    import netCDF4
    import xarray
    import zarr

DIMS = ("time", "prediction_timedelta", "latitude", "longitude")
ENCODING = {
    "time": {"units": "seconds since 1970-01-01", "dtype": "int64"},
    "prediction_timedelta": {"units": "seconds", "dtype": "int64"},
}


class ForecastWriter:
    """Writes forecasts below `folder`, those of each model by themselves. Raises OSError where it cannot."""

    def __init__(self, folder: Path, data: ForecastData, checkpoint: str):
        self.folder, self.data, self.checkpoint = folder, data, checkpoint
        self.rows = np.argsort(data.fields.latitude)

    def prepare(self, models: list[str]) -> None:
        """Write what all forecasts have in common, on one rank."""

    def add(self, n: int, k: int, forecasts: dict[str, Tensor]) -> None:
        """Write step k of forecast n, of each model [C, H, W]."""
        for model, fields in forecasts.items():
            for name, field in zip(self.data.fields.out_names, fields.cpu().numpy()):
                self.write(n, k, model, name, field[self.rows])

    def write(self, n: int, k: int, model: str, name: str, field: np.ndarray) -> None:
        """Write one channel, [H, W]."""
        raise NotImplementedError

    def finish(self, n: int) -> None:
        """Forecast n is complete."""

    def axes(self, numbers: list[int]) -> "xarray.Dataset":
        """Return the axes of forecasts."""
        import xarray

        data = self.data
        times = np.array([data.seconds(n) for n in numbers], "datetime64[s]")
        latitude, longitude = (x.astype(np.float64) for x in (data.fields.latitude[self.rows], data.fields.longitude))
        leads = np.round(np.array(data.lead_hours) * 3600).astype("timedelta64[s]")
        return xarray.Dataset(
            attrs={"checkpoint": self.checkpoint, "initial_states": data.config.inf_data_path},
            coords={
                "time": ("time", times.astype("datetime64[ns]"), {"long_name": "time that the forecast starts from"}),
                "prediction_timedelta": (DIMS[1], leads.astype("timedelta64[ns]"), {"long_name": "lead time"}),
                "latitude": ("latitude", latitude, {"units": "degrees_north"}),
                "longitude": ("longitude", longitude, {"units": "degrees_east"}),
            },
        )


@contextlib.contextmanager
def _raising_oserror() -> Iterator[None]:
    """Raise OSError where netCDF4 raises RuntimeError, as for a full disk, which it does not name."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"{error}; is the disk full?") from None


class NetcdfWriter(ForecastWriter):
    """A file for each forecast: `forecasts/model/2026-02-01T0000.nc`. With dask `xarray.open_mfdataset` joins them."""

    def __init__(self, folder: Path, data: ForecastData, checkpoint: str):
        super().__init__(folder, data, checkpoint)
        self.files: dict[tuple[int, str], netCDF4.Dataset] = {}  # under way

    def write(self, n: int, k: int, model: str, name: str, field: np.ndarray) -> None:
        with _raising_oserror():
            if (n, model) not in self.files:
                self.files[n, model] = self._create(n, model)
            self.files[n, model][name][0, k] = field

    def _create(self, n: int, model: str) -> "netCDF4.Dataset":
        import netCDF4

        part = part_of(self._path(n, model))
        part.parent.mkdir(parents=True, exist_ok=True)
        self.axes([n]).to_netcdf(part, encoding=ENCODING, engine="netcdf4")
        file = netCDF4.Dataset(part, "a")
        for name, units in zip(self.data.fields.out_names, self.data.fields.units):
            file.createVariable(name, "f4", DIMS, fill_value=np.float32(np.nan)).units = units
        return file

    def finish(self, n: int) -> None:
        for number, model in [key for key in self.files if key[0] == n]:
            with _raising_oserror():
                self.files.pop((number, model)).close()
            complete(self._path(n, model))

    def _path(self, n: int, model: str) -> Path:
        time = str(np.datetime64(self.data.seconds(n), "s").astype("datetime64[m]")).replace(":", "")
        return self.folder / "forecasts" / model / f"{time}.nc"


class ZarrWriter(ForecastWriter):
    """One store for each model, `forecasts/model.zarr`: each step of each channel is a chunk, which one rank writes."""

    def __init__(self, folder: Path, data: ForecastData, checkpoint: str):
        super().__init__(folder, data, checkpoint)
        self.groups: dict[str, zarr.Group] = {}

    def prepare(self, models: list[str]) -> None:
        import zarr

        axes = self.axes(list(range(len(self.data))))
        shape = tuple(axes.sizes[dim] for dim in DIMS)
        for model in models:
            axes.to_zarr(self._path(model), mode="w", encoding=ENCODING, consolidated=False, zarr_format=2)
            group = zarr.open_group(self._path(model), mode="r+")
            for name, units in zip(self.data.fields.out_names, self.data.fields.units):
                group.create_array(
                    name, shape=shape, chunks=(1, 1, *shape[2:]), dtype="float32", fill_value=np.nan,
                    attributes={"units": units, "_ARRAY_DIMENSIONS": list(DIMS)},  # xarray's names of the axes
                )  # fmt: skip
            zarr.consolidate_metadata(self._path(model))

    def write(self, n: int, k: int, model: str, name: str, field: np.ndarray) -> None:
        import zarr

        if model not in self.groups:
            self.groups[model] = zarr.open_group(self._path(model), mode="r+")
        self.groups[model][name][n, k] = field

    def _path(self, model: str) -> Path:
        return self.folder / "forecasts" / f"{model}.zarr"


def open_writer(kind: str, folder: Path, data: ForecastData, checkpoint: str) -> ForecastWriter | None:
    """Return what writes forecasts (`netcdf`, `zarr`), or None for `none`.

    Raises ValueError where a library is missing, and where the files store no time.
    """
    if kind == "none":
        return None
    try:
        for library in ("xarray", "zarr" if kind == "zarr" else "netCDF4"):
            importlib.import_module(library)
    except ImportError as error:
        raise ValueError(f"forecasts {kind} needs {error.name}: `pip install -r requirements-prepare.txt`") from None
    if not data.fields.has_time:
        raise ValueError(f"forecasts {kind} needs dates, and {data.config.inf_data_path} stores no time: leave it out")
    return (NetcdfWriter if kind == "netcdf" else ZarrWriter)(folder, data, checkpoint)
