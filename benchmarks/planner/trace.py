"""One step of train_mp.py as rank 0 of a grid takes it, on tensors that have a shape and no data.

PyTorch's fake tensors and its fake process group run the model, the loss, the backward pass and the optimiser of rank 0
without memory, computation or other ranks. A recorder lists the operations, a tracker adds up the memory by part. So
there is no second formula of the model here that could drift away from it. Gradients go over dp-cp inside
DistributedDataParallel, which fake tensors cannot enter: its buckets are held and sent here as it does. What ranks
share out (`--shard`) they share out here, too. An optimiser that keeps less than Adam is counted as Adam. (PyTorch has
no public names for these tools: tests/distributed/test_communication.py.)
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed.helpers import GridScaler, TensorParallelGradients, share_loss
from distributed.parallelize import check_parallel, is_sequence_parallel, parallelize, shard_tokens
from distributed.sharding import mesh_of, share_out
from networks.attention import BACKENDS
from networks.vit import ViT
from train import build_model, build_scaler, forward_backward
from train_mp import make_step
from utils.comm import GROUPS, Grid
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.data.fields import Fields
from utils.data.loss_weights import distance
from utils.data.token_shard import TokenShard
from utils.measure.operations import Operation, Recorder, communication
from utils.optimizers import FUSED, build_optimizer
from utils.shards import own


@dataclass(frozen=True)
class Trace:
    """What rank 0 does in a step, and holds.

    Attributes:
        sizes: ranks of each group of the grid, by its axes.
        parameters: of rank 0, where they are shared out of the whole that is gathered.
        tokens: of its shard.
        operations: in their order.
        after_forward: bytes in use by part, when the last forward pass of the step is done.
        peak: bytes in use by part, when they are most.
    """

    config: Config
    sizes: dict[str, int]
    parameters: int
    tokens: int
    operations: list[Operation]
    after_forward: dict[str, int]
    peak: dict[str, int]

    def flops(self) -> Counter:
        """Return the floating point operations, by phase and kind."""
        found = Counter()
        for operation in self.operations:
            found[operation.phase, operation.kind] += operation.flops
        return +found

    def summary(self) -> dict:
        """Return it in numbers and words, for a file.

        Keys: ranks, parameters, tokens, peak; after_forward, by part; flops, by phase and kind; count and bytes of
        collectives, by group and kind; sent, the bytes that the rank sends, by group.
        """
        count, size = communication(self.operations)
        return {
            "ranks": self.sizes["dp"] * self.sizes["tp-cp"],
            "parameters": self.parameters,
            "tokens": self.tokens,
            "peak": sum(self.peak.values()),
            "after_forward": self.after_forward,
            "flops": {f"{phase} {kind}": n for (phase, kind), n in sorted(self.flops().items())},
            "count": {f"{group} {kind}": n for (group, kind), n in sorted(count.items())},
            "bytes": {f"{group} {kind}": n for (group, kind), n in sorted(size.items())},
            "sent": {
                group: sum(sent(kind, n, self.sizes[group]) for (g, kind), n in size.items() if g == group)
                for group in GROUPS
            },
        }


def join_fake(ranks: int) -> None:
    """Be rank 0 of `ranks`; collectives return at once and move nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Let tensors be fake ones. Weights are not drawn, for that looks at values; and many are still one operation."""
    kinds = mock.patch("torch.utils._foreach_utils._foreach_supported_types", [torch.Tensor, FakeTensor])
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch("torch.nn.init.trunc_normal_"), kinds:
        yield


def trace(dp: int, argv: Sequence[str], memory: bool = True) -> Trace:
    """Return what rank 0 does in a step of a run with these flags and `dp` copies of the model.

    Compiled or of another backend, a model is traced as it is without.

    Args:
        memory: whether to watch it, which takes half of the time.

    Raises ValueError where the flags are wrong, and for a layout that train_mp.py refuses.
    """
    config, _ = load_config(list(argv), chapter=2)
    join_fake(dp * config.tensor_parallel * config.context_parallel)
    try:
        grid = Grid(dist.get_world_size(), 0, config.tensor_parallel, config.context_parallel, config.parallel_order)
        check_parallel(config, grid)
        config = config.with_batches(dp)
        config = without_values(config)
        grid.create_groups()
        # A mesh is a tensor with values; and what goes over it is to be told from what cp sends, or dp.
        mesh = mesh_of(dist.new_group(grid.get_ranks("dp-cp")), torch.device("cpu"))
        with without_data():
            rank = Rank(config, grid, mesh)
            if config.shard != "none":
                rank.step()  # the first time, shapes of parts are found by making whole tensors: no real run does
            after_forward, peak = watch(rank) if memory else ({}, {})
            with rank.recorder:
                rank.step()
    finally:
        dist.destroy_process_group()
    sizes = {axes: grid.get_size(axes) for axes in GROUPS}
    return Trace(config, sizes, rank.parameters, rank.shard.length, rank.recorder.operations, after_forward, peak)


def without_values(config: Config) -> Config:
    """Return a configuration whose optimiser looks at no values: Adam for the others, which keep less."""
    return config if config.optimizer in FUSED else replace(config, optimizer="Adam")


class Rank:
    """A rank of a grid with blank data: its model, optimiser and step, as train_mp.py puts them together.

    Args:
        mesh: of dp-cp, for what is shared out.
    """

    def __init__(self, config: Config, grid: Grid, mesh: DeviceMesh | None = None):
        cpu, self.config = torch.device("cpu"), config
        self.shard, fields = shard_tokens(config, grid), Fields.blank(config)
        model = parallelize(serial_model(config, fields), config, grid, self.shard, cpu)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = share_out(model, config, grid, cpu, mesh)
        self.batch = blank_batch(config, fields, self.shard)
        self.optimizer = build_optimizer(self.model, config)
        self.gradients = TensorParallelGradients(self.model, grid, is_sequence_parallel(config, grid))
        self.scaler = build_scaler(config, cpu, partial(GridScaler, group=grid.get_group("tp-cp")))
        groups = {grid.get_group(axes).group_name: axes for axes in reversed(GROUPS)}
        self.recorder = Recorder(groups | ({mesh.get_group().group_name: "dp-cp"} if mesh else {}))
        uses_ddp = grid.get_size("dp-cp") > 1 and not config.noddp and config.shard == "none"
        self.buckets = Buckets(self.model, config, self.recorder) if uses_ddp else None
        shared = share_loss(config, grid, self.shard, cpu)
        loss = distance(config, fields, self.shard, cpu, **shared)
        self.passes = partial(forward_backward, self.model, scaler=self.scaler, config=config, distance=loss)
        self.train_step = make_step(self.passes, grid, self.gradients, loss)

    def step(self) -> None:
        self.train_step(*self.batch)
        self.update()

    def update(self) -> None:
        with self.recorder.phase("optimizer"):
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
            self.gradients.norm([p.grad for p in self.model.parameters()])
            self.optimizer.step()


class Tracker(MemTracker):
    """Tracks memory in steps of several passes through `model`, which PyTorch's refuses."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if module is self.model:
            self.reset_mod_stats()
        super()._pre_fw_hook(module, inputs)


def watch(rank: Rank) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes in use by part, when the last forward pass of a step is done, and when they are most."""
    tracker, after_forward = Tracker(rank.model), {}
    tracker.track_external(rank.model, rank.optimizer, *rank.batch)
    if rank.buckets:
        tracker.track_external(rank.buckets.memory)
    if rank.config.ema_decay is not None:
        average = torch.empty(sum(own(p).numel() for p in rank.model.parameters()))
        tracker.track_external(average)
    hook = rank.model.register_forward_hook(lambda *_: after_forward.update(parts_of(tracker, "current")))
    with tracker:
        for _ in range(2):  # in the second step the optimiser has its state
            rank.step()
    hook.remove()
    return after_forward, parts_of(tracker, "peak")


class Buckets:
    """Gradients as DistributedDataParallel holds and sends them: views of buckets, each summed as soon as it is full.

    The views stay where `zero_grad` drops the gradients. Buckets are filled in the order in which gradients come.
    """

    def __init__(self, model: nn.Module, config: Config, recorder: Recorder):
        self.recorder, self.waits = recorder, False
        parameters = list(model.parameters())
        self.memory = torch.empty(sum(p.numel() for p in parameters))
        self.cap, self.filled, self.sent = config.bucket_cap_mb * 2**20, 0, 0  # bytes
        parts = zip(parameters, self.memory.split([p.numel() for p in parameters]))
        self.hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, view=part.view_as(p))) for p, part in parts
        ]
        model.no_sync = self._no_sync

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def _arrived(self, parameter: nn.Parameter, view: torch.Tensor) -> None:
        parameter.grad = view
        if self.waits:
            return
        self.filled += view.nbytes
        if self.filled >= self.cap or self.sent + self.filled == self.memory.nbytes:
            self.recorder.add_collective("all_reduce", "dp-cp", self.filled, view.dtype)
            self.sent, self.filled = (self.sent + self.filled) % self.memory.nbytes, 0


def serial_model(config: Config, fields: Fields) -> ViT:
    """Return the model as it is on one device, with a kernel of attention that a CPU has."""
    # Fused kernels keep the same: the result, a number for each row, and no table of what was dropped.
    is_fused = config.attention in (*BACKENDS, "flash_attn")
    kernel = "flash" if is_fused else config.attention  # a CPU has no other
    model = build_model(replace(config, attention=kernel, init_from=None), fields)
    if is_fused:
        for block in model.blocks:
            block.attn.attn_drop = 0.0
    return model


def blank_batch(config: Config, fields: Fields, shard: TokenShard) -> list[torch.Tensor]:
    """Return a rank's part of a batch: input, targets, and what is known beside the state."""
    samples, K = config.local_batch_size * config.accumulation_steps, config.longest_rollout
    shapes = (shard.input_shape, shard.shape, shard.input_shape)
    inp, target, forced = ((size, *shape) for size, shape in zip(fields.sizes, shapes))
    return [torch.zeros(samples, *inp), torch.zeros(K, samples, *target), torch.zeros(K - 1, samples, *forced)]


def sent(kind: str, size: int, ranks: int) -> float:
    """Return the bytes that each of `ranks` ranks sends for collectives of `size` bytes, with ring algorithms."""
    return (2 if kind == "all_reduce" else 1) * size * (ranks - 1) / ranks


def parts_of(tracker: MemTracker, when: str) -> dict[str, int]:
    """Return the bytes in use by part: parameters, gradients, optimiser state, activations and so on."""
    (snapshot,) = tracker.get_tracker_snapshot(when).values()
    return {str(getattr(k, "value", k)): v for k, v in snapshot.items() if str(k) != "Total"}
