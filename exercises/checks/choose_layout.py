"""A layout for a budget: what the planner says of it."""

import torch

from benchmarks.planner.layouts import KEYS
from benchmarks.planner.machine import load_machine
from benchmarks.planner.outlook import Outlook
from benchmarks.planner.ranking import outlook_of
from exercises.checks.common import Wrong, load, say
from utils.config.reader import keys_given, load_config

MINUTES, DEFINES = 30, "FLAGS"
AFTER = "2-model-parallel.md#which-layout"
HINTS = """
Hours are 30,000 times the seconds of a step; GPU hours are hours times GPUs. The planner tells the ms of a step. What
do 64 GPUs take?

If twice the GPUs took half the time, GPU hours would stay as they are. So begin with as few GPUs as are fast enough,
and look how much they lose to what they send.

64 samples on more than 64 ranks: dp can be 64 at most, so tp or cp must share a sample. Ask the planner for 256 ranks.

Memory: --activation_checkpoint=none computes nothing twice. The section hires has `block`, for one GPU that is short of
memory; with the tokens shared out there is room.
"""
SECTION, MACHINE, STEPS = "--config=hires", "perlmutter", 30_000
DUE, BUDGET = 20.0, 3_150.0  # hours, GPU hours


def check(path: str, rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float32)  # as a training has
    solution, machine = load(path), load_machine(MACHINE)
    if solution.RANKS is None:
        raise Wrong("TODO 1: how many GPUs?")
    if not isinstance(solution.RANKS, int) or solution.RANKS < 1 or solution.RANKS % machine.per_node:
        raise Wrong(f"RANKS is {solution.RANKS!r}: whole nodes have {machine.per_node} GPUs each (TODO 1)")
    if not isinstance(solution.FLAGS, (list, tuple)):
        raise Wrong(f"FLAGS is {solution.FLAGS!r}: a list of flags (TODO 2)")
    outlook = planned(list(solution.FLAGS), solution.RANKS)
    layout = outlook.layout
    grid = f"dp {layout.dp} x tp {layout.tensor_parallel} x cp {layout.context_parallel}"
    say(rank, f"{grid} is a layout of {layout.ranks} GPUs")
    held, room = outlook.bytes / 2**30, (machine.memory - machine.beside) / 2**30
    if held > room:
        most = max(outlook.memory, key=outlook.memory.get)
        raise Wrong(f"it does not fit: {held:.1f} GiB a GPU, which has {room:.1f}; most of it is {most} (TODO 2)")
    say(rank, f"it fits: {held:.1f} of {room:.1f} GiB")
    hours = STEPS * outlook.seconds / 3600
    if hours > DUE:
        raise Wrong(
            f"{hours:.1f} hours, and {DUE:.0f} there are: take more GPUs, or compute less; what bounds a step is "
            f"{outlook.limit}"
        )
    say(rank, f"it is in time: {hours:.1f} hours")
    cost = hours * layout.ranks
    if cost > BUDGET:
        sent = ", ".join(f"{axes} {x / 1e9:.1f}" for axes, x in outlook.sent.items() if x)
        raise Wrong(
            f"{cost:,.0f} GPU hours, and {BUDGET:,.0f} are left: fewer GPUs lose less, and so do those that send less "
            f"(GB a step, each: {sent}) or compute nothing twice"
        )
    say(rank, f"the budget lasts: {cost:,.0f} GPU hours")


def planned(flags: list[str], ranks: int) -> Outlook:
    """Return what the planner says of a layout. Raises Wrong where it is none, or trains another model."""
    try:
        other = keys_given(flags, chapter=2) - KEYS
        if other:
            raise Wrong(
                f"{', '.join(sorted(other))} would make it another training, or is no flag of a layout (TODO 2)"
            )
        config, _ = load_config([SECTION, *flags], chapter=2)
        tp, cp, batch = config.tensor_parallel, config.context_parallel, config.global_batch_size
        if ranks % (tp * cp):
            raise Wrong(f"{ranks} GPUs are not so many copies of tp {tp} x cp {cp}: their product must divide them")
        if batch % (ranks // (tp * cp)):
            raise Wrong(
                f"{batch} samples do not divide among {ranks // (tp * cp)} copies of the model: where there are more "
                "GPUs, some must share a sample, by tp or cp (TODO 2)"
            )
        return outlook_of(config, load_machine(MACHINE), ranks)
    except ValueError as error:
        raise Wrong(f"{error} (TODO 1 and 2)") from None
