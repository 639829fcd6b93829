"""When a run stops before its end, and when it saves: signals and the clock. All ranks do after the same iteration."""

import math
import signal
import time
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from utils.spans import communication

# Gloo sends an answer round all ranks, one after another, twice: some 20 to 200 us for each of them. More ranks than
# FEW ask less often than after every iteration: APART seconds for each rank.
FEW, APART, LONG = 64, 1e-3, 10**9  # the last in us
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
        self.asked, self.calls, self.every, self.kind = time.monotonic(), 0, 1, ""  # when; calls since, until the next
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":  # Ctrl-C twice: at once
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def agree(self, kind: str = "") -> tuple[bool, bool]:
        """Return whether to stop, and whether to save: what the ranks said in the call before.

        The answer travels while the next iteration computes. With many ranks only some calls ask: of calls of a `kind`,
        which take equally long, as many lie between as the slowest rank needs for their time.
        """
        self.calls += 1
        if self.calls < self.every and kind == self.kind:
            return False, False
        stop, save = self._answer()
        now = time.monotonic()
        took = (now - self.asked) / self.calls
        if save:
            self.saved = now
        if self.deadline is not None and now > self.deadline:
            self.reason = self.reason or "the time limit"
        due = self.save_seconds is not None and now > self.saved + self.save_seconds
        microseconds = round(min(max(1e6 * took, 1), LONG))
        if kind != self.kind:  # before were other calls: the next one asks, too
            self.every, microseconds = 1, LONG
        self.asked, self.calls, self.kind = now, 0, kind
        said = torch.tensor([self.reason is not None, due and dist.get_rank() == 0, microseconds], dtype=torch.int32)
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
        self.calls = self.every
        self.agree()
        return self._answer()[0]

    @communication
    def _answer(self) -> tuple[bool, bool]:
        if self.pending is None:
            return False, False
        (work, said), self.pending = self.pending, None
        work.wait()
        ranks = dist.get_world_size(self.group)
        self.every = 1 if ranks <= FEW else math.ceil(1e6 * APART * ranks / int(said[2]))
        return bool(said[0]), bool(said[1])

    def close(self) -> None:
        """Leave together; all ranks call this. A signal that comes later does not change the exit code."""
        self._answer()
