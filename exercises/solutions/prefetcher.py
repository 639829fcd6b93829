"""A solution of prefetcher.py:

python exercises/check.py exercises/solutions/prefetcher.py
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any


class Prefetcher:
    """Batches in their order, read by a thread."""

    def __init__(self, batches: Iterable, ahead: int):
        self.batches, self.ahead = batches, ahead

    def __iter__(self) -> Iterator[Any]:
        ready, stop = queue.Queue(self.ahead), threading.Event()
        reader = threading.Thread(target=self._read, args=(ready, stop), daemon=True)
        reader.start()
        try:
            while True:
                kind, value = ready.get()
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                yield value
        finally:
            stop.set()
            while not ready.empty():  # it may wait for a place, and needs one more to say that it ended
                ready.get()
            reader.join()

    def _read(self, ready: queue.Queue, stop: threading.Event) -> None:
        """Put each batch into the queue; runs in the thread."""
        try:
            for batch in self.batches:
                if stop.is_set():
                    return
                ready.put(("batch", batch))
            ready.put(("end", None))
        except Exception as error:
            ready.put(("error", error))
