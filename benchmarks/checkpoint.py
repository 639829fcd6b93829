"""Checkpoints of 160 million parameters: how long a save takes, and how long the training loop waits for it.

    python benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json

What should come out: a save takes little longer than writing the same bytes to the same disk, for it is that and a
little bookkeeping; while a model trains on the same cores it takes longer. The loop waits for one copy of the bytes in
memory, and not for the disk.

The model trains while it is saved, as in a run: steps of 8 tokens, so that the steps are short beside the save. On the
device that is there: on a GPU the copy is on its stream, and the host does not wait for it.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from benchmarks.record import write_record
from networks.vit import ViT
from utils import checkpoint
from utils.checkpointer import Checkpointer
from utils.config import load_config
from utils.device import pick_device
from utils.launch import World, join
from utils.profiling import synchronize
from utils.training_state import TrainingState


class Training:
    """A model of 160 million parameters, and its step on random data."""

    def __init__(self) -> None:
        config = load_config(["--config=demo", "--no_residual", "--plot_channels=None"])[0]
        self.device = pick_device(config.device, 0)
        self.model = ViT((16, 32), 8, 20, 20, 1040, 12, 13).to(self.device)
        optimizer, scaler = train.build_optimizer(self.model, config), train.build_scaler(config, self.device)
        self.state = TrainingState(self.model, optimizer, scaler)
        self.batch = [torch.randn(1, 20, 16, 32, device=self.device) for _ in range(2)]
        self.forward_backward = partial(train.forward_backward, self.model, scaler=scaler, config=config)
        self.update = partial(train.update_weights, optimizer, scaler, config)

    def step(self) -> float:
        """Take a step and return its time, s."""
        start = time.perf_counter()
        self.forward_backward(*self.batch)
        self.update(1e-6)
        synchronize(self.device)
        return time.perf_counter() - start


def save_alone(training: Training, folder: Path) -> float:
    """Save once while nothing else happens; return the time, s."""
    start = time.perf_counter()
    checkpoint.save(folder, training.state.shards, {}, dist.group.WORLD)
    took = time.perf_counter() - start
    checkpoint.remove([folder])
    return took


def save(training: Training, checkpointer: Checkpointer, iteration: int) -> dict[str, float]:
    """Save once while the model trains; return times, s."""
    usual = statistics.median(training.step() for _ in range(3))
    info = {"iteration": iteration, "is_validated": False, "best": {"name": None}}
    start = time.perf_counter()
    checkpointer.save(info)
    stall, steps = time.perf_counter() - start, []
    while checkpointer.thread.is_alive():
        steps.append(training.step())
    took = time.perf_counter() - start
    checkpointer.wait()
    assert not checkpointer.failed
    return {"save": took, "stall": stall, "slower": sum(steps) - usual * len(steps), "step": usual}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--rounds", type=int, default=7, help="saves (7)")
    parser.add_argument("--folder", help="where to write (a temporary folder)")
    args = parser.parse_args()
    logging.disable()
    join(World())
    training, rounds = Training(), []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        options = {"keep": 1, "resumed": None, "sync": lambda: None, "timeout": timedelta(minutes=30)}
        checkpointer = Checkpointer(folder / "checkpoints", training.state, **options)
        for i in range(args.rounds + 1):
            measured = save(training, checkpointer, i + 1)
            measured["alone"] = save_alone(training, folder / "alone")
            measured["raw"] = raw_write(list(training.state.host.values()), folder / "raw")
            if i:  # the first save allocates its buffers
                rounds.append(measured)
            else:
                first = measured["stall"]
        size = sum(checkpoint.read_info(checkpoint.find(folder / "checkpoints")[0])["files"].values())
    dist.destroy_process_group()
    values = {
        "save_over_raw_write": [r["alone"] / r["raw"] for r in rounds],
        "stall_over_save": [r["stall"] / r["save"] for r in rounds],
        "stall over a save that has the machine to itself": [r["stall"] / r["alone"] for r in rounds],
        "steps slower while it saves, over the save": [r["slower"] / r["save"] for r in rounds],
        "save while training, s": [r["save"] for r in rounds],
        "save alone, s": [r["alone"] for r in rounds],
        "stall, s": [r["stall"] for r in rounds],
        "raw write, s": [r["raw"] for r in rounds],
        "step, s": [r["step"] for r in rounds],
        "first stall, s": [first],
        "million parameters": [sum(p.numel() for p in training.model.parameters()) / 1e6],
        "GB": [size / 1e9],
    }
    figures = {name: statistics.median(v) for name, v in values.items()}
    spread = {name: [min(v), max(v)] for name, v in values.items()}
    for name in figures:
        print(f"{name:50} {figures[name]:8.3f}  {spread[name][0]:8.3f} to {spread[name][1]:8.3f}")
    if args.json:
        write_record(args.json, figures, spread)


if __name__ == "__main__":
    main()
