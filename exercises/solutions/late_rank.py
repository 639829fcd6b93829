"""A solution of late_rank.py:

python exercises/check.py exercises/solutions/late_rank.py
"""

import statistics
from typing import Any

PHASES = ("data wait", "forward", "backward", "optimizer")
COLLECTIVE = "communication"
MATTERS = 0.1

Event = dict[str, Any]


def own_times(events: list[Event], phase: str) -> list[float]:
    """Return how long a rank worked in a phase, in each of its steps: without waiting for others."""
    spans = [event for event in events if event["name"] == phase]
    waits = [event for event in events if event["name"] == COLLECTIVE]
    return [
        span["dur"] - sum(wait["dur"] for wait in waits if 0 <= wait["ts"] - span["ts"] < span["dur"]) for span in spans
    ]


def usual_time(events: list[Event], phase: str) -> float:
    """Return how long a rank usually works in a phase: one step that stumbles shall not count."""
    return statistics.median(own_times(events, phase))


def late_rank(ranks: list[list[Event]]) -> tuple[int, str] | None:
    """Return the rank that the others wait for, and the phase that it is slow in; None where nobody is late."""
    times = [{phase: usual_time(events, phase) for phase in PHASES} for events in ranks]
    totals = [sum(of_rank.values()) for of_rank in times]
    late = max(range(len(ranks)), key=lambda rank: totals[rank])
    others = [of_rank for rank, of_rank in enumerate(times) if rank != late]
    usual = {phase: statistics.median(of_rank[phase] for of_rank in others) for phase in PHASES}
    if totals[late] < (1 + MATTERS) * sum(usual.values()):
        return None
    return late, max(PHASES, key=lambda phase: times[late][phase] - usual[phase])
