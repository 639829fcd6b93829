"""A stand-in for a CUDA graph on the CPU: it records operations with their tensors, and replays them without Python.

Like the real one it holds addresses and not values, runs no Python of the step again, does not let the host read a
value, nor draw random numbers from a generator that it was not told of; and what it records has not happened before
the first replay. So what a step forgets to keep in its place goes wrong here, too.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from utils.config.settings import Config
from utils.run.setup import settle_buckets


def always_ddp(model: torch.nn.Module, config: Config, group: dist.ProcessGroup) -> torch.nn.Module:
    """DDP over one rank as well: a single device then records its hooks and its collective."""
    return settle_buckets(torch.nn.parallel.DistributedDataParallel(model, process_group=group))


HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


class RecordedGraph:
    """Takes the place of `distributed.graphs.CudaGraph`."""

    def __init__(self, generators: list[torch.Generator]):
        self.generators = [torch.default_generator, *filter(None, generators)]
        self.operations: list[tuple] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        states = [generator.get_state() for generator in self.generators]
        recorder, wait = _Recorder(self), dist.Work.wait

        def wait_unseen(work: dist.Work, *args) -> bool:
            """gloo copies some results when it is waited for: that is part of the collective, and no operation."""
            with _disable_current_modes():
                return wait(work, *args)

        with recorder, mock.patch.object(dist.Work, "wait", wait_unseen):
            yield
        with torch.no_grad():  # undo it all: a recording runs nothing
            for tensor, before in recorder.before.values():
                tensor.copy_(before)
        for generator, state in zip(self.generators, states):
            generator.set_state(state)

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, out in self.operations:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again)):
                    if isinstance(new, Tensor):
                        if old.data_ptr() != new.data_ptr():
                            old.copy_(new)
                    elif isinstance(new, torch.ScriptObject) and function.namespace == "c10d":
                        dist.Work.unbox(new).wait()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph):
        super().__init__()
        self.graph = graph
        self.made: dict[int, torch.UntypedStorage] = {}  # storages made while recording
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # tensors from outside that were written to, and copies

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.name().split(".")[0] in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        generator = kwargs.get("generator")
        known = {g._cdata for g in self.graph.generators}
        assert generator is None or generator._cdata in known, "a generator that the graph does not know"
        for tensor in self._written(function, args, kwargs):
            storage = tensor.untyped_storage()
            if id(storage) not in self.made and id(tensor) not in self.before:
                self.before[id(tensor)] = tensor, tensor.detach().clone()
        out = function(*args, **kwargs)
        inputs = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in inputs:
                self.made[id(x.untyped_storage())] = x.untyped_storage()
        self.graph.operations.append((function, args, kwargs, out))
        return out

    @staticmethod
    def _written(function, args, kwargs) -> list[Tensor]:
        """The tensors that an operation writes to; a collective may write to all of its own."""
        named = [*zip(function._schema.arguments, args)]
        named += [(a, kwargs[a.name]) for a in function._schema.arguments if a.name in kwargs]
        everything = function.namespace == "c10d"
        values = [
            value for argument, value in named if everything or (argument.alias_info and argument.alias_info.is_write)
        ]
        return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
