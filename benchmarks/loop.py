"""What the training loop costs beside the step."""

import statistics
import tempfile
import time
from functools import partial

import torch

import train
from benchmarks.bench import REFERENCE
from benchmarks.data import path_flags
from utils.config_reader import load_config
from utils.launch import World, join
from utils.sample_data import write_shape


def loop_overhead(rounds: int) -> list[float]:
    """Return what the training loop (reading, normalising, records, log) adds to the bare step, a median a round.

    An iteration of the loop and a bare step on one batch that lies in memory take turns.
    """
    batch = [torch.randn(8, 20, 64, 128) for _ in range(2)]
    ratios: list[list[float]] = []

    class Alternating(train.Run):
        def batches(self):
            ratios.append([])
            self.resumed = time.perf_counter()
            yield from super().batches()

        def after_step(self, *args: object) -> None:
            super().after_step(*args)
            begin = time.perf_counter()
            step(*batch)
            update(config.lr)
            end = time.perf_counter()
            ratios[-1].append((begin - self.resumed) / (end - begin) - 1)
            self.resumed = end

        def after_epoch(self, *_: object) -> None:
            self.epochs += 1

        def __exit__(self, *error: object) -> None:
            super().__exit__(KeyboardInterrupt, None, None)  # nothing was validated, so there is no result to log

    count = 20
    join(World())
    with tempfile.TemporaryDirectory() as folder:
        write_shape(f"{folder}/data", (20, 64, 128), samples=8 * count + 1)
        flags = [*REFERENCE, "--expdir", folder, "--num_iters", str(count * rounds), *path_flags(f"{folder}/data")]
        flags += ["--checkpoint_every", "None"]
        config = load_config(flags)[0].with_batches(1)
        data = train.WeatherData(config)
        model = train.build_model(config, data)
        optimizer, scaler = train.build_optimizer(model, config), train.build_scaler(config, data.device)
        step = partial(train.forward_backward, model, scaler=scaler, config=config)
        update = partial(train.update_weights, optimizer, scaler, config)
        with Alternating(config, World(), data.device, data, train.build_model) as run:
            run.begin(train.TrainingState(model, optimizer, scaler), [])
            train.train(step, update, model, data, config, run)
    torch.distributed.destroy_process_group()
    return [statistics.median(round[1:]) for round in ratios]  # the first iteration waits for the reader to start
