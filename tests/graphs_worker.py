"""train_mp_graphs.py with the stand-in for a CUDA graph: `python -m tests.graphs_worker FLAGS...`."""

import sys
from functools import partial

import train_mp
import train_mp_graphs
from tests.recorded_graph import RecordedGraph
from utils.launch import start

capture = partial(train_mp_graphs.capture, graph=RecordedGraph)

if __name__ == "__main__":
    start(partial(train_mp.main, chapter=3, transform=capture), sys.argv[1:])
