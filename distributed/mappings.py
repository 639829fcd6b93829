"""Autograd mappings: collectives over one axis of the grid, each with its gradient.

A collective that PyTorch offers computes something and knows nothing of gradients. Each function here pairs one for the
forward with the one that its gradient needs in the backward:

    function              forward                     backward                     in the papers
    copy                  identity                    all-reduce                   f
    reduce                all-reduce                  identity                     f-bar
    scatter               own chunk of dim            all-gather
    gather                all-gather along dim        own chunk
    all_gather            all-gather along dim        reduce-scatter               g
    reduce_scatter        sum, own chunk of dim       all-gather                   g-bar
    all_to_all            chunks of one dim for       the same, dims swapped       Ulysses
                          chunks of another
    halo                  points at the borders       sent back, and added         halo exchange
                          are sent to who needs
    halo_add              points across the borders   points at the borders are    its transpose
                          are sent home, and added    sent to who needs

(The letters are those of Korthikanti et al. 2022, Reducing Activation Recomputation, section 4.2; in Shoeybi et al.
2019, Megatron-LM, section 3, g is our `reduce`. All-to-all: Jacobs et al. 2023, DeepSpeed Ulysses.)

`gather` and `all_gather` differ in what follows them: after `gather` every rank computes the same and so has the whole
gradient; after `all_gather` each computes something else, and the gradients must be summed.

All take tensors that are not contiguous, and any dim that divides by the group's size. In a group of one they do
nothing. They are built of public collectives only, and compile with fullgraph=True.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from utils.spans import communication

Group = dist.ProcessGroup
# PyTorch 2.13 renamed them; the old names warn there.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@communication
def _all_reduce(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # the collective works in place
    dist.all_reduce(x, group=group)
    return x


@communication
def _all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    all_gather_single(out, x, group=group)
    return out.movedim(0, dim)


@communication
def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    reduce_scatter_single(out, x, group=group)
    return out.movedim(0, dim)


def _own_chunk(x: Tensor, dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    assert x.shape[dim] % size == 0, (x.shape, dim, size)
    length = x.shape[dim] // size
    return x.narrow(dim, dist.get_rank(group) * length, length).contiguous()


@communication
def _all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    x = torch.stack(x.chunk(size, split_dim))  # a chunk for each rank
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return torch.cat(out.unbind(0), concat_dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = _all_reduce(x, group)
        return x.view_as(x)  # compiled by PyTorch 2.11, the collective's own output would have a gradient of zero

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _own_chunk(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _own_chunk(grad, ctx.dim, ctx.group), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class BegunGather:
    """An all-gather along `dim` that has begun when this is made, so that the device computes something meanwhile.

    Called once, with the same tensor, it waits and returns what `all_gather` returns, with its gradient. In compiled
    code it begins then.
    """

    def __init__(self, x: Tensor, dim: int, group: Group):
        self.dim, self.group, self.work = dim, group, None
        if dist.get_world_size(group) > 1 and not torch.compiler.is_compiling():
            self._begin(x.detach().movedim(dim, 0).contiguous())

    @communication
    def _begin(self, x: Tensor) -> None:
        self.out = x.new_empty(dist.get_world_size(self.group) * x.shape[0], *x.shape[1:])
        self.work = all_gather_single(self.out, x, group=self.group, async_op=True)

    def __call__(self, x: Tensor) -> Tensor:
        return all_gather(x, self.dim, self.group) if self.work is None else _Arrived.apply(x, self)

    @communication
    def take(self) -> Tensor:
        """Wait for what has begun, and hand it out."""
        self.work.wait()
        out, self.out, self.work = self.out, None, None
        return out.movedim(0, self.dim)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, begun):
        ctx.dim, ctx.group = begun.dim, begun.group
        return begun.take()

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.dim, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, split_dim, concat_dim, group):
        ctx.dims, ctx.group = (concat_dim, split_dim), group
        return _all_to_all(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, *ctx.dims, ctx.group), None, None, None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dim, group):
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(x, weight)  # the shard, where autograd would keep the gathered tensor
        return torch.nn.functional.linear(_all_gather(x, dim, group), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x = _all_gather(x, ctx.dim, ctx.group).flatten(0, -2)
        rows = grad.flatten(0, -2)
        return _reduce_scatter(grad @ weight, ctx.dim, ctx.group), rows.t() @ x, rows.sum(0), None, None


@communication
def _send(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Send the first entries of the last dim to rank 0, the next to rank 1 and so on; return what arrives, likewise."""
    x = x.movedim(-1, 0).contiguous()
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x, received, sent, group=group)
    return out.movedim(0, -1)


def _add_up(parts: Tensor, index: Tensor, counts: list[int], size: int) -> Tensor:
    """Add `parts` to zeros [..., size] at `index`; rank after rank, so that the order of the sum is always the same."""
    out = parts.new_zeros(*parts.shape[:-1], size)
    for part, places, count in zip(parts.split(counts, -1), index.split(counts), counts):
        if count:
            out.index_add_(-1, places, part)
    return out


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, sent, received, group):
        ctx.index, ctx.counts, ctx.size, ctx.group = index, (sent, received), x.shape[-1], group
        return _send(x.index_select(-1, index), sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        back = _send(grad, received, sent, ctx.group)
        return _add_up(back, ctx.index, sent, ctx.size), None, None, None, None


class _HaloAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, border, index, sent, received, size, group):
        ctx.index, ctx.counts, ctx.group = index, (sent, received), group
        return _add_up(_send(border, received, sent, group), index, sent, size)

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        return _send(grad.index_select(-1, ctx.index), sent, received, ctx.group), None, None, None, None, None


def copy(x: Tensor, group: Group) -> Tensor:
    """f. Forward: identity. Backward: all-reduce. For an input that all ranks have and each uses with other weights."""
    return x if dist.get_world_size(group) == 1 else _Copy.apply(x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """f-bar. Forward: all-reduce (sum). Backward: identity. For partial sums that all ranks then use alike."""
    return x if dist.get_world_size(group) == 1 else _Reduce.apply(x, group)


def scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: own chunk of `dim`. Backward: all-gather. For an input that all ranks have and each uses a part of."""
    return x if dist.get_world_size(group) == 1 else _Scatter.apply(x, dim, group)


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: all-gather along `dim`. Backward: own chunk. For a result that all ranks then use alike."""
    return x if dist.get_world_size(group) == 1 else _Gather.apply(x, dim, group)


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """g. Forward: all-gather along `dim`. Backward: reduce-scatter. For shards of which each rank then needs all."""
    return x if dist.get_world_size(group) == 1 else _AllGather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """g-bar. Forward: sum, own chunk of `dim`. Backward: all-gather. For sums of which each rank needs a part."""
    return x if dist.get_world_size(group) == 1 else _ReduceScatter.apply(x, dim, group)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: Group) -> Tensor:
    """Ulysses. Send chunk r of `split_dim` to rank r, join what arrives along `concat_dim`. Backward: the way back."""
    return x if dist.get_world_size(group) == 1 else _AllToAll.apply(x, split_dim, concat_dim, group)


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor, dim: int, group: Group) -> Tensor:
    """`linear(all_gather(x), weight, bias)` that keeps the shard `x` for the backward and gathers once more there.

    Saves (size - 1) / size of the gathered tensor's memory for one all-gather (Korthikanti et al. 2022, section 4.2.2).
    """
    return _GatheredLinear.apply(x, weight, bias, dim, group)


def halo(x: Tensor, index: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Forward: send points of `x` [..., n] to the ranks that need them. Backward: their gradients return, and add up.

    Args:
        index: the points, those for rank 0 first; one may go to several ranks.
        sent, received: how many to, and from, each rank.

    Returns what arrives, [..., sum(received)].
    """
    return _Halo.apply(x, index, sent, received, group)


def halo_add(border: Tensor, index: Tensor, sent: list[int], received: list[int], size: int, group: Group) -> Tensor:
    """Forward: send what lies across the borders home, and add it up. Backward: `halo`'s forward.

    The arguments are those of `halo`; `border` is what it returns, and the result [..., size] what it takes.
    """
    return _HaloAdd.apply(border, index, sent, received, size, group)
