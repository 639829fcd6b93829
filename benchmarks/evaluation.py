"""How fast does evaluate.py get its frames? Beside plain reads of the same bytes, from files that are in memory.

    python benchmarks/evaluation.py --json benchmarks/results/evaluation.json [--rounds 5]

40 forecasts of a day, four at a time, of 20 channels of 360 x 720. `frames_over_preadv_1` is the rate of their frames,
after the first batch, with one reader, over that of `preadv`, one read at a time, into memory that is used again;
`..._2` the same with two of each. They take turns; a ratio is taken within a round.
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.harness.data import path_flags
from benchmarks.harness.record import Figures, write_record
from utils.config.reader import load_config
from utils.forecast.data import ForecastData
from utils.forecast.settings import Evaluation
from utils.sample_data.write import write_shape

SHAPE, FORECASTS, B = (20, 360, 720), 40, 4
BATCHES = [list(range(i, i + B)) for i in range(0, FORECASTS, B)]


def raw_rate(data: ForecastData, depth: int) -> float:
    """Return the frames per second of `depth` reads at once."""
    frames = [frame for numbers in BATCHES for frame in data.stretches[numbers].transpose(1, 0, 2).reshape(-1, 2)]
    ring = np.ones((3 * B, *SHAPE), np.float32)
    fd, offset = os.open(data.files.paths[0], os.O_RDONLY), data.files.offsets[0]
    start = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        reads = enumerate(frames)
        list(pool.map(lambda x: os.preadv(fd, [ring[x[0] % len(ring)]], offset + int(x[1][1]) * ring[0].nbytes), reads))
    rate = len(frames) / (time.perf_counter() - start)
    os.close(fd)
    return rate


def rate(data: ForecastData) -> float:
    """Return the frames per second that an evaluation gets."""
    data.begin([*BATCHES, BATCHES[0]])  # what is read ahead of the clock, the readers read again at its end
    list(data.read())  # readers start, memory is put in place
    start = time.perf_counter()
    count = sum(len(frame) for _ in BATCHES[1:] for frame in data.read())
    seconds = time.perf_counter() - start
    data.close()
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="how often, in turn")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        write_shape(f"{folder}/data", SHAPE, samples=FORECASTS + 4)
        flags = [*path_flags(f"{folder}/data"), f"--inf_data_path={folder}/data/valid", f"--local_batch_size={B}"]
        for depth in (1, 2):
            config, _ = load_config(
                ["--config=base", "--global_batch_size=None", *flags, f"--num_data_workers={depth}"]
            )
            ratios, rates = [], []
            for _ in range(args.rounds):
                data = ForecastData(config, Evaluation(checkpoint="", lead_hours=24), torch.device("cpu"))
                raw = raw_rate(data, depth)
                rates.append(rate(data))
                ratios.append(rates[-1] / raw)
            print(figures.add(f"frames_over_preadv_{depth}", ratios))
            print(figures.add(f"frames_per_sec_{depth}", rates), flush=True)
    write_record(args.json, figures, figures.spread)


if __name__ == "__main__":
    main()
