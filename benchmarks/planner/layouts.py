"""Ways to share out a training over ranks that train_mp.py takes: nearly all."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from benchmarks.planner.predict import Group
from distributed.parallelize import check_parallel
from utils.comm import Grid
from utils.config.settings import Config, module_options
from utils.data.token_shard import TokenShard

AXES = ("tp", "cp", "dp", "tp-cp", "dp-cp")
LARGEST = 64  # ranks of a model, where a batch has as many samples as there are models


@dataclass(frozen=True)
class Layout:
    """How a training is shared out. Names and values are those of the flags."""

    dp: int
    tensor_parallel: int = 1
    context_parallel: int = 1
    parallel_order: str = "tp-cp-dp"
    sequence_parallel: bool = True
    sp_regather: bool = False
    cp_attention: str = "gather"
    cp_regather: bool = False
    activation_checkpoint: str = "none"
    mlp_chunks: int = 1
    shard: str = "none"
    accumulation_steps: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tensor_parallel * self.context_parallel

    def flags(self, config: Config | None = None) -> list[str]:
        """Return the flags that say so, without those that are as in a configuration, or as by default."""
        found = []
        for field in fields(self)[1:]:
            value, usual = getattr(self, field.name), getattr(config, field.name) if config else field.default
            if value != usual:
                found.append(f"--{'no_' * (value is False)}{field.name}" + f"={value}" * (not isinstance(value, bool)))
        return found

    def on(self, config: Config) -> Config:
        """Return a configuration with this layout."""
        return replace(config, **{field.name: getattr(self, field.name) for field in fields(self)[1:]})


KEYS = frozenset(field.name for field in fields(Layout)[1:])  # what a configuration says of a layout


def variants(config: Config, given: frozenset[str], tp: int, cp: int) -> Iterator[Layout]:
    """Yield the ways to run a model on tp x cp ranks that change what a rank computes: those that train_mp.py takes.

    Args:
        given: keys that stay as they are in the configuration.
    """
    choices = {
        "sequence_parallel": (True, False) if tp > 1 else (config.sequence_parallel,),
        "sp_regather": (False, True) if tp > 1 else (False,),
        "cp_attention": ("gather", "ulysses") if cp > 1 else ("gather",),
        "cp_regather": (False, True) if cp > 1 else (False,),
        "activation_checkpoint": ("none", "mlp", "block"),
        "mlp_chunks": (1, 4),
    }
    choices |= {key: (getattr(config, key),) for key in choices if key in given}
    # What is computed again in chunks is computed again; a block that is, gathers again by itself.
    same = [{"activation_checkpoint": "mlp", "mlp_chunks": 4}, {"activation_checkpoint": "block", "sp_regather": True}]
    same = [pair for pair in same if not given & pair.keys()]
    for values in itertools.product(*choices.values()):
        ways = dict(zip(choices, values))
        layout = Layout(1, tp, cp, **ways)
        if not any(pair.items() <= ways.items() for pair in same) and is_taken(layout, config):
            yield layout


def is_taken(layout: Layout, config: Config) -> bool:
    """Whether train_mp.py takes a layout, whatever the batch."""
    tp, cp = layout.tensor_parallel, layout.context_parallel
    kinds = [module_options("compile_modules", text)[0] for text in config.compile_modules]
    if layout.shard != "none" and config.enable_jit and "ViT" in kinds:
        return False
    try:
        check_parallel(layout.on(config), Grid(layout.dp * tp * cp, 0, tp, cp))
        count = token_shards(layout)
        last = TokenShard(config.img_size, config.patch_size, count, count - 1)
    except ValueError:
        return False
    return last.count > 0 or config.data_loader_config != "dali"  # DALI cannot read nothing


def shards_of(layout: Layout, config: Config) -> list[TokenShard]:
    """Return how the ranks of a model share out the tokens of an image. Raises ValueError where they cannot."""
    count, overlap = token_shards(layout), config.patch_overlap
    return [TokenShard(config.img_size, config.patch_size, count, i, overlap=overlap) for i in range(count)]


def token_shards(layout: Layout) -> int:
    return layout.context_parallel * (layout.tensor_parallel if layout.sequence_parallel else 1)


def models(config: Config, given: frozenset[str], ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes of tp and cp that divide so many ranks; of models on more ranks than need be only those given."""
    largest = max(LARGEST, ranks // (config.global_batch_size or ranks))
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    tps, cps = (
        [getattr(config, key)] if key in given else [n for n in divisors if n <= largest]
        for key in ("tensor_parallel", "context_parallel")
    )
    asked = {"tensor_parallel", "context_parallel"} & given
    yield from ((tp, cp) for tp in tps for cp in cps if ranks % (tp * cp) == 0 and (asked or tp * cp <= largest))


def parts_of(config: Config, given: frozenset[str], dp: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of parts in which each of dp ranks can pass its samples, with the samples of a part.

    All powers of two, where the configuration says neither the number nor the size.
    """
    is_known = "accumulation_steps" in given or config.local_batch_size is not None
    for parts in [config.accumulation_steps] if is_known else [2**i for i in range(20)]:
        with contextlib.suppress(ValueError):  # it does not divide
            yield parts, replace(config, accumulation_steps=parts).with_batches(dp).local_batch_size


def groups_of(layout: Layout, per_node: int) -> dict[str, Group]:
    """Return where the groups of a layout lie in nodes of so many ranks, by axes: those that lie worst, as all wait."""
    tp, cp = layout.tensor_parallel, layout.context_parallel
    grid = Grid(layout.dp * tp * cp, 0, tp, cp, layout.parallel_order)
    places = np.arange(layout.dp * tp * cp).reshape([grid.sizes[axis] for axis in reversed(grid.order.split("-"))])
    found = {}
    for axes in AXES:
        dims = [i for i, axis in enumerate(reversed(grid.order.split("-"))) if axis in axes.split("-")]
        members = np.moveaxis(places, dims, range(-len(dims), 0)).reshape(-1, grid.get_size(axes))
        nodes = members // per_node + np.arange(len(members))[:, None] * (places.size // per_node + 1)
        _, counts = np.unique(nodes, return_counts=True)
        found[axes] = Group(grid.get_size(axes), int(counts.min()))
    return found


def orders(layout: Layout, per_node: int) -> Iterator[tuple[Layout, dict[str, Group]]]:
    """Yield a layout in each order of the axes that places its groups differently, with them; the usual one first."""
    found = set()
    for order in sorted(map("-".join, itertools.permutations(("tp", "cp", "dp"))), key=lambda x: x != "tp-cp-dp"):
        ours = replace(layout, parallel_order=order)
        groups = groups_of(ours, per_node)
        if (places := tuple(groups.values())) not in found:
            found.add(places)
            yield ours, groups
