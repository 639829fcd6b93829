"""What a layout takes and holds on a machine."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from benchmarks.planner.layouts import Layout
from benchmarks.planner.machine import Machine
from benchmarks.planner.predict import Clock, Group, Links, Work, shown, tail
from benchmarks.planner.sketch import REST, End, Pass, operation_between
from benchmarks.planner.trace import sent
from utils.config.settings import Config
from utils.measure.operations import Operation

WAITS = 0.02  # of a step: less does not bound it
LIMITS = {
    "product": "products",
    "attention": "products",
    "memory": "memory",
    "host": "host",
    "reading": "storage",
    "copying": "copies",
}


@dataclass(frozen=True)
class Outlook:
    """What a layout takes and holds.

    Attributes:
        samples: of a step, over all ranks.
        seconds: of a step.
        parts: seconds by part: product, attention, memory (all else that computes), host (the device waits for it),
            tp, cp and dp-cp (links that nothing hides), slowest (waiting for the slowest rank), reading,
            copying to the GPU.
        limit: products, memory, host, links, copies or storage: what a step waits for, else what takes longest.
        hidden: seconds of links that go on beside operations.
        memory: bytes of a rank by part.
        sent: bytes that a rank sends in a step, by axes.
    """

    layout: Layout
    samples: int
    seconds: float
    parts: dict[str, float]
    limit: str
    hidden: float
    memory: dict[str, float]
    sent: dict[str, float]

    @property
    def pace(self) -> float:
        """Seconds a sample."""
        return self.seconds / self.samples

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Message:
    """What goes over dp-cp beside a pass: so many collectives of so many bytes.

    Attributes:
        phase: forward or backward.
        always: in each pass of a step, and not only in the last.
    """

    kind: str
    phase: str
    always: bool
    count: int
    size: float


@dataclass(frozen=True)
class Estimate:
    """What a model needs to know of its layouts.

    Attributes:
        config: with the layout's flags. Its batch does not count.
        machine: whose.
        passes: forward and backward pass of so many samples as a rank takes at once.
        end: of a step.
        batch: bytes of a rank's samples of a step. On a GPU there is room for two: one is read, one computed.
        read: bytes that a step reads, all ranks of a model together, where each reads other tokens.
        samples: of a step, over all ranks.
    """

    config: Config
    machine: Machine
    passes: Pass
    end: End
    batch: float
    read: float
    samples: int

    def outlook(self, layout: Layout, groups: dict[str, Group]) -> Outlook:
        """Return what a layout takes and holds whose groups lie so in the nodes."""
        k, links = layout.accumulation_steps, Links(self.machine, groups)
        owners = groups["dp-cp"].ranks if layout.shard != "none" else 1
        messages = self.messages(layout) if groups["dp-cp"].ranks > 1 else []
        key = tuple(groups.values())
        if key not in self.known:
            self.known[key] = {phase: self.of_model(links, phase) for phase in ("forward", "backward")}
        passes = self.known[key]
        work = (passes["forward"] + passes["backward"]).times(k)
        work += self.computing["end"].shared(owners) + links.work(self.ending(owners))
        if owners > 1:  # what is gathered goes to the weights' places, gradients go to one another's side
            copies = [(self.clock.work([_copy(m)]), m.count * (k if m.always else 1)) for m in messages]
            work = sum((copy.times(count) for copy, count in copies), work)
        total, seen = 0.0, 0.0
        for phase, beside in passes.items():
            once, always = ([m for m in messages if (m.phase, m.always) == (phase, every)] for every in (False, True))
            for times, those in ((k - 1, always), (1, always + once)):
                one = sum(m.count * links.collective(m.kind, m.size, "dp-cp") for m in those)
                total += times * one
                if those:
                    count = those[0].count
                    seen += times * (shown(count, one / count, beside.total) if self.is_gpu else one)
        return self.add_waiting(layout, groups, work + Work(Counter({"dp-cp": seen}), 0), total - seen)

    def add_waiting(self, layout: Layout, groups: dict[str, Group], work: Work, hidden: float) -> Outlook:
        """Return the outlook of a rank's work, with what it waits for."""
        machine, parts = self.machine, dict(work.seconds)
        host = work.count * machine.host
        parts["host"] = max(host - work.total, 0.0) if self.is_gpu else host
        parts["slowest"] = sum(parts.values()) * tail(machine.noise, layout.ranks)
        reading = self.read * self.readers(layout, groups) / machine.stored(machine.nodes(layout.ranks))
        copying = self.batch / machine.copy if machine.copy else 0.0
        beside = sum(parts.values()) if self.config.num_data_workers else 0.0  # workers read ahead
        parts["reading"] = max(reading - beside, 0.0)
        parts["copying"] = max(copying - sum(parts.values()), 0.0)
        memory, gone = self.memory(layout, groups), self.sent(layout, groups)
        return Outlook(layout, self.samples, sum(parts.values()), parts, self.limit(parts), hidden, memory, gone)

    def readers(self, layout: Layout, groups: dict[str, Group]) -> float:
        """Return how many nodes read the same rows: those of tensor parallel ranks that hold the same tokens."""
        return 1 if layout.sequence_parallel else groups["tp"].ranks / groups["tp"].in_node

    def limit(self, parts: dict[str, float]) -> str:
        """Return what bounds a step: what goes on beside it if it waits for that, else what takes longest."""
        beside = ["reading"] * (self.config.num_data_workers > 0) + ["copying", "host"] * self.is_gpu
        for part in beside:
            if parts[part] > WAITS * sum(parts.values()):
                return LIMITS[part]
        found: Counter[str] = Counter()
        for part, seconds in parts.items():
            if part != "slowest":
                found[LIMITS.get(part, "links")] += seconds
        return max(found, key=found.get)

    def of_model(self, links: Links, phase: str) -> Work:
        """Return the work of a pass through all blocks and the rest."""
        found = Work(Counter(), 0)
        for (part, of), operations in self.operations.items():
            if of == phase:
                found += (self.computing[part, of] + links.work(operations)).times(self.times(part))
        return found

    def times(self, part: str) -> int:
        """Return how often the model does what a part does."""
        return 1 if part == REST else self.config.depth

    @property
    def is_gpu(self) -> bool:
        return self.machine.device == "cuda"

    @cached_property
    def known(self) -> dict[tuple, dict[str, Work]]:
        """The work of passes, by where groups lie: the same whatever is shared out."""
        return {}

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.machine, self.config.tf32, self.config.enable_jit)

    @cached_property
    def operations(self) -> dict[tuple[str, str], list[Operation]]:
        """The operations of a pass, by part and phase."""
        found = {(part, phase): [] for part in self.passes.operations for phase in ("forward", "backward")}
        for part, operations in self.passes.operations.items():
            for operation in operations:
                found[part, operation.phase].append(operation)
        return found

    @cached_property
    def computing(self) -> dict[Any, Work]:
        """What a rank computes: a pass, by part and phase, and what ends a step."""
        plain = replace(self.clock, fuses=False)  # blocks are compiled, and nothing else
        found = {
            (part, phase): (plain if part == REST else self.clock).work(operations)
            for (part, phase), operations in self.operations.items()
        }
        one, two = (plain.work(ops) for ops in self.end.operations)
        return found | {"end": one.times(2 - self.config.depth) + two.times(self.config.depth - 1)}

    def ending(self, owners: int) -> list[Operation]:
        """Return the collectives that end a step, where so many ranks share out gradients."""
        one, two = ([op for op in ops if op.kind == "collective"] for ops in self.end.operations)
        found = (operation_between(x, y, self.config.depth - 1) for x, y in zip(one, two, strict=True))
        return [replace(op, sent=op.sent // owners) for op in found]

    @property
    def weights(self) -> float:
        """Bytes of a rank's weights, all in float32."""
        return 4 * (self.end.rest + self.config.depth * self.end.block)

    def messages(self, layout: Layout) -> list[Message]:
        """Return what goes over dp-cp: buckets of gradients, or weights and gradients block by block, and the rest."""
        if self.config.noddp:
            return []
        if layout.shard == "none":
            count = -(-self.weights // (self.config.bucket_cap_mb * 2**20))
            return [Message("all_reduce", "backward", False, count, self.weights / count)]
        # Where weights are shared out, each run of a block gathers and scatters; else its gradients add up first.
        keeps = layout.shard == "gradients"
        count = self.config.depth * (1 if keeps else self.config.longest_rollout) + 1
        found = [("all_gather", "forward", not keeps), ("reduce_scatter", "backward", False)]
        found += [] if keeps else [("all_gather", "backward", True)]
        return [Message(*kind, count, self.weights / (self.config.depth + 1)) for kind in found]

    def memory(self, layout: Layout, groups: dict[str, Group]) -> dict[str, float]:
        """Return the bytes of a rank when they are most, by part."""
        passes, config, n = self.passes, self.config, groups["dp-cp"].ranks
        whole, block = self.weights, 4 * self.end.block
        owned = whole / (n if layout.shard != "none" else 1)
        weights = gradients = owned
        if layout.shard != "none" and n > 1:
            weights += whole if layout.shard == "gradients" else 2 * block
            gradients += whole if layout.accumulation_steps > 1 else 2 * block
        kept = sum(self.times(part) * size for part, size in passes.kept.items())
        found = {"weights": weights, "gradients": gradients, "optimiser": 2 * owned}
        found["batch"] = self.batch * (2 if self.is_gpu else 1)
        found |= {"activations": kept, "working": passes.working}
        return found | ({} if config.ema_decay is None else {"average": owned})

    def sent(self, layout: Layout, groups: dict[str, Group]) -> dict[str, float]:
        """Return the bytes that a rank sends in a step, by axes, with ring algorithms."""
        found: Counter[str] = Counter()
        passes = [(layout.accumulation_steps * self.times(part), ops) for (part, _), ops in self.operations.items()]
        owners = groups["dp-cp"].ranks if layout.shard != "none" else 1
        for times, operations in [*passes, (1, self.ending(owners))]:
            for op in operations:
                if op.axes:
                    found[op.axes] += times * sent(op.name, op.sent, groups[op.axes].ranks)
        for m in self.messages(layout) if groups["dp-cp"].ranks > 1 else ():
            times = layout.accumulation_steps if m.always else 1
            found["dp-cp"] += times * m.count * sent(m.kind, m.size, groups["dp-cp"].ranks)
        return dict(found)


def _copy(message: Message) -> Operation:
    size = round(message.size)
    return Operation("memory", message.phase, "", torch.float32, "copy_", read=size, written=size)
