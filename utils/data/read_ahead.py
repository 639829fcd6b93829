"""Reading ahead: background readers fill the slots of a ring while the loop works on an earlier batch."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from utils.data.frames import Request


class Read(NamedTuple):
    """One read: where from, and where to."""

    slot: int
    part: int  # 0 inputs, 1 targets, 2 forced inputs of later steps
    place: int  # of the frame in its batch
    file: int
    t: int
    request: Request | None  # a stretch of the frame; None for all of it, through HDF5


class ReadAhead:
    """Several readers at work: each takes the next job of the oldest batch that is not read yet.

    Args:
        slots: batches that there is room for.
        readers: what carries out a job; each has a thread of its own, so as many reads are under way at once.
        plan: gives the jobs of each batch in turn, when called with the slot that it will lie in. It never ends.
    """

    def __init__(self, slots: int, readers: Sequence[Callable[[Read], None]], plan: Callable[[int], list[Read]]):
        self.plan, self.error, self.stopped = plan, None, False
        self.free, self.begun = deque(range(slots)), deque()  # slots; the begun ones in the order of their batches
        self.jobs: deque[Read] = deque()  # of the newest batch
        self.left = [0] * slots  # reads that a slot still waits for
        self.changed = threading.Condition()
        self.threads = [threading.Thread(target=self._work, args=(read,), daemon=True) for read in readers]
        for thread in self.threads:
            thread.start()

    def take(self) -> int:
        """Wait for the next batch and return its slot. Raises what its readers raised."""
        with self.changed:
            self.changed.wait_for(lambda: self.error or (self.begun and not self.left[self.begun[0]]))
            if self.error:
                raise self.error
            return self.begun.popleft()

    def release(self, slot: int) -> None:
        """Give a slot back to the readers."""
        with self.changed:
            self.free.append(slot)
            self.changed.notify_all()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        """End the readers; returns when none of them writes any more, or at once where reading failed."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        # A read that hangs must not keep the error from its user. And the garbage collector may call this in any
        # thread: one of the readers cannot wait for itself.
        if not self.error and threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join()

    def _work(self, read: Callable[[Read], None]) -> None:
        try:
            while job := self._next_job():
                read(job)
                with self.changed:
                    self.left[job.slot] -= 1
                    if not self.left[job.slot]:
                        self.changed.notify_all()
        except Exception as error:
            with self.changed:
                self.error, self.stopped = error, True
                self.changed.notify_all()

    def _next_job(self) -> Read | None:
        """Wait for a job, or for a free slot to begin the next batch in. Returns None at the end."""
        with self.changed:
            while not self.stopped:
                if self.jobs:
                    return self.jobs.popleft()
                if self.free:
                    slot = self.free.popleft()
                    self.jobs.extend(self.plan(slot))
                    self.left[slot] = len(self.jobs)
                    self.begun.append(slot)
                    self.changed.notify_all()
                else:
                    self.changed.wait()
        return None
