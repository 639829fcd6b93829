"""What do collectives reach in each group of a grid of ranks? (for doctor.py)

    torchrun --nproc_per_node=4 benchmarks/collectives.py --config=demo --tensor_parallel=2

Rank 0 prints JSON. groups: for each group and collective `ranks`, and `gb_per_sec`, what each of them sends. cores:
those that each rank of its node may use.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from distributed.mappings import all_gather_single
from utils.comm import GROUPS, Grid
from utils.config.reader import load_config
from utils.device import cores_in_reach, synchronize
from utils.ranks.agree import all_ranks_agree
from utils.ranks.start import start
from utils.ranks.world import World
from utils.run.setup import prepare

ROUNDS = 10


def seconds(collective: Callable, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the time of a collective: the median of some, of the rank that took longest."""
    times = []
    for _ in range(2 + ROUNDS):
        dist.barrier(group)
        synchronize(device)
        begin = time.perf_counter()
        collective()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    longest = torch.tensor(statistics.median(times[2:]), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def main(world: World, argv: list[str]) -> None:
    with all_ranks_agree():
        config, _ = load_config(argv, 2)
        grid = Grid(world.size, world.rank, config.tensor_parallel, config.context_parallel, config.parallel_order)
        device = prepare(config, world.local_rank)
    grid.create_groups(config.longest_wait)
    size = 2**26 if device.type == "cuda" else 2**22  # numbers: 256 MiB, 16 MiB
    found = {}
    for axes in GROUPS:
        ranks, group = grid.get_size(axes), grid.get_group(axes)
        if ranks == 1 or any(grid.get_size(axis) == 1 for axis in axes.split("-")):
            continue  # nobody to talk to, or the same group under two names
        whole = torch.zeros(size // ranks * ranks, device=device)
        part = whole[: len(whole) // ranks].clone()
        sent = 4 * len(whole) * (ranks - 1) / ranks  # bytes, in a ring (Patarasuk & Yuan 2009)
        took = seconds(partial(dist.all_reduce, whole, group=group), group, device)
        found[f"{axes} all_reduce"] = {"ranks": ranks, "gb_per_sec": 2 * sent / took / 1e9}
        took = seconds(partial(all_gather_single, whole, part, group=group), group, device)
        found[f"{axes} all_gather"] = {"ranks": ranks, "gb_per_sec": sent / took / 1e9}
    places: list[tuple[str, list[int]]] = [("", [])] * world.size
    dist.all_gather_object(places, (platform.node(), sorted(cores_in_reach())))
    if world.rank == 0:
        print(json.dumps({"groups": found, "cores": [cores for node, cores in places if node == platform.node()]}))


if __name__ == "__main__":
    start(main, sys.argv[1:], partial(load_config, chapter=2))
