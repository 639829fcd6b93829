"""Runs of a benchmark: on which data, and what they recorded."""

from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

import train
from utils.config.reader import load_config
from utils.files import read_events
from utils.observers import Observer
from utils.ranks.start import join
from utils.ranks.world import World

STATS = ("global_means", "global_stds", "time_means")

# The section `demo` without what chapter 6 adds: one step, patches side by side.
PLAIN = ("--config=demo", "--patch_overlap=0", "--rollout_steps=1", "--rollout_from=0")


def path_flags(folder: str) -> list[str]:
    """Return the flags for a run on the data set in `folder`, which utils/sample_data/write.py wrote."""
    return [
        *(f"--{kind}_data_path={folder}/{kind}" for kind in ("train", "valid")),
        *(f"--{kind}_path={folder}/stats/{kind}.npy" for kind in STATS),
    ]


def train_here(flags: list[str], observers: Iterable[Observer] = ()) -> list[dict]:
    """Run train.py in this process, and return the lines of its metrics.jsonl."""
    config, _ = load_config(flags)
    join(World())
    try:
        train.main(World(), flags, observers)
    finally:
        dist.destroy_process_group()
    return read_events(Path(config.expdir) / config.config / "1GPU" / config.run_num / "metrics.jsonl")
