"""How fast do frames come from files into batches? Native loader, DALI and a stock DataLoader, beside the raw read.

    python benchmarks/loader.py [--json FILE] [--rounds 3]

Frames are 20 x 360 x 720, a sample two of them, a batch four samples in shuffled order; the files lie in the page
cache. The raw read is `preadv` of the same frames into a ring of three batches, one read at a time. Cases take turns; a
ratio is taken within a round. A GB is what is delivered: compressed files are smaller, and float16 counts two bytes a
number.

Cold: the cache is dropped, and every read waits 5 ms more, as on a far file system. How much of it do reads that are
under way at once hide? Training: how long does the loop wait for data?
"""

import argparse
import contextlib
import itertools
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import h5py
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.data import PLAIN, path_flags, train_here
from benchmarks.harness.record import Figures, write_record
from utils.data.batches import Reading, Samples
from utils.data.files import Files
from utils.data.frames import FrameReader
from utils.data.loader import Loader
from utils.data.order import SampleOrder
from utils.data.to_device import Normaliser
from utils.measure.tables import markdown
from utils.sample_data.write import write_shape

SHAPE, B, SAMPLES = (20, 360, 720), 4, 25  # 24 pairs: six batches an epoch
LAYOUTS = ("contiguous", "chunked", "gzip", "blosc2", "float16")
CASES = ("preadv", "native 0", "native 1", "native 2", "native 4", "native 1, normalised", "DALI", "stock 0", "stock 2")
DEPTHS = (1, 2, 4, 8, 16)
LATENCY = 0.005  # s


def write_files(folder: str) -> None:
    """Write one file in every layout; a chunk is a channel of a frame."""
    from hdf5plugin import Blosc2

    chunks = (1, 1, *SHAPE[1:])
    write_shape(f"{folder}/contiguous", SHAPE, samples=SAMPLES)
    write_shape(f"{folder}/small", (8, 64, 128), samples=513)
    with h5py.File(f"{folder}/contiguous/train/2001.h5") as file:
        fields = file["fields"][:]
    storage = {
        "chunked": {"chunks": chunks},
        "gzip": {"chunks": chunks, "compression": "gzip", "compression_opts": 1, "shuffle": True},
        "blosc2": {"chunks": chunks, **Blosc2(cname="lz4", clevel=5, filters=Blosc2.SHUFFLE)},
        "float16": {"dtype": "float16"},
    }
    for name, how in storage.items():
        Path(folder, name, "train").mkdir(parents=True)
        with h5py.File(f"{folder}/{name}/train/2001.h5", "w") as file:
            file.create_dataset("fields", data=fields, **how)


class RawRead:
    """`preadv` into a ring of three batches that begin at round addresses: to others a copy takes a quarter longer."""

    def __init__(self, files: Files, order: SampleOrder):
        self.order, self.offset, self.fd = order, files.offsets[0], os.open(files.paths[0], os.O_RDONLY)
        self.frame = math.prod(files.shape) * files.dtype.itemsize
        memory = (torch.empty(2 * B * self.frame, dtype=torch.uint8) for _ in range(3))  # NumPy's begins 16 bytes later
        self.ring = [batch.numpy().view(files.dtype).reshape(B, 2, *files.shape) for batch in memory]

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        for i, samples in enumerate(self.order.epoch(epoch)):
            for place, t in enumerate(samples):
                for part in (0, 1):
                    os.preadv(self.fd, [self.ring[i % 3][place, part]], self.offset + int(t + part) * self.frame)
            yield self.ring[i % 3]


class Pairs(Dataset):
    """What one would write first: a sample is two slices of the file."""

    def __init__(self, path: str):
        self.path, self.fields = path, None

    def __len__(self) -> int:
        return SAMPLES - 1

    def __getitem__(self, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fields is None:
            self.fields = h5py.File(self.path)["fields"]
        return torch.from_numpy(self.fields[t]), torch.from_numpy(self.fields[t + 1])


class Stock:
    """PyTorch's DataLoader."""

    def __init__(self, files: Files, order: SampleOrder, workers: int):
        self.order, self.samples = order, []
        # Spawned: a process that has threads (those of other loaders here) must not fork.
        more = {"multiprocessing_context": "spawn", "persistent_workers": True} if workers else {}
        self.loader = DataLoader(Pairs(files.paths[0]), B, sampler=self.samples, num_workers=workers, **more)

    def epoch(self, epoch: int) -> Iterator[list[torch.Tensor]]:
        self.samples[:] = self.order.epoch(epoch).ravel().tolist()
        yield from self.loader


def samples_of(files: Files) -> Samples:
    """Return pairs of whole frames."""
    C, H, W = files.shape
    every = list(range(C))
    return Samples(tuple(FrameReader(files, used, range(H), W) for used in (every, every, [])), files.samples(1), 1)


def native(files: Files, order: SampleOrder, workers: int, depth: int | None = None) -> Loader:
    """Return the project's loader of whole frames."""
    return Loader(samples_of(files), order, Reading(workers, depth))


class Normalised:
    """The native loader with one reader, and what follows on a CPU: the part that DALI does, too."""

    def __init__(self, files: Files, order: SampleOrder):
        self.loader = native(files, order, 1)
        zeros = torch.zeros(1, files.shape[0], 1, 1)
        self.normalise = [Normaliser(zeros, zeros + 1) for _ in range(2)]

    def epoch(self, epoch: int) -> Iterator[list[torch.Tensor]]:
        for batch in self.loader.epoch(epoch):
            yield [normalise(x) for normalise, x in zip(self.normalise, (batch.inp, batch.target))]


def dali(files: Files, order: SampleOrder) -> Loader:
    """Return the DALI loader; it normalises, too."""
    from utils.data.loader_dali import DaliLoader

    stats = ((np.zeros(SHAPE[0]), np.ones(SHAPE[0])),) * 2 + ((np.zeros(0), np.ones(0)),)
    return DaliLoader(samples_of(files), order, Reading(1), stats, torch.device("cpu"))


def cases(layout: str) -> dict[str, Callable]:
    """Return what is measured on files of a layout."""
    raw = {"preadv": RawRead} if layout in ("contiguous", "float16") else {}
    ours = {f"native {n}": lambda files, order, n=n: native(files, order, n) for n in (0, 1, 2, 4)}
    stock = {f"stock {n}": lambda files, order, n=n: Stock(files, order, n) for n in (0, 2)}
    return {**raw, **ours, "native 1, normalised": Normalised, "DALI": dali, **stock}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all those that it started, those that still run included."""
    process = psutil.Process()
    total = sum(process.cpu_times()[:4])  # of its own, user and system, and of those that have ended
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


def measure(make: Callable, files: Files, order: SampleOrder, epochs: int = 2) -> dict[str, float]:
    """Return GB/s, CPU seconds a GB, and the seconds from nothing to the first batch."""
    start = time.perf_counter()
    loader = make(files, order)
    for i, _ in enumerate(loader.epoch(0)):
        if i == 0:
            first = time.perf_counter() - start
    cpu, start = cpu_seconds(), time.perf_counter()
    for epoch in range(1, 1 + epochs):
        for _ in loader.epoch(epoch):
            pass
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    gigabytes = epochs * len(order) * B * 2 * math.prod(files.shape) * files.dtype.itemsize / 1e9
    return {"GB/s": gigabytes / seconds, "CPU s/GB": cpu / gigabytes, "first batch s": first}


def warm(folder: str, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Return the measurements of each round, by `layout, case`."""
    results = []
    for _ in range(rounds):
        results.append({})
        for layout in LAYOUTS:
            files = Files.open(f"{folder}/{layout}/train")
            order = SampleOrder(SAMPLES - 1, B, shuffle=True)
            for name, make in cases(layout).items():
                print(f"\r{layout}, {name}".ljust(40), end="", flush=True)
                results[-1][f"{layout}, {name}"] = measure(make, files, order)
    return results


def cold(folder: str) -> dict[int, float]:
    """Return the reads a second at each depth, over depth / the time of one read by itself. 1 hides every wait."""
    files, original = Files.open(f"{folder}/small/train"), os.preadv
    fd = os.open(files.paths[0], os.O_RDONLY)
    os.fsync(fd)

    def far(*args) -> int:
        time.sleep(LATENCY)
        return original(*args)

    order, efficiency = SampleOrder(512, 16, shuffle=True), {}
    os.preadv = far
    try:
        for depth in DEPTHS:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            loader = native(files, order, 1, depth)
            start = time.perf_counter()
            count = sum(1 for _ in loader.epoch(0)) * 16 * 2
            rate = count / (time.perf_counter() - start)
            efficiency[depth] = rate / depth
    finally:
        os.preadv = original
    return {depth: value / efficiency[1] for depth, value in efficiency.items()}


def step_bound(folder: str, seconds: float = 0.02) -> float:
    """Return the speed of a loop whose step takes 20 ms, over that of the same loop with one batch in memory."""
    files = Files.open(f"{folder}/contiguous/train")
    loader = native(files, SampleOrder(SAMPLES - 1, 2, shuffle=True), 1)
    *_, batch = loader.epoch(0)

    def loop(batches: Iterator) -> float:
        start = time.perf_counter()
        for _ in batches:
            time.sleep(seconds)
        return time.perf_counter() - start

    epochs = range(1, 5)
    fed = loop(itertools.chain.from_iterable(map(loader.epoch, epochs)))
    return loop(itertools.repeat(batch, len(epochs) * len(loader))) / fed


def training_wait(folder: str) -> list[float]:
    """Return `data_wait_frac` of each epoch of a training run whose computation takes most of the time."""
    write_shape(f"{folder}/train", (20, 64, 128), samples=321)
    flags = [
        *PLAIN, *path_flags(f"{folder}/train"), "--expdir", folder, "--num_data_workers=1", "--num_iters=120",
        "--global_batch_size=8", "--n_in_channels=20", "--n_out_channels=20", "--plot_channels=None",
        "--checkpoint_every=None",
    ]  # fmt: skip
    return [line["data_wait_frac"] for line in train_here(flags) if line["event"] == "epoch"]


def ratios(rounds: list[dict[str, dict[str, float]]]) -> dict[str, list[float]]:
    """Return, round by round, the speed of each case over that of the raw read and of the stock loader."""
    out: dict[str, list[float]] = {}
    for results in rounds:
        raw = results["contiguous, preadv"]["GB/s"]
        for case, result in results.items():
            out.setdefault(f"{case} over preadv", []).append(result["GB/s"] / raw)
        for key, case in (("native_over_preadv", "native 1"), ("dali_over_preadv", "DALI")):
            out.setdefault(key, []).append(results[f"contiguous, {case}"]["GB/s"] / raw)
        stock = results["contiguous, stock 0"]["GB/s"]
        out.setdefault("native_over_stock", []).append(results["contiguous, native 1"]["GB/s"] / stock)
    return out


def table(figures: dict[str, float], spread: dict[str, list[float]]) -> str:
    """Return chapter 1's table: GB/s of each case on each layout."""
    rows = []
    for name in CASES:
        cells = (figures.get(f"{layout}, {name}, GB/s") for layout in LAYOUTS)
        rows.append([name, *("" if x is None else f"{x:.2g}" for x in cells)])
    return markdown(["GB/s", *(f"`{layout}`" for layout in LAYOUTS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--rounds", type=int, default=3, help="repeats of every case (3)")
    args = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        print("writing files ...", flush=True)
        write_files(folder)
        rounds = warm(folder, args.rounds)
        measured = {
            **{f"{case}, {what}": [r[case][what] for r in rounds] for case in rounds[0] for what in rounds[0][case]},
            **ratios(rounds),
            "data_wait_frac": training_wait(folder),
            "of a loop bound by a step of 20 ms": [step_bound(folder) for _ in range(args.rounds)],
        }
        for _ in range(args.rounds):
            for depth, value in cold(folder).items():
                measured.setdefault(f"cold, read_depth {depth}, of what it allows", []).append(value)
    figures = Figures()
    for name in sorted(measured, key=lambda name: "_" not in name):
        told = figures.add(name, measured[name])
        if not name.endswith(("GB/s", "s/GB", "batch s")):
            print(told)
    print(table(figures, figures.spread))
    if args.json:
        write_record(args.json, figures, figures.spread)


if __name__ == "__main__":
    main()
