"""Where the time goes: named spans, and the clock that gives each moment of a run to one of them."""

import contextlib
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import wraps

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

ELSEWHERE = "other"  # in no span


class Timeline:
    """Adds up the time of each part of a run, in seconds. Each moment belongs to one part, so they add up to the whole.

    A part may lie inside another one: its time is then not the other's. On a GPU the moments are events in the stream
    that computes, so the times are the device's: what the host does while the device computes takes none, and where
    the device waits for the host, for data or for other ranks, it waits in the part that the host is in.

    What a step's parts take in a validation counts as validation, and in the first step, which compiles, as setup.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.parts = [ELSEWHERE]  # the innermost is the last
        self.seconds: dict[str, float] = defaultdict(float)
        self.pending: deque[tuple[str, torch.cuda.Event]] = deque()  # a part, and its end
        self.waits = False  # in a backward pass, for other ranks: if no gradient follows
        self.last = self._now()

    def enter(self, part: str) -> None:
        self._mark(self.parts[-1])
        whole = next((whole for whole in WHOLE if whole in self.parts), None)
        self.parts.append(whole if whole and part in STEP_PARTS else part)

    def leave(self) -> None:
        part = self.parts[-1]
        self._mark("communication" if part == "backward" and self.waits else part)
        self.parts.pop()
        self.waits = False

    def gradient_is_there(self) -> None:
        """Say that a gradient is complete: after the last one, the backward pass waits for those of other ranks."""
        self._mark(self.parts[-1])
        self.waits = True

    def model_begins(self) -> None:
        """Say that the model itself begins: what came before it in a forward pass was DDP's broadcast of buffers."""
        if self.parts[-1] == "forward":
            self._mark("communication")

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since this was called last. On a GPU it waits for the device."""
        self._mark(self.parts[-1])
        if self.pending:
            self.pending[-1][1].synchronize()
            self._add_up()
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def _now(self):
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _mark(self, part: str) -> None:
        """Give the time since the mark before to a part."""
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return  # a recording is no step
            self.pending.append((part, self._now()))
            if len(self.pending) >= 1000 and self.pending[500][1].query():
                self._add_up()
        else:
            now = self._now()
            self.seconds[part] += now - self.last
            self.last = now

    def _add_up(self) -> None:
        """Add up what the device has done."""
        while self.pending and self.pending[0][1].query():
            part, end = self.pending.popleft()
            self.seconds[part] += self.last.elapsed_time(end) / 1000
            self.last = end


STEP_PARTS = ("data wait", "data copy", "forward", "backward", "communication", "optimizer", "step")
WHOLE = ("validation", "setup")  # they have no parts
timeline: Timeline | None = None  # of this process, with --report


def start_timeline(device: torch.device, model: nn.Module) -> Timeline:
    """Begin to take the time of all spans, and of what DDP sends before `model`'s forward and after its backward."""
    global timeline
    timeline = Timeline(device)
    if dist.get_world_size() > 1:
        tell_of_gradients(model)
    return timeline


def tell_of_gradients(model: nn.Module) -> list[RemovableHandle]:
    """Let a model tell when its forward pass begins, and when each of its gradients is complete, until it is undone."""
    hooks = [model.register_forward_pre_hook(lambda *_: timeline and timeline.model_begins())]
    for parameter in model.parameters():
        hooks.append(parameter.register_post_accumulate_grad_hook(lambda _: timeline and timeline.gradient_is_there()))
    return hooks


def stop_timeline() -> None:
    global timeline
    timeline = None


# Tools that take names (NVTX, on AMD roctx) set a variable in what they start.
# Where Nsight Systems records one window only, `nsight_window` says when.
TOOLS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "ROCP_TOOL_LIBRARIES")
nsight = bool(torch.version.cuda or torch.version.hip) and any(name in os.environ for name in TOOLS)


def span(name: str) -> contextlib.AbstractContextManager:
    """Name a range of time: NVTX for Nsight Systems, `record_function` for torch.profiler, a part for the report.

    A number at its end is not part of the part's name: `step 12` is a `step`, and `data copy in 12` a `data copy`.
    Where nobody looks it costs a fraction of a microsecond (benchmarks/observers.py).
    """
    # No public name says whether a profiler records. Where this one is gone test_ranges_of_the_timeline fails.
    if timeline is None and not nsight and not torch.autograd._profiler_enabled():
        return UNSEEN
    return _seen(name)


UNSEEN = contextlib.nullcontext()


@contextlib.contextmanager
def _seen(name: str) -> Iterator[None]:
    clock, by_nsight = timeline, nsight
    if by_nsight:
        torch.cuda.nvtx.range_push(name)
    if clock:
        clock.enter(re.sub(r"( in)? \d+$", "", name))
    try:
        with torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else UNSEEN:
            yield
        if clock:
            clock.leave()
    except BaseException:
        if clock:
            clock.parts.pop()  # and no look at a device that may have failed
        raise
    finally:
        if by_nsight:
            torch.cuda.nvtx.range_pop()


@contextlib.contextmanager
def nsight_window() -> Iterator[None]:
    """Let `nsys profile -c cudaProfilerApi` record what runs inside."""
    global nsight
    before, nsight = nsight, True
    try:
        with torch.cuda.profiler.profile():
            yield
    finally:
        nsight = before


def in_span(name: str) -> Callable[[Callable], Callable]:
    """Name the time of a function. In compiled code nobody can look: there it belongs to the rest."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def named(*args, **kwargs):
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with span(name):
                return function(*args, **kwargs)

        return named

    return decorate


communication = in_span("communication")
