"""A rank's part of a tensor in a checkpoint: boxes of the whole one, wherever they lie.

torch.distributed.checkpoint asks a tensor for its boxes by three methods (torch/distributed/_checkpointable.py). A
DTensor of fully_shard knows its place among data parallel ranks only: of a weight that is also cut by hand, over tensor
parallel ranks, it would store the slice as if it were whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

MOST_CUTS = 32  # of boxes into groups and these again; a tensor is cut twice along each dim


def lie_apart(chunks: Sequence[ChunkStorageMetadata], cuts: int = MOST_CUTS) -> bool:
    """Are these boxes disjoint, by planes that lie between them, and by planes between those of one side?"""
    if len(chunks) < 2:
        return True
    if not cuts:
        return False
    for dim in range(len(chunks[0].sizes)):
        groups: list[list[ChunkStorageMetadata]] = []
        end = -1
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
            if chunk.offsets[dim] >= end:
                groups.append([])
            groups[-1].append(chunk)
            end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
        if len(groups) > 1:
            return all(lie_apart(group, cuts - 1) for group in groups)
    return False


class Place(NamedTuple):
    """Where this rank's part of a parameter lies.

    Args:
        shape: of the parameter on one tensor parallel rank, before it is shared out over data parallel ranks.
        stacked: how many matrices lie one below the other in it. In a checkpoint they lie apart, [stacked, rows, ...],
            and each is cut by itself.
        dim, index, count: the dim that is cut over tensor parallel ranks, of each matrix; which of them this one is,
            and how many there are.
        shared_dim, first: the dim that data parallel ranks share out, and where this rank's part begins in `shape`.
    """

    shape: tuple[int, ...]
    stacked: int = 1
    dim: int = 0
    index: int = 0
    count: int = 1
    shared_dim: int = 0
    first: int = 0

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape in a checkpoint."""
        rows, *rest = self.shape
        sizes = [rows // self.stacked, *rest]
        sizes[self.dim] *= self.count
        return (self.stacked, *sizes) if self.stacked > 1 else tuple(sizes)

    def boxes(self, x: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return the corners of boxes in the whole tensor, and views of `x`, this rank's part, that fill them."""
        own = [self.index * size if dim == self.dim else 0 for dim, size in enumerate(self._matrix)]
        found, rows = [], self._matrix[0]
        begin = self.first if self.shared_dim == 0 else 0
        for part in range(self.stacked):
            top = max(begin - part * rows, 0)  # in this matrix
            view = x[max(part * rows - begin, 0) : max((part + 1) * rows - begin, 0)]
            if view.numel():
                corner = [start + (top if dim == 0 else 0) for dim, start in enumerate(own)]
                if self.shared_dim:
                    corner[self.shared_dim] += self.first
                stacked = self.stacked > 1
                found.append(((part, *corner) if stacked else tuple(corner), view.unsqueeze(0) if stacked else view))
        return found

    @property
    def _matrix(self) -> tuple[int, ...]:
        rows, *rest = self.shape
        return (rows // self.stacked, *rest)


class Boxes(torch.Tensor):
    """A tensor of a shape, of which this rank has some boxes: corners, and the values that begin there."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], boxes: list[tuple[tuple[int, ...], Tensor]], dtype: torch.dtype):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self.boxes = {torch.Size(corner): values for corner, values in boxes}
        return self

    def __create_write_items__(self, name: str, _: Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, corner),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(corner, values.size()),
                    properties=TensorProperties.create_from_tensor(values),
                    size=self.size(),
                ),
            )
            for corner, values in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(corner, values.size()) for corner, values in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index.offset]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of a part of a checkpoint")
