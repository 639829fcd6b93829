"""Traces of ranks that wait for each other, made such that it is known who is late."""

import math
from dataclasses import dataclass
from typing import Any

from exercises.checks.common import Wrong, load, say

MINUTES, DEFINES = 35, "late_rank"
AFTER = "5-measuring.md#ranks-side-by-side"
HINTS = """
In a collective all wait for the last one to come. So who is late waits the shortest, and who waits long is early.

A span `backward` of 50 ms with 30 ms of waiting inside is 20 ms of work. A collective lies inside a span if it begins
after the span does and before it ends: 0 <= wait["ts"] - span["ts"] < span["dur"].

statistics.median of a phase's steps does not mind one that stumbled; a mean does.

Never compare "ts" of two ranks: the clocks differ. Durations may be compared.

Add up a rank's usual times of all phases. Who has the most? It is late if that is more than 1 + MATTERS times the
median of the others' sums; then look for the phase in which it exceeds their median by the most.
"""
STEPS, RANKS = 7, 4
WORK = {"data wait": 2.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0}  # ms
SENDS = {"forward": 0.5, "backward": 0.7}  # after which part of the work a collective comes; it takes 1 ms by itself


@dataclass
class Case:
    """What is slow, in words; what must be found; how much longer whose phases take, in all steps or in one."""

    told: str
    expected: tuple[int, str] | None
    slower: dict[tuple[int, str], float]
    stumbles: tuple[int, str] | None = None
    clocks: tuple[float, ...] = (0.0, 7e6, -3e6, 1e6)  # microseconds that the ranks' clocks are ahead


CASES = (
    Case("rank 2 is slow in its backward pass", (2, "backward"), {(2, "backward"): 30.0}),
    Case("rank 0 waits for its data", (0, "data wait"), {(0, "data wait"): 25.0}),
    Case("rank 3 is slow in its forward pass", (3, "forward"), {(3, "forward"): 12.0}),
    Case("rank 1 is slow in its optimiser", (1, "optimizer"), {(1, "optimizer"): 15.0}),
    Case(
        "rank 3 is slow in each backward pass, and rank 1 stumbles once", (3, "backward"), {(3, "backward"): 20.0},
        (1, "forward"),
    ),
    Case("nobody is slow: all differ a little", None, {(1, "forward"): 1.0, (3, "backward"): 2.0}),
    Case("nobody is slow: rank 2 stumbles once", None, {}, (2, "backward")),
)  # fmt: skip


def traces(case: Case) -> list[list[dict[str, Any]]]:
    """Return the events of each rank: a collective ends on all ranks when the last has come to it."""
    events: list[list[dict[str, Any]]] = [[] for _ in range(RANKS)]
    now = [0.0] * RANKS  # ms
    for step in range(STEPS):
        for phase, usual in WORK.items():
            begin = list(now)
            work = [usual + case.slower.get((rank, phase), 0.0) for rank in range(RANKS)]
            if step == 3 and case.stumbles and case.stumbles[1] == phase:
                work[case.stumbles[0]] += 900.0
            until = SENDS.get(phase, 1.0)
            come = [now[rank] + until * work[rank] for rank in range(RANKS)]
            if phase in SENDS:
                end = max(come) + 1.0
                for rank in range(RANKS):
                    add(events, case, rank, "communication", come[rank], end - come[rank])
                now = [end + (1 - until) * x for x in work]
            else:
                now = come
            for rank in range(RANKS):
                add(events, case, rank, phase, begin[rank], now[rank] - begin[rank])
                add(events, case, rank, "aten::mm", begin[rank], 0.3 * work[rank])
    return [sorted(of_rank, key=lambda event: event["ts"]) for of_rank in events]


def add(events: list[list[dict]], case: Case, rank: int, name: str, begin: float, took: float) -> None:
    events[rank].append({"name": name, "ts": 1e3 * begin + case.clocks[rank], "dur": 1e3 * took})


def waits(events: list[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in events if event["name"] == "communication")


def check(path: str, rank: int, size: int) -> None:
    solution = load(path)
    check_times(solution, rank)
    for case in CASES:
        ranks = traces(case)
        found = solution.late_rank(ranks)
        if found != case.expected:
            raise Wrong(f"{case.told}; late_rank says {found}: {why(found, case, ranks)} (TODO 3)")
        say(rank, case.told)


def check_times(solution, rank: int) -> None:
    """Hold the times of single ranks against those that were put in."""
    case = CASES[0]
    for number, events in enumerate(traces(case)):
        for phase, usual in WORK.items():
            expected = 1e3 * (usual + case.slower.get((number, phase), 0.0))
            found = solution.own_times(events, phase)
            if not isinstance(found, list) or len(found) != STEPS:
                raise Wrong(f"own_times gives {found} for {STEPS} steps: a list with the time of each (TODO 1)")
            told = f"rank {number} works {expected / 1e3:.0f} ms in {phase}, own_times says {found[0] / 1e3:.0f}"
            if found[0] > 1.01 * expected:
                raise Wrong(f"{told}: has it the waiting for other ranks in it? (TODO 1)")
            if not all(math.isclose(x, expected, rel_tol=1e-6) for x in found):
                raise Wrong(f"{told} (TODO 1)")
    say(rank, "what a rank works, and not what it waits")
    events = traces(CASES[-1])[2]
    if abs(solution.usual_time(events, "backward") - 1e3 * WORK["backward"]) > 1:
        raise Wrong(
            f"rank 2 works {WORK['backward']:.0f} ms in six backward passes and stumbles in one; usual_time says "
            f"{solution.usual_time(events, 'backward') / 1e3:.0f} ms (TODO 2)"
        )
    say(rank, "a step that stumbles does not count")


def why(found: Any, case: Case, ranks: list[list[dict]]) -> str:
    """Return what may have been thought."""
    if found is None:
        return "by how much does a rank work longer than the others?"
    if not (isinstance(found, tuple) and len(found) == 2):
        return "a rank and a phase, or None, were expected"
    if case.expected is None:
        return "all work as long as the others, but for less than MATTERS, or for once"
    longest = max(range(RANKS), key=lambda rank: waits(ranks[rank]))
    if found[0] == case.expected[0]:
        return "the rank is right. In which phase does it exceed the others by the most, not: work the most?"
    if case.stumbles and found[0] == case.stumbles[0]:
        return "that was one step: a mean remembers it, a median does not"
    if found[0] == longest or waits(ranks[found[0]]) > 1.5 * waits(ranks[case.expected[0]]):
        return "that rank waits in its collectives, so it is early: others let it wait"
    return "who works longest, without waiting?"
