"""A trained model with all that its forecasts need, of a run or in a folder to carry home.

    FOLDER/  README.md            what it is, what it was trained on, how good it is: a model card
             weights.safetensors  as a model on one device names them
             model.json           channels with units and standard names, grid, step, training, versions
             config.yaml          the configuration of the training, its paths left out
             statistics/          of the training files, and the constants that it reads
             scores.csv           of its evaluation, where there was one
             model.pt2            with --torch_export: one step, for torch alone

`python -m utils.checkpoint export RUN FOLDER/` writes it; forecast.py, evaluate.py and `--init_from` read it.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from utils.checkpoint.weights import FILE, choose, fill, load_tensors, read_weights, save_tensors
from utils.config.reader import cast, check_image, load_config, move_data
from utils.config.settings import FIELDS, Config, affecting
from utils.data.fields import Fields
from utils.data.files import Files
from utils.data.forcings import Forcings
from utils.data.statistics import Statistics
from utils.data.variables import meant, variable
from utils.errors import first_line
from utils.files import complete, part_of, read_events, to_disk, to_json
from utils.forecast.card import card
from utils.reading import check_own, holds, is_count, is_finite, is_flag, is_text, list_of, read_json

ABOUT, CONFIG, SECTION = "model.json", "config.yaml", "model"
STATISTICS = ("global_means_path", "global_stds_path", "time_means_path", "time_diff_stds_path")
FORMAT, LARGEST_COUNT = 1, 2**16  # the latter of channels
_CHANNELS = list_of(holds(name=is_text, units=is_text, channel=is_count))
ENTRIES = {
    "inputs": _CHANNELS, "forecasts": _CHANNELS, "channels_of_files": is_count, "plot_channels": list_of(is_count),
    "latitude": list_of(is_finite), "longitude": list_of(is_finite), "step_hours": is_finite, "has_time": is_flag,
    "residual_scale": lambda x: x is None or list_of(is_finite)(x), "data": holds(), "iteration": is_count,
}  # fmt: skip
BESIDE = "channels beside the state"  # of what is known of a training's data
SHOWN = (24, 72, 120)  # hours, of the scores


@dataclass(frozen=True, eq=False)
class Trained:
    """A model's configuration, what it reads and forecasts, and its weights, which are read when they are asked for.

    Attributes:
        about: what is known of its training, as `model.json` has it.
        source: a checkpoint, or an exported folder.
        ema: of a checkpoint, the moving average of the weights.
    """

    config: Config
    fields: Fields
    about: dict[str, Any]
    source: Path
    ema: bool = False

    @staticmethod
    def open(source: Path, best: bool = False, ema: bool = False, data_dir: str | None = None) -> "Trained":
        """Return the model of a run, of one of its checkpoints, or of an exported folder.

        A run's training files must be there: they tell names, units and grid. `data_dir` says where they are now.

        Raises ValueError, in one line with the remedy, for whatever is not there or does not fit together.
        """
        if not source.exists():
            raise ValueError(f"no {source}: give the folder of a run, one of its checkpoints, or an exported model")
        if best and is_exported(source):
            raise ValueError(f"best chooses among a run's checkpoints, and {source} is one thing: leave --best out")
        if is_exported(source):
            if ema:
                raise ValueError(f"{source} holds one kind of weights, those of its README: do not ask for the ema")
            config, about = read_exported(source)
            try:
                fields = _fields(config, about)
            except (KeyError, TypeError, IndexError) as error:
                raise ValueError(f"{source / ABOUT} lacks something ({error}): copy the folder again") from None
            return Trained(config, fields, about, source)
        return _of_run(source, best, ema, data_dir)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights, as a model on one device names them. Raises ValueError where they cannot be read."""
        if is_exported(self.source):
            return load_tensors(self.source / FILE)
        weights = read_weights(self.source, "ema" if self.ema else "model")
        if not weights:
            raise ValueError(f"{self.source} holds no moving average of weights: train with --ema_decay")
        return weights

    def fill(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that `build` makes, with these weights. Raises ValueError where it is another model."""
        return fill(build, self.weights, str(self.source))

    def write(self, folder: Path, add: Callable[[Path], None] = lambda folder: None) -> None:
        """Write it to a new folder, whole or not at all; `add(folder)` adds to it.

        Raises ValueError where the folder is there, or cannot be written.
        """
        if folder.exists():
            raise ValueError(f"{folder} is there already: move it away, or give another folder")
        part = part_of(folder)
        try:
            shutil.rmtree(part, ignore_errors=True)
            (part / "statistics").mkdir(parents=True)
            kept = {"time_means_path": None}  # where it is not there
            for key, path in statistics_of(self.config).items():
                if key not in kept or Path(path).exists():
                    kept[key] = f"statistics/{key.removesuffix('_path')}{Path(path).suffix}"
                    self._copy(path, key, part / kept[key])
            save_tensors(self.weights, part / FILE)
            forget = {name: FIELDS[name].default for name in FIELDS if FIELDS[name].metadata["affects"] == "run"}
            forget |= {"data_dir": None, "inf_data_path": None, **kept}
            config = replace(self.config, **{**forget, "config": SECTION})
            (part / CONFIG).write_text(config.to_yaml())
            about = self.about | {"parameters": sum(x.numel() for x in self.weights.values())}
            (part / ABOUT).write_text(to_json(about, indent=1) + "\n")
            if self.about["scores"] is not None:
                shutil.copyfile(self._table, part / "scores.csv")
            (part / "README.md").write_text(card(self.config, about))
            add(part)
            for path in part.rglob("*"):
                to_disk(path)
            complete(folder)
        except (KeyError, TypeError, IndexError) as error:
            if not is_exported(self.source):
                raise
            raise ValueError(f"{self.source / ABOUT} lacks something ({error}): copy the folder again") from None
        except OSError as error:
            raise ValueError(f"cannot write {folder} ({error.strerror or error}): give another folder") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)

    @property
    def _table(self) -> Path:
        """The file with all scores of an evaluation."""
        return self.source / "scores.csv" if is_exported(self.source) else _evaluation(self.source)[0] / "skill.csv"

    def _copy(self, path: str, key: str, new: Path) -> None:
        """Copy a file beside the data; of statistics what belongs to the channels of the data files."""
        statistics = self.fields.statistics
        if statistics is None or new.suffix != ".npy":
            shutil.copyfile(path, new)
            return
        H, W = np.load(path, mmap_mode="r").shape[2:]
        np.save(new, statistics.load(path, key, [(H, W)])[None])


def statistics_of(config: Config) -> dict[str, str]:
    """Return the files beside the data that a model needs, by key: statistics, and constants where it reads some."""
    found = {key: path for key in STATISTICS if (path := getattr(config, key)) is not None}
    return found | ({"constants_path": config.constants_file} if config.constants else {})


def is_exported(source: Path) -> bool:
    return (source / ABOUT).is_file()


def read_exported(folder: Path) -> tuple[Config, dict[str, Any]]:
    """Return the configuration of an exported model, its statistics where they are now, and what is known of it.

    Raises ValueError for a folder that is damaged, leads elsewhere, or is of a later version of this code.
    """
    check_own(folder)
    try:
        about = read_json(folder / ABOUT)
        format = about["format"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / ABOUT} cannot be read ({type(error).__name__}): copy the folder again") from None
    if format != FORMAT:
        raise ValueError(f"{folder} has the format {format!r}, and this code reads {FORMAT}: take a newer one")
    about.pop("config", None)  # a checkpoint has it; here the YAML file
    for name, fits in ENTRIES.items():
        if name not in about or not fits(about[name]):
            found = str(about.get(name))[:80]
            raise ValueError(f"{folder / ABOUT} has {name} {found!r}, which no export writes: copy the folder again")
    config, _ = load_config(["--yaml_config", str(folder / CONFIG), "--config", SECTION], chapter=3)
    config = replace(config, **forgotten())
    paths = {key: str(folder / path) for key, path in statistics_of(config).items()}
    for path in paths.values():
        if not Path(path).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder / CONFIG} names {path}, out of the folder: copy the folder again")
    return replace(config, **paths), about


def _fields(config: Config, about: dict[str, Any]) -> Fields:
    """Return the fields of an exported model. Raises ValueError."""
    inputs, outputs, C = about["inputs"], about["forecasts"], about["channels_of_files"]
    latitude, longitude = (np.array(about[axis], np.float32) for axis in ("latitude", "longitude"))
    used, shown = [x["channel"] for x in (*inputs, *outputs)], about["plot_channels"]
    scale = about["residual_scale"]
    if not 0 <= max(used, default=-1) < C <= LARGEST_COUNT or (scale is not None and len(scale) != len(outputs)):
        raise ValueError(f"{ABOUT} does not fit itself (channels): copy the folder again")
    statistics, keys = Statistics(("",) * C, tuple(used), are_named=False), ("global_means_path", "global_stds_path")
    means, stds = (statistics.load(getattr(config, key), key).reshape(C) for key in keys)
    if (len(latitude), len(longitude)) != tuple(config.img_size) or not 1e-2 <= about["step_hours"] <= 1e5:
        raise ValueError(f"{ABOUT} does not fit {CONFIG} (grid, or step): copy the folder again")
    if not (stds[used] > 0).all() or len({*shown}) < len(shown) or max(shown, default=0) >= len(outputs):
        raise ValueError(f"{ABOUT} does not fit the statistics (channels): copy the folder again")
    fields = Fields(
        inputs=[x["channel"] for x in inputs],
        outputs=[x["channel"] for x in outputs],
        in_names=[x["name"] for x in inputs],
        out_names=[x["name"] for x in outputs],
        in_units=[x["units"] for x in inputs],
        units=[x["units"] for x in outputs],
        plot_channels=shown,
        latitude=latitude,
        longitude=longitude,
        means=means,
        stds=stds,
        time_means=None,  # no forecast needs them
        forcings=Forcings.open(config, latitude, longitude),
        residual_scale=scale,
        step_hours=about["step_hours"],
        has_time=about["has_time"],
    ).checked(config)
    _check_same(fields, about["data"], {BESIDE: config.constants_file})
    return fields


def _check_same(fields: Fields, trained: dict[str, Any], files: dict[str, str]) -> None:
    """Raise ValueError where these are not the `files` that a model was trained with."""
    for what, path in files.items():
        if trained.get(what) != fields.description[what]:
            raise ValueError(f"{path} holds other {what} than the model was trained with: give those (--data_dir)")


def config_of(info: dict[str, Any]) -> Config:
    """Return the configuration that a checkpoint was made with."""
    config = Config(**{name: cast(FIELDS[name], value) for name, value in info["config"].items() if name in FIELDS})
    check_image(config)
    return config


def forgotten() -> dict[str, Any]:
    """Return the keys of a training that its forecasts do not take over: of its loop, and of its machine."""
    return {name: FIELDS[name].default for name in affecting("machine") + affecting("loop")}


def _of_run(source: Path, best: bool, ema: bool, data_dir: str | None) -> Trained:
    folder, info = choose(source, best)
    config = replace(config_of(info), **forgotten())
    if data_dir is not None:
        config = _moved(config, data_dir)
    files = Files.open(config.train_data_path, "they tell the model's channels and grid: give --data_dir")
    fields = Fields.open(config, files)
    _check_same(fields, info["data"], {"statistics": config.global_means_path, BESIDE: config.constants_file})
    try:
        about = _about(folder, info, files, fields, ema)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"metrics.jsonl or evaluation/skill.json of {folder.parent.parent} lack something ({first_line(error)}): "
            f"move the damaged one away"
        ) from None
    return Trained(config, fields, about, folder, ema)


def _moved(config: Config, data_dir: str) -> Config:
    """Return a configuration with its data in `data_dir`: there stand what `/data` stood for, or train/ and stats/."""
    moved = move_data(config, data_dir, config.data_dir or "/data")
    if moved.train_data_path != config.train_data_path or data_dir == config.data_dir:
        return moved
    keys = {key: f"{data_dir}/stats/{Path(path).name}" for key, path in statistics_of(config).items()}
    return replace(config, train_data_path=f"{data_dir}/train", **keys)


def _about(folder: Path, info: dict[str, Any], files: Files, fields: Fields, ema: bool) -> dict[str, Any]:
    """Return what `model.json` says."""

    def told(channel: int, name: str, units: str) -> dict[str, Any]:
        one = variable(meant(name, fields.in_names + fields.out_names))
        texts = {"standard_name": one.standard_name, "long_name": one.long_name, "level": one.level}
        return {"name": name, "units": units, "channel": channel, **texts}

    first, last = files.date(0, 0), files.date(len(files.paths) - 1, files.steps[-1] - 1)
    return {
        "format": FORMAT,
        "inputs": [told(*x) for x in zip(fields.inputs, fields.in_names, fields.in_units)],
        "forecasts": [told(*x) for x in zip(fields.outputs, fields.out_names, fields.units)],
        "beside_the_state": {"channels": fields.forcings.names, "needs_time": fields.forcings.need_time},
        "channels_of_files": files.shape[0],
        "plot_channels": fields.plot_channels,
        "latitude": fields.latitude,
        "longitude": fields.longitude,
        "step_hours": fields.step_hours,
        "has_time": fields.has_time,
        "residual_scale": fields.residual_scale,
        "weights": "moving average" if ema else "last step",
        "iteration": info["iteration"],
        "training": {"samples": info["train_samples"], "first": first, "last": last},
        "versions": info["versions"],
        "data": info["data"],
        "validation": _validation(folder, info["iteration"], ema),
        "scores": _scores(folder, ema),
    }


def _is_numbers(x: Any) -> bool:
    """Does a dict hold a number for each name?"""
    return isinstance(x, dict) and bool(x) and all(map(is_finite, x.values()))


_is_validation = holds(
    loss=is_finite, rmse=_is_numbers,
    persistence=lambda x: isinstance(x, dict) and all(y is None or is_finite(y) for y in x.values()),
)  # fmt: skip


def _validation(folder: Path, iteration: int, ema: bool) -> dict[str, Any] | None:
    """Return the scores of the validation at which a checkpoint was written; None where there was none, in numbers."""
    path, kind = folder.parent.parent / "metrics.jsonl", "_ema" if ema else ""
    keys = {"loss": f"valid_loss{kind}", "rmse": f"valid_rmse{kind}", "persistence": "persistence_rmse"}
    for event in read_events(path) if path.is_file() else ():
        if event["event"] == "epoch" and event["iteration"] == iteration:
            found = {name: event.get(key) for name, key in keys.items()}
            return found if _is_validation(found) else None
    return None


def _evaluation(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of a checkpoint's evaluation, and its skill.json; None where there was none."""
    path = folder.parent.parent / "evaluation/skill.json"
    skill = read_json(path) if path.is_file() else {}
    return (path.parent, skill) if isinstance(skill, dict) and skill.get("checkpoint") == str(folder) else None


def _scores(folder: Path, ema: bool) -> dict[str, Any] | None:
    """Return what an evaluation found at some lead times, rows weighted by cos(latitude); None where there was none."""
    source = "ema" if ema else "model"
    if (found := _evaluation(folder)) is None or source not in found[1]["scores"]:
        return None
    skill, there = found[1], found[1]["lead_hours"]
    hours = [h for h in SHOWN if h in there] or there[-1:]
    table = {
        score: {
            name: [skill["scores"][source][score]["cos"][name][there.index(h)][0] for h in hours]
            for name in skill["channels"]
        }
        for score in ("rmse", "rmse_over_persistence", "acc")
        if score in skill["scores"][source]
    }
    told = {name: skill.get(name) for name in ("forecasts", "first", "last", "climatology")}
    return {**told, "hours": hours, **table}
