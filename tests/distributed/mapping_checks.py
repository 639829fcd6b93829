# ruff: noqa: B023 - each function is called before its loop goes on
"""On two ranks: each mapping's forward and backward against its definition, and gradcheck of the whole system.

A mapping's backward is right if the gradients of all ranks together are those of the sum of all ranks' results. So each
is checked by finite differences of that sum, over inputs of both ranks.
"""

import os

import torch
import torch.distributed as dist

from distributed import mappings
from utils.ranks.start import join
from utils.ranks.world import find_world

EPS = 1e-6


def on_two_ranks(*checks):
    """Join, and call each check with this rank, the inputs of both, what each does with its result, and the group."""
    world = find_world(os.environ)
    join(world)
    torch.set_default_dtype(torch.float64)
    for check in checks:
        generator = torch.Generator().manual_seed(0)
        inputs, weights = (torch.randn(2, *size, generator=generator) for size in ((6, 4, 8), (8000,)))
        check(world.rank, inputs, weights, dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()


def check_slopes(rank, inputs, weights, group):
    def loss(f, x, alike):
        """The sum over all ranks of a rank's own use of its result; where all use it alike, that use once."""
        y = f(x).transpose(0, 1).flatten()  # so that gradients are not contiguous either
        return (y.cos() * weights[0 if alike else rank, : y.numel()]).sum()

    def check(name, f, alike=False, shared=False, layout=lambda x: x):
        """`alike`: all ranks do the same with the result. `shared`: all ranks give the same input."""
        x = inputs[0 if shared else rank].clone().requires_grad_()
        loss(f, layout(x), alike).backward()
        place = torch.randint(x.numel(), (12,), generator=torch.Generator().manual_seed(1)).tolist()
        for owner in (0,) if shared else (0, 1):
            for i in place:
                change = torch.zeros_like(x).view(-1)
                if shared or rank == owner:
                    change[i] = EPS
                with torch.no_grad():
                    pair = [loss(f, layout(x + s * change.view_as(x)), alike) for s in (1, -1)]
                slope = (pair[0] - pair[1]) / (2 * EPS)
                if not alike:
                    dist.all_reduce(slope)
                if shared or rank == owner:
                    found = x.grad.view(-1)[i]
                    assert abs(found - slope) < 1e-7, (name, layout, i, found.item(), slope.item())

    places, (sent, received) = exchanged(rank)
    layouts = [lambda x: x, lambda x: x.transpose(0, 2), lambda x: x[:, ::2], lambda x: x.flip(0).movedim(2, 0)]
    for layout in layouts:
        check("halo", lambda x: mappings.halo(x, places, sent, received, group), layout=layout)
        add = lambda x: mappings.halo_add(x[..., : sum(received)], places, sent, received, 6, group)  # noqa: E731
        check("halo_add", add, layout=layout)
        check("copy", lambda x: mappings.copy(x, group), shared=True, layout=layout)
        check("reduce", lambda x: mappings.reduce(x, group), alike=True, layout=layout)
        for dim in (0, 1, 2, -1):
            check("scatter", lambda x: mappings.scatter(x, dim, group), shared=True, layout=layout)
            check("gather", lambda x: mappings.gather(x, dim, group), alike=True, layout=layout)
            check("all_gather", lambda x: mappings.all_gather(x, dim, group), layout=layout)
            check("reduce_scatter", lambda x: mappings.reduce_scatter(x, dim, group), layout=layout)
            for other in (0, 1, 2, -1):
                check("all_to_all", lambda x: mappings.all_to_all(x, dim, other, group), layout=layout)


def exchanged(rank):
    """Places that a rank sends, and their numbers to and from each rank: a place goes to both, one has less to send."""
    places = torch.tensor([[2, 1, 2], [3, 0]][rank])
    return places, ([[1, 2], [1, 1]][rank], [[1, 1], [2, 1]][rank])


def check_gradients(rank, inputs, weights, group):
    """Functions of which every rank computes the same from the same input: torch's own gradcheck can be run on them."""
    mine = weights[rank, :64].view(4, 4, 4)
    start = weights[0, 64:128].clone().view(4, 4, 4).requires_grad_()
    for function in (
        lambda x: mappings.reduce(mappings.copy(x, group).sin() * mine, group),
        lambda x: mappings.gather(mappings.scatter(x, 1, group).sin(), 1, group),
        lambda x: mappings.reduce(mappings.all_gather(mappings.scatter(x, 0, group), 0, group).sin() * mine, group),
        lambda x: mappings.gather(mappings.reduce_scatter(mappings.copy(x, group).sin() * mine, 2, group), 2, group),
        lambda x: mappings.gather(mappings.all_to_all(mappings.scatter(x, 0, group), 1, 0, group).sin(), 1, group),
    ):
        assert torch.autograd.gradcheck(function, (start,))


def check_forwards(rank, inputs, weights, group):
    """Forwards, by their definitions."""
    x, both = inputs[rank], [inputs[0], inputs[1]]
    assert torch.equal(mappings.all_gather(x, 1, group), torch.cat(both, 1))
    assert torch.equal(mappings.gather(x, 2, group), torch.cat(both, 2))
    assert torch.equal(mappings.reduce(x, group), sum(both)) and torch.equal(x, inputs[rank])
    assert torch.equal(mappings.reduce_scatter(x, 2, group), sum(both).chunk(2, 2)[rank])
    assert torch.equal(mappings.scatter(both[0], 0, group), both[0].chunk(2, 0)[rank])
    assert torch.equal(mappings.all_to_all(x, 2, 0, group), torch.cat([b.chunk(2, 2)[rank] for b in both], 0))


def check_halo(rank, inputs, weights, group):
    """Forwards of both, by their definitions, and that the one is the other's transpose."""
    places, (sent, received) = exchanged(rank)
    theirs = [exchanged(other)[0].split(exchanged(other)[1][0])[rank] for other in (0, 1)]
    border = mappings.halo(inputs[rank], places, sent, received, group)
    assert torch.equal(border, torch.cat([inputs[other][..., theirs[other]] for other in (0, 1)], -1))
    back = mappings.halo_add(border, places, sent, received, 8, group)
    times = torch.bincount(places, minlength=8)  # what was sent comes home, as often as it was sent
    torch.testing.assert_close(back, inputs[rank] * times, rtol=1e-14, atol=0)


def check_gathered_linear(rank, inputs, weights, group):
    """Gathering once more in the backward changes no gradient."""
    weight, bias = weights[0, :40].view(5, 8), weights[0, 40:45]
    grads = []
    for linear in (
        lambda x, w, b: torch.nn.functional.linear(mappings.all_gather(x, 1, group), w, b),
        lambda x, w, b: mappings.gathered_linear(x, w, b, 1, group),
    ):
        leaves = [t.clone().requires_grad_() for t in (inputs[rank], weight, bias)]
        linear(*leaves).cos().sum().backward()
        grads.append([t.grad for t in leaves])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def check_graph(rank, inputs, weights, group):
    """All of them in one compiled graph."""
    weight, bias = weights[0, :40].view(5, 8), weights[0, 40:45]

    def several(x):
        x = mappings.reduce_scatter(mappings.all_gather(mappings.copy(x, group), 1, group), 0, group)
        x = mappings.all_to_all(mappings.gather(mappings.scatter(x, 2, group), 2, group), 1, 2, group)
        places, counts = exchanged(rank)
        border = mappings.halo(x, places, *counts, group)
        x = x + mappings.halo_add(border.sin(), places, *counts, x.shape[-1], group)
        return mappings.reduce(mappings.gathered_linear(x[..., :8], weight, bias, 1, group).sum(), group)

    grads = []
    for f in (several, torch.compile(several, fullgraph=True)):
        leaf = inputs[rank].clone().requires_grad_()
        f(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
