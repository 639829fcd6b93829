"""A forecast of what is not known yet, from a trained model and a state of the atmosphere.

    python forecast.py --checkpoint runs/demo/1GPU/00 --initial data/demo/valid --lead_hours 240
    python forecast.py --checkpoint exported/ --initial analysis.nc --names wb2
    torchrun --nproc_per_node=4 forecast.py --checkpoint exported/ --initial era5.zarr --dates all

It starts from the last state of the files, or those of `--dates`, and goes as far as `--lead_hours` says: nobody needs
to know what happened. Each rank takes some of the states. `python forecast.py --help` lists the flags. In Python:

    from forecast import load
    model = load("exported/")
    after = model.step(state)
"""

import sys
from functools import partial
from pathlib import Path

from utils.config.settings import Config  # isort: skip (first: it says if torch is missing or too old)
import torch

from train import autocast, build_model
from utils.compiler import compile_modules
from utils.forecast.initial import InitialStates
from utils.forecast.model import Forecaster
from utils.forecast.outlook import OutlookRun
from utils.forecast.settings import load_outlook
from utils.forecast.trained import Trained
from utils.ranks.agree import all_ranks_agree
from utils.ranks.start import World, start
from utils.run.setup import prepare


def load(
    source: str, device: str = "cpu", best: bool = False, ema: bool = False, data_dir: str | None = None
) -> Forecaster:
    """Return the model of an exported folder, of a run or of one of its checkpoints, ready to forecast.

    A run's training files must be there; `data_dir` says where they have moved. Raises ValueError, in one line, where
    there is no model.
    """
    trained = Trained.open(Path(source).resolve(), best, ema, data_dir)
    return forecaster(trained, trained.config, torch.device(device))


def forecaster(trained: Trained, config: Config, device: torch.device) -> Forecaster:
    """Return a model on a device, ready to forecast."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with torch.random.fork_rng(devices=gpus):  # what the caller draws stays random
        net = trained.fill(partial(build_model, config, trained.fields, device))
    if config.enable_jit:
        compile_modules(net, config.compile_modules, config.compile_mode)
    return Forecaster(net, trained.fields, device, partial(autocast, config, device))


def main(world: World, argv: list[str]) -> None:
    with all_ranks_agree():
        settings, config, trained, remarks = load_outlook(argv)
        device = prepare(config, world.local_rank, trains=False)
        model = forecaster(trained, config, device)
        data = InitialStates(settings, trained.fields, config.channel_names, device)
    with OutlookRun(settings, config, trained.about, data, ["model"], world, remarks) as run:
        for numbers in run.batches():
            initial = data.read(numbers)
            forecasts = model.rollout(initial, data.steps, data.forced(initial), data.times(numbers))
            run.keep(numbers, initial, forecasts)
        run.finish()


if __name__ == "__main__":
    start(main, sys.argv[1:], lambda argv: load_outlook(argv)[1:])
