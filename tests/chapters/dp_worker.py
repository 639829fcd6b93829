"""train.py in a chosen dtype: `dp_worker.py DTYPE KEPT.pt FLAGS...`.

KEPT.pt gets the first step's gradients and the number of calls of `no_sync`.
"""

import functools
import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

import train
from utils.ranks.start import start

dtype, path, *argv = sys.argv[1:]
torch.set_default_dtype(getattr(torch, dtype))
kept = []


def keep(grads):
    if not kept:
        kept.extend(g.clone() for g in grads)
    return get_total_norm(grads)


def count(self):
    global calls
    calls += 1
    return no_sync(self)


train.update_weights = functools.partial(train.update_weights, total_norm=keep)
calls, no_sync = 0, DistributedDataParallel.no_sync
DistributedDataParallel.no_sync = count
start(train.main, argv)
torch.save({"gradients": kept, "no_sync": calls}, path)
