"""Layers of Transformer Engine, by a stand-in for the package: the same model on each grid, from all checkpoints."""

import importlib.util
import os
import re
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import train
from distributed.helpers import TensorParallelGradients, sliced_dims
from distributed.parallelize import check_parallel, is_sequence_parallel, parallelize, shard_tokens
from tests.helpers import losses, run_here, run_ranks, tiny_flags
from tests.networks import engine_stand_in
from utils.backend import check_backend
from utils.comm import Grid
from utils.config.reader import load_config
from utils.data.fields import Fields
from utils.ranks.start import join
from utils.ranks.world import find_world

CPU = torch.device("cpu")
FLAGS = [
    "--img_size", "16", "36", "--patch_size=4", "--embed_dim=64", "--num_heads=4", "--depth=2", "--n_in_channels=3",
    "--n_out_channels=3", "--global_batch_size=2", "--model_backend=transformer-engine",
]  # fmt: skip


@pytest.fixture
def package(monkeypatch):
    for name in (*engine_stand_in.NAMES, *engine_stand_in.OURS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    engine_stand_in.install()
    yield
    for name in (*engine_stand_in.NAMES, *engine_stand_in.OURS):
        sys.modules.pop(name, None)


def gradients(*flags, device: torch.device | None = CPU):
    """Return forecast, gradients by name, and the model, of a fixed loss on fixed numbers."""
    config = load_config([*FLAGS, *flags])[0].with_batches(1)
    model = train.build_model(config, Fields.blank(config), device)
    x = torch.randn(2, 3, 16, 36, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    x = x.to(torch.get_default_dtype())
    with train.autocast(config, CPU):
        y = model(x)
    y.to(x.dtype).square().mean().backward()
    return y, {name: p.grad for name, p in model.named_parameters()}, model


def test_it_is_the_same_model(package):
    y, grads, plain = gradients(device=None)
    y2, grads2, model = gradients()
    kinds = {type(module).__module__ for module in model.modules() if not list(module.children())}
    assert "networks.transformer_engine" in kinds and type(plain.norm) is torch.nn.LayerNorm
    assert type(model.norm) is type(model.blocks[0].norm2) and type(model.blocks[1].mlp.fc2) is type(
        model.blocks[0].attn.qkv
    )
    torch.testing.assert_close(y, y2)
    assert grads.keys() == grads2.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], grads2[name], msg=name)
    assert plain.state_dict().keys() == model.state_dict().keys()  # nothing of the package's own
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("more", [[], ["--activation_checkpoint=mlp"], ["--mlp_chunks=3"]])
def test_products_of_8_bits(package, more):
    """36 tokens are no multiple of 32. An error of 2^-4 a number is less in sums of many; recomputed it is the same."""
    y, grads, _ = gradients("--amp_mode=bf16", device=None)
    y8, grads8, model = gradients("--amp_mode=bf16", "--fp8", *more)
    assert model.blocks[0].attn.qkv.in_8_bits and not torch.equal(y, y8)
    assert (y8 - y).norm() < 0.02 * y.norm()
    for name in grads:
        assert (grads8[name] - grads[name]).norm() < 0.2 * grads[name].norm() + 1e-6, name
    if more[:1] == ["--activation_checkpoint=mlp"]:
        _, kept, _ = gradients("--amp_mode=bf16", "--fp8")
        assert all(torch.equal(kept[name], grads8[name]) for name in kept)


def test_a_training_goes_on_with_either(tiny, package, monkeypatch):
    """The names in a checkpoint are the same both ways; the losses are those of PyTorch's layers."""
    monkeypatch.setattr("utils.run.setup.check_backend", lambda *_: None)
    plain = losses(run_here(tiny_flags(tiny, "--num_iters=6")))
    flags = ["--num_iters=6", "--checkpoint_every=3", "--keep_checkpoints=9", "--run_num", "engine"]
    folder = run_here(tiny_flags(tiny, *flags, "--model_backend=transformer-engine"))
    assert losses(folder) == pytest.approx(plain, rel=1e-5)
    half = folder / "checkpoints" / "00000003"
    for backend in ("pytorch", "transformer-engine"):
        again = tiny_flags(tiny, *flags, f"--model_backend={backend}", "--resume", str(half))
        assert losses(run_here(again))[3:] == pytest.approx(plain[3:], rel=1e-5)


GRIDS = [(tp, cp, *flags) for tp, cp in ((1, 2), (2, 1), (4, 1), (2, 2)) for flags in ([], ["--no_sequence_parallel"])]


def on_a_grid(ranks: int):
    """On each rank: forecast and gradients of its part, against the serial model of PyTorch's layers in float64."""
    engine_stand_in.install()
    world = find_world(os.environ)
    join(world)
    torch.set_default_dtype(torch.float64)
    serial_y, serial, _ = gradients(device=None)
    for tp, cp, *flags in (grid for grid in GRIDS if grid[0] * grid[1] == ranks):
        config = load_config([*FLAGS, f"--tensor_parallel={tp}", f"--context_parallel={cp}", *flags], chapter=2)[0]
        grid = Grid(ranks, world.rank, tp, cp)
        grid.create_groups(config.longest_wait)
        shard = shard_tokens(config, grid)
        fields = Fields.blank(config)
        model = parallelize(train.build_model(config, fields, CPU), config, grid, shard, CPU)
        assert type(model.blocks[0].attn.qkv).__module__ == "distributed.transformer_engine"
        x = torch.randn(2, 3, 16, 36, generator=torch.Generator().manual_seed(1), dtype=torch.float32).double()
        rows = slice(shard.rows.start, shard.rows.stop)
        y = model(shard.cut(x[:, :, rows]))
        torch.testing.assert_close(y, shard.cut(serial_y[:, :, rows]), rtol=1e-9, atol=1e-12)
        (y.square().sum() / serial_y.numel()).backward()
        for p in model.parameters():  # what DDP does: sums over the context ranks
            dist.all_reduce(p.grad, group=grid.get_group("cp"))
        TensorParallelGradients(model, grid, is_sequence_parallel(config, grid)).sync()
        dims, stacked = sliced_dims(model), model.stacked()
        assert len(dims) == 6 * len(model.blocks)
        for name, p in model.named_parameters():
            whole = serial[name]
            if p in dims:
                parts = stacked.get(name, 1)
                whole = whole.unflatten(0, (parts, -1)).chunk(tp, dims[p] + 1)[grid.get_rank("tp")].flatten(0, 1)
            torch.testing.assert_close(p.grad, whole, rtol=1e-9, atol=1e-12, msg=f"{name} on {tp, cp, flags}")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_grid_has_the_gradients_of_one_process(ranks):
    for done in run_ranks(ranks, on_a_grid, ranks):
        assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_missing_is_said_in_a_line(monkeypatch):
    config = load_config(FLAGS)[0]
    with pytest.raises(ValueError, match="needs a GPU of NVIDIA, and the device is cpu: take --model_backend pytorch"):
        check_backend(config, CPU)
    check_backend(replace(config, model_backend="pytorch"), CPU)
    if importlib.util.find_spec("transformer_engine") is None:
        with pytest.raises(
            ValueError, match=re.escape("(No module named 'transformer_engine'): `pip install ")
        ) as error:
            check_backend(config, torch.device("cuda"))
        assert "\n" not in str(error.value)


def test_a_package_whose_parts_do_not_fit(monkeypatch, tmp_path):
    """Its own import asserts that they do."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("assert False, 'version mismatch\\nfound 2.3'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"2.2 or newer \(version mismatch\): `pip"):
        check_backend(load_config(FLAGS)[0], torch.device("cuda"))


def test_what_it_cannot_do_is_refused(package, monkeypatch):
    gpu, config = torch.device("cuda"), load_config([*FLAGS, "--amp_mode=bf16", "--fp8"])[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_backend(config, gpu)
    with pytest.raises(ValueError, match="embed_dim that is a multiple of 128, and it is 64"):
        check_backend(replace(config, tensor_parallel=8), gpu)
    with pytest.raises(ValueError, match="enable_jit cannot compile"):
        check_backend(replace(config, enable_jit=True), gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="fp8 needs a GPU of compute capability 8.9, this one has 8.0: add --no_fp8"):
        check_backend(config, gpu)
    check_backend(replace(config, fp8=False), gpu)
    with pytest.raises(ValueError, match="leave --sp_regather out"):
        check_parallel(replace(config, sp_regather=True, tensor_parallel=2), Grid(2, 0, 2, 1))
    with pytest.raises(ValueError, match="fp8 is for products"):
        check_backend(replace(config, amp_mode="none"), gpu)
    with pytest.raises(ValueError, match="rounds products of float32 to TF32"):
        check_backend(replace(config, amp_mode="none", tf32=False, fp8=False), gpu)
    check_backend(replace(config, amp_mode="none", fp8=False), gpu)
    plain, remarks = load_config(["--fp8", "--amp_mode=bf16"])
    assert remarks == ["fp8 changes nothing without --model_backend transformer-engine"]
    assert config.in_8_bits and not plain.in_8_bits
