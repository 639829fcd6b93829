"""Copies of batches to a GPU, on a stream of their own: one goes along while the step before computes."""

from collections import deque

import torch
from torch import Tensor

from utils.data_loader import Batch


class DeviceCopies:
    """Two buffers on the GPU for each shape of batch, in turn."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.buffers: dict[tuple, deque[list[Tensor]]] = {}
        self.launched: torch.cuda.Event | None = None  # all that was launched before the last batch is done

    def pace(self) -> None:
        """Wait until the step before last is done. To be called once for each batch, before it is copied.

        The host runs no further ahead of the device: it would sooner or later wait for it in the loader, which would
        look like a wait for data. And the buffers of the batch before last are free.
        """
        if self.launched is not None:
            self.launched.synchronize()
        self.launched = torch.cuda.current_stream(self.device).record_event()

    def take(self, batch: Batch) -> list[Tensor]:
        """Return the raw input and target on the GPU. The host does not wait for the copy.

        They are valid for what is launched on the current stream until this is called again.
        """
        current, sources = torch.cuda.current_stream(self.device), (batch.inp, batch.target)
        key = tuple((x.shape, x.dtype) for x in sources)
        if key not in self.buffers:
            self.buffers[key] = deque([torch.empty_like(x, device=self.device) for x in sources] for _ in range(2))
            self.stream.wait_stream(current)  # that memory may have been another tensor's
        self.buffers[key].rotate()
        buffer = self.buffers[key][0]
        with torch.cuda.stream(self.stream):
            for x, source in zip(buffer, sources):
                x.copy_(source, non_blocking=True)
            batch.copied = self.stream.record_event()
        current.wait_event(batch.copied)
        return buffer
