"""What would rank 0 of a large grid hold and send? One step of train_mp.py, on tensors that have a shape and no data.

    python benchmarks/simulate.py [--json FILE]                      the grids of chapter 2, on the section mp
    python benchmarks/simulate.py --dp 16 --config=mp_patch4 --local_batch_size=2 --tensor_parallel=8      yours

PyTorch's fake tensors and its fake process group run the model, the loss, the backward pass and the optimiser of rank 0
without memory, computation or other ranks. A tracker adds up the memory by part, a counter the collectives by group.
Gradients go over dp-cp inside DistributedDataParallel, which fake tensors cannot enter: what it holds is held here as
well, and its bytes are added by formula. What ranks share out (`--shard`) they share out here, too. An optimiser that
keeps less than Adam is counted as Adam. (PyTorch has no public names for these tools: test_communication.py.)
"""

import collections
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness.command import errors_in_one_line, parser_of
from benchmarks.harness.record import write_record
from distributed.helpers import GridScaler, TensorParallelGradients, share_loss
from distributed.parallelize import check_parallel, is_sequence_parallel, parallelize, shard_tokens
from distributed.sharding import mesh_of, share_out
from networks.attention import BACKENDS
from networks.vit import ViT
from train import build_model, forward_backward
from train_mp import make_step
from utils.comm import GROUPS, Grid
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.data.fields import Fields
from utils.data.loss_weights import distance
from utils.data.token_shard import TokenShard
from utils.measure.tables import markdown
from utils.optimizers import FUSED, build_optimizer
from utils.shards import own

MP, MP16 = (("--config=mp", f"--local_batch_size={n}") for n in (1, 16))
TP4, CP4, PLAIN, ULYSSES = (
    "--tensor_parallel=4", "--context_parallel=4", "--no_sequence_parallel", "--cp_attention=ulysses",
)  # fmt: skip
# name: data parallel size, flags
GRIDS = {
    "one rank": (1, MP),
    "tp 4, plain": (1, (*MP, TP4, PLAIN)),
    "tp 4": (1, (*MP, TP4)),
    "tp 4, re-gather": (1, (*MP, TP4, "--sp_regather")),
    "cp 4": (1, (*MP, CP4)),
    "cp 4, ulysses": (1, (*MP, CP4, ULYSSES)),
    "dp 64 x tp 4 x cp 4": (64, (*MP, TP4, CP4)),
    "dp 64 x tp 4 x cp 4, shared gradients": (64, (*MP, TP4, CP4, "--shard=gradients")),
    "dp 64 x tp 4 x cp 4, shared weights": (64, (*MP, TP4, CP4, "--shard=weights")),
    "16 samples: one rank": (1, MP16),
    "16 samples: tp 4, plain": (1, (*MP16, TP4, PLAIN)),
    "16 samples: tp 4": (1, (*MP16, TP4)),
    "16 samples: cp 4": (1, (*MP16, CP4)),
    "16 samples: cp 4, ulysses": (1, (*MP16, CP4, ULYSSES)),
}
MB = 1e6


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run inside it, and their bytes, by group and kind.

    `count` and `bytes` have keys such as ("tp", "all_reduce"). The bytes of a collective are those of its largest
    tensor: what is reduced, what is gathered, what is exchanged.
    """

    KINDS = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "alltoall_base_": "all_to_all",
    }

    def __init__(self, grid: Grid):
        super().__init__()
        self.axes = {grid.get_group(axes).group_name: axes for axes in reversed(GROUPS)}
        self.count, self.bytes = collections.Counter(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = self.KINDS[func.__name__.split(".")[0]]  # another kind is a KeyError: nothing goes uncounted
            leaves = tree_leaves(args)
            group = next(dist.ProcessGroup.unbox(x) for x in leaves if isinstance(x, torch.ScriptObject))
            key = (self.axes[group.group_name], kind)
            self.count[key] += 1
            self.bytes[key] += max(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def join_fake(ranks: int) -> None:
    """Be rank 0 of `ranks`; collectives return at once and move nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def simulate(dp: int, argv: Sequence[str]) -> dict:
    """Return what rank 0 holds and sends in a step of a run with these flags and `dp` copies of the model.

    Keys: ranks, parameters, tokens, peak; after_forward, bytes in use by part; count and bytes of collectives, by
    group and kind; sent, bytes by group.
    """
    config, _ = load_config(list(argv), chapter=2)
    join_fake(dp * config.tensor_parallel * config.context_parallel)
    try:
        grid = Grid(dist.get_world_size(), 0, config.tensor_parallel, config.context_parallel, config.parallel_order)
        check_parallel(config, grid)
        config = config.with_batches(dp)
        if config.optimizer not in FUSED:  # it looks at values; and it keeps less
            config = replace(config, optimizer="Adam")
        grid.create_groups()
        # A mesh is a tensor with values; and what goes over it is to be told from what cp sends, or dp.
        mesh = mesh_of(dist.new_group(grid.get_ranks("dp-cp")), torch.device("cpu"))
        # Weights have no values here, and drawing them looks at values.
        with FakeTensorMode(allow_non_fake_inputs=True), mock.patch("torch.nn.init.trunc_normal_"):
            return step_of(config, grid, mesh)
    finally:
        dist.destroy_process_group()


def step_of(config: Config, grid: Grid, mesh: DeviceMesh) -> dict:
    """Run two steps and return what `simulate` returns."""
    shard, fields, cpu = shard_tokens(config, grid), Fields.blank(config), torch.device("cpu")
    model = share_out(parallelize(serial_model(config, fields), config, grid, shard, cpu), config, grid, cpu, mesh)
    batch = blank_batch(config, fields, shard)
    optimizer = build_optimizer(model, config)
    gradients = TensorParallelGradients(model, grid, is_sequence_parallel(config, grid))
    scaler = GridScaler("cpu", grid.get_group("tp-cp"), enabled=config.amp_mode == "fp16")
    serial_step = partial(forward_backward, model, scaler=scaler, config=config)
    shared = share_loss(config, grid, shard, cpu)
    step = make_step(serial_step, grid, gradients, distance(config, fields, shard, cpu, **shared))
    size = sum(p.nbytes for p in model.parameters())  # of whole ones, where they are shared out

    def whole_step() -> None:
        step(*batch)
        scaler.unscale_(optimizer)
        scaler.update()
        gradients.norm([p.grad for p in model.parameters()])
        optimizer.step()

    tracker, counter, after_forward = MemTracker(), CollectiveCounter(grid), {}
    counter.axes[mesh.get_group().group_name] = "dp-cp"
    if config.shard != "none":
        whole_step()  # the first time, shapes of parts are found by making whole tensors, which no real run does
    tracker.track_external(model, optimizer, *batch)
    uses_ddp = grid.get_size("dp-cp") > 1 and not config.noddp and config.shard == "none"
    if uses_ddp:
        tracker.track_external(keep_gradients_in_buckets(model))
    if config.ema_decay is not None:
        average = torch.empty(sum(own(p).numel() for p in model.parameters()))
        tracker.track_external(average)
    model.register_forward_hook(lambda *_: after_forward.update(parts_of(tracker, "current")))
    with tracker, counter:
        for _ in range(2):  # in the second step the optimiser has its state
            tracker.reset_mod_stats(), counter.count.clear(), counter.bytes.clear()
            whole_step()
    if uses_ddp:
        counter.bytes["dp-cp", "all_reduce"] += size  # in buckets
    peak = parts_of(tracker, "peak")
    return {
        "ranks": dist.get_world_size(),
        "parameters": size // 4,
        "tokens": shard.length,
        "peak": sum(peak.values()),
        "after_forward": after_forward,
        "count": {f"{group} {kind}": n for (group, kind), n in sorted(counter.count.items())},
        "bytes": {f"{group} {kind}": n for (group, kind), n in sorted(counter.bytes.items())},
        "sent": {
            group: sum(sent(kind, n, grid.get_size(group)) for (g, kind), n in counter.bytes.items() if g == group)
            for group in GROUPS
        },
    }


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


def keep_gradients_in_buckets(model: torch.nn.Module) -> torch.Tensor:
    """Hold gradients as DistributedDataParallel does: views of buckets that stay when `zero_grad` drops the views."""
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    buckets = torch.empty(sum(sizes))
    for parameter, part in zip(parameters, buckets.split(sizes)):
        view = part.view_as(parameter)
        parameter.register_post_accumulate_grad_hook(lambda p, view=view: setattr(p, "grad", view))
    return buckets


def sent(kind: str, size: int, ranks: int) -> float:
    """Return the bytes that each of `ranks` ranks sends for collectives of `size` bytes, with ring algorithms."""
    return (2 if kind == "all_reduce" else 1) * size * (ranks - 1) / ranks


def parts_of(tracker: MemTracker, when: str) -> dict[str, int]:
    """Return the bytes in use by part: parameters, gradients, optimiser state, activations and so on."""
    (snapshot,) = tracker.get_tracker_snapshot(when).values()
    return {str(getattr(k, "value", k)): v for k, v in snapshot.items() if str(k) != "Total"}


def table(results: dict[str, dict]) -> str:
    """Return what rank 0 of each grid holds, and sends in a step, in MB (1e6 bytes)."""
    head = "grid, tokens, parameters, weights, optimiser, activations, peak, over tp, over cp, over dp-cp".split(", ")
    rows = []
    for name, r in results.items():
        parts, sent = r["after_forward"], [r["sent"][axes] for axes in ("tp", "cp", "dp-cp")]
        sizes = [parts["Parameter"], parts["Optstate"], parts["Activation"], r["peak"], *sent]
        count = f"{r['parameters'] / 1e6:.1f} million"
        rows.append([name, f"{r['tokens']:,}", count, *(f"{size / MB:,.0f}" for size in sizes)])
    return markdown(head, rows)


def main() -> None:
    parser = parser_of(__doc__, "train_mp.py")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--dp", type=int, default=1, help="copies of the model")
    args, flags = parser.parse_known_args()
    grids = {f"dp {args.dp} {' '.join(flags)}": (args.dp, flags)} if flags else GRIDS
    with errors_in_one_line():
        if args.dp < 1:
            raise ValueError(f"--dp is {args.dp}: take 1 or more")
        results = {name: simulate(dp, argv) for name, (dp, argv) in grids.items()}
    print("What rank 0 holds, and sends in a step, in MB (1e6 bytes):")
    print(table(results))
    if args.json:
        figures = {f"{name}: peak": r["peak"] for name, r in results.items()}
        if not flags:
            held = {name: r["after_forward"]["Activation"] for name, r in results.items()}
            figures["activations_tp4_over_tp1"] = held["tp 4"] / held["one rank"]
        write_record(args.json, figures, {}, grids=results)


if __name__ == "__main__":
    main()
