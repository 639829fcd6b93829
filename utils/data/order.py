"""Which samples make a batch, in which order, on which rank.

An epoch's order is a function of (seed, epoch) alone. A global batch is the next `global_batch_size` entries of it,
and each rank takes its equal slice: every number of ranks sees the same global batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the samples in an epoch, the same on every rank."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def shard(order: np.ndarray, global_batch: int, num_shards: int, shard_id: int) -> np.ndarray:
    """Return the samples of each iteration for one shard, [iterations, global_batch / num_shards].

    The last global batch is filled up with -1 where the samples run out.
    """
    iterations = -(-len(order) // global_batch)
    padded = np.full(iterations * global_batch, -1)
    padded[: len(order)] = order
    return padded.reshape(iterations, num_shards, global_batch // num_shards)[:, shard_id]


@dataclass(frozen=True)
class SampleOrder:
    """Which samples each iteration takes, on one shard.

    With `shuffle`, for training, every epoch has a new order, and a tail shorter than a batch is dropped. Without, for
    validation, every sample comes once, in order.
    """

    num_samples: int
    batch_size: int  # of all shards
    shuffle: bool
    seed: int = 0
    num_shards: int = 1
    shard_id: int = 0

    def __len__(self) -> int:
        """Iterations of an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole if self.shuffle else whole + (rest > 0)

    def epoch(self, epoch: int) -> np.ndarray:
        """Return the samples of each iteration of an epoch, [iterations, B]; -1 fills a batch up."""
        n = self.num_samples
        order = epoch_order(n, self.seed, epoch)[: len(self) * self.batch_size] if self.shuffle else np.arange(n)
        return shard(order, self.batch_size, self.num_shards, self.shard_id)

    def from_iteration(self, iteration: int) -> Iterator[np.ndarray]:
        """Yield the samples of one iteration after another, from `iteration` of epoch 0 on, without end."""
        while True:
            epoch, first = divmod(iteration, len(self))
            for samples in self.epoch(epoch)[first:]:
                yield samples
                iteration += 1
