"""Forecasts from a trained model: rollout, skill, pictures.

    python evaluate.py --checkpoint runs/demo/1GPU/00
    torchrun --nproc_per_node=4 evaluate.py --checkpoint runs/demo/1GPU/00      each rank takes some initial times

A forecast of six hours becomes one of five days where the model reads its own forecast, twenty times over: a rollout.
It is judged at every lead time beside persistence and climatology, for many initial times. The files of
`inf_data_path` hold them, and the truth. `python evaluate.py --help` lists the flags.
"""

import sys
from collections.abc import Iterator

from utils.config.settings import Config  # isort: skip (first: it says if torch is missing or too old)
import torch
from torch import Tensor, nn

from train import autocast, build_model
from utils.compiler import compile_modules
from utils.forecast.data import ForecastData
from utils.forecast.evaluation import EvaluationRun
from utils.forecast.settings import load_evaluation, load_forecasters
from utils.ranks.agree import all_ranks_agree
from utils.ranks.start import World, start
from utils.run.setup import prepare


@torch.no_grad()
def rollout(
    models: dict[str, nn.Module], data: ForecastData, config: Config, numbers: list[int]
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield, for each lead time, the truth and the forecasts of persistence and of each model, [B C H W] in units.

    They are those of the next batch of initial times that `data` reads, `numbers`.
    """
    frames = data.read()
    initial, known = next(frames)
    persistence = data.persistence(initial)
    first = data.as_input(initial, known)
    states = {name: data.begun(name, first, numbers) for name in models}
    for _ in range(data.steps):
        with autocast(config, data.device):
            # Copies: what a compiled model returns may lie where its next forecast will.
            forecasts = {name: model(states[name]).to(states[name].dtype, copy=True) for name, model in models.items()}
        truth, known = next(frames)  # a GPU computes the forecasts while the truth is copied
        states = {name: model.next_input(forecasts[name], known) for name, model in models.items()}
        yield truth, {"persistence": persistence} | {name: data.in_units(x) for name, x in forecasts.items()}


def main(world: World, argv: list[str]) -> None:
    with all_ranks_agree():
        settings, config, info, remarks = load_evaluation(argv)
        device = prepare(config, world.local_rank, trains=False)
        data = ForecastData(config, settings, device, info)
        models = load_forecasters(lambda config: build_model(config, data.fields, device), settings, config, info)
        for model in set(models.values()):
            model.to(device).eval()
            if config.enable_jit:
                compile_modules(model, config.compile_modules, config.compile_mode)
    with EvaluationRun(settings, config, info, data, list(models), world, remarks) as run:
        for numbers in run.batches():
            run.judge.keep(numbers, rollout(models, data, config, numbers))
        run.finish()


if __name__ == "__main__":
    start(main, sys.argv[1:], lambda argv: load_evaluation(argv)[1:])
