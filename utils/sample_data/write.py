"""Write built-in data: weather from a small model of the atmosphere, or patterns of any shape for benchmarks.

    python -m utils.sample_data                          1,000 samples of 8 x 64 x 128, half a minute, in data/demo
    python -m utils.sample_data --shape 20 721 1440      the shape of ERA5 at 0.25 degrees, in data/20x721x1440

The first runs the two-layer quasi-geostrophic model of qg.py: jets and storms, a sample every six hours. Each
trajectory is a file and a model year, OUT/train/2001.h5 and on; the last one goes to OUT/valid, so that nothing
validated was trained on. OUT/stats holds the statistics (utils/data/writer.py has the layout).

One seed gives the same bytes every time on one machine. OUT appears when it is complete, never before.

Shapes: C channels, H latitudes (from the north), W longitudes (from 0E).
"""

import argparse
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from utils.data.unfinished import hidden
from utils.data.writer import LAYOUTS, DatasetWriter
from utils.sample_data.qg import CHANNELS, UNITS, SphericalHarmonics, TwoLayerQG

DEFAULT_OUT = "data/demo"
STEP = 6 * 3600  # s between samples
FIRST_YEAR = 2001
LESS = "fewer --samples or --trajectories"


@torch.inference_mode()
def write_qg(
    out: str | Path = DEFAULT_OUT, trajectories: int = 8, samples: int = 125, spinup_days: int = 60, seed: int = 0,
    height: int = 64, width: int = 128, layout: str = "contiguous", overwrite: bool = False,
) -> str:  # fmt: skip
    """Write `samples` six-hourly frames of each trajectory of the QG model, after `spinup_days` that are not kept.

    `fields` are float32 [samples, 8, height, width] a file. Rows are cell centres, 90 - 180 (j + 0.5) / height
    degrees, so that none is a pole, where u and v have no direction. A grid too coarse for the model's smallest waves
    gets the waves that it can carry. Returns a phrase on what was written. Raises ValueError (see also `hidden`).
    """
    _check_at_least(trajectories=(trajectories, 2), samples=(samples, 2), spinup_days=(spinup_days, 0), seed=(seed, 0))
    _check_at_least(height=(height, 8), width=(width, 8))
    if height % 2:
        raise ValueError(f"--height is {height}: rows come in pairs, north and south; give an even number")
    latitude = 90 - 180 * (np.arange(height) + 0.5) / height
    longitude = 360 * np.arange(width) / width
    shape = (len(CHANNELS), height, width)
    size = _size(trajectories, samples, shape)
    with (
        hidden(Path(out), overwrite, size, LESS) as unfinished,
        one_thread(),
        DatasetWriter(unfinished.new, CHANNELS, UNITS, latitude, longitude, layout=layout) as writer,
    ):
        names = _add_files(writer, trajectories, samples)
        model = TwoLayerQG()
        carried = min(model.truncation, height - 1, (width - 1) // 2)
        grid = SphericalHarmonics(np.sin(np.radians(latitude)), width, carried, model.dtype)
        q = model.initial_state(trajectories, seed)
        spinup = spinup_days * 86400 // STEP
        # disable=None: a bar on a terminal, silence in a log.
        for t in tqdm(range(1 - spinup, samples + 1), desc="six-hour steps", disable=None):
            for _ in range(round(STEP / model.time_step)):
                q = model.step(q)
            if t > 0:
                for name, frame in zip(names, model.fields(q, grid), strict=True):
                    writer.write(name, t - 1, frame)
    return _summary(trajectories, samples, shape, "float32", folder=Path(out))


@torch.inference_mode()
def write_shape(
    out: str | Path, shape: tuple[int, int, int], trajectories: int = 2, samples: int = 16, seed: int = 0,
    dtype: str = "float32", layout: str = "contiguous", overwrite: bool = False,
) -> str:  # fmt: skip
    """Write frames of any `shape` (C, H, W) for benchmarks, near the speed of the disk: patterns, not weather.

    Channel c has the mean c, about which one smooth pattern drifts c + 1 columns east every step and another one
    stands and swings. `dtype` is float32 or float16. An odd H has both poles as rows, an even one lacks the southern.
    Returns a phrase on what was written. Raises ValueError (see also `hidden`).
    """
    channels, height, width = shape
    _check_at_least(trajectories=(trajectories, 2), samples=(samples, 2), seed=(seed, 0))
    if channels < 1 or height < 2 or width < 2:
        raise ValueError(f"--shape is {channels} {height} {width}: give a C of at least 1, an H and a W of at least 2")
    latitude = 90 - 180 * np.arange(height) / (height - height % 2)
    longitude = 360 * np.arange(width) / width
    size = 0 if layout == "gzip" else _size(trajectories, samples, shape, dtype)
    with (
        hidden(Path(out), overwrite, size, LESS) as unfinished,
        one_thread(),
        DatasetWriter(
            unfinished.new, [f"ch{c}" for c in range(channels)], ["1"] * channels, latitude, longitude, dtype, layout
        ) as writer,
        tqdm(total=trajectories * samples, desc="samples", disable=None) as progress,
    ):
        generator = torch.Generator().manual_seed(seed)
        frame = torch.empty(shape, dtype=getattr(torch, dtype))
        for name in _add_files(writer, trajectories, samples):
            drifting, standing = _smooth_patterns(shape, generator), _smooth_patterns(shape, generator)
            for t in range(samples):
                for c in range(channels):
                    swing = np.sin(2 * np.pi * t / (8 + c))
                    frame[c] = drifting[c].roll(t * (c + 1) % width, dims=-1).add_(standing[c], alpha=swing).add_(c)
                writer.write(name, t, frame)
                progress.update()
    return _summary(trajectories, samples, shape, dtype, folder=Path(out))


def _smooth_patterns(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Random patterns [C, H, W], float32, mean about 0 and variance about 1: a few long waves in either direction."""
    channels, height, width = shape
    waves = min(8, width // 2)
    x = torch.arange(width) * (2 * torch.pi / width) * torch.arange(1, waves + 1)[:, None]  # [waves, W]
    y = torch.arange(height) * (torch.pi / height) * torch.arange(1, 9)[:, None]  # [8, H]
    amplitudes = torch.randn(channels, 2 * waves, 8, generator=generator) / (2 * waves**0.5)
    return (amplitudes @ y.sin()).mT @ torch.cat((x.cos(), x.sin()))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, then as before: sums shared by threads round differently from one count to another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _add_files(writer: DatasetWriter, trajectories: int, samples: int) -> list[str]:
    """Create a file a trajectory, one model year each, the last one for validation. Returns their names."""
    names = []
    for year in range(FIRST_YEAR, FIRST_YEAR + trajectories):
        names.append(f"train/{year}" if len(names) < trajectories - 1 else f"valid/{year}")
        start = datetime(year, 1, 1, tzinfo=UTC).timestamp()
        writer.add_file(names[-1], start + STEP * np.arange(samples))
    return names


def _check_at_least(**flags: tuple[int, int]) -> None:
    """Raise ValueError for the first flag, given as name=(value, smallest), that is too small."""
    for name, (value, smallest) in flags.items():
        if value < smallest:
            raise ValueError(f"--{name} is {value}: it must be {smallest} or more; give a larger number")


def _size(trajectories: int, samples: int, shape: tuple[int, int, int], dtype: str = "float32") -> int:
    """Bytes of all fields, uncompressed."""
    return trajectories * samples * int(np.prod(shape)) * np.dtype(dtype).itemsize


def _summary(trajectories: int, samples: int, shape: tuple[int, int, int], dtype: str, folder: Path) -> str:
    on_disk = sum(path.stat().st_size for path in folder.glob("*/*"))
    return (
        f"{trajectories * samples:,} samples of {' x '.join(map(str, shape))} {dtype} to {folder} "
        f"({(trajectories - 1) * samples:,} in train, {samples:,} in valid, {on_disk / 1e6:,.1f} MB)"
    )


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code: 0, or 2 after a line on what is wrong and what to do."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.sample_data", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    # No defaults here: those of write_qg and write_shape hold, so that each stands once.
    parser.add_argument("--out", help=f"folder to create ({DEFAULT_OUT}; with --shape data/CxHxW)")
    parser.add_argument("--trajectories", type=int, help="files, the last for validation (8; with --shape 2)")
    parser.add_argument("--samples", type=int, help="samples of each, six hours apart (125; with --shape 16)")
    parser.add_argument("--spinup_days", type=int, help="model days before the first sample (60)")
    parser.add_argument("--height", type=int, help="latitudes, an even number (64)")
    parser.add_argument("--width", type=int, help="longitudes (128)")
    parser.add_argument("--seed", type=int, help="another seed, other weather (0)")
    parser.add_argument("--layout", choices=LAYOUTS, help="HDF5 storage; a chunk: a channel of a frame (contiguous)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("C", "H", "W"), help="drifting patterns, not weather")
    parser.add_argument("--dtype", choices=("float32", "float16"), help="only with --shape (float32)")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    write = write_shape if "shape" in given else write_qg
    given.setdefault("out", DEFAULT_OUT if write is write_qg else "data/" + "x".join(map(str, given["shape"])))
    try:
        for name in given.keys() - inspect.signature(write).parameters.keys():
            when = "with" if "shape" in given else "without"
            raise ValueError(f"--{name} {given[name]} has no meaning {when} --shape; leave it out")
        written = write(**given)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if write is write_qg and given["out"] == DEFAULT_OUT:
        following = "python train.py --config=demo"
    else:
        following = f"python train.py --config=short --data_dir {given['out']}, with --img_size and channels to match"
    print(f"Wrote {written}. Next: {following}")
    return 0
