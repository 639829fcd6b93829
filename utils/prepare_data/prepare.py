"""Make training files of an archive (NetCDF, Zarr or GRIB), and check a folder of them.

    python -m utils.prepare_data msl_*.nc vo850_*.nc --out data/mine --valid_from 2026-02-01
    python -m utils.prepare_data era5.zarr --out data/mine --channels t2m=2m_temperature z500=geopotential@500
    python -m utils.prepare_data era5.zarr masks.nc --out data/mine --constants lsm zs
    python -m utils.prepare_data check data/mine
    python -m utils.prepare_data stats /data --out stats

The first three write OUT/train/YEAR.h5, and OUT/valid and OUT/test from the given dates on, with `time`, `latitude`,
`longitude`, names and units, and OUT/stats of the training part (utils/data/writer.py has the layout). Rows are put
in order from the north, columns from 0 degrees east; no value is changed. Constants go to OUT/stats/constants.h5.

The archive is read once, in blocks of time, in bounded memory. OUT appears when it is complete. A run that was
interrupted goes on after the last complete file when the same command is given again; one that found a fault in the
data leaves nothing behind. `stats` makes the statistics of files that are there (utils/prepare_data/stats.py).

It reads through xarray: `pip install -r requirements-prepare.txt`.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from utils.data.unfinished import check_new, hidden
from utils.data.variables import LARGEST, missing
from utils.data.writer import LAYOUTS, DatasetWriter
from utils.errors import one_line
from utils.files import seen
from utils.prepare_data.archive import Archive, date
from utils.prepare_data.archive_file import REGRID
from utils.prepare_data.check import check
from utils.prepare_data.next_step import NextStep
from utils.prepare_data.stats import write_statistics
from utils.sphere import go_round

MEMORY_GB = 1.0
WORDS = {"train": "training", "valid": "validation", "test": "tests"}


@dataclass(eq=False)
class Preparation:
    """A data set to be made of an archive; each option is a flag.

    Raises ValueError, in one line with the remedy, for what is wrong with the archive (see Archive.open), missing
    values, values that float16 cannot hold, and a folder that exists or cannot be written.
    """

    inputs: list[str]  # files of the archive, in any order
    out: str
    channels: list[str] | None  # see utils.prepare_data.archive.find; None for all that the files hold
    constants: list[str]  # fields that do not change, named as channels: they need no time in the files
    valid_from: str | None  # from this date on the data are for validation
    test_from: str | None  # and from this one for tests
    fill: dict[str, float]  # what takes the place of missing values, by channel; elsewhere they are refused
    allow_gaps: bool
    dtype: str
    layout: str
    memory_gb: float  # size of a block; all levels of one variable of it lie in memory once or twice more
    overwrite: bool
    section: str | None  # name of a section to write, of a model for a laptop

    def __post_init__(self):
        check_new(Path(self.out), self.overwrite)
        self.fixed = Archive.open(self.inputs, self.constants, constants=True) if self.constants else None
        self.fixed_names = [channel.name for channel in self.fixed.channels] if self.fixed else []
        archive = self.archive = Archive.open(
            self.inputs, self.channels, self.allow_gaps, leave_out=self.fixed.keys if self.fixed else ()
        )
        if self.fixed and not all(
            np.array_equal(getattr(self.fixed, axis), getattr(archive, axis)) for axis in ("latitude", "longitude")
        ):
            raise ValueError(f"{', '.join(self.fixed_names)} and the channels lie on different grids: {REGRID}")
        self.names = [channel.name for channel in archive.channels]
        for name in self.fill:
            if name not in self.names + self.fixed_names:
                known = ", ".join(self.names + self.fixed_names)
                raise ValueError(f"--fill names {name!r}, which is no channel: they are {known}")
        self.files = split(archive.times, self.valid_from, self.test_from)
        self.shape = (len(self.names), len(archive.latitude), len(archive.longitude))
        moment = int(np.prod(self.shape)) * 4 / 1e9
        if moment > self.memory_gb:
            raise ValueError(
                f"one time step of {' x '.join(map(str, self.shape))} takes {moment:.2g} GB, and --memory_gb is "
                f"{self.memory_gb:g}: raise it, or take fewer channels"
            )
        self.missing = dict.fromkeys(self.names + self.fixed_names, 0)
        counts: Counter = Counter()
        for name, start, stop in self.files:
            counts[name.split("/")[0]] += stop - start
        self.counts = counts  # time steps of each part
        steps = np.diff(archive.times)
        samples = sum(  # pairs of states inside a file, without a gap
            int((steps[a : b - 1] == steps.min()).sum()) for name, a, b in self.files if name.startswith("train")
        )
        names, is_round = tuple(self.fixed_names), go_round(archive.longitude)
        self.next = NextStep(self.out, self.shape, samples, tuple(counts), names, self.section, is_round)

    def write(self) -> str:
        """Write the data set, and return a phrase on what was written."""
        archive, times = self.archive, self.archive.times
        frame = int(np.prod(self.shape)) * 4
        steps = _block(archive, min(self.memory_gb * 1e9 // frame, len(times)), frame)
        size = 0 if self.layout == "gzip" else len(times) * frame * np.dtype(self.dtype).itemsize // 4
        request = [[seen(path) for path in self.inputs], self.channels, self.valid_from, self.test_from]
        request += [self.fill, self.allow_gaps, self.dtype, self.layout, self.constants]
        units = [channel.units for channel in archive.channels]
        with hidden(Path(self.out), self.overwrite, size, "fewer files or channels", request) as scratch:
            self._write_constants(scratch.new)  # first: a fault in them shows at once
            axes = archive.latitude, archive.longitude
            writer = DatasetWriter(scratch.new, self.names, units, *axes, self.dtype, self.layout)
            done = scratch.resume(writer, self.missing)
            with writer, tqdm(total=len(times), desc="time steps", disable=None) as progress:
                for name, start, stop in self.files:
                    if name in done:
                        progress.update(stop - start)
                        continue
                    writer.add_file(name, times[start:stop])
                    for first in range(start, stop, steps):
                        self._write_block(writer, name, start, first, min(first + steps, stop))
                        progress.update(min(steps, stop - first))
                    writer.close(name)
                    done.append(name)
                    scratch.save(writer, done, self.missing)
            if self.section:
                (scratch.new / self.next.file).write_text(self.next.write_section())
        parts = ", ".join(f"{count:,} in {kind}" for kind, count in self.counts.items())
        filled = ", ".join(f"{count:,} of {name}" for name, count in self.missing.items() if count)
        return (
            f"{len(times):,} time steps of {' x '.join(map(str, self.shape))} {self.dtype} to {self.out} ({parts}); "
            f"missing values: {f'{filled}, filled' if filled else 'none'}; channels: {' '.join(self.names)}"
            f"{f'; constants: {chr(32).join(self.fixed_names)}' if self.fixed else ''}"
        )

    def _write_constants(self, folder: Path) -> None:
        """Write OUT/stats/constants.h5. Raises ValueError for missing values."""
        if not self.fixed:
            return
        archive, frame = self.fixed, np.empty((len(self.fixed_names), *self.shape[1:]), np.float32)
        for name in self.fixed_names:
            self.missing[name] = 0
        for c, values in archive.read(0, 1):
            frame[c] = self._filled(self.fixed_names[c], values, archive, "in all")[0]
        units = [channel.units for channel in archive.channels]
        writer = DatasetWriter(folder, self.fixed_names, units, archive.latitude, archive.longitude)
        writer.add_file("stats/constants", None)
        writer.write("stats/constants", 0, torch.from_numpy(frame))
        writer.close("stats/constants")

    def _write_block(self, writer: DatasetWriter, name: str, start: int, first: int, last: int) -> None:
        """Write steps `first` to `last` of a file that begins with step `start`."""
        steps = np.diff(self.archive.times)
        for t, values in zip(range(first, last), self._read(first, last)):
            is_after_gap = t > 0 and steps[t - 1] > steps.min()
            writer.write(name, t - start, torch.from_numpy(values), gap=bool(is_after_gap))

    def _read(self, first: int, last: int) -> np.ndarray:
        """Return a block [T, C, H, W]; count and fill missing values. Raises ValueError for those that may not be."""
        archive, dtype = self.archive, self.dtype
        block = np.empty((last - first, *self.shape), dtype)
        for c, values in archive.read(first, last):
            name = self.names[c]
            values = self._filled(name, values, archive, f"in a block of {last - first} steps", first)
            with np.errstate(over="ignore"):
                block[:, c] = values
            if dtype == "float16" and not np.isfinite(block[:, c]).all():
                largest = np.abs(values).max()
                raise ValueError(f"{name} reaches {largest:.6g}, and float16 ends at 65504: take --dtype float32")
            if dtype == "float16" and np.count_nonzero(block[:, c]) < np.count_nonzero(values):
                raise ValueError(f"{name} has values below 6e-8, which float16 turns into 0: take --dtype float32")
        return block

    def _filled(
        self, name: str, values: np.ndarray, archive: Archive, where: str, first: int | None = None
    ) -> np.ndarray:
        """Return values [T, H, W] with missing ones filled, and count these. Raises ValueError where they may not be.

        Args:
            first: the step that the values begin with; None for constants.
        """
        bad = missing(values)
        count = int(bad.sum())
        if count and name not in self.fill:
            t, y, x = np.unravel_index(bad.argmax(), bad.shape)
            when = "" if first is None else f"{date(archive.times[first + t])}, "
            raise ValueError(
                f"{name} has {count:,} missing or infinite values {where}, the first, {values[t, y, x]:g}, at {when}"
                f"{archive.latitude[y]:g}N {archive.longitude[x]:g}E: leave the channel out, give --fill "
                f"{name}=VALUE, or bring what is so large to another unit"
            )
        if not count:
            return values
        self.missing[name] += count
        return np.where(bad, self.fill[name], values)


def split(times: np.ndarray, valid_from: str | None, test_from: str | None) -> list[tuple[str, int, int]]:
    """Return the files to write, (kind/year, first step, last step + 1), in the order of time.

    Raises ValueError for a date that is none, and where no two steps are left for a part that was asked for.
    """
    starts = [("train", -np.inf)]
    for kind, text in (("valid", valid_from), ("test", test_from)):
        if text is not None:
            try:
                when = datetime.fromisoformat(text)
            except ValueError:
                raise ValueError(f"--{kind}_from is {text!r}: it takes a date such as 2018-01-01") from None
            starts.append((kind, when.replace(tzinfo=when.tzinfo or UTC).timestamp()))
    if [when for _, when in starts] != sorted(when for _, when in starts):
        raise ValueError(f"--valid_from {valid_from} comes after --test_from {test_from}: take a later one for tests")
    years = times.astype("datetime64[s]").astype("datetime64[Y]").astype(int) + 1970
    kinds = np.searchsorted([when for _, when in starts[1:]], times, side="right")
    for number, (kind, _) in enumerate(starts):
        count = int((kinds == number).sum())
        if count < 2:  # a sample is two of them, or more
            move = f"a later --{starts[1][0]}_from" if number == 0 else f"an earlier --{kind}_from"
            later = f", or a later --{starts[number + 1][0]}_from" if 0 < number < len(starts) - 1 else ""
            raise ValueError(
                f"{count} time step(s) are left for {WORDS[kind]}, of {date(times[0])} to {date(times[-1])}: "
                f"take {move}{later}"
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


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code: 0, 1 where a check found faults, or 2 after a line on what is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["check"]:
            parser = argparse.ArgumentParser(prog="python -m utils.prepare_data check", allow_abbrev=False)
            parser.add_argument("folder", help="a data set, or one folder of *.h5 files")
            return check(parser.parse_args(argv[1:]).folder)
        if argv[:1] == ["stats"]:
            parser = argparse.ArgumentParser(prog="python -m utils.prepare_data stats", allow_abbrev=False)
            parser.add_argument("folder", help="a data set, or one folder of *.h5 files")
            parser.add_argument("--out", help="folder for the statistics (FOLDER/stats)")
            parser.add_argument("--overwrite", action="store_true", help="replace those that are there")
            print(f"Wrote {write_statistics(**vars(parser.parse_args(argv[1:])))}")
            return 0
        preparation = Preparation(**_arguments(argv))
        written = preparation.write()
    except (ValueError, OSError, MemoryError) as error:
        reason = "memory ran out: lower --memory_gb" if isinstance(error, MemoryError) else one_line(str(error))
        goes_on = not isinstance(error, ValueError) and argv[:1] not in (["check"], ["stats"])
        kept = "" if not goes_on else "; the same command goes on after the last complete file"
        print(f"error: {reason}{kept}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = argv[:1] not in (["check"], ["stats"])
        print(f"Interrupted{': the same command goes on after the last complete file' * goes_on}", file=sys.stderr)
        return 130
    print(f"Wrote {written}")
    print(preparation.next.say())
    return 0


def _arguments(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser(
        prog="python -m utils.prepare_data",
        description=__doc__.split("\n")[0] + " `python -m utils.prepare_data check FOLDER` checks one, and "
        "`stats FOLDER` makes statistics.",
        allow_abbrev=False,
    )
    parser.add_argument("inputs", nargs="+", help="NetCDF or GRIB files, Zarr folders; each holds what it likes")
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--channels", nargs="+", metavar="NAME[=VARIABLE[@LEVEL]]", help="what to take, in this order")
    parser.add_argument(
        "--constants", nargs="+", default=[], metavar="NAME[=VARIABLE[@LEVEL]]", help="fields that do not change: masks"
    )
    parser.add_argument("--valid_from", metavar="DATE", help="the data from this date on are for validation")
    parser.add_argument("--test_from", metavar="DATE", help="those from this date on are for tests")
    parser.add_argument("--fill", nargs="+", default=[], metavar="NAME=VALUE", help="value for missing ones")
    parser.add_argument("--allow_gaps", action="store_true", help="times may be missing; no sample will span a gap")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="(float32)")
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous", help="HDF5 storage (contiguous: fastest)")
    parser.add_argument("--memory_gb", type=float, default=MEMORY_GB, help=f"size of a block in memory ({MEMORY_GB:g})")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    parser.add_argument("--section", metavar="NAME", help="write OUT/NAME.yaml, a section of a model for a laptop")
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
