"""What evaluate.py is asked for: its flags, and the models that it loads."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from utils.checkpoint import store as checkpoint
from utils.checkpoint.weights import choose, read_weights, set_weights
from utils.config.reader import YAML_CONFIG, cast, load_config, move_data, parse
from utils.config.settings import FIELDS, Config, affecting, key
from utils.forecast.projections import find_projection

_flag = partial(key, affects="evaluation")


@dataclass(frozen=True)
class Evaluation:
    """What evaluate.py does with a model; each field is a flag."""

    checkpoint: str | None = _flag(None, "folder of a run, or of one of its checkpoints, or a file of exported weights")
    best: bool = _flag(False, "of a run the checkpoint with the lowest validation loss, not the newest")
    weights: str = _flag("all", "weights to forecast with; ema: their average", choices=("all", "raw", "ema"))
    out: str | None = _flag(None, "folder of the results: evaluation/ in the run's folder, or beside the weights")
    lead_hours: float = _flag(120.0, "longest lead time", at_least=0)
    stride: int = _flag(1, "forecasts begin at every so-many-th time that has all of its truth", at_least=1)
    climatology: str | None = _flag(None, "means of each day of the year (NetCDF, Zarr) in place of time_means")
    block_hours: float = _flag(24.0, "length of the blocks of times that the bootstrap draws", at_least=0)
    forecasts: str = _flag("none", "write the forecasts, too", choices=("none", "netcdf", "zarr"))
    projection: str = _flag("plain", "of the maps: plain latitude and longitude, or a class of cartopy.crs")


EVALUATION = {field.name: field for field in fields(Evaluation)}
# What an evaluation may set of a training's keys, each with what holds where it is not given.
AGAIN = dict.fromkeys(affecting("evaluation"), "as in training")
AGAIN |= {name: FIELDS[name].default for name in affecting("machine")}
FLAGS = EVALUATION | {name: FIELDS[name] for name in AGAIN}


def load_evaluation(argv: list[str]) -> tuple[Evaluation, Config, dict[str, Any] | None, list[str]]:
    """Return what is to be evaluated and how, the model's configuration, the info of its checkpoint, and remarks.

    Exported weights know nothing of their training: it comes from the YAML section, and there is no info.

    Raises ValueError as `load_config` does, and where there is no such checkpoint.
    """
    helps = [(field, f"{field.metadata['help']} ({AGAIN.get(name, field.default)})") for name, field in FLAGS.items()]
    flags = parse(argv, helps, "Forecasts of a trained model: rollout, skill, pictures.")
    yaml_config, remarks = flags.pop("yaml_config", None), []
    given = {name: cast(FLAGS[name], value) for name, value in flags.items() if name in FLAGS}
    evaluation = Evaluation(**{name: value for name, value in given.items() if name in EVALUATION})
    if evaluation.checkpoint is None:
        raise ValueError("checkpoint is None: give the folder of a run, one of its checkpoints, or exported weights")
    source, info = Path(evaluation.checkpoint).resolve(), None
    if not source.exists():
        raise ValueError(f"no {source}: give the folder of a run, one of its checkpoints, or exported weights")
    if evaluation.best and (source.is_file() or checkpoint.is_name(source.name)):
        raise ValueError(f"best chooses among a run's checkpoints, and {source} is one thing: leave --best out")
    if source.is_file():
        section = given.get("config", FIELDS["config"].default)
        config = load_config(["--yaml_config", yaml_config or YAML_CONFIG, "--config", section], chapter=3)[0]
    else:
        for name in ("config", "yaml_config"):
            if name in given or (name == "yaml_config" and yaml_config):
                raise ValueError(f"{name} is for exported weights: {source} knows its training; leave --{name} out")
        source, info = choose(source, evaluation.best)
        config = Config(**{name: cast(FIELDS[name], value) for name, value in info["config"].items() if name in FIELDS})
    config = replace(config, **{name: FIELDS[name].default for name in affecting("machine") + affecting("loop")})
    if source.is_file():
        config = replace(config, init_from=str(source))
    if given.get("data_dir") is not None:
        before = config.data_dir or "/data"
        moved = move_data(config, given["data_dir"], before)
        if given["data_dir"] != before and moved == replace(config, data_dir=given["data_dir"]):
            remarks.append(f"data_dir changes nothing: no path of the training begins with {before}")
        config = moved
    given["local_batch_size"] = given.get("local_batch_size") or config.local_batch_size or 1
    config = replace(config, **{name: x for name, x in given.items() if name in FIELDS})
    find_projection(evaluation.projection)  # before any library opens a climatology
    return replace(evaluation, checkpoint=str(source)), config, info, remarks


def load_forecasters(
    build: Callable[[], nn.Module], evaluation: Evaluation, info: dict[str, Any] | None
) -> dict[str, nn.Module]:
    """Return the models to evaluate by their names: `model`, and `ema` with the moving average of its weights.

    Args:
        build: makes the model; with the weights, where they are an exported file.
        info: of the checkpoint; None for exported weights.

    Raises ValueError where there is no moving average, and one is asked for.
    """
    wanted = {"all": ("raw", "ema"), "raw": ("raw",), "ema": ("ema",)}[evaluation.weights]
    has_average = info is not None and info["config"].get("ema_decay") is not None
    if evaluation.weights == "ema" and not has_average:
        raise ValueError(f"{evaluation.checkpoint} holds no moving average of weights: train with --ema_decay")
    if info is None:
        return {"model": build()}
    models = {}
    for kind, name in (("raw", "model"), ("ema", "ema")):
        if kind in wanted and (kind == "raw" or has_average):
            found = read_weights(Path(evaluation.checkpoint), name)
            models[name] = set_weights(build(), found, evaluation.checkpoint)
    return models
