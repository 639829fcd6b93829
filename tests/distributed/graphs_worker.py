"""train_mp.py, and train_mp_graphs.py with the stand-in for a CUDA graph.

    python -m tests.distributed.graphs_worker FLAGS...

The runs are named `eager` and `graph`.
"""

import sys
from functools import partial

import train_mp
import train_mp_graphs
from tests.distributed.recorded_graph import RecordedGraph
from utils.ranks.start import start
from utils.ranks.world import World

capture = partial(train_mp_graphs.capture, graph=RecordedGraph)


def both(world: World, argv: list[str]) -> None:
    train_mp.main(world, [*(flag for flag in argv if flag != "--graph_optimizer"), "--run_num", "eager"])
    graphed = [*argv, "--run_num", "graph", "--graph_warmup", "12"]
    train_mp.main(world, graphed, chapter=3, transform=capture)


if __name__ == "__main__":
    start(both, sys.argv[1:])
