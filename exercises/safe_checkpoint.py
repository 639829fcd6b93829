"""Exercise: a checkpoint that survives a kill at any point. Fill in TODO 1 to 3; this tells what is next:

    python exercises/check.py exercises/safe_checkpoint.py

A job is killed when its time is over, a node loses power, a disk is full. Whenever that happens, the folder must hold a
whole checkpoint: the new one, or the one before. A half-written one is worse than none where it hides the good one.

Think first: what is in a file after a kill in the middle of `torch.save`? `os.replace(a, b)` gives a file another name
in one go: at each moment b is the old file or the new one, never a part. What of a file reaches the disk before its new
name does, if the power fails? `os.fsync(file.fileno())` waits for it. And what of leftovers: who finds them, who
removes them? (Ours is utils/checkpoint/.)
"""

import os  # noqa: F401 - you will need these
from pathlib import Path

import torch  # noqa: F401
from torch import Tensor


def save_checkpoint(folder: Path, step: int, state: dict[str, Tensor]) -> None:
    """Keep a state in a folder that is there.

    At whatever moment this is killed, load_checkpoint finds this state or the one that was kept before. When it
    returns, it finds this one, even if the power fails then.
    """
    raise NotImplementedError("TODO 2: torch.save step and state under a name that load_checkpoint does not look at")
    # TODO 3: in the order that matters: on the disk, then under its name.


def load_checkpoint(folder: Path) -> tuple[int, dict[str, Tensor]] | None:
    """Return step and state of the checkpoint that was kept last; None where there is none."""
    raise NotImplementedError("TODO 1: torch.load with weights_only=True: files of strangers run no code")
