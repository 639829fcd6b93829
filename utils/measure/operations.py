"""Every operation of a step: what it computes, moves and sends. Of a run, or of one that has shapes and no data."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

KINDS = ("product", "attention", "memory", "collective")
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
}
ATTENTION = "_scaled_dot_product_"  # so the names of SDPA's kernels begin
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # and where the first of the two matrices stands
OVERWRITES = ("copy_", "zero_", "fill_")  # they do not read what they write to


@dataclass(frozen=True, slots=True)
class Operation:
    """What one call of PyTorch's dispatcher does.

    Attributes:
        kind: product (of matrices), attention (a fused kernel), collective, or memory: all that computes little.
        phase: forward, backward (with what it computes again), or what `Recorder.phase` says.
        module: in a forward pass the innermost module at work, such as ViT.blocks.0.mlp.fc1; `Global` outside of all.
        dtype: of what it returns.
        name: of the operator, such as addmm; of a collective all_reduce, all_gather, reduce_scatter or all_to_all.
        read, written: bytes of tensors, each part of a storage once.
        flops: floating point operations, two a multiply-add. Those of a fused kernel's backward pass include the
            scores that it computes again.
        sizes: of a product (matrices, m, k, n); of attention (B, h, N, M, d) with N queries and M keys.
        axes: of the grid, over whose group a collective goes.
        sent: bytes of a collective's largest tensor: what is reduced, what is gathered, what is exchanged.
    """

    kind: str
    phase: str
    module: str
    dtype: torch.dtype
    name: str
    read: int
    written: int
    flops: int = 0
    sizes: tuple[int, ...] = ()
    axes: str = ""
    sent: int = 0


class Recorder(TorchDispatchMode):
    """Lists the operations that run inside it, in their order, each time anew. Views, which move nothing, are left out.

    Args:
        groups: the axes of each process group, by its name. A collective over another group is a KeyError, as is one
            of a kind that is not known: nothing goes uncounted.
    """

    def __init__(self, groups: Mapping[str, str] | None = None):
        super().__init__()
        self.groups = dict(groups or {})
        self.operations: list[Operation] = []
        self._phase = "forward"
        self._tracker = ModuleTracker()

    def __enter__(self) -> "Recorder":
        self.operations.clear()
        self._tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracker.__exit__(*error)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give operations inside this phase, but those of a backward pass."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @property
    def _now(self) -> str:
        return "backward" if self._tracker.is_bw else self._phase

    def add_collective(self, name: str, axes: str, size: int, dtype: torch.dtype) -> None:
        """Add a collective of so many bytes that others send, such as DistributedDataParallel in a backward pass."""
        operation = Operation("collective", self._now, "", dtype, name, read=size, written=size, axes=axes, sent=size)
        self._add(operation)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # such as a DTensor: it comes again as operations on its parts
        kwargs = kwargs or {}
        out = self._call(func, args, kwargs)
        inputs, outputs = tensors((args, kwargs)), tensors(out)
        if func.namespace == "c10d":
            self._add(self._operation("collective", inputs, inputs[:1], **self._sent(func, args, inputs)))
        elif not _moves_nothing(func, inputs, outputs):
            self._add(self._computation(func, args, kwargs, inputs, out))
        return out

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def _call(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        return func(*args, **kwargs)

    def _sent(self, func: torch._ops.OpOverload, args: tuple, inputs: list[Tensor]) -> dict[str, Any]:
        group = next(dist.ProcessGroup.unbox(x) for x in tree_leaves(args) if isinstance(x, torch.ScriptObject))
        return {
            "name": COLLECTIVES[_name(func)],
            "axes": self.groups[group.group_name],
            "sent": max(x.nbytes for x in inputs),
        }

    def _computation(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, inputs: list, out: Any) -> Operation:
        name, changed = _name(func), _changed(func, args, kwargs)
        read = [x for x in inputs if not (name in OVERWRITES and any(x is y for y in changed))]
        about: dict[str, Any] = {"name": name, "read": read, "written": [*tensors(out), *changed]}
        if name.startswith(ATTENTION):
            is_backward = "backward" in name
            q, k = args[is_backward : is_backward + 2]
            B, h, N, d = q.shape
            M = k.shape[2]
            flops = (10 if is_backward else 4) * B * h * N * M * d
            return self._operation("attention", **about, sizes=(B, h, N, M, d), flops=flops)
        if name in PRODUCTS:
            a, b = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            sizes = (a.shape[0] if a.ndim == 3 else 1, a.shape[-2], a.shape[-1], b.shape[-1])
            return self._operation("product", **about, sizes=sizes, flops=2 * math.prod(sizes))
        return self._operation("memory", **about)

    def _operation(self, kind: str, read: list[Tensor], written: list[Tensor], **about: Any) -> Operation:
        # In a backward pass the tracker is not sure of the module.
        module = "" if self._tracker.is_bw else max(self._tracker.parents, key=len)
        dtype = (written or read)[0].dtype
        return Operation(kind, self._now, module, dtype, read=size(read), written=size(written), **about)


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested values."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def size(parts: Iterable[Tensor]) -> int:
    """Return the bytes of tensors: each once, and of one that is expanded what is there."""
    found = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x for x in parts}
    return sum(
        x.itemsize * math.prod(n for n, stride in zip(x.shape, x.stride()) if stride or not n) for x in found.values()
    )


def _name(func: torch._ops.OpOverload) -> str:
    return func.__name__.split(".")[0]


def _changed(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    given = {a.name: x for a, x in zip(func._schema.arguments, args)} | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors([given[name] for name in written if name in given])


def _moves_nothing(func: torch._ops.OpOverload, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether an operation makes room for a tensor, looks at one in another way, or asks for a property of it."""
    if func._schema.is_mutable:
        return _name(func) in ("set_", "resize_", "record_stream")
    if not outputs or _name(func).startswith(("empty", "new_empty")):
        return True
    there = {x.untyped_storage()._cdata for x in inputs}
    return all(x.untyped_storage()._cdata in there for x in outputs)


def communication(operations: Iterable[Operation]) -> tuple[Counter, Counter]:
    """Return how many collectives there are, and their bytes (`sent`), by axes and kind: ("tp", "all_reduce")."""
    count, sent = Counter(), Counter()
    for operation in operations:
        if operation.kind == "collective":
            count[operation.axes, operation.name] += 1
            sent[operation.axes, operation.name] += operation.sent
    return count, sent
