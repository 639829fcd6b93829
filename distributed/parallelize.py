"""A ViT -> the same ViT over a grid of ranks, in place: linear layers and attention are replaced, all else stays.

The weights are drawn whole and then sliced, so every grid begins with the same model; parameters keep their names.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from distributed.layers import ColumnParallelLinear, ParallelAttention, RowParallelLinear, SharedDropPath
from networks.vit import DropPath, ViT
from utils.comm import Grid, places
from utils.config.settings import Config
from utils.data.frame_sharing import FrameSharing
from utils.data.token_shard import TokenShard


def check_parallel(config: Config, grid: Grid) -> None:
    """Raise ValueError where the model cannot be shared out over the grid, with what can be changed."""
    tp, cp, heads = grid.get_size("tp"), grid.get_size("cp"), config.num_heads
    if heads % tp:
        raise ValueError(f"num_heads {heads} does not divide over tensor_parallel {tp}: take {_divisors(heads)}")
    if config.cp_attention == "ulysses" and heads // tp % cp:
        raise ValueError(
            f"cp_attention ulysses shares out the {heads // tp} head(s) of each rank over context_parallel {cp}: "
            f"take context_parallel {_divisors(heads // tp)}, or --cp_attention gather"
        )
    if config.sp_regather and not is_sequence_parallel(config, grid):
        raise ValueError(
            f"sp_regather needs sequence parallelism, and tensor_parallel is {tp}: take 2 or more, without "
            f"--no_sequence_parallel, or leave --sp_regather out"
        )
    if config.noddp and cp > 1:
        raise ValueError(
            f"noddp with context_parallel {cp}: gradients are sums over the context ranks, and DDP adds them up; "
            f"leave --noddp out"
        )
    if config.dropout and tp > 1 and not config.sequence_parallel:
        raise ValueError(
            f"dropout {config.dropout} with tensor_parallel {tp} needs --sequence_parallel: without it the tensor "
            f"parallel ranks hold the same activations and would drop different ones"
        )


def _divisors(n: int) -> str:
    divisors = [str(d) for d in range(1, n + 1) if n % d == 0]
    return " or ".join(filter(None, (", ".join(divisors[:-1]), divisors[-1])))


def is_sequence_parallel(config: Config, grid: Grid) -> bool:
    """Whether the tokens between the matrices are sharded over tp, too."""
    return config.sequence_parallel and grid.get_size("tp") > 1


def shard_tokens(config: Config, grid: Grid, rank: int | None = None) -> TokenShard:
    """Return a rank's tokens, by default this one's: cut over cp, and with sequence parallelism each of these chunks
    once more over tp."""
    axes = "tp-cp" if is_sequence_parallel(config, grid) else "cp"
    place = places(grid.rank if rank is None else rank, grid.sizes, grid.order)
    index = place["cp"] * grid.get_size("tp") + place["tp"] if axes == "tp-cp" else place["cp"]
    return TokenShard(config.img_size, config.patch_size, grid.get_size(axes), index, grid.get_group(axes))


def share_frames(config: Config, grid: Grid) -> FrameSharing | None:
    """Return how the ranks that work on the same samples share frames; None for a rank that has them for itself."""
    ranks = grid.get_ranks("tp-cp")
    if len(ranks) == 1:
        return None
    shards = [shard_tokens(config, grid, rank) for rank in ranks]
    return FrameSharing(shards, grid.get_rank("tp-cp"), grid.get_group("tp-cp"))


def parallelize(model: ViT, config: Config, grid: Grid, shard: TokenShard, device: torch.device) -> "ParallelViT":
    """Make the model parallel, in place, and return it: it holds this rank's part, and will draw on `device`.

    Residual stream, norms, embedding and head stay as they are, and work on this rank's tokens only. A module that
    computes otherwise gets another class, as PyTorch's `fully_shard` does it: all that it has it keeps.
    """
    sp, regather = is_sequence_parallel(config, grid), config.sp_regather
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        attn.qkv = ColumnParallelLinear(attn.qkv, grid, sp, regather, parts=3)
        attn.proj = RowParallelLinear(attn.proj, grid, sp)
        mlp.fc1 = ColumnParallelLinear(mlp.fc1, grid, sp, regather)
        mlp.fc2 = RowParallelLinear(mlp.fc2, grid, sp)
        attn.__class__ = ParallelAttention
        attn.num_tokens, attn.cp, attn.ulysses = shard.total, grid.get_group("cp"), config.cp_attention == "ulysses"
    model.paths = [module for module in model.modules() if isinstance(module, DropPath)]
    for path in model.paths:
        path.__class__ = SharedDropPath
    model.__class__ = ParallelViT
    model.shard, model.dp, model.dp_rank = shard, grid.get_size("dp"), grid.get_rank("dp")
    model.blocks_random = config.dropout > 0  # DropPath's numbers come from outside the blocks
    model.generator = torch.Generator(device).manual_seed(config.seed)
    model.register_forward_pre_hook(lambda model, args: model.draw_paths(args[0]))  # outside of what is compiled
    return model


class ParallelViT(ViT):
    """The ViT on one rank, as `parallelize` makes it: it maps this rank's shard of the tokens, [B, C, *shard.shape].

    DropPath drops whole samples: in each pass a rank draws numbers for the samples of all dp ranks, and uses its own.
    (With accumulation, which samples pass together depends on dp, and so do the draws.)
    """

    def forward(self, x: Tensor) -> Tensor:  # B C P n*P
        own = slice(self.shard.first, self.shard.first + self.shard.count)
        tokens = self.pos_drop(self.patch_embed(x) + self.pos_embed[:, own])
        if padding := self.shard.length - self.shard.count:
            tokens = F.pad(tokens, (0, 0, 0, padding))  # B n D, n equal on all ranks
        return self.decode(self.run_blocks(tokens)[:, : self.shard.count], x)

    def draw_paths(self, x: Tensor) -> None:
        """Draw a number for each sample and DropPath, in the order in which the serial model draws them."""
        if not self.training:
            return
        B = x.shape[0]
        for path in self.paths:
            draws = torch.rand(self.dp * B, 1, 1, generator=self.generator, device=x.device)
            path.draws = draws[self.dp_rank * B : (self.dp_rank + 1) * B]
