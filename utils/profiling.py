"""The profiler window, the clock of an epoch, the speed that the hardware could reach, the memory in use."""

import contextlib
import functools
import mmap
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils.data_loader import Batch
from utils.moving_average import MovingAverage
from utils.timeline import span

# Dense peaks of one device in TFLOP/s, from the makers' datasheets: (float32, TF32, bfloat16 and float16).
DATASHEET_TFLOPS = {
    "A100": (19.5, 156, 312),
    "H100 PCIe": (51, 378, 756),
    "H100 NVL": (60, 418, 835),
    "H100": (67, 495, 989),
    "H200 NVL": (60, 418, 835),
    "H200": (67, 495, 989),
    "GH200": (67, 495, 990),
    "A10": (31.2, 62.5, 125),
    "L40S": (91.6, 183, 362),
    "V100": (15.7, 15.7, 125),
}
PROFILED_EPOCH = 4  # past compilation and the first reads


class EpochClock:
    """Takes the time of one epoch's training, in seconds, while it hands on the epoch's batches."""

    def __init__(self):
        self.waited = 0.0  # for batches, after the first: that one waits for the reader to start
        self.aside = 0.0
        self.start = self.end = time.perf_counter()
        self.first_batch = self.first_end = self.start

    def batches(self, reader: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Yield `count` batches of `reader`."""
        for done in range(count):
            asked = time.perf_counter()
            with span("data wait"):
                batch = next(reader)
            if done == 0:
                self.first_batch = time.perf_counter()
            else:
                self.waited += time.perf_counter() - asked
            yield batch
            if done == 0:
                self.first_end = time.perf_counter()

    def stop(self, aside: float = 0.0) -> None:
        """Say that the epoch is over; seconds `aside` were no training, but looks at it."""
        self.end, self.aside = time.perf_counter(), aside

    @property
    def total(self) -> float:
        """From the start to the end."""
        return self.end - self.start - self.aside

    @property
    def wait_fraction(self) -> float:
        """The share of the time after the first batch that was spent waiting for batches."""
        return self.waited / (self.end - self.first_batch - self.aside)


def profiler_window(epoch: int, rank: int) -> contextlib.AbstractContextManager:
    """Open the capture range of `nsys profile -c cudaProfilerApi` over the fourth epoch of rank 0."""
    if epoch == PROFILED_EPOCH and rank == 0 and torch.cuda.is_available():
        return torch.cuda.profiler.profile()
    return contextlib.nullcontext()


def peak_flops(device: torch.device, amp_mode: str, tf32: bool) -> tuple[float, str]:
    """Return the dense matmul peak of one device in FLOP/s, for the dtype in use, and where the figure is from."""
    dtype = {"none": torch.get_default_dtype(), "fp16": torch.float16, "bf16": torch.bfloat16}[amp_mode]
    if device.type == "cuda":
        known = known_device(torch.cuda.get_device_name(device))
        if known and dtype != torch.float64:
            column = 2 if dtype != torch.float32 else int(tf32)
            return DATASHEET_TFLOPS[known][column] * 1e12, f"datasheet, {known}"
    speed = measured_peak(device, dtype)
    if device.type == "cuda":  # its matrices are no memory of the run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return speed, f"measured matmul, {str(dtype).removeprefix('torch.')}"


def known_device(name: str) -> str | None:
    """Return the row of the datasheet table for the name that a driver gives, such as `NVIDIA A100-SXM4-40GB`."""
    rows = (key for key in DATASHEET_TFLOPS if re.search(rf"\b{key}\b", name))
    return max(rows, key=len, default=None)


@functools.cache
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the speed of large square matrix products in FLOP/s: the best of ten of the best size."""
    generator = torch.Generator(device)  # of its own: measuring must not move the state that dropout draws from
    small = torch.zeros(64, 64, device=device, dtype=dtype)
    small @ small  # the library starts
    synchronize(device)
    best, began = 0.0, time.perf_counter()
    for size in (256, 1024) if device.type == "cpu" else (4096, 8192):
        a, b = (torch.rand(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
        for _ in range(10):
            synchronize(device)
            start = time.perf_counter()
            a @ b
            synchronize(device)
            end = time.perf_counter()
            best = max(best, 2 * size**3 / (end - start))
            if end - began > 0.5:  # fp16 on a CPU is very slow
                return best
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gb(device: torch.device) -> float:
    """Return the highest memory in use so far, in GiB: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on every platform

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def memory_gb(device: torch.device) -> float:
    """Return the memory in use now, in GiB: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    statm = Path("/proc/self/statm")  # Linux has it; elsewhere the peak stands for it
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE / 2**30 if statm.exists() else peak_memory_gb(device)


def cached_gb(device: torch.device) -> float:
    """Return what a GPU's allocator holds beyond the tensors, in GiB."""
    return (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) / 2**30


class MemoryWatch:
    """Looks at the memory in use before and after a training step's first forward pass, when told to look again.

    Inside a captured graph nobody can look: the figures stay those of the step before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        average: MovingAverage | None = None,
    ):
        self.model, self.optimizer, self.device, self.average = model, optimizer, device, average
        self.before_forward = self.after_forward = 0.0
        self.activations: float | None = None
        self.looks = False
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def look_again(self) -> None:
        self.looks = True

    def _before(self, *_: Any) -> None:
        if self.looks and torch.is_grad_enabled():
            self.before_forward = memory_gb(self.device)

    def _after(self, *_: Any) -> None:
        if self.looks and torch.is_grad_enabled():
            self.after_forward, self.looks = memory_gb(self.device), False
            # On a CPU later passes use memory that the process kept. On a GPU the first one makes workspaces, too.
            if self.device.type == "cuda" or self.activations is None:
                self.activations = max(self.after_forward - self.before_forward, 0.0)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live longer than a step, by part."""
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        parts = {
            "weights": [*self.model.parameters(), *self.model.buffers()],
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "optimizer": [value for value in moments if isinstance(value, Tensor)],
        }
        return parts | ({"average": list(self.average.average.values())} if self.average else {})

    def in_use(self) -> dict[str, float]:
        """Return the memory of each part now, in GiB: what does not last counts as activations."""
        parts = self._lasting()
        return parts | {"activations": max(memory_gb(self.device) - sum(parts.values()), 0.0)}

    def _lasting(self) -> dict[str, float]:
        return {
            name: sum(t.numel() * t.element_size() for t in tensors) / 2**30 for name, tensors in self.tensors().items()
        }

    def parts(self) -> dict[str, float]:
        """Return the memory of each part in GiB; on a CPU, activations and peak are what the process grew to.

        Activations are what the first forward pass leaves for the backward pass. `cached` is what a GPU's allocator
        holds beyond the tensors.
        """
        parts = self._lasting()
        parts |= {"activations": self.activations or 0.0, "peak": peak_memory_gb(self.device)}
        if self.device.type == "cuda":
            parts["cached"] = cached_gb(self.device)
        return parts
