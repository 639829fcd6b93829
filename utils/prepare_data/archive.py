"""Archives of gridded fields (NetCDF, Zarr, GRIB) seen as channels over time: what utils/prepare_data/prepare.py reads.

A channel is a variable, at one level if it has levels. Files may hold several variables, levels and stretches of time,
in any division; they are opened once, and read in blocks of time. xarray reads them: `pip install -r
requirements-prepare.txt`.

Shapes: T time steps, C channels, H latitudes from the north, W longitudes from 0 degrees east.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

import numpy as np

from utils.data.fields import check_names
from utils.data.variables import LEVEL, NEAR_GROUND, synonyms
from utils.prepare_data.archive_file import REGRID, Piece, pieces_in
from utils.prepare_data.stored import check_stored
from utils.sphere import go_round


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
    longitude: np.ndarray  # [W], degrees east, rising, from 0 where they go round the globe
    rolled: int  # columns are stored this far to the right
    keys: tuple[tuple[str, float | None], ...]  # variable and level of each channel

    @staticmethod
    def open(
        paths: list[str], channels: list[str] | None = None, allow_gaps: bool = False, any_times: bool = False,
        constants: bool = False, leave_out: Sequence[tuple[str, float | None]] = (),
    ) -> "Archive":  # fmt: skip
        """Open files and find the channels: those named (see `find`), by default all there are, by name and level.

        With `any_times` there may be a single time, or times at no interval. For `constants` there may be none: of what
        has several the first counts. Of `leave_out`, variables with their levels, none is a channel by default.

        Raises ValueError, in one line with the remedy, for files that cannot be read, variables that are missing,
        grids and units that differ, and times that go back, differ between channels or leave gaps.
        """
        pieces, units = _pieces(paths, channels, constants)
        # By name: files come in any order, and not every format keeps the order of its variables.
        by_name = sorted(pieces, key=lambda key: (key[0], key[1] or 0))
        everything = [(_default_name(key), key) for key in by_name if key not in leave_out]
        named = [find(text, list(pieces)) for text in channels] if channels and pieces else everything
        if not named:
            raise ValueError("the files hold no channel: a variable with a time, a latitude and a longitude")
        names = [name for name, _ in named]
        if len(set(names)) < len(names):
            twice = Counter(names).most_common(1)[0][0]
            raise ValueError(f"channel {twice!r} is named twice: give each channel a name of its own")
        most = 1 if constants else None
        found = tuple(
            Channel(name, units.get(key, ""), tuple(sorted(pieces[key], key=lambda piece: piece.times[0])[:most]))
            for name, key in named
        )
        check_names([*names], [channel.units for channel in found])
        for path, name in sorted({(p.path, key[0]) for channel, (_, key) in zip(found, named) for p in channel.pieces}):
            check_stored(path, name)
        for channel in found:
            first = channel.pieces[0]
            for piece in channel.pieces:
                if piece.fixed != first.fixed:
                    raise ValueError(
                        f"{channel.name} stands for {dict(first.fixed)} in {first.path}, and for {dict(piece.fixed)} "
                        f"in {piece.path}: give files of one kind"
                    )
        latitude, longitude = _common_grid(found)
        rolled = 0
        if go_round(longitude):
            almost = 1 / len(longitude)  # degrees: a column that was rounded to less than 0 is the one at 0
            longitude = np.round((longitude + almost) % 360 - almost, 5)
            rolled = int(np.argmin(longitude))
        elif (np.diff(longitude) < 0).any():  # a region that crosses Greenwich, or the date line: one stretch
            longitude = longitude[0] + np.cumsum([0, *(np.diff(longitude) % 360)])
            longitude = np.round(longitude - 360 * (longitude[-1] >= 360), 5)
        return Archive(
            channels=found,
            times=_common_times(found, allow_gaps, any_times or constants),
            latitude=latitude.astype(np.float32),
            longitude=np.roll(longitude, -rolled).astype(np.float32),
            rolled=rolled,
            keys=tuple(key for _, key in named),
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


def _pieces(
    paths: list[str], channels: list[str] | None, constants: bool
) -> tuple[dict[tuple[str, float | None], list[Piece]], dict[tuple[str, float | None], str]]:
    """Return the pieces of each variable and level, and its units.

    Raises ValueError where what is wanted cannot be a channel.
    """
    pieces: dict[tuple[str, float | None], list[Piece]] = {}
    units: dict[tuple[str, float | None], str] = {}
    useless: dict[str, str] = {}  # variables that cannot be channels, and why
    for path in paths:
        for key, unit, piece in pieces_in(path, useless, constants):
            pieces.setdefault(key, []).append(piece)
            if unit and units.setdefault(key, unit) != unit:
                raise ValueError(
                    f"{key[0]} is in {units[key]} in {pieces[key][0].path}, and in {unit} in {path}: "
                    f"bring them to one unit"
                )
    asked = {re.split("[=@]", text)[-2 if "@" in text else -1] for text in channels or useless}
    asked |= {split[1] for text in asked if (split := LEVEL.fullmatch(text))}
    wanted = {other for name in asked for other in synonyms(name)}
    for variable in useless.keys() & wanted:
        raise ValueError(useless[variable])
    return pieces, units


def _default_name(key: tuple[str, float | None]) -> str:
    """Return the usual name of a variable at a level: vo850, but u100hPa, which is none of the wind at 100 m."""
    variable, level = key
    if level is None:
        return variable
    name = f"{variable}{level:g}"
    return f"{name}{'hPa' if name in NEAR_GROUND else ''}"


def find(text: str, available: list[tuple[str, float | None]]) -> tuple[str, tuple[str, float | None]]:
    """Return the name of a channel, and its variable and level, of what was asked for.

    `NAME=VARIABLE@LEVEL` says all. `NAME=VARIABLE` is for variables without levels. `NAME` by itself is a variable, or
    a variable and a level as in `vo850`. Levels are in hPa. Short names and WeatherBench's stand for each other: z500
    may be geopotential@500.

    Raises ValueError where there is no such variable, with what there is.
    """
    name, _, source = text.partition("=")
    variable, at, level = (source or name).partition("@")
    try:
        wanted = round(float(level), 6) if level else None
    except ValueError:
        raise ValueError(f"channel {text!r} has the level {level!r}: it takes a number, in hPa") from None
    split = LEVEL.fullmatch(variable)
    places = [(other, wanted) for other in synonyms(variable)]
    if not at and split and variable not in NEAR_GROUND:
        places += [(other, round(float(split[2]), 6)) for other in synonyms(split[1])]
    if wanted is None:  # the only level that there is
        for other in synonyms(variable):
            there = [place for place in available if place[0] == other]
            places += there if len(there) == 1 else []
    for place in places:
        if place in available:
            return (name if source or not at else variable + level), place
    known = [v + ("" if k is None else f"@{k:g}") for v, k in available]
    close = difflib.get_close_matches(source or name, known, n=3)
    raise ValueError(
        f"nothing in the files for channel {text!r}: they hold {', '.join(close or known[:40])}"
        f"{' ...' if close or len(known) > 40 else ''}; name it as NAME=VARIABLE or NAME=VARIABLE@LEVEL"
    )


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


def _common_times(channels: tuple[Channel, ...], allow_gaps: bool, any_times: bool) -> np.ndarray:
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
            raise ValueError(f"{has.name} has {date(lone)}, and {lacks.name} has not: give all channels the same times")
    if any_times:
        return times
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


def _range(values: np.ndarray) -> str:
    return f"{values[0]:g} to {values[-1]:g} ({len(values)})"


def date(seconds: int) -> str:
    """Return a time in seconds since 1970-01-01 as a date."""
    return datetime.fromtimestamp(int(seconds), tz=UTC).strftime("%Y-%m-%dT%H:%M")
