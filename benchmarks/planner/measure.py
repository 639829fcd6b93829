"""What can this machine do? Ranks measure it together, and rank 0 prints it: a machine's file (machine.py).

    torchrun --nproc_per_node=2 benchmarks/planner/measure.py cpu 45

What operators reach is taken from steps of small models, operation by operation: there inputs lie in memory and caches
as they do in training, while a loop over one operator would find all in caches (by up to half too fast). All ranks work
at once, as in a run: what they share, they share here. What a step takes beside its operations is the host's. Rounds of
steps go on for so many seconds: others slow a machine down for a while, and each model's fastest round is taken.
"""

import contextlib
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.harness.bench import Bench  # noqa: E402
from benchmarks.harness.call import call, launch, reason  # noqa: E402
from benchmarks.harness.data import PLAIN  # noqa: E402
from benchmarks.harness.record import device_name  # noqa: E402
from benchmarks.node.machine import host_memory  # noqa: E402
from distributed.mappings import all_gather_single, reduce_scatter_single  # noqa: E402
from utils.device import allow_tf32, pick_device, synchronize  # noqa: E402
from utils.measure.operations import Operation, Recorder  # noqa: E402
from utils.ranks.start import start  # noqa: E402
from utils.ranks.world import World  # noqa: E402

# Width, heads, rows and columns of the image, samples: one block, patches of 8 x 8. The first is the host's.
MODELS = {
    "cpu": [
        (16, 2, 16, 16, 1), (64, 4, 64, 64, 4), (128, 8, 64, 128, 4), (128, 8, 64, 128, 16), (192, 6, 64, 128, 8),
        (384, 8, 64, 128, 4), (384, 8, 128, 256, 2), (1024, 8, 64, 64, 4),
    ],
    "cuda": [
        (64, 4, 64, 64, 1), (128, 8, 64, 128, 16), (384, 8, 360, 720, 2), (384, 8, 360, 720, 16),
        (1024, 8, 360, 720, 2), (1024, 8, 360, 720, 8), (1024, 8, 720, 1440, 1), (2048, 16, 360, 720, 4),
    ],
}  # fmt: skip
MODES = {"cpu": ("none", "bf16"), "cuda": ("none", "tf32", "bf16", "fp16")}  # all models in the first, some in others
STEPS, CALLS, LIMIT = 5, 7, 300  # LIMIT: seconds of all else
SECONDS, ROUNDS = 45, (2, 8)  # rounds of steps: as many as fit into so many seconds, but these at least and at most
CACHES = {"cpu": 2**25, "cuda": 2**27}  # bytes, more than they hold of what was there before
SIZES = {"cpu": (2**10, 2**14, 2**18, 2**21, 2**24), "cuda": (2**10, 2**14, 2**18, 2**22, 2**25, 2**28)}  # bytes


class Stopwatch(Recorder):
    """Records operations, and in `seconds` what each took."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.seconds, self.took = device, [], 0.0

    def _call(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        synchronize(self.device)
        begin = time.perf_counter()
        out = func(*args, **kwargs)
        synchronize(self.device)
        self.took = time.perf_counter() - begin
        return out

    def _add(self, operation: Operation) -> None:
        super()._add(operation)
        self.seconds.append(self.took)


class Curves:
    """Adds up amounts and seconds by name and size; a curve has the rate for each power of two of the size."""

    def __init__(self):
        self.found: dict[Any, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))

    def add(self, name: Any, size: float, amount: float, seconds: float) -> None:
        """Add what took so many seconds; the rate counts `amount`, and depends on `size`."""
        bin = self.found[name][round(math.log2(size))]
        bin[:] = bin[0] + amount, bin[1] + seconds

    def curves(self) -> Iterator[tuple[Any, list[list[float]]]]:
        for name, bins in self.found.items():
            yield name, [[2.0**power, amount / seconds] for power, (amount, seconds) in sorted(bins.items())]


def gathered(values: list) -> list:
    """Return the values of all ranks, one after another."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return [x for part in found for x in part]


@dataclass
class Steps:
    """What steps of a model took: whole ones that nobody watched, and in the others each operation (means).

    With `tf32` its float32 products were of TF32.
    """

    tf32: bool
    operations: list[Operation]
    seconds: list[float]
    whole: list[float]

    @property
    def step(self) -> float:
        return statistics.median(self.whole)


def time_steps(bench: Bench, seconds: float) -> Steps:
    """Take steps on all ranks at once, with and without a watch in turn: as many as fit, from one to STEPS of each."""
    watch, watched, whole = Stopwatch(bench.device), [], []
    bench.is_timed = False
    allow_tf32(bench.config.tf32)
    unwatched = contextlib.nullcontext()
    # The first of each, which make room for what they need, tell how many fit; ranks take as many.
    first = step_seconds(bench, watch, unwatched) + step_seconds(bench, watch, watch)
    fitting = seconds / max(gathered([first])) - 1
    for _ in range(round(min(max(fitting, 1), STEPS))):
        whole.append(step_seconds(bench, watch, unwatched))
        watch.seconds = []
        step_seconds(bench, watch, watch)
        watched.append(watch.seconds)
    took = [statistics.fmean(x) for x in zip(*gathered(watched))]
    return Steps(bench.config.tf32, watch.operations, took, gathered(whole))


def step_seconds(bench: Bench, watch: Stopwatch, watching: contextlib.AbstractContextManager) -> float:
    """Return what a step takes that all ranks begin at once, watched or not."""
    dist.barrier()
    synchronize(bench.device)
    begin = time.perf_counter()
    with watching:
        bench.step(*bench.batch)
        with watch.phase("optimizer"):
            bench.update(bench.config.lr)
    synchronize(bench.device)
    return time.perf_counter() - begin


def spread_of(values: list[float]) -> float:
    """Return the standard deviation of values over their median, as the median distance from it tells: few are wild."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(x - middle) for x in values) / middle


def best_steps(device: torch.device, local_rank: int, seconds: float) -> tuple[list[Steps], float]:
    """Return the steps of each model, and how far rounds of them lay apart.

    Of some rounds, minutes of a machine that others may slow down, each model's fastest is taken. Apart is half the
    range of a model's rounds over their median; of all models the median.
    """
    first, *modes = MODES[device.type]
    models = [(model, first) for model in MODELS[device.type]]
    models += [(model, mode) for mode in modes for model in MODELS[device.type][1::2]]
    benches = [Bench(flags_of(model, mode, device.type), local_rank) for model, mode in models]
    least, most = ROUNDS
    begin = time.perf_counter()
    share = seconds / least / len(benches)
    rounds = [[time_steps(bench, share) for bench in benches]]
    fitting = seconds / max(gathered([time.perf_counter() - begin]))
    for _ in range(round(min(max(fitting, least), most)) - 1):
        rounds.append([time_steps(bench, share) for bench in benches])
    apart = []
    for of_model in zip(*rounds):
        steps = [found.step for found in of_model]
        apart.append((max(steps) - min(steps)) / 2 / statistics.median(steps))
    return [min(of_model, key=lambda found: found.step) for of_model in zip(*rounds)], statistics.median(apart)


def flags_of(model: tuple[int, ...], mode: str, device: str) -> list[str]:
    """Return the flags of one of MODELS in one of MODES."""
    width, heads, rows, columns, samples = model
    return [
        *PLAIN, f"--embed_dim={width}", f"--num_heads={heads}", "--depth=1", "--img_size", str(rows), str(columns),
        f"--local_batch_size={samples}", f"--device={device}", "--no_residual",
        *(["--tf32"] if mode == "tf32" else ["--no_tf32", f"--amp_mode={mode}"]),
        "--n_in_channels=20", "--n_out_channels=20", "--plot_channels=None",
    ]  # fmt: skip


def computing(device: torch.device, local_rank: int, seconds: float) -> dict[str, Any]:
    """Return what ranks reach that compute at once: products, attention, moving, host and noise of a machine."""
    products, attention, moving = Curves(), Curves(), Curves()
    host, noises = 0.0, []
    best, drift = best_steps(device, local_rank, seconds)
    for found in best:
        operations, seconds, step = found.operations, found.seconds, found.step
        if device.type == "cuda":  # what it takes to ask for an operation, and to wait for it
            launch = min(seconds)
            seconds = [max(took - launch, 1e-7) for took in seconds]
        if not host:
            host = max((step - sum(seconds) * (device.type == "cpu")) / len(operations), 1e-7)
            continue
        # What a step takes beside operations and host, such as to give memory back, grows with their sizes.
        beside = host * len(operations)
        whole = step - beside if device.type == "cpu" else min(step, sum(seconds))
        noises.append(spread_of(found.whole))
        for op, took in zip(operations, seconds):
            took *= whole / sum(seconds)
            dtype, moved = str(op.dtype).removeprefix("torch."), op.read + op.written
            if op.kind == "product":
                dtype = "tfloat32" if dtype == "float32" and found.tf32 else dtype
                products.add(dtype, op.flops, op.flops, took)
            elif op.kind == "attention":
                way, (samples, heads, *_, d) = "backward" if "backward" in op.name else "forward", op.sizes
                attention.add((dtype, f"{way} {d}"), op.flops / samples / heads, op.flops, took)
            elif moved:
                moving.add(op.name, moved, moved, took)
                moving.add("", moved, moved, took)
    by_dtype: dict[str, dict] = defaultdict(dict)
    for (dtype, name), curve in attention.curves():
        by_dtype[dtype][name] = curve
    return {
        "products": dict(products.curves()), "attention": by_dtype, "moving": dict(moving.curves()),
        "host": host, "noise": max(statistics.median(noises), 1e-4), "drift": drift,
    }  # fmt: skip


def collective_seconds(kind: str, size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the time of a collective whose largest tensor has so many bytes: of the rank that took longest."""
    n = dist.get_world_size(group)
    whole = torch.zeros(size // 4 // n * n, device=device)
    part = whole[: len(whole) // n].clone()
    calls = {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(all_gather_single, whole, part, group=group),
        "reduce_scatter": partial(reduce_scatter_single, part, whole, group=group),
        "all_to_all": partial(dist.all_to_all_single, whole, whole.clone(), group=group),
    }
    caches, times = torch.zeros(CACHES[device.type] // 4, device=device), []
    for _ in range(2 + CALLS):
        caches.add_(1)  # what is sent then lies in memory, as after other work
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        calls[kind]()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(gathered(times[2:]))


def sending(groups: dict[int, list[list[int]]], device: torch.device) -> dict[str, Any]:
    """Return a link of a machine: what collectives take in groups of so many ranks, all of a size at once."""
    found: dict[str, list[list[float]]] = {}
    for n, of_size in groups.items():
        for ranks in of_size:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                ours = group
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            found[f"{kind} {n}"] = [[size, collective_seconds(kind, size, ours, device)] for size in SIZES[device.type]]
    least, most = min(groups), max(groups)
    size, seconds = found[f"all_gather {most}"][-1]
    alpha = found[f"all_reduce {least}"][0][1] / 2 / math.ceil(math.log2(least))
    return {"alpha": alpha, "bandwidth": (most - 1) / most * size / seconds, "collectives": found}


def halvings(ranks: list[int]) -> dict[int, list[list[int]]]:
    """Return how ranks divide into groups of neighbours: by the size of a group, from 2 on by doubling, and all."""
    sizes = [n for n in (2**i for i in range(1, 17)) if n < len(ranks) and len(ranks) % n == 0]
    return {n: [ranks[i : i + n] for i in range(0, len(ranks), n)] for n in [*sizes, len(ranks)] if n > 1}


def links(device: torch.device, per_node: int) -> dict[str, Any]:
    """Return the links of a machine that there are: in a node, and between nodes with a rank of each."""
    ranks = list(range(dist.get_world_size()))
    nodes = [ranks[i : i + per_node] for i in range(0, len(ranks), per_node)]
    inside = joined(map(halvings, nodes)) if per_node > 1 else {}
    across = joined(halvings(list(column)) for column in zip(*nodes)) if len(nodes) > 1 else {}
    return {place: sending(groups, device) for place, groups in (("node", inside), ("network", across)) if groups}


def joined(groups: Iterable[dict[int, list[list[int]]]]) -> dict[int, list[list[int]]]:
    """Return the groups of several places together, by size."""
    found: dict[int, list[list[int]]] = defaultdict(list)
    for of_size in groups:
        for n, lists in of_size.items():
            found[n] += lists
    return found


def room(device: torch.device, per_node: int) -> tuple[float, float]:
    """Return the bytes of memory that a rank has, and those of them that no tensor can have."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free - torch.cuda.memory_reserved(device)
    return host_memory() / per_node, psutil.Process().memory_info().rss


def copying(device: torch.device) -> float | None:
    """Return the bytes per second from locked memory to a rank's GPU; None where the device is the host."""
    if device.type == "cpu":
        return None
    source = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(CALLS):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        source.to(device, non_blocking=True)
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return source.nbytes / statistics.median(gathered(times))


def main(world: World, argv: list[str]) -> None:
    device = pick_device(argv[0], world.local_rank)
    per_node = gathered([platform.node()]).count(platform.node())
    before = room(device, per_node)
    found = {
        "name": f"{per_node} x {device_name()} a node, {world.size // per_node} node(s)", "source": "measured",
        "device": device.type, "per_node": per_node, **computing(device, world.local_rank, float(argv[1])),
        "links": links(device, per_node), "copy": copying(device), "storage": None,
        "sources": {"": f"measured with PyTorch {torch.__version__}, {platform.platform()}"},
    }  # fmt: skip
    # On a GPU what libraries and collectives took is known now; in a process what models left would count.
    found["memory"], found["beside"] = room(device, per_node) if device.type == "cuda" else before
    if world.rank == 0:
        print(json.dumps(found))


def measure(device: str, ranks: int, storage: float | None = None, seconds: float = SECONDS) -> dict[str, Any]:
    """Return what the ranks of a machine measure: what a machine's file holds.

    Args:
        storage: bytes per second that a node reads, if known.
        seconds: how long to take steps, more or less.

    Raises ValueError where they cannot.
    """
    command, env = launch(__file__, ranks)
    try:
        code, told, errors = call([*command, device, str(seconds)], env, LIMIT + seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{ranks} ranks took over {LIMIT + seconds:.0f} s to measure: can they reach each other?"
        ) from None
    if code:
        raise ValueError(reason(errors))
    found = json.loads(next(line for line in reversed(told.splitlines()) if line.startswith("{")))
    return found | {"storage": storage}


if __name__ == "__main__":
    start(main, sys.argv[1:])
