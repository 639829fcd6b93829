"""train.py in a chosen dtype, which also keeps the first step's gradients: `dp_worker.py DTYPE GRADS.pt FLAGS...`."""

import sys

import torch

import train
from utils.launch import start

dtype, path, *argv = sys.argv[1:]
torch.set_default_dtype(getattr(torch, dtype))
total_norm, kept = train.get_total_norm, []


def keep(grads):
    if not kept:
        kept.extend(g.clone() for g in grads)
    return total_norm(grads)


train.get_total_norm = keep
start(train.main, argv)
torch.save(kept, path)
