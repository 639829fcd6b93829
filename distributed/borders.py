"""Which points of an image the ranks that share its tokens need of each other, where windows overlap: their borders.

A rank's windows read points of its neighbours' tokens, and write to them. Tokens lie in flat order, so a border may
span several rows and ranks, wrap round the globe, or be all that a neighbour has.

Shapes:  P patch size   n tokens of a rank's shard   H W rows, columns of the image   h rows of a rank's input
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from distributed.mappings import halo, halo_add
from utils.data.token_shard import TokenShard


@dataclass(frozen=True)
class Borders:
    """What one rank sends to the others, and receives from them: places and their numbers, rank after rank."""

    shard: TokenShard
    sent: Tensor  # places in its shard, as [P * n P]; a point that several ranks need is there several times
    sent_counts: list[int]
    places: Tensor  # of what it receives, in its input as [h * W]
    received_counts: list[int]

    def to(self, device: torch.device) -> "Borders":
        return replace(self, sent=self.sent.to(device), places=self.places.to(device))

    def rows_of(self, x: Tensor) -> Tensor:
        """Return a shard [..., P, n P] amid its surroundings: the rows that its windows cover, [..., h, W].

        Points of these rows that no window covers are 0. Communication over the shard's group, with b points across
        the borders: an all-to-all of b for each image in the forward, and one in the backward.
        """
        border = halo(x.flatten(-2), self.sent, self.sent_counts, self.received_counts, self.shard.group)
        rows = self.shard.place_in_rows(x)
        return rows.flatten(-2).index_copy(-1, self.places, border).view_as(rows)

    def send_home(self, rows: Tensor) -> Tensor:
        """Return the sum of what all ranks wrote into this shard's points across its borders, [..., P, n P].

        The transpose of `rows_of`, less the shard's own points; the same communication.
        """
        shape = *rows.shape[:-2], self.shard.patch_size, self.shard.count * self.shard.patch_size
        border, size = rows.flatten(-2).index_select(-1, self.places), shape[-2] * shape[-1]
        counts, group = (self.sent_counts, self.received_counts), self.shard.group
        return halo_add(border, self.sent, *counts, size, group).view(shape)


def borders_of(shard: TokenShard, chunks: list[int]) -> Borders:
    """Return the borders of a shard; `chunks` are those of the ranks of its group. No communication."""
    W, P, K = shard.img_size[1], shard.patch_size, shard.columns
    owner = np.repeat(np.repeat((np.arange(shard.total) // shard.length).reshape(-1, K), P, axis=0), P, axis=1)
    reached = reach(shard)
    neighbours = set(np.unique(owner[reached])) - {shard.index}  # who is needed, needs
    sent, received = [], []
    for chunk in chunks:
        theirs = reach(replace(shard, index=chunk)) if chunk in neighbours else np.zeros_like(reached)
        y, x = np.nonzero(theirs & (owner == shard.index))
        token = y // P * K + x // P - shard.first
        sent.append((y % P * shard.count + token) * P + x % P)
        y, x = np.nonzero(reached & (owner == chunk) & (chunk != shard.index))
        received.append((y - shard.input_rows.start) * W + x)
    sent_places, places = (torch.from_numpy(np.concatenate(found).astype(np.int64)) for found in (sent, received))
    return Borders(shard, sent_places, list(map(len, sent)), places, list(map(len, received)))


def reach(shard: TokenShard) -> np.ndarray:
    """Return which points of the image the windows of a shard's tokens cover, [H, W]."""
    P, K, o = shard.patch_size, shard.columns, shard.overlap
    tokens = np.zeros(shard.total, bool)
    tokens[shard.first : shard.first + shard.count] = True
    points = np.repeat(np.repeat(tokens.reshape(-1, K), P, axis=0), P, axis=1)
    points = points | np.roll(points, o, axis=1) | np.roll(points, -o, axis=1)
    wider = points.copy()
    wider[o:] |= points[: len(points) - o]
    wider[: len(points) - o] |= points[o:]
    return wider
