"""A rank of a run whose collectives are counted: `python tests/measure/timeline_worker.py train_mp.py FLAGS...`.

Its last line is JSON: in which part of the timeline each collective began that the main thread waits for (of those that
PyTorch's functions start; DDP has its own), and how many gradients the timeline was told of.
"""

import functools
import importlib
import json
import sys
from collections import Counter

import torch.distributed as dist

from distributed import mappings
from utils import spans as timeline
from utils.ranks.start import start

parts, gradients = Counter(), 0


def counted(collective):
    @functools.wraps(collective)
    def call(*args, **kwargs):
        if timeline.timeline is not None and not kwargs.get("async_op"):
            parts[timeline.timeline.parts[-1]] += 1
        return collective(*args, **kwargs)

    return call


def count_gradient(self):
    global gradients
    gradients += 1
    told(self)


told = timeline.Timeline.gradient_is_there
timeline.Timeline.gradient_is_there = count_gradient
for name in ("all_reduce", "all_to_all_single"):
    setattr(dist, name, counted(getattr(dist, name)))
for name in ("all_gather_single", "reduce_scatter_single"):
    setattr(mappings, name, counted(getattr(mappings, name)))
script, *argv = sys.argv[1:]
start(importlib.import_module(script.removesuffix(".py")).main, argv)
print(json.dumps({"parts": parts, "gradients": gradients}))
