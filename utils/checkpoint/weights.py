"""The weights alone: of a checkpoint, in a file, in a model."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from utils.checkpoint.archives import check_archive
from utils.checkpoint.info import Unreachable, Unreadable, is_checkpoint, read_info
from utils.checkpoint.store import find, read, reason
from utils.files import whole
from utils.reading import check_kind, check_own

SAFE = ".safetensors"
FILE = f"weights{SAFE}"  # of an exported folder
REMEDY = "give a file or folder of `python -m utils.checkpoint export`"


def read_weights(folder: Path, kind: str = "model") -> dict[str, Tensor]:
    """Return the weights in a checkpoint, or their moving average (`ema`), as a model on one device names them.

    Raises Unreadable.
    """
    weights = {name.removeprefix(f"{kind}."): x for name, x in read(folder, f"{kind}.").items()}
    # Matrices that the model has one below the other lie apart. Checkpoints that do not say which have only these.
    stacked = read_info(folder)["stacked"]
    if stacked is None:
        stacked = [name for name in weights if ".qkv." in name]
    return {name: x.flatten(0, 1) if name in stacked and x.ndim > 1 else x for name, x in weights.items()}


def export(source: Path, out: Path, best: bool = False, ema: bool = False) -> str:
    """Write the weights of a checkpoint, of a run the newest complete one or the best, to one file; or their average.

    The file is that of `torch.save(model.state_dict())` on a single device: `torch.load(out, weights_only=True)`; one
    that ends in .safetensors is safetensors'. Returns a line that says so. Raises ValueError where there is no such
    checkpoint, or `out` cannot be written.
    """
    folder, info = choose(source, best)
    weights = read_weights(folder, "ema" if ema else "model")
    if not weights:
        raise ValueError(f"{folder} holds no moving average of weights: leave --ema out, or train with --ema_decay")
    try:
        with whole(out) as part:
            save = save_tensors if out.suffix == SAFE else torch.save
            save(weights, part)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot write {out} ({reason(error)}): give another file") from None
    total = sum(x.numel() for x in weights.values())
    return f"{folder}: wrote {total:,} weights after {info['iteration']} iterations to {out}"


def run_of(source: Path) -> Path:
    """Return the folder of a run that a path means: its own, or one of its checkpoints'."""
    return source.parent.parent if source.parent.name == "checkpoints" else source


def choose(source: Path, best: bool) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that a path means, with its info. Raises ValueError."""
    check_own(run_of(source))
    if is_checkpoint(source):
        if best:
            raise ValueError(f"best chooses among a run's checkpoints, and {source} is one thing: leave --best out")
        return source, read_info(source)
    why = "give the folder of a run, or one of its checkpoints"
    for folder in find(source / "checkpoints"):
        try:
            info = read_info(folder)
        except Unreachable:  # an older one would be another model
            raise
        except Unreadable as error:
            why = str(error)
            continue
        if best and info["best"]["name"] is None:
            raise ValueError(f"{source} was not validated yet: leave --best out")
        if best and folder.name != info["best"]["name"]:
            return choose(folder.with_name(info["best"]["name"]), best=False)
        return folder, info
    raise ValueError(f"{source} has no complete checkpoint: {why}")


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors does: a header in JSON, then the values. Raises ValueError without that package."""
    path.write_bytes(_safetensors().save({name: x.contiguous() for name, x in tensors.items()}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors, or of `torch.save`. Raises ValueError for another."""
    check_kind(path)
    load = _safetensors().load_file if path.suffix == SAFE else _load
    try:
        weights = load(path)
        weights = dict(weights) if isinstance(weights, dict) else weights  # not one with words of a stranger for `keys`
        if isinstance(weights, dict) and not all(isinstance(x, Tensor) for x in weights.values()):
            raise TypeError
        return weights
    except OSError as error:
        raise ValueError(f"cannot read the weights {path} ({error.strerror or error}): {REMEDY}") from None
    except Exception as error:  # whatever it is, it is no such file
        raise ValueError(f"{path} holds no weights ({type(error).__name__}): {REMEDY}") from None


def _load(path: Path) -> Any:
    check_archive(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("exported models need safetensors: `pip install -r requirements-prepare.txt`") from None
    return safetensors.torch


def load_weights(model: nn.Module, path: str | None) -> nn.Module:
    """Set the weights of `model` to those in the file, and return it; without a path they stay as they were drawn.

    Raises ValueError where the file cannot be read, and where its model is another one.
    """
    if path is None:
        return model
    weights = load_tensors(Path(path, FILE) if Path(path).is_dir() else Path(path))
    if not isinstance(weights, dict) or not weights.keys() & model.state_dict().keys():
        raise ValueError(f"{path} holds no weights of this model: {REMEDY}")
    return set_weights(model, weights, path)


def fill(build: Callable[[], nn.Module], weights: dict[str, Tensor], path: str) -> nn.Module:
    """Return the model that `build` makes, with these weights. Raises ValueError as `set_weights`.

    It is made without memory first: a stranger's configuration can claim any size.
    """
    with torch.device("meta"):
        _check(build(), weights, path)
    return set_weights(build(), weights, path)


def set_weights(model: nn.Module, weights: dict[str, Tensor], path: str) -> nn.Module:
    """Set the weights of `model`, and return it. Raises ValueError where those from `path` are another model's."""
    _check(model, weights, path)
    model.load_state_dict(weights)
    return model


def _check(model: nn.Module, weights: dict[str, Tensor], path: str) -> None:
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for name in dict.fromkeys([*shapes, *weights]):
        there, here = tuple(weights[name].shape) if name in weights else "not there", shapes.get(name, "not there")
        if there != here:
            raise ValueError(
                f"{name} in {path} is {there}, and in this model {here}: give the configuration of its training "
                f"(the run's config.yaml has it: --yaml_config, --config)"
            )
