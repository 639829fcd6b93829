"""Compressed frames on several ranks: each is decoded once in the group that works on it, and handed out by tokens.

A rank of a model-parallel group needs a few rows of each image. Where a chunk of the file holds many more, each rank
would decompress all of it to use a part. Here each rank decodes whole frames, of its share of the batch, and an
all-to-all gives every rank its tokens of all frames.

Shapes:  B samples of a batch   b those that one rank decodes   C channels   H W rows, columns of the image
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from utils.data.token_shard import TokenShard
from utils.spans import span


@dataclass(frozen=True)
class FrameSharing:
    """The ranks that work on the same samples."""

    shards: list[TokenShard]  # the tokens of each rank of the group, in its order
    index: int  # this rank's place in it
    group: dist.ProcessGroup | None

    def helps(self, chunk_rows: int | None) -> bool:
        """Would ranks that read for themselves decode what they do not need, or what others decode as well?

        The same answer on every rank.
        """
        if chunk_rows is None:
            return False
        first = [shard.first for shard in self.shards if shard.count]
        return chunk_rows > max(len(shard.rows) for shard in self.shards) or len(set(first)) < len(first)

    def share(self, batch: int, index: int | None = None) -> slice:
        """Return the samples of a batch that a rank, by default this one, decodes."""
        index, ranks = self.index if index is None else index, len(self.shards)
        return slice(batch * index // ranks, batch * (index + 1) // ranks)

    def exchange(self, frames: Tensor, batch: int, as_input: bool = False) -> Tensor:
        """Turn this rank's frames [..., b, C, H, W] into its tokens of all frames, [..., B, C, P, count P].

        With `as_input` into what the shards need as an input, [..., B, C, *input_shape]. Sends 1 - 1/ranks of what it
        decoded; every rank calls this for each batch.
        """
        *times, _, C = frames.shape[:-2]  # none, or K
        mine, ranks = self.shards[self.index], range(len(self.shards))
        shape = (C, *(mine.input_shape if as_input else mine.shape))
        if 0 in (C, *times):  # nothing is forced
            return frames.new_empty(*times, batch, *shape)
        pieces = []
        for shard in self.shards:
            rows = shard.input_rows if as_input else shard.rows
            part = frames[..., rows.start : rows.stop, :]
            pieces.append(shard.cut_input(part) if as_input else shard.cut(part))
        shares = [self.share(batch, rank) for rank in ranks]
        sizes = [(*times, share.stop - share.start, *shape) for share in shares]
        sent, received = [piece.numel() for piece in pieces], [math.prod(size) for size in sizes]
        out = frames.new_empty(sum(received))
        with span("communication"):
            dist.all_to_all_single(out, torch.cat([p.flatten() for p in pieces]), received, sent, group=self.group)
        # Shares are in order, and so are the samples.
        return torch.cat([part.view(size) for part, size in zip(out.split(received), sizes)], dim=len(times))
