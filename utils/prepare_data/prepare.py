"""Make training files of an archive (NetCDF, Zarr or GRIB), and check a folder of them.

    python -m utils.prepare_data msl_*.nc vo850_*.nc --out data/mine --valid_from 2026-02-01
    python -m utils.prepare_data era5.zarr --out data/mine --channels t2m=2m_temperature z500=geopotential@500
    python -m utils.prepare_data check data/mine

The first two write OUT/train/YEAR.h5, and OUT/valid and OUT/test from the given dates on, with `time`, `latitude`,
`longitude`, names and units, and OUT/stats of the training part (utils/data/writer.py has the layout). Rows are put
in order from the north, columns from 0 degrees east; no value is changed.

The archive is read once, in blocks of time, in bounded memory. OUT appears when it is complete. A run that was
interrupted goes on after the last complete file when the same command is given again; one that found a fault in the
data leaves nothing behind.

It reads through xarray: `pip install -r requirements-prepare.txt`.
"""

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from utils.data.unfinished import check_new, hidden
from utils.data.writer import LAYOUTS, DatasetWriter
from utils.prepare_data.archive import Archive, date
from utils.prepare_data.check import check

MEMORY_GB = 1.0
LARGEST = 1e30  # beyond it lie fill values


def prepare(
    inputs: list[str],
    out: str | Path,
    channels: list[str] | None = None,
    valid_from: str | None = None,
    test_from: str | None = None,
    fill: dict[str, float] | None = None,
    allow_gaps: bool = False,
    dtype: str = "float32",
    layout: str = "contiguous",
    memory_gb: float = MEMORY_GB,
    overwrite: bool = False,
) -> str:
    """Write a data set, and return a phrase on what was written.

    Args:
        inputs: files of the archive, in any order.
        channels: see utils.prepare_data.archive.find; all that the files hold by default.
        valid_from, test_from: dates from which on the data are for validation, and for tests.
        fill: values that take the place of missing ones, by channel. Elsewhere missing values are refused.
        memory_gb: size of a block; all levels of one variable of it lie in memory once or twice more.

    Raises ValueError, in one line with the remedy, for what is wrong with the archive (see Archive.open), missing
    values, values that float16 cannot hold, and a folder that exists or cannot be written.
    """
    out, fill = Path(out), fill or {}
    check_new(out, overwrite)
    archive = Archive.open(inputs, channels, allow_gaps)
    names = [channel.name for channel in archive.channels]
    for name in fill:
        if name not in names:
            raise ValueError(f"--fill names {name!r}, which is no channel: they are {', '.join(names)}")
    files = split(archive.times, valid_from, test_from)
    shape = (len(names), len(archive.latitude), len(archive.longitude))
    frame = int(np.prod(shape)) * 4
    steps = _block(archive, min(memory_gb * 1e9 // frame, len(archive.times)), frame)
    size = len(archive.times) * frame * np.dtype(dtype).itemsize // 4
    request = [[(path, *_age(Path(path))) for path in inputs]]
    request += [channels, valid_from, test_from, fill, allow_gaps, dtype, layout]
    missing, step = dict.fromkeys(names, 0), np.diff(archive.times)
    gap = np.append(False, step > step.min())  # between a time step and the one before
    size = 0 if layout == "gzip" else size
    with hidden(out, overwrite, size, "fewer files or channels", request) as scratch:
        units = [channel.units for channel in archive.channels]
        writer = DatasetWriter(scratch.new, names, units, archive.latitude, archive.longitude, dtype, layout)
        done = scratch.resume(writer, missing)
        with writer, tqdm(total=len(archive.times), desc="time steps", disable=None) as progress:
            for name, start, stop in files:
                if name in done:
                    progress.update(stop - start)
                    continue
                writer.add_file(name, archive.times[start:stop])
                for first in range(start, stop, steps):
                    last = min(first + steps, stop)
                    block = _read(archive, first, last, fill, missing, dtype)
                    for t, values in zip(range(first, last), block):
                        writer.write(name, t - start, torch.from_numpy(values), gap=bool(gap[t]))
                        progress.update()
                writer.close(name)
                done.append(name)
                scratch.save(writer, done, missing)
    kinds = {name.split("/")[0]: 0 for name, *_ in files}
    for name, start, stop in files:
        kinds[name.split("/")[0]] += stop - start
    parts = ", ".join(f"{count:,} in {kind}" for kind, count in kinds.items())
    filled = ", ".join(f"{count:,} of {name}" for name, count in missing.items() if count)
    return (
        f"{len(archive.times):,} time steps of {' x '.join(map(str, shape))} {dtype} to {out} ({parts}); "
        f"missing values: {f'{filled}, filled' if filled else 'none'}; channels: {' '.join(names)}"
    )


def split(times: np.ndarray, valid_from: str | None, test_from: str | None) -> list[tuple[str, int, int]]:
    """Return the files to write, (kind/year, first step, last step + 1), in the order of time.

    Raises ValueError for a date that is none, and where no two steps are left to train on.
    """
    starts = [("train", -np.inf)]
    for kind, text in (("valid", valid_from), ("test", test_from)):
        if text is not None:
            try:
                when = datetime.fromisoformat(text)
            except ValueError:
                raise ValueError(f"--{kind}_from is {text!r}: it takes a date such as 2018-01-01") from None
            starts.append((kind, when.replace(tzinfo=when.tzinfo or timezone.utc).timestamp()))
    if [when for _, when in starts] != sorted(when for _, when in starts):
        raise ValueError(f"--valid_from {valid_from} comes after --test_from {test_from}: take a later one for tests")
    years = times.astype("datetime64[s]").astype("datetime64[Y]").astype(int) + 1970
    kinds = np.searchsorted([when for _, when in starts[1:]], times, side="right")
    if (kinds == 0).sum() < 2:
        raise ValueError(
            f"{(kinds == 0).sum()} time step(s) are left for training, of {date(times[0])} to {date(times[-1])}: "
            f"take a later --{starts[1][0]}_from"
        )
    bounds = [0, *(np.flatnonzero((np.diff(years) != 0) | (np.diff(kinds) != 0)) + 1).tolist(), len(times)]
    return [(f"{starts[kinds[a]][0]}/{years[a]}", a, b) for a, b in zip(bounds, bounds[1:])]


def _block(archive: Archive, steps: float, frame: int) -> int:
    """Return the time steps of a block: at most `steps`, and whole chunks of the archive where they fit."""
    if steps >= archive.chunk:
        return int(steps - steps % archive.chunk)
    if archive.chunk > 1:
        print(
            f"The archive stores up to {archive.chunk} time steps in one piece, and reads all of it for each block of "
            f"{max(1, int(steps))}: --memory_gb {archive.chunk * frame / 1e9:.2g} would read each piece once"
        )
    return max(1, int(steps))


def _age(path: Path) -> tuple[int, int]:
    """Return the size and the date of a file; of a Zarr folder, the latest date of the folders of its arrays."""
    below = [path, *path.glob("*/"), *path.glob("*/*/")] if path.is_dir() else [path]
    return path.stat().st_size, max(folder.stat().st_mtime_ns for folder in below)


def _read(archive: Archive, first: int, last: int, fill: dict, missing: dict, dtype: str) -> np.ndarray:
    """Return a block [T, C, H, W]; count and fill missing values. Raises ValueError for those that may not be."""
    H, W = len(archive.latitude), len(archive.longitude)
    block = np.empty((last - first, len(archive.channels), H, W), dtype)
    for c, values in archive.read(first, last):
        name = archive.channels[c].name
        bad = ~(np.abs(values) < LARGEST)  # NaN, infinity, and the huge number that some archives fill with
        count = int(bad.sum())
        if count and name not in fill:
            t, y, x = np.unravel_index(bad.argmax(), bad.shape)
            where = f"{date(archive.times[first + t])}, {archive.latitude[y]:g}N {archive.longitude[x]:g}E"
            raise ValueError(
                f"{name} has {count:,} missing or infinite values in a block of {last - first} steps, the first at "
                f"{where}: leave the channel out, or give --fill {name}=VALUE"
            )
        if count:
            missing[name] += count
            values = np.where(bad, fill[name], values)
        with np.errstate(over="ignore"):
            block[:, c] = values
        if dtype == "float16" and not np.isfinite(block[:, c]).all():
            largest = np.abs(values).max()
            raise ValueError(f"{name} reaches {largest:.6g}, and float16 ends at 65504: take --dtype float32")
        if dtype == "float16" and np.count_nonzero(block[:, c]) < np.count_nonzero(values):
            raise ValueError(f"{name} has values below 6e-8, which float16 turns into 0: take --dtype float32")
    return block


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code: 0, 1 where a check found faults, or 2 after a line on what is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["check"]:
            return _main_check(argv[1:])
        written = prepare(**_arguments(argv))
    except (ValueError, OSError, MemoryError) as error:
        reason = "memory ran out: lower --memory_gb" if isinstance(error, MemoryError) else error
        kept = "" if isinstance(error, ValueError) else "; the same command goes on after the last complete file"
        print(f"error: {reason}{kept}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on after the last complete file", file=sys.stderr)
        return 130
    print(f"Wrote {written}")
    return 0


def _main_check(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m utils.prepare_data check", allow_abbrev=False)
    parser.add_argument("folder", help="a data set, or one folder of *.h5 files")
    return check(parser.parse_args(argv).folder)


def _arguments(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser(
        prog="python -m utils.prepare_data",
        description=__doc__.split("\n")[0] + " `python -m utils.prepare_data check FOLDER` checks one.",
        allow_abbrev=False,
    )
    parser.add_argument("inputs", nargs="+", help="NetCDF or GRIB files, Zarr folders; each holds what it likes")
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument(
        "--channels", nargs="+", metavar="NAME[=VARIABLE[@LEVEL]]", help="what to take, in this order (all there is)"
    )
    parser.add_argument("--valid_from", metavar="DATE", help="the data from this date on are for validation")
    parser.add_argument("--test_from", metavar="DATE", help="those from this date on are for tests")
    parser.add_argument(
        "--fill", nargs="+", default=[], metavar="NAME=VALUE", help="value for missing ones, by channel"
    )
    parser.add_argument("--allow_gaps", action="store_true", help="times may be missing; no sample will span a gap")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="(float32)")
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous", help="HDF5 storage (contiguous: fastest)")
    parser.add_argument("--memory_gb", type=float, default=MEMORY_GB, help=f"size of a block in memory ({MEMORY_GB:g})")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    given = vars(parser.parse_args(argv))
    fill = {}
    for text in given["fill"]:
        name, _, value = text.partition("=")
        try:
            fill[name] = float(value)
            if not abs(fill[name]) < LARGEST:
                raise ValueError
        except ValueError:
            raise ValueError(f"--fill {text!r}: it takes NAME=VALUE, such as sst=271.35") from None
    if not given["memory_gb"] > 0:
        raise ValueError(f"--memory_gb is {given['memory_gb']:g}: it takes more than 0")
    return {**given, "fill": fill}
