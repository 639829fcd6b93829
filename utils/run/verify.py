"""Do ranks that should hold the same hold the same? A rank that computed wrongly shows here, and is named.

Data parallel ranks (and context parallel ones) average their gradients, and take the same step: their weights, moments
and moving averages agree to the last bit. Each rank adds up the bits of its own, all ranks compare the sums. What they
share out (`--shard`) has no replica; nor has a gradient that is wrong before the ranks average it: they all take it.
"""

import logging
import socket
import zlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import Refused
from utils.observers import EpochRecord, Observer
from utils.spans import communication, in_span

REMEDY = "leave that node out, and go on with --resume auto"
MEMORY = f"the memory of {socket.gethostname()} is to be checked"
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of all words of a tensor, as integers modulo 2^64: a flipped bit changes it."""
    flat = x.detach().reshape(-1)
    start = flat.storage_offset() * flat.element_size()
    width = next(width for width in WORDS if not (flat.nbytes % width or start % width) or width == flat.element_size())
    return flat.view(WORDS[width]).sum(dtype=torch.int64)


class Verifier(Observer):
    """Compares what ranks hold every so many iterations, and before each checkpoint: one that is wrong is not written.

    Raises Refused, on all ranks, where replicas differ. The sums travel while the next step computes.
    """

    def __init__(self, every: int):
        self.every = every
        self.agreed: int | None = None  # the last iterations after which the replicas were compared, and agreed
        self.asked: int | None = None  # after how many iterations the sums were made that nobody has looked at
        self.replicas: list[list[int]] = []  # ranks that hold the same
        self.copied: torch.cuda.Event | None = None

    def begin(self, run: Any) -> None:
        """Ask all ranks what they hold, and compare it."""
        self.run = run
        self.device, config = run.job.device, run.job.config
        held: list[int] = [0] * run.job.world.size
        mine = {name: tuple(place) for name, place in run.state.places.items()}
        drifts = run.job.world.rank if config.noddp else None  # from all others
        dist.all_gather_object(held, zlib.crc32(repr((mine, drifts)).encode()))
        same = ([rank for rank, x in enumerate(held) if x == one] for one in dict.fromkeys(held))
        self.replicas = [ranks for ranks in same if len(ranks) > 1]
        if not self.replicas:
            run.log("verify_every compares nothing: no two ranks hold the same weights")
        self.sums = torch.zeros(run.job.world.size, dtype=torch.int64, device=self.device)
        self.on_host = torch.zeros_like(self.sums, device="cpu", pin_memory=self.device.type == "cuda")
        self.check(run.iteration)

    def after_step(self, iteration: int, left: int) -> None:
        """Look at the answer to the step before, and ask where it is time."""
        self.look()
        if iteration % self.every == 0:
            self.ask(iteration)

    def check(self, iteration: int) -> None:
        """Compare now; this waits for the device."""
        self.ask(iteration)
        self.look()

    def after_training(self, record: EpochRecord) -> None:
        """No step follows: look now."""
        self.look()

    def _tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.run.state.tensors().items() if x.device == self.device}

    @in_span("logging")
    def ask(self, iteration: int) -> None:
        """Launch the sum of all bits, and its way to the other ranks and to the host."""
        if self.replicas:
            self.asked = iteration
            bits = torch.stack([sum_of_bits(x) for x in self._tensors().values()])
            odd = 2 * torch.arange(len(bits), device=self.device) + 1  # what one tensor gains another may lose
            dist.all_gather(list(self.sums.split(1)), (bits * odd).sum()[None])
            self.on_host.copy_(self.sums, non_blocking=True)
            self.copied = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None

    @communication
    def look(self) -> None:
        """Compare the sums that came last. Raises Refused where replicas differ."""
        if self.asked is None:
            return
        if self.copied:
            self.copied.synchronize()
        if self._differ():
            self.on_host.copy_(self.sums)  # again: what changed on this host alone, the other ranks do not see
            if self._differ():
                self._refuse()
            logging.warning("rank %d read sums of bits that were wrong for a moment: %s", dist.get_rank(), MEMORY)
        self.agreed, self.asked = self.asked, None

    def _differ(self) -> bool:
        found = self.on_host.tolist()
        return any(len({found[rank] for rank in ranks}) > 1 for ranks in self.replicas)

    def _refuse(self) -> None:
        """Raise Refused, with the ranks that are not like most of their replicas, and the first tensor that differs.

        All ranks come here: they have the same sums.
        """
        told: list[Any] = [None] * self.run.job.world.size
        tensors = self._tensors()
        bits = torch.stack([sum_of_bits(x) for x in tensors.values()]).tolist()
        dist.all_gather_object(told, (socket.gethostname(), tuple(bits)))
        for ranks in self.replicas:
            (usual, count), *others = Counter(told[rank][1] for rank in ranks).most_common()
            if not others:
                continue
            name = next(name for name, *values in zip(tensors, *(told[r][1] for r in ranks)) if len(set(values)) > 1)
            what = f"differ in {name} after {self.asked} iterations"
            what += f", and agreed after {self.agreed}" * (self.agreed is not None)
            wrong = [rank for rank in ranks if told[rank][1] != usual]
            if 2 * count <= len(ranks):  # nobody knows which
                raise Refused(f"{_places(ranks, told)} {what}: one of them computed wrongly; {REMEDY}")
            most = f"the {count} others that hold the same weights"
            raise Refused(f"{_places(wrong, told)} and {most} {what}: the former computed wrongly; {REMEDY}")
        # They agree again: what one rank added up, or computed, was wrong for a moment.
        sums = self.on_host.tolist()
        one = next(ranks for ranks in self.replicas if len({sums[rank] for rank in ranks}) > 1)
        raise Refused(
            f"{_places(one, told)} differed after {self.asked} iterations, and agree again: one of them computed "
            f"wrongly; {REMEDY}"
        )


def _places(ranks: list[int], told: list[Any]) -> str:
    """Return ranks, and the hosts that they run on."""
    return ", ".join(f"rank {rank} on {told[rank][0]}" for rank in ranks)
