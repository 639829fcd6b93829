"""What does a whole run cost? Its hours, what its checkpoints take, and what is lost to nodes that fail."""

import math
from dataclasses import dataclass

from benchmarks.planner.machine import Machine, at
from benchmarks.planner.outlook import Outlook


@dataclass(frozen=True)
class WholeRun:
    """A run of so many steps, with the checkpoints that lose least.

    Attributes:
        saved: bytes of a checkpoint: weights, both moments, the average if there is one; each once.
        stall: seconds that a step waits while ranks copy what they hold to their hosts.
        written: seconds from there until the bytes are on the disk, all nodes writing; training goes on meanwhile.
            What many ranks take to agree on it is not counted.
        between_failures: seconds, on average; infinite where nobody knows.
        interval: seconds between two checkpoints.
        lost: share of the time that saves take, and what is done twice after a failure, and starts.
        hours: of all steps, with what is lost; infinite where failures come faster than starts.
    """

    saved: float
    stall: float
    written: float
    between_failures: float
    interval: float
    lost: float
    hours: float


def whole_run(outlook: Outlook, machine: Machine, parameters: int, steps: int) -> WholeRun:
    """Return what so many steps of a layout cost, of a model with so many parameters.

    Checkpoints come as often as loses least: after the square root of twice a save's cost times the time between
    failures (Young 1974, A first order approximation to the optimum checkpoint interval), and not before the last one
    is written, or a step is done. What a save costs is the copy to the host; a thread writes it while training goes
    on. A failure costs half an interval, what was being written, and a start. Validations do not count.
    """
    ranks = outlook.layout.ranks
    average = outlook.memory.get("average", 0.0)
    held = 1.5 * outlook.memory["optimiser"] + average  # two moments, and the weights
    saved = 4 * parameters * (4 if average else 3)
    stall = held / (machine.copy or at(machine.moving[""], 2 * held) / 2)
    written = saved / machine.stored(machine.nodes(ranks))
    if machine.failures is None:
        between, interval, lost = math.inf, math.inf, 0.0
    else:
        between = 3600 / (machine.failures * ranks)
        interval = max(math.sqrt(2 * stall * between), written, outlook.seconds)
        repeated = (interval / 2 + written + (machine.restart or 0.0)) / between
        lost = 1 - max(1 - repeated, 0.0) / (1 + stall / interval)
    hours = steps * outlook.seconds / 3600 / (1 - lost) if lost < 1 else math.inf
    return WholeRun(saved, stall, written, between, interval, lost, hours)
