"""What the training loop costs beside the step."""

import statistics
import tempfile
import time
from functools import partial

import torch
from torch import Tensor

import train
from benchmarks.harness.bench import REFERENCE
from benchmarks.harness.data import path_flags, train_here
from utils.device import synchronize
from utils.observers import EpochRecord, Observer
from utils.run.run import Run
from utils.sample_data.write import write_shape


class BareSteps(Observer):
    """After each iteration of the loop a bare step on one batch that lies in memory."""

    def __init__(self, batch: list[Tensor]):
        self.batch = batch
        self.ratios: list[list[float]] = [[]]  # of each epoch: what an iteration takes over the bare step, less 1

    def begin(self, run: Run) -> None:
        config, state, self.device = run.job.config, run.state, run.job.device
        self.batch = [x.to(self.device) for x in self.batch]
        self.step = partial(train.forward_backward, state.model, scaler=state.scaler, config=config)
        self.update = partial(train.update_weights, state.optimizer, state.scaler, config, lr=config.lr)
        self.resumed = self._now()

    def after_step(self, iteration: int, left: int) -> None:
        begin = self._now()
        self.step(*self.batch)
        self.update()
        end = self._now()
        self.ratios[-1].append((begin - self.resumed) / (end - begin) - 1)
        self.resumed = end

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def after_epoch(self, record: EpochRecord, example: tuple) -> None:
        self.ratios.append([])


def loop_overhead(rounds: int) -> list[float]:
    """Return what the training loop (reading, normalising, records, log) adds to the bare step, a median a round.

    An iteration of the loop and a bare step on one batch that lies in memory take turns.
    """
    batch = [torch.randn(8, 20, 64, 128), torch.randn(1, 8, 20, 64, 128), torch.empty(0, 8, 0, 64, 128)]
    count, bare = 20, BareSteps(batch)
    with tempfile.TemporaryDirectory() as folder:
        write_shape(f"{folder}/data", (20, 64, 128), samples=8 * count + 1)
        flags = [*REFERENCE, "--expdir", folder, "--num_iters", str(count * rounds), *path_flags(f"{folder}/data")]
        train_here([*flags, "--checkpoint_every", "None", "--limit_nsamples_val", "1"], [bare])
    return [statistics.median(epoch[1:]) for epoch in bare.ratios[:-1]]  # the first iteration waits for the reader
