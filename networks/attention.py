"""Attention kernels: one formula, several ways to compute it, and the choice between them.

Shapes:  B batch   h heads   N queries   M keys and values   d head size
"""

import contextlib
import importlib.util
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
CUDNN_MENDED = 92600  # 9.26: before it, its gradients may be NaN on Hopper where the last 128 keys are half full


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: str, dropout: float) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, [B, h, N, d], from q [B, h, N, d], k and v [B, h, M, d].

    `math` is the formula as it stands, and writes the table of weights to memory. The others call PyTorch's
    `scaled_dot_product_attention` (SDPA): restricted to one backend, or with `auto` free in its choice; `flash_attn`
    calls the package of that name (Dao 2023, FlashAttention-2), which takes half precision on GPUs.
    `dropout` is the probability that a weight is dropped.
    """
    if kernel == "math":
        weights = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(-1)  # B h N M
        return F.dropout(weights, dropout) @ v
    if kernel == "flash_attn":
        from flash_attn import flash_attn_func

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # B N h d
        return flash_attn_func(q, k, v, dropout_p=dropout).transpose(1, 2)
    with contextlib.nullcontext() if kernel == "auto" else sdpa_kernel(BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def pick_attention(
    name: str, tokens: int, head_dim: int, device: torch.device | None, dtype: torch.dtype | None, dropout: float
) -> str:
    """Return the kernel to use where `name` was asked for; `auto` becomes one by these rules, on a device.

    On a CPU, SDPA is slow in 16 bits on few tokens: its backward pass takes five times as long as the formula's at 128.
    On Hopper GPUs cuDNN's kernel takes 0.6 of flash's time (docs/gpu.md), and PyTorch 2.11 chooses it, too; on Ampere
    it is reported to be behind.

    Raises ValueError where a package is missing, where the device, the dtype (None: the default one), the head size or
    dropout is not one that the kernel takes, and for cuDNN where its gradients may be NaN.
    """
    if device is None:
        return name
    if name == "flash_attn":
        _check_package()
    if name != "auto":
        check_attention(name, head_dim, device, dtype, dropout)
        if name == "cudnn" and has_cudnn_fault(tokens, device):
            raise ValueError(
                f"attention 'cudnn' of {tokens} tokens: cuDNN before 9.26 may give gradients that are NaN on Hopper "
                f"GPUs where tokens % 128 is 64 (pytorch issue 196678): take --attention auto"
            )
        return name
    if device.type == "cpu":
        return "math" if dtype in (torch.bfloat16, torch.float16) and tokens < MATH_KEYS else "auto"
    if not is_hopper(device):
        return "auto"
    # Where cuDNN's must not be taken, its name is not left to PyTorch's own choice either.
    kernels = ("flash", "efficient") if has_cudnn_fault(tokens, device) else ("cudnn",)
    return next((kernel for kernel in kernels if _runs(kernel, tokens, head_dim, device, dtype, dropout)), "auto")


def _check_package() -> None:
    missing = importlib.util.find_spec("flash_attn") is None
    try:
        if not missing:
            import flash_attn  # noqa: F401

            return
        why = "is not installed"
    except (ImportError, OSError, RuntimeError) as error:  # of another version of PyTorch or CUDA
        why = f"cannot be loaded ({(str(error) or type(error).__name__).splitlines()[0]})"
    raise ValueError(
        f"attention 'flash_attn' needs the package flash-attn, which {why}: `pip install flash-attn "
        f"--no-build-isolation`, which takes long, or take --attention flash, which PyTorch has"
    )


def is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def has_cudnn_fault(tokens: int, device: torch.device) -> bool:
    """Return whether cuDNN's kernel may give NaN for so many keys (pytorch issue 196678, cudnn-frontend 628)."""
    return is_hopper(device) and tokens % 128 == 64 and (torch.backends.cudnn.version() or 0) < CUDNN_MENDED


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
