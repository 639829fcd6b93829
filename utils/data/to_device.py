"""The way of a batch to the device: copies on a stream of their own, and normalisation there."""

from collections import deque

import torch
from torch import Tensor

from utils.data.batches import Batch
from utils.data.fields import Fields

# Training and validation, or states and truth. Where a training's forecasts get longer, the shorter ones' memory goes.
KINDS = 2


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

    def take(self, batch: Batch, *sources: Tensor) -> list[Tensor]:
        """Return `sources`, by default all that is in a batch, on the GPU. The host does not wait.

        They are valid for what is launched on the current stream until this is called again.
        """
        current = torch.cuda.current_stream(self.device)
        sources = sources or (batch.inp, batch.target, batch.forced, batch.times)
        key = tuple((x.shape, x.dtype) for x in sources)
        if key not in self.buffers:
            if len(self.buffers) == KINDS:
                self.buffers.clear()
            self.buffers[key] = deque(
                [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in key] for _ in range(2)
            )
            self.stream.wait_stream(current)  # that memory may have been another tensor's
        self.buffers[key].rotate()
        buffer = self.buffers[key][0]
        with torch.cuda.stream(self.stream):
            for x, source in zip(buffer, sources):
                x.copy_(source, non_blocking=True)
            batch.copied = self.stream.record_event()
        current.wait_event(batch.copied)
        return buffer


class Normaliser:
    """Normalises channel by channel, in the dtype of the statistics.

    Args:
        mean, std: [1, C, 1, 1].
        compiled: make one pass over the data of it: a cast, a difference and a quotient.
    """

    def __init__(self, mean: Tensor, std: Tensor, compiled: bool = False):
        self.mean, self.std, self.compiled = mean, std, compiled
        self.compute = torch.compile(normalise, fullgraph=True, dynamic=False) if compiled else normalise
        self.casts: dict[torch.Size, Tensor] = {}  # kept: on a CPU, fresh memory costs more than the arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., C, H, W] normalised: in place, or if it has another dtype, in a buffer that is used again."""
        flat, out = x.flatten(0, -4), None  # the steps of a forecast are as further samples: less to compile
        if x.dtype != self.mean.dtype:
            if flat.shape not in self.casts:
                if len(self.casts) == KINDS:
                    self.casts.clear()
                self.casts[flat.shape] = self.mean.new_empty(flat.shape)
            out = self.casts[flat.shape]
        if self.compiled:  # once for all numbers of samples: a forecast of more steps, or a validation, has another
            for tensor in (flat, *([] if out is None else [out])):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.compute(flat, self.mean, self.std, out).view(x.shape)


def normalisers(fields: Fields, device: torch.device, compiled: bool) -> list[Normaliser]:
    """Return those of a model's inputs, of its forecasts, and of what is forced."""
    kind = {"device": device, "dtype": torch.get_default_dtype()}
    mean, std = (torch.tensor(x, **kind).view(1, -1, 1, 1) for x in (fields.means, fields.stds))
    kinds = fields.inputs, fields.outputs, fields.forced
    return [Normaliser(mean[:, used], std[:, used], compiled and bool(used)) for used in kinds]


def normalise(x: Tensor, mean: Tensor, std: Tensor, out: Tensor | None = None) -> Tensor:
    """Return (x - mean) / std in `out`, or in place."""
    field = x if out is None else out.copy_(x)
    return field.sub_(mean).div_(std)
