"""The device of a rank, and what it can do."""

import os

import torch


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
    allow_expandable_segments(expandable_segments, device)
    return device


def allow_expandable_segments(allowed: bool, device: torch.device) -> None:
    """Let a GPU's memory allocator take segments that can grow, which leaves fewer gaps between tensors.

    Call it before the first allocation. Not on an MI300A, whose memory is the host's. What the user has set stays.
    """
    if allowed and not allocator_settings() and "MI300A" not in torch.cuda.get_device_name(device):
        # PyTorch 2.9 and 2.10 take this setting from the variable's old name only.
        name = "PYTORCH_ALLOC_CONF" if torch.__version__ >= "2.11" else "PYTORCH_CUDA_ALLOC_CONF"
        os.environ[name] = "expandable_segments:True"


def allocator_settings() -> str:
    """Return the settings of PyTorch's GPU memory allocator from the environment, such as `NAME=expandable_...`."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products on NVIDIA GPUs round their inputs to TF32 (10 bits of mantissa), or forbid it."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if allowed else "highest")
