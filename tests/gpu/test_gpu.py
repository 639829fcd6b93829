"""What only a GPU can show. Skipped elsewhere; `pytest -m gpu` runs these."""

import itertools
import time
from functools import partial

import numpy as np
import pytest
import torch

import train
import train_mp
import train_mp_graphs
from distributed import mappings
from distributed.helpers import GridScaler
from networks.attention import BACKENDS, attention, check_attention, has_cudnn_fault, pick_attention
from tests.distributed.recorded_graph import always_ddp
from tests.helpers import (
    fields,
    group_of_one,
    losses,
    records,
    resume_here,
    run_here,
    tiny_flags,
    write_data,
    write_file,
)
from tests.measure.test_timeline import check_times
from utils.checkpoint.state import TrainingState
from utils.config.reader import load_config
from utils.data.dataset import WeatherData
from utils.device import EXPANDABLE, allocator_settings, allow_tf32, peak_flops, pick_device
from utils.observers import Observer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", 0)


def on_gpu(tiny, *flags):
    return tiny_flags(tiny, "--device", "cuda", "--num_iters", "6", *flags)


SKILL = ["--patch_overlap", "2", "--conserve_mean", "ch0", "--rollout_steps", "2"]  # and `--rollout_from`


@pytest.mark.parametrize(
    "flags",
    [[], [*SKILL, "--rollout_from", "2"], [*SKILL, "--n_out_channels", "2", "--activation_checkpoint", "step"]],
    ids=lambda flags: " ".join(flags) or "plain",
)
def test_the_gpu_follows_the_cpu(tiny, flags):
    cpu = losses(run_here(tiny_flags(tiny, "--device", "cpu", "--num_iters", "6", *flags)))
    gpu = losses(run_here(on_gpu(tiny, "--no_tf32", "--attention", "math", "--run_num", "b", *flags)))
    np.testing.assert_allclose(gpu, cpu, rtol=1e-4)


@pytest.mark.parametrize("flags", [[], ["--fp8"]], ids=lambda flags: " ".join(flags) or "16 bits")
def test_transformer_engine_follows_pytorch(tiny, device, flags):
    """And a run goes on with the other. The tiny model is widened: products of 8 bits take multiples of 16."""
    pytest.importorskip("transformer_engine.pytorch")
    if flags and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU has no products of 8 bits")
    wide = ("--amp_mode", "bf16", "--embed_dim", "64", "--checkpoint_every", "3", "--keep_checkpoints", "9")
    plain = losses(run_here(on_gpu(tiny, *wide)))
    engine = on_gpu(tiny, *wide, "--model_backend", "transformer-engine", *flags, "--run_num", "engine")
    folder = run_here(engine)
    np.testing.assert_allclose(losses(folder), plain, rtol=0.05 if flags else 0.01)
    again = on_gpu(tiny, *wide, "--run_num", "engine", "--resume", str(folder / "checkpoints/00000003"))
    np.testing.assert_allclose(losses(run_here(again)), plain, rtol=0.05 if flags else 0.01)


@pytest.mark.parametrize(
    "flags",
    [
        ["--amp_mode", "bf16"],
        ["--amp_mode", "fp16"],
        ["--amp_mode", "fp16", "--enable_fused"],
        ["--amp_mode", "bf16", "--enable_jit", "--enable_fused"],
        ["--num_data_workers", "2"],
        ["--accumulation_steps", "4"],
        ["--residual", "--clip_grad_norm", "1"],
    ],
)
def test_flags_follow_float32(tiny, flags):
    residual = ["--residual"] if "--residual" in flags else []
    plain = losses(run_here(on_gpu(tiny, "--lr", "1e-4", *residual)))
    folder = run_here(on_gpu(tiny, "--lr", "1e-4", *flags, "--run_num", "b"))
    np.testing.assert_allclose(losses(folder), plain, rtol=1e-3)  # without a single update it would be 8e-3
    last = records(folder, "epoch")[-1]
    assert last["mfu"] > 0 and last["peak_memory_gb"] > 0


def batches(folder, kind, *flags):
    """The batches of two epochs of training and one of validation, normalised, on the host."""
    config = load_config(tiny_flags(folder, "--global_batch_size", "2", *flags))[0].with_batches(1)
    data = WeatherData(config, torch.device(kind))
    loaders = [data.train_loader.epoch(0), data.train_loader.epoch(1), data.valid_loader.epoch()]
    for batch in itertools.chain.from_iterable(loaders):
        yield data, batch, data.to_device(batch)


@pytest.mark.parametrize("layout", [{}, {"compression": "gzip"}])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "flags",
    [
        ["--num_data_workers", "0"],
        ["--num_data_workers", "3"],
        ["--num_data_workers", "2", "--read_depth", "9", "--enable_jit"],
        ["--num_data_workers", "2", "--data_loader_config", "dali"],
    ],
)
def test_batches_on_the_gpu(tmp_path, flags, dtype, layout):
    """Late copies, too: each waits, and a buffer must not be filled again before."""
    if "dali" in flags:
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    write_data(tmp_path, **layout)
    for path in tmp_path.glob("*/*.h5"):
        write_file(path, fields(9, 3, 17, 32, seed=len(path.name)).astype(dtype), **layout)
    kept = []
    for data, batch, fields_on_gpu in batches(tmp_path, "cuda", *flags):
        torch.cuda._sleep(20_000_000)
        kept.append([x.clone() for x in fields_on_gpu])
        assert batch.is_normalised or (batch.inp.is_pinned() and batch.target.is_pinned())
        del fields_on_gpu  # its memory may go to others now
        for stream in (data.copies.stream, torch.cuda.current_stream()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # some ms: what comes next starts late
    for got, (_, _, wanted) in zip(kept, batches(tmp_path, "cpu", "--device", "cpu"), strict=True):
        for x, y in zip(got, wanted):
            torch.testing.assert_close(x.cpu(), y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("loader", ["pytorch", "dali"])
def test_the_host_waits_for_the_step_before_last_and_not_in_the_loader(tmp_path, loader, workers):
    """A step of 0.1 s or so is long against reading: the loader must not wait for it."""
    if loader == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    flags = ["--num_data_workers", workers, "--data_loader_config", loader, "--global_batch_size", "1"]
    data = WeatherData(load_config(tiny_flags(write_data(tmp_path), *flags))[0].with_batches(1), torch.device("cuda"))
    steps, waited = [], 0.0
    reader = data.train_loader.epoch()
    for i in range(8):
        asked = time.perf_counter()
        batch = next(reader)
        if i > 3:
            waited += time.perf_counter() - asked
        data.to_device(batch)
        if i > 1:
            assert steps[-2].query(), "the host runs further ahead"
            assert not steps[-1].query(), "it waits for the step in progress"
        torch.cuda._sleep(200_000_000)
        steps.append(torch.cuda.current_stream().record_event())
    assert waited < 0.1


@pytest.mark.parametrize(
    "flags", [[], ["--enable_fused"], ["--enable_fused", "--amp_mode", "fp16"], ["--amp_mode", "bf16"], ["--report"]]
)
def test_the_loop_adds_no_synchronisation(tiny, flags):
    """torch raises where the host waits for the device, from iteration 13 to 20, in which records are sent.

    (GradScaler.step itself waits, unless Adam is fused: fp16 is tried with the fused one.)
    """

    class NoWaits(Observer):
        def after_step(self, iteration, left):
            if iteration == 12:
                torch.cuda.set_sync_debug_mode("error")
            if iteration == 20:
                torch.cuda.set_sync_debug_mode("default")

    argv = on_gpu(tiny, "--global_batch_size", "1", "--num_iters", "21", "--residual", "--clip_grad_norm", "1", *flags)
    try:
        run_here(argv, partial(train.main, observers=[NoWaits()]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [128, 4050])
@pytest.mark.parametrize("head_dim", [48, 128])
@pytest.mark.parametrize("kernel", sorted(BACKENDS))
def test_attention_kernels_agree_with_math_in_float32(device, kernel, head_dim, tokens):
    try:
        check_attention(kernel, head_dim, device, torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    allow_tf32(False)
    torch.manual_seed(0)
    q, k, v, g = torch.randn(4, 1, 4, tokens, head_dim, device=device)
    results = []
    for name, dtype in (("math", torch.float32), (kernel, torch.bfloat16)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, name, 0.0)
        out.backward(g.to(dtype))
        results.append([out, *(x.grad for x in inputs)])
    for exact, got in zip(*results):
        assert torch.isfinite(got).all() and (exact - got.float()).norm() < 0.03 * exact.norm()


def test_cudnn_is_left_out_where_its_gradients_may_be_nan(device):
    """192 tokens are 64 more than 128."""
    if not has_cudnn_fault(192, device):
        pytest.skip("no Hopper GPU, or a cuDNN that is mended")
    with pytest.raises(ValueError, match="cuDNN before 9.26"):
        pick_attention("cudnn", 192, 64, device, torch.bfloat16, 0.0)
    picked = pick_attention("auto", 192, 64, device, torch.bfloat16, 0.0)
    q, k, v = torch.randn(3, 1, 4, 192, 64, device=device, dtype=torch.bfloat16).requires_grad_()
    (grad,) = torch.autograd.grad(attention(q, k, v, picked, 0.0).sum(), q)
    assert picked in ("flash", "efficient") and torch.isfinite(grad).all()


def test_flash_attention_in_float32_is_refused(device):
    with pytest.raises(ValueError, match="take --attention auto"):
        check_attention("flash", 48, device, torch.float32)


def test_tf32_changes_the_rounding(device):
    a, b = torch.randn(2, 512, 512, device=device)
    exact = a.double() @ b.double()
    errors = []
    for allowed in (True, False):
        allow_tf32(allowed)
        errors.append((a @ b - exact).abs().max().item())
    if torch.cuda.get_device_capability() >= (8, 0) and not torch.version.hip:
        assert errors[0] > 10 * errors[1]


def test_peak_of_the_device(device):
    peak, source = peak_flops(device, "bf16", tf32=True)
    assert peak > 1e12 and source


def test_nccl_on_one_rank():
    import torch.distributed as dist

    with group_of_one():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        dist.all_reduce(x)
        dist.all_reduce(y)
        assert dist.get_backend_config().count("nccl") == 1 and x.cpu().equal(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mappings_run_on_nccl(device, dtype):
    """On one rank every collective is the identity; what is tried is that NCCL takes these calls and dtypes."""
    import torch.distributed as dist

    with group_of_one():
        group = dist.group.WORLD
        for mapping, arguments in [
            (mappings._Copy, ()),
            (mappings._Reduce, ()),
            (mappings._Scatter, (1,)),
            (mappings._Gather, (1,)),
            (mappings._AllGather, (1,)),
            (mappings._ReduceScatter, (1,)),
            (mappings._AllToAll, (2, 1)),
        ]:
            x = torch.randn(2, 4, 8, device=device).to(dtype).transpose(0, 1).requires_grad_()
            y = mapping.apply(x, *arguments, group)
            grad = torch.randn_like(y)
            y.backward(grad)
            assert torch.equal(y, x) and torch.equal(x.grad, grad), mapping


@pytest.mark.parametrize("fused", [False, True])
def test_the_scaler_shares_an_overflow_on_nccl(device, fused):
    import torch.distributed as dist

    with group_of_one():
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = torch.optim.Adam([weight], lr=0.1, fused=fused)
        scaler = GridScaler("cuda", dist.group.WORLD)
        for factor, steps in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
            weight.grad = None
            scaler.scale((weight * factor).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            taken = (1 - weight[0].item()) / 0.1
            assert abs(taken - steps) < 1e-3
        assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--amp_mode", "bf16"],
        ["--amp_mode", "fp16", "--enable_fused", "--clip_grad_norm", "1"],
        ["--amp_mode", "bf16", "--enable_jit"],
        ["--drop_path", "0.2", "--accumulation_steps", "2"],
    ],
)
def test_chapter_2_on_one_rank_is_chapter_1(tiny, flags):
    first = losses(run_here(on_gpu(tiny, *flags)))
    second = losses(run_here(on_gpu(tiny, *flags), train_mp.main, "1MP"))
    np.testing.assert_allclose(second, first, rtol=1e-3 if "--amp_mode" in flags else 1e-5)


def test_memory_grows_in_expandable_segments(device):
    if (settings := allocator_settings(True, device)) != EXPANDABLE:
        pytest.skip(f"the allocator has other settings: {settings or 'none'}")
    pick_device("cuda", 0)
    torch.cuda.empty_cache()
    held = torch.empty(64 * 2**20, device=device)
    segments = [s for s in torch.cuda.memory_snapshot() if s["total_size"] >= held.numel()]
    assert segments and all(segment["is_expandable"] for segment in segments)


@pytest.mark.parametrize(
    "flags",
    [
        ["--activation_checkpoint", "block"],
        ["--activation_checkpoint", "mlp", "--dropout", "0.1"],
        ["--mlp_chunks", "3"],
        ["--mlp_chunks", "3", "--enable_jit", "--amp_mode", "bf16"],
        ["--activation_checkpoint", "block", "--enable_jit", "--amp_mode", "fp16", "--enable_fused"],
    ],
)
def test_saving_memory_changes_no_loss(tiny, flags):
    same = [flag for flag in flags if flag in ("--dropout", "0.1", "--amp_mode", "bf16", "fp16", "--enable_fused")]
    plain = losses(run_here(on_gpu(tiny, "--no_tf32", *same)))
    saved = losses(run_here(on_gpu(tiny, "--no_tf32", *flags, "--run_num", "b")))
    np.testing.assert_allclose(saved, plain, rtol=1e-3 if "--amp_mode" in flags else 1e-5)


GRAPH_FLAGS = [
    [],
    ["--amp_mode", "bf16", "--enable_fused", "--enable_jit"],
    ["--amp_mode", "fp16", "--enable_fused", "--clip_grad_norm", "1"],
    ["--amp_mode", "fp16"],
    ["--drop_path", "0.3", "--dropout", "0.1", "--accumulation_steps", "2"],
    ["--activation_checkpoint", "block", "--mlp_chunks", "2"],
    ["--graph_optimizer", "--warmup", "6"],
    ["--graph_optimizer", "--enable_fused", "--amp_mode", "bf16", "--clip_grad_norm", "0.5"],
    ["--graph_optimizer", "--enable_fused", "--amp_mode", "fp16"],
    ["--num_data_workers", "2"],
    [*SKILL, "--rollout_from", "7"],  # recorded once for each length
    [*SKILL, "--rollout_from", "7", "--graph_optimizer", "--enable_fused"],
]


@pytest.mark.parametrize("flags", GRAPH_FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_a_graph_gives_the_losses_of_the_eager_loop(tiny, flags):
    exact = ["--no_tf32", "--num_iters", "16"]
    eager = on_gpu(tiny, *exact, *(flag for flag in flags if flag != "--graph_optimizer"))
    eager = run_here(eager, train_mp.main, "1MP")
    graphed = on_gpu(tiny, *exact, *flags, "--graph_warmup", "5", "--run_num", "graph")
    with torch.cuda.stream(torch.cuda.current_stream()):  # the script leaves its own stream behind
        graphed = run_here(graphed, train_mp_graphs.main, "1MP")
    assert "CUDA graph of the step: recorded" in (graphed / "out.log").read_text()
    rtol = 2e-3 if "--amp_mode" in flags else 1e-5  # other random numbers would be 1e-3
    np.testing.assert_allclose(losses(graphed), losses(eager), rtol=rtol)


@pytest.mark.parametrize("flags", [[], ["--amp_mode", "bf16", "--graph_optimizer", "--enable_fused"]])
def test_ddp_is_recorded(tiny, monkeypatch, flags):
    """Its hooks, buckets and streams. NCCL itself launches nothing for the sum of one rank."""
    monkeypatch.setattr(train_mp, "data_parallel", always_ddp)
    more = ["--num_iters", "18", *(flag for flag in flags if flag != "--graph_optimizer")]
    eager = run_here(on_gpu(tiny, *more), train_mp.main, "1MP")
    graphed = on_gpu(tiny, *flags, "--num_iters", "18", "--graph_warmup", "12", "--run_num", "graph")
    with torch.cuda.stream(torch.cuda.current_stream()):
        graphed = run_here(graphed, train_mp_graphs.main, "1MP")
    assert "CUDA graph of the step: recorded" in (graphed / "out.log").read_text()
    np.testing.assert_allclose(losses(graphed), losses(eager), rtol=2e-3 if flags else 1e-5)


RESUMED = [
    (train.main, "1GPU", []),
    (train.main, "1GPU", ["--amp_mode", "fp16", "--enable_fused", "--enable_jit"]),
    (train.main, "1GPU", ["--dropout", "0.2", "--drop_path", "0.2", "--amp_mode", "bf16"]),
    (train_mp.main, "1MP", ["--drop_path", "0.5", "--dropout", "0.2"]),
    (train_mp_graphs.main, "1MP", ["--graph_warmup", "3", "--drop_path", "0.5", "--dropout", "0.2"]),
    (train_mp_graphs.main, "1MP", ["--graph_warmup", "3", "--graph_optimizer", "--enable_fused", "--amp_mode", "fp16"]),
]


@pytest.mark.parametrize("main, name, flags", RESUMED, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_a_run_goes_on_from_a_checkpoint(tiny, main, name, flags):
    """Rounding may differ from run to run on a GPU; other random numbers would show in the second digit."""
    with torch.cuda.stream(torch.cuda.current_stream()):
        whole, resumed = resume_here(on_gpu(tiny, "--no_tf32", *flags, "--num_iters", "12"), 4, main, name)
    np.testing.assert_allclose(resumed, whole, rtol=1e-3 if "--amp_mode" in flags else 1e-5)
    assert len(whole) == 8


@pytest.mark.parametrize(
    "main, name, flags", [(train.main, "1GPU", []), (train_mp_graphs.main, "1MP", ["--graph_warmup", "3"])]
)
def test_the_times_of_a_run_add_up(tiny, main, name, flags):
    with torch.cuda.stream(torch.cuda.current_stream()):
        folder = run_here(on_gpu(tiny, "--report", "--num_iters", "6", *flags), main, name)
    check_times(folder, epochs=[1, 2, 3])


def test_a_save_does_not_wait_for_the_device(device):
    """The copy is launched behind the step in progress, and holds what that step leaves, not what follows it."""
    with group_of_one():
        model = torch.nn.Linear(300, 300, device=device)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        state = TrainingState(model, optimizer, torch.amp.GradScaler("cuda"))
        state.copy_to_host()  # allocates
        assert all(x.is_pinned() for name, x in state.host.items() if name.startswith(("model", "optimizer")))
        torch.cuda._sleep(2_000_000_000)  # 1 s or so
        step = torch.cuda.current_stream().record_event()
        model.weight.data.fill_(1.0)
        state.copy_to_host()
        model.weight.data.fill_(2.0)
        assert not step.query()
        saved = state.shards()["model.weight"]
        assert step.query()
        assert (saved == 1.0).all() and (model.weight == 2.0).all()


def test_reduce_overhead_gives_the_losses_of_the_default_mode(tiny):
    flags = ["--enable_jit", "--amp_mode", "bf16", "--num_iters", "12"]
    plain = losses(run_here(on_gpu(tiny, *flags)))
    for run_num, modules in (("b", "Block"), ("c", "ViT")):
        more = ["--compile_mode", "reduce-overhead", "--compile_modules", modules, "--run_num", run_num]
        np.testing.assert_allclose(losses(run_here(on_gpu(tiny, *flags, *more))), plain, rtol=1e-3)
