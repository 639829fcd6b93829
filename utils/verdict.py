"""What bounds a run, in plain words, and the next flag to try (`--report`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from utils.config import Config

# What a step can be bound by, and what the time of each means.
BOUNDS = {
    "reading": "the step waited for the loader",
    "copying": "data went to the device, were normalised, and nothing else went on",
    "launching": "no operator worked: the host was starting the next one",
    "computing": "operators worked",
    "launching or computing": "operators worked or were started: which of the two no profiler could tell here",
    "communicating": "even the last rank waited for what ranks send to each other",
    "waiting for the slowest rank": "the ranks stood still until the slowest one came",
}
ASIDE = ("validation", "checkpoint", "logging", "profiling", "setup")  # parts of a run that are no training
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
            "waiting for the slowest rank": max(waits) - min(waits),
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
    if first == "waiting for the slowest rank":
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
    ranks = len(measured.seconds["communication"])
    if bound == "reading":
        depth = config.read_depth or config.num_data_workers
        if not config.num_data_workers:
            yield f"--num_data_workers {min(4, measured.cores)}, which reads ahead while the device computes"
        if measured.is_direct and depth < 32:
            yield f"--read_depth {4 * max(depth, 1)}, more reads at once: far storage answers many at a time"
        if not measured.is_direct and config.num_data_workers < measured.cores:
            yield f"--num_data_workers {measured.cores}, one for each core: each decodes a frame at a time"
        if config.stage_dir is None:
            yield "--stage_dir, a folder on the node's own disk: the files are copied there once"
        yield "fewer channels, or files on faster storage"
    elif bound == "copying":
        if not config.enable_jit:
            yield "--enable_jit, which normalises in one kernel"
        if measured.on_gpu and config.data_loader_config != "dali":
            yield "--data_loader_config dali, which normalises on its own stream"
        yield "files of float16: half the bytes"
    elif bound in ("launching", "launching or computing"):
        if not config.enable_jit:
            yield "--enable_jit: fewer and larger kernels"
        if not config.enable_fused:
            yield "--enable_fused: the optimiser in one kernel"
        if measured.on_gpu and not measured.is_recorded:
            yield "train_mp_graphs.py, which launches a recorded step at once"
        yield "a larger --local_batch_size: more work for each launch"
    elif bound == "computing":
        if measured.has_bf16 and config.amp_mode == "none":
            yield "--amp_mode bf16: matrix products of half the width"
        if config.attention == "math":
            yield "--attention auto, which never writes the table of tokens x tokens"
        if config.activation_checkpoint != "none":
            yield "--activation_checkpoint none, if the memory suffices: nothing is computed twice"
        if not config.enable_jit:
            yield "--enable_jit, which fuses what lies between the matrix products"
        if not config.enable_fused:
            yield "--enable_fused: the optimiser in one kernel"
        yield "more ranks: this one is busy with what it has to do"
    elif bound == "communicating":
        if config.tensor_parallel * config.context_parallel < ranks and config.accumulation_steps == 1:
            yield "--accumulation_steps 2 with a larger batch: gradients travel once a step"
        if config.context_parallel > 1 and config.cp_attention == "gather":
            yield "--cp_attention ulysses, which sends less"
        if config.tensor_parallel > 1:
            yield "a smaller --tensor_parallel: its ranks talk in every block"
        yield "a larger --local_batch_size: more computing for each byte that is sent"
    else:
        rank, part = measured.slowest_rank()
        if part == "data wait":
            yield from advice("reading", measured, config)
        if part in ASIDE:
            yield f"less often what takes its {part}"
        yield f"`make doctor` on {measured.nodes[rank]}: another job there, fewer cores, a slower clock?"


def memory_advice(activations: float, others: float, config: Config) -> Iterator[str]:
    """Yield flags that take less memory, the best first, for a rank with so much of activations and of the others."""
    if activations > others:
        if config.attention == "math":
            yield "--attention auto"
        if config.local_batch_size % 2 == 0:
            half, twice = config.local_batch_size // 2, 2 * config.accumulation_steps
            yield f"--local_batch_size {half} --accumulation_steps {twice}"
        if config.activation_checkpoint == "none":
            yield "--activation_checkpoint block"
        yield f"--context_parallel {2 * config.context_parallel} of train_mp.py"
    else:
        yield f"--tensor_parallel {2 * config.tensor_parallel} of train_mp.py"


def out_of_memory(rank: int, parts: dict[str, float], config: Config) -> str:
    """Return what was in memory when it did not suffice, in GiB by part, and what to try."""
    held = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
    activations = parts["activations"]
    flags = ", then ".join(memory_advice(activations, sum(parts.values()) - activations, config))
    return f"Out of memory on rank {rank}, with GiB of {held}. To try: {flags}."
