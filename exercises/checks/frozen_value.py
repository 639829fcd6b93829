"""A step that is recorded once, and what must not be frozen in it."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.checks.common import Wrong, close, load, say
from tests.distributed.recorded_graph import RecordedGraph

MINUTES, DEFINES = 35, "RecordedStep"
AFTER = "3-cuda-graphs.md#what-a-recording-holds"
HINTS = """
A replay reads the addresses that were recorded. The batch of the next step lies elsewhere: copy it to the recorded one,
self.x.copy_(x).

lr is a number: what is computed with it while recording has its value of then, for ever. A tensor of one number, filled
with self.lr.fill_(lr) before each replay, is read anew.

self.t += 1 of a Python number happens once. self.t.add_(1) of a tensor is an operation, and recorded. BETA1 ** self.t
works with a tensor.

Recording does nothing: after it the first step is still to be done. So replay at the first call, too.

Each replay writes its loss to the same place. Who keeps the losses of all steps needs a copy: clone().
"""
STEPS = 5


class Counted(RecordedGraph):
    """The stand-in; counts recordings and replays."""

    def __init__(self):
        super().__init__([])
        self.recordings = self.replays = 0

    def record(self):
        self.recordings += 1
        self.operations = []
        return super().record()

    def replay(self) -> None:
        self.replays += 1
        super().replay()


def model_and_batches() -> tuple[nn.Module, list[tuple[Tensor, Tensor, float]]]:
    """Return a model, and batches with the learning rate of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, [(torch.randn(8, 4), torch.randn(8, 2), 0.01 * 2**i) for i in range(STEPS)]


def eager(change: Callable[[int], tuple[int, int, int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return losses and final weights without a graph, where step i takes batch, rate and number as `change` says."""
    model, batches = model_and_batches()
    parameters, losses = list(model.parameters()), []
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for i in range(STEPS):
        batch, rate, t = change(i)
        x, y, _ = batches[batch]
        loss = F.mse_loss(model(x), y)
        losses.append(loss.detach())
        for p, g, (m, v) in zip(parameters, torch.autograd.grad(loss, parameters), moments):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            mean, square = m / (1 - 0.9**t), v / (1 - 0.999**t)
            p.data -= batches[rate][2] * mean / (square.sqrt() + 1e-8)
    return losses, parameters


FROZEN = (
    (
        lambda i: (0, i, i + 1),
        "each replay takes the first batch: the others lie elsewhere, and were not brought (TODO 2)",
    ),
    (lambda i: (i, 0, i + 1), "the learning rate is frozen: it stays what it was when the step was recorded (TODO 1)"),
    (
        lambda i: (i, i, 1),
        "the number of the step is frozen: each replay corrects the moments as the first step (TODO 1)",
    ),
    (lambda i: (i, 0, 1), "learning rate and number of the step are frozen: both are numbers in Python (TODO 1)"),
    (lambda i: (0, 0, 1), "all is frozen: batch, learning rate, number of the step (TODO 1 and 2)"),
    (lambda i: (0, 0, i + 1), "batch and learning rate are frozen (TODO 1 and 2)"),
    (lambda i: (0, i, 1), "batch and number of the step are frozen (TODO 1 and 2)"),
)


def check(path: str, rank: int, size: int) -> None:
    solution = load(path)
    model, batches = model_and_batches()
    graph, before = Counted(), copy.deepcopy(model)
    step = solution.RecordedStep(model, graph, *batches[0][:2])
    losses, first = [], None
    for x, y, lr in batches:
        try:
            losses.append(step(x.clone(), y.clone(), lr))
        except RuntimeError as error:
            if "capturing" not in str(error):
                raise
            raise Wrong(
                f"the host reads a value in the recording ({error}): it would be read once, so it is refused"
            ) from None
        first = first or [p.detach().clone() for p in model.parameters()]
    check_use(graph, losses, first, before)
    say(rank, "one recording, replayed from the first step on")
    check_steps(losses, list(model.parameters()))
    say(rank, "five replays are five steps of Adam")
    if any(isinstance(loss, Tensor) and loss.requires_grad for loss in losses):
        raise Wrong("the losses hold on to the graph of autograd: detach them")
    say(rank, "and their losses are kept")


def check_use(graph: Counted, losses: list, first: list[Tensor], before: nn.Module) -> None:
    """Raise Wrong where a graph is not used as graphs are."""
    if not all(isinstance(loss, Tensor) for loss in losses):
        raise Wrong("a call returns its loss, a tensor (TODO 2)")
    if not graph.recordings:
        raise Wrong("nothing was recorded: self.graph.record() (TODO 2)")
    if graph.recordings > 1:
        raise Wrong(f"{STEPS} steps made {graph.recordings} recordings: one is enough, a recording is dear (TODO 2)")
    if not graph.replays:
        raise Wrong("nothing was replayed: recording does nothing yet (TODO 2)")
    if all(torch.equal(p, q) for p, q in zip(first, before.parameters())):
        raise Wrong("the first call changes no weight: recording does nothing, so replay after it as well (TODO 2)")
    if graph.replays != STEPS:
        raise Wrong(f"{STEPS} steps made {graph.replays} replays: each step is one, and nothing beside it (TODO 2)")


def check_steps(losses: list[Tensor], parameters: list[Tensor]) -> None:
    """Raise Wrong where weights or losses are not those of Adam, with what is frozen where that explains it."""
    expected, weights = eager(lambda i: (i, i, i + 1))
    if not all(close(p.detach(), q.detach()) for p, q in zip(parameters, weights)):
        for change, why in FROZEN:
            if all(close(p.detach(), q.detach()) for p, q in zip(parameters, eager(change)[1])):
                raise Wrong(why)
        raise Wrong("the weights are not those of Adam after five steps (TODO 3)")
    if all(torch.equal(loss, losses[-1]) for loss in losses):
        raise Wrong(
            "the losses of all steps are that of the last: each replay writes to the same place; clone (TODO 2)"
        )
    if not all(close(a.detach(), b) for a, b in zip(losses, expected)):
        raise Wrong("the weights are right, the losses are not: are they those of their steps? (TODO 2)")
