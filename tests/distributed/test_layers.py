"""Each parallel layer by itself against the whole one: what comes out, and the gradient of what goes in."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import train
from distributed.parallelize import is_sequence_parallel, parallelize, shard_tokens
from tests.helpers import run_ranks
from utils.comm import Grid
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.ranks.start import join
from utils.ranks.world import find_world

CPU = torch.device("cpu")
IMAGES = {1024: ("128", "128", "--patch_size=4"), 4050: ("360", "720", "--patch_size=8")}
GRIDS = {
    2: [
        (2, 1),
        (2, 1, "--no_sequence_parallel"),
        (2, 1, "--sp_regather"),
        (1, 2),
        (1, 2, "--cp_attention=ulysses"),
        (1, 2, "--cp_regather", "--cp_head_groups=2"),
    ],
    4: [(2, 2), (2, 2, "--no_sequence_parallel"), (2, 2, "--cp_attention=ulysses"), (4, 1), (1, 4)],
}
# What a rank has of the input and of the output: its shard of the tokens, or features of all in its context chunk.
LAYERS = {
    "attn.qkv": ("tokens", "features of 3"), "attn.proj": ("features", "tokens"), "attn": ("tokens", "tokens"),
    "mlp.fc1": ("tokens", "features"), "mlp.fc2": ("features", "tokens"), "mlp": ("tokens", "tokens"),
    "": ("tokens", "tokens"),
}  # fmt: skip


def part(x, kind, grid, over_tokens, index, n):
    """Return this rank's part of [B, N, features], padded to equal shards."""
    tp = grid.get_size("tp")
    if kind == "tokens":
        return F.pad(x, (0, 0, 0, (index + 1) * n))[:, index * n : (index + 1) * n]
    M = n * tp if over_tokens else n
    x = F.pad(x, (0, 0, 0, M * grid.get_size("cp")))[:, M * grid.get_rank("cp") : M * (grid.get_rank("cp") + 1)]
    x = x.unflatten(-1, (3 if kind.endswith("3") else 1, -1))
    return x.chunk(tp, dim=-1)[grid.get_rank("tp")].flatten(-2)


def configuration(tokens, tp=1, cp=1, flags=()):
    rows, columns, patch = IMAGES[tokens]
    argv = ["--img_size", rows, columns, patch, "--embed_dim=16", "--num_heads=4", "--depth=1", *flags]
    argv += ["--n_in_channels=1", "--n_out_channels=1", f"--tensor_parallel={tp}", f"--context_parallel={cp}"]
    return load_config(argv, chapter=2)[0]


def build(config):
    """Return a model in whose block no parameter is 0 or 1."""
    model = train.build_model(config, Fields.blank(config))
    for p in model.blocks.parameters():
        torch.nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(p.numel()))
    return model


def whole(layer, tokens):
    """Return an input, the output, weights of the output in a loss, and the gradient of the input."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, getattr(layer, "in_features", 16), generator=generator).requires_grad_()
    y = layer(x)
    weights = torch.randn(y.shape, generator=generator)
    (grad,) = torch.autograd.grad((y * weights).sum(), x)
    return x.detach(), y.detach(), weights, grad


def on_each_grid(ranks, tokens):
    world = find_world(os.environ)
    join(world)
    torch.set_default_dtype(torch.float64)
    block = build(configuration(tokens)).blocks[0]
    serial = {name: whole(block.get_submodule(name), tokens) for name in LAYERS}
    for tp, cp, *flags in GRIDS[ranks]:
        config, grid = configuration(tokens, tp, cp, flags), Grid(ranks, world.rank, tp, cp)
        grid.create_groups(config.longest_wait)
        shard = shard_tokens(config, grid)
        assert shard.total == tokens
        block = parallelize(build(config), config, grid, shard, CPU).blocks[0]
        place = grid, is_sequence_parallel(config, grid), shard.index, shard.length
        for name, (given, got) in LAYERS.items():
            x, y, weights, grad = serial[name]
            own = part(x, given, *place).requires_grad_()
            out = block.get_submodule(name)(own)
            (own_grad,) = torch.autograd.grad((out * part(weights, got, *place)).sum(), own)  # 0 for padding
            where = f"{name or 'block'} of {tokens} tokens on {tp, cp, flags}"
            out = out * part(torch.ones_like(y), got, *place)
            torch.testing.assert_close(out, part(y, got, *place), rtol=1e-10, atol=1e-10, msg=f"{where}: output")
            torch.testing.assert_close(own_grad, part(grad, given, *place), rtol=1e-10, atol=1e-10, msg=where)
    dist.destroy_process_group()


@pytest.mark.parametrize("tokens", IMAGES)
@pytest.mark.parametrize("ranks", GRIDS)
def test_each_layer_is_the_whole_one(ranks, tokens):
    for done in run_ranks(ranks, on_each_grid, ranks, tokens):
        assert done.returncode == 0, done.stderr[-3000:]


def with_dropout(kernel):
    """Gradients of a block that drops, by what is kept of keys and values: the same draws, the same numbers."""
    world = find_world(os.environ)
    join(world)
    torch.set_default_dtype(torch.float64)
    found = []
    for flags in ([], ["--cp_regather"], ["--cp_regather", "--activation_checkpoint=mlp"]):
        config = configuration(1024, 1, 2, ["--dropout=0.5", f"--attention={kernel}", *flags])
        grid = Grid(2, world.rank, 1, 2)
        grid.create_groups(config.longest_wait)
        model = parallelize(build(config), config, grid, shard_tokens(config, grid), CPU)
        torch.manual_seed(world.rank)
        x = torch.randn(1, 512, 16, requires_grad=True)
        model.run_blocks(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.blocks.parameters())])
    for other in found[1:]:
        for a, b in zip(found[0], other):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12 * a.abs().max().item())
    dist.destroy_process_group()


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_what_is_dropped_is_dropped_again(kernel):
    for done in run_ranks(2, with_dropout, kernel):
        assert done.returncode == 0, done.stderr
