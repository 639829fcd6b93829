"""How far does a training scale? The best layout of each of many jobs, and what would make them faster.

A job is a training on so many ranks of a machine. Each model (tp x cp) is sketched once for all jobs of a section.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.planner.layouts import models
from benchmarks.planner.machine import Curve, Link, Machine
from benchmarks.planner.outlook import Outlook
from benchmarks.planner.ranking import Sketched, check, in_order, in_processes, outlooks_of, sketches
from benchmarks.planner.trace import serial_model, without_data
from utils.config.settings import Config
from utils.data.fields import Fields

NOTHING: frozenset[str] = frozenset()
INSTANT = 1e-12  # seconds, or a share: as good as none


@dataclass(frozen=True)
class Job:
    """A training on so many ranks of a machine."""

    config: Config
    machine: Machine
    ranks: int

    def of_batch(self, batch: int) -> "Job":
        return replace(self, config=replace(self.config, global_batch_size=batch))

    @property
    def room(self) -> float:
        """Bytes that tensors of a rank can have."""
        return self.machine.memory - self.machine.beside


def best(jobs: Sequence[Job]) -> list[Outlook | None]:
    """Return the fastest layout of each job that fits; None where none fits, or none takes its batch.

    Args:
        jobs: of one section: what a rank computes of a sample is the same.
    """
    jobs = [checked(job) for job in jobs]
    wanted = {model for job in jobs for model in models(job.config, NOTHING, job.ranks)}
    found = in_processes(partial(_of_model, jobs), sorted(wanted, key=math.prod, reverse=True))
    return [next(iter(in_order(filter(None, of_job))), None) for of_job in zip(*found)]


def checked(job: Job) -> Job:
    """Return a job as it is sketched. Raises ValueError for what the planner cannot know."""
    return replace(job, config=check(job.config, job.machine, job.ranks))


def _of_model(jobs: Sequence[Job], model: tuple[int, int]) -> list[Outlook | None]:
    """Return the fastest layout of a model for each job, of those that fit."""
    known: dict[str, list[Sketched]] = {}
    found: list[Outlook | None] = []
    for job in jobs:
        ours: list[Outlook] = []
        if model in models(job.config, NOTHING, job.ranks):
            if job.config.attention not in known:  # a GPU has another kernel than a CPU
                known[job.config.attention] = sketches(job.config, NOTHING, model)
            for variant in known[job.config.attention]:
                ours += outlooks_of(variant, job.config, NOTHING, job.machine, job.ranks)
        found.append(next((x for x in in_order(ours) if x.bytes <= job.room), None))
    return found


def parameters_of(config: Config) -> int:
    """Return how many parameters a model has."""
    with without_data():
        return sum(p.numel() for p in serial_model(config, Fields.blank(config)).parameters())


def without_files(job: Job) -> Job:
    """Return a job whose frames are there when they are needed, whatever it took to bring them."""
    return replace(job, machine=replace(job.machine, storage=None, filesystem=None))


def _faster_storage(job: Job) -> Job:
    machine = job.machine
    storage, filesystem = (x and 2 * x for x in (machine.storage, machine.filesystem))
    return replace(job, machine=replace(machine, storage=storage, filesystem=filesystem))


def _with_links(job: Job, change: Callable[[Link], Link]) -> Job:
    links = {place: change(link) for place, link in job.machine.links.items()}
    return replace(job, machine=replace(job.machine, links=links))


def _faster_links(job: Job) -> Job:
    def faster(link: Link) -> Link:
        curves = {kind: [(n, seconds / 2) for n, seconds in curve] for kind, curve in link.collectives.items()}
        return Link(link.alpha, 2 * link.bandwidth, curves)

    return _with_links(job, faster)


def _no_latency(job: Job) -> Job:
    def instant(link: Link) -> Link:
        curves = {
            kind: [(n, max(seconds - curve[0][1], INSTANT)) for n, seconds in curve]
            for kind, curve in link.collectives.items()
        }
        return Link(INSTANT, link.bandwidth, curves)

    return _with_links(job, instant)


def _faster(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    return {name: [(size, 2 * rate) for size, rate in curve] for name, curve in curves.items()}


def _faster_products(job: Job) -> Job:
    return replace(job, machine=replace(job.machine, products=_faster(job.machine.products)))


def _faster_attention(job: Job) -> Job:
    found = {dtype: _faster(passes) for dtype, passes in job.machine.attention.items()}
    return replace(job, machine=replace(job.machine, attention=found))


def _faster_memory(job: Job) -> Job:
    return replace(job, machine=replace(job.machine, moving=_faster(job.machine.moving)))


# What a job could have: of the code, with its flag, or of the machine.
MENDS: dict[str, Callable[[Job], Job]] = {
    "all files on each node already (`--stage_dir`), free to read": without_files,
    "frames of 16 bits, or storage twice as fast": _faster_storage,
    "links twice as fast, or half the bytes": _faster_links,
    "links without latency": _no_latency,
    "matrix products twice as fast": _faster_products,
    "attention twice as fast": _faster_attention,
    "all else that computes twice as fast": _faster_memory,
    "compiled blocks (`--enable_jit`)": lambda job: replace(job, config=replace(job.config, enable_jit=True)),
    "a host that costs nothing (CUDA graphs)": lambda job: replace(job, machine=replace(job.machine, host=INSTANT)),
    "no rank slower than another": lambda job: replace(job, machine=replace(job.machine, noise=INSTANT)),
}
