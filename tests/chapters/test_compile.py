"""Compilation: which modules, which modes, and the same losses."""

import functools
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import train
import train_mp
from networks.vit import ViT
from tests.distributed.recorded_graph import always_ddp
from tests.helpers import group_of_one, losses, run_here, tiny_flags
from utils.compiler import check_compiler, compile_modules
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.data.fields import Fields
from utils.data.to_device import Normaliser
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
        check_compiler(Config(**mode, **more), gpu, trains=False)  # a forecast has no gradients


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
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None, raising=False)
    assert pick_device("auto", 1) == torch.device("cuda", 1)
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


def test_classes_have_options_of_their_own(tmp_path, monkeypatch):
    """In YAML a mapping, on the command line after a colon; a class without a mode has compile_mode."""
    path = tmp_path / "a.yaml"
    path.write_text("a:\n  compile_mode: max-autotune-no-cudagraphs\n  compile_modules:\n"
                    "    Attention: {mode: default}\n    MLP: {dynamic: false}\n    Block:\n")  # fmt: skip
    config = load_config(["--yaml_config", str(path), "--config", "a"])[0]
    assert config.compile_modules == ("Attention:mode=default", "MLP:dynamic=False", "Block")
    assert config.compile_modes == {"default", "max-autotune-no-cudagraphs"}
    (tmp_path / "b.yaml").write_text(config.to_yaml())
    assert load_config(["--yaml_config", str(tmp_path / "b.yaml"), "--config", "a"])[0] == config
    told = []
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: told.append((type(f.__self__).__name__, kwargs)) or f)
    model = ViT((8, 16), 4, 1, 1, 8, 1, 2)
    compile_modules(model, config.compile_modules, config.compile_mode)
    assert told == [
        ("Attention", {"fullgraph": True, "mode": "default"}),
        ("MLP", {"fullgraph": True, "mode": "max-autotune-no-cudagraphs", "dynamic": False}),
        ("Block", {"fullgraph": False, "mode": "max-autotune-no-cudagraphs"}),  # cut where they begin
    ]


@pytest.mark.parametrize("more", [[], ["--activation_checkpoint=mlp"]])
def test_a_class_inside_another_keeps_its_options(monkeypatch, more):
    """Dynamo would take what a block calls into the block's graph."""
    graphs = []

    def compile_for(forward, mode, **options):
        def backend(graph, inputs):
            graphs.append(mode)
            return graph.forward

        return compile_now(forward, backend=backend, **options)

    compile_now = torch.compile
    monkeypatch.setattr(torch, "compile", compile_for)
    x, mode = torch.randn(1, 1, 8, 16), "max-autotune-no-cudagraphs"
    for names, modes in (
        (["Block", f"MLP:mode={mode},dynamic=false"], {"default", mode}),
        (["Block", "MLP"], {"default"}),
    ):
        torch.compiler.reset()
        graphs.clear()
        model = train.build_model(*blank_fields(more))
        expected = model(x)
        compile_modules(model, names, "default")
        torch.testing.assert_close(model(x), expected)
        model(x).sum().backward()
        assert {*graphs} == modes


def blank_fields(flags):
    """Return the arguments of build_model for 8 x 16 points of one channel."""
    config = load_config(["--config=base", "--img_size", "8", "16", "--patch_size=4", "--n_in_channels=1",
                          "--n_out_channels=1", "--embed_dim=8", "--depth=1", "--num_heads=2", *flags])[0]  # fmt: skip
    return config, Fields.blank(config), torch.device("cpu")


def test_a_class_has_one_set_of_options(tmp_path):
    with pytest.raises(ValueError, match="names a class twice in MLP:mode=default, Block, MLP: name each once"):
        compile_modules(ViT((8, 16), 4, 1, 1, 8, 1, 2), ["MLP:mode=default", "Block", "MLP"], "default")
    for value in ("reduce-overhead", "[mode=default]"):
        (tmp_path / "a.yaml").write_text(f"a:\n  compile_modules: {{MLP: {value}}}\n")
        with pytest.raises(ValueError, match="compile_modules has .* it takes a class of modules"):
            load_config(["--yaml_config", str(tmp_path / "a.yaml"), "--config", "a"])


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("axis", ["tensor_parallel", "context_parallel"])
def test_graphs_of_the_compiler_hold_no_collectives(mode, axis):
    """NCCL waits at its end for graphs with kernels of its own, and those of the compiler live on."""
    split = {axis: 2, "enable_jit": True}
    check_compiler(Config(**split, compile_mode="default"), torch.device("cuda"))
    with pytest.raises(ValueError, match=f"compile_mode {mode} replays CUDA graphs, here with NCCL's kernels in them"):
        check_compiler(Config(**split, compile_mode=mode), torch.device("cuda"))


@pytest.mark.parametrize(
    "text", ["MLP:mode=fast", "MLP:backend=eager", "MLP:dynamic=some", ":mode=default", "MLP:mode=default,mode=default"]
)
def test_other_options_are_refused(text):
    with pytest.raises(ValueError, match="compile_modules has .* it takes a class of modules, alone or with options"):
        load_config(["--config=base", "--compile_modules", text])


def test_a_class_that_replays_graphs_is_checked_as_all_are():
    config = Config(enable_jit=True, compile_modules=("Block", "MLP:mode=reduce-overhead"))
    with pytest.raises(ValueError, match="compile_mode reduce-overhead replays CUDA graphs, and the device is cpu"):
        check_compiler(config, torch.device("cpu"))
    with pytest.raises(ValueError, match="compile_mode reduce-overhead replays CUDA graphs, which overwrite"):
        check_compiler(replace(config, accumulation_steps=2), torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_samples_of_any_number_are_normalised_by_the_same_code(monkeypatch, dtype):
    """Dynamo refuses a ninth entry for a function, and each length of forecasts brings other numbers of samples."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for channels in (1, 2, 3):
        mean, std = torch.randn(1, channels, 1, 1), torch.rand(1, channels, 1, 1) + 0.5
        compiled, plain = Normaliser(mean, std, compiled=True), Normaliser(mean, std)
        for steps, samples in itertools.product((1, 2, 3, 4, 7), (1, 4, 5)):
            x = torch.randn(steps, samples, channels, 4, 6)
            found, expected = (normaliser(x.clone().to(dtype)) for normaliser in (compiled, plain))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
