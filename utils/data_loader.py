"""The data loader: which samples make a batch, in which order, on which rank, and how they reach the device.

An epoch's order is a function of (seed, epoch) alone. A global batch is the next `global_batch_size` entries of it,
and each rank takes its equal slice: every number of ranks sees the same global batches.

Shapes:  B samples of one iteration on one rank   C channels   H W rows, columns
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.era5 import FrameReader


class Batch(NamedTuple):
    """What the reader gives, raw and on the host."""

    inp: Tensor  # [B, C_in, H, W], as stored; H counts the rows that this rank reads
    target: Tensor  # [B, C_out, H, W], as stored
    counts: Tensor  # [B]: 1 for a sample, 0 for one that only fills the batch


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


class PairDataset(Dataset):
    """Pairs (state, state dt steps later), read a batch at a time."""

    def __init__(self, inputs: FrameReader, targets: FrameReader, pairs: np.ndarray, dt: int):
        self.inputs, self.targets, self.pairs, self.dt = inputs, targets, pairs, dt

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitems__(self, samples: np.ndarray) -> Batch:
        """Read the samples; -1 fills its place with the first sample, so that shapes and norms stay sound."""
        frames = [np.empty((len(samples), *r.shape), r.files.dtype) for r in (self.inputs, self.targets)]
        for i, sample in enumerate(samples):
            file, t = self.pairs[max(sample, 0)]
            self.inputs.read(file, t, frames[0][i])
            self.targets.read(file, t + self.dt, frames[1][i])
        return Batch(*map(torch.from_numpy, frames), torch.from_numpy((np.asarray(samples) >= 0).astype(np.float32)))


def _as_read(batch: Batch) -> Batch:
    return batch


class _Order:
    """The batches that a DataLoader asks for: set before each epoch."""

    batches: np.ndarray = np.empty((0, 0), int)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loader:
    """Batches of one data set for one shard.

    Args:
        batch_size: samples of one iteration over all shards.
        shuffle: True for training: a new order every epoch, and a tail shorter than a batch is dropped. False for
            validation: every sample once, in order.
        num_workers: processes that read ahead; 0 reads when the loop asks.
    """

    def __init__(
        self,
        dataset: PairDataset,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        device: torch.device = torch.device("cpu"),
    ):
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.num_shards, self.shard_id = num_shards, shard_id
        self.order = _Order()
        on_gpu = device.type == "cuda"
        self.reader = DataLoader(
            dataset,
            batch_sampler=self.order,
            num_workers=num_workers,
            collate_fn=_as_read,
            pin_memory=on_gpu,
            persistent_workers=num_workers > 0,
            prefetch_factor=(2 if num_workers == 1 else 1) if num_workers else None,  # batches ahead, a worker
            generator=torch.Generator(),  # of its own: reading must not move the state that dropout draws from
            # A process must not fork once CUDA runs; without CUDA forking is the quicker start.
            multiprocessing_context=("spawn" if on_gpu else "fork") if num_workers else None,
        )

    def __len__(self) -> int:
        """Iterations of an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole if self.shuffle else whole + (rest > 0)

    def samples(self, epoch: int = 0) -> np.ndarray:
        """Return the samples of each iteration of an epoch for this shard, [iterations, B]; -1 fills a batch up."""
        n = len(self.dataset)
        order = epoch_order(n, self.seed, epoch)[: len(self) * self.batch_size] if self.shuffle else np.arange(n)
        return shard(order, self.batch_size, self.num_shards, self.shard_id)

    def epoch(self, epoch: int = 0, first: int = 0) -> Iterator[Batch]:
        """Read the batches of an epoch, from iteration `first` of it."""
        self.order.batches = self.samples(epoch)[first:]
        return iter(self.reader)

    def find_nonfinite(self, epoch: int, iteration: int) -> str | None:
        """Read a batch again and name the file, index and channel of its first value that is not finite."""
        for sample in self.samples(epoch)[iteration]:
            file, t = self.dataset.pairs[max(sample, 0)]
            for reader, step in ((self.dataset.inputs, t), (self.dataset.targets, t + self.dataset.dt)):
                frame = np.empty(reader.shape, reader.files.dtype)
                reader.read(file, step, frame)
                bad = np.argwhere(~np.isfinite(frame))
                if len(bad):
                    c, y, x = bad[0]
                    channel = next(first + c - start for start, first, n in reader.runs if start <= c < start + n)
                    where = f"fields[{step}, {channel}, {reader.rows[y]}, {x}]"
                    return f"{reader.files.paths[file]}, {where} is {frame[c, y, x]}"
        return None
