"""The optimisers: Adam and AdamW, fused or not, and two that keep less: Adafactor, and Adam with moments of 8 bits."""

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from utils.config.settings import Config
from utils.shards import own

BETAS = (0.9, 0.95)
FUSED = ("Adam", "AdamW")  # which PyTorch has in one fused kernel, and such that CUDA graphs can record them


def check_optimizer(config: Config) -> None:
    """Raise ValueError where the optimiser does not know what is asked of it, or is not installed."""
    name = config.optimizer
    if name not in FUSED and (config.enable_fused or config.graph_optimizer):
        asked = "enable_fused" if config.enable_fused else "graph_optimizer"
        raise ValueError(f"{asked} is for optimizer {' and '.join(FUSED)}, not {name}: add --no_{asked}")
    if name == "Adam8bit":
        try:
            _adam_8bit()
        except ImportError:
            raise ValueError(
                "optimizer Adam8bit needs torchao, which is not installed: `pip install -r requirements-torchao.txt`, "
                "or take another"
            ) from None


def check_slices(config: Config, tensor_parallel: int) -> None:
    """Raise ValueError where a slice of a weight is not optimised as its part of the whole weight is."""
    if config.optimizer in FUSED:
        return
    if tensor_parallel > 1:
        raise ValueError(
            f"optimizer {config.optimizer} looks at whole weights, and tensor_parallel {tensor_parallel} slices them: "
            f"take {' or '.join(FUSED)}, or --context_parallel"
        )
    if config.shard != "none":
        raise ValueError(
            f"optimizer {config.optimizer} looks at whole weights, and shard {config.shard} cuts them: "
            f"take {' or '.join(FUSED)}, or --shard none"
        )


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimiser of all parameters.

    Adam (Kingma & Ba 2015) keeps two numbers for each weight; AdamW (Loshchilov & Hutter 2019) also shrinks weights by
    lr x weight_decay. Fused, one kernel changes all parameters. Adafactor (Shazeer & Stern 2018) keeps of a matrix
    [n, m] means of squared gradients over its rows and its columns, n + m numbers, and no first moment; its learning
    rate is relative to the size of the weights. Adam8bit (Dettmers et al. 2022) is Adam whose moments have 8 bits, with
    a scale for each 256 of them; small tensors stay in float32. It is compiled in its first step.
    """
    if config.optimizer == "Adafactor":
        return torch.optim.Adafactor(model.parameters(), config.lr)
    if config.optimizer == "Adam8bit":
        return _adam_8bit()(model.parameters(), torch.tensor(config.lr), BETAS)
    speed = {"fused": config.enable_fused or None, "capturable": config.graph_optimizer}
    if config.optimizer == "AdamW":
        decay = config.weight_decay
        return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=decay, **speed)
    return torch.optim.Adam(model.parameters(), lr=config.lr, betas=BETAS, **speed)


def _adam_8bit() -> type[torch.optim.Optimizer]:
    """Return torchao's Adam. Raises ImportError where it is not installed."""
    # What is compiled is not kept from one process to the next: of no use to who trains.
    warnings.filterwarnings("ignore", ".*does not implement _stable_hash_for_caching")
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it tells of kernels for GPUs that are not here
    try:
        from torchao.optim import Adam8bit
    finally:
        logging.disable(disabled)
    return Adam8bit


def set_lr(group: dict[str, Any], lr: float | Tensor) -> None:
    """Set the learning rate of a group of parameters; a compiled optimiser reads it from a tensor of its own."""
    if isinstance(group["lr"], Tensor) and not isinstance(lr, Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def kept_of(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Tensor]:
    """Return what the optimiser keeps for a parameter, by name: plain tensors, those of which others are made."""
    found = {}
    for name, value in optimizer.state[p].items():
        if isinstance(value, DTensor):
            found[name] = own(value)
        elif is_traceable_wrapper_subclass(value):
            found |= {f"{name}_{part}": getattr(value, part) for part in value.__tensor_flatten__()[0]}
        elif isinstance(value, Tensor):
            found[name] = value
    return found


def init_moments(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser create what it keeps for each parameter, as zeros, where it has not done so yet.

    It does in its first step: one with gradients and a learning rate of 0 changes nothing else.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
    if not parameters:
        return
    grads, rates = [p.grad for p in parameters], [float(group["lr"]) for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        set_lr(group, 0.0)
    optimizer.step()
    for p, grad in zip(parameters, grads):
        p.grad = grad
        for value in map(own, optimizer.state[p].values()):
            value.copy_(torch.zeros(value.shape, dtype=value.dtype, device=value.device))
    for group, lr in zip(optimizer.param_groups, rates):
        set_lr(group, lr)
