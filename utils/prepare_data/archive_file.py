"""One file of an archive (NetCDF, Zarr, GRIB), seen as pieces of channels: what archive.py puts together.

It is opened once and read in blocks of time. xarray reads it: `pip install -r requirements-prepare.txt`.

Shapes: T time steps, L levels, H latitudes, W longitudes.
"""

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from utils.errors import ReadError, first_line
from utils.files import patiently
from utils.prepare_data.stored import GRIB, LARGEST_FIELD, check_archive

if TYPE_CHECKING:
    import xarray

# What archives call the axes.
TIMES = ("valid_time", "time")
LEADS = ("step", "prediction_timedelta", "forecast_period")
SECONDS = {"hours": 3600, "hour": 3600, "h": 3600, "days": 86400, "minutes": 60, "seconds": 1, "s": 1}
AXES = {
    "level": ("pressure_level", "isobaricInhPa", "level", "plev", "lev"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon"),
}
PRESSURES = {"Pa": 0.01, "": 1.0} | dict.fromkeys(("hPa", "mb", "mbar", "millibar", "millibars"), 1.0)  # in hPa
LONGEST_LEAD = 1e9  # seconds
REGRID = "bring them to one regular grid first (cdo remapbil, or xESMF in Python); this tool does not regrid"


@dataclass(frozen=True)
class Piece:
    """A stretch of a channel that one file holds."""

    path: str
    times: np.ndarray  # [T], seconds since 1970-01-01
    values: "xarray.DataArray"  # of all levels, as stored, not read yet
    time_axis: str | None  # its name; None for a single time
    level: int | None  # which of several levels that lie side by side
    latitude: np.ndarray  # as stored
    longitude: np.ndarray
    fixed: tuple[tuple[str, object], ...]  # axes of a single value that are left out, and that value

    def read(self, start: int, stop: int, levels: list[int | None]) -> np.ndarray:
        """Return steps `start` to `stop` of several levels, [T, L, H, W], rows from the north.

        Raises ReadError for a damaged file, and where its storage fails for longer than a moment.
        """
        at = {} if self.time_axis is None else {self.time_axis: slice(start, stop)}
        if levels[0] is not None:
            at["level"] = levels
        part = self.values.isel(at)  # a plain slice first: turned round later, it is still read in one stretch
        try:
            values = patiently(lambda: part.values)
        except Exception as error:  # each engine has its own kinds
            raise ReadError(
                f"{self.path} cannot be read ({first_line(error)}): see to its storage, or copy it again"
            ) from None
        axes = [axis for axis in (self.time_axis, "level", "latitude", "longitude") if axis in part.dims]
        values = values.transpose([part.dims.index(axis) for axis in axes])
        values = values.reshape(-1, len(levels), *values.shape[-2:])
        return values[:, :, ::-1] if self.latitude[0] < self.latitude[-1] else values

    @property
    def chunk(self) -> int:
        """Time steps that are stored together, and decompressed together."""
        chunks = self.values.encoding.get("preferred_chunks") or {}
        return min(int(chunks.get(self.time_axis, 1)), len(self.times))


def pieces_in(
    path: str, useless: dict[str, str], constants: bool = False
) -> Iterator[tuple[tuple[str, float | None], str, Piece]]:
    """Yield ((variable, level), units, piece) for all that a file holds on a grid of latitudes and longitudes.

    What cannot be a channel is noted in `useless`, with the reason. For `constants` a variable needs no time, and has
    its first one.
    """
    try:
        yield from _pieces_in(path, useless, constants)
    except Exception as error:  # each engine has its own kinds
        if isinstance(error, ValueError) and path in str(error):
            raise
        raise ValueError(f"{path} cannot be read ({first_line(error)}): check the file") from None


def _pieces_in(
    path: str, useless: dict[str, str], constants: bool
) -> Iterator[tuple[tuple[str, float | None], str, Piece]]:
    for dataset in open_archive(path):
        renamed = _axis_names(dataset)
        dataset, stored = dataset.rename(renamed), {new: old for old, new in renamed.items()}
        bounds = {dataset[name].attrs.get("bounds") for name in dataset.coords}
        for variable, values in dataset.data_vars.items():
            name = str(stored.get(variable, variable))
            if variable in bounds or values.ndim < 2:
                continue
            if not {"latitude", "longitude"} <= set(values.dims):
                useless[name] = f"{path}: {name} has axes {', '.join(values.dims)}, no latitude and longitude: {REGRID}"
                continue
            if not values.size:
                continue
            if "level" in values.coords and values.level.ndim > 1:
                useless[name] = f"{path}: {name} has levels that change along {', '.join(values.level.dims)}: {REGRID}"
                continue
            if "level" in values.coords and (kind := str(values.level.attrs.get("units", ""))) not in PRESSURES:
                useless[name] = (
                    f"{path}: {name} has levels in {kind!r}, and channels are named after pressures in hPa: "
                    f"select one of them, and drop its axis, first"
                )
                continue
            if values.sizes["latitude"] * values.sizes["longitude"] > LARGEST_FIELD:
                useless[name] = f"{path}: {name} has {dict(values.sizes)} points: a field has at most {LARGEST_FIELD:,}"
                continue
            times, time_axis = _times(path, values)
            if constants and (times is None or len(times)):
                times = np.zeros(1, np.int64)
            if times is None or not len(times):
                continue  # a constant, such as a land mask, or a file without steps
            fixed = []
            others = [axis for axis in values.dims if axis not in (time_axis, "level", "latitude", "longitude")]
            if "level" in values.dims and "level" not in values.coords:
                others.append("level")
            several = [axis for axis in others if values.sizes[axis] > 1]
            if several:
                useless[name] = (
                    f"{path}: {name} has {values.sizes[several[0]]} values along {several[0]!r}: "
                    f"select one of them, or combine them, first"
                )
                continue
            for axis in others:
                fixed.append((axis, values[axis].item() if axis in values.coords else None))
                values = values.isel({axis: 0})
            if angles := [a for a in ("latitude", "longitude") if str(values[a].attrs.get("units")).startswith("rad")]:
                raise ValueError(f"{path} has {angles[0]} in radians: convert it to degrees first")
            units = str(values.attrs.get("units", "")).replace("**", "")
            grid = [values[axis].values.astype(np.float64) for axis in ("latitude", "longitude")]
            levels, scale = [None], 1.0
            if "level" in values.coords:
                levels = values.level.values.reshape(-1)
                scale = PRESSURES[kind]
            for i, level in enumerate(levels):
                key = name, None if level is None else round(float(level) * scale, 6)
                index = i if "level" in values.dims else None
                yield key, units, Piece(path, times, values, time_axis, index, *grid, tuple(fixed))


def _times(path: str, values: "xarray.DataArray") -> tuple[np.ndarray | None, str | None]:
    """Return the times [T] that fields are valid at, and the name of their axis; (None, None) for constants.

    Raises ValueError where they are no dates.
    """
    axis = next((name for name in TIMES if name in values.dims), None)
    along = {axis} - {None}
    chosen = next((name for name in TIMES if name in values.coords and set(values[name].dims) == along), None)
    if chosen is None:
        return None, None
    times = values[chosen]
    if not np.issubdtype(times.dtype, np.datetime64):
        calendar = times.encoding.get("calendar") or getattr(times.values.reshape(-1)[0], "calendar", "unknown")
        raise ValueError(
            f"{path}: its time is no date of the usual calendar (calendar {calendar}): convert it first "
            f"(xarray's convert_calendar)"
        )
    times = times.values.reshape(-1).astype("datetime64[ms]")  # in ns the year 2263 would be 1678
    if (
        chosen != "valid_time" and "forecast_reference_time" not in values.coords
    ):  # the start of a forecast, and the lead
        for name in LEADS:
            if name in values.coords and values[name].size == 1:
                times = times + _lead(path, values[name])
    if np.isnat(times).any():
        raise ValueError(f"{path}: some of its times are missing: give each step a date")
    return (times.astype(np.int64) + 500) // 1000, axis


def _lead(path: str, lead: "xarray.DataArray") -> np.timedelta64:
    """Return a lead time. Raises ValueError where its unit is none of time."""
    value, units = lead.values.reshape(-1)[0], str(lead.attrs.get("units", ""))
    if np.issubdtype(lead.dtype, np.timedelta64):
        value, units = value / np.timedelta64(1, "s"), "seconds"
    if units not in SECONDS:
        raise ValueError(f"{path}: its {lead.name} is in {units or 'no unit'}: it takes one of {', '.join(SECONDS)}")
    if not abs(float(value)) * SECONDS[units] < LONGEST_LEAD:
        raise ValueError(f"{path}: its {lead.name} is {value} {units}: no lead time is as long")
    return np.timedelta64(round(float(value) * SECONDS[units] * 1e3), "ms")


def open_archive(path: str) -> list["xarray.Dataset"]:
    """Open a file; GRIB files come as several data sets, one for each kind of level."""
    try:
        import xarray
    except ImportError:
        raise ValueError("reading archives needs xarray: `pip install -r requirements-prepare.txt`") from None
    if not Path(path).exists():
        raise ValueError(f"no file {path!r}: {'copy it here first' if '://' in path else 'check the path'}")
    check_archive(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # of libraries, for who calls them
            if path.endswith(GRIB):
                return _opened_grib(path)
            if Path(path).is_dir():
                return [xarray.open_zarr(path, chunks=None)]
            return [xarray.open_dataset(path, engine="netcdf4")]  # with which it was looked at
    except Exception as error:  # each engine has its own kinds
        raise ValueError(f"cannot read {path} as NetCDF, Zarr or GRIB ({first_line(error)}): check the file") from None


def _opened_grib(path: str) -> list["xarray.Dataset"]:
    """Open a GRIB file by an index of its messages, without which it is scanned again for each variable.

    An index is a pickle: one that lies beside the file is not read.
    """
    import cfgrib

    logging.getLogger("cfgrib").setLevel(logging.CRITICAL)  # what it logs it raises, too
    with TemporaryDirectory() as own:
        # cfgrib heeds these two for all that it opens among backend_kwargs only.
        return cfgrib.open_datasets(path, backend_kwargs={"indexpath": f"{own}/{{hash}}", "errors": "raise"})


def _axis_names(dataset: "xarray.Dataset") -> dict[str, str]:
    """Return how to rename the axes of space: the first name of each kind that is one, else a single value."""
    renamed = {}
    for axis, names in AXES.items():
        along = [name for name in names if name in dataset.dims and name in dataset.coords]
        single = [name for name in names if name in dataset.coords and dataset[name].ndim == 0]
        chosen = (along + single)[:1]
        if chosen and chosen[0] != axis:
            renamed[chosen[0]] = axis
            if axis in dataset.variables or axis in dataset.dims:
                renamed[axis] = f"other_{axis}"
    return renamed
