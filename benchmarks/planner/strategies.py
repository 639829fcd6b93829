"""What would other ways to share out or to shrink a training bring? From the parts of a step that they can touch.

Each is taken at its best: what it costs itself is left out where that is not said. Time and memory are told apart: what
freed memory could be used for does not count.
"""

import math
from dataclasses import dataclass

from benchmarks.planner.machine import Machine
from benchmarks.planner.outlook import Outlook

PIECES = 4  # of a product, whose parts are sent while the next is computed
EIGHT_BITS = 2.05 / 8  # bytes of Adam8bit's moments over Adam's: benchmarks/results/optimizers.json
FACTORED = 0.02 / 8  # Adafactor's


@dataclass(frozen=True)
class Strategy:
    """Time of a step over that of the best layout, and bytes of a rank over what it holds there."""

    time: float
    memory: float


def pipeline(best: Outlook, one: Outlook, two: Outlook, parts: int, stages: int) -> Strategy:
    """Return what pipelines of so many stages take and hold, in which one forward and one backward pass alternate.

    With m parts of a batch, p stages take (m + p - 1) / p times what one rank takes for one part, and a stage holds the
    activations of at most p parts (Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM, section 2.2). Sending between stages, and the sum of gradients, are taken for free.

    Args:
        one: a rank alone that passes one part of the batch.
        two: the same with two parts, one after the other.
    """
    part = two.seconds - one.seconds
    end = one.seconds - part  # of a step: each stage has its share of it
    seconds = ((parts + stages - 1) * part + end) / stages
    whole = sum(one.memory[part] for part in ("weights", "gradients", "optimiser"))
    held = whole / stages + one.memory["activations"] * min(parts, stages) / stages
    held += one.memory["working"] + one.memory["batch"]
    return Strategy(seconds / best.seconds, held / best.bytes)


def offload(best: Outlook, machine: Machine) -> Strategy:
    """Return what moments and gradients on the host take: gradients go there unseen, new weights come back.

    (Ren et al. 2021, ZeRO-Offload.) What the host's Adam takes is left out. Weights are those of this code: float32.
    """
    returned = best.memory["optimiser"] / 2
    gone = best.memory["optimiser"] + best.memory["gradients"]
    return Strategy(1 + returned / (machine.copy or math.inf) / best.seconds, 1 - gone / best.bytes)


def smaller_moments(best: Outlook, share: float) -> Strategy:
    """Return what moments hold of which only a share is kept: in 8 bits (Dettmers et al. 2022), or factored
    (Shazeer & Stern 2018, Adafactor)."""
    return Strategy(1.0, 1 - (1 - share) * best.memory["optimiser"] / best.bytes)


def overlapped(best: Outlook, with_tp: Outlook) -> Strategy:
    """Return what tensor parallelism takes whose products are cut in pieces, each sent while the next is computed.

    (Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition.) The last piece is seen.

    Args:
        with_tp: the best layout with tensor parallelism.
    """
    gained = with_tp.parts.get("tp", 0.0) * (1 - 1 / PIECES)
    seconds = (with_tp.seconds - gained) / with_tp.samples
    return Strategy(seconds / best.pace, with_tp.bytes / best.bytes)


def eight_bit_products(best: Outlook) -> Strategy:
    """Return what products of 8 bits take: half the time of those of 16. Attention stays as it is, casts are for free.

    (Micikevicius et al. 2022, FP8 Formats for Deep Learning.)
    """
    return Strategy(1 - best.parts["product"] / 2 / best.seconds, 1.0)
