"""A vision transformer that maps the state of the atmosphere to the state one time step later.

Dosovitskiy et al. 2021 (An Image is Worth 16x16 Words), with pre-norm blocks.
It knows nothing of ranks: chapter 2 makes it parallel from outside.

Shapes:  B batch   C channels   H W rows, columns   P patch size
         N patches (tokens), (H/P)(W/P), row-major   D embed_dim   h heads   d = D/h head size
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from networks.attention import attention


class PatchEmbed(nn.Module):
    """Cut the image into patches and map each to a token, by one matrix product."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(in_chans * patch_size**2, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        P = self.patch_size
        x = x.view(B, C, H // P, P, W // P, P).permute(0, 2, 4, 1, 3, 5)  # B H/P W/P C P P
        return self.proj(x.reshape(B, (H // P) * (W // P), C * P * P))  # B N D


def unpatchify(tokens: Tensor, img_size: Sequence[int], patch_size: int) -> Tensor:
    """Put the tokens [B, N, C P P] back in their places: [B, C, H, W]."""
    (H, W), P, B = img_size, patch_size, tokens.shape[0]
    C = tokens.shape[-1] // P**2
    return tokens.view(B, H // P, W // P, C, P, P).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, dim: int, num_heads: int, dropout: float, kernel: str):
        super().__init__()
        self.head_dim, self.kernel = dim // num_heads, kernel
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = dropout
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # The head count comes from the shape, so that a slice of the heads works as well.
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)  # each B N h d
        x = self.attend(q, k, v).flatten(2)  # B N D
        return self.proj_drop(self.proj(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax(q k / sqrt(d)) v for each head, [B, N, h, d]; q may have other tokens than k and v."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # B h N d
        return attention(q, k, v, self.kernel, self.attn_drop if self.training else 0.0).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each token."""

    def __init__(self, dim: int, hidden_dim: int, dropout: float):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class DropPath(nn.Module):
    """Drop a residual branch for whole samples (Huang et al. 2016, stochastic depth), keeping its mean."""

    def __init__(self, p: float):
        super().__init__()
        # A tensor, not a number: torch.compile then has one code for the blocks, whose probabilities differ.
        self.register_buffer("keep", torch.tensor(1 - p), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * ((self.draw(x) < self.keep) / self.keep)

    def draw(self, x: Tensor) -> Tensor:
        """Return a uniform random number for each sample, [B, 1, 1]."""
        return torch.rand(x.shape[0], 1, 1, device=x.device)


def recomputed(function: Callable[[Tensor], Tensor], random: bool) -> Callable[[Tensor], Tensor]:
    """Return the function such that its forward keeps the input only; the backward pass computes the rest once more.

    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. `random` says that the function draws random
    numbers, which must then be the same again.
    """
    if not torch.is_grad_enabled():
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=random)


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, chunks: int) -> Tensor:
    """Apply a function that works on each token alone to `chunks` parts of the tokens [B, N, D], one by one."""
    parts = [function(part) for part in x.chunk(chunks, dim=1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Block(nn.Module):
    """Attention and MLP, each normalised before and added after."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: int, dropout: float, drop_path: float, kernel: str,
        mlp_chunks: int = 1, recompute_mlp: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, dropout, kernel)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, mlp_ratio * dim, dropout)
        self.drop_path1, self.drop_path2 = (DropPath(drop_path) if drop_path else nn.Identity() for _ in range(2))
        self.mlp_chunks, self.recompute_mlp, self.has_dropout = mlp_chunks, recompute_mlp, dropout > 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        mlp = recomputed(self.norm_mlp, self.has_dropout) if self.recompute_mlp else self.norm_mlp
        return x + self.drop_path2(in_chunks(mlp, x, self.mlp_chunks))

    def norm_mlp(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Forecast [B, C_out, H, W] from [B, C_in, H, W], both normalised.

    Args:
        img_size: rows and columns, H and W.
        residual: the input channel that each output channel adds its change to (C_out indices), or None: the
            network then gives the state itself.
        residual_scale: factor of the change, one per output channel.
        drop_path: DropPath probability of the last block; it grows linearly from 0 at the first.
        attention: kernel: auto (SDPA's choice), flash, efficient, cudnn or math.
        activation_checkpoint: what is not kept for the backward pass, but computed there once more: none, block or mlp.
        mlp_chunks: parts of the tokens that pass through the MLPs and the head one after the other; with more than one,
            the backward pass computes each part once more.

    Raises ValueError where the image does not divide into patches, or embed_dim into heads.
    """

    def __init__(
        self, img_size: Sequence[int], patch_size: int, in_chans: int, out_chans: int,
        embed_dim: int, depth: int, num_heads: int, mlp_ratio: int = 4, dropout: float = 0.0, drop_path: float = 0.0,
        attention: str = "auto", activation_checkpoint: str = "none", mlp_chunks: int = 1,
        residual: Sequence[int] | None = None, residual_scale: Sequence[float] | None = None,
    ):  # fmt: skip
        super().__init__()
        H, W = img_size
        if H % patch_size or W % patch_size:
            raise ValueError(
                f"an image of {H} x {W} does not divide into patches of {patch_size}: "
                f"take a patch_size that divides both, or crop with --img_size"
            )
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} does not divide into {num_heads} heads: take a multiple of it")
        self.patch_size = patch_size
        num_patches = (H // patch_size) * (W // patch_size)
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim)
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches, embed_dim))
        self.pos_drop = nn.Dropout(dropout)
        rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
        recompute_mlp = activation_checkpoint == "mlp" or mlp_chunks > 1
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, dropout, rate, attention, mlp_chunks, recompute_mlp)
            for rate in rates
        )
        self.recompute_blocks, self.mlp_chunks = activation_checkpoint == "block", mlp_chunks
        self.blocks_random = dropout > 0 or drop_path > 0
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, out_chans * patch_size**2, bias=False)
        # Buffers live on the device: a Python list as index would be copied there in every step.
        index = None if residual is None else torch.tensor(residual)
        self.register_buffer("residual", index, persistent=False)
        scale = torch.ones(out_chans) if residual_scale is None else torch.tensor(residual_scale)
        scale = scale.to(torch.get_default_dtype()).view(1, -1, 1, 1)
        self.register_buffer("residual_scale", scale, persistent=False)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.pos_drop(self.patch_embed(x) + self.pos_embed)  # B N D
        return self.decode(self.run_blocks(tokens), x)

    def run_blocks(self, tokens: Tensor) -> Tensor:
        """Pass the tokens [B, N, D] through all blocks."""
        for block in self.blocks:
            run = recomputed(block, self.blocks_random) if self.recompute_blocks else block
            tokens = run(tokens)
        return tokens

    def decode(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the forecast [B, C_out, H, W] from the last block's tokens and the input."""
        head = recomputed(self.norm_head, random=False) if self.mlp_chunks > 1 else self.norm_head
        y = in_chunks(head, tokens, self.mlp_chunks)
        y = unpatchify(y, x.shape[-2:], self.patch_size)
        if self.residual is None:
            return y
        return x.index_select(1, self.residual) + self.residual_scale * y

    def norm_head(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(tokens))

    def stacked(self) -> dict[str, int]:
        """Return the parameters that hold several matrices, one below the other (q, k and v), with their number."""
        names = (name for name, module in self.named_modules() if isinstance(module, Attention))
        return {f"{name}.qkv.{kind}": 3 for name in names for kind in ("weight", "bias")}

    def flops(self) -> int:
        """Floating point operations of one forward pass on one sample: its matrix products, two a multiply-add."""
        _, N, D = self.pos_embed.shape
        patch = self.patch_embed.proj.in_features + self.head.out_features
        return 2 * N * patch * D + len(self.blocks) * (24 * N * D**2 + 4 * N**2 * D)
