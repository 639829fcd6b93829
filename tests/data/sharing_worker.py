"""One of 4 ranks, tp 2 x cp 2: are compressed frames decoded once in the group? `sharing_worker.py FOLDER FLAGS...`.

Prints "right" where its batches are those of one process, and the frames that it decoded.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from distributed.parallelize import shard_tokens, share_frames
from tests.helpers import tiny_flags
from utils.comm import Grid
from utils.config.reader import load_config
from utils.data.dataset import WeatherData
from utils.data.frames import FrameReader
from utils.ranks.start import join
from utils.ranks.world import find_world


def main(folder: str, *flags: str) -> None:
    world = find_world(os.environ)
    join(world)
    argv = tiny_flags(Path(folder), "--tensor_parallel", "2", "--context_parallel", "2", *flags)
    config = load_config(argv, 2)[0].with_batches(1)
    grid = Grid(world.size, world.rank, 2, 2)
    grid.create_groups()
    shard = shard_tokens(config, grid)
    alone = WeatherData(config)

    decoded, original = [], FrameReader.read
    FrameReader.read = lambda self, *job: decoded.append(job[:2]) or original(self, *job)
    data = WeatherData(config, tokens=shard, sharing=share_frames(config, grid))
    right = True
    for loader, whole in ((data.train_loader, alone.train_loader), (data.valid_loader, alone.valid_loader)):
        batches = []
        for batch in loader.epoch():
            batches.append([x.clone() for x in data.to_device(batch)] + [batch.counts.clone()])
        FrameReader.read, kept = original, FrameReader.read
        for mine, batch in zip(batches, whole.epoch(), strict=True):
            *expected, counts = *alone.to_device(batch), batch.counts
            right &= torch.equal(mine[2], counts)
            for got, field in zip(mine, expected):
                right &= torch.equal(got, shard.cut(field[..., shard.rows.start : shard.rows.stop, :]))
        FrameReader.read = kept
    print("right" if right else "wrong", len(decoded))
    dist.barrier()


main(*sys.argv[1:])
dist.destroy_process_group()
