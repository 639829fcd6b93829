"""A stand-in for the package transformer_engine: what of its interface is used here, as its documentation has it.

Products of 8 bits round as those of its recipe Float8CurrentScaling: E4M3 forward, E5M2 backward, each tensor scaled by
its largest value. What the package does not take, this does not take either.
"""

import contextlib
import sys
import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STATE = {"fp8": None}


@dataclass(frozen=True)
class Float8CurrentScaling:
    forward: torch.dtype = torch.float8_e4m3fn
    backward: torch.dtype = torch.float8_e5m2


@contextlib.contextmanager
def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
    before, STATE["fp8"] = STATE["fp8"], recipe if enabled else None
    try:
        yield
    finally:
        STATE["fp8"] = before


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    assert x.shape[0] % 16 == 0 and x.shape[1] % 16 == 0, f"FP8 execution, but got tensor with dims={list(x.shape)}"
    scale = torch.finfo(kind).max / x.abs().max().float().clamp(min=1e-30)
    return ((x.float() * scale).to(kind).float() / scale).to(x.dtype)


class Product(torch.autograd.Function):
    """x W^T + b of x [rows, in]."""

    @staticmethod
    def forward(x, weight, bias, recipe):
        if recipe:
            x, weight = rounded(x, recipe.forward), rounded(weight, recipe.forward)
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, ctx.recipe = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx, g):
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        bias = g.sum(0) if ctx.has_bias else None
        if recipe:
            x, weight, g = rounded(x, recipe.forward), rounded(weight, recipe.forward), rounded(g, recipe.backward)
        return g @ weight, g.T @ x, bias, None


class WithExtraState(nn.Module):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class Linear(WithExtraState):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, tp_group=None, tp_size=1, bias=True,
        return_bias=False, params_dtype=None, parallel_mode=None, device="cuda",
    ):  # fmt: skip
        super().__init__()
        assert parallel_mode is None and tp_size == 1, "not of this stand-in"
        self.sequence_parallel, self.tp_group, self.tp_size, self.return_bias = (
            sequence_parallel,
            tp_group,
            tp_size,
            return_bias,
        )
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))

    def forward(self, inp, is_first_microbatch=None):
        assert not (self.sequence_parallel or self.tp_group), "these are the package's own"
        self.fp8 = STATE["fp8"] is not None  # as the package does at each call
        kind = inp.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        x, weight, bias = (tensor.to(dtype) for tensor in (inp, self.weight, self.bias))
        with torch.autocast(kind, enabled=False):
            out = Product.apply(x.view(-1, x.shape[-1]), weight, None if self.return_bias else bias, STATE["fp8"])
        out = out.view(*inp.shape[:-1], -1)
        return (out, bias) if self.return_bias else out


class LayerNorm(WithExtraState):
    def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None):
        super().__init__()
        if str(device) not in ("meta", "cuda"):
            raise ValueError(f"Only CUDA devices are supported (got {device})")
        self.eps, self.shape = eps, tuple(normalized_shape)
        self.weight, self.bias = (nn.Parameter(torch.empty(self.shape, device="meta", dtype=dtype)) for _ in range(2))

    def forward(self, x):
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def install(modules=sys.modules):
    """Put it in the place of the package, in `modules`."""
    package, pytorch, common, recipe = (types.ModuleType(name) for name in NAMES)
    pytorch.Linear, pytorch.LayerNorm, pytorch.autocast = Linear, LayerNorm, autocast
    recipe.Float8CurrentScaling = Float8CurrentScaling
    package.pytorch, package.common, common.recipe = pytorch, common, recipe
    modules.update(zip(NAMES, (package, pytorch, common, recipe)))


NAMES = [f"transformer_engine{name}" for name in ("", ".pytorch", ".common", ".common.recipe")]
OURS = ["networks.transformer_engine", "distributed.transformer_engine"]  # which import it
