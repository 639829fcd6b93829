"""Attention kernels: one formula, several ways to compute it, and the choice between them.

Shapes:  B batch   h heads   N queries   M keys and values   d head size
"""

import contextlib
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# On a CPU, in 16 bits, plain matrix products are faster up to about this many keys.
MATH_KEYS = 1024


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: str, dropout: float) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, [B, h, N, d], from q [B, h, N, d], k and v [B, h, M, d].

    `math` is the formula as it stands, and writes the table of weights to memory. The others call PyTorch's
    `scaled_dot_product_attention` (SDPA): restricted to one backend, or with `auto` free in its choice.
    `dropout` is the probability that a weight is dropped.
    """
    if kernel == "math":
        weights = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(-1)  # B h N M
        return F.dropout(weights, dropout) @ v
    with contextlib.nullcontext() if kernel == "auto" else sdpa_kernel(BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def pick_attention(
    name: str, tokens: int, head_dim: int, device: torch.device | None, dtype: torch.dtype | None, dropout: float
) -> str:
    """Return the kernel to use where `name` was asked for; `auto` becomes one by these rules, on a device.

    On a CPU, SDPA is slow in 16 bits on few tokens: its backward pass takes five times as long as the formula's at 128.
    On Hopper GPUs cuDNN's kernel is reported to be ahead of flash (PyTorch's own choice), on Ampere behind it.

    Raises ValueError where the device, the dtype (None: the default one), the head size or dropout is not one that the
    kernel takes.
    """
    if device is None:
        return name
    if name != "auto":
        check_attention(name, head_dim, device, dtype, dropout)
        return name
    if device.type == "cpu":
        return "math" if dtype in (torch.bfloat16, torch.float16) and tokens < MATH_KEYS else "auto"
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    return "cudnn" if is_hopper and _runs("cudnn", tokens, head_dim, device, dtype, dropout) else "auto"


def check_attention(
    kernel: str, head_dim: int, device: torch.device, dtype: torch.dtype | None, dropout: float = 0.0
) -> None:
    """Try the kernel on a few tokens; raise ValueError as `pick_attention` does."""
    if not _runs(kernel, 16, head_dim, device, dtype, dropout):
        raise ValueError(
            f"attention {kernel!r} does not run on {device.type} with {dtype or torch.get_default_dtype()}, head size "
            f"{head_dim} and dropout {dropout}: take --attention auto"
        )


def _runs(
    kernel: str, tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype | None, dropout: float
) -> bool:
    q = torch.zeros(1, 1, tokens, head_dim, device=device, dtype=dtype, requires_grad=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each backend that does not fit
            attention(q, q, q, kernel, dropout).sum().backward()
    except RuntimeError:
        return False
    return True
