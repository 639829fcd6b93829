"""One step under torch.profiler: which operators take its time and its memory, and what is in memory at the peak."""

import json
import math
import os
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from utils.device import synchronize
from utils.measure.memory_timeline import Block, Event, Storages, memory_blocks, memory_moments, storages
from utils.measure.module_times import module_rows, name_modules

EMPTY, EMPTY_CALLS = "operators with nothing to do", 50
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # what a GPU does, as a trace calls it


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
        modules: of each module its name, calls, and seconds in the forward and in the backward pass.
    """

    calls: Counter
    seconds: dict[str, float]
    allocated: dict[str, int]
    working: float | None
    waiting: float
    is_recorded: bool
    peak: int
    blocks: list[Block]
    modules: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class StepProfiler:
    """Profiles one step. The trace stays as a file that Perfetto opens, if there is a path for it."""

    device: torch.device
    known: Callable[[], dict[str, Iterable[Tensor]]]  # gives the tensors that live longer than a step, by part
    path: Path | None
    model: nn.Module | None = None  # whose modules are named in the trace
    profiler: profile | None = None
    handles: Sequence[RemovableHandle] = ()

    @property
    def is_on(self) -> bool:
        return self.profiler is not None

    def start(self) -> None:
        synchronize(self.device)
        self.before = storages(self.known(), self.device)
        profiler = profile(activities=activities(self.device), profile_memory=True, acc_events=True)
        profiler.start()
        self.profiler, self.handles = profiler, name_modules(self.model) if self.model else ()
        one = torch.ones(1, 1, device=self.device)
        with record_function(EMPTY):
            for _ in range(EMPTY_CALLS):
                one @ one

    def stop(self) -> StepProfile:
        """Return what happened since the start. Raises OSError where there is no room for the trace."""
        synchronize(self.device)
        profiler = self.profiler
        self.close()
        with tempfile.TemporaryDirectory() as folder:
            path = self.path or Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return read_trace(events, self.device.type, self.before)

    def close(self) -> None:
        """End a profile in progress."""
        profiler, self.profiler = self.profiler, None
        for handle in self.handles:
            handle.remove()
        self.handles = ()
        if profiler:
            profiler.stop()


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what can be profiled: Nsight Systems, where it looks on, has the GPU's counters for itself."""
    on_gpu = device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" not in os.environ
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu


def read_trace(events: list[Event], device_type: str, before: Storages) -> StepProfile:
    """Return what a trace tells of a step; `before` are the storages known at its start.

    (`key_averages()` counts the empty calls, too, and gives memory to `aten::empty`, not to the operator that asked.)
    """
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    annotations = [e for e in spans if e.get("cat") == "user_annotation"]
    (empty,) = (e for e in annotations if e["name"] == EMPTY)
    begin = empty["ts"] + empty["dur"]
    own = own_times([e for e in spans if e.get("cat") == "cpu_op"])
    empty_call = sum(time for e, time in own if e["ts"] < begin) / EMPTY_CALLS
    own = [(e, time) for e, time in own if e["ts"] >= begin]
    moments = [e for e in memory_moments(events, device_type) if e["ts"] >= begin]
    seconds: dict[str, float] = defaultdict(float)
    costs = [(e, max(time - empty_call, 0) / 1e6) for e, time in own]
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
        of_call: dict[Any, float] = defaultdict(float)
        for e in kernels:
            of_call[e["args"].get("External id")] += e["dur"] / 1e6
            seconds[launched_by.get(e["args"].get("External id"), e["name"])] += e["dur"] / 1e6
        busy, working = covered(kernels) / 1e6, covered([e for e in kernels if not sends(e)]) / 1e6
        working, waiting = (working, busy - working) if kernels else (None, 0.0)
        costs = [(e, of_call.get(e.get("args", {}).get("External id"), 0.0)) for e, _ in own]
    return StepProfile(
        calls=Counter(e["name"] for e, _ in own),
        seconds=seconds,
        allocated=allocations([e for e, _ in own], moments),
        working=working,
        waiting=waiting,
        peak=max((e["args"]["Total Allocated"] for e in moments), default=0),
        is_recorded=any(e["name"] in GRAPH_LAUNCHES for e in spans),
        blocks=memory_blocks(moments, annotations, before),
        modules=module_rows(costs, annotations),
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
