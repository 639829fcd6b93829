"""What a chapter needs before it can train, and does not teach."""

import torch
from torch.nn.parallel import DistributedDataParallel

from utils.backend import check_backend
from utils.compiler import check_compiler
from utils.config.settings import Config
from utils.device import allow_tf32, pick_device
from utils.measure.machine import check_psutil
from utils.optimizers import check_optimizer
from utils.record.mlflow_board import check_tracker


def prepare(config: Config, local_rank: int, trains: bool = True) -> torch.device:
    """Return this rank's device, set up to train or to forecast alone. Raises ValueError for what it cannot do."""
    device = pick_device(config.device, local_rank, config.expandable_segments)
    check_backend(config, device)
    check_compiler(config, device, trains)
    check_optimizer(config)
    check_tracker(config.tracker)
    if config.report:
        check_psutil()
    allow_tf32(config.tf32)
    return device


def settle_buckets(model: DistributedDataParallel) -> DistributedDataParallel:
    """Let DDP arrange its buckets before the first step, and return it.

    DDP learns in its first backward pass in which order gradients come, and fills buckets in this order from then on.
    Where in a bucket a gradient lies decides in which order three or more ranks add it up, so a process that goes on
    with a run would begin with other last digits than the process before had. Here the first backward pass is one of
    the parameters alone, the last ones first, in every process.

    What a forward pass does before it is no public function. A whole one would count among those in which DDP looks at
    its own timing (distributed/graphs.py). The tests of a run that goes on with 4 ranks see it (test_interruptions.py).
    """
    model.reducer.prepare_for_backward([])
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()
    model.zero_grad(set_to_none=True)
    return model
