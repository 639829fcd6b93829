"""When a run stops before its end, and when it saves: signals and the clock. All ranks do after the same iteration."""

import signal
import time
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from utils.spans import communication

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequests:
    """What asks this rank to stop or to save, and what all ranks have agreed on.

    Args:
        deadline: time (time.monotonic) at which to stop.
        save_seconds: time between checkpoints; rank 0's clock counts.
        timeout: how long a rank waits for the others.
    """

    def __init__(self, deadline: float | None, save_seconds: float | None, timeout: timedelta):
        self.deadline, self.save_seconds = deadline, save_seconds
        # The hosts agree: no device waits for it. In a group of its own, because the others are in use meanwhile.
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.reason: str | None = None
        self.saved = time.monotonic()
        self.pending: tuple[dist.Work, torch.Tensor] | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":  # Ctrl-C twice: at once
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def agree(self) -> tuple[bool, bool]:
        """Return whether to stop, and whether to save: what the ranks said in the call before.

        The answer travels while the next iteration computes.
        """
        stop, save = self._answer()
        now = time.monotonic()
        if save:
            self.saved = now
        if self.deadline is not None and now > self.deadline:
            self.reason = self.reason or "the time limit"
        due = self.save_seconds is not None and now > self.saved + self.save_seconds
        said = torch.tensor([self.reason is not None, due and dist.get_rank() == 0], dtype=torch.int32)
        self.pending = dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group, async_op=True), said
        return stop, save

    def settle(self) -> None:
        """Wait for what is under way; its answer stands.

        Before a profiler stops: a collective that it saw begin, and that ends later, would write into its freed memory.
        """
        if self.pending:
            self.pending[0].wait()

    def agree_now(self) -> bool:
        """Return whether any rank was asked to stop so far; this waits for all ranks."""
        self.agree()
        return self._answer()[0]

    @communication
    def _answer(self) -> tuple[bool, bool]:
        if self.pending is None:
            return False, False
        (work, said), self.pending = self.pending, None
        work.wait()
        return bool(said[0]), bool(said[1])

    def close(self) -> None:
        """Leave together; all ranks call this. A signal that comes later does not change the exit code."""
        self._answer()
