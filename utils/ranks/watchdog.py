"""What ends a run on every rank where one of them dies, on any launcher."""

import contextlib
import os
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
FOREVER = timedelta(days=365)


class Watch:
    """Ends this process as soon as the rank before it dies; the rank after it then does the same, around the ring.

    A thread waits for a word of the rank before, which comes at the end of the run. The system closes the connections
    of a process that dies, however it died, and the wait fails. (torchrun and srun -K end a job too, if not as soon;
    with plain environment variables nobody does.)

    Args:
        wait: how long the rank before may take to say hello. Before that there is no connection that could be closed.
    """

    def __init__(self, wait: timedelta):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.before = (self.rank - 1) % self.ranks
        if self.ranks > 1:
            self.group = dist.new_group(backend="gloo", timeout=FOREVER)
            self.has_met = threading.Event()
            # Each in a thread of its own: gloo waits without end for a rank that died before they were connected.
            self.threads = [threading.Thread(target=job, daemon=True) for job in (self._greet, self._wait)]
            for thread in self.threads:
                thread.start()
            if not self.has_met.wait(wait.total_seconds()):
                end_now(f"rank {self.rank}: no word from rank {self.before} in {wait}, and this one ends too")

    def close(self) -> None:
        """Take leave; all ranks call this. The others may then end."""
        if self.ranks > 1:
            self._greet()
            for thread in self.threads:
                thread.join()

    def _greet(self) -> None:
        with contextlib.suppress(RuntimeError):  # the rank after this one is gone: the ring tells
            dist.send(torch.zeros(1), dst=(self.rank + 1) % self.ranks, group=self.group)

    def _wait(self) -> None:
        try:
            for _ in ("hello", "farewell"):
                dist.recv(torch.zeros(1), src=self.before, group=self.group)
                self.has_met.set()
        except RuntimeError:
            stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            end_now(f"rank {self.rank}: rank {self.before} is gone, and this one ends too; it was at {place(stack)}")


def place(stack: traceback.StackSummary) -> str:
    """Return the innermost line of this project's code on a stack: it names the operation."""
    ours = [f for f in stack if Path(f.filename).is_relative_to(ROOT) and "site-packages" not in f.filename]
    last = ours[-1] if ours else stack[-1]
    return f"{os.path.relpath(last.filename, ROOT)}:{last.lineno}: {last.line}"


def end_now(message: str, code: int = 1) -> None:
    """Print one line and end this process, whatever its threads wait for, and also where nobody can read the line."""
    with contextlib.suppress(OSError):
        if sys.__stderr__ is not None:  # where it is closed another file may have its number
            os.write(2, f"{os.path.basename(sys.argv[0])}: error: {message}\n".encode())
    os._exit(code)
