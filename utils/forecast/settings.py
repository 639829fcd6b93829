"""What evaluate.py and forecast.py are asked for: their flags, and the models that they load."""

from collections.abc import Callable
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from utils.checkpoint import store as checkpoint
from utils.checkpoint.weights import choose, read_weights, set_weights
from utils.config.reader import YAML_CONFIG, cast, load_config, move_data, parse
from utils.config.settings import FIELDS, Config, affecting, key
from utils.data.files import channel_indices
from utils.forecast.projections import find_projection
from utils.forecast.trained import STATISTICS, Trained, config_of, forgotten, is_exported, read_exported
from utils.forecast.writer import KINDS, NAMES

_flag = partial(key, affects="evaluation")


@dataclass(frozen=True)
class Asked:
    """What evaluate.py and forecast.py both are asked for; each field is a flag."""

    checkpoint: str | None = _flag(None, "folder of a run, or of one of its checkpoints, or an exported model")
    best: bool = _flag(False, "of a run the checkpoint with the lowest validation loss, not the newest")
    out: str | None = _flag(None, "folder of the results: in the run's folder, or beside the model")
    lead_hours: float = _flag(120.0, "longest lead time", at_least=0)
    names: str = _flag("own", "of written variables: the channels', or WeatherBench's (with levels)", choices=NAMES)
    projection: str = _flag("plain", "of the maps: plain latitude and longitude, or a class of cartopy.crs")


@dataclass(frozen=True)
class Evaluation(Asked):
    """What evaluate.py does with a model."""

    weights: str = _flag("all", "weights to forecast with; ema: their average", choices=("all", "raw", "ema"))
    stride: int = _flag(1, "forecasts begin at every so-many-th time that has all of its truth", at_least=1)
    climatology: str | None = _flag(None, "means of each day of the year (NetCDF, Zarr) in place of time_means")
    block_hours: float = _flag(24.0, "length of the blocks of times that the bootstrap draws", at_least=0)
    forecasts: str = _flag("none", "write the forecasts, too", choices=KINDS)


@dataclass(frozen=True)
class Outlook(Asked):
    """What forecast.py does with a model."""

    initial: list[str] | None = _flag(
        None, "states to start from: training files (a folder, *.h5), or an archive (NetCDF, Zarr, GRIB)"
    )
    dates: list[str] = _flag(("last",), "of these states: last, all, or dates such as 2026-02-09T18")
    channels: list[str] | None = _flag(None, "of an archive: where a channel is, as NAME=VARIABLE or NAME=VARIABLE@HPA")
    hold: list[str] | None = _flag(None, "channels that are read and not forecast, to keep as they are at the start")
    weights: str = _flag("raw", "weights to forecast with; ema: their average", choices=("raw", "ema"))
    forecasts: str = _flag("netcdf", "how to write the forecasts", choices=KINDS)


# What they may set of a training's keys, each with what holds where it is not given; forecast.py reads no files of one.
AGAIN = dict.fromkeys(affecting("evaluation"), "as in training")
AGAIN |= {name: FIELDS[name].default for name in affecting("machine")}
OF_FILES = {"config", "inf_data_path", "channel_names", "constants_path", "num_data_workers", "read_depth"}
OF_FILES |= set(STATISTICS)
KEYS = {Evaluation: AGAIN, Outlook: {name: value for name, value in AGAIN.items() if name not in OF_FILES}}
KEYS[Outlook]["local_batch_size"] = 1


def flags(kind: type[Asked]) -> dict[str, Field]:
    """Return the flags of a script, by what it is asked for."""
    return {field.name: field for field in fields(kind)} | {name: FIELDS[name] for name in KEYS[kind]}


def load_evaluation(argv: list[str]) -> tuple[Evaluation, Config, dict[str, Any] | None, list[str]]:
    """Return what is to be evaluated and how, the model's configuration, the info of its checkpoint, and remarks.

    A file of weights knows nothing of its training: that comes from the YAML section, and there is no info.

    Raises ValueError as `load_config` does, and where there is no such checkpoint.
    """
    evaluation, given, yaml_config = _parse(argv, Evaluation, "Forecasts of a trained model: skill, pictures.")
    source, info = Path(evaluation.checkpoint), None
    if evaluation.best and (source.is_file() or is_exported(source) or checkpoint.is_name(source.name)):
        raise ValueError(f"best chooses among a run's checkpoints, and {source} is one thing: leave --best out")
    if source.is_file():
        section = given.get("config", FIELDS["config"].default)
        config = load_config(["--yaml_config", yaml_config or YAML_CONFIG, "--config", section], chapter=3)[0]
    else:
        for name in ("config", "yaml_config"):
            if name in given or (name == "yaml_config" and yaml_config):
                raise ValueError(f"{name} is for a file of weights: {source} knows its training; leave --{name} out")
        if is_exported(source):
            config, info = read_exported(source)
        else:
            source, info = choose(source, evaluation.best)
            config = config_of(info)
    config, remarks = replace(config, **forgotten()), []
    if source.is_file() or is_exported(source):
        config = replace(config, init_from=str(source))
    if given.get("data_dir") is not None:
        before = config.data_dir or "/data"
        moved = move_data(config, given["data_dir"], before)
        if given["data_dir"] != before and moved == replace(config, data_dir=given["data_dir"]):
            remarks.append(f"data_dir changes nothing: no path of the training begins with {before}")
        config = moved
    given["local_batch_size"] = given.get("local_batch_size") or config.local_batch_size or 1
    config = replace(config, **{name: x for name, x in given.items() if name in FIELDS})
    return replace(evaluation, checkpoint=str(source)), config, info, remarks


def load_outlook(argv: list[str]) -> tuple[Outlook, Config, Trained]:
    """Return what is to be forecast and how, the model's configuration, and the model.

    Raises ValueError as `load_config` does, and where there is no such checkpoint.
    """
    outlook, given, yaml_config = _parse(argv, Outlook, "A forecast of what is not known yet.")
    if yaml_config:
        raise ValueError(f"yaml_config is not needed: {outlook.checkpoint} knows its training; leave it out")
    if outlook.initial is None:
        raise ValueError("initial is None: give training files, or an archive (NetCDF, Zarr, GRIB), to start from")
    source, ema = Path(outlook.checkpoint), outlook.weights == "ema"
    trained = Trained.open(source, outlook.best, ema, given.get("data_dir"))
    given["local_batch_size"] = given.get("local_batch_size") or 1
    given.pop("data_dir", None)
    config = replace(trained.config, **given)
    if (shown := given.get("plot_channels")) is not None:
        numbers = channel_indices(tuple(trained.fields.out_names), tuple(shown), 0, "plot_channels")
        trained = replace(trained, fields=replace(trained.fields, plot_channels=numbers))
    return replace(outlook, checkpoint=str(trained.source)), config, trained


def _parse(argv: list[str], kind: type[Asked], text: str) -> tuple[Any, dict[str, Any], Any]:
    """Return what is asked for, the keys of a training that are given, and a YAML file; by the command line alone.

    Raises ValueError for an unknown flag or value, and where there is no such checkpoint.
    """
    known, again = flags(kind), KEYS[kind]
    helps = [(field, f"{field.metadata['help']} ({again.get(name, field.default)})") for name, field in known.items()]
    found = parse(argv, helps, text)
    yaml_config = found.pop("yaml_config", None)
    given = {name: cast(known[name], value) for name, value in found.items() if name in known}
    asked = kind(**{name: given.pop(name) for name in known if name in given and name not in again})
    what = "the folder of a run, one of its checkpoints, or an exported model"
    if asked.checkpoint is None:
        raise ValueError(f"checkpoint is None: give {what}")
    source = Path(asked.checkpoint).resolve()
    if not source.exists():
        raise ValueError(f"no {source}: give {what}")
    find_projection(asked.projection)  # before any library opens an archive
    return replace(asked, checkpoint=str(source)), given, yaml_config


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
    has_average = info is not None and info.get("config", {}).get("ema_decay") is not None
    if evaluation.weights == "ema" and not has_average:
        raise ValueError(f"{evaluation.checkpoint} holds no moving average of weights: train with --ema_decay")
    if info is None or is_exported(Path(evaluation.checkpoint)):
        return {"model": build()}
    models = {}
    for kind, name in (("raw", "model"), ("ema", "ema")):
        if kind in wanted and (kind == "raw" or has_average):
            found = read_weights(Path(evaluation.checkpoint), name)
            models[name] = set_weights(build(), found, evaluation.checkpoint)
    return models
