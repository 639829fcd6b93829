"""Steps on tensors that say `cuda`, where there is none: is a device mixed, does anything wait for it?

    python -m tests.gpu.fake_cuda LIBRARY       prints a line for each thing found, and a last one with the cases

The library (fake_cuda.cpp) lets a build of PyTorch without CUDA believe in a GPU, and FakeTensorMode runs operations on
shapes, devices and dtypes alone. An operation on tensors of two devices is then an error of PyTorch's own, nearly
always. `Waits` lists what moves data between host and device while the host waits: a value that is read, a copy that
blocks.

It does not see streams and events (whether a copy is done in time), whether memory is pinned, NCCL, generators,
compiled code, what a kernel takes (here every attention is the formula), and values: what reads them at its place, such
as the end of a validation, is left out.
"""

import ctypes
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import evaluate  # noqa: E402
import train  # noqa: E402
import train_mp  # noqa: E402
from distributed.helpers import GridScaler, TensorParallelGradients, share_loss  # noqa: E402
from distributed.parallelize import is_sequence_parallel, parallelize, shard_tokens, share_frames  # noqa: E402
from tests.helpers import ROOT, tiny_flags, write_data  # noqa: E402
from utils.comm import Grid  # noqa: E402
from utils.config.reader import load_config  # noqa: E402
from utils.data.dataset import WeatherData  # noqa: E402
from utils.ema import MovingAverage  # noqa: E402
from utils.forecast.data import ForecastData  # noqa: E402
from utils.forecast.settings import Evaluation  # noqa: E402
from utils.forecast.skill import moments, row_weights, zonal_spectrum  # noqa: E402
from utils.record.steps import StepRecords  # noqa: E402

GPU = torch.device("cuda", 0)
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")
STEPS = [  # fp16 with the fused optimiser only: GradScaler.step itself waits, unless Adam is fused
    [],
    ["--amp_mode=bf16", "--enable_fused", "--clip_grad_norm=1"],
    ["--amp_mode=fp16", "--enable_fused"],
    ["--dropout=0.1", "--drop_path=0.2", "--residual"],
    ["--activation_checkpoint=block", "--amp_mode=bf16"],
    ["--activation_checkpoint=mlp", "--dropout=0.1"],
    ["--mlp_chunks=3", "--accumulation_steps=2"],
    ["--on_nonfinite=skip", "--enable_fused"],
    ["--attention=math", "--amp_mode=bf16"],
    ["--patch_overlap=2", "--conserve_mean=ch1", "--rollout_steps=2", "--amp_mode=bf16"],
    ["--rollout_steps=3", "--n_out_channels=2", "--activation_checkpoint=step", "--patch_overlap=1"],
    ["--forcings", "position", "day", "year", "solar", "--rollout_steps=2", "--amp_mode=bf16"],
    ["--data_loader_config=pytorch", "--ema_decay=0.9"],  # (one FakeTensorMode takes no readers in threads)
]
GRIDS = [
    (1, []),
    (4, ["--tensor_parallel=2", "--context_parallel=2", "--amp_mode=bf16", "--drop_path=0.2"]),
    (4, ["--tensor_parallel=2", "--context_parallel=2", "--cp_attention=ulysses", "--amp_mode=fp16", "--enable_fused"]),
    (2, ["--tensor_parallel=2", "--sp_regather", "--clip_grad_norm=1", "--residual"]),
    (2, ["--tensor_parallel=2", "--no_sequence_parallel"]),
    (2, ["--context_parallel=2", "--cp_regather", "--cp_head_groups=2", "--amp_mode=bf16"]),
    (4, ["--context_parallel=4", "--patch_overlap=2", "--conserve_mean=ch1", "--rollout_steps=2", "--forcings=solar"]),
    (8, ["--context_parallel=2", "--accumulation_steps=2", "--activation_checkpoint=block"]),
]


class Waits(TorchDispatchMode):
    """Lists where the host waits for the device."""

    def __init__(self):
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, str(function)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kinds, to = {x.device.type for x in tensors}, kwargs.get("device")
        if name.startswith(("aten._to_copy", "aten.copy_")):
            travels = len(kinds) > 1 or (to is not None and torch.device(to).type not in kinds)
            is_free = kwargs.get("non_blocking", len(args) > 2 and args[2])
            waits = travels and not is_free
        else:
            # Operations on lists of tensors do not look at their devices. A number of the host may go along.
            is_mixed = len({x.device.type for x in tensors if x.dim()}) > 1
            waits = is_mixed or name.startswith(READS) and "cuda" in kinds
        if waits:
            self.found[f"{name} at {line()}"] = None
        return function(*args, **kwargs)


def line() -> str:
    """Return the innermost line of the project's own code."""
    stack = traceback.extract_stack()
    ours = [f for f in stack if f.filename.startswith(str(ROOT)) and "site-packages" not in f.filename]
    last = next(f for f in reversed(ours) if f.filename != __file__)
    return f"{Path(last.filename).relative_to(ROOT)}: {last.line}"


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let the project find a GPU. Streams and events do nothing."""
    with ExitStack() as stack:
        for name in ("Stream", "Event", "current_stream", "stream", "set_device"):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.MagicMock()))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(mock.patch("utils.data.batches.pin_memory"))
        stack.enter_context(mock.patch("torch.nn.init.trunc_normal_"))  # it looks at values
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def to_gpu(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model parameters and buffers of no data on the GPU, where those of the host are."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                if x is not None:
                    fake = torch.empty(x.shape, dtype=x.dtype, device=GPU)
                    held[name] = torch.nn.Parameter(fake) if isinstance(x, torch.nn.Parameter) else fake
    return model


def steps(folder: Path, ranks: int, flags: list[str], chapter: int) -> list[str]:
    """Train for some steps of chapter 1 or 2, then validate; return where the host waits."""
    config = load_config(tiny_flags(folder, *flags), chapter)[0]
    grid = Grid(ranks, 0, config.tensor_parallel, config.context_parallel, config.parallel_order)
    grid.create_groups()
    config, dp = config.with_batches(grid.get_size("dp")), grid.get_size("dp")
    shard, sharing = shard_tokens(config, grid), share_frames(config, grid)
    data = WeatherData(config, GPU, dp, 0, shard, grid.get_group("dp"), sharing)
    model, total_norm = train.build_model(config, data.fields, GPU), torch.nn.utils.get_total_norm
    if chapter == 2:
        with mock.patch("torch.Generator"):
            model = parallelize(model, config, grid, shard, GPU)
        model.generator = None
    model = to_gpu(model)
    optimizer = train.build_optimizer(model, config)
    kind = partial(GridScaler, group=grid.get_group("tp-cp")) if chapter == 2 else torch.amp.GradScaler
    scaler = train.build_scaler(config, GPU, kind)
    step = partial(train.forward_backward, model, scaler=scaler, config=config)
    if chapter == 2:
        gradients = TensorParallelGradients(model, grid, is_sequence_parallel(config, grid))
        distance = data.distance(**share_loss(config, grid, shard, GPU))
        step, total_norm = train_mp.make_step(step, grid, gradients, distance), gradients.norm
    update = partial(train.update_weights, optimizer, scaler, config, total_norm=total_norm)
    average = MovingAverage(model, config.ema_decay) if config.ema_decay else None
    records, batches = StepRecords(ranks), data.train_loader.epoch()
    data.scores()
    with Waits() as waits:
        for i in range(2):
            tensors = data.to_device(next(batches))
            loss = step(*tensors)
            norm = update(1e-3)
            if average:
                average.update(i + 1)
        with mock.patch.object(records, "_receive", list):  # it reads values, when they have long arrived
            for i in range(20):  # two sends
                records.keep(i + 1, 1e-3, loss, norm)
        with mock.patch("utils.metrics.Scores.reduce"):  # the end of a validation waits, once
            train.validate(model, data.valid_loader.epoch(), data, config)
    return list(waits.found)


def forecast(folder: Path, flags: list[str]) -> list[str]:
    """Make and judge forecasts; return where the host waits."""
    config = load_config(tiny_flags(folder, "--inf_data_path", str(folder / "valid"), *flags))[0].with_batches(1)
    data = ForecastData(config, Evaluation(checkpoint="x", lead_hours=24.0), GPU, None)
    data.begin([[0, 1]])
    model = to_gpu(train.build_model(config, data.fields, GPU)).eval()
    weights = row_weights(data.fields.latitude).to(GPU)
    with Waits() as waits:
        forecasts = evaluate.rollout({"model": model}, data, config, [0, 1])
        for _ in range(data.steps):
            truth, found = next(forecasts)
            usual = data.climate.at(data.seconds(0, 1))
            for x in found.values():
                moments(x[0].double(), truth[0].double(), usual, weights)
            zonal_spectrum(truth[0].double(), weights[:, 0])
    data.close()
    return list(waits.found)


def main() -> None:
    folder = write_data(Path(tempfile.mkdtemp()), valid={"2003": 20})
    cases = [(1, f"train.py {' '.join(flags)}", partial(steps, folder, 1, flags, 1)) for flags in STEPS]
    cases += [(n, f"train_mp.py {n} {' '.join(flags)}", partial(steps, folder, n, flags, 2)) for n, flags in GRIDS]
    cases += [
        (1, f"evaluate.py {' '.join(flags)}", partial(forecast, folder, flags))
        for flags in ([], ["--amp_mode=bf16", "--forcings=solar"])
    ]
    for ranks, name, case in cases:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            with fake_gpu():
                found = case()
        except Exception as error:
            place = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-6:]
            found = [f"{type(error).__name__}: {str(error).splitlines()[0]} ({' '.join(place)})"]
        dist.destroy_process_group()
        for each in found:
            print(f"{name}: {each}")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
