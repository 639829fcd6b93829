"""The grid of processes: data (dp), context (cp) and tensor (tp) parallel axes, and their communication groups.

Every rank has a place, a coordinate, on each axis. The group of an axis holds the ranks that differ in their place on
that axis only; the group of two axes, such as dp-cp, those that differ on these two only. Pipeline parallelism (pp) has
size 1.
"""

import math
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

AXES = ("dp", "cp", "tp", "pp")
GROUPS = ("dp", "tp", "cp", "pp", "tp-cp", "dp-cp")


def places(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    """Return the place of a rank on each axis. The first axis of `order` varies fastest: its ranks are neighbours."""
    place = {}
    for axis in order.split("-"):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def rank_groups(sizes: Mapping[str, int], order: str, axes: str) -> list[list[int]]:
    """Return all groups of one axis or several (`tp`, `dp-cp`), each with its ranks in increasing order.

    8 ranks with tp 4 and dp 2 in the order tp-cp-dp: `tp` gives [[0, 1, 2, 3], [4, 5, 6, 7]], and `dp` gives
    [[0, 4], [1, 5], [2, 6], [3, 7]].
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes[axis] for axis in order.split("-"))):
        place = places(rank, sizes, order)
        others = tuple(place[axis] for axis in order.split("-") if axis not in axes.split("-"))
        groups.setdefault(others, []).append(rank)
    return sorted(groups.values())


class Grid:
    """A rank's place among dp x cp x tp ranks. Data parallelism takes what tp x cp leave.

    Args:
        world_size, rank: all processes of the run, and this one.
        tp, cp, pp: sizes of these axes.
        order: the axes, the one that varies fastest first; `pp` may be left out.

    Raises ValueError where the sizes do not fit the ranks (with those that do), or the order does not name each axis
    once.
    """

    def __init__(self, world_size: int, rank: int, tp: int = 1, cp: int = 1, order: str = "tp-cp-dp", pp: int = 1):
        if pp != 1:
            raise ValueError(f"pipeline parallelism is not implemented here, and its size is {pp}: take 1")
        names = order.split("-")
        if sorted(names) not in (sorted(AXES), sorted(AXES[:3])):
            raise ValueError(f"parallel_order is {order!r}: it names dp, cp and tp once each, such as tp-cp-dp")
        if world_size % (tp * cp):
            raise ValueError(
                f"tensor_parallel {tp} x context_parallel {cp} does not divide the {world_size} rank(s) of this run: "
                f"take tensor_parallel x context_parallel from {_factorisations(world_size)}, or other ranks"
            )
        self.order = order if "pp" in names else f"{order}-pp"
        self.sizes = {"dp": world_size // (tp * cp), "cp": cp, "tp": tp, "pp": 1}
        self.rank = rank
        self._groups: dict[str, dist.ProcessGroup] = {}

    def create_groups(self, timeout: timedelta | None = None) -> None:
        """Create this rank's communication groups, which wait so long; all ranks call this at the same point.

        A rank joins only its own groups: creating all of them on all ranks costs seconds at hundreds of ranks.
        """
        by_ranks = {tuple(range(math.prod(self.sizes.values()))): dist.group.WORLD}
        for axes in GROUPS:
            ranks = tuple(self.get_ranks(axes))
            if ranks not in by_ranks:  # with cp 1, dp and dp-cp are one group
                by_ranks[ranks] = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
            self._groups[axes] = by_ranks[ranks]

    def get_size(self, axes: str) -> int:
        """Return the number of ranks in the group of `axes`."""
        return math.prod(self.sizes[axis] for axis in axes.split("-"))

    def get_rank(self, axes: str) -> int:
        """Return this rank's place in the group of `axes`: its position in `get_ranks(axes)`."""
        return self.get_ranks(axes).index(self.rank)

    def get_ranks(self, axes: str) -> list[int]:
        """Return the ranks of this rank's group of `axes`, in increasing order."""
        place, strides = places(self.rank, self.sizes, self.order), {}
        stride = 1
        for axis in self.order.split("-"):
            strides[axis], stride = stride, stride * self.sizes[axis]
        ranks = [self.rank - sum(place[axis] * strides[axis] for axis in axes.split("-"))]  # the first of the group
        for axis in axes.split("-"):
            ranks = [rank + step * strides[axis] for rank in ranks for step in range(self.sizes[axis])]
        return sorted(ranks)

    def get_group(self, axes: str) -> dist.ProcessGroup:
        """Return the communication group of `axes`, one of dp, tp, cp, pp, tp-cp, dp-cp."""
        return self._groups[axes]


def _factorisations(ranks: int) -> str:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    pairs = [f"{tp}x{cp}" for tp in divisors for cp in divisors if ranks % (tp * cp) == 0]
    if len(pairs) <= 12:
        return ", ".join(pairs)
    return "the pairs whose product is one of " + ", ".join(map(str, divisors))
