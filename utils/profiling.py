"""Where the time goes: named ranges, the profiler window, and the speed that the hardware could reach."""

import contextlib
import mmap
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

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


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Name a range of the timeline: NVTX for Nsight Systems, `record_function` for torch.profiler."""
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


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
    return _measured_peak(device, dtype), f"measured matmul, {str(dtype).removeprefix('torch.')}"


def known_device(name: str) -> str | None:
    """Return the row of the datasheet table for the name that a driver gives, such as `NVIDIA A100-SXM4-40GB`."""
    rows = (key for key in DATASHEET_TFLOPS if re.search(rf"\b{key}\b", name))
    return max(rows, key=len, default=None)


def _measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    size = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator(device)  # of its own: measuring must not move the state that dropout draws from
    a, b = (torch.rand(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gb(device: torch.device) -> float:
    """Return the highest memory in use so far, in GiB: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on every platform

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_gb(device: torch.device) -> float:
    """Return the memory in use now, in GiB: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    statm = Path("/proc/self/statm")  # Linux has it; elsewhere the peak stands for it
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE / 2**30 if statm.exists() else peak_memory_gb(device)
