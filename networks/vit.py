"""A vision transformer that maps the state of the atmosphere to the state one time step later.

Dosovitskiy et al. 2021 (An Image is Worth 16x16 Words), with pre-norm blocks.
It knows nothing of ranks: chapter 2 makes it parallel from outside.

Shapes:  B batch   C channels   H W rows, columns   P patch size
         N patches (tokens), (H/P)(W/P), row-major   D embed_dim   h heads   d = D/h head size
         o overlap of the windows that tokens read and write (networks/overlap.py), S = P + 2 o their side
         K steps of a forecast
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from networks.attention import attention
from networks.overlap import OverlapHead, mirror_at_poles, repeat_at_poles, windows, windows_linear


class PatchEmbed(nn.Module):
    """Cut the image into patches, or windows, and map each to a token, by one matrix product."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, overlap: int = 0):
        super().__init__()
        self.patch_size, self.overlap = patch_size, overlap
        self.proj = nn.Linear(in_chans * (patch_size + 2 * overlap) ** 2, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.overlap:
            return windows_linear(x, self.proj, self.patches)
        return self.proj(self.patches(x))  # B N D

    def patches(self, x: Tensor) -> Tensor:
        """Return what each token reads, [B, N, C S S], of an image, or with an overlap of one with margins."""
        B, C, H, W = x.shape
        P = self.patch_size
        if self.overlap:
            return windows(x, P, self.overlap)
        x = x.view(B, C, H // P, P, W // P, P).permute(0, 2, 4, 1, 3, 5)  # B H/P W/P C P P
        return x.reshape(B, (H // P) * (W // P), C * P * P)


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
        self.draws: Tensor | None = None  # a uniform random number for each sample, [B, 1, 1]; else drawn here

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        draws = torch.rand(x.shape[0], 1, 1, device=x.device) if self.draws is None else self.draws
        return x * ((draws < self.keep) / self.keep)


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
        overlap: grid points that the window of each token reaches beyond its patch, P/2 at most.
        residual: the input channel that each output channel adds its change to (C_out indices), or None: the
            network then gives the state itself.
        residual_scale: factor of the change, one per output channel.
        feedback: of a forecast of several steps, where each input channel of the next step comes from: its place
            among the C_out forecast channels and, after these, the C_f forced ones (C_in indices). None where the
            input is the forecast as it is.
        conserve: pairs of an output and an input channel. The forecast keeps the mean of these, weighted by `area`.
        area: of each grid point, [H, W], adding up to 1.
        drop_path: DropPath probability of the last block; it grows linearly from 0 at the first.
        attention: kernel: auto (SDPA's choice), flash, efficient, cudnn or math.
        activation_checkpoint: what is not kept for the backward pass, but computed there once more: none, step (of a
            forecast), block or mlp.
        mlp_chunks: parts of the tokens that pass through the MLPs and the head one after the other; with more than one,
            the backward pass computes each part once more. (A head whose windows overlap has parts of its own.)

    Raises ValueError where the image does not divide into patches, or embed_dim into heads, and where the overlap is
    larger than half a patch.
    """

    def __init__(
        self, img_size: Sequence[int], patch_size: int, in_chans: int, out_chans: int,
        embed_dim: int, depth: int, num_heads: int, mlp_ratio: int = 4, dropout: float = 0.0, drop_path: float = 0.0,
        attention: str = "auto", activation_checkpoint: str = "none", mlp_chunks: int = 1, overlap: int = 0,
        residual: Sequence[int] | None = None, residual_scale: Sequence[float] | None = None,
        feedback: Sequence[int] | None = None, conserve: Sequence[tuple[int, int]] = (), area: Tensor | None = None,
    ):  # fmt: skip
        super().__init__()
        _check_sizes(img_size, patch_size, overlap, embed_dim, num_heads)
        self.patch_size, self.overlap, self.shape = patch_size, overlap, tuple(img_size)
        columns = img_size[1] // patch_size
        num_patches = (img_size[0] // patch_size) * columns
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, overlap)
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches, embed_dim))
        self.pos_drop = nn.Dropout(dropout)
        rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
        recompute_mlp = activation_checkpoint == "mlp" or mlp_chunks > 1
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, dropout, rate, attention, mlp_chunks, recompute_mlp)
            for rate in rates
        )
        self.paths = [module for module in self.modules() if isinstance(module, DropPath)]
        self.recompute, self.mlp_chunks, self.has_dropout = activation_checkpoint, mlp_chunks, dropout > 0
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = (
            OverlapHead(embed_dim, out_chans, columns, patch_size, overlap)
            if overlap
            else nn.Linear(embed_dim, out_chans * patch_size**2, bias=False)
        )
        # Buffers live on the device: a Python list as index would be copied there in every step.
        scale = torch.ones(out_chans) if residual_scale is None else torch.tensor(residual_scale)
        constants = {
            "residual": None if residual is None else torch.tensor(residual),
            "residual_scale": scale.to(torch.get_default_dtype()).view(1, -1, 1, 1),
            "feedback": None if feedback is None else torch.tensor(feedback),
            "kept": torch.tensor(conserve).T.clone() if conserve else None,
            "area": area if conserve else None,
        }
        for name, constant in constants.items():
            self.register_buffer(name, constant, persistent=False)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.apply(self._init_weights)
        if self.paths:
            self.register_forward_pre_hook(lambda model, args: model.draw_paths(args[0]))  # not compiled with the rest

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, forced: Tensor | None = None) -> Tensor:
        """Forecast one step, or with `forced` several, each from the one before: [K, B, C_out, H, W].

        Args:
            forced: the inputs that are not forecast, at the times of the forecasts but the last: [K-1, B, C_f, H, W].
                There may be none (C_f = 0), but the shape tells K.
        """
        step = recomputed(self.step, self.has_dropout) if self.recompute == "step" else self.step
        if forced is None:
            return step(x)
        forecasts = [step(x)]
        for later in forced:
            forecasts.append(step(self.next_input(forecasts[-1].to(x.dtype), later)))
        return torch.stack(forecasts) if len(forecasts) > 1 else forecasts[0][None]

    def step(self, x: Tensor) -> Tensor:
        """Forecast one step."""
        tokens = self.pos_drop(self.patch_embed(self.with_margins(x)) + self.pos_embed)  # B N D
        return self.decode(self.run_blocks(tokens), x)

    def next_input(self, forecast: Tensor, forced: Tensor) -> Tensor:
        """Return the input of the next step, [B, C_in, H, W]: what was forecast, and what is known without."""
        if self.feedback is None:
            return forecast
        return torch.cat([forecast, forced], dim=1).index_select(1, self.feedback)

    def with_margins(self, x: Tensor) -> Tensor:
        """Return the input with what windows reach beyond the image, [B, C_in, H + 2 o, W]."""
        return repeat_at_poles(x, self.overlap) if self.overlap else x

    def draw_paths(self, x: Tensor) -> None:
        """Draw a number for each sample and DropPath: all steps of a forecast drop the same branches."""
        for path in self.paths if self.training else ():
            path.draws = torch.rand(x.shape[0], 1, 1, device=x.device)

    def run_blocks(self, tokens: Tensor) -> Tensor:
        """Pass the tokens [B, N, D] through all blocks."""
        for block in self.blocks:
            run = recomputed(block, self.has_dropout) if self.recompute == "block" else block
            tokens = run(tokens)
        return tokens

    def decode(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the forecast [B, C_out, H, W] from the last block's tokens and the input."""
        y = self.to_image(tokens)
        if self.residual is not None:
            y = x.index_select(1, self.residual) + self.residual_scale * y
        return y if self.kept is None else self.keep_means(y, x)

    def to_image(self, tokens: Tensor) -> Tensor:
        """Return what the head makes of the tokens, in its place: [B, C_out, H, W]."""
        if self.overlap:
            return self.without_margins(self.norm_head(tokens))
        head = recomputed(self.norm_head, random=False) if self.mlp_chunks > 1 else self.norm_head
        return unpatchify(in_chunks(head, tokens, self.mlp_chunks), self.shape, self.patch_size)

    def norm_head(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(tokens))

    def without_margins(self, image: Tensor) -> Tensor:
        """Return what windows wrote, [B, C_out, H + 2 o, W], as the image: nothing is lost beyond it."""
        return mirror_at_poles(image, self.overlap)

    def keep_means(self, forecast: Tensor, x: Tensor) -> Tensor:
        """Shift the channels of `conserve` such that their means are those of the input."""
        outputs, inputs = self.kept
        change = (x.index_select(1, inputs) - forecast.index_select(1, outputs)) * self.area
        shift = self.total(change.sum(dim=(-2, -1)))  # B, channels to keep
        shifts = shift.new_zeros(forecast.shape[:2]).index_copy(1, outputs, shift)
        return forecast + shifts[:, :, None, None]

    def total(self, sums: Tensor) -> Tensor:
        """Return sums over the whole image, of those over the part that is here."""
        return sums

    def stacked(self) -> dict[str, int]:
        """Return the parameters that hold several matrices, one below the other (q, k and v), with their number."""
        names = (name for name, module in self.named_modules() if isinstance(module, Attention))
        return {f"{name}.qkv.{kind}": 3 for name in names for kind in ("weight", "bias")}

    def flops(self) -> int:
        """Floating point operations of one forward pass on one sample: its matrix products, two a multiply-add."""
        _, N, D = self.pos_embed.shape
        patch = self.patch_embed.proj.in_features + self.head.out_features
        return 2 * N * patch * D + len(self.blocks) * (24 * N * D**2 + 4 * N**2 * D)


def _check_sizes(img_size: Sequence[int], patch_size: int, overlap: int, embed_dim: int, num_heads: int) -> None:
    H, W = img_size
    if H % patch_size or W % patch_size:
        raise ValueError(
            f"an image of {H} x {W} does not divide into patches of {patch_size}: "
            f"take a patch_size that divides both, or crop with --img_size"
        )
    if not 0 <= 2 * overlap <= patch_size:
        raise ValueError(
            f"patch_overlap is {overlap}: it takes 0 to {patch_size // 2}, half of patch_size {patch_size}"
        )
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim {embed_dim} does not divide into {num_heads} heads: take a multiple of it")
