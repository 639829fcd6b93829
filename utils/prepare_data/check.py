"""Check a folder of training files: what is in them, and is anything wrong with it?"""

from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from utils.data.fields import check_names
from utils.data.files import Files, filters
from utils.data.frames import FrameReader
from utils.data.statistics import Statistics
from utils.data.variables import missing
from utils.errors import ReadError

KINDS = ("train", "valid", "test")


def check(folder: str) -> int:
    """Print shapes, times and gaps, and each channel's range, of a data set or of one folder of files.

    Reads every value once. Returns 0, or 1 where a value is missing (see utils.data.variables.missing), a file cannot
    be read, or the parts of a data set do not fit together, or there is none for validation. Raises ValueError (see
    Files.open) for a folder that holds no training files.
    """
    parts = [name for name in KINDS if Path(folder, name).is_dir()]
    opened = {name: Files.open(str(Path(folder, name))) for name in parts} or {"": Files.open(folder)}
    faults = []
    means, stds = None, None
    for name, files in opened.items():
        found, *moments = _check_files(name or folder, files)
        faults += found
        if name in ("train", ""):
            means, stds = moments
    if "train" in opened and "valid" not in opened:
        faults.append(
            f"{folder} has no valid/, and training validates: make it anew with --valid_from DATE, or give training "
            f"another folder with --valid_data_path"
        )
    if len(opened) > 1:
        first, *others = opened.values()
        for files in others:
            try:
                files.check_same(first, "the parts of a data set must agree")
            except ValueError as error:
                faults.append(str(error))
    if Path(folder, "stats").is_dir():
        faults += _check_statistics(Path(folder, "stats"), next(iter(opened.values())), means, stds)
    print("\n".join(["", *(f"FAULT: {fault}" for fault in faults)]) if faults else "\nNo fault found.")
    return 1 if faults else 0


def _check_files(name: str, files: Files) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Print what a folder holds; return what is wrong with it, and the mean and std of each channel."""
    C, H, W = files.shape
    step = files.step_seconds()
    print(f"\n{name}: {len(files.paths)} file(s), {sum(files.steps):,} time steps of {C} x {H} x {W} {files.dtype}")
    lat, lon = files.latitude, files.longitude
    print(f"  latitude {lat[0]:g} to {lat[-1]:g}, longitude {lon[0]:g} to {lon[-1]:g}", end="; ")
    print("no time stored" if step is None else f"a step is {step / 3600:g} h")
    for i, (path, steps, times) in enumerate(zip(files.paths, files.steps, files.times)):
        dates = f", {files.date(i, 0)} to {files.date(i, steps - 1)}" if times is not None and steps else ""
        print(f"  {Path(path).name}: {steps:,} steps{dates}, {_layout(path)}")
        for t in np.flatnonzero(np.diff(times) != step) if times is not None and step else ():
            print(f"    gap from {files.date(i, t)} to {files.date(i, t + 1)}: no sample will span it")
    names, warning = files.names(None)
    check_names([*names], [*files.units])
    if warning:
        print(f"  note: {warning}")
    return _check_values(files, names)


def _check_values(files: Files, names: tuple[str, ...]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Print the range of each channel; return what is wrong with the values, their mean and their std."""
    C, H, W = files.shape
    reader, faults = FrameReader(files, list(range(C)), range(H), W), []
    low, high = np.full(C, np.inf), np.full(C, -np.inf)
    sums, squares, counts, bad = (np.zeros(C) for _ in range(4))
    with tqdm(total=sum(files.steps), desc="time steps", leave=False, disable=None) as progress:
        for i, steps in enumerate(files.steps):
            for t in range(steps):
                try:
                    frame = reader.read_frame(i, t)
                except ReadError as error:
                    faults.append(str(error))
                    break
                for c, values in enumerate(frame):
                    lacking = missing(values)
                    finite = values[~lacking].astype(np.float64)
                    if len(finite) < values.size and not bad[c]:
                        y, x = np.unravel_index(lacking.argmax(), values.shape)
                        faults.append(f"{files.paths[i]}, fields[{t}, {c}, {y}, {x}] ({names[c]}) is {values[y, x]}")
                    bad[c] += values.size - len(finite)
                    if len(finite):
                        low[c], high[c] = min(low[c], finite.min()), max(high[c], finite.max())
                        sums[c], squares[c] = sums[c] + finite.sum(), squares[c] + np.square(finite).sum()
                        counts[c] += len(finite)
                progress.update()
    print(f"  {'channel':<10} {'unit':<12} {'least':>12} {'largest':>12} {'mean':>12} {'std':>12} {'missing':>11}")
    means = sums / np.maximum(counts, 1)
    stds = np.sqrt(np.maximum(squares / np.maximum(counts, 1) - means**2, 0))
    for c, name in enumerate(names):
        numbers = " ".join(f"{x:12.5g}" for x in (low[c], high[c], means[c], stds[c]))
        print(f"  {name:<10} {files.units[c]:<12} {numbers} {int(bad[c]):11,}")
        if low[c] == high[c]:
            faults.append(f"{name} is {low[c]:g} everywhere: leave it out, or training will refuse it")
    return faults, means, stds


def _check_statistics(folder: Path, files: Files, means: np.ndarray | None, stds: np.ndarray | None) -> list[str]:
    """Return what is wrong with the statistics of a data set, whose training files have these means and stds."""
    C, H, W = files.shape
    faults = []
    statistics = Statistics(files.names(None)[0], tuple(range(C)), are_named=files.channel_names is not None)
    truth = {"global_means": means, "global_stds": stds}
    for name, tail in {"global_means": (1, 1), "global_stds": (1, 1), "time_means": (H, W)}.items():
        path = folder / f"{name}.npy"
        if name == "time_means" and not path.exists():
            print(f"  note: {path} is not there, which makes no climatology: `python -m utils.prepare_data stats`")
            continue
        try:
            values = statistics.load(str(path), f"{name}_path", [tail])
        except ValueError as error:
            faults.append(str(error))
            continue
        if truth.get(name) is not None:
            off = np.abs(values.reshape(C) - truth[name]) / np.maximum(stds, 1e-30)
            if off.max() > 0.01:
                c = int(off.argmax())
                faults.append(
                    f"{path} has {values.reshape(C)[c]:g} for channel {c}, and the training files {truth[name][c]:g}"
                )
    for remark in statistics.remarks:
        print(f"  note: {remark}")
    return faults


def _layout(path: str) -> str:
    """Return how a file stores its fields, in words."""
    with h5py.File(path, locking=False) as file:
        fields = file["fields"]
        if fields.chunks is None:
            return "contiguous"
        names = ", ".join(name.split(";")[0] for _, name in filters(fields))
        return f"chunks of {' x '.join(map(str, fields.chunks))}{', ' * bool(names)}{names}"
