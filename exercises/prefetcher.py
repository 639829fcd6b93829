"""Exercise: read the next batches while this one is computed. Fill in TODO 1 to 4; this tells what is next:

    python exercises/check.py exercises/prefetcher.py

    for batch in batches:                       for batch in Prefetcher(batches, ahead=2):
        compute(batch)                              compute(batch)

On the left the loop reads a batch, computes, reads the next: who reads waits for who computes, and the other way round.
On the right a thread reads. Reading and most of computing release Python's lock, so that both go on at once.

Think first: how long do n batches take on the left, and how long on the right? How much memory does reading ahead
take? What must happen to the thread when the loop ends, or is left by `break`, or when a file cannot be read? `queue`
has what two threads need to hand things over: `put` waits for a place, `get` for a thing. (Ours is in
utils/data/read_ahead.py.)
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any


class Prefetcher:
    """Batches in their order, read by a thread.

    Args:
        batches: gives one batch after another, as often as it is asked to; each takes time.
        ahead: how many batches, at most, lie ready; one more may be on its way.
    """

    def __init__(self, batches: Iterable, ahead: int):
        self.batches, self.ahead = batches, ahead

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("TODO 1: make a queue of self.ahead places, and start a thread that runs self._read")
        # TODO 2: yield what comes out of the queue. How do you learn that it was the last?
        # TODO 3: an error of the thread must be raised here: nobody looks at a thread.
        # TODO 4: a loop that is left early closes this generator: what is in `finally` then runs. End the thread there;
        # it may be waiting for a place in the queue.

    def _read(self, ready: queue.Queue, stop: threading.Event) -> None:
        """Put each batch into the queue; runs in the thread."""
        raise NotImplementedError("TODO 1: for each of self.batches")
