"""Chapter 3: the same training, of which the host launches forward and backward pass at once: CUDA graphs.

    python train_mp_graphs.py --config=demo
    TRAIN_SCRIPT=train_mp_graphs.py sbatch -N 4 submit_pm_mp.sh --config=mp_short --tensor_parallel=4

New in this chapter: a step is recorded after some iterations, all its kernels and collectives, and then replayed
(distributed/graphs.py). The model, its step and the loop are those of chapters 1 and 2.
"""

import sys
from collections.abc import Callable
from functools import partial

from utils.config.reader import load_config  # isort: skip (first: it says if torch is missing or too old)
import torch
from torch import Tensor

import train_mp
from distributed.graphs import Captured, CudaGraph, check_capture
from distributed.parallelize import ParallelViT
from utils.comm import Grid
from utils.config.settings import Config
from utils.ranks.start import World, start
from utils.run.run import Run


def prepare(config: Config, grid: Grid, device: torch.device) -> None:
    """Refuse what cannot be recorded. From here on nothing runs on the default stream, which cannot be recorded."""
    check_capture(config, grid, device)
    torch.cuda.set_stream(torch.cuda.Stream(device))


def capture(
    step: Callable[..., Tensor],
    update: Callable[[float], Tensor],
    model: ParallelViT,
    config: Config,
    run: Run,
    graph: type[CudaGraph] = CudaGraph,
) -> tuple[Callable, Callable]:
    """Return step and update: the step such that it is recorded and replayed, with `graph_optimizer` both.

    Forward, backward, the collectives of chapter 2 and DDP's lie in one recording, with accumulation all its passes.
    """
    # DropPath's numbers come from a generator of its own: a replay must draw new ones.
    captured = partial(Captured, warmup=config.graph_warmup, make_graph=lambda: graph([model.generator]), log=run.log)
    step = captured(step, "step")
    if not config.graph_optimizer:
        return step, update
    captured_update, device = captured(update, "update", after=step), run.job.device
    # A number would be recorded as it is; a tensor is read anew in each replay.
    return step, lambda lr: captured_update(torch.full((), lr, device=device))


def main(world: World, argv: list[str]) -> None:
    train_mp.main(world, argv, chapter=3, prepare=prepare, transform=capture)


if __name__ == "__main__":
    start(main, sys.argv[1:], partial(load_config, chapter=3))
