"""A training on ranks that is wrong by a factor: the model, the same on one process, and what solutions must reach."""

import os
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exercises.checks.common import Wrong, close, load, say

MINUTES, DEFINES, SIZES = 45, "relative_loss", (2, 4)
AFTER = "2-model-parallel.md#what-the-gradients-need"
HINTS = """
The factor f that makes |found - f expected| least: found and expected are long vectors, and f expected is the
projection of one upon the other. f = <found, expected> / <expected, expected>.

Run it on 2 ranks. Are the factors of all weights the same? Then every layer passes on rightly what arrives from behind
it, and what arrives is wrong: look at what stands behind all layers.

Run it on 4 ranks as well. A sum that is missing somewhere gives a factor like the number of ranks, or one over it. This
is neither: what does the loss do with its sums?

|y - target| and |target| are those of the whole image. Which of the two sums is over this rank's tokens only?
"""
TOKENS, DIM, HIDDEN = 16, 6, 12
SLICES = {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1}  # which dim is cut


class Model(nn.Module):
    """Embedding, norm and MLP: on `size` ranks of tensor and sequence parallelism, rank's slices."""

    def __init__(self, rank: int, size: int):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        fc1, fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        whole = {"fc1_weight": fc1.weight, "fc1_bias": fc1.bias, "fc2_weight": fc2.weight, "fc2_bias": fc2.bias}
        for name, p in whole.items():
            self.register_parameter(name, nn.Parameter(own_slice(name, p.detach(), rank, size).clone()))

    def replicas(self) -> Iterator[nn.Parameter]:
        """Yield the weights that all ranks have."""
        yield from (p for name, p in self.named_parameters() if name not in SLICES)


def own_slice(name: str, x: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's part of a weight, or of its gradient."""
    return x.chunk(size, SLICES[name])[rank] if name in SLICES else x


def gradients(solution: ModuleType, model: Model, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a step, where this rank has the tokens x and target, [B, n, D]."""
    model.zero_grad(set_to_none=True)
    solution.relative_loss(solution.forward(model, x), target).backward()
    solution.add_up(model)
    return {name: p.grad for name, p in model.named_parameters()}


def whole_gradients(x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the same step on one process: x and target are all tokens, [B, TOKENS, D]."""
    model = Model(0, 1)
    e = model.embed(x)
    h = F.gelu(F.linear(model.norm(e), model.fc1_weight, model.fc1_bias))
    y = e + F.linear(h, model.fc2_weight, model.fc2_bias)
    ((y - target).square().sum((1, 2)) / target.square().sum((1, 2))).sqrt().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def images() -> tuple[Tensor, Tensor]:
    """Return input and target of all tokens, [B, TOKENS, D]; each token of the target is a unit vector."""
    torch.manual_seed(1)
    x = torch.randn(3, TOKENS, DIM)
    return x, F.normalize(x.flip(2) + 0.1 * torch.randn(3, TOKENS, DIM), dim=2)


def train(solution: ModuleType) -> None:
    """Take five steps on torchrun's ranks; print the losses, and the first gradients beside those of one process."""
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    x, target = images()
    own = [t.chunk(size, 1)[rank] for t in (x, target)]
    model = Model(rank, size)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(5):
        with torch.no_grad():
            loss = solution.relative_loss(solution.forward(model, own[0]), own[1])
        found = gradients(solution, model, *own)
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
        if rank == step == 0:
            told(solution, found, {name: own_slice(name, g, 0, size) for name, g in whole_gradients(x, target).items()})
        optimizer.step()
    dist.destroy_process_group()


def told(solution: ModuleType, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Print by which factor each gradient is off."""
    for name in expected:
        try:
            factor, rest = solution.ratio(found[name], expected[name])
        except NotImplementedError:
            print("  by which factors are the gradients off? TODO 1 is not done yet")
            return
        print(f"  gradient of {name:12} {factor:.4f} times what it should be, and {rest:.0e} of it is something else")


def check(path: str, rank: int, size: int) -> None:
    solution = load(path)
    check_ratio(solution, rank)
    even = images()
    torch.manual_seed(2)
    uneven = tuple(x * torch.linspace(0.1, 2, TOKENS)[:, None] for x in even)
    for (x, target), kind in ((even, "even"), (uneven, "uneven")):
        own = [t.chunk(size, 1)[rank].clone() for t in (x, target)]
        found, whole = gradients(solution, Model(rank, size), *own), whole_gradients(x, target)
        off = {}
        for name, grad in whole.items():
            expected = own_slice(name, grad, rank, size)
            if found[name] is None or not close(found[name], expected):
                off[name] = found[name] is not None and solution.ratio(found[name], expected)
        if off:
            raise Wrong(diagnosis(off, len(whole), kind, size))
        say(
            rank,
            f"all gradients are those of one process, of {kind} images",
        )


def check_ratio(solution: ModuleType, rank: int) -> None:
    """Hold `ratio` against vectors of which it is known."""
    expected = torch.tensor([[1.0, 0.0], [-2.0, 2.0]])
    other = torch.tensor([[2.0, 7.0], [1.0, 0.0]])  # at a right angle to it
    for found, told in ((3 * expected, (3.0, 0.0)), (0.5 * expected + 0.1 * other, (0.5, 0.0))):
        factor, rest = solution.ratio(found, expected)
        share = float((found - told[0] * expected).norm() / found.norm())
        if not isinstance(factor, float) or abs(factor - told[0]) > 1e-9:
            raise Wrong(
                f"ratio({found.tolist()}, {expected.tolist()}) gives the factor {factor}, and {told[0]} comes "
                "nearest: the scalar product of both over that of expected with itself (TODO 1)"
            )
        if abs(rest - share) > 1e-9:
            raise Wrong(
                f"the share of what else differs is {rest}, not {share:.3f}: |found - f expected| / |found| (TODO 1)"
            )
    say(rank, "factors are found")


def diagnosis(off: dict[str, tuple[float, float]], weights: int, kind: str, size: int) -> str:
    """Return what gradients that are off say."""
    factors = ", ".join(f"{name} {of[0]:.3f}" if of else f"{name} has none" for name, of in off.items())
    if kind == "uneven":
        return (
            "right only where the tokens of all ranks weigh the same: a factor in some place hides what is missing, "
            f"and does not mend it ({factors})"
        )
    pure = [of[0] for of in off.values() if of and of[1] < 1e-9]
    if len(off) == weights and len(pure) == weights and max(pure) - min(pure) < 1e-9:
        return (
            f"all gradients are {pure[0]:.4f} times what they should be, on {size} ranks: what do all layers have "
            "behind them? (TODO 2)"
        )
    return f"these gradients are off by: {factors}; the others are right. Whose are they? (TODO 2)"
