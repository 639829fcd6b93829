"""The DALI loader: NVIDIA's Data Loading Library takes batches to the device and normalises them there.

Which samples make a batch, and who reads them, is as in loader.py: DALI's external source takes the batches
that lie ready in its ring, without a copy. What differs is the way from there: DALI's own threads and streams, two
batches ahead. Without a GPU its CPU backend does the same.

DALI is an extra: `pip install -r requirements-dali-cuda130.txt`, or requirements-dali.txt for CUDA 12.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from utils.data.batches import Batch, Reading, Samples, parts_of
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
        extra = "requirements-dali" + "-cuda130" * (torch.version.cuda or "").startswith("13") + ".txt"
        raise ValueError(
            f"data_loader_config dali needs DALI, which is not installed: `pip install -r {extra}`, or use "
            "--data_loader_config pytorch"
        ) from None


class DaliLoader(Loader):
    """As Loader, but its batches are normalised float32 on the device.

    Args:
        stats: mean and standard deviation of the inputs, of the targets, and of what is forced, [C] each.
        device: where batches go.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        how: Reading,
        stats: tuple[tuple[np.ndarray, np.ndarray], ...],
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
        while True:  # a pipeline has a fixed number of outputs: a new one where forecasts get longer
            steps = self.steps_at(iteration)
            with contextlib.closing(self._stream_of(iteration, steps)) as stream:
                while self.steps_at(iteration) == steps:
                    yield next(stream)
                    iteration += 1

    def _stream_of(self, iteration: int, steps: int) -> Iterator[Batch]:
        """Return batches as they come from a pipeline for forecasts of so many steps."""
        from nvidia.dali import Pipeline, fn, types

        raw, fed = super().stream_from(iteration), deque()
        parts = [(part, k) for part, k in parts_of(steps) if len(self.stats[part][0])]

        def feed() -> list[np.ndarray]:
            batch = next(raw)
            fed.append(batch)
            if len(batch.target) != steps:  # fed ahead, and given to nobody: the next pipeline reads it again
                return self.last_fed
            found = (batch.inp[None], batch.target, batch.forced)
            self.last_fed = [found[part][max(k - 1, 0)].numpy() for part, k in parts]
            return self.last_fed

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
            sources = fn.external_source(source=feed, num_outputs=len(parts), no_copy=True)
            for x, (part, _) in zip(sources, parts):
                x = fn.cast(x.gpu() if on_gpu else x, dtype=types.FLOAT)
                mean, std = (np.asarray(values, np.float32)[:, None, None] for values in self.stats[part])
                outputs.append(fn.normalize(x, mean=mean, stddev=std, axes=[1, 2]))
            pipeline.set_outputs(*outputs)
        pipeline.build()
        return self._run(pipeline, raw, fed, steps)

    def _run(self, pipeline, raw: Iterator[Batch], fed: deque[Batch], steps: int) -> Iterator[Batch]:
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
                    inp, target, forced = outputs[0], outputs[1 : 1 + steps], outputs[1 + steps :]
                    target = target[0][None] if steps == 1 else torch.stack(target)
                    forced = torch.stack(forced) if forced else batch.forced.to(inp)
                    of_host = {"counts": batch.counts.clone(), "times": batch.times.clone()}
                    yield replace(batch, inp=inp, target=target, forced=forced, **of_host, is_normalised=True)
                    if own is not None:
                        # DALI fills its memory again when nobody on the host refers to it: the device may be late.
                        given.append((outputs, torch.cuda.current_stream(self.device).record_event()))
                        while given and (len(given) > QUEUE or given[0][1].query()):
                            given.popleft()[1].synchronize()
            finally:
                if own is not None:  # before the outputs are dropped
                    torch.cuda.current_stream(self.device).synchronize()
