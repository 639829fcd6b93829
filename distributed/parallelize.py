"""A ViT -> the same ViT over a grid of ranks, in place: linear layers, attention and, where windows overlap, embedding
and head are replaced; all else stays.

The weights are drawn whole and then sliced, so every grid begins with the same model; parameters keep their names.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.borders import Borders, borders_of
from distributed.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelOverlapHead,
    ParallelPatchEmbed,
    RowParallelLinear,
)
from distributed.mappings import copy, reduce
from networks.overlap import mirror_at_poles, repeat_at_poles
from networks.vit import ViT
from utils.comm import Grid, places
from utils.config.settings import Config
from utils.data.frame_sharing import FrameSharing
from utils.data.token_shard import TokenShard
from utils.optimizers import check_slices


def check_parallel(config: Config, grid: Grid) -> None:
    """Raise ValueError where the model cannot be shared out over the grid, with what can be changed."""
    tp, cp, heads = grid.get_size("tp"), grid.get_size("cp"), config.num_heads
    if heads % tp:
        raise ValueError(f"num_heads {heads} does not divide over tensor_parallel {tp}: take {_divisors(heads)}")
    check_context(config, heads // tp, cp)
    check_slices(config, tp)
    if config.noddp and config.shard != "none":
        raise ValueError(f"noddp with shard {config.shard}: ranks own parts of the gradients; leave --noddp out")
    if config.sp_regather and not is_sequence_parallel(config, grid):
        raise ValueError(
            f"sp_regather needs sequence parallelism, and tensor_parallel is {tp}: take 2 or more, without "
            f"--no_sequence_parallel, or leave --sp_regather out"
        )
    if config.sp_regather and config.model_backend != "pytorch":
        raise ValueError(
            f"sp_regather with model_backend {config.model_backend}: its layers keep all tokens for the backward pass; "
            f"leave --sp_regather out"
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


def check_context(config: Config, heads: int, cp: int) -> None:
    """Raise ValueError where attention over `cp` ranks, each with so many heads, cannot be as it was asked for."""
    if config.cp_attention == "ulysses" and heads % cp:
        raise ValueError(
            f"cp_attention ulysses shares out the {heads} head(s) of each rank over context_parallel {cp}: "
            f"take context_parallel {_divisors(heads)}, or --cp_attention gather"
        )
    asked = [f"cp_head_groups {config.cp_head_groups}"] * (config.cp_head_groups > 1)
    asked += ["cp_regather"] * config.cp_regather
    if asked and (cp == 1 or config.cp_attention == "ulysses"):
        raise ValueError(
            f"{asked[0]} with context_parallel {cp} and cp_attention {config.cp_attention}: no keys and values are "
            f"gathered; take --context_parallel 2 or more and --cp_attention gather, or leave it out"
        )
    if config.cp_regather and config.activation_checkpoint in ("block", "step"):
        raise ValueError(
            f"cp_regather with activation_checkpoint {config.activation_checkpoint}: what is computed again gathers "
            f"again; leave --cp_regather out, or take --activation_checkpoint mlp or none"
        )
    if heads % config.cp_head_groups:
        raise ValueError(
            f"cp_head_groups {config.cp_head_groups} does not divide the {heads} head(s) of each rank: "
            f"take {_divisors(heads)}"
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
    size, group = grid.get_size(axes), grid.get_group(axes)
    return TokenShard(config.img_size, config.patch_size, size, index, group, config.patch_overlap)


def find_borders(config: Config, grid: Grid, shard: TokenShard, device: torch.device) -> Borders:
    """Return the borders of this rank's tokens, whose windows reach as far as `shard` says."""
    axes = "tp-cp" if is_sequence_parallel(config, grid) else "cp"
    chunks = [shard_tokens(config, grid, rank).index for rank in grid.get_ranks(axes)]
    return borders_of(shard, chunks).to(device)


def share_frames(config: Config, grid: Grid) -> FrameSharing | None:
    """Return how the ranks that work on the same samples share frames; None for a rank that has them for itself."""
    ranks = grid.get_ranks("tp-cp")
    if len(ranks) == 1:
        return None
    shards = [shard_tokens(config, grid, rank) for rank in ranks]
    return FrameSharing(shards, grid.get_rank("tp-cp"), grid.get_group("tp-cp"))


def layers_like(linear: nn.Module) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the column and the row parallel layer whose products are those of a layer: PyTorch's or another's."""
    if isinstance(linear, nn.Linear):
        return ColumnParallelLinear, RowParallelLinear
    from distributed import transformer_engine

    return transformer_engine.ColumnParallelLinear, transformer_engine.RowParallelLinear


def parallelize(model: ViT, config: Config, grid: Grid, shard: TokenShard, device: torch.device) -> "ParallelViT":
    """Make the model parallel, in place, and return it: it holds this rank's part, and will draw on `device`.

    Residual stream and norms, and without an overlap embedding and head, stay as they are, and work on this rank's
    tokens. What computes otherwise gets another class, as PyTorch's `fully_shard` does it: all that it has it keeps.
    """
    sp, regather = is_sequence_parallel(config, grid), config.sp_regather
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        column, row = layers_like(attn.qkv)
        attn.qkv = column(attn.qkv, grid, sp, regather, parts=3)
        attn.proj = row(attn.proj, grid, sp)
        mlp.fc1 = column(mlp.fc1, grid, sp, regather)
        mlp.fc2 = row(mlp.fc2, grid, sp)
        attn.__class__ = ParallelAttention
        attn.num_tokens, attn.cp, attn.ulysses = shard.total, grid.get_group("cp"), config.cp_attention == "ulysses"
        attn.regather, attn.head_groups = config.cp_regather, config.cp_head_groups
    model.__class__ = ParallelViT
    model.shard, model.shape, model.dp, model.dp_rank = shard, shard.shape, grid.get_size("dp"), grid.get_rank("dp")
    model.generator = torch.Generator(device).manual_seed(config.seed)
    # What differs between ranks is no buffer: DistributedDataParallel would copy that of one rank to all.
    if model.kept is not None:
        area = shard.cut(model.area[shard.rows.start : shard.rows.stop]).to(device)
        del model.area
        model.area = area
    if shard.overlap and shard.shards > 1:
        begin = shard.first % shard.columns if shard.count else 0
        tokens = max(len(shard.rows) // shard.patch_size, 1) * shard.columns  # of whole rows of patches
        model.patch_embed.__class__, model.head.__class__ = ParallelPatchEmbed, ParallelOverlapHead
        model.patch_embed.own = slice(begin, begin + shard.count)
        model.head.others = begin, tokens - begin - shard.count
        model.borders = find_borders(config, grid, shard, device)
    return model


class ParallelViT(ViT):
    """The ViT on one rank, as `parallelize` makes it: it maps this rank's shard of the tokens, [B, C, *shard.shape].

    Where windows overlap, its input are the rows that they need, [B, C, *shard.input_shape]. Those of a first step
    are read; in a forecast of several steps the ranks send each other what they forecast at their borders. What
    windows write across a border is sent, and added. Communication over the shard's group, with b points across the
    borders: an all-to-all of C_out b in the forward and in the backward of each step, two of each after the first.

    DropPath drops whole samples: in each pass a rank draws numbers for the samples of all dp ranks, and uses its own.
    (With accumulation, which samples pass together depends on dp, and so do the draws.)
    """

    def step(self, x: Tensor) -> Tensor:  # B C P n*P, with an overlap B C h W
        shard = self.shard
        own = slice(shard.first, shard.first + shard.count)
        tokens = self.pos_drop(self.patch_embed(self.with_margins(x)) + self.pos_embed[:, own])
        if padding := shard.length - shard.count:
            tokens = F.pad(tokens, (0, 0, 0, padding))  # B n D, n equal on all ranks
        return self.decode(self.run_blocks(tokens)[:, : shard.count], shard.own(x))

    @property
    def has_borders(self) -> bool:
        return self.overlap > 0 and self.shard.shards > 1

    @property
    def poles(self) -> tuple[bool, bool]:
        """Whether this rank's rows reach the north pole, and the south pole."""
        rows = self.shard.input_rows
        return rows.start == 0 and self.shard.count > 0, rows.stop == self.shard.img_size[0]

    def with_margins(self, x: Tensor) -> Tensor:
        if not self.has_borders:
            return super().with_margins(x)
        if not self.shard.count:  # all padding: a row of patches, of which nothing is used
            return F.pad(x, (0, 0, 0, self.patch_size + 2 * self.overlap))
        return repeat_at_poles(x, self.overlap, *self.poles)

    def next_input(self, forecast: Tensor, forced: Tensor) -> Tensor:
        if self.has_borders:
            forecast = self.borders.rows_of(forecast)
        return super().next_input(forecast, forced)

    def without_margins(self, image: Tensor) -> Tensor:
        if not self.has_borders:
            return super().without_margins(image)
        shard, P = self.shard, self.patch_size
        rows = mirror_at_poles(image, self.overlap, *self.poles)
        own = shard.own(rows) if shard.count else rows[:, :, :P, :0]
        return own + self.borders.send_home(rows)

    def total(self, sums: Tensor) -> Tensor:
        """Add up over the ranks of an image: each uses the sum for its tokens, and has a part of its gradient."""
        return copy(reduce(sums, self.shard.group), self.shard.group)

    def draw_paths(self, x: Tensor) -> None:
        """Draw a number for each sample and DropPath, in the order in which the serial model draws them."""
        B = x.shape[0]
        for path in self.paths if self.training else ():
            draws = torch.rand(self.dp * B, 1, 1, generator=self.generator, device=x.device)
            path.draws = draws[self.dp_rank * B : (self.dp_rank + 1) * B]
