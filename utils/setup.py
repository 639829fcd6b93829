"""What a chapter needs before it can train, and does not teach."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.compiler import check_compiler
from utils.config import Config
from utils.device import allow_tf32, pick_device
from utils.system_watch import check_psutil
from utils.tracker import check_tracker


def prepare(config: Config, local_rank: int) -> torch.device:
    """Return this rank's device, set up. Raises ValueError for what it cannot do."""
    device = pick_device(config.device, local_rank, config.expandable_segments)
    check_compiler(config, device)
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


def load_weights(model: nn.Module, path: str | None) -> nn.Module:
    """Set the weights of `model` to those in the file, and return it; without a path they stay as they were drawn.

    Raises ValueError where the file cannot be read, and where its model is another one.
    """
    if path is None:
        return model
    remedy = "give a file of `python -m utils.checkpoint export`"
    try:
        weights = torch.load(Path(path), map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read the weights {path} ({error.strerror}): {remedy}") from None
    except Exception as error:  # whatever it is, it is no such file
        raise ValueError(f"{path} holds no weights ({type(error).__name__}): {remedy}") from None
    if not isinstance(weights, dict) or not weights.keys() & model.state_dict().keys():
        raise ValueError(f"{path} holds no weights of this model: {remedy}")
    return set_weights(model, weights, path)


def set_weights(model: nn.Module, weights: dict[str, Tensor], path: str) -> nn.Module:
    """Set the weights of `model`, and return it. Raises ValueError where those from `path` are another model's."""
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for name in dict.fromkeys([*shapes, *weights]):
        there, here = tuple(weights[name].shape) if name in weights else "not there", shapes.get(name, "not there")
        if there != here:
            raise ValueError(
                f"{name} in {path} is {there}, and in this model {here}: give the configuration of its training "
                f"(the run's config.yaml has it: --yaml_config, --config)"
            )
    model.load_state_dict(weights)
    return model
