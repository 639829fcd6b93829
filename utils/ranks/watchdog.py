"""What ends a run on every rank where one of them dies, on any launcher."""

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
    """

    def __init__(self):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.before = (self.rank - 1) % self.ranks
        if self.ranks > 1:
            self.group = dist.new_group(backend="gloo", timeout=FOREVER)
            self.hello = dist.isend(torch.zeros(1), dst=(self.rank + 1) % self.ranks, group=self.group)
            self.thread = threading.Thread(target=self._wait, daemon=True)
            self.thread.start()

    def close(self) -> None:
        """Take leave; all ranks call this. The others may then end."""
        if self.ranks > 1:
            dist.send(torch.zeros(1), dst=(self.rank + 1) % self.ranks, group=self.group)
            self.thread.join()

    def _wait(self) -> None:
        try:
            for _ in ("hello", "farewell"):  # a rank connects to another one at its first word
                dist.recv(torch.zeros(1), src=self.before, group=self.group)
        except RuntimeError:
            stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            end_now(f"rank {self.rank}: rank {self.before} is gone, and this one ends too; it was at {place(stack)}")


def place(stack: traceback.StackSummary) -> str:
    """Return the innermost line of this project's code on a stack: it names the operation."""
    ours = [f for f in stack if Path(f.filename).is_relative_to(ROOT) and "site-packages" not in f.filename]
    last = ours[-1] if ours else stack[-1]
    return f"{os.path.relpath(last.filename, ROOT)}:{last.lineno}: {last.line}"


def end_now(message: str, code: int = 1) -> None:
    """Print one line and end this process, whatever its threads wait for."""
    os.write(2, f"{os.path.basename(sys.argv[0])}: error: {message}\n".encode())
    os._exit(code)
