"""What does a start cost on many ranks: seconds, and connections? Ranks of this machine, on gloo.

    python benchmarks/startup.py --json benchmarks/results/startup.json [--ranks 4 8 16 32 64]

Each rank trains a small model for two iterations and saves a checkpoint, as any run does. `seconds` is from the start
of the last rank to its first step; on a machine with fewer cores than ranks, most of it is the model's. Sockets are
those open at the end: on most ranks they grow with the logarithm of the number of ranks, on rank 0, which serves the
store and gathers what a checkpoint holds, with the number. `..._1024` are these laws, fitted. TORCH_GLOO_LAZY_INIT=0
shows what it would be if each group connected each rank to all others at once.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import train
from benchmarks.harness.data import PLAIN
from benchmarks.harness.record import write_record
from utils.observers import Observer
from utils.ranks.start import start

FLAGS = [
    *PLAIN,
    "--embed_dim=32",
    "--depth=1",
    "--num_heads=1",
    "--local_batch_size=1",
    "--plot_channels=None",
]
FLAGS += ["--global_batch_size=None", "--num_iters=2", "--limit_nsamples_val=1", "--device=cpu", "--num_data_workers=0"]


class Look(Observer):
    """Writes when this rank takes its first step, and how many sockets it has at the end."""

    def __init__(self, folder: str, began: float):
        self.file, self.began, self.step = Path(folder, os.environ["RANK"]), began, 0.0

    def before_step(self, left: int) -> None:
        self.step = self.step or time.monotonic()

    def close(self, error: BaseException | None) -> None:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        sockets = sum(link.startswith("socket") for link in links)
        self.file.write_text(json.dumps({"began": self.began, "step": self.step, "sockets": sockets}))


def rank(number: int, ranks: int, port: int, folder: str) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    os.dup2(os.open(Path(folder, "told"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    observers = [Look(folder, time.monotonic())]
    start(partial(train.main, observers=observers), [*FLAGS, f"--limit_nsamples={2 * ranks}", f"--expdir={folder}"])


def measure(ranks: int, port: int) -> tuple[float, int, int]:
    """Return the seconds of a start, the most sockets of a rank but rank 0, and those of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")  # what this process has imported need not be read again
        processes = [fork.Process(target=rank, args=(number, ranks, port, folder)) for number in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"startup.py: {ranks} ranks: they ended with {[process.exitcode for process in processes]}")
        found = [json.loads(Path(folder, str(number)).read_text()) for number in range(ranks)]
    began, first = max(x["began"] for x in found), max(x["step"] for x in found)
    first_rank, *others = (x["sockets"] for x in found)
    return first - began, max(others), first_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="numbers of ranks, from 2")
    parser.add_argument("--port", type=int, default=14500, help="first of as many free ports")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    found = {ranks: measure(ranks, args.port + i) for i, ranks in enumerate(args.ranks)}
    figures = {}
    for ranks, (seconds, others, first) in found.items():
        figures |= {f"seconds_{ranks}": seconds, f"sockets_{ranks}": others, f"sockets_rank_0_{ranks}": first}
        print(f"{ranks:5} ranks: {seconds:6.1f} s; {others:4} sockets a rank, {first:4} on rank 0", flush=True)
    if len(found) > 2:
        is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "1") == "1"
        growth = math.log2 if is_lazy else float
        for name, i, law in (("seconds", 0, float), ("sockets", 1, growth), ("sockets_rank_0", 2, float)):
            slope, constant = np.polyfit([law(ranks) for ranks in found], [x[i] for x in found.values()], 1)
            figures[f"{name}_1024"] = round(slope * law(1024) + constant)
            print(f"{name} at 1,024 ranks: about {figures[f'{name}_1024']}")
    write_record(args.json, figures, {})


if __name__ == "__main__":
    main()
