"""Exercise: a training is wrong by a factor; find the missing reduction. TODO 1 and 2; this tells what is next:

    python exercises/check.py exercises/missing_reduction.py

A small model divides tokens and weights among all ranks, as chapter 2 does: tokens are gathered in front of `fc1`, sums
of parts are scattered behind `fc2`, and the gradients of replicas (weights that all ranks have, and use with tokens of
their own) are added up. The mappings are the project's, and right. One reduction is missing. It trains all the same,
and the loss falls:

    torchrun --nproc_per_node=2 exercises/missing_reduction.py
    torchrun --nproc_per_node=4 exercises/missing_reduction.py

Once TODO 1 is done, these print each gradient beside that of the same model on one process, in float64.

Think first: which faults would make the gradient of one layer wrong, which those of all layers in front of one, and
which all, by the same factor? How does the factor depend on the number of ranks?
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distributed.mappings import all_gather, reduce, reduce_scatter
from exercises.checks.missing_reduction import Model, train


def ratio(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return by which factor `expected` comes nearest to `found`, and how much then differs, as a share of `found`.

    The factor f makes |found - f expected| as small as can be; the share is |found - f expected| / |found|. A share of
    0 says that the factor is all that is wrong.
    """
    raise NotImplementedError("TODO 1: the factor of the least squares. Numbers of a gradient may be 0: no quotients")


# TODO 2: what is missing? Look at the factors first, then for the place.
def forward(model: Model, x: Tensor) -> Tensor:
    """Return the model's output for this rank's tokens, [B, n, D]."""
    x = model.embed(x)
    h = all_gather(model.norm(x), 1, dist.group.WORLD)
    h = F.linear(F.gelu(F.linear(h, model.fc1_weight, model.fc1_bias)), model.fc2_weight)
    return x + reduce_scatter(h, 1, dist.group.WORLD) + model.fc2_bias


def relative_loss(y: Tensor, target: Tensor) -> Tensor:
    """Return |y - target| / |target| of each image, their mean; this rank has the tokens [B, n, D] of both."""
    error = reduce((y - target).square().sum((1, 2)), dist.group.WORLD)
    size = target.square().sum((1, 2))
    return (error / size).sqrt().mean()


def add_up(model: Model) -> None:
    """Add up over the ranks the gradients of the weights that all have."""
    for p in model.replicas():
        dist.all_reduce(p.grad)


if __name__ == "__main__":
    train(sys.modules[__name__])
