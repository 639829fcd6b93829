"""The device of a rank, what it can do, and what is in use of it."""

import functools
import math
import mmap
import os
import re
import sys
import time
from pathlib import Path

import torch

# Dense peaks of one device in TFLOP/s, from the makers' datasheets: (float32, TF32, bfloat16 and float16, FP8).
DATASHEET_TFLOPS = {
    "A100": (19.5, 156, 312, None),
    "H100 PCIe": (51, 378, 756, 1513),
    "H100 NVL": (60, 418, 835, 1671),
    "H100": (67, 495, 989, 1979),
    "H200 NVL": (60, 418, 835, 1671),
    "H200": (67, 495, 989, 1979),
    "GH200": (67, 495, 990, 1979),
    "A10": (31.2, 62.5, 125, None),
    "L40S": (91.6, 183, 362, 733),
    "V100": (15.7, 15.7, 125, None),
}
EXPANDABLE = "expandable_segments:True"


def pick_device(name: str, local_rank: int, expandable_segments: bool = True) -> torch.device:
    """Return the device of this rank: that of its local rank, or the only one it sees; set up its memory allocator.

    Raises ValueError where `cuda` is asked for and there is none, where torch does not see the GPUs that Slurm gave
    this job, and where a node has more ranks than GPUs.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if name == "cuda":
            raise ValueError("device is 'cuda', but torch sees no GPU here: take --device cpu, or ask for GPUs")
        if any(os.environ.get(given) for given in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")):
            raise ValueError(
                f"Slurm gave this job GPUs, but torch {torch.__version__} sees none: take a torch for their driver "
                f"(in a container: --nv or --rocm), or --device cpu"
            )
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus > 1:
        raise ValueError(f"rank {local_rank} of this node has no GPU, for there are {gpus}: start one rank a GPU")
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    settings = allocator_settings(expandable_segments, device)
    if settings == EXPANDABLE:
        # PyTorch reads its variable when CUDA starts, before we know the GPU, and has no public function for later.
        # tests/gpu/test_gpu.py, test_memory_grows_in_expandable_segments, fails where this one is gone.
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(EXPANDABLE)
    if EXPANDABLE in settings:
        # NCCL would register the buffers of a CUDA graph, ours or the compiler's, which fails or hangs where their
        # memory lies in segments that can grow (pytorch issue 158029, torchtitan issue 3306).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    return device


def allocator_settings(expandable_segments: bool, device: torch.device) -> str:
    """Return the settings of a GPU's memory allocator: the user's, from the environment, else ours; else nothing.

    Segments that can grow leave fewer gaps between tensors. Not on an MI300A, whose memory is the host's.
    """
    if device.type == "cpu":
        return ""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if given := [f"{name}={os.environ[name]}" for name in names if name in os.environ]:
        return " ".join(given)
    return EXPANDABLE if expandable_segments and "MI300A" not in torch.cuda.get_device_name(device) else ""


def has_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies matrices of bfloat16, and does not merely imitate it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    processor = Path("/proc/cpuinfo")  # Linux has it; elsewhere nobody knows
    return processor.exists() and "bf16" in processor.read_text()


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products on NVIDIA GPUs round their inputs to TF32 (10 bits of mantissa), or forbid it."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if allowed else "highest")


def peak_flops(device: torch.device, amp_mode: str, tf32: bool, fp8: bool = False) -> tuple[float, str]:
    """Return the dense matmul peak of one device in FLOP/s, for the dtype in use, and where the figure is from.

    With `fp8` that of products of 8 bits, which most are, where a datasheet has it.
    """
    dtype = {"none": torch.get_default_dtype(), "fp16": torch.float16, "bf16": torch.bfloat16}[amp_mode]
    if device.type == "cuda":
        known = known_device(torch.cuda.get_device_name(device))
        if known and dtype != torch.float64:
            column = 2 if dtype != torch.float32 else int(tf32)
            if fp8 and DATASHEET_TFLOPS[known][3]:
                return DATASHEET_TFLOPS[known][3] * 1e12, f"datasheet, {known}, FP8"
            return DATASHEET_TFLOPS[known][column] * 1e12, f"datasheet, {known}"
    speed = measured_peak(device, dtype)
    if device.type == "cuda":  # its matrices are no memory of the run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    passed = "; those of 8 bits may pass it" * fp8
    return speed, f"measured matmul, {str(dtype).removeprefix('torch.')}{passed}"


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


def cores_in_reach() -> set[int]:
    """Return the CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cores_by_quota() -> int:
    """Return how many cores' time a container may take (cgroup v2), rounded up; without such a limit all there are."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file; `max`
        return os.cpu_count() or 1
