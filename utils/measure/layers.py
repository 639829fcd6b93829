"""The layers of a model: what comes out of each, its parameters, its floating point operations (`--report`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from utils.config.settings import Config
from utils.data.fields import Fields
from utils.measure.operations import Recorder


@dataclass(frozen=True)
class Layer:
    """A module of a model. `shape` is that of its output for one sample, `flops` those of its forward pass on it."""

    name: str
    kind: str
    shape: tuple[int, ...] | None
    parameters: int
    flops: int


def summarise(
    build_model: Callable[[Config, Fields, torch.device | None], nn.Module], config: Config, fields: Fields
) -> list[Layer]:
    """Return the modules of a model in their order, each with all that is in it; the model itself is the first.

    The model is made, and passes a sample, without numbers (PyTorch's meta device): that takes neither memory nor long.
    """
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus), torch.device("meta"):
        model = build_model(replace(config, init_from=None), fields, None).eval()
    shapes: dict[str, tuple[int, ...]] = {}

    def keep(name: str):
        def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
            shapes[name] = tuple(out.shape)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))
    with torch.no_grad(), Recorder() as recorder:
        model(torch.empty(1, fields.sizes[0], *config.img_size, device="meta"))
    top, layers = type(model).__name__, []
    for name, module in model.named_modules():
        parameters, within = sum(p.numel() for p in module.parameters()), f"{top}.{name}." if name else f"{top}."
        flops = sum(op.flops for op in recorder.operations if f"{op.module}.".startswith(within))
        layers.append(Layer(name or top, type(module).__name__, shapes.get(name), parameters, flops))
    return layers


def summary_table(layers: list[Layer]) -> Iterator[str]:
    """Yield the lines of a table. Of layers that repeat, blocks of a transformer, only the first is told in full."""
    yield f"  {'layer':28} {'kind':22} {'output':>20} {'parameters':>12} {'GFLOP':>9}"
    for layer in layers:
        if ".0" not in layer.name and any(part.isdigit() for part in layer.name.split(".")[:-1]):
            continue  # inside a block that is not the first
        if not layer.parameters or layer.shape is None:  # a list of blocks does nothing itself
            continue
        shape = " x ".join(map(str, layer.shape))
        yield f"  {layer.name:28} {layer.kind:22} {shape:>20} {layer.parameters:12,} {layer.flops / 1e9:9.3f}"
