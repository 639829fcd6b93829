"""Chapter 1: train a vision transformer to forecast the weather, on one device, then data parallel.

    python train.py --config=demo                              one process
    torchrun --nproc_per_node=4 train.py --config=bs64_opt     four, each with a quarter of every batch
    sbatch -n 1 -t 20 submit_pm.sh --config=short              under Slurm

New in this chapter: the training loop, mixed precision, gradient accumulation, compilation, the fused optimiser, and
DistributedDataParallel. `python train.py --help` lists the flags; what they do not teach lives in utils/.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial

from utils.config.reader import answer_help, load_config

if __name__ == "__main__":
    answer_help(sys.argv[1:])  # before the imports that take seconds
import torch
import torch.distributed as dist
from torch import Tensor, nn

from networks.attention import pick_attention
from networks.backend import use_backend
from networks.vit import ViT
from utils.checkpoint.state import TrainingState
from utils.checkpoint.weights import load_weights
from utils.compiler import compile_modules
from utils.config.settings import Config
from utils.data.batches import Batch
from utils.data.dataset import Fields, Job, WeatherData
from utils.loss import relative_l2
from utils.optimizers import build_optimizer, set_lr
from utils.ranks.agree import all_ranks_agree
from utils.ranks.start import World, start
from utils.run.run import Run
from utils.run.setup import prepare, settle_buckets
from utils.spans import span

AMP_DTYPE = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Run matrix products in half precision; weights, norms and the loss stay in float32."""
    return torch.autocast(device.type, AMP_DTYPE[config.amp_mode], enabled=config.amp_mode != "none")


def forward_backward(
    model: nn.Module, inp: Tensor, target: Tensor, forced: Tensor, scaler: torch.amp.GradScaler, config: Config,
    distance: Callable[[Tensor, Tensor], Tensor] = relative_l2, gradient_factor: int = 1,
) -> Tensor:  # fmt: skip
    """Fill the gradients of one optimiser step and return the loss, the mean over this rank's samples.

    A forecast goes as many steps ahead as there are targets (K B C H W), and the gradients pass through all of them.
    The samples (B C H W) pass in `accumulation_steps` parts: the gradients add up, and only one part is in memory.
    Chapter 2 explains when the distance and the gradients are others.
    """
    model.zero_grad(set_to_none=True)
    steps, losses = config.accumulation_steps, []
    for i, (x, y, known) in enumerate(zip(inp.chunk(steps), target.chunk(steps, 1), forced.chunk(steps, 1))):
        # DDP averages gradients over the ranks during the backward pass: once a step, in its last part.
        wait = hasattr(model, "no_sync") and i < steps - 1
        with model.no_sync() if wait else contextlib.nullcontext():
            with span("forward"):
                with autocast(config, x.device):
                    forecast = model(x, known)
                loss = distance(forecast, y).mean() / steps
            with span("backward"):
                # Scaled up, fp16 gradients do not vanish; the scaler is the identity in the other modes.
                scaler.scale(loss * gradient_factor).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def learning_rate(iteration: int, config: Config) -> float:
    """Return the learning rate of an iteration, counted from 0.

    A linear warm-up reaches lr in its last iteration; from there a cosine falls to 0 (Loshchilov & Hutter 2017).
    """
    if iteration < config.warmup:
        return config.lr * (iteration + 1) / config.warmup
    if config.lr_schedule == "none":
        return config.lr
    progress = (iteration - config.warmup) / max(config.num_iters - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def update_weights(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    config: Config,
    lr: float,
    total_norm: Callable[[list[Tensor]], Tensor] = nn.utils.get_total_norm,
) -> Tensor:
    """Take a step of the optimiser, and return the norm of the whole gradient, before clipping."""
    (group,) = optimizer.param_groups
    set_lr(group, lr)
    scaler.unscale_(optimizer)
    grad_norm = total_norm([p.grad for p in group["params"]])
    if config.clip_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(group["params"], config.clip_grad_norm, grad_norm)
    scaler.step(optimizer)  # skipped where a gradient is not finite
    scaler.update(None if config.amp_mode == "fp16" else 1.0)
    return grad_norm


def train(step: Callable, update: Callable, model: nn.Module, data: WeatherData, config: Config, run: Run) -> None:
    """Train for `num_iters` iterations; validate after each epoch and at the end, with `validate_first` also before.

    `step(*tensors)` fills the gradients, returns the loss; `update(lr)` changes the weights, returns the norm.
    """
    while not run.should_stop:
        model.train()
        for batch in run.batches():
            i = run.iteration
            with span(f"step {i}"):
                with span(f"data copy in {i}"):
                    tensors = data.to_device(batch)
                loss = step(*tensors)
                with span("optimizer"):
                    lr = learning_rate(i, config)
                    grad_norm = update(lr)
            run.after_step(loss, grad_norm, lr)
        run.after_epoch({kind: validate(model, run.validation_batches(), data, config) for kind in run.weights()})


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[Batch], data: WeatherData, config: Config) -> tuple[dict, tuple]:
    """Return the scores over all batches, and the first sample: input, target, forecast (C H W)."""
    model.eval()
    scores, example = data.scores(), None
    for batch in batches:
        inp, (target,), _ = data.to_device(batch)
        with autocast(config, inp.device):
            forecast = model(inp)
        inp = data.tokens.own(inp)
        scores.update(forecast, inp, target, batch.counts.to(inp.device, non_blocking=True))
        example = example or tuple(data.tokens.whole(field[0].clone()) for field in (inp, target, forecast))
    return scores.reduce(), example


def build_model(config: Config, fields: Fields, device: torch.device | None = None) -> ViT:
    """Return the model, on the host; a seed gives the same weights everywhere. Its attention kernel suits `device`."""
    tokens, head_dim = math.prod(config.img_size) // config.patch_size**2, config.embed_dim // config.num_heads
    kernel = pick_attention(config.attention, tokens, head_dim, device, AMP_DTYPE[config.amp_mode], config.dropout)
    torch.manual_seed(config.seed)  # after the kernel was tried
    model = ViT(
        config.img_size, config.patch_size, *fields.sizes[:2],
        config.embed_dim, config.depth, config.num_heads, dropout=config.dropout, drop_path=config.drop_path,
        attention=kernel, activation_checkpoint=config.activation_checkpoint, mlp_chunks=config.mlp_chunks,
        overlap=config.patch_overlap, residual=fields.origins if config.residual else None,
        residual_scale=fields.residual_scale, feedback=fields.feedback, conserve=fields.kept(config.conserve_mean),
        area=torch.tensor(fields.area, dtype=torch.get_default_dtype()),
    )  # fmt: skip
    return use_backend(load_weights(model, config.init_from), config.model_backend, config.fp8, device)


def build_scaler(config: Config, device: torch.device, kind: Callable = torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Return what scales fp16 gradients, and skips steps: with a scale of 1 also those of other modes, if asked."""
    fp16 = config.amp_mode == "fp16"
    return kind(device.type, enabled=fp16 or config.on_nonfinite == "skip", init_scale=2.0**16 if fp16 else 1.0)


def data_parallel(model: ViT, config: Config, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Average gradients over the group (all ranks by default) in each backward pass."""
    if dist.get_world_size(group) == 1 or config.noddp:
        return model
    options = {"bucket_cap_mb": config.bucket_cap_mb, "gradient_as_bucket_view": True}
    if config.disable_broadcast_buffers:  # named only here: newer versions of PyTorch rename this argument
        options["broadcast_buffers"] = False
    return settle_buckets(nn.parallel.DistributedDataParallel(model, process_group=group, **options))


def main(world: World, argv: list[str], observers: Iterable = (), wrap: Callable = data_parallel) -> None:
    with all_ranks_agree():  # everything a user can get wrong is found here, before any training
        config, remarks = load_config(argv)
        config = config.with_batches(world.size)
        device = prepare(config, world.local_rank)
        data = WeatherData(config, device, world.size, world.rank)
        distance = data.distance()
        model = build_model(config, data.fields, device).to(device)
        if config.enable_jit:  # by default block by block: DDP then sends gradients while the backward pass goes on
            compile_modules(model, config.compile_modules, config.compile_mode)
    torch.manual_seed(config.seed + world.rank)  # different dropout masks on every rank
    optimizer, scaler = build_optimizer(model, config), build_scaler(config, device)
    with Run(Job(config, world, device, data), build_model, observers=observers) as run:
        run.begin(TrainingState(model, optimizer, scaler, config.ema_decay, model.stacked()), remarks)  # may resume
        model = wrap(model, config)
        step = partial(forward_backward, model, scaler=scaler, config=config, distance=distance)
        update = partial(update_weights, optimizer, scaler, config)
        train(step, update, model, data, config, run)


if __name__ == "__main__":
    start(main, sys.argv[1:], load_config)
