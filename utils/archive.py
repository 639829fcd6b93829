"""Archives of gridded fields (NetCDF, Zarr, GRIB) seen as channels over time: what utils/prepare_data.py reads.

A channel is a variable, at one level if it has levels. Files may hold several variables, levels and stretches of time,
in any division; they are opened once, and read in blocks of time. xarray reads them: `pip install -r
requirements-prepare.txt`.

Shapes: T time steps, C channels, H latitudes from the north, W longitudes from 0 degrees east.
"""

import difflib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray

# What archives call the axes.
TIMES = ("valid_time", "time")
LEADS = ("step", "prediction_timedelta", "forecast_period")
AXES = {
    "level": ("pressure_level", "isobaricInhPa", "level", "plev", "lev"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon"),
}
ALIASES = {"u10m": "u10", "v10m": "v10"}  # the tutorial's names of what ERA5 calls otherwise
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

        Raises ValueError for a damaged file.
        """
        at = {} if self.time_axis is None else {self.time_axis: slice(start, stop)}
        if levels[0] is not None:
            at["level"] = levels
        part = self.values.isel(at)  # a plain slice first: turned round later, it is still read in one stretch
        try:
            values = part.values
        except Exception as error:  # each engine has its own kinds
            raise ValueError(f"{self.path} cannot be read ({_first_line(error)}): copy it again") from None
        axes = [axis for axis in (self.time_axis, "level", "latitude", "longitude") if axis in part.dims]
        values = values.transpose([part.dims.index(axis) for axis in axes])
        values = values.reshape(-1, len(levels), *values.shape[-2:])
        return values[:, :, ::-1] if self.latitude[0] < self.latitude[-1] else values

    @property
    def chunk(self) -> int:
        """Time steps that are stored together, and decompressed together."""
        chunks = self.values.encoding.get("preferred_chunks") or {}
        return min(int(chunks.get(self.time_axis, 1)), len(self.times))


@dataclass(frozen=True)
class Channel:
    """A named channel, its pieces in the order of time."""

    name: str
    units: str
    pieces: tuple[Piece, ...]

    @cached_property
    def times(self) -> np.ndarray:
        return np.concatenate([piece.times for piece in self.pieces])

    @cached_property
    def starts(self) -> np.ndarray:
        """The first step of each piece, and the number of all steps."""
        return np.cumsum([0, *(len(piece.times) for piece in self.pieces)])


@dataclass(frozen=True)
class Archive:
    """Channels on one grid, at the same times."""

    channels: tuple[Channel, ...]
    times: np.ndarray  # [T], seconds since 1970-01-01, one step apart but for gaps
    latitude: np.ndarray  # [H], degrees north, from the north
    longitude: np.ndarray  # [W], degrees east, from 0 where they go round the globe
    rolled: int  # columns are stored this far to the right

    @staticmethod
    def open(paths: list[str], channels: list[str] | None = None, allow_gaps: bool = False) -> "Archive":
        """Open files and find the channels: by default all there are, else those named (see `find`).

        Raises ValueError, in one line with the remedy, for files that cannot be read, variables that are missing,
        grids and units that differ, and times that go back, differ between channels or leave gaps.
        """
        pieces: dict[tuple[str, float | None], list[Piece]] = {}
        units: dict[tuple[str, float | None], str] = {}
        useless: dict[str, str] = {}  # variables that cannot be channels, and why
        for path in paths:
            for key, unit, piece in _pieces(path, useless):
                pieces.setdefault(key, []).append(piece)
                if unit and units.setdefault(key, unit) != unit:
                    raise ValueError(
                        f"{key[0]} is in {units[key]} in {pieces[key][0].path}, and in {unit} in {path}: "
                        f"bring them to one unit"
                    )
        wanted = {re.split("[=@]", text)[-2 if "@" in text else -1] for text in channels or useless}
        for variable in useless.keys() & wanted:
            raise ValueError(useless[variable])
        if not pieces:
            raise ValueError("the files hold no channel: a variable with a time, a latitude and a longitude")
        named = [find(text, list(pieces)) for text in channels or map(_default_name, pieces)]
        names = [name for name, _ in named]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"channel {twice!r} is named twice: give each channel a name of its own")
        found = tuple(
            Channel(name, units.get(key, ""), tuple(sorted(pieces[key], key=lambda piece: piece.times[0])))
            for name, key in named
        )
        for channel in found:
            first = channel.pieces[0]
            for piece in channel.pieces:
                if piece.fixed != first.fixed:
                    raise ValueError(
                        f"{channel.name} stands for {dict(first.fixed)} in {first.path}, and for {dict(piece.fixed)} "
                        f"in {piece.path}: give files of one kind"
                    )
        latitude, longitude = _common_grid(found)
        width = np.diff(longitude)
        is_round = np.allclose(width, width[0]) and abs(width[0] * len(longitude) - 360) < width[0] / 2
        rolled = int(np.argmin(longitude % 360)) if is_round else 0
        return Archive(
            channels=found,
            times=_common_times(found, allow_gaps),
            latitude=latitude.astype(np.float32),
            longitude=np.roll(longitude % 360 if is_round else longitude, -rolled).astype(np.float32),
            rolled=rolled,
        )

    @property
    def chunk(self) -> int:
        """Time steps that are stored together, the most that any file has."""
        return max(piece.chunk for channel in self.channels for piece in channel.pieces)

    def read(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of a channel, its steps `start` to `stop` [T, H, W]): rows from the north, columns from 0E.

        All levels of a variable are read at once: archives store many of them in one chunk.
        """
        together: dict[tuple[int, ...], list[int]] = {}
        for c, channel in enumerate(self.channels):
            together.setdefault(tuple(id(piece.values) for piece in channel.pieces), []).append(c)
        for members in together.values():
            starts = self.channels[members[0]].starts
            first, last = np.searchsorted(starts, [start, stop - 1], side="right") - 1
            parts = []
            for i in range(first, last + 1):
                pieces = [self.channels[c].pieces[i] for c in members]
                begin, end = max(start - int(starts[i]), 0), min(stop, int(starts[i + 1])) - int(starts[i])
                parts.append(pieces[0].read(begin, end, [piece.level for piece in pieces]))
            values = np.concatenate(parts) if len(parts) > 1 else parts[0]
            for i, c in enumerate(members):
                yield c, np.roll(values[:, i], -self.rolled, axis=-1) if self.rolled else values[:, i]


def _default_name(key: tuple[str, float | None]) -> str:
    """Return how to ask for a variable at a level, under its usual name: vo850=vo@850."""
    variable, level = key
    return variable if level is None else f"{variable}{level:g}={variable}@{level:g}"


def find(text: str, available: list[tuple[str, float | None]]) -> tuple[str, tuple[str, float | None]]:
    """Return the name of a channel, and its variable and level, of what was asked for.

    `NAME=VARIABLE@LEVEL` says all. `NAME=VARIABLE` is for variables without levels. `NAME` by itself is a variable, or
    a variable and a level as in `vo850`. Levels are in hPa.

    Raises ValueError where there is no such variable, with what there is.
    """
    name, _, source = text.partition("=")
    variable, at, level = (source or name).partition("@")
    variables = {known for known, _ in available}
    split = re.fullmatch(r"(.*?)(\d+)", variable)
    # u10 and v100 are winds so many metres above the ground: not u at 10 hPa.
    is_level = split and split[1] in variables and variable not in ("u10", "v10", "u100", "v100")
    if not at and variable not in variables and is_level:
        variable, level = split.groups()
    if variable not in variables:
        variable = ALIASES.get(variable, variable)
    levels = [known for v, known in available if v == variable]
    try:
        wanted = round(float(level), 6) if level else None
    except ValueError:
        raise ValueError(f"channel {text!r} has the level {level!r}: it takes a number, in hPa") from None
    if wanted is None and len(levels) == 1:
        wanted = levels[0]
    if (variable, wanted) in available:
        return (name if source or not at else variable + level), (variable, wanted)
    known = [v + ("" if k is None else f"@{k:g}") for v, k in available]
    close = difflib.get_close_matches(source or name, known, n=3)
    raise ValueError(
        f"nothing in the files for channel {text!r}: they hold {', '.join(close or known[:40])}"
        f"{' ...' if close or len(known) > 40 else ''}; name it as NAME=VARIABLE or NAME=VARIABLE@LEVEL"
    )


def _pieces(path: str, useless: dict[str, str]):
    """Yield ((variable, level), units, piece) for all that a file holds on a grid of latitudes and longitudes.

    What cannot be a channel is noted in `useless`, with the reason.
    """
    for dataset in _open(path):
        dataset = dataset.rename(_axis_names(dataset))
        bounds = {dataset[name].attrs.get("bounds") for name in dataset.coords}
        for variable, values in dataset.data_vars.items():
            name = str(variable)
            if variable in bounds or values.ndim < 2:
                continue
            if not {"latitude", "longitude"} <= set(values.dims):
                useless[name] = (
                    f"{path}: {name} has the axes {', '.join(values.dims)}, no latitude and longitude: {REGRID}"
                )
                continue
            times, time_axis = _times(path, values)
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
            units = str(values.attrs.get("units", "")).replace("**", "")
            grid = [values[axis].values.astype(np.float64) for axis in ("latitude", "longitude")]
            levels, scale = [None], 1.0
            if "level" in values.coords:
                levels = values.level.values.reshape(-1)
                scale = 0.01 if values.level.attrs.get("units") == "Pa" else 1.0
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
    times = times.values.reshape(-1).astype("datetime64[ns]")
    if chosen != "valid_time":  # forecasts: the time that they start from, and the lead
        for name in LEADS:
            if name in values.coords and values[name].size == 1:
                times = times + values[name].values.reshape(-1)[0].astype("timedelta64[ns]")
    if np.isnat(times).any():
        raise ValueError(f"{path}: some of its times are missing: give each step a date")
    return (times.astype(np.int64) + 500_000_000) // 1_000_000_000, axis


def _open(path: str) -> list["xarray.Dataset"]:
    """Open a file; GRIB files come as several data sets, one for each kind of level."""
    try:
        import xarray
    except ImportError:
        raise ValueError(
            "reading archives needs xarray, which is not installed: `pip install -r requirements-prepare.txt`"
        ) from None
    if not Path(path).exists():
        raise ValueError(f"no file {path!r}: {'copy it here first' if '://' in path else 'check the path'}")
    try:
        if Path(path).suffix in (".grib", ".grb", ".grib2", ".grb2"):
            import cfgrib

            logging.getLogger("cfgrib").setLevel(logging.CRITICAL)  # what it logs it raises, too
            return cfgrib.open_datasets(path, indexpath="", errors="raise")
        if Path(path).is_dir():
            return [xarray.open_zarr(path, chunks=None)]
        return [xarray.open_dataset(path)]
    except Exception as error:  # each engine has its own kinds
        raise ValueError(f"cannot read {path} as NetCDF, Zarr or GRIB ({_first_line(error)}): check the file") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def _common_grid(channels: tuple[Channel, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the latitudes, from the north, and the longitudes of all channels.

    Raises ValueError where they differ or are in no order.
    """

    def grid(piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        south_first = piece.latitude[0] < piece.latitude[-1]
        return piece.latitude[::-1] if south_first else piece.latitude, np.round(piece.longitude, 5)

    first = channels[0].pieces[0]
    latitude, longitude = grid(first)
    for piece in (piece for channel in channels for piece in channel.pieces):
        for axis, values, expected in zip(("latitude", "longitude"), grid(piece), (latitude, longitude)):
            if values.shape != expected.shape or not np.allclose(values, expected, atol=1e-4):
                raise ValueError(
                    f"{piece.path} has the {axis} {_range(values)}, and {first.path} {_range(expected)}: {REGRID}"
                )
    turn = np.diff(longitude) % 360
    if len(latitude) < 2 or len(longitude) < 2 or not (turn < 180).all() or turn.sum() >= 360:
        raise ValueError(f"{first.path} has the longitudes {_range(longitude)}, which go round no globe: {REGRID}")
    if not (np.diff(latitude) < 0).all():
        raise ValueError(f"{first.path} has latitudes that rise and fall: {REGRID}")
    return latitude, longitude


def _common_times(channels: tuple[Channel, ...], allow_gaps: bool) -> np.ndarray:
    """Return the times of all channels. Raises ValueError where they go back, differ, or are not one step apart."""
    for channel in channels:
        times = channel.times
        back = np.flatnonzero(np.diff(times) <= 0)
        if len(back):
            files = [piece.path for piece in channel.pieces for _ in piece.times]
            a, b = files[back[0]], files[back[0] + 1]
            raise ValueError(
                f"{channel.name}: {date(times[back[0]])} is followed by {date(times[back[0] + 1])} "
                f"({a if a == b else f'{a}, then {b}'}): time must rise; leave out what is there twice, sort the rest"
            )
    times = channels[0].times
    for channel in channels[1:]:
        others = channel.times
        if not np.array_equal(times, others):
            lone = np.setxor1d(times, others)[0]
            has, lacks = (channels[0], channel) if lone in times else (channel, channels[0])
            raise ValueError(
                f"{has.name} has the time {date(lone)}, and {lacks.name} has not: give the same times of all channels"
            )
    if len(times) < 2:
        raise ValueError(f"the files hold {len(times)} time: give two or more")
    steps = np.diff(times)
    values, counts = np.unique(steps, return_counts=True)
    step = int(values[counts.argmax()])
    odd = np.flatnonzero(steps % step)
    gaps = np.flatnonzero(steps > step)
    if len(odd):
        raise ValueError(
            f"time is irregular: most steps are {step / 3600:g} h, but {date(times[odd[0]])} is followed by "
            f"{date(times[odd[0] + 1])}: select times at one interval"
        )
    if len(gaps) and not allow_gaps:
        raise ValueError(
            f"time has {len(gaps)} gap(s), the first from {date(times[gaps[0]])} to {date(times[gaps[0] + 1])}, where "
            f"steps are {step / 3600:g} h: add the files between, or --allow_gaps (no sample will span one)"
        )
    return times


def date(seconds: int) -> str:
    """Return a time in seconds since 1970-01-01 as a date."""
    return datetime.fromtimestamp(int(seconds), tz=timezone.utc).strftime("%Y-%m-%dT%H:%M")


def _range(values: np.ndarray) -> str:
    return f"{values[0]:g} to {values[-1]:g} ({len(values)})"
