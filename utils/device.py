"""The device of a rank, and what it can do."""

import os
import shutil
import sys

import torch


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device of this rank: its local rank modulo the devices it sees.

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
    return device


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products on NVIDIA GPUs round their inputs to TF32 (10 bits of mantissa), or forbid it."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if allowed else "highest")


def check_compiler(wanted: bool) -> None:
    """Raise ValueError where torch.compile is wanted and there is no C++ compiler for the code it generates."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if wanted and shutil.which(compiler) is None:
        raise ValueError(
            f"enable_jit needs a C++ compiler, and {compiler} is not on PATH: load or install one (module load gcc), "
            f"name another in CXX, or take --no_enable_jit"
        )
