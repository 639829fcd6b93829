"""What all checkers need."""

import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# Those that send the same have one name here; PyTorch 2.13 has new ones for two of them.
COLLECTIVES = {
    "all_to_all": "all_to_all_single", "all_gather": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}  # fmt: skip
COLLECTIVES |= {name: name for name in (
    "all_reduce all_to_all_single all_gather_into_tensor reduce_scatter_tensor broadcast reduce gather scatter send "
    "recv isend irecv all_gather_object all_reduce_coalesced all_gather_coalesced broadcast_object_list"
).split()}  # fmt: skip


class Wrong(Exception):
    """What is not right yet, and what to think about."""


def load(path: str) -> ModuleType:
    """Return the file at `path` as a module."""
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_counted(path: str) -> tuple[ModuleType, list[str]]:
    """Return the file at `path` as a module, and a list that grows by the name of each collective that it calls."""
    calls: list[str] = []
    is_inside = False

    def counted(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal is_inside
            if not is_inside:  # an old name calls the new one
                calls.append(name)
                given = [y for x in (*args, *kwargs.values()) for y in (x if isinstance(x, (list, tuple)) else [x])]
                check_tensors(name, [x for x in given if isinstance(x, torch.Tensor)])
            outer, is_inside = is_inside, True
            try:
                return function(*args, **kwargs)
            finally:
                is_inside = outer

        return call

    for theirs, ours in COLLECTIVES.items():
        if hasattr(dist, theirs):
            setattr(dist, theirs, counted(ours, getattr(dist, theirs)))  # this process is the solution's own
    sys.modules.pop("distributed.mappings", None)  # it would have the functions as they were
    return load(path), calls


def check_tensors(name: str, given: list[torch.Tensor]) -> None:
    """Hold what a collective gets to what NCCL wants, where gloo is content with more."""
    if not all(x.is_contiguous() for x in given):
        raise Wrong(f"{name} gets a tensor that is not contiguous: here it goes well, and GPUs refuse it")
    if len(kinds := {str(x.dtype).removeprefix("torch.") for x in given}) > 1:
        raise Wrong(f"{name} gets {' and '.join(sorted(kinds))}: take new tensors like the old, with x.new_empty(...)")


def close(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12)


tell: Callable[[str], None] = print  # check.py replaces it


def say(rank: int, what: str) -> None:
    """Tell that something is right: on all ranks, so all call this, and before anything that is found later."""
    among_ranks = dist.is_initialized()
    if among_ranks:
        dist.barrier()
    if rank == 0:
        tell(what)
    if among_ranks:
        dist.barrier()


def within(seconds: float, function: Callable[[], Any], otherwise: str) -> Any:
    """Return what a function returns, in a thread of its own; raise Wrong where it takes longer."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append((True, function()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise Wrong(otherwise)
    is_well, value = found[0]
    if not is_well:
        raise value
    return value
