"""What is in memory during a step, by part, from what PyTorch's profiler saw come and go."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

LEFT = {"forward": "activations", "backward": "gradients", "optimizer": "optimizer"}  # what a span leaves in memory
OTHER = 0  # an address that nothing has
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as a trace numbers them; AMD's GPUs are `cuda`, too
Event = dict[str, Any]  # of a trace in Chrome's format; times in microseconds
Storages = dict[int, tuple[str, int]]  # part and bytes of each storage, by its address


def storages(parts: dict[str, Iterable[Tensor]], device: torch.device) -> Storages:
    """Return part and bytes of each storage. One that several parts share belongs to the first of them.

    On a GPU `other` is the rest: workspaces of libraries, batches, what a recorded step holds. On a CPU the last step's
    gradients are left out, unless they lie in DDP's buckets: they go when a step begins, and PyTorch does not tell. (A
    bucket holds several gradients: not each, where weights are large, but always one of biases and norms.)
    """
    found: Storages = {}
    in_buckets = any(x.untyped_storage().nbytes() > x.nbytes for x in parts.get("gradients", ()))
    for part, tensors in parts.items():
        for tensor in tensors:
            if device.type == "cpu" and part == "gradients" and not in_buckets:
                continue
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), (part, storage.nbytes()))
    if device.type == "cuda":
        rest = torch.cuda.memory_allocated(device) - sum(size for _, size in found.values())
        found[OTHER] = ("other", rest)
    return found


def memory_moments(events: list[Event], device_type: str) -> list[Event]:
    """Return what was allocated and given back, in its order."""
    moments = (e for e in events if e.get("name") == "[memory]")
    mine = (e for e in moments if e["args"]["Device Type"] == DEVICE_TYPES[device_type])
    return sorted(mine, key=lambda e: (e["ts"], e["args"]["Ev Idx"]))


@dataclass
class Block:
    """A piece of memory: `part` holds it from `start` to `end`, in microseconds of the trace."""

    part: str
    size: int
    start: float
    end: float = math.inf


def memory_blocks(moments: list[Event], annotations: list[Event], before: Storages) -> list[Block]:
    """Return all that is in memory in a trace, in the order in which it was allocated.

    What is there before belongs to the part that it is known by. Of what comes and goes, a forward pass leaves
    activations, a backward pass gradients, and an optimiser its moments; the rest is temporary.
    """
    blocks = [Block(part, size, -math.inf) for part, size in before.values()]
    live = dict(zip(before, blocks))
    for moment in moments:
        address, size = moment["args"]["Addr"], moment["args"]["Bytes"]
        if address in live:  # it goes; on a CPU what other threads give back shows only when it is taken again
            live.pop(address).end = moment["ts"]
        elif size < 0 and OTHER in live:  # something that was there before, such as the batch of the last step
            live[OTHER].end = moment["ts"]
            blocks.append(Block("other", live[OTHER].size + size, moment["ts"]))
            live[OTHER] = blocks[-1]
        if size > 0:
            live[address] = Block("temporary", size, moment["ts"])
            blocks.append(live[address])
    spans = [(LEFT[e["name"]], e["ts"], e["ts"] + e["dur"]) for e in annotations if e["name"] in LEFT]
    for block in blocks:
        for part, start, end in spans:
            if block.part == "temporary" and start <= block.start < end <= block.end:
                block.part = part
    return blocks


def timeline(blocks: list[Block]) -> tuple[list[float], dict[str, list[int]]]:
    """Return the moments at which memory changes, in ms from the first, and the bytes of each part from then on."""
    changes = [(block.start, block.part, block.size) for block in blocks]
    changes += [(block.end, block.part, -block.size) for block in blocks if block.end < math.inf]
    changes.sort(key=lambda change: change[0])
    first = next((moment for moment, _, _ in changes if moment > -math.inf), 0.0)
    moments: list[float] = []
    parts: dict[str, list[int]] = {block.part: [] for block in blocks}
    now = dict.fromkeys(parts, 0)
    for moment, together in groupby(changes, key=lambda change: max(change[0], first)):
        for _, part, change in together:
            now[part] += change
        moments.append((moment - first) / 1e3)
        for part, sizes in parts.items():
            sizes.append(now[part])
    return moments, parts


def parts_at_peak(blocks: list[Block]) -> dict[str, int]:
    """Return the bytes of each part at the moment when all of them together are most, the largest first."""
    moments, parts = timeline(blocks)
    totals = [sum(sizes) for sizes in zip(*parts.values())]
    peak = totals.index(max(totals))
    found = {part: sizes[peak] for part, sizes in parts.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def most_of_parts(blocks: list[Block]) -> dict[str, int]:
    """Return the bytes of each part at the moment when it is largest."""
    return {part: max(sizes) for part, sizes in timeline(blocks)[1].items()}
