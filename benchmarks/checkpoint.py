"""Checkpoints of 160 million parameters: how long a save takes, and how long the training loop waits for it.

    python benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json

What should come out: a save takes at most twice as long as writing the same bytes to the same disk; while a model
trains on the same cores it takes longer. The loop waits for one copy of the bytes in memory, and not for the disk.

The model trains while it is saved, as in a run: steps of 8 tokens, so that the steps are short beside the save. On a
GPU the copy is on its stream, and the stall is the time there, from the end of a step to the beginning of the next one.
"""

import argparse
import contextlib
import logging
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.bench import Bench
from benchmarks.harness.data import PLAIN
from benchmarks.harness.record import Figures, write_record
from utils.checkpoint import storage
from utils.checkpoint import store as checkpoint
from utils.checkpoint.background import Checkpointer
from utils.checkpoint.state import TrainingState
from utils.device import synchronize
from utils.ranks.start import join
from utils.ranks.world import World

FLAGS = [
    *PLAIN, "--no_residual", "--plot_channels=None", "--img_size", "16", "32", "--patch_size=8",
    "--embed_dim=1040", "--depth=12", "--num_heads=13", "--n_in_channels=20", "--n_out_channels=20",
    "--local_batch_size=1",
]  # fmt: skip


def step(bench: Bench) -> float:
    """Take a step and return its time, s."""
    start = time.perf_counter()
    bench.step(*bench.batch)
    bench.update(1e-6)
    synchronize(bench.device)
    return time.perf_counter() - start


def save(bench: Bench, checkpointer: Checkpointer, iteration: int) -> dict[str, float]:
    """Save once while the model trains; return times, s."""
    usual = statistics.median(step(bench) for _ in range(3))
    info = {"iteration": iteration, "is_validated": False, "best": {"name": None}}
    start, before = time.perf_counter(), bench.now()
    checkpointer.save(info)
    after, steps = bench.now(), []
    while checkpointer.thread.is_alive():
        steps.append(step(bench))
    took = time.perf_counter() - start
    checkpointer.wait()
    assert not checkpointer.failed
    synchronize(bench.device)
    stall = bench.between(before, after)
    return {"save": took, "stall": stall, "slower": sum(steps) - usual * len(steps), "step": usual}


def save_alone(state: TrainingState, folder: Path) -> float:
    """Save once while nothing else happens; return the time, s."""
    os.sync()
    start = time.perf_counter()
    checkpoint.save(folder, state.shards, {}, dist.group.WORLD)
    took = time.perf_counter() - start
    checkpoint.remove([folder])
    return took


def cost_of_checksums(state: TrainingState, folder: Path, saves: int) -> float:
    """Return the time of a save over that of one without checksums, less 1: the least of so many each, in turns.

    A disk's own time varies by far more than checksums take.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * saves):
        has_checksums = i % 4 in (0, 3)
        none = mock.patch.object(storage, "checksum", lambda *_: 0)
        with contextlib.nullcontext() if has_checksums else none:
            times[has_checksums].append(save_alone(state, folder))
    return min(times[True]) / min(times[False]) - 1


def raw_write(tensors: list[torch.Tensor], path: Path) -> float:
    """Write the bytes of these tensors to a file and bring them to the disk; return the time, s."""
    views = [memoryview(x.reshape(-1).view(torch.uint8).numpy()) for x in tensors]
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for view in views:
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    took = time.perf_counter() - start
    path.unlink()
    return took


def checksums_alone(folder: Path) -> float:
    """Return the time of the checksums of all files of a checkpoint, s."""
    start = time.perf_counter()
    for path in folder.iterdir():
        storage.checksum(path)
    return time.perf_counter() - start


def load(state: TrainingState, folder: Path) -> float:
    """Spoil the weights and moments and load them again; return the time, s."""
    expected = {name: x.clone() for name, x in state.tensors().items()}
    for x in state.tensors().values():
        x.zero_()
    start = time.perf_counter()
    state.load(folder, same_ranks=True)
    took = time.perf_counter() - start
    assert all(torch.equal(x, expected[name]) for name, x in state.tensors().items())
    return took


def measure(bench: Bench, folder: Path, rounds: int, saves: int = 14) -> dict[str, list[float]]:
    """Save and load in `folder`, on one rank; return the figures of each round.

    For what checksums cost it saves three times so many times with them, and without.
    """
    state, measured = TrainingState(bench.model, bench.optimizer, bench.scaler), []
    options = {"keep": 1, "newest": None, "sync": lambda: None, "timeout": timedelta(minutes=30)}
    checkpointer = Checkpointer(folder / "checkpoints", state, **options)
    for i in range(rounds + 1):
        found = save(bench, checkpointer, i + 1)
        found["alone"] = save_alone(state, folder / "alone")
        found["raw"] = raw_write(list(state.host.values()), folder / "raw")
        measured.append(found)
    first, *measured = measured  # the first save allocates its buffers
    bench.model.zero_grad(set_to_none=True)
    state.copy_to_host()
    last = folder / "last"
    checkpoint.save(last, state.shards, {}, dist.group.WORLD)
    return {
        "save_over_raw_write": [r["alone"] / r["raw"] for r in measured],
        "stall_over_save": [r["stall"] / r["save"] for r in measured],
        "stall over a save that has the machine to itself": [r["stall"] / r["alone"] for r in measured],
        "steps slower while it saves, over the save": [r["slower"] / r["save"] for r in measured],
        "save while training, s": [r["save"] for r in measured],
        "save alone, s": [r["alone"] for r in measured],
        "stall, s": [r["stall"] for r in measured],
        "raw write, s": [r["raw"] for r in measured],
        "step, s": [r["step"] for r in measured],
        "first stall, s": [first["stall"]],
        "load, s": [load(state, last) for _ in range(rounds)],
        "million parameters": [sum(p.numel() for p in bench.model.parameters()) / 1e6],
        "GB": [sum(path.stat().st_size for path in last.iterdir()) / 1e9],
        "checksums, over a save": [cost_of_checksums(state, folder / "alone", saves) for _ in range(3)],
        "checksums alone, s": [checksums_alone(last) for _ in range(rounds)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--rounds", type=int, default=7, help="saves (7)")
    parser.add_argument("--folder", help="where to write (a temporary folder)")
    args = parser.parse_args()
    logging.disable()
    join(World())
    bench = Bench(FLAGS)
    bench.is_timed = False  # no clock at its parts
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        values = measure(bench, Path(folder), args.rounds)
    dist.destroy_process_group()
    figures = Figures()
    for name, rounds in values.items():
        print(figures.add(name, rounds))
    if args.json:
        write_record(args.json, figures, figures.spread)


if __name__ == "__main__":
    main()
