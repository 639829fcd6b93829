"""What bounds a run, in plain words, and the next flag to try (`--report`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from utils.config.settings import Config
from utils.measure.advice import ASIDE, SLOWEST, depth, remedies

# What a step can be bound by, and what the time of each means.
BOUNDS = {
    "reading": "the step waited for the loader",
    "copying": "data went to the device, were normalised, and nothing else went on",
    "launching": "no operator worked: the host was starting the next one",
    "computing": "operators worked",
    "launching or computing": "operators worked or were started: which of the two no profiler could tell here",
    "communicating": "even the last rank waited for what ranks send to each other",
    SLOWEST: "the ranks stood still until the slowest one came",
}
COMPUTE = ("forward", "backward", "optimizer", "step")
MANY = 0.2  # share of the run that is worth a word


@dataclass(frozen=True)
class Measured:
    """What a verdict rests on.

    Args:
        seconds: the parts of a timeline, each with its seconds on every rank, over the same iterations.
        steps: what the profile of one step found on every rank (`working` and `waiting` of a StepProfile); None
            where there is none.
        iterations: that `seconds` belong to.
        is_recorded: steps are CUDA graphs.
        is_blind: the timeline cannot see where a GPU's step waits for other ranks.
        is_direct: the files are read without HDF5.
        has_bf16: the device multiplies matrices of bfloat16.
        cores: CPU cores that a rank has.
        nodes: of the ranks.
        mfu: share of the device's peak, or None where it is not known.
    """

    seconds: dict[str, list[float]]
    steps: list[tuple[float | None, float] | None]
    iterations: int
    on_gpu: bool
    is_recorded: bool
    is_blind: bool
    is_direct: bool
    has_bf16: bool
    cores: int
    nodes: list[str]
    mfu: float | None = None

    def mean(self, *parts: str) -> float:
        """Return the seconds of some parts, the mean over ranks."""
        return sum(fmean(self.seconds[part]) for part in parts)

    def bounds(self) -> dict[str, float]:
        """Return the share of the training time that each of BOUNDS takes; they add up to 1.

        Where ranks wait for each other, the slowest one waits least: what it waits, all of them need to communicate.
        The others wait longer, for it. These are the shares of the rank that waits longest: a slow one cannot hide
        among many.
        """
        waits = self.waits()
        longest = waits.index(max(waits))
        mine = {part: seconds[longest] for part, seconds in self.seconds.items()}
        computed, step = sum(mine[part] for part in COMPUTE) - self.unseen(longest), self.steps[longest]
        if step is None or step[0] is None:
            of_computing = {"launching or computing": computed + mine["other"]}
        else:
            worked = min(step[0] * self.iterations, computed)
            of_computing = {"launching": computed - worked + mine["other"], "computing": worked}
        seconds = {
            "reading": mine["data wait"],
            "copying": mine["data copy"],
            **of_computing,
            "communicating": min(waits),
            SLOWEST: max(waits) - min(waits),
        }
        total = sum(seconds.values())
        return {name: value / total for name, value in seconds.items()}

    def unseen(self, rank: int) -> float:
        """Return the seconds in which a rank waits for others inside compiled or recorded code, as its profile says."""
        step, spoken = self.steps[rank], self.seconds["communication"][rank]
        if step is None or (self.on_gpu and not self.is_blind):
            return 0.0
        waited = step[1] * self.iterations - (spoken if self.on_gpu else 0.0)
        return min(max(waited, 0.0), sum(self.seconds[part][rank] for part in COMPUTE))

    def waits(self) -> list[float]:
        """Return the seconds in which each rank waits for others."""
        return [spoken + self.unseen(rank) for rank, spoken in enumerate(self.seconds["communication"])]

    def slowest_rank(self) -> tuple[int, str]:
        """Return the rank that the others wait for, and the part that takes it longer than them."""
        waits = self.waits()
        rank = waits.index(min(waits))
        parts = (part for part in self.seconds if part not in ("communication", "validation", "setup"))
        return rank, max(parts, key=lambda part: self.seconds[part][rank] - fmean(self.seconds[part]))


def verdict(measured: Measured, config: Config) -> str:
    """Return a paragraph: what bounds the run, by how much, and what to try next."""
    if measured.iterations <= 0:
        return "No step but the first one of this process was done: nothing tells what bounds this run."
    bounds = measured.bounds()
    first, second, *_ = sorted(bounds, key=bounds.get, reverse=True)
    text = [f"This run is bound by {first}: for {bounds[first]:.0%} of the training time {BOUNDS[first]}."]
    if first == SLOWEST:
        rank, part = measured.slowest_rank()
        text.append(f"The slowest is rank {rank}, on {measured.nodes[rank]}, and it loses its time in {part!r}.")
    if first == "computing" and measured.mfu:
        text.append(f"They reached {measured.mfu:.0%} of the device's peak.")
    if bounds[second] >= MANY:
        text.append(f"Next comes {second}, with {bounds[second]:.0%}.")
    text.append(f"To try: {next(advice(first, measured, config))}.")
    run = measured.mean(*measured.seconds)
    for part in ASIDE:
        if measured.mean(part) >= MANY * run:
            text.append(f"{measured.mean(part) / run:.0%} of the run was no training, but {part}.")
    return " ".join(text)


def advice(bound: str, measured: Measured, config: Config) -> Iterator[str]:
    """Yield what may help, the best first; what the run does already is left out."""
    rank, part = measured.slowest_rank()
    if bound == SLOWEST and part == "data wait":
        yield from advice("reading", measured, config)
    words = {"cores": measured.cores, "workers": min(4, measured.cores), "depth": 4 * max(depth(config), 1)}
    words |= {"part": part, "node": measured.nodes[rank]}
    yield from remedies("launching" if bound == "launching or computing" else bound, measured, config, **words)


def memory_advice(activations: float, others: float, config: Config) -> Iterator[str]:
    """Yield flags that take less memory, the best first, for a rank with so much of activations and of the others."""
    words = {"half": config.local_batch_size // 2, "twice": 2 * config.accumulation_steps}
    words |= {"cp": 2 * config.context_parallel, "tp": 2 * config.tensor_parallel}
    yield from remedies("activations" if activations > others else "others", None, config, **words)


def out_of_memory(rank: int, parts: dict[str, float], config: Config) -> str:
    """Return what was in memory when it did not suffice, in GiB by part, and what to try."""
    held = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
    activations = parts["activations"]
    flags = ", then ".join(memory_advice(activations, sum(parts.values()) - activations, config))
    return f"Out of memory on rank {rank}, with GiB of {held}. To try: {flags}."
