"""One step under torch.profiler: which operators take its time and its memory, and what is in memory at the peak."""

import json
import math
import os
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from utils.profiling import synchronize

EMPTY, EMPTY_CALLS = "operators with nothing to do", 50
LEFT = {"forward": "activations", "backward": "gradients", "optimizer": "optimizer"}  # what a span leaves in memory
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
OTHER = 0  # an address that nothing has
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # what a GPU does, as a trace calls it
DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as a trace numbers them; AMD's GPUs are `cuda`, too
Event = dict[str, Any]  # of a trace in Chrome's format; times in microseconds
Storages = dict[int, tuple[str, int]]  # part and bytes of each storage, by its address


@dataclass
class StepProfile:
    """What one step did.

    Args:
        calls, seconds, allocated: of each operator without those that it calls. On a GPU the seconds are those
            of its kernels. `allocated` is in bytes, whatever became of them.
        working: seconds in which operators worked, without what it takes to start them; on a GPU, its kernels, and
            None where none were seen.
        waiting: seconds in which operators waited for other ranks, but those in a `communication` span; on a GPU
            seconds in which no kernels ran but those that communicate, in a span or not.
        is_recorded: whether CUDA graphs were replayed.
        peak: on a GPU the most bytes that its allocator gave out.
        blocks: all that was in memory.
    """

    calls: Counter
    seconds: dict[str, float]
    allocated: dict[str, int]
    working: float | None
    waiting: float
    is_recorded: bool
    peak: int
    blocks: "list[Block]"


class StepProfiler:
    """Profiles one step. The trace stays as a file that Perfetto opens, if there is a path for it.

    Args:
        known: gives the tensors that live longer than a step, by part: `weights`, `gradients` and so on.
    """

    def __init__(self, device: torch.device, known: Callable[[], dict[str, Iterable[Tensor]]], path: Path | None):
        self.device, self.known, self.path = device, known, path
        self.profiler: profile | None = None

    @property
    def is_on(self) -> bool:
        return self.profiler is not None

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints its own steps
        synchronize(self.device)
        self.before = storages(self.known(), self.device)
        profiler = profile(activities=activities(self.device), profile_memory=True, acc_events=True)
        profiler.start()
        self.profiler = profiler
        one = torch.ones(1, 1, device=self.device)
        with record_function(EMPTY):
            for _ in range(EMPTY_CALLS):
                one @ one

    def stop(self) -> StepProfile:
        """Return what happened since the start. Raises OSError where there is no room for the trace."""
        synchronize(self.device)
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = self.path or Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return read_trace(events, self.device.type, self.before)

    def close(self) -> None:
        """Drop a profile in progress."""
        profiler, self.profiler = self.profiler, None
        if profiler:
            profiler.stop()


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what can be profiled: Nsight Systems, where it looks on, has the GPU's counters for itself."""
    on_gpu = device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" not in os.environ
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu


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


def read_trace(events: list[Event], device_type: str, before: Storages) -> StepProfile:
    """Return what a trace tells of a step; `before` are the storages known at its start."""
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    annotations = [e for e in spans if e.get("cat") == "user_annotation"]
    (empty,) = (e for e in annotations if e["name"] == EMPTY)
    begin = empty["ts"] + empty["dur"]
    own = own_times([e for e in spans if e.get("cat") == "cpu_op"])
    empty_call = sum(time for e, time in own if e["ts"] < begin) / EMPTY_CALLS
    own = [(e, time) for e, time in own if e["ts"] >= begin]
    moments = [e for e in memory_moments(events, device_type) if e["ts"] >= begin]
    seconds: dict[str, float] = defaultdict(float)
    if device_type == "cpu":
        for e, time in own:
            seconds[e["name"]] += time / 1e6
        mine = [(e, time) for e, time in own if e["tid"] == empty["tid"]]
        working = sum(max(time - empty_call, 0) for e, time in mine if not sends(e)) / 1e6
        spans_of_it = [e for e in annotations if e["name"] == "communication"]
        waiting = sum(time for e, time in mine if sends(e) and not any(lies_in(e, s) for s in spans_of_it)) / 1e6
    else:
        launched_by = {e["args"]["External id"]: e["name"] for e, _ in own if "External id" in e.get("args", {})}
        kernels = [e for e in spans if e.get("cat") in ON_GPU and e["ts"] >= begin]
        for e in kernels:
            seconds[launched_by.get(e["args"].get("External id"), e["name"])] += e["dur"] / 1e6
        busy, working = covered(kernels) / 1e6, covered([e for e in kernels if not sends(e)]) / 1e6
        working, waiting = (working, busy - working) if kernels else (None, 0.0)
    return StepProfile(
        calls=Counter(e["name"] for e, _ in own),
        seconds=seconds,
        allocated=allocations([e for e, _ in own], moments),
        working=working,
        waiting=waiting,
        peak=max((e["args"]["Total Allocated"] for e in moments), default=0),
        is_recorded=any(e["name"] in GRAPH_LAUNCHES for e in spans),
        blocks=memory_blocks(moments, annotations, before),
    )


def own_times(calls: list[Event]) -> list[tuple[Event, float]]:
    """Return each call with the time that is its own, not that of calls inside it. `calls` come in their order."""
    own = [call["dur"] for call in calls]
    open_calls: dict[Any, list[int]] = defaultdict(list)  # of each thread
    for i, call in enumerate(calls):
        stack = open_calls[call["tid"]]
        while stack and calls[stack[-1]]["ts"] + calls[stack[-1]]["dur"] <= call["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= call["dur"]
        stack.append(i)
    return list(zip(calls, own))


def sends(event: Event) -> bool:
    """Whether an operator or a kernel communicates: those of PyTorch's c10d, and of NCCL (RCCL has the same name)."""
    return "c10d" in event["name"] or "nccl" in event["name"]


def lies_in(inner: Event, outer: Event) -> bool:
    return inner["tid"] == outer["tid"] and outer["ts"] <= inner["ts"] < outer["ts"] + outer["dur"]


def covered(events: list[Event]) -> float:
    """Return the time in which at least one event went on. They come in their order."""
    total, reached = 0.0, -math.inf
    for e in events:
        end = e["ts"] + e["dur"]
        total += max(end - max(e["ts"], reached), 0)
        reached = max(reached, end)
    return total


def allocations(calls: list[Event], moments: list[Event]) -> dict[str, int]:
    """Return the bytes that each operator allocated: the innermost in the same thread, but those that only allocate."""
    of_thread: dict[Any, list[Event]] = defaultdict(list)
    for call in calls:
        if not call["name"].startswith("aten::empty"):
            of_thread[call["tid"]].append(call)
    starts = {thread: [call["ts"] for call in inside] for thread, inside in of_thread.items()}
    total: dict[str, int] = defaultdict(int)
    for moment in moments:
        if moment["args"]["Bytes"] > 0:
            inside, ts = of_thread[moment["tid"]], moment["ts"]
            earlier = reversed(inside[: bisect_right(starts.get(moment["tid"], []), ts)])
            owner = next((call["name"] for call in earlier if call["ts"] + call["dur"] >= ts), "no operator")
            total[owner] += moment["args"]["Bytes"]
    return total


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
