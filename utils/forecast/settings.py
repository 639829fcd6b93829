"""What evaluate.py and forecast.py are asked for: their flags, and the models that they load."""

from collections.abc import Callable
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from utils.checkpoint.weights import FILE, choose, fill, load_tensors, read_weights
from utils.config.reader import cast, default_yaml, load_config, move_data, moves_nothing, parse
from utils.config.settings import FIELDS, Config, affecting, key
from utils.data.files import channel_indices
from utils.forecast.ensemble import CONTROL, MEMBER
from utils.forecast.projections import find_projection
from utils.forecast.trained import STATISTICS, Trained, config_of, forgotten, is_exported, read_exported
from utils.forecast.writer import KINDS, NAMES

_flag = partial(key, affects="evaluation")


@dataclass(frozen=True)
class Asked:
    """What evaluate.py and forecast.py both are asked for; each field is a flag."""

    checkpoint: list[str] | None = _flag(None, "folder of a run, or of one of its checkpoints, or an exported model")
    best: bool = _flag(False, "of a run the checkpoint with the lowest validation loss, not the newest")
    out: str | None = _flag(None, "folder of the results: in the run's folder, or beside the model")
    lead_hours: float = _flag(120.0, "longest lead time", at_least=0)
    names: str = _flag("own", "of written variables: the channels', or WeatherBench's (with levels)", choices=NAMES)
    projection: str = _flag("plain", "of the maps: plain latitude and longitude, or a class of cartopy.crs")

    @property
    def source(self) -> Path:
        """The model, or the first of several."""
        return Path(self.checkpoint[0])


@dataclass(frozen=True)
class Evaluation(Asked):
    """What evaluate.py does with a model."""

    weights: str = _flag("all", "weights to forecast with; ema: their average", choices=("all", "raw", "ema"))
    perturb: float | None = _flag(
        None, "size of what ensembles add to initial states; 1: as weather varies", at_least=0
    )
    members: int = _flag(8, "of such an ensemble, of each model: an even number", at_least=2)
    stride: int = _flag(1, "forecasts begin at every so-many-th time that has all of its truth", at_least=1)
    climatology: str | None = _flag(None, "means of each day of the year (NetCDF, Zarr) in place of time_means")
    block_hours: float = _flag(24.0, "length of the blocks of times that the bootstrap draws", at_least=0)
    forecasts: str = _flag("none", "write the forecasts, too", choices=KINDS)

    @property
    def is_ensemble(self) -> bool:
        return len(self.checkpoint) > 1 or self.perturb is not None

    @property
    def one_kind(self) -> str:
        """The weights that an ensemble takes: one kind of each model."""
        return "ema" if self.weights == "ema" else "raw"


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
    evaluation, given, yaml_config, shortened = _parse(
        argv, Evaluation, "Forecasts of a trained model: skill, pictures."
    )
    source, info = evaluation.source, None
    for one in map(Path, evaluation.checkpoint):
        if evaluation.best and (one.is_file() or is_exported(one)):  # of a checkpoint `choose` says it
            raise ValueError(f"best chooses among a run's checkpoints, and {one} is one thing: leave --best out")
    if source.is_file():
        section = given.get("config", FIELDS["config"].default)
        config = load_config(["--yaml_config", yaml_config or default_yaml(), "--config", section], chapter=3)[0]
    else:
        for name in ("config", "yaml_config"):
            if name in given or (name == "yaml_config" and yaml_config):
                raise ValueError(f"{name} is for a file of weights: {source} knows its training; leave --{name} out")
        source, config, info = _known(source, evaluation.best)
    config, remarks = replace(config, **forgotten()), shortened + _check_ensemble(evaluation)
    if source.is_file():
        config = replace(config, init_from=str(source))
    if given.get("data_dir") is not None:
        before = config.data_dir or "/data"
        moved = move_data(config, given["data_dir"], before)
        if given["data_dir"] != before and moved == replace(config, data_dir=given["data_dir"]):
            remarks.append(moves_nothing(given["data_dir"], f"no path of the training begins with {before}"))
        config = moved
    given["local_batch_size"] = given.get("local_batch_size") or config.local_batch_size or 1
    config = replace(config, **{name: x for name, x in given.items() if name in FIELDS})
    first = source, config, info
    others = [_other_model(Path(other), evaluation.best, first, given) for other in evaluation.checkpoint[1:]]
    sources = (source, *others)
    if len(set(sources)) < len(sources):
        raise ValueError(f"checkpoint names {sources[0]} or another one twice: give different models")
    return replace(evaluation, checkpoint=tuple(map(str, sources))), config, info, remarks


def _check_ensemble(evaluation: Evaluation) -> list[str]:
    """Return a remark where a flag changes nothing. Raises ValueError for what makes no ensemble."""
    if evaluation.perturb is None:
        default = flags(Evaluation)["members"].default
        return ["members changes nothing without --perturb"] if evaluation.members != default else []
    if not evaluation.perturb:
        raise ValueError("perturb is 0, and members would be alike: take more, such as 0.1, or leave it out")
    if evaluation.members % 2:
        raise ValueError(f"members is {evaluation.members}, and they come in pairs: take an even number")
    return []


def _known(source: Path, best: bool = False) -> tuple[Path, Config, dict[str, Any]]:
    """Return a checkpoint or an exported folder, the configuration of its training, and what is known of that."""
    if is_exported(source):
        return source, *read_exported(source)
    source, info = choose(source, best)
    return source, config_of(info), info


def _other_model(
    source: Path, best: bool, first: tuple[Path, Config, dict[str, Any] | None], given: dict[str, Any]
) -> Path:
    """Return one more model of an ensemble.

    Raises ValueError where it does not know its training, and where its data or its step were others than those of the
    first, or its precision, unless that is `given`.
    """
    start, config, info = first
    for one in (start, source):
        if one.is_file():
            raise ValueError(f"{one} holds weights alone: an ensemble takes runs, checkpoints and exported folders")
    source, other, about = _known(source, best)
    for what, there in about["data"].items():
        if info["data"].get(what) != there:
            raise ValueError(f"{source} was trained with other {what} than {start}: an ensemble's models have the same")
    if other.dt != config.dt:
        raise ValueError(f"{source} forecasts {other.dt} stored steps ahead, and {start} {config.dt}: give one kind")
    for name in ("amp_mode", "tf32"):
        if name not in given and getattr(other, name) != getattr(config, name):
            raise ValueError(
                f"{source} was trained with {name} {getattr(other, name)}, and {start} with {getattr(config, name)}: "
                f"say which (--{name})"
            )
    return source


def load_outlook(argv: list[str]) -> tuple[Outlook, Config, Trained, list[str]]:
    """Return what is to be forecast and how, the model's configuration, the model, and remarks.

    Raises ValueError as `load_config` does, and where there is no such checkpoint.
    """
    outlook, given, yaml_config, remarks = _parse(argv, Outlook, "A forecast of what is not known yet.")
    if yaml_config:
        raise ValueError(f"yaml_config is not needed: {outlook.source} knows its training; leave it out")
    if outlook.initial is None:
        raise ValueError("initial is None: give training files, or an archive (NetCDF, Zarr, GRIB), to start from")
    if len(outlook.checkpoint) > 1:
        raise ValueError(f"checkpoint names {len(outlook.checkpoint)} models, and forecast.py takes one")
    source, ema = outlook.source, outlook.weights == "ema"
    trained = Trained.open(source, outlook.best, ema, given.get("data_dir"))
    given["local_batch_size"] = given.get("local_batch_size") or 1
    given.pop("data_dir", None)
    config = replace(trained.config, **given)
    if (shown := given.get("plot_channels")) is not None:
        numbers = channel_indices(tuple(trained.fields.out_names), tuple(shown), 0, "plot_channels")
        trained = replace(trained, fields=replace(trained.fields, plot_channels=numbers))
    return replace(outlook, checkpoint=(str(trained.source),)), config, trained, remarks


def _parse(argv: list[str], kind: type[Asked], text: str) -> tuple[Any, dict[str, Any], Any, list[str]]:
    """Return what is asked for, the keys of a training that are given, a YAML file, and remarks; by the command line.

    Raises ValueError for an unknown flag or value, and where there is no such checkpoint.
    """
    known, again = flags(kind), KEYS[kind]
    helps = [(field, f"{field.metadata['help']} ({again.get(name, field.default)})") for name, field in known.items()]
    found, remarks = parse(argv, helps, text)
    yaml_config = found.pop("yaml_config", None)
    given = {name: cast(known[name], value) for name, value in found.items() if name in known}
    asked = kind(**{name: given.pop(name) for name in known if name in given and name not in again})
    what = "the folder of a run, one of its checkpoints, or an exported model"
    if asked.checkpoint is None:
        raise ValueError(f"checkpoint is None: give {what}")
    sources = [Path(source).resolve() for source in asked.checkpoint]
    for source in sources:
        if not source.exists():
            raise ValueError(f"no {source}: give {what}")
    find_projection(asked.projection)  # before any library opens an archive
    return replace(asked, checkpoint=tuple(map(str, sources))), given, yaml_config, remarks


def load_forecasters(
    build: Callable[[Config], nn.Module], evaluation: Evaluation, config: Config, info: dict[str, Any] | None
) -> dict[str, nn.Module]:
    """Return the models to evaluate by the names of their forecasts.

    `model`, and `ema` with the moving average of its weights; or of an ensemble `member01` and so on, and with
    perturbations before them `control`, the first model from the state as it is.

    Args:
        build: makes a model; with the weights, where they are a file.
        config: of the first model.
        info: of its checkpoint; None for a file of weights.

    Raises ValueError where there is no moving average, and one is asked for.
    """
    sources = [Path(source) for source in evaluation.checkpoint]
    if not evaluation.is_ensemble:
        return _alone(build, evaluation, config, info)
    nets = [_alone(build, replace(evaluation, weights=evaluation.one_kind), config, info)]
    for source in sources[1:]:
        _, theirs, other = _known(source)
        taken = {name: getattr(theirs, name) for name in affecting("training")}
        one = replace(evaluation, checkpoint=(str(source),), weights=evaluation.one_kind)
        nets.append(_alone(build, one, replace(config, init_from=None, **taken), other))
    found = [next(iter(models.values())) for models in nets]
    if evaluation.perturb is None:
        return {f"{MEMBER}{i + 1:02d}": net for i, net in enumerate(found)}
    members = [net for net in found for _ in range(evaluation.members)]
    return {CONTROL: found[0]} | {f"{MEMBER}{i + 1:02d}": net for i, net in enumerate(members)}


def _alone(
    build: Callable[[Config], nn.Module], evaluation: Evaluation, config: Config, info: dict[str, Any] | None
) -> dict[str, nn.Module]:
    """Return one model, and the same with the moving average of its weights, as far as they are asked for."""
    wanted = {"all": ("raw", "ema"), "raw": ("raw",), "ema": ("ema",)}[evaluation.weights]
    has_average = info is not None and info.get("config", {}).get("ema_decay") is not None
    if evaluation.weights == "ema" and not has_average:
        raise ValueError(f"{evaluation.source} holds no moving average of weights: train with --ema_decay")
    if is_exported(evaluation.source):
        weights = load_tensors(evaluation.source / FILE)
        return {"model": fill(partial(build, replace(config, init_from=None)), weights, str(evaluation.source))}
    if info is None:
        return {"model": build(config)}
    models = {}
    for kind, name in (("raw", "model"), ("ema", "ema")):
        if kind in wanted and (kind == "raw" or has_average):
            found = read_weights(evaluation.source, name)
            models[name] = fill(partial(build, config), found, str(evaluation.source))
    return models
