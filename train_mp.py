"""Chapter 2: a model too large for one device, shared out over a grid of data x context x tensor parallel ranks.

    torchrun --nproc_per_node=4 train_mp.py --config=demo --tensor_parallel=2 --context_parallel=2
    sbatch -N 4 submit_pm_mp.sh --config=mp --tensor_parallel=4

New in this chapter: the grid of ranks and its groups (utils/comm.py), collectives that have a gradient
(distributed/mappings.py), layers that hold slices of the weights (distributed/layers.py), what gradients then need.
The loop, the validation and the model are those of train.py.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

from utils.config.reader import load_config  # isort: skip (first: it says if torch is missing or too old)
import torch

from distributed.helpers import GridScaler, TensorParallelGradients, share_loss, sliced_dims
from distributed.parallelize import check_parallel, is_sequence_parallel, parallelize, shard_tokens, share_frames
from distributed.sharding import share_out
from train import build_model, build_scaler, data_parallel, forward_backward, train, update_weights
from utils.checkpoint.state import TrainingState
from utils.comm import Grid
from utils.compiler import compile_modules
from utils.data.dataset import Job, WeatherData
from utils.optimizers import build_optimizer
from utils.ranks.agree import all_ranks_agree
from utils.ranks.start import World, start
from utils.run import setup
from utils.run.run import Run


def make_step(serial_step: Callable, grid: Grid, gradients: TensorParallelGradients, distance: Callable) -> Callable:
    """Return the step of chapter 1 with what a parallel model adds to it."""

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        """Fill the gradients: means over dp, sums over cp, and over tp where its ranks hold replicas."""
        # DDP divides by dp x cp, and the gradients are to be divided by dp only.
        loss = serial_step(*tensors, distance=distance, gradient_factor=grid.get_size("cp"))
        gradients.sync()
        return loss

    return step


def main(
    world: World,
    argv: list[str],
    chapter: int = 2,
    prepare: Callable = lambda config, grid, device: None,
    transform: Callable = lambda step, update, *_: (step, update),
    observers: Iterable = (),
) -> None:
    """Train. (Chapter 3 prepares for, and makes, another step and update of these.)"""
    with all_ranks_agree():
        config, remarks = load_config(argv, chapter)
        grid = Grid(world.size, world.rank, config.tensor_parallel, config.context_parallel, config.parallel_order)
        check_parallel(config, grid)
        config = config.with_batches(grid.get_size("dp"))
        device = setup.prepare(config, world.local_rank)
        prepare(config, grid, device)
    grid.create_groups(config.longest_wait)
    with all_ranks_agree():
        # The ranks of a tp-cp group hold the same samples, each its own tokens of them.
        shard, sharing, dp = shard_tokens(config, grid), share_frames(config, grid), grid.get_group("dp")
        data = WeatherData(config, device, grid.get_size("dp"), grid.get_rank("dp"), shard, dp, sharing)
        distance = data.distance(**share_loss(config, grid, shard, device))
        model = parallelize(build_model(config, data.fields, device), config, grid, shard, device).to(device)
        if config.enable_jit:
            compile_modules(model, config.compile_modules, config.compile_mode)
        model = share_out(model, config, grid, device)
    torch.manual_seed(config.seed + world.rank)  # different dropout masks on every rank
    optimizer = build_optimizer(model, config)
    scaler = build_scaler(config, device, partial(GridScaler, group=grid.get_group("tp-cp")))
    gradients = TensorParallelGradients(model, grid, is_sequence_parallel(config, grid), bool(config.verify_every))
    slices, generators = (sliced_dims(model), grid.get_group("tp")), {"drop_path": model.generator}
    state = TrainingState(model, optimizer, scaler, config.ema_decay, model.stacked(), generators, slices)
    with Run(Job(config, world, device, data), build_model, f"{grid.get_size('tp-cp')}MP", observers) as run:
        run.begin(state, remarks)
        parallel = model if config.shard != "none" else data_parallel(model, config, grid.get_group("dp-cp"))
        serial_step = partial(forward_backward, parallel, scaler=scaler, config=config)
        step = make_step(serial_step, grid, gradients, distance)
        update = partial(update_weights, optimizer, scaler, config, total_norm=gradients.norm)
        step, update = transform(step, update, model, config, run)
        train(step, update, parallel, data, config, run)


if __name__ == "__main__":
    start(main, sys.argv[1:], partial(load_config, chapter=2))
