"""The files of a data set: what they hold, and which samples they give.

A folder of `*.h5`, each with a dataset `fields` [time, channel, lat, lon]; see docs/data.md for the whole layout.
"""

import contextlib
import difflib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.data.hdf5 import check_links, check_whole
from utils.files import FAILS, patiently
from utils.reading import check_kind

with contextlib.suppress(ImportError):  # brings further compressions to HDF5 (blosc, zstd ...) where it is installed
    import hdf5plugin  # noqa: F401

# The order of the tutorial's 20 channels, assumed where neither the configuration nor the file names them.
ERA5_CHANNELS = (
    "u10m v10m t2m sp msl t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 tcwv".split()
)
LONGEST_AXIS, LATEST = 2**24, 5e10  # values; seconds since 1970, in the year 3554
EPOCH = "seconds since 1970-01-01"
SECONDS = re.compile(
    r"(s|seconds)|seconds since 1970-0?1-0?1([T ]0?0:00(:00(\.0*)?)?)?( ?(Z|UTC|\+00:?00))?", re.IGNORECASE
)
STORED_STEP_HOURS = 6.0  # of files without `time`


@dataclass(frozen=True)
class Files:
    """The HDF5 files of one folder, in time order, and what they share.

    Raises ValueError, naming the file, for a folder without files, a file that is no readable HDF5, lacks `fields`,
    or differs from the others in its shape.
    """

    paths: tuple[str, ...]
    steps: tuple[int, ...]  # stored time steps of each file
    times: tuple[np.ndarray | None, ...]  # seconds since 1970-01-01 of each step, in whole ones, where stored
    shape: tuple[int, int, int]  # C, H, W
    offsets: tuple[int | None, ...]  # where the values begin in each file; None where only HDF5 can read them
    stamps: tuple[tuple[int, int], ...]  # size and date of each file: what is read later must be what was seen here
    chunk_rows: int | None  # rows of a chunk, the most that any file has; None where all are contiguous
    dtype: np.dtype
    channel_names: tuple[str, ...] | None
    units: tuple[str, ...]
    latitude: np.ndarray  # degrees north, [H]
    longitude: np.ndarray  # degrees east, [W]
    assumed: tuple[str, ...]  # of these two those that are not stored

    @staticmethod
    def open(folder: str, remedy: str = "check the path", look_through: bool = True) -> "Files":
        """Return the files of a folder, in the order of their years.

        Args:
            look_through: see that each holds all its chunks, which reads its index; of many ranks some will do.

        Raises ValueError where there are none, and where they do not fit together.
        """
        if not os.path.isdir(folder):
            raise ValueError(f"no data folder {folder!r}: {remedy}, or make data with `python -m utils.sample_data`")
        paths = sorted(Path(folder).glob("*.h5"), key=_year_then_name)
        if not paths:
            raise ValueError(f"no *.h5 file in the data folder {folder!r}: {remedy}")
        return Files.of(paths, look_through)

    @staticmethod
    def of(paths: list[Path], look_through: bool = True) -> "Files":
        """Return these files, in their order."""
        heads = [_head(path, look_through) for path in paths]
        first, dtype = heads[0], np.result_type(*(head.dtype for head in heads))
        for head in heads:
            head.check_same(first, "all files of a folder must agree")
        return replace(
            first,
            paths=tuple(str(path) for path in paths),
            steps=tuple(head.steps[0] for head in heads),
            times=tuple(head.times[0] for head in heads),
            stamps=tuple(head.stamps[0] for head in heads),
            offsets=tuple(head.offsets[0] if head.dtype == dtype else None for head in heads),
            chunk_rows=max((head.chunk_rows for head in heads if head.chunk_rows), default=None),
            dtype=dtype,
        )

    def check_same(self, other: "Files", rule: str) -> None:
        """Raise ValueError where these files differ from others in their shape, channels or grid."""
        for what in ("shape", "channel_names", "units", "latitude", "longitude"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if not np.array_equal(mine, theirs):
                raise ValueError(
                    f"{self.paths[0]} has the {what} {_short(mine)}, but {other.paths[0]} {_short(theirs)}: {rule}"
                )

    def names(self, given: tuple[str, ...] | None) -> tuple[tuple[str, ...], str | None]:
        """Return the name of each channel (the configuration's, the file's, or assumed ones), and a warning if assumed.

        Raises ValueError where the number of given names is not that of the channels, or two are the same.
        """
        C = self.shape[0]
        if given is not None and len(given) != C:
            raise ValueError(f"channel_names has {len(given)} names, and {self.paths[0]} {C} channels: name them all")
        names = given or self.channel_names
        if names:
            if twice := next((name for name, n in Counter(names).items() if n > 1), None):
                where = "" if given else f"{self.paths[0]}: "
                raise ValueError(f"{where}channel_names has {twice!r} twice: give each a name of its own")
            return tuple(names), None
        if C == len(ERA5_CHANNELS):
            return tuple(ERA5_CHANNELS), "the files name no channels: the order u10m v10m t2m ... tcwv is assumed"
        return tuple(f"ch{i}" for i in range(C)), None

    @property
    def assumed_grid(self) -> str | None:
        """What is assumed of the grid, in words; None where the files store all of it."""
        ends = ((name, *getattr(self, name)[[0, -1]]) for name in self.assumed)
        axes = " and ".join(f"{name} from {first:g} to {last:g}" for name, first, last in ends)
        return f"the files store no {' and no '.join(self.assumed)}: {axes} degrees are assumed" if axes else None

    def step_seconds(self) -> float | None:
        """Return the time between stored steps: the commonest one. None where the files store no `time`."""
        steps = [np.diff(t) for t in self.times if t is not None and len(t) > 1]
        if not steps:
            return None
        values, counts = np.unique(np.concatenate(steps), return_counts=True)
        return float(values[counts.argmax()])

    def samples(self, dt: int, steps: int = 1) -> np.ndarray:
        """Return all pairs (t, t + dt) inside a file, as rows (file, t), [n, 2]; a pair that spans a gap is none.

        With more `steps` those that as many follow without a gap: (t, t + dt, ... t + steps dt).
        """
        step = self.step_seconds()
        pairs = []
        for i, (length, times) in enumerate(zip(self.steps, self.times)):
            t = np.arange(max(length - dt * steps, 0))
            for k in range(steps) if times is not None and step else ():
                t = t[times[t + (k + 1) * dt] - times[t + k * dt] == dt * step]
            pairs.append(np.stack([np.full(len(t), i), t], axis=1))
        return np.concatenate(pairs)

    def stretches(self, dt: int, steps: int) -> np.ndarray:
        """Return all stretches of steps + 1 frames, `dt` stored steps apart, as rows of (file, t), [n, steps + 1, 2].

        Where the files store `time` they are one series: a stretch may begin in one file and end in another, and spans
        no gap. Where they do not, it lies inside a file.
        """
        frames = np.array([(file, t) for file, length in enumerate(self.steps) for t in range(length)])
        if any(times is None for times in self.times) or not (step := self.step_seconds()):
            first = [t for t, (file, at) in enumerate(frames) if at + dt * steps < self.steps[file]]
            return frames[np.array(first, int)[:, None] + dt * np.arange(steps + 1)]
        times, order = np.unique(np.concatenate(self.times), return_index=True)
        wanted = times[:, None] + np.int64(dt * step) * np.arange(steps + 1)
        found = np.searchsorted(times, wanted).clip(max=len(times) - 1)
        return frames[order[found[(times[found] == wanted).all(axis=1)]]]

    def date(self, file: int, t: int) -> str:
        """Return the date of a stored step, or the file and index where no `time` is stored."""
        if self.times[file] is None:
            return f"{Path(self.paths[file]).name}, step {t}"
        return datetime.fromtimestamp(int(self.times[file][t]), tz=UTC).strftime("%Y-%m-%d %H:%M")


def check_each_once(names: Sequence[str], key: str) -> None:
    """Raise ValueError where a key of the configuration names something twice."""
    if len(set(names)) < len(names):
        raise ValueError(f"{key} {' '.join(names)} names one twice: name each once")


def channel_indices(names: tuple[str, ...], wanted: tuple[str, ...] | None, count: int, key: str) -> list[int]:
    """Return the channels asked for by name, or the first `count`.

    Raises ValueError for an unknown name, with the closest, and for more channels than there are.
    """
    if wanted is None:
        if count > len(names):
            raise ValueError(f"n_{key} is {count}, but the files hold {len(names)} channels: take at most {len(names)}")
        return list(range(count))
    check_each_once(wanted, key)
    for name in wanted:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the files hold {', '.join(names)}"
            raise ValueError(f"unknown channel {name!r} in {key}: {hint}")
    return [names.index(name) for name in wanted]


def check_crop(files: Files, img_size: tuple[int, int], patch_size: int) -> None:
    """Raise ValueError where the image is larger than the stored grid, or crops a patch or more of it."""
    for side, stored, used in zip(("rows", "columns"), files.shape[1:], img_size):
        if used > stored:
            raise ValueError(f"img_size asks for {used} {side}, and {files.paths[0]} holds {stored}: take at most that")
        if side == "rows" and used < stored and files.latitude[0] < files.latitude[-1]:
            raise ValueError(f"img_size crops southern rows, but {files.paths[0]} begins there: turn the files round")
        if stored - used >= patch_size:
            raise ValueError(
                f"img_size {used} of {stored} {side} would crop {stored - used}, a patch ({patch_size}) or more: "
                f"take img_size within {patch_size - 1} of the stored grid"
            )


def _short(value) -> str:
    text = " ".join(str(np.asarray(value)).split())
    return text if len(text) < 60 else text[:57] + "..."


def _year_then_name(path: Path) -> tuple:
    year = re.search(r"(?<!\d)\d{4}$", path.stem)
    return (0, int(year[0]), path.stem) if year else (1, 0, path.stem)


def _head(path: Path, look_through: bool) -> Files:
    try:
        return patiently(lambda: _read_head(path, look_through))
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): mend that, or wait for its storage") from None


def _read_head(path: Path, look_through: bool) -> Files:
    check_kind(path)
    with _told(path):
        if not path.name.isprintable():  # logs have it
            raise ValueError(f"{path} has a name that no line can show: rename it")
        if path.is_dir():
            raise ValueError(f"{path} is a folder, and its name that of a data file: rename it, or move it away")
        with h5py.File(path, "r", locking=False) as file:
            check_links(file)
            if "fields" not in file:
                raise ValueError(f"{path} has no dataset 'fields': it must be [time, channel, lat, lon]")
            fields = file["fields"]
            if not isinstance(fields, h5py.Dataset):
                raise ValueError(f"{path}: 'fields' is a group: it must be a dataset [time, channel, lat, lon]")
            for number, name in filters(fields):
                if not h5py.h5z.filter_avail(number):
                    raise ValueError(
                        f"{path} is compressed with {name or number}, which HDF5 here does not know: "
                        f"`pip install hdf5plugin`, or store it contiguous"
                    )
            if fields.ndim != 4 or fields.dtype.kind != "f" or fields.dtype.itemsize > 4:
                raise ValueError(
                    f"{path} holds fields of {fields.dtype} {list(fields.shape)}: "
                    f"they must be float32 or float16, [time, channel, lat, lon]"
                )
            length, *shape = fields.shape
            if max(fields.shape) > LONGEST_AXIS:
                raise ValueError(f"{path} has fields {list(fields.shape)}: no axis is longer than {LONGEST_AXIS:,}")
            if look_through:
                check_whole(path, fields)

            def labels(name: str) -> tuple[str, ...] | None:
                if name not in fields.attrs:
                    return None
                stored = np.atleast_1d(fields.attrs[name])
                values = tuple(map(_text, stored))
                if len(values) != shape[0]:
                    raise ValueError(f"{path} has {len(values)} {name} for {shape[0]} channels: mend the attribute")
                return values

            latitude, longitude = _grid(path, file, *shape[1:])
            return Files(
                paths=(str(path),),
                steps=(length,),
                times=(_axis(path, file, "time", length),),
                offsets=(_offset(path, fields),),
                stamps=(stamp(path),),
                chunk_rows=fields.chunks and fields.chunks[2],
                shape=tuple(shape),
                dtype=fields.dtype.newbyteorder("="),
                channel_names=labels("channel_names"),
                units=labels("units") or ("",) * shape[0],
                latitude=latitude,
                longitude=longitude,
                assumed=tuple(name for name in ("latitude", "longitude") if name not in file),
            )


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise ValueError, which names the file, for any error but one of its storage, which is an OSError."""
    try:
        yield
    except Exception as error:  # HDF5 has many kinds
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        found = " ".join(str(error).split())  # HDF5's own words have two lines
        called = re.search(r"errno = (\d+)", found)  # so it tells of a call of the system
        number = int(called[1]) if called else getattr(error, "errno", None)
        if number in FAILS:
            raise OSError(number, os.strerror(number)) from None
        raise ValueError(f"cannot read {path} as HDF5 ({found}): copy it again or remove it") from None


def _text(value: Any) -> str:
    """Return an attribute of HDF5 as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _axis(path: Path, file: h5py.File, name: str, size: int) -> np.ndarray | None:
    """Return an axis; None where the file has none. Raises ValueError where it does not fit."""
    if name not in file:
        return None
    stored = file[name]
    if not isinstance(stored, h5py.Dataset) or stored.dtype.kind not in "iuf" or stored.shape != (size,):
        found = f"of {stored.dtype} {list(stored.shape)}" if isinstance(stored, h5py.Dataset) else "a group"
        raise ValueError(f"{path} has {name}, {found}: it must be [{size}] numbers")
    if stored.is_virtual or stored.external:
        raise ValueError(f"{path} has {name} in another file: store it in this one")
    check_whole(path, stored)
    values = stored[:]
    units = _text(np.atleast_1d(stored.attrs.get("units", ""))[0]).strip()
    if name == "time" and units and not SECONDS.fullmatch(units):
        raise ValueError(f"{path} has times in {units!r}: write them as {EPOCH}, in UTC")
    if name != "time" and units.lower().startswith("rad"):
        raise ValueError(f"{path} has a {name} in {units!r}: write degrees")
    if name != "time":
        return values.astype(np.result_type(values, np.float32))
    if not (np.abs(values.astype(np.float64)) < LATEST).all():
        raise ValueError(f"{path} has a time that is no date of 386 to 3554: write it as seconds since 1970-01-01")
    if values.dtype.kind == "f" and values.dtype.itemsize < 8:
        raise ValueError(f"{path} has times of {values.dtype}, which are minutes apart: write them as int64 or float64")
    values = np.rint(values.astype(np.float64)).astype(np.int64)  # what was computed from days is rounded
    if len(back := np.flatnonzero(np.diff(values) <= 0)):
        raise ValueError(f"{path} has times that do not rise at step {back[0] + 1}: put its time steps in order")
    return values


def _grid(path: Path, file: h5py.File, H: int, W: int) -> tuple[np.ndarray, np.ndarray]:
    """Return latitude [H] and longitude [W], by default those of the whole globe. Raises ValueError."""
    latitude, longitude = _axis(path, file, "latitude", H), _axis(path, file, "longitude", W)
    if latitude is None and H < 2:
        raise ValueError(f"{path} has {H} row(s) and no latitude: store the latitude of each row")
    if latitude is None:  # an odd number of rows includes both poles, an even one lacks the last
        latitude = 90 - 180 * np.arange(H) / (H - H % 2)
    longitude = np.arange(W) * 360 / W if longitude is None else longitude
    for name, values in (("latitude", latitude), ("longitude", longitude)):
        if not np.isfinite(values).all():
            raise ValueError(f"{path} has a {name} that is not finite: write its axes anew")
    north, east = np.diff(latitude), np.diff(longitude.astype(np.float64)) % 360
    if (np.abs(latitude) > 90.001).any() or not ((north > 0).all() or (north < 0).all()):
        raise ValueError(f"{path} has a latitude above 90, or in no order: write degrees north, row by row")
    if (east == 0).any() or east.sum() > 360.001:  # 360 where the first column stands at the end once more
        raise ValueError(f"{path} has longitudes that do not go east once around: put its columns in order")
    return latitude, longitude


def _offset(path: Path, fields: h5py.Dataset) -> int | None:
    """Return where a plain stretch of numbers begins in a file: contiguous, whole, in this machine's byte order."""
    if not fields.nbytes:
        return 0
    is_plain = fields.id.get_type().equal(h5py.h5t.py_create(fields.dtype)) and fields.dtype.isnative  # all of its bits
    is_plain = is_plain and fields.chunks is None and fields.id.get_storage_size() == fields.nbytes
    if os.path.realpath(fields.file.filename) != os.path.realpath(path):  # a link leads to another file
        return None
    return fields.id.get_offset() if is_plain else None


def stamp(path: str | Path) -> tuple[int, int]:
    """Return the size of a file and its date in ns."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def filters(fields: h5py.Dataset) -> list[tuple[int, str]]:
    """Return number and name of each step that compresses a dataset."""
    stored = fields.id.get_create_plist()
    found = (stored.get_filter(i) for i in range(stored.get_nfilters()))
    return [(number, name.decode()) for number, _, _, name in found]
