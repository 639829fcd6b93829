"""Archives of gridded fields (NetCDF, Zarr, GRIB) seen as channels over time: what utils/prepare_data.py reads.

A channel is a variable, at one level if it has levels. Files may hold several variables, levels and stretches of time,
in any division; they are opened once, and read in blocks of time. xarray reads them: `pip install -r
requirements-prepare.txt`.

Shapes: T time steps, C channels, H latitudes from the north, W longitudes from 0 degrees east.
"""

import difflib
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray

# What archives call the axes.
AXES = {
    "time": ("valid_time", "time"),
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
    values: "xarray.DataArray"  # [T, H, W] as stored, not read yet


@dataclass(frozen=True)
class Channel:
    """A named channel, its pieces in the order of time."""

    name: str
    units: str
    pieces: tuple[Piece, ...]

    @property
    def times(self) -> np.ndarray:
        return np.concatenate([piece.times for piece in self.pieces])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return steps `start` to `stop`, [T, H, W] as stored."""
        parts = []
        for piece in self.pieces:
            if start < len(piece.times) and stop > 0:
                try:
                    parts.append(piece.values[max(start, 0) : stop].values)
                except (OSError, RuntimeError, EOFError) as error:
                    raise ValueError(f"{piece.path} cannot be read ({error}): copy it again") from None
            start, stop = start - len(piece.times), stop - len(piece.times)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Archive:
    """Channels on one grid, at the same times."""

    channels: tuple[Channel, ...]
    times: np.ndarray  # [T], seconds since 1970-01-01, one step apart but for gaps
    latitude: np.ndarray  # [H], degrees north, from the north
    longitude: np.ndarray  # [W], degrees east, from 0
    flipped: bool  # rows are stored from the south
    rolled: int  # columns are stored this far to the right

    @staticmethod
    def open(paths: list[str], channels: list[str] | None = None, allow_gaps: bool = False) -> "Archive":
        """Open files and find the channels: by default all there are, else those named (see `find`).

        Raises ValueError, in one line with the remedy, for files that cannot be read, variables that are missing,
        grids that differ, and times that go back, differ between channels or leave gaps.
        """
        pieces: dict[tuple[str, float | None], list[Piece]] = {}
        units: dict[tuple[str, float | None], str] = {}
        for path in paths:
            for key, unit, piece in _pieces(path):
                pieces.setdefault(key, []).append(piece)
                units.setdefault(key, unit)
        if not pieces:
            raise ValueError("the files hold no channel: a variable with a time, a latitude and a longitude")
        if channels:
            named = [find(text, list(pieces)) for text in channels]
        else:
            named = [
                (variable + ("" if level is None else f"{level:g}"), (variable, level)) for variable, level in pieces
            ]
        names = [name for name, _ in named]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"channel {twice!r} is named twice: give each channel a name of its own")
        found = tuple(
            Channel(name, units[key], tuple(sorted(pieces[key], key=lambda piece: piece.times[0])))
            for name, key in named
        )
        latitude, longitude = _common_grid(found)
        rolled = int(np.argmin(longitude % 360))
        return Archive(
            channels=found,
            times=_common_times(found, allow_gaps),
            latitude=np.sort(latitude)[::-1].astype(np.float32),
            longitude=np.roll(longitude % 360, -rolled).astype(np.float32),
            flipped=bool(latitude[0] < latitude[-1]),
            rolled=rolled,
        )

    def read(self, channel: Channel, start: int, stop: int) -> np.ndarray:
        """Return steps `start` to `stop` of a channel, [T, H, W], rows from the north and columns from 0 degrees."""
        values = channel.read(start, stop)
        if self.flipped:
            values = values[:, ::-1]
        return np.roll(values, -self.rolled, axis=-1) if self.rolled else values


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
    if not at and variable not in variables and split and split[1] in variables:
        variable, level = split.groups()
    if variable not in variables:
        variable = ALIASES.get(variable, variable)
    levels = [known for v, known in available if v == variable]
    try:
        wanted = float(level) if level else None
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


def _pieces(path: str):
    """Yield ((variable, level), units, piece) for all that a file holds on a grid of latitudes and longitudes."""
    for dataset in _open(path):
        dataset = dataset.rename(_axis_names(dataset))
        for variable, values in dataset.data_vars.items():
            if not {"latitude", "longitude"} <= set(values.dims):
                if values.ndim >= 2:
                    raise ValueError(
                        f"{path}: {variable} has the axes {', '.join(values.dims)}, no latitude and longitude: {REGRID}"
                    )
                continue
            if "time" not in values.coords:
                continue  # a constant, such as a land mask
            if "time" not in values.dims:
                values = values.expand_dims("time")
            for axis in set(values.dims) - {"time", "level", "latitude", "longitude"}:
                if values.sizes[axis] > 1:
                    raise ValueError(
                        f"{path}: {variable} has {values.sizes[axis]} values along {axis!r}: select one of them first"
                    )
                values = values.isel({axis: 0})
            if not np.issubdtype(values.time.dtype, np.datetime64):
                raise ValueError(f"{path}: its time is no date ({values.time.dtype}): give it CF units and calendar")
            times = values.time.values.astype("datetime64[s]").astype(np.int64)
            units = str(values.attrs.get("units", "")).replace("**", "")
            levels = values.level.values.reshape(-1) if "level" in values.coords else [None]
            scale = 0.01 if "level" in values.coords and values.level.attrs.get("units") == "Pa" else 1
            for i, level in enumerate(levels):
                field = values.isel(level=i) if "level" in values.dims else values
                key = str(variable), None if level is None else float(level) * scale
                yield key, units, Piece(path, times, field.transpose("time", "latitude", "longitude"))


def _open(path: str) -> list["xarray.Dataset"]:
    """Open a file; GRIB files come as several data sets, one for each kind of level."""
    try:
        import xarray
    except ImportError:
        raise ValueError(
            "reading archives needs xarray, which is not installed: `pip install -r requirements-prepare.txt`"
        ) from None
    if not Path(path).exists():
        raise ValueError(f"no file {path!r}: check the path")
    try:
        if Path(path).suffix in (".grib", ".grb", ".grib2", ".grb2"):
            import cfgrib

            return cfgrib.open_datasets(path, indexpath="", squeeze=True)
        if Path(path).is_dir():
            return [xarray.open_zarr(path, chunks=None)]
        return [xarray.open_dataset(path)]
    except Exception as error:  # each engine has its own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"cannot read {path} as NetCDF, Zarr or GRIB ({reason}): check the file") from None


def _axis_names(dataset: "xarray.Dataset") -> dict[str, str]:
    """Return how to rename the axes: the first name of each kind that is one, else one that is a single value."""
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
    """Return the latitudes and longitudes of all channels. Raises ValueError where they differ or are in no order."""
    first = channels[0].pieces[0]
    grid = [first.values[axis].values for axis in ("latitude", "longitude")]
    for piece in (piece for channel in channels for piece in channel.pieces):
        for axis, expected in zip(("latitude", "longitude"), grid):
            values = piece.values[axis].values
            if values.shape != expected.shape or not np.allclose(values, expected, atol=1e-4):
                raise ValueError(
                    f"{piece.path} has the {axis} {_range(values)}, and {first.path} {_range(expected)}: {REGRID}"
                )
    latitude, longitude = grid
    turn = np.diff(longitude) % 360
    if len(latitude) < 2 or len(longitude) < 2 or not (turn < 180).all() or turn.sum() >= 360:
        raise ValueError(f"{first.path} has the longitudes {_range(longitude)}, which go round no globe: {REGRID}")
    if not ((np.diff(latitude) > 0).all() or (np.diff(latitude) < 0).all()):
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
