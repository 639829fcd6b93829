"""How long does a step take? From a rank's operations, what it sends, and what a machine can do.

The host asks for operations, the device does them: on a GPU both go on beside each other, and the slower one counts; a
CPU is its own host. What goes over tp and cp in the middle of a pass is waited for. What goes over dp-cp, gradients and
shared weights, goes on beside the passes on a GPU, as far as there are operations to hide it. Then comes what a rank
alone does not see: reading, and the slowest of all ranks.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.planner.machine import Machine, at, seconds_at
from utils.measure.operations import Operation

COMPUTED = ("product", "attention", "memory")


@dataclass(frozen=True)
class Group:
    """Where the ranks of a group lie: so many, of which so many in each node."""

    ranks: int
    in_node: int


@dataclass
class Work:
    """What operations take one after another, in seconds by part, and how many the host asks for.

    Parts: product, attention, memory (all else that computes), and for collectives the axes they go over.
    """

    seconds: Counter[str]
    count: float

    def times(self, factor: float) -> "Work":
        return Work(Counter({part: factor * x for part, x in self.seconds.items()}), factor * self.count)

    def shared(self, ranks: int) -> "Work":
        """Return it where so many ranks share out what is no communication."""
        return Work(Counter({p: x / ranks if p in COMPUTED else x for p, x in self.seconds.items()}), self.count)

    def __add__(self, other: "Work") -> "Work":
        parts = self.seconds.keys() | other.seconds.keys()  # a Counter's own sum would drop what is below zero
        return Work(Counter({p: self.seconds[p] + other.seconds[p] for p in parts}), self.count + other.count)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Clock:
    """Says what operations take on a machine.

    Attributes:
        tf32: whether float32 products may be of TF32 where the device has it.
        fuses: whether operations that compute little are compiled: those between two others make one pass over memory,
            that of the largest.
    """

    machine: Machine
    tf32: bool = True
    fuses: bool = False

    def work(self, operations: Iterable[Operation]) -> Work:
        """Return what operations take one after another. Collectives count, and take no time: see `Links`."""
        seconds: Counter[str] = Counter()
        count, before, longest = 0, "", 0.0
        for operation in operations:
            took = self.seconds(operation)
            if self.fuses and operation.kind == before == "memory":
                seconds["memory"] += max(took - longest, 0.0)
                longest = max(longest, took)
                continue
            seconds[operation.kind] += took
            count, before, longest = count + 1, operation.kind, took
        del seconds["collective"]
        return Work(seconds, count)

    def seconds(self, operation: Operation) -> float:
        """Return the time of an operation on the device."""
        machine, moved = self.machine, operation.read + operation.written
        if operation.kind == "collective" or not moved:
            return 0.0
        if operation.kind == "memory":
            return moved / at(machine.moving.get(operation.name, machine.moving[""]), moved)
        dtype = str(operation.dtype).removeprefix("torch.")
        if operation.kind == "attention":
            return operation.flops / self._attention(operation, dtype)
        if dtype not in machine.products:
            raise ValueError(f"the machine's file has no matrix products of {dtype}: take another --amp_mode")
        if dtype == "float32" and self.tf32 and "tfloat32" in machine.products:
            dtype = "tfloat32"
        return operation.flops / at(machine.products[dtype], operation.flops)

    def _attention(self, operation: Operation, dtype: str) -> float:
        """Return the FLOP/s of the kernel, from the curve of the head size that is nearest."""
        way = "backward" if "backward" in operation.name else "forward"
        if dtype not in self.machine.attention:
            raise ValueError(f"the machine's file has no fused attention of {dtype}: take another --amp_mode")
        B, h, *_, d = operation.sizes
        curves = {int(name.split()[1]): x for name, x in self.machine.attention[dtype].items() if name.startswith(way)}
        nearest = min(curves, key=lambda size: abs(math.log(size / d)))
        return at(curves[nearest], operation.flops / B / h)


@dataclass(frozen=True)
class Links:
    """Says what collectives take on a machine, in groups that lie so in its nodes, by axes."""

    machine: Machine
    groups: dict[str, Group]

    def work(self, operations: Iterable[Operation]) -> Work:
        """Return what the collectives among operations take one after another, by axes."""
        seconds: Counter[str] = Counter()
        for operation in operations:
            if operation.kind == "collective":
                seconds[operation.axes] += self.collective(operation.name, operation.sent, operation.axes)
        return Work(seconds, 0)

    def collective(self, kind: str, size: float, axes: str) -> float:
        """Return the time of a collective whose largest tensor has so many bytes.

        As measured for as many ranks, if somebody did. Else by the algorithms that libraries take: a ring, or for an
        all-reduce of few bytes a tree, whichever is faster (Thakur, Rabenseifner & Gropp 2005, Optimization of
        Collective Communication Operations in MPICH). A ring that leaves the node sends over as many network cards as
        the group has ranks in a node. An all-to-all is no ring: a rank sends its part to each other one, and those for
        other nodes over its own card.
        """
        group, links = self.groups[axes], self.machine.links
        n = group.ranks
        if n == 1 or not size:
            return 0.0
        link = links["node" if group.in_node == n else "network"]
        if group.in_node in (1, n) and (curve := link.collectives.get(f"{kind} {n}")):
            return seconds_at(curve, size)
        bandwidth = link.bandwidth
        if group.in_node < n:
            if kind == "all_to_all":
                return (n - 1) * link.alpha + (n - group.in_node) / n * size / bandwidth
            inside = links["node"].bandwidth if "node" in links else bandwidth
            bandwidth = min(bandwidth * group.in_node, inside)
        passes = 2 if kind == "all_reduce" else 1
        ring = passes * ((n - 1) * link.alpha + (n - 1) / n * size / bandwidth)
        tree = passes * (math.ceil(math.log2(n)) * link.alpha + size / bandwidth)
        return min(ring, tree) if kind == "all_reduce" else ring


def shown(count: int, one: float, beside: float) -> float:
    """Return what is seen of `count` messages of so many seconds each, sent while operations take `beside` seconds.

    Each part of the operations has a message: the last one comes when all operations are done.
    """
    return max(one, count * one - beside * (1 - 1 / count)) if count else 0.0


def tail(noise: float, ranks: int) -> float:
    """Return how much longer than the mean the slowest of so many ranks takes, as a share: of normal noise."""
    return noise * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
