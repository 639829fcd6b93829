"""What torch.profiler says when it is first used in a process, of no use to who trains: here it says it to nobody."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

import torch
from torch.profiler import profile

from utils.measure.step_profile import activities

OLD_BLOCK = b"Memory block of unknown size was allocated before the profiling started"


def use_profiler_once(device: torch.device) -> None:
    """Profile nothing, before a CUDA graph is recorded: one recorded earlier than that may crash under the profiler
    (pytorch issue 75504).

    Where memory is profiled, the CPU's allocator warns of the first block that is freed and older than the profile, and
    then of each thousandth. Here one is freed. Kineto logs its starts and stops unless it is told not to by now.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    block = torch.empty(1)
    with without_lines(OLD_BLOCK), profile(activities=activities(device), profile_memory=True):
        del block


@contextlib.contextmanager
def without_lines(words: bytes) -> Iterator[None]:
    """Keep lines with these words from stderr, of C++ too; all others come when the block ends.

    Raises OSError where stderr is closed, or no file can be made for what is written meanwhile.
    """
    with tempfile.TemporaryFile() as caught:
        stderr = os.dup(2)
        try:
            os.dup2(caught.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(stderr, 2)
                caught.seek(0)
                for line in caught:
                    if words not in line:
                        with contextlib.suppress(OSError):  # nobody can read it
                            os.write(2, line)
        finally:
            os.close(stderr)
