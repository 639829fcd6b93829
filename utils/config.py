"""Configuration: one frozen dataclass, each field a key of the YAML file and a flag (utils/config_reader.py)."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _key(
    default: Any,
    help: str,
    choices: tuple | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    rule: Callable[[str, Any], Any] | None = None,
    chapter: int = 1,
):
    """A field: `rule(name, value)` raises ValueError for an illegal value; `chapter` is the first that knows it."""
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "rule": rule,
        "chapter": chapter,
    }
    return dataclasses.field(default=default, metadata=metadata)


def seconds(name: str, text: str) -> float:
    """Return a time such as 90s, 10m or 1.5h in seconds. Raises ValueError for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match or not float(match[1]):
        raise ValueError(f"{name} is {text!r}: it takes a time such as 90s, 10m or 1.5h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def interval(name: str, text: str) -> tuple[int | None, float | None]:
    """Return a number of iterations, or a time in seconds; the other is None. Raises ValueError for another text."""
    if re.fullmatch("[1-9][0-9]*", text):
        return int(text), None
    try:
        return None, seconds(name, text)
    except ValueError as error:
        raise ValueError(f"{error}, or a number of iterations") from None


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. Each field is a YAML key and a flag; a boolean `x` has `--x` and `--no_x`."""

    # The run
    config: str = _key("base", "section of the YAML file")
    run_num: str = _key("00", "name of the run, the last folder of its path")
    expdir: str = _key("/logs", "folder that holds all runs")
    seed: int = _key(
        0, "seed of the weights, of the order of the samples and of dropout", at_least=0, at_most=2**63 - 1
    )
    device: str = _key("auto", "device to train on", choices=("auto", "cpu", "cuda"))

    # Long runs
    checkpoint_every: str | None = _key(
        "10m", "time between checkpoints (90s, 10m, 1h), or a number of iterations", rule=interval
    )
    keep_checkpoints: int = _key(2, "newest checkpoints to keep; the best stays besides", at_least=1)
    resume: str = _key("none", "none, auto (the newest run of this name), or a run's or a checkpoint's folder")
    init_from: str | None = _key(None, "weights to begin with: a file of `python -m utils.checkpoint export`")
    time_limit: str | None = _key(None, "stop and save after this time: 50m, 11.5h", rule=seconds)
    comm_timeout: str = _key("30m", "longest wait of a rank for the others", rule=seconds)
    on_nonfinite: str = _key("stop", "what a loss or gradient that is not finite does", choices=("stop", "skip"))

    # The model
    embed_dim: int = _key(384, "width D of the transformer", at_least=1)
    depth: int = _key(12, "number of transformer blocks", at_least=1)
    num_heads: int = _key(8, "number of attention heads", at_least=1)
    patch_size: int = _key(8, "side of a square patch, in grid points", at_least=1)
    dropout: float = _key(0.0, "dropout probability: embedding, attention, projections, MLP", at_least=0)
    drop_path: float = _key(0.0, "DropPath probability of the last block (it grows linearly with depth)", at_least=0)
    residual: bool = _key(False, "forecast the change: x + net(x)")
    attention: str = _key(
        "auto", "attention kernel (SDPA backend)", choices=("auto", "flash", "efficient", "cudnn", "math")
    )

    # The data
    data_dir: str | None = _key(None, "folder that stands for /data at the front of the paths below")
    train_data_path: str = _key("/data/train", "folder of the training files (*.h5)")
    valid_data_path: str = _key("/data/valid", "folder of the validation files (*.h5)")
    inf_data_path: str | None = _key(None, "folder of the files to forecast from (evaluate.py)")
    global_means_path: str = _key("/data/stats/global_means.npy", "mean of each channel, [1, C, 1, 1]")
    global_stds_path: str = _key("/data/stats/global_stds.npy", "standard deviation of each channel, [1, C, 1, 1]")
    time_means_path: str = _key("/data/stats/time_means.npy", "mean over time of each grid point, [1, C, H, W]")
    time_diff_stds_path: str | None = _key(None, "std of the change over dt, [1, C, 1, 1]: scales a residual forecast")
    img_size: list[int] = _key((360, 720), "rows and columns to use, from the north-west corner", at_least=1)
    dt: int = _key(1, "lead of the forecast, in stored steps", at_least=1)
    n_in_channels: int = _key(20, "number of input channels: the first ones of the file", at_least=1)
    n_out_channels: int = _key(20, "number of forecast channels: the first ones of the file", at_least=1)
    in_channels: list[str] | None = _key(None, "input channels by name (sets n_in_channels)")
    out_channels: list[str] | None = _key(None, "forecast channels by name (sets n_out_channels)")
    channel_names: list[str] | None = _key(None, "names of all channels of the files, in order")
    limit_nsamples: int | None = _key(None, "train on the first samples only", at_least=1)
    limit_nsamples_val: int | None = _key(None, "validate on the first samples only", at_least=1)
    data_loader_config: str = _key("pytorch", "data loader", choices=("pytorch", "dali"))
    num_data_workers: int = _key(0, "readers that read ahead; 0 reads inside the loop", at_least=0)
    read_depth: int | None = _key(None, "reads under way at once, contiguous files (num_data_workers)", at_least=1)
    stage_dir: str | None = _key(None, "folder in the node to copy the files to before training")

    # Training
    num_iters: int = _key(30000, "number of optimiser steps, exactly", at_least=1)
    global_batch_size: int | None = _key(16, "samples per optimiser step, over all ranks", at_least=1)
    local_batch_size: int | None = _key(None, "samples per forward pass on one rank (sets the global one)", at_least=1)
    accumulation_steps: int = _key(1, "forward-backward passes per optimiser step", at_least=1)
    optimizer: str = _key("Adam", "optimiser", choices=("Adam",))
    lr: float = _key(5e-4, "peak learning rate", at_least=0)
    lr_schedule: str = _key(
        "cosine", "what follows the warm-up: cosine decay to 0, or none", choices=("cosine", "none")
    )
    warmup: int = _key(0, "iterations of linear warm-up; the last of them uses lr", at_least=0)
    clip_grad_norm: float | None = _key(None, "largest norm of the whole gradient", at_least=0)
    ema_decay: float | None = _key(None, "decay of a moving average of the weights: 0.999", at_least=0, at_most=1)

    # Speed
    amp_mode: str = _key("none", "mixed precision", choices=("none", "fp16", "bf16"))
    tf32: bool = _key(True, "TF32 matrix products for float32 on NVIDIA GPUs")
    enable_fused: bool = _key(False, "Adam in one fused kernel")
    enable_jit: bool = _key(False, "compile the model with torch.compile")
    compile_modules: list[str] = _key(("Block",), "classes of modules to compile, each one by itself")
    compile_mode: str = _key("default", "mode of torch.compile", choices=COMPILE_MODES)
    model_backend: str = _key("pytorch", "layers of the model", choices=("pytorch", "transformer-engine"))

    # Memory
    activation_checkpoint: str = _key(
        "none", "what the backward pass computes once more, and nobody keeps for it", choices=("none", "block", "mlp")
    )
    mlp_chunks: int = _key(1, "parts of the tokens that pass through an MLP or the head in turn", at_least=1)
    expandable_segments: bool = _key(True, "GPU memory in segments that can grow (not on MI300A)")

    # Data parallelism
    noddp: bool = _key(False, "do not synchronise gradients (timing only: the ranks drift apart)")
    bucket_cap_mb: int = _key(25, "size of a gradient bucket of DDP, in MiB", at_least=1, at_most=2**20)
    disable_broadcast_buffers: bool = _key(False, "DDP does not broadcast buffers before each forward pass")

    # Model parallelism
    tensor_parallel: int = _key(1, "ranks that split the weights of a layer", at_least=1, chapter=2)
    context_parallel: int = _key(1, "ranks that split the tokens of an image", at_least=1, chapter=2)
    parallel_order: str = _key("tp-cp-dp", "axes of the grid of ranks, neighbours first", chapter=2)
    sequence_parallel: bool = _key(True, "split the tokens over the tensor parallel ranks too", chapter=2)
    sp_regather: bool = _key(False, "gather tokens once more in the backward pass: less memory", chapter=2)
    cp_attention: str = _key("gather", "attention over context ranks", choices=("gather", "ulysses"), chapter=2)

    # CUDA graphs
    graph_warmup: int = _key(20, "iterations before the step is recorded", at_least=1, chapter=3)
    graph_optimizer: bool = _key(False, "record the optimiser, too", chapter=3)

    # What is shown
    report: bool = _key(False, "measure what the run costs, and say what bounds it: tables at the end, and report/")
    profile: str = _key("none", "profiler of some steps, whose traces go to profile/", choices=("none", "torch"))
    profile_steps: list[int] = _key((10, 2, 3), "steps to wait, to warm up, and to profile", at_least=0)
    profile_ranks: str = _key("first", "ranks that write a trace", choices=("first", "all"))
    tracker: str = _key("none", "where curves go beside TensorBoard", choices=("none", "mlflow"))
    plot_channels: list[str] | None = _key(None, "channels of the validation picture (default: the first one)")

    def with_batches(self, data_parallel_size: int) -> "Config":
        """Return the configuration with both batch sizes set: global = local x ranks x accumulation steps.

        Raises ValueError where they do not divide, with the legal sizes.
        """
        parts = data_parallel_size * self.accumulation_steps
        rule = f"{data_parallel_size} data-parallel rank(s) x {self.accumulation_steps} accumulation step(s)"
        if self.local_batch_size is None:
            if self.global_batch_size is None:
                raise ValueError("global_batch_size and local_batch_size are both None: set one of the two")
            if self.global_batch_size % parts:
                below = self.global_batch_size // parts * parts
                legal = " or ".join(str(size) for size in (below, below + parts) if size)
                raise ValueError(
                    f"global_batch_size {self.global_batch_size} does not divide over {rule}: take {legal}, "
                    f"or set --local_batch_size"
                )
            return replace(self, local_batch_size=self.global_batch_size // parts)
        total = self.local_batch_size * parts
        if self.global_batch_size not in (None, total):
            raise ValueError(
                f"local_batch_size {self.local_batch_size} on {rule} makes a global batch of {total}, "
                f"not global_batch_size {self.global_batch_size}: set only one of the two"
            )
        return replace(self, global_batch_size=total)

    @property
    def longest_wait(self) -> timedelta:
        """How long a rank waits for the others."""
        return timedelta(seconds=seconds("comm_timeout", self.comm_timeout))

    def save(self, path: Path) -> None:
        """Write the resolved configuration as a section of its own: `--yaml_config PATH --config NAME` repeats it."""
        section = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        # Both sizes would be refused on another number of ranks, and to repeat a run is not to go on with it.
        section.update(local_batch_size=None, data_dir=None, resume="none")
        path.write_text(yaml.safe_dump({section.pop("config"): section}, sort_keys=False))


@dataclass(frozen=True)
class Evaluation:
    """What evaluate.py does with a model; each field is a flag."""

    checkpoint: str | None = _key(None, "folder of a run, or of one of its checkpoints, or a file of exported weights")
    best: bool = _key(False, "of a run the checkpoint with the lowest validation loss, not the newest")
    weights: str = _key("all", "weights to forecast with: raw, their moving average, or each", ("all", "raw", "ema"))
    out: str | None = _key(None, "folder of the results: evaluation/ in the run's folder, or beside the weights")
    lead_hours: float = _key(120.0, "longest lead time", at_least=0)
    stride: int = _key(1, "forecasts begin at every so-many-th time that has all of its truth", at_least=1)
    climatology: str | None = _key(None, "means of each day of the year (NetCDF, Zarr) in place of time_means")
    block_hours: float = _key(24.0, "length of the blocks of times that the bootstrap draws", at_least=0)
    forecasts: str = _key("none", "write the forecasts, too", ("none", "netcdf", "zarr"))
    projection: str = _key("plain", "of the maps: plain latitude and longitude, or a class of cartopy.crs")
