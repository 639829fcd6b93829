"""Forecasts as files for other tools: CF conventions 1.8, in the layout of WeatherBench 2, written step by step.

Each channel is a variable of [time, prediction_timedelta, latitude, longitude], where `time` is the one that a forecast
starts from, and `valid_time` the one that it is for; latitudes rise. With WeatherBench's names a variable with levels
has them as an axis, and NaN where there is no channel. `pip install -r requirements-prepare.txt` brings xarray, and
what it writes with.

Shapes:  N forecasts   K lead times   C channels   H W rows, columns
"""

import contextlib
import errno
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from utils.data.fields import Fields
from utils.data.variables import Variable, cf_units, meant, variable
from utils.files import complete, part_of

if TYPE_CHECKING:
    import netCDF4
    import xarray
    import zarr

CONVENTIONS = "CF-1.8"
KINDS, NAMES = ("none", "netcdf", "zarr"), ("own", "wb2")
EPOCH = {"units": "seconds since 1970-01-01 00:00:00", "calendar": "standard"}


@dataclass(frozen=True)
class Outline:
    """What files say of forecasts, beside the values.

    Attributes:
        starts: of each forecast, in seconds since 1970-01-01.
        names: `own` for those of the channels, `wb2` for WeatherBench's where there is one.
        attributes: of the files.
    """

    fields: Fields
    starts: list[int]
    lead_hours: list[float]
    names: str
    attributes: dict[str, str]

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows of a field from the south, [H]."""
        return np.argsort(self.fields.latitude)

    @cached_property
    def kinds(self) -> list[Variable]:
        """What each channel is, [C]."""
        names = self.fields.out_names
        return [variable(meant(name, self.fields.in_names + names)) for name in names]

    @cached_property
    def levels(self) -> list[float]:
        """The values of the axis of levels, in hPa; none where no variable has it."""
        return sorted({x.level for x in self.kinds if x.level is not None}) if self.names == "wb2" else []

    @cached_property
    def places(self) -> list[tuple[str, int | None]]:
        """Where each channel goes: its variable, and its place on the axis of levels, [C]."""
        if self.names == "own":
            return [(name, None) for name in self.fields.out_names]
        found = zip(self.fields.out_names, self.kinds)
        return [(x.wb2 or name, None if x.level is None else self.levels.index(x.level)) for name, x in found]

    def variables(self) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Yield each variable with its axes and attributes."""
        told = {}
        for c, (name, level) in enumerate(self.places):
            one, units = self.kinds[c], self.fields.units[c]
            words = one.long_name if level is None else one.long_name.partition(" at ")[0]
            texts = {"standard_name": one.standard_name, "long_name": words, "units": cf_units(units)}
            told[name] = self.dims(name), {k: x for k, x in texts.items() if x} | {"coordinates": "valid_time"}
        return ((name, *parts) for name, parts in told.items())

    def dims(self, name: str) -> list[str]:
        """Return the axes of a variable."""
        has_levels = any(level is not None for other, level in self.places if other == name)
        return ["time", "prediction_timedelta", *["level"] * has_levels, "latitude", "longitude"]

    def axes(self) -> "xarray.Dataset":
        """Return the axes."""
        import xarray

        fields, starts = self.fields, np.array(self.starts, np.float64)
        hours = np.array(self.lead_hours)
        is_whole = np.allclose(hours, hours.round())
        leads = (hours if is_whole else 3600 * hours).round().astype(np.int32)
        valid = starts[:, None] + np.round(3600 * hours)
        texts = {
            "long_name": "lead time",
            "standard_name": "forecast_period",
            "units": "hours" if is_whole else "seconds",
        }
        begun = {"long_name": "time that the forecast starts from", "standard_name": "forecast_reference_time"}
        meant = {"long_name": "time that the forecast is for", "standard_name": "time"}
        coordinates = {
            "time": ("time", starts, {**begun, "axis": "T", **EPOCH}),
            "prediction_timedelta": ("prediction_timedelta", leads, texts),
            "valid_time": (("time", "prediction_timedelta"), valid, {**meant, **EPOCH}),
        }
        for name, units, axis, values in (
            ("latitude", "degrees_north", "Y", fields.latitude[self.rows]),
            ("longitude", "degrees_east", "X", fields.longitude),
        ):
            texts = {"long_name": name, "standard_name": name, "units": units, "axis": axis}
            coordinates[name] = (name, values.astype(np.float64), texts)
        if self.levels:
            texts = {"standard_name": "air_pressure", "long_name": "pressure level", "units": "hPa"}
            coordinates["level"] = ("level", np.array(self.levels), {**texts, "positive": "down", "axis": "Z"})
        return xarray.Dataset(coords=coordinates, attrs={"Conventions": CONVENTIONS, **self.attributes})

    def encoding(self) -> dict[str, dict[str, None]]:
        """Return how xarray stores the axes: as they are. Those of CF files have no missing values."""
        return {name: {"_FillValue": None} for name in self.axes().variables}


class ForecastWriter:
    """Writes forecasts below `folder`, those of each model by themselves. Raises OSError where it cannot."""

    def __init__(self, folder: Path, outline: Outline):
        self.folder, self.outline = folder, outline

    def prepare(self, models: list[str]) -> None:
        """Write what all forecasts have in common, on one rank."""

    def add(self, n: int, k: int, forecasts: dict[str, Tensor]) -> None:
        """Write step k of forecast n, of each model [C, H, W]."""
        for model, fields in forecasts.items():
            for place, field in zip(self.outline.places, fields.cpu().numpy()):
                self.write(n, k, model, place, field[self.outline.rows])

    def write(self, n: int, k: int, model: str, place: tuple[str, int | None], field: np.ndarray) -> None:
        """Write one channel, [H, W]."""
        raise NotImplementedError

    def finish(self, n: int) -> None:
        """Forecast n is complete."""


@contextlib.contextmanager
def _raising_oserror() -> Iterator[None]:
    """Raise OSError where netCDF4 raises RuntimeError, as for a full disk, which it does not name."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.ENOSPC, f"{error}; is the disk full?") from None


class NetcdfWriter(ForecastWriter):
    """A file for each forecast: `model/2026-02-01T0000.nc`. With dask `xarray.open_mfdataset` joins them."""

    def __init__(self, folder: Path, outline: Outline):
        super().__init__(folder, outline)
        self.files: dict[tuple[int, str], netCDF4.Dataset] = {}  # under way

    def write(self, n: int, k: int, model: str, place: tuple[str, int | None], field: np.ndarray) -> None:
        name, level = place
        with _raising_oserror():
            if (n, model) not in self.files:
                self.files[n, model] = self._create(n, model)
            self.files[n, model][name][(0, k) if level is None else (0, k, level)] = field

    def _create(self, n: int, model: str) -> "netCDF4.Dataset":
        import netCDF4

        part, outline = part_of(self._path(n, model)), self.outline
        part.parent.mkdir(parents=True, exist_ok=True)
        axes = outline.axes().isel(time=[n])
        axes.to_netcdf(part, encoding=outline.encoding(), engine="netcdf4")
        file = netCDF4.Dataset(part, "a")
        file.delncattr("coordinates")  # each variable has it
        for name, dims, texts in outline.variables():
            chunks = [axes.sizes[dim] if dim in ("latitude", "longitude") else 1 for dim in dims]
            stored = {"chunksizes": chunks} if "level" in dims else {}  # a level that is not there takes no room
            file.createVariable(name, "f4", dims, fill_value=np.float32(np.nan), **stored).setncatts(texts)
        return file

    def finish(self, n: int) -> None:
        for number, model in [key for key in self.files if key[0] == n]:
            with _raising_oserror():
                self.files.pop((number, model)).close()
            complete(self._path(n, model))

    def _path(self, n: int, model: str) -> Path:
        time = str(np.datetime64(self.outline.starts[n], "s").astype("datetime64[m]")).replace(":", "")
        return self.folder / model / f"{time}.nc"


class ZarrWriter(ForecastWriter):
    """One store for each model, `model.zarr`: each step of each channel is a chunk, which one rank writes."""

    def __init__(self, folder: Path, outline: Outline):
        super().__init__(folder, outline)
        self.groups: dict[str, zarr.Group] = {}

    def prepare(self, models: list[str]) -> None:
        import zarr

        outline, axes = self.outline, self.outline.axes()
        for model in models:
            path = self.folder / f"{model}.zarr"
            axes.to_zarr(path, mode="w", encoding=outline.encoding(), consolidated=False, zarr_format=2)
            group = zarr.open_group(path, mode="r+")
            del group.attrs["coordinates"]  # each variable has it
            for name, dims, texts in outline.variables():
                shape = tuple(axes.sizes[dim] for dim in dims)
                group.create_array(
                    name, shape=shape, chunks=(*[1] * (len(dims) - 2), *shape[-2:]), dtype="float32", fill_value=np.nan,
                    attributes={**texts, "_ARRAY_DIMENSIONS": dims},  # xarray's names of the axes
                )  # fmt: skip
            zarr.consolidate_metadata(path)

    def write(self, n: int, k: int, model: str, place: tuple[str, int | None], field: np.ndarray) -> None:
        import zarr

        if model not in self.groups:
            self.groups[model] = zarr.open_group(self.folder / f"{model}.zarr", mode="r+")
        name, level = place
        self.groups[model][name][(n, k) if level is None else (n, k, level)] = field


def open_writer(kind: str, folder: Path, outline: Outline) -> ForecastWriter | None:
    """Return what writes forecasts (`netcdf`, `zarr`), or None for `none`.

    Raises ValueError where a library is missing, and where nobody knows when forecasts start.
    """
    if kind == "none":
        return None
    try:
        for library in ("xarray", "zarr" if kind == "zarr" else "netCDF4"):
            importlib.import_module(library)
    except ImportError as error:
        raise ValueError(f"forecasts {kind} needs {error.name}: `pip install -r requirements-prepare.txt`") from None
    if None in outline.starts:
        raise ValueError(f"forecasts {kind} needs dates, and the files store no time: take --forecasts none")
    return (NetcdfWriter if kind == "netcdf" else ZarrWriter)(folder, outline)


def bytes_of(outline: Outline) -> int:
    """Return how much room forecasts take, of one model."""
    points = math.prod((len(outline.fields.latitude), len(outline.fields.longitude), len(outline.fields.out_names)))
    return 4 * len(outline.starts) * len(outline.lead_hours) * points
