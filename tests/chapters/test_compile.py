"""Compilation: which modules, which modes, and the same losses."""

import functools
import os

import numpy as np
import pytest
import torch

import train
import train_mp
from networks.vit import ViT
from tests.distributed.recorded_graph import always_ddp
from tests.helpers import group_of_one, losses, run_here, tiny_flags
from utils.compiler import check_compiler, compile_modules
from utils.config.settings import Config
from utils.device import pick_device


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    """Each model is compiled anew, and of one code only so many versions are kept."""
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_blocks_give_the_same_losses(tiny):
    plain = losses(run_here(tiny_flags(tiny)))
    compiled = losses(run_here(tiny_flags(tiny, "--enable_jit", "--run_num", "b")))
    np.testing.assert_allclose(compiled, plain, rtol=1e-5)


def test_enable_jit_compiles_and_no_compiler_is_one_line(tiny, monkeypatch):
    compiled = []

    def keep(forward, **kwargs):
        is_method = hasattr(forward, "__self__")
        compiled.append((type(forward.__self__).__name__ if is_method else forward.__name__, kwargs))
        return forward

    monkeypatch.setattr(torch, "compile", keep)
    run_here(tiny_flags(tiny, "--enable_jit"))
    inputs, targets, *blocks = compiled
    assert inputs[0] == targets[0] == "normalise"
    assert blocks == [("Block", {"fullgraph": True, "mode": "default"})] * 2
    compiled.clear()
    run_here(tiny_flags(tiny, "--enable_jit", "--compile_modules", "MLP", "PatchEmbed", "--compile_mode=max-autotune"))
    assert sorted(name for name, _ in compiled) == ["MLP", "MLP", "PatchEmbed", "normalise", "normalise"]
    assert all(kwargs["mode"] == "max-autotune" for name, kwargs in compiled if name != "normalise")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match="enable_jit needs a C.. compiler"):
        run_here(tiny_flags(tiny, "--enable_jit"))


def test_graphs_of_the_compiler_allow_one_run_of_a_block_in_a_step():
    gpu, mode = torch.device("cuda"), {"enable_jit": True, "compile_mode": "reduce-overhead"}
    check_compiler(Config(**mode), gpu)
    for more in (
        {"accumulation_steps": 2},
        {"activation_checkpoint": "block"},
        {"activation_checkpoint": "step"},
        {"rollout_steps": (2,), "rollout_from": (5,)},
    ):
        check_compiler(Config(**{**mode, **more, "compile_mode": "default"}), gpu)
        with pytest.raises(ValueError, match="overwrite gradients where a block runs twice"):
            check_compiler(Config(**mode, **more), gpu)


def test_graphs_of_the_compiler_are_refused_on_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    check_compiler(Config(enable_jit=True, compile_mode="max-autotune-no-cudagraphs"), torch.device("cuda"))
    check_compiler(Config(enable_jit=True, compile_mode="max-autotune"), torch.device("cpu"))  # it records none
    with pytest.raises(ValueError, match="max-autotune replays graphs, .* AMD GPUs"):
        check_compiler(Config(enable_jit=True, compile_mode="max-autotune"), torch.device("cuda"))


@pytest.mark.parametrize(
    "user, grows", [(None, True), ("max_split_size_mb:64", False), ("expandable_segments:True", True)]
)
def test_nccl_registers_no_buffers_where_segments_can_grow(monkeypatch, user, grows):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PYTORCH_ALLOC_CONF", user), ("NCCL_GRAPH_REGISTER", None)):
        monkeypatch.setenv(name, "")  # what it was comes back, whatever is set meanwhile
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    for name, value in (("is_available", True), ("device_count", 4), ("set_device", None), ("get_device_name", "H100")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None)
    assert pick_device("auto", 5) == torch.device("cuda", 1)
    assert os.environ.get("NCCL_GRAPH_REGISTER") == ("0" if grows else None)


def test_graphs_of_the_compiler_are_told_when_a_model_begins(monkeypatch):
    begun = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    for mode, times in (("default", 0), ("reduce-overhead", 2)):
        model = ViT((16, 32), 4, 3, 3, 32, 3, 4)
        compile_modules(model, ["Block"], mode)
        for _ in range(2):
            model(torch.randn(1, 3, 16, 32))
        assert len(begun) == times


@pytest.mark.parametrize("chapter, name", [(train, "1GPU"), (train_mp, "1MP")])
@pytest.mark.parametrize("more", [[], ["--patch_overlap", "2", "--conserve_mean", "ch1", "--rollout_steps", "2"]])
def test_the_whole_model_compiles(tiny, monkeypatch, chapter, name, more):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flags = ["--drop_path", "0.2", "--mlp_chunks", "2", "--compile_modules", "ViT", *more]
    plain = losses(run_here(tiny_flags(tiny, *flags), chapter.main, name))
    compiled = losses(run_here(tiny_flags(tiny, *flags, "--enable_jit", "--run_num", "b"), chapter.main, name))
    np.testing.assert_allclose(compiled, plain, rtol=1e-6)


@pytest.mark.parametrize("names, cut", [(["Block"], False), (["ViT"], True)])
def test_under_ddp_a_block_is_one_graph_and_a_model_several(monkeypatch, names, cut):
    """A block of 3 MB: at the end of DDP's first bucket, of 1 MiB, Dynamo would cut it."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = ViT((16, 32), 4, 3, 3, 256, 2, 4)
    with group_of_one():
        compile_modules(model, names, "default")
        always_ddp(model, Config(), torch.distributed.group.WORLD)(torch.randn(1, 3, 16, 32)).sum().backward()
    assert (len(graphs) > 1) == cut and graphs
