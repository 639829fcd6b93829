"""Copies of batches to a GPU, on a stream of their own: one goes along while the step before computes."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.data_loader import Batch


@dataclass
class _Buffer:
    tensors: list[Tensor]
    free: torch.cuda.Event | None = None  # the device has used it


class DeviceCopies:
    """Two buffers on the GPU for each shape of batch, in turn. A copy waits until the step before last is done."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.buffers: dict[tuple, deque[_Buffer]] = {}
        self.in_use: _Buffer | None = None

    def take(self, batch: Batch) -> list[Tensor]:
        """Return the raw input and target on the GPU. The host does not wait.

        They are valid for what is launched on the current stream until this is called again.
        """
        current = torch.cuda.current_stream(self.device)
        if self.in_use is not None:  # all that uses the last batch has been launched
            self.in_use.free = current.record_event()
        sources = (batch.inp, batch.target)
        key = tuple((x.shape, x.dtype) for x in sources)
        if key not in self.buffers:
            self.buffers[key] = deque(_Buffer([torch.empty_like(x, device=self.device) for x in sources]) for _ in "12")
            self.stream.wait_stream(current)  # that memory may have been another tensor's
        buffer = self.in_use = self.buffers[key][0]
        self.buffers[key].rotate()
        with torch.cuda.stream(self.stream):
            if buffer.free is not None:
                self.stream.wait_event(buffer.free)
            for x, source in zip(buffer.tensors, sources):
                x.copy_(source, non_blocking=True)
            batch.copied = self.stream.record_event()
        current.wait_event(batch.copied)
        return buffer.tensors
