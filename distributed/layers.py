"""Layers with weights sharded over the tensor parallel axis, and attention over tokens sharded over the context axis.

A linear layer takes that of the serial model and keeps this rank's slice of its weights, under the same names; the
others are layers of the serial model themselves, which distributed/parallelize.py gives these classes.

Shapes:  B batch   n tokens of this rank's shard   D embed_dim   h heads of this rank   d head size
         N all tokens of an image   M tokens of this rank's context chunk, padding included (n, or tp n of them)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distributed.mappings import BegunGather, all_gather, all_to_all, copy, gathered_linear, reduce, reduce_scatter
from networks.overlap import OverlapHead, in_compute_dtype
from networks.vit import Attention, PatchEmbed
from utils.comm import Grid

TOKENS = 1  # the dim of the tokens


def keep_fused(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what fused kernels of attention return for the backward pass; what comes before them is computed again."""
    is_fused = operation.namespace == "flash_attn" or operation.__name__.startswith("_scaled_dot_product_")
    return CheckpointPolicy.MUST_SAVE if is_fused else CheckpointPolicy.PREFER_RECOMPUTE


def shard_rows(weight: Tensor, grid: Grid, parts: int = 1) -> nn.Parameter:
    """Return this rank's tp slice of dim 0; a weight stacked of `parts` blocks (q, k, v) is sliced in each."""
    chunk = weight.unflatten(0, (parts, -1)).chunk(grid.get_size("tp"), dim=1)[grid.get_rank("tp")]
    return nn.Parameter(chunk.flatten(0, 1).detach().clone())


def shard_columns(weight: Tensor, grid: Grid) -> nn.Parameter:
    """Return this rank's tp slice of dim 1."""
    return nn.Parameter(weight.chunk(grid.get_size("tp"), dim=1)[grid.get_rank("tp")].detach().clone())


def enter_column(x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Return all tokens, before a layer of which each rank computes some outputs."""
    x = in_compute_dtype(x)
    return all_gather(x, TOKENS, group) if sequence_parallel else copy(x, group)


def leave_row(partial: Tensor, bias: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Return the sum of what all ranks have of each output, or of its shard of the tokens; the bias is added once."""
    y = reduce_scatter(partial, TOKENS, group) if sequence_parallel else reduce(partial, group)
    return y + bias.to(y.dtype)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs (Shoeybi et al. 2019, section 3).

    Its input is the same on all tp ranks, [B, M, D], or with sequence parallelism a shard of the tokens,
    [B, M / tp, D]. Its output is [B, M, out / tp].

    Communication over tp, with s bytes for all M tokens [B, M, D]. Plain: an all-reduce of s in the backward.
    Sequence parallel: an all-gather to s in the forward, a reduce-scatter of s in the backward, and with `regather`
    once more an all-gather to s.

    Args:
        parts: independent blocks of outputs in the serial weight: 3 for a fused q, k, v.
        regather: keep only the shard of the input for the backward.
    """

    sliced = {"weight": 0, "bias": 0}  # the parameters that are, and their dim

    def __init__(self, serial: nn.Linear, grid: Grid, sequence_parallel: bool, regather: bool = False, parts: int = 1):
        super().__init__()
        self.weight = shard_rows(serial.weight, grid, parts)
        self.bias = shard_rows(serial.bias, grid, parts)
        self.group, self.sequence_parallel, self.regather = grid.get_group("tp"), sequence_parallel, regather

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel and self.regather:
            tensors = (in_compute_dtype(tensor) for tensor in (x, self.weight, self.bias))
            return gathered_linear(*tensors, TOKENS, self.group)
        return F.linear(enter_column(x, self.group, self.sequence_parallel), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has some of the inputs, [B, M, in / tp] (Shoeybi et al. 2019, section 3).

    Its output is whole on all tp ranks, [B, M, D], or with sequence parallelism a shard of the tokens, [B, M / tp, D].

    Communication over tp, with s bytes for all M tokens [B, M, D]. Plain: an all-reduce of s in the forward.
    Sequence parallel: a reduce-scatter of s in the forward, an all-gather to s in the backward.
    """

    sliced = {"weight": 1}

    def __init__(self, serial: nn.Linear, grid: Grid, sequence_parallel: bool):
        super().__init__()
        self.weight = shard_columns(serial.weight, grid)
        self.bias = nn.Parameter(serial.bias.detach().clone())
        self.group, self.sequence_parallel = grid.get_group("tp"), sequence_parallel
        self.is_whole = grid.get_size("tp") == 1

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole:  # nothing to sum: one kernel then adds the bias, as in chapter 1
            return F.linear(x, self.weight, self.bias)
        partial = F.linear(x, self.weight)  # a sum over this rank's inputs
        return leave_row(partial, self.bias, self.group, self.sequence_parallel)


class ParallelAttention(Attention):
    """Attention with this rank's heads (tp) for this rank's tokens (cp), of `num_tokens` in an image.

    Each rank has the queries of its own tokens and needs k and v of all. `gather` collects these over cp. `ulysses`
    swaps tokens for heads, so that each rank has all tokens of some heads, and back (Jacobs et al. 2023). Padding
    lies at the end of all tokens and is sliced off k and v: no mask, so that every attention kernel can be used.

    With `regather` the backward pass gathers k and v once more, and nothing gathered is kept for it; nor is anything of
    attention but what a fused kernel returns. Heads are independent of each other, so k and v can come in groups of
    heads. In the forward pass those of a group then come while the group before is computed; with `regather` they come
    in their turn, and one group is whole at a time.

    Communication over cp, with s bytes for this rank's q [B, M, h, d]. Gather: an all-gather to 2 cp s in the forward,
    a reduce-scatter of 2 cp s in the backward, and with `regather` once more an all-gather to 2 cp s. Groups of heads:
    as many times that number of collectives, and the same bytes. Ulysses: all-to-alls of 3 s and s in the forward, of
    s and 3 s in the backward.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # B M h d
        N = self.num_tokens
        if dist.get_world_size(self.cp) == 1:  # nothing to gather, so nothing to copy
            return super().attend(q, k[:, :N], v[:, :N])
        if not self.ulysses:
            return self.attend_in_groups(q, torch.stack((k, v), 2))
        M = q.shape[TOKENS]
        q, k, v = all_to_all(torch.stack((q, k, v), 2), 3, TOKENS, self.cp)[:, :N].unbind(2)  # B N h/cp d
        x = super().attend(q, k, v)
        if padding := M * dist.get_world_size(self.cp) - N:
            x = F.pad(x, (0, 0, 0, 0, 0, padding))  # B cp*M h/cp d
        return all_to_all(x, TOKENS, 2, self.cp)  # B M h d

    def attend_in_groups(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return attention from q [B, M, h, d], k and v of this rank's tokens [B, M, 2, h, d], by groups of heads."""
        q, kv, parts = q.chunk(self.head_groups, 2), kv.chunk(self.head_groups, 3), []
        if self.regather and torch.is_grad_enabled():
            gather, drops = partial(all_gather, dim=TOKENS, group=self.cp), self.training and self.attn_drop > 0
            kept = partial(create_selective_checkpoint_contexts, keep_fused)
            again = partial(checkpoint, use_reentrant=False, preserve_rng_state=drops, context_fn=kept)
            parts = [again(self.attend_gathered, *part, gather) for part in zip(q, kv)]
        else:
            gather = BegunGather(kv[0], TOKENS, self.cp)
            for i, part in enumerate(kv):
                following = BegunGather(kv[i + 1], TOKENS, self.cp) if i + 1 < len(kv) else None
                parts.append(self.attend_gathered(q[i], part, gather))
                gather = following
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def attend_gathered(self, q: Tensor, kv: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        k, v = gather(kv)[:, : self.num_tokens].unbind(2)  # B N h d
        return super().attend(q, k, v)


class ParallelPatchEmbed(PatchEmbed):
    """The embedding of the tokens `own`, where windows overlap: its input are the rows that they need."""

    def patches(self, x: Tensor) -> Tensor:
        return super().patches(x)[:, self.own]


class ParallelOverlapHead(OverlapHead):
    """The head of this rank's tokens, where windows overlap: it writes to the rows that their windows reach.

    `others` are the tokens of other ranks, before and after, that make whole rows of patches of this rank's.
    """

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.pad(super().project(x, weight), (0, 0, *self.others))
