"""Which modules of the model, and which observers of the run, take the time (`--report time`)."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from utils.measure.memory_timeline import Event
from utils.observers import Observer

MODULE = "module "  # how ranges of modules begin in a trace
BACKWARD = "autograd::engine::evaluate_function: "
HOOKS = [name for name, method in vars(Observer).items() if callable(method) and name not in ("begin", "close")]


def name_modules(model: nn.Module) -> list[RemovableHandle]:
    """Let the forward pass of each module be a range of traces, until this is undone; not inside compiled modules."""
    handles, ranges = [], []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            ranges.append(record_function(f"{MODULE}{name}"))
            ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    def visit(name: str, module: nn.Module) -> None:
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
        if "forward" not in vars(module):  # as compile_modules leaves it
            for child, inner in module.named_children():
                visit(f"{name}.{child}", inner)

    visit("model", model)
    return handles


def module_rows(calls: list[tuple[Event, float]], ranges: Iterable[Event]) -> list[dict[str, Any]]:
    """Return how often each module ran in a step, and the seconds of its operators, with those of modules inside it.

    Modules of one name but for numbers count together. An operator of the backward pass belongs to the modules whose
    forward pass it differentiates; autograd numbers both alike.

    Args:
        calls: operators in their order, with the seconds that are their own (on a GPU, those of their kernels).
        ranges: of `name_modules`.
    """
    inside: dict[Any, list[Event]] = defaultdict(list)  # of each thread: what is open
    of_number: dict[int, list[str]] = {}
    times: dict[str, Counter] = {"calls": Counter(), "forward": Counter(), "backward": Counter()}
    seconds = {id(call): own for call, own in calls}
    modules = [e for e in ranges if e["name"].startswith(MODULE)]
    known, entries = {_plain(e["name"]) for e in modules}, [*(call for call, _ in calls), *modules]
    for e in sorted(entries, key=lambda e: (e["ts"], -e["dur"])):
        stack = inside[e["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= e["ts"]:
            stack.pop()
        stack.append(e)
        if id(e) not in seconds:
            times["calls"][_plain(e["name"])] += 1
            continue
        innermost = next((outer for outer in reversed(stack) if id(outer) not in seconds), None)
        if innermost is not None:
            names = _with_those_outside(_plain(innermost["name"]), known)
            times["forward"].update(dict.fromkeys(names, seconds[id(e)]))
            of_number[e.get("args", {}).get("Sequence number")] = names  # of several the last: it is differentiated
        elif outer := next((e for e in reversed(stack) if e["name"].startswith(BACKWARD)), None):
            names = of_number.get(outer.get("args", {}).get("Sequence number"), ())
            times["backward"].update(dict.fromkeys(names, seconds[id(e)]))
    total = times["forward"] + times["backward"]
    return [
        {"module": name, "calls": times["calls"][name]}
        | {part: float(times[part][name]) for part in ("forward", "backward")}
        for name in sorted(times["calls"], key=lambda name: -total[name])
    ]


def _with_those_outside(name: str, known: set[str]) -> list[str]:
    """Return a module and those that it lies in, also where what runs it now is not they but a recomputation."""
    parts = name.split(".")
    return [outer for i in range(len(parts)) if (outer := ".".join(parts[: i + 1])) in known]


def _plain(name: str) -> str:
    return re.sub(r"\.\d+", ".*", name.removeprefix(MODULE))


class ObserverTimes:
    """Counts how long the observers of a run take, by class and hook."""

    def __init__(self, observers: Iterable[Observer]):
        self.calls, self.seconds = Counter(), Counter()
        for observer in observers:
            for hook in HOOKS:
                if getattr(type(observer), hook) is not getattr(Observer, hook):
                    setattr(observer, hook, self._timed(getattr(observer, hook), f"{type(observer).__name__}.{hook}"))

    def _timed(self, method: Callable, name: str) -> Callable:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.calls[name] += 1
                self.seconds[name] += time.perf_counter() - start

        return timed

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each hook, the longest first."""
        return [{"observer": x, "calls": self.calls[x], "seconds": s} for x, s in self.seconds.most_common()]
