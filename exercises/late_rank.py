"""Exercise: find the late rank in the traces of a run, and what it is late in. Fill in TODO 1 to 3; this tells what is
next:

    python exercises/check.py exercises/late_rank.py

Ranks wait for each other in collectives: all end when the last has come. So the run is as slow as its slowest rank, and
in the times of a step one does not see it, for they are the same on all ranks. Traces tell. When your function is
right, try it with a run of your own:

    torchrun --nproc_per_node=4 train_mp.py --config=demo --num_iters 30 --tensor_parallel=2 --profile torch \\
        --profile_ranks all --run_num late
    python exercises/late_rank.py runs/demo/2MP/late/profile

Think first: a rank spends a long time in collectives. Is it late, or are the others? What is in the span `backward` of
a rank that waits there? A rank stumbles once in a hundred steps: is that what slows the run down? Each rank stamps
events by a clock of its own: what may be compared between ranks? (benchmarks/compare_ranks.py asks a library the same.)
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare_ranks import newest_traces, read_trace

PHASES = ("data wait", "forward", "backward", "optimizer")
COLLECTIVE = "communication"  # the name of what waits for other ranks, in one of the phases
MATTERS = 0.1  # who works longer than the others by less of a step, is not late

Event = dict[str, Any]  # "name", "ts": where it begins, and "dur": how long it takes, in microseconds


def own_times(events: list[Event], phase: str) -> list[float]:
    """Return how long a rank worked in a phase, in each of its steps: without waiting for others."""
    raise NotImplementedError("TODO 1: each span of that name, less the collectives that lie inside it")


def usual_time(events: list[Event], phase: str) -> float:
    """Return how long a rank usually works in a phase: one step that stumbles shall not count."""
    raise NotImplementedError("TODO 2: of all its steps")


def late_rank(ranks: list[list[Event]]) -> tuple[int, str] | None:
    """Return the rank that the others wait for, and the phase that it is slow in; None where nobody is late.

    Late is who works longer than the others do, in the median, by MATTERS of that or more.
    """
    raise NotImplementedError("TODO 3: who works longest in all phases together, and in which by the most")


if __name__ == "__main__":
    paths = newest_traces(Path(sys.argv[1]))
    events = [
        [e for e in read_trace(path)["traceEvents"] if e.get("cat") == "user_annotation"] for path in paths.values()
    ]
    for rank, of_rank in enumerate(events):
        print(f"rank {rank}:", ", ".join(f"{phase} {usual_time(of_rank, phase) / 1e3:.1f} ms" for phase in PHASES))
    print("late:", late_rank(events))
