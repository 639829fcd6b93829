"""A rank's passes through a model of one block: enough to know those of any depth and of any number of samples.

All blocks do the same. What a pass does beside them it does once. And whatever an operation computes, moves or sends is
some number for each sample, and another for each pass. So two traces of one block, of 2 and of 4 samples, stand for
all. And what attention does does not depend on how the MLP is computed: one of each is enough to know all pairs. A
planner that looks at thousands of layouts has no time for a trace of each. tests/benchmarks/test_plan.py holds sketches
to traces of whole models.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.harness.memory import LiveMemory
from benchmarks.planner.trace import Rank, without_data, without_values
from networks.vit import Block
from utils.comm import Grid
from utils.config.settings import Config
from utils.data.fields import Fields
from utils.data.to_device import normalisers as normalisers_of
from utils.measure.operations import Operation, Recorder

SAMPLES = (2, 4)
ATTENTION, MLP, REST = "attention", "mlp", "rest"  # the halves of a block, and all else


@dataclass(frozen=True)
class Pass:
    """Forward and backward pass of so many samples, as rank 0 takes them, of a model with one block.

    Attributes:
        operations: by part, each with its phase.
        kept: bytes that wait for the backward pass, by part.
        peak: bytes, at most, beside weights and samples.
        batch: bytes of the samples.
    """

    operations: dict[str, list[Operation]]
    kept: dict[str, float]
    peak: float
    batch: float

    @property
    def working(self) -> float:
        """Bytes, at most, beside weights, samples, and what is kept."""
        return self.peak - sum(self.kept.values())


@dataclass(frozen=True)
class Sketch:
    """Passes of SAMPLES samples, and what follows for any other number."""

    passes: tuple[Pass, ...]

    def of(self, samples: int) -> Pass:
        """Return the passes of so many samples."""
        if samples not in self.known:
            self.known[samples] = self._of(samples)
        return self.known[samples]

    @cached_property
    def known(self) -> dict[int, Pass]:
        return {}

    def _of(self, samples: int) -> Pass:
        few, many = self.passes
        step = (samples - SAMPLES[0]) / (SAMPLES[1] - SAMPLES[0])
        kept = {part: between(few.kept[part], many.kept[part], step) for part in few.kept}
        operations = {
            part: [operation_between(x, y, step) for x, y in zip(found, many.operations[part], strict=True)]
            for part, found in few.operations.items()
        }
        peak, batch = between(few.peak, many.peak, step), between(few.batch, many.batch, step)
        return Pass(operations, kept, peak, batch)

    def with_attention_of(self, other: "Sketch") -> "Sketch":
        """Return the sketch of a model whose attention is computed as another's, and all else as this one's."""
        return Sketch(tuple(_with_attention_of(*both) for both in zip(self.passes, other.passes)))


def _with_attention_of(ours: Pass, other: Pass) -> Pass:
    operations = ours.operations | {ATTENTION: other.operations[ATTENTION]}
    kept = ours.kept | {ATTENTION: other.kept[ATTENTION]}
    return Pass(operations, kept, sum(kept.values()) + max(ours.working, other.working), ours.batch)


def between(x: float, y: float, step: float) -> float:
    return x + (y - x) * step


def operation_between(x: Operation, y: Operation, step: float) -> Operation:
    names = ("read", "written", "flops", "sent")
    numbers = {name: round(between(getattr(x, name), getattr(y, name), step)) for name in names}
    sizes = tuple(round(between(a, b, step)) for a, b in zip(x.sizes, y.sizes))
    return replace(x, **numbers, sizes=sizes)


class Parts(Recorder):
    """Records operations, and in `parts` to which part each belongs; in `kept` the bytes that wait, by part."""

    def __init__(self, groups: dict[str, str], block: Block):
        super().__init__(groups)
        self.live, self.part, self.outer, self.attended = LiveMemory(), REST, [], 0
        self.parts: list[str] = []
        self.kept: dict[str, float] = {ATTENTION: 0, MLP: 0}
        block.register_forward_pre_hook(self._enter)
        block.norm2.register_forward_pre_hook(self._go_on)
        block.register_forward_hook(self._leave)
        # Gradients come the other way.
        block.register_forward_hook(partial(self._hook_gradient, part=MLP))
        block.attn.register_forward_hook(partial(self._hook_gradient, part=ATTENTION))

    def _enter(self, block: Block, args: tuple[Tensor]) -> None:
        self.outer.append((self.part, self.live.now))
        self.part = ATTENTION
        if args[0].requires_grad:
            args[0].register_hook(lambda _: self._set(REST))

    def _go_on(self, *_: object) -> None:
        if self.part == ATTENTION and not self._tracker.is_bw:  # else it is computed again
            self.attended = self.live.now
            self.kept[ATTENTION] += self.attended - self.outer[-1][1]
        self.part = MLP

    def _leave(self, *_: object) -> None:
        self.part, _ = self.outer.pop()
        if not self._tracker.is_bw:
            self.kept[MLP] += self.live.now - self.attended

    def _hook_gradient(self, module: Block, args: tuple, out: Tensor, part: str) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: self._set(part))

    def _set(self, part: str) -> None:
        self.part = part

    def _add(self, operation: Operation) -> None:
        super()._add(operation)
        self.parts.append(self.part)


def sketch(config: Config, grid: Grid) -> Sketch:
    """Return the sketch of a configuration's passes on rank 0 of a grid, whose groups are there.

    What goes over dp-cp is left out: the planner adds it.
    """
    return Sketch(tuple(_passes(config, grid, samples) for samples in SAMPLES))


def _passes(config: Config, grid: Grid, samples: int) -> Pass:
    # A rank that sends no gradients; `noddp` stands for that here, on any grid.
    config = replace(config, depth=1, local_batch_size=samples, accumulation_steps=1, noddp=True, shard="none")
    config = without_values(config)
    with without_data():
        rank = Rank(config, grid)
        recorder = Parts(rank.recorder.groups, rank.model.blocks[0])
        normalisers = normalisers_of(Fields.blank(config), torch.device("cpu"), compiled=False)
        kept: list[int] = []
        rank.model.register_forward_hook(lambda *_: kept.append(recorder.live.now))
        with recorder.live, recorder:
            rank.passes(*(normalise(x) for normalise, x in zip(normalisers, rank.batch)))
    both = list(zip(recorder.operations, recorder.parts))
    operations = {part: [op for op, of in both if of == part] for part in (ATTENTION, MLP, REST)}
    rest = kept[-1] - sum(recorder.kept.values())
    return Pass(operations, recorder.kept | {REST: rest}, recorder.live.peak, sum(x.nbytes for x in rank.batch))


@dataclass(frozen=True)
class End:
    """What a rank does once a step, after all passes: it adds up gradients over tp, and takes the optimiser's step.

    Attributes:
        operations: of models of one block, and of two: for each block more they are as many more.
        block, rest: parameters of the rank, of one block and of all else.
    """

    operations: tuple[list[Operation], list[Operation]]
    block: int
    rest: int


def end_of_step(config: Config, grid: Grid) -> End:
    """Return what ends a step of a configuration on rank 0 of a grid, whose groups are there."""
    (one, first), (two, second) = (_end(replace(config, depth=depth), grid) for depth in (1, 2))
    return End((one, two), second - first, 2 * first - second)


def _end(config: Config, grid: Grid) -> tuple[list[Operation], int]:
    """Return what ends a step, and the parameters of the rank."""
    with without_data():
        config = replace(config, local_batch_size=1, accumulation_steps=1, noddp=True, shard="none")
        rank = Rank(without_values(config), grid)
        rank.scaler.scale(torch.zeros(()))  # it begins
        for _ in range(2):  # in the second step the optimiser has its state
            for p in rank.model.parameters():
                p.grad = torch.zeros_like(p)
            with rank.recorder:
                rank.gradients.sync()
                rank.update()
    return rank.recorder.operations, rank.parameters
