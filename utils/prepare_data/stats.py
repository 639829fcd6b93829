"""Make the statistics of training files that have none, or not all: the tutorial's data come without time means.

python -m utils.prepare_data stats data/mine                          writes what data/mine/stats lacks
python -m utils.prepare_data stats /data --out stats                  leaves a folder of others as it is
"""

from pathlib import Path

import torch
from tqdm import tqdm

from utils.data.files import Files
from utils.data.frames import FrameReader
from utils.data.statistics import NAMES
from utils.data.statistics_sums import StatisticsSums
from utils.data.variables import missing
from utils.reading import read_text


def write_statistics(folder: str, out: str | None, overwrite: bool) -> str:
    """Write the statistics of `folder`/train, or of a folder of files, that are not there, and return a phrase on them.

    Args:
        out: where they go; None for `folder`/stats.
        overwrite: replace those that are there.

    Raises ValueError for files that cannot be read (see Files.open), missing values, and where nothing
    is to be written; ReadError for a file that ends too early.
    """
    train = Path(folder, "train")
    if out is None and not train.is_dir():
        raise ValueError(f"{folder} has no train/, so there is no place beside it for statistics: give --out")
    into = Path(out) if out is not None else Path(folder, "stats")
    files = Files.open(str(train if train.is_dir() else folder))
    sums, step = StatisticsSums(files.shape), files.step_seconds()
    there = () if overwrite else tuple(name for name in sums.FILES if (into / f"{name}.npy").exists())
    if len(there) == len(sums.FILES):
        raise ValueError(f"{into} holds all statistics: --overwrite makes them anew")
    if not sum(files.steps):
        raise ValueError(f"{files.paths[0]} holds no time step: there is nothing to make statistics of")
    (names, _), beside = files.names(None), into / NAMES
    if there and beside.exists() and tuple(read_text(beside).splitlines()) != names:
        raise ValueError(
            f"the statistics in {into} are of other channels or in another order ({NAMES}) than {files.paths[0]}: give "
            f"another --out, or --overwrite"
        )
    C, H, W = files.shape
    reader = FrameReader(files, list(range(C)), range(H), W)
    with tqdm(total=sum(files.steps), desc="time steps", leave=False, disable=None) as progress:
        for i, (steps, times) in enumerate(zip(files.steps, files.times)):
            before = None
            for t in range(steps):
                frame = reader.read_frame(i, t)
                if missing(frame).any():
                    raise ValueError(f"{files.paths[i]}: frame {t} lacks values, or has huge ones: mend the file first")
                frame = torch.from_numpy(frame)
                is_next = t > 0 and (times is None or times[t] - times[t - 1] == step)
                sums.add(frame, before if is_next else None)
                before = frame.clone()
                progress.update()
    sums.write(into, names, leave=there)
    kept = f"; left as they were: {', '.join(there)}" if there else ""
    written = ", ".join(name for name in sums.FILES if name not in there)
    return f"{written} of {sums.frames:,} time steps of {' x '.join(map(str, files.shape))} to {into}{kept}"
