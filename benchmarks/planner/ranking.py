"""All layouts of a training on a machine, by the time of a step; the best of them, and why the others lose."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist

from benchmarks.planner.layouts import KEYS, Layout, groups_of, is_taken, models, orders, parts_of, shards_of, variants
from benchmarks.planner.machine import Machine
from benchmarks.planner.outlook import Estimate, Outlook
from benchmarks.planner.sketch import End, Sketch, end_of_step, sketch
from benchmarks.planner.trace import join_fake
from utils.comm import Grid
from utils.config.settings import Config
from utils.data.fields import Fields
from utils.device import cores_in_reach

Sketched = tuple[Layout, Sketch, End]
CLOSE = 0.02  # of two layouts whose times differ by less, the simpler one is better


def sketches(config: Config, given: frozenset[str], model: tuple[int, int]) -> list[Sketched]:
    """Return what rank 0 does in each variant of a model on tp x cp ranks, and at the end of a step.

    Args:
        given: keys that stay as they are in the configuration.
    """
    tp, cp = model
    join_fake(tp * cp)
    try:
        grid = Grid(tp * cp, 0, tp, cp)
        grid.create_groups()
        alike: dict[tuple, list[Layout]] = defaultdict(list)  # what else they differ in, differs by halves of a block
        for x in variants(config, given, tp, cp):
            alike[x.sequence_parallel, x.sp_regather, x.activation_checkpoint == "block"].append(x)
        ends = {x.sequence_parallel: x for x in itertools.chain.from_iterable(alike.values())}
        ends = {split: end_of_step(layout.on(config), grid) for split, layout in ends.items()}
        return [
            (layout, found, ends[layout.sequence_parallel])
            for layouts in alike.values()
            for layout, found in _sketches(config, grid, layouts).items()
        ]
    finally:
        dist.destroy_process_group()


def _sketches(config: Config, grid: Grid, layouts: list[Layout]) -> dict[Layout, Sketch]:
    """Return the sketches of layouts that are pairs of ways to compute attention and MLP, from few."""
    ways_of = {x: ((x.cp_attention, x.cp_regather), (x.activation_checkpoint, x.mlp_chunks)) for x in layouts}
    attentions, mlps = (list(dict.fromkeys(ways)) for ways in zip(*ways_of.values()))
    of_attention, of_mlp = {}, {}
    for i in range(max(len(attentions), len(mlps))):
        attention, mlp = attentions[i % len(attentions)], mlps[i % len(mlps)]
        layout = next(x for x, ways in ways_of.items() if ways == (attention, mlp))
        found = sketch(layout.on(config), grid)
        of_attention.setdefault(attention, found)
        of_mlp.setdefault(mlp, found)
    return {
        layout: of_mlp[mlp].with_attention_of(of_attention[attention]) for layout, (attention, mlp) in ways_of.items()
    }


def check(config: Config, machine: Machine, ranks: int) -> Config:
    """Return the configuration as its operations are traced for a machine.

    Raises ValueError for what the planner cannot know, and for ranks that do not fill their nodes.
    """
    if config.global_batch_size is None and config.local_batch_size is None:
        config.with_batches(1)  # raises
    if config.activation_checkpoint == "step":
        raise ValueError("activation_checkpoint step is none of those that the planner knows: take none, mlp or block")
    if ranks > machine.per_node and ranks % machine.per_node:
        raise ValueError(f"{ranks} ranks do not fill nodes of {machine.per_node}: take a multiple")
    if ranks > machine.per_node and "network" not in machine.links:
        raise ValueError(
            f"{ranks} ranks are more than the {machine.per_node} of a node, and this machine was measured on one: "
            f"measure it in a job of several nodes, or take {machine.per_node} ranks"
        )
    if min(ranks, machine.per_node) > 1 and "node" not in machine.links:
        raise ValueError(f"{machine.name} has no link of a node, over which {ranks} ranks would send: measure it")
    # On GPUs it is a fused kernel; this process would take what its CPU has.
    is_fused = machine.device == "cuda" and config.attention == "auto"
    return replace(config, attention="flash") if is_fused else config


def in_processes(function: Callable[[Any], Any], tasks: Collection[Any]) -> list[Any]:
    """Return what a function gives for each task, in processes of their own, several at a time.

    They are no forks, in which autograd refuses to run once it has run in this one: so a script that asks for this
    keeps what it does behind `if __name__ == "__main__"`.
    """
    with ProcessPoolExecutor(max(min(len(cores_in_reach()), len(tasks)), 1), get_context("forkserver")) as pool:
        return [*pool.map(function, tasks)]


def outlooks(config: Config, given: frozenset[str], machine: Machine, ranks: int) -> list[Outlook]:
    """Return the outlook of each layout of a training on so many ranks, the fastest first.

    Args:
        given: keys that stay as they are in the configuration, such as tensor_parallel.

    Raises ValueError where there is none.
    """
    config = check(config, machine, ranks)
    wanted = [(tp, cp) for tp, cp in models(config, given, ranks) if [*parts_of(config, given, ranks // (tp * cp))]]
    of_model = partial(outlooks_of_model, config, given, machine, ranks)
    found = [*itertools.chain.from_iterable(in_processes(of_model, sorted(wanted, key=math.prod, reverse=True)))]
    if not found:
        batch = config.global_batch_size or f"{config.local_batch_size} a rank"
        raise ValueError(
            f"no layout of {ranks} ranks takes a batch of {batch}, {config.num_heads} heads and what the flags say: "
            f"take other ranks, another batch, or fewer flags"
        )
    return in_order(found)


def in_order(found: Iterable[Outlook]) -> list[Outlook]:
    """Return outlooks, the fastest first; of those that are as fast the simplest first, and then the smallest."""
    return sorted(found, key=lambda x: (float(f"{x.pace:.3g}"), len(x.layout.flags()), x.bytes))


def best_of(found: list[Outlook], room: float) -> Outlook | None:
    """Return the layout to take: of those that fit and are close to the fastest the simplest; None where none fits."""
    fitting = [outlook for outlook in found if outlook.bytes <= room]
    close = [outlook for outlook in fitting if outlook.pace <= (1 + CLOSE) * fitting[0].pace]
    return min(close, key=lambda x: (len(x.layout.flags()), x.pace), default=None)


def bytes_of_sample(config: Config) -> int:
    """Return the bytes of the frames of a sample: the input, and all that is forecast or given; in float32."""
    fields, K = Fields.blank(config), config.longest_rollout
    inputs, outputs, forced = (len(channels) for channels in (fields.inputs, fields.outputs, fields.forced))
    return 4 * (inputs + K * outputs + (K - 1) * forced) * math.prod(config.img_size)


def estimate_of(sketched: Sketched, config: Config, machine: Machine, layout: Layout, samples: int) -> Estimate:
    """Return what there is to know of a layout that passes so many samples at once."""
    _, how, end = sketched
    passes = how.of(samples)
    # Ranks of a model read whole rows, and their tokens seldom end with one.
    rows = sum(len(shard.input_rows) for shard in shards_of(layout, config)) / config.img_size[0]
    frames = rows * bytes_of_sample(config)
    total, batch = layout.dp * layout.accumulation_steps * samples, layout.accumulation_steps * passes.batch
    return Estimate(layout.on(config), machine, passes, end, batch, total * frames, total)


def outlooks_of_model(
    config: Config, given: frozenset[str], machine: Machine, ranks: int, model: tuple[int, int]
) -> list[Outlook]:
    """Return the outlooks of all layouts of a model on tp x cp ranks."""
    sketched = sketches(config, given, model)
    return [outlook for variant in sketched for outlook in outlooks_of(variant, config, given, machine, ranks)]


def outlooks_of(
    sketched: Sketched, config: Config, given: frozenset[str], machine: Machine, ranks: int
) -> Iterator[Outlook]:
    """Yield the outlooks of a variant with each order of the axes, number of parts and kind of sharing."""
    layout, *_ = sketched
    layout = replace(layout, dp=ranks // (layout.tensor_parallel * layout.context_parallel))
    kinds = ("none", "gradients", "weights") if layout.dp * layout.context_parallel > 1 else ("none",)
    kinds = (config.shard,) if "shard" in given else kinds
    placed = list(orders(layout, machine.per_node))
    if "parallel_order" in given:
        ours = replace(layout, parallel_order=config.parallel_order)
        placed = [(ours, groups_of(ours, machine.per_node))]
    for parts, samples in parts_of(config, given, layout.dp):
        estimate = estimate_of(sketched, config, machine, replace(layout, accumulation_steps=parts), samples)
        for (ours, groups), kind in itertools.product(placed, kinds):
            ours = replace(ours, accumulation_steps=parts, shard=kind)
            if is_taken(ours, config):
                yield estimate.outlook(ours, groups)


def outlook_of(config: Config, machine: Machine, ranks: int) -> Outlook:
    """Return the outlook of the layout that a configuration says, on so many ranks. Raises ValueError if it is none."""
    model = config.tensor_parallel, config.context_parallel
    found = outlooks_of_model(check(config, machine, ranks), KEYS, machine, ranks, model)
    if not found:
        raise ValueError(f"train_mp.py takes no such layout on {ranks} ranks")
    return found[0]


def front(found: list[Outlook]) -> list[Outlook]:
    """Return those of which no faster one holds less: the Pareto front of time and memory, the fastest first."""
    best: list[Outlook] = []
    for outlook in found:
        if not best or outlook.bytes < 0.99 * best[-1].bytes:
            best.append(outlook)
    return best
