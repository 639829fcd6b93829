"""Exercise: record a training step; no value may be frozen that changes. TODO 1 to 3; this tells what is next:

    python exercises/check.py exercises/frozen_value.py

A CUDA graph holds operations and the addresses of their tensors. Python runs once, while it is recorded; each replay
does the same operations again, on what lies at those addresses then. On a laptop a stand-in takes the graph's place: it
records and replays what PyTorch does on a CPU, by the same rules.

    with graph.record():                what is done here is recorded, and not done yet
        loss = ...
    graph.replay()                      now it is done; and again at each call

Think first: of a step of Adam, what changes from step to step? Which of it is a tensor at an address that stays, and
which a number in Python, or a tensor that lies elsewhere each time? (Chapter 3. Adam: Kingma and Ba 2015, algorithm 1.
Ours is distributed/graphs.py.)
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401 - you will need it
from torch import Tensor, nn

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class RecordedStep:
    """A step of Adam for the mean squared error, recorded at the first call and replayed at each.

    Args:
        graph: has record() and replay(), see above.
        x, y: a batch, for its shape.
    """

    def __init__(self, model: nn.Module, graph: Any, x: Tensor, y: Tensor):
        self.model, self.graph, self.is_recorded = model, graph, False
        self.parameters = list(model.parameters())
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        raise NotImplementedError("TODO 1: places for all that changes and that a replay reads: which four are they?")
        # And a place for the loss. The shapes of x and y are those of all batches.

    def __call__(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """Take a step with a batch; return its loss, a tensor that later steps leave alone."""
        raise NotImplementedError("TODO 2: bring x, y and lr to their places, record at the first call, replay at each")

    def _step(self) -> None:
        """What is recorded."""
        raise NotImplementedError("TODO 3: loss, gradients (torch.autograd.grad) and Adam, of tensors in their places")
        # m = BETA1 m + (1 - BETA1) g          p = p - lr m' / (sqrt(v') + EPS)
        # v = BETA2 v + (1 - BETA2) g^2        m' = m / (1 - BETA1^t), v' = v / (1 - BETA2^t), t = 1 in the first step
