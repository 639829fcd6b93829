"""The DALI loader: NVIDIA's Data Loading Library takes batches to the device and normalises them there.

Which samples make a batch, and who reads them, is as in loader.py: DALI's external source takes the batches
that lie ready in its ring, without a copy. What differs is the way from there: DALI's own threads and streams, two
batches ahead. Without a GPU its CPU backend does the same.

DALI is an extra: `pip install -r requirements-dali.txt`.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from utils.data.batches import Batch, Reading, Samples
from utils.data.loader import Loader
from utils.data.order import SampleOrder

QUEUE = 2  # batches that DALI works on: the one given out, and the next


def check_dali() -> None:
    """Raise ValueError, with the remedy, where DALI is not installed, or the GPU is none of NVIDIA's."""
    if torch.version.hip:
        raise ValueError("data_loader_config dali needs a GPU by NVIDIA: use --data_loader_config pytorch")
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise ValueError(
            "data_loader_config dali needs DALI, which is not installed: `pip install -r requirements-dali.txt`, or "
            "use --data_loader_config pytorch"
        ) from None


class DaliLoader(Loader):
    """As Loader, but its batches are normalised float32 on the device.

    Args:
        stats: mean and standard deviation of the inputs, and of the targets, [C] each.
        device: where batches go.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        how: Reading,
        stats: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
        device: torch.device,
    ):
        super().__init__(samples, order, how, in_use=QUEUE)
        if not self.reader.ring.nbytes:
            raise ValueError(
                "data_loader_config dali reads nothing on this rank, whose tokens are padding or whose share of the "
                "compressed frames is none: use --data_loader_config pytorch, a larger --local_batch_size or less ranks"
            )
        self.stats, self.device = stats, device

    def stream_from(self, iteration: int) -> Iterator[Batch]:
        """Return batches without end, from an iteration on, normalised on the device."""
        from nvidia.dali import Pipeline, fn, types

        raw, fed = super().stream_from(iteration), deque()

        def feed() -> tuple[np.ndarray, np.ndarray]:
            fed.append(next(raw))
            return fed[-1].inp.numpy(), fed[-1].target.numpy()

        on_gpu = self.device.type == "cuda"
        pipeline = Pipeline(
            batch_size=self.reader.read_size,
            num_threads=max(self.depth, 1),
            device_id=(self.device.index or 0) if on_gpu else None,
            prefetch_queue_depth=QUEUE,
            exec_dynamic=True,  # its outputs are PyTorch's to keep
        )
        with pipeline:
            outputs = []
            for x, (mean, std) in zip(fn.external_source(source=feed, num_outputs=2, no_copy=True), self.stats):
                x = fn.cast(x.gpu() if on_gpu else x, dtype=types.FLOAT)
                mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (mean, std))
                outputs.append(fn.normalize(x, mean=mean, stddev=std, axes=[1, 2]))
            pipeline.set_outputs(*outputs)
        pipeline.build()
        return self._run(pipeline, raw, fed)

    def _run(self, pipeline, raw: Iterator[Batch], fed: deque[Batch]) -> Iterator[Batch]:
        """Yield what the pipeline makes of the batches that it was fed."""
        given: deque[tuple] = deque()  # outputs, and the event after which the device needs them no more
        own = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with contextlib.closing(raw):  # the pipeline, which refers to itself, would keep it alive for a while
            try:
                while True:
                    # On a stream of its own, DALI's work is done when it is done, whatever the step before still does.
                    with torch.cuda.stream(own):  # None, on a CPU, changes nothing
                        outputs = [torch.from_dlpack(out.as_tensor()) for out in pipeline.run(own)]
                    batch = fed.popleft()
                    if own is not None:
                        batch.copied = own.record_event()
                        torch.cuda.current_stream(self.device).wait_event(batch.copied)
                    inp, target = outputs
                    yield replace(batch, inp=inp, target=target, counts=batch.counts.clone(), is_normalised=True)
                    if own is not None:
                        # DALI fills its memory again when nobody on the host refers to it: the device may be late.
                        given.append((outputs, torch.cuda.current_stream(self.device).record_event()))
                        while given and (len(given) > QUEUE or given[0][1].query()):
                            given.popleft()[1].synchronize()
            finally:
                if own is not None:  # before the outputs are dropped
                    torch.cuda.current_stream(self.device).synchronize()
