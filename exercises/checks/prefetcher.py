"""A thread that reads ahead."""

import contextlib
import threading
import time
from collections.abc import Iterator
from types import ModuleType

from exercises.checks.common import Wrong, load, say, within

MINUTES, DEFINES = 40, "Prefetcher"
AFTER = "1-one-device.md#data-loading---num_data_workers---read_depth---data_loader_config"
HINTS = """
One thread reads and puts, the loop gets and yields. queue.Queue(ahead) makes `put` wait while so many lie ready: that
alone bounds the memory.

What the thread puts can say what it is: ("batch", batch), then ("end", None). The loop returns at the end.

An error in a thread is printed, and the loop waits for ever. So catch it in _read, put ("error", error), and raise it
where the loop gets it.

try: ... yield ... finally: is the place to end the thread. stop.set() asks it to; if it waits in `put`, take things
out of the queue until it comes to look at `stop`. join() then waits for its end.
"""
LENGTH, SECONDS, AHEAD, PATIENCE, TRIES = 10, 0.03, 2, 5, 3


class Slow:
    """Batches that take time to read; counts those that were. Batch `fails` cannot be read."""

    def __init__(self, fails: int | None = None):
        self.fails, self.count = fails, 0

    def __iter__(self) -> Iterator[int]:
        for i in range(LENGTH):
            time.sleep(SECONDS)
            if i == self.fails:
                raise OSError("the disk is gone")
            self.count += 1
            yield i


def check(path: str, rank: int, size: int) -> None:
    solution = load(path)
    forever = "the loop waits for ever: "
    found = within(
        PATIENCE,
        lambda: list(solution.Prefetcher(Slow(), AHEAD)),
        forever + "who says that no more batch comes? (TODO 2)",
    )
    if found != list(range(LENGTH)):
        raise Wrong(f"batches {list(range(LENGTH))} came out as {found}: each once, in their order (TODO 2)")
    say(rank, "each batch comes once, in its order")
    overlap(solution, rank)
    left = (
        "a loop that is left waits for ever: the thread waits for a place in the queue, and nobody makes one (TODO 4)"
    )
    within(PATIENCE, lambda: bound(solution, rank), left)
    within(PATIENCE, lambda: failure(solution, rank), forever + "the thread met an error, nobody heard of it (TODO 3)")
    within(PATIENCE, lambda: leaving(solution, rank), left)
    batches = Slow()
    prefetcher = solution.Prefetcher(batches, AHEAD)
    epochs = within(PATIENCE, lambda: [list(prefetcher), list(prefetcher)], forever + "in the second epoch")
    if epochs != [list(range(LENGTH))] * 2:
        raise Wrong(f"a second epoch gives {epochs[1]}: queue and thread belong into __iter__, new for each loop")
    say(rank, "a second epoch is like the first")


def overlap(solution: ModuleType, rank: int) -> None:
    """Reading and computing take as long as one of them, not as both."""
    for _ in range(TRIES):  # others may compute here just then
        begin = time.perf_counter()
        for _ in Slow():
            time.sleep(SECONDS)
        serial, begin = time.perf_counter() - begin, time.perf_counter()
        for _ in solution.Prefetcher(Slow(), AHEAD):
            time.sleep(SECONDS)
        took = time.perf_counter() - begin
        if took <= 0.8 * serial:
            break
    else:
        raise Wrong(
            f"{LENGTH} batches take {took:.2f} s, and {serial:.2f} s without a thread: nothing is read while the loop "
            "computes (TODO 1)"
        )
    say(rank, f"the loop takes {took:.2f} s, without a thread {serial:.2f} s")


def bound(solution: ModuleType, rank: int) -> None:
    """While the loop holds a batch, so many are read, and no more."""
    batches = Slow()
    loop = iter(solution.Prefetcher(batches, AHEAD))
    next(loop)
    time.sleep((LENGTH + 2) * SECONDS)
    read = batches.count - 1
    loop.close()
    if read > AHEAD + 1:
        raise Wrong(
            f"{read} batches were read while the loop held the first; {AHEAD} may lie ready, one be on its way: of a "
            "large data set the memory would not last (TODO 1)"
        )
    if read < AHEAD:
        raise Wrong(f"{read} batch(es) were read while the loop held the first, and {AHEAD} should lie ready (TODO 1)")
    say(rank, f"no more than {AHEAD} batches lie ready")


def failure(solution: ModuleType, rank: int) -> None:
    """What cannot be read is an error of the loop."""
    found = []
    try:
        for batch in solution.Prefetcher(Slow(fails=3), AHEAD):
            found.append(batch)
    except OSError:
        if found != [0, 1, 2]:
            raise Wrong(f"batch 3 cannot be read; before the error came {found}, and not [0, 1, 2] (TODO 3)") from None
    else:
        raise Wrong(
            f"batch 3 cannot be read, and the loop ended after {found} as if all were well: training would go on with "
            "a part of the data (TODO 3)"
        )
    say(rank, "an error of the thread is one of the loop")


def leaving(solution: ModuleType, rank: int) -> None:
    """A loop that is left, takes its thread along."""
    before = set(threading.enumerate())
    batches = Slow()
    with contextlib.closing(iter(solution.Prefetcher(batches, AHEAD))) as loop:
        for batch in loop:
            if batch == 1:
                time.sleep(5 * SECONDS)  # the thread then waits for a place
                break
    time.sleep(3 * SECONDS)
    if left := set(threading.enumerate()) - before:
        raise Wrong(
            f"{len(left)} thread(s) live on after a loop that was left by break, and hold their batches: tell the "
            "thread to end, and make a place in the queue that it may wait for (TODO 4)"
        )
    say(rank, "a loop that is left, takes its thread along")
