"""Configuration: one frozen dataclass, each field a key of the YAML file and a flag (utils/config/reader.py)."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import yaml

# What can be computed of place and time and read beside the state, with the channels that it makes.
FORCINGS = {
    "position": ("position_x", "position_y", "position_z"),
    "day": ("sin_local_time", "cos_local_time"),
    "year": ("sin_year", "cos_year"),
    "solar": ("toa_solar",),
}
# What `--report` measures, and has a table of.
REPORTS = ("time", "speed", "memory", "operators", "system", "model")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# What a key affects, and by that what a resumed run and evaluate.py do with it.
AFFECTS = {
    "training": "the losses: a resumed run keeps it, and an evaluation takes it from the training",
    "run": "how a training runs, not what it learns: a resumed run may change it, and an evaluation has no use for it",
    "evaluation": "an evaluation as well: a flag of evaluate.py; where it is not given, as in training",
    "machine": "what suits the machine at hand: a flag of evaluate.py; where it is not given, the default",
    "loop": "the steps of a training and what watches them: an evaluation has none, and holds the default",
}


def key(
    default: Any, help: str, affects: str, choices: tuple | None = None,
    at_least: float | None = None, at_most: float | None = None, rule: Callable[[str, Any], Any] | None = None,
    chapter: int = 1, same_forecast: bool = False, alone: tuple | None = None,
    mapping: Callable[[dict], list[str]] | None = None,
):  # fmt: skip
    """A field.

    Args:
        affects: one of AFFECTS.
        rule: `rule(name, value)` raises ValueError for an illegal value.
        chapter: the first that knows it.
        same_forecast: an evaluation with another value goes on where it was ended; else it begins anew.
        mapping: makes the list of a YAML mapping.
        alone: what a flag without values stands for, and `true` in YAML; with it, there is `--no_NAME` and `false`.
    """
    metadata = dict(
        help=help, affects=affects, choices=choices, at_least=at_least, at_most=at_most, rule=rule, chapter=chapter,
        same_forecast=same_forecast, alone=alone, mapping=mapping,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


path = partial(key, same_forecast=True)  # an evaluation compares the files themselves


LONGEST_TIME = 365 * 24 * 3600  # seconds


def seconds(name: str, text: str) -> float:
    """Return a time such as 90s, 10m or 1.5h in seconds. Raises ValueError for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match or not float(match[1]):
        raise ValueError(f"{name} is {text!r}: it takes a time such as 90s, 10m or 1.5h")
    found = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
    if found > LONGEST_TIME:
        raise ValueError(f"{name} is {text!r}: it takes a year at most, {LONGEST_TIME // 3600}h")
    return found


def interval(name: str, text: str) -> tuple[int | None, float | None]:
    """Return a number of iterations, or a time in seconds; the other is None. Raises ValueError for another text."""
    if re.fullmatch("[1-9][0-9]*", text):
        return int(text), None
    try:
        return None, seconds(name, text)
    except ValueError as error:
        raise ValueError(f"{error}, or a number of iterations") from None


def module_options(name: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the class of `MLP`, or of `MLP:mode=default,dynamic=false`, and its options for torch.compile.

    Raises ValueError for others than `mode` and `dynamic`.
    """
    kind, _, told = text.partition(":")
    options: dict[str, Any] = {}
    for option in filter(None, told.split(",")):
        key, _, value = option.partition("=")
        options[key] = {"true": True, "false": False}.get(value.lower(), value) if key == "dynamic" else value
    is_known = options.keys() <= {"mode", "dynamic"} and isinstance(options.get("dynamic", True), bool)
    is_known &= len(options) == len([*filter(None, told.split(","))])
    if not kind or not is_known or options.get("mode", "default") not in COMPILE_MODES:
        raise ValueError(
            f"{name} has {text!r}: it takes a class of modules, alone or with options, MLP:mode=default,dynamic=false, "
            f"where mode is one of {', '.join(COMPILE_MODES)}"
        )
    return kind, options


def texts_of_options(value: dict[str, dict[str, Any] | None]) -> list[str]:
    """Return a mapping from classes to options, as YAML has it, in the form that `module_options` reads."""

    def text(kind: str, options: Any) -> str:
        if isinstance(options, dict):
            options = ",".join(f"{key}={x}" for key, x in options.items())
        return f"{kind}:{options}" if options else str(kind)

    return [text(kind, options) for kind, options in value.items()]


@dataclass(frozen=True)
class Keys:
    """Everything that decides a run. Each field is a YAML key and a flag; a boolean `x` has `--x` and `--no_x`."""

    # The run
    config: str = key("base", "section of the YAML file", "evaluation")
    run_num: str = key("00", "name of the run, the last folder of its path", "run")
    expdir: str = key("/logs", "folder that holds all runs", "run")
    seed: int = key(0, "seed of weights, order of samples and dropout", "training", at_least=0, at_most=2**63 - 1)
    device: str = key("auto", "device to train on", "machine", choices=("auto", "cpu", "cuda"), same_forecast=True)

    # Long runs
    checkpoint_every: str | None = key("10m", "time (90s, 10m, 1h) or iterations to a checkpoint", "run", rule=interval)
    keep_checkpoints: int = key(2, "newest checkpoints to keep; the best stays besides", "run", at_least=1)
    resume: str = key("none", "none, auto (the newest run of this name), or a run's or a checkpoint's folder", "run")
    init_from: str | None = key(None, "weights to begin with: a file of `python -m utils.checkpoint export`", "loop")
    time_limit: str | None = key(None, "stop and save after this time: 50m, 11.5h", "run", rule=seconds)
    comm_timeout: str = key("30m", "longest wait of a rank for the others", "machine", rule=seconds, same_forecast=True)
    verify_every: int | None = key(None, "compare the ranks' weights every so many iterations", "run", at_least=1)
    on_nonfinite: str = key("stop", "what a loss or gradient that is not finite does", "run", choices=("stop", "skip"))

    # The model
    embed_dim: int = key(384, "width D of the transformer", "training", at_least=1, at_most=2**17)
    depth: int = key(12, "number of transformer blocks", "training", at_least=1, at_most=10_000)
    num_heads: int = key(8, "number of attention heads", "training", at_least=1)
    patch_size: int = key(8, "side of a square patch, in grid points", "training", at_least=1)
    patch_overlap: int = key(
        0, "points that a token's window reaches beyond its patch; half a patch: hardly a seam", "training", at_least=0
    )
    dropout: float = key(0.0, "dropout probability: embedding, attention, projections, MLP", "training", at_least=0)
    drop_path: float = key(
        0.0,
        "DropPath probability of the last block; from 0 in the first one, linearly",
        "training",
        at_least=0,
        same_forecast=True,
    )
    residual: bool = key(False, "forecast the change: x + net(x)", "training")
    conserve_mean: list[str] | None = key(None, "channels whose global mean a forecast keeps", "training")
    attention: str = key(
        "auto", "attention kernel: an SDPA backend, or the package flash_attn", "evaluation",
        choices=("auto", "flash", "efficient", "cudnn", "math", "flash_attn"),
    )  # fmt: skip

    # The data
    data_dir: str | None = path(None, "folder that stands for /data at the front of the paths below", "evaluation")
    train_data_path: str = path("/data/train", "folder of the training files (*.h5)", "run")
    valid_data_path: str = path("/data/valid", "folder of the validation files (*.h5)", "run")
    inf_data_path: str | None = path(None, "folder of the files to forecast from (evaluate.py)", "evaluation")
    global_means_path: str = path("/data/stats/global_means.npy", "mean of each channel, [1, C, 1, 1]", "evaluation")
    global_stds_path: str = path("/data/stats/global_stds.npy", "std of each channel, [1, C, 1, 1]", "evaluation")
    time_means_path: str | None = path(
        "/data/stats/time_means.npy", "mean of each grid point, [1, C, H, W]; if there is none: no ACC", "evaluation"
    )
    time_diff_stds_path: str | None = path(
        None, "std of the change in a stored step, for a residual forecast", "evaluation"
    )
    img_size: list[int] = key((360, 720), "rows and columns to use, from the north-west corner", "training", at_least=1)
    dt: int = key(1, "lead of the forecast, in stored steps", "training", at_least=1)
    n_in_channels: int = key(20, "number of input channels: the first ones of the file", "training", at_least=1)
    n_out_channels: int = key(20, "number of forecast channels: the first ones of the file", "training", at_least=1)
    in_channels: list[str] | None = key(None, "input channels by name (sets n_in_channels)", "training")
    out_channels: list[str] | None = key(None, "forecast channels by name (sets n_out_channels)", "training")
    constants: list[str] | None = key(None, "fields that do not change, to read beside the state", "training")
    constants_path: str | None = path(None, "their file (default: constants.h5 beside global_means_path)", "evaluation")
    forcings: list[str] | None = key(
        None, "what is computed and read beside the state", "training", choices=tuple(FORCINGS)
    )
    channel_names: list[str] | None = key(None, "names of all channels of the files, in order", "evaluation")
    limit_nsamples: int | None = key(None, "train on the first samples only", "training", at_least=1)
    limit_nsamples_val: int | None = key(None, "validate on the first samples only", "run", at_least=1)
    data_loader_config: str = key("pytorch", "data loader", "run", choices=("pytorch", "dali"))
    num_data_workers: int = key(
        0, "readers that read ahead; 0 reads inside the loop", "evaluation", at_least=0, at_most=256, same_forecast=True
    )
    read_depth: int | None = key(
        None,
        "reads at once, contiguous files (num_data_workers)",
        "evaluation",
        at_least=1,
        at_most=4096,
        same_forecast=True,
    )
    stage_dir: str | None = key(None, "folder in the node to copy the files to before training", "run")

    # Training
    num_iters: int = key(30000, "number of optimiser steps, exactly", "training", at_least=1)
    global_batch_size: int | None = key(
        16, "samples per optimiser step, over all ranks", "training", at_least=1, same_forecast=True
    )
    local_batch_size: int | None = key(
        None, "samples per forward pass on one rank (sets the global one)", "evaluation", at_least=1, same_forecast=True
    )
    accumulation_steps: int = key(1, "forward-backward passes per optimiser step", "loop", at_least=1)
    optimizer: str = key(
        "Adam", "optimiser; the last two keep less", "training", choices=("Adam", "AdamW", "Adafactor", "Adam8bit")
    )
    weight_decay: float = key(0.01, "of AdamW, on all weights", "training", at_least=0)
    lr: float = key(5e-4, "peak learning rate", "training", at_least=0)
    lr_schedule: str = key("cosine", "after the warm-up: decay to 0, or none", "training", choices=("cosine", "none"))
    warmup: int = key(0, "iterations of linear warm-up; the last of them uses lr", "training", at_least=0)
    clip_grad_norm: float | None = key(None, "largest norm of the whole gradient", "training", at_least=0)
    loss: str = key(
        "relative_l2", "what is made small; weighted: by the next keys", "training", choices=("relative_l2", "weighted")
    )
    loss_channels: list[str] | None = key(None, "weights: auto, or NAME=WEIGHT, 1 for the others", "training")
    loss_levels: str = key("none", "weigh levels by their pressure", "training", choices=("none", "pressure"))
    loss_latitude: bool = key(False, "weight rows by cos(latitude)", "training")
    loss_gradient: float = key(
        0.0, "weight in the loss of the distance of horizontal gradients", "training", at_least=0
    )
    rollout_steps: list[int] = key(
        (1,), "steps of a forecast in training: the loss is their mean", "training", at_least=1
    )
    rollout_from: list[int] = key((0,), "iteration from which each rollout_steps holds", "training", at_least=0)
    ema_decay: float | None = key(None, "decay of averaged weights: 0.999", "training", at_least=0, at_most=1)

    # Speed
    amp_mode: str = key("none", "mixed precision", "evaluation", choices=("none", "fp16", "bf16"))
    tf32: bool = key(True, "TF32 matrix products for float32 on NVIDIA GPUs", "evaluation")
    enable_fused: bool = key(False, "Adam or AdamW in one fused kernel", "run")
    enable_jit: bool = key(False, "compile the model with torch.compile", "machine")
    compile_modules: list[str] = key(
        ("Block",), "classes of modules to compile, each one by itself; with options MLP:mode=default", "machine",
        rule=module_options, mapping=texts_of_options,
    )  # fmt: skip
    compile_mode: str = key("default", "mode of torch.compile", "machine", choices=COMPILE_MODES)
    model_backend: str = key(
        "pytorch", "layers of the blocks: PyTorch's, or NVIDIA's", "machine", choices=("pytorch", "transformer-engine")
    )
    fp8: bool = key(False, "products of 8 bits in layers of Transformer Engine (Hopper, Ada)", "machine")

    # Memory
    activation_checkpoint: str = key(
        "none", "what the backward pass computes once more", "loop", choices=("none", "step", "block", "mlp")
    )
    mlp_chunks: int = key(1, "parts of the tokens that pass an MLP or the head in turn", "evaluation", at_least=1)
    expandable_segments: bool = key(True, "GPU memory that can grow (not on MI300A)", "machine", same_forecast=True)

    # Data parallelism
    noddp: bool = key(False, "do not synchronise gradients (timing only: the ranks drift apart)", "run")
    bucket_cap_mb: int = key(25, "size of a gradient bucket of DDP, in MiB", "run", at_least=1, at_most=2**20)
    disable_broadcast_buffers: bool = key(False, "DDP does not broadcast buffers before each forward pass", "run")
    shard: str = key(
        "none", "what data parallel ranks share out: gradients and optimiser, or weights, too", "run",
        choices=("none", "gradients", "weights"), chapter=2,
    )  # fmt: skip

    # Model parallelism
    tensor_parallel: int = key(1, "ranks that split the weights of a layer", "run", at_least=1, chapter=2)
    context_parallel: int = key(1, "ranks that split the tokens of an image", "run", at_least=1, chapter=2)
    parallel_order: str = key("tp-cp-dp", "axes of the grid of ranks, neighbours first", "run", chapter=2)
    sequence_parallel: bool = key(True, "split the tokens over the tensor parallel ranks too", "run", chapter=2)
    sp_regather: bool = key(False, "gather tokens once more in the backward pass: less memory", "run", chapter=2)
    cp_attention: str = key("gather", "attention over context ranks", "run", choices=("gather", "ulysses"), chapter=2)
    cp_regather: bool = key(False, "gather k and v once more in the backward pass: less memory", "run", chapter=2)
    cp_head_groups: int = key(1, "gather k and v of so many groups of heads in turn", "run", at_least=1, chapter=2)

    # CUDA graphs
    graph_warmup: int = key(20, "iterations before the step is recorded", "run", at_least=1, chapter=3)
    graph_optimizer: bool = key(False, "record the optimiser, too", "run", chapter=3)

    # What is shown
    report: list[str] = key(
        (), "measure what the run costs, say what bounds it: tables, and report/; alone: all", "loop", REPORTS,
        alone=REPORTS,
    )  # fmt: skip
    profile: str = key("none", "profiler of some steps, whose traces go to profile/", "loop", choices=("none", "torch"))
    profile_steps: list[int] = key((10, 2, 3), "steps to wait, to warm up, and to profile", "run", at_least=0)
    profile_ranks: str = key("first", "ranks that write a trace", "run", choices=("first", "all"))
    profile_stacks: bool = key(False, "traces say which line of code called: larger, slower", "run")
    validate_first: bool = key(False, "validate before the first step, too: a point at iteration 0", "run")
    tracker: str = key("none", "where curves go beside TensorBoard", "loop", choices=("none", "mlflow"))
    plot_channels: list[str] | None = key(None, "channels to draw in validation (default: the first)", "evaluation")


@dataclass(frozen=True)
class Config(Keys):
    """The keys of a run, and what follows from them."""

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
                f"not global_batch_size {self.global_batch_size}: set only one of the two (None for the other)"
            )
        return replace(self, global_batch_size=total)

    @property
    def in_8_bits(self) -> bool:
        """Whether most products are of numbers of 8 bits."""
        return self.fp8 and self.model_backend == "transformer-engine"

    @property
    def compile_modes(self) -> set[str]:
        """The modes of torch.compile of all modules to compile."""
        options = (module_options("compile_modules", text)[1] for text in self.compile_modules)
        return {found.get("mode", self.compile_mode) for found in options}

    def steps_at(self, iteration: int) -> int:
        """Return the steps of a forecast in an iteration, counted from 0: one before the first of `rollout_from`."""
        iteration = min(iteration, self.num_iters - 1)  # what is read ahead of the end is as the last one
        return ([1] + [n for n, first in zip(self.rollout_steps, self.rollout_from) if first <= iteration])[-1]

    def mean_steps(self, iterations: range) -> float:
        """Return the mean of `steps_at` over iterations; 1 where there are none."""
        return sum(map(self.steps_at, iterations)) / len(iterations) if iterations else 1.0

    @property
    def longest_rollout(self) -> int:
        """The most steps of a forecast in training."""
        return max(self.steps_at(first) for first in (0, *self.rollout_from))

    @property
    def constants_file(self) -> str:
        """Where the constants are: by default where `python -m utils.prepare_data` puts them, beside the statistics."""
        return self.constants_path or str(Path(self.global_means_path).with_name("constants.h5"))

    @property
    def longest_wait(self) -> timedelta:
        """How long a rank waits for the others."""
        return timedelta(seconds=seconds("comm_timeout", self.comm_timeout))

    def to_yaml(self) -> str:
        """Return what is resolved here as a file with one section: `--yaml_config PATH --config NAME` repeats it."""
        section = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        # Both sizes would be refused on another number of ranks, and to repeat a run is not to go on with it.
        section.update(local_batch_size=None, data_dir=None, resume="none")
        return yaml.safe_dump({section.pop("config"): section}, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def affecting(what: str) -> list[str]:
    """Return the keys that affect this, one of AFFECTS."""
    return [name for name, field in FIELDS.items() if field.metadata["affects"] == what]
