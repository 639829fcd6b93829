"""The device of a rank, and what it can do."""

import os
from pathlib import Path

import torch

EXPANDABLE = "expandable_segments:True"


def pick_device(name: str, local_rank: int, expandable_segments: bool = True) -> torch.device:
    """Return the device of this rank: its local rank modulo the devices it sees; set up its memory allocator.

    Raises ValueError where `cuda` is asked for and there is none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', but torch sees no GPU here: take --device cpu, or ask the scheduler for GPUs"
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if allocator_settings(expandable_segments, device) == EXPANDABLE:
        # PyTorch reads its variable when CUDA starts, before we know the GPU, and has no public function for later.
        # tests/test_gpu.py, test_memory_grows_in_expandable_segments, fails where this one is gone.
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(EXPANDABLE)
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
