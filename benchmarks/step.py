"""How fast is a training step, and how near to what the hardware can do?

    python benchmarks/step.py --json FILE                                   the cases below, and the memory savers
    python benchmarks/step.py --config=base --amp_mode bf16 --enable_jit    any section and flags of train.py

Forward pass, backward pass, optimiser and whole step of train.py, on random data: median and spread, samples/s, FLOP/s
as a fraction of the matmul peak measured in the same run (and of the datasheet's, on known GPUs), memory by part, the
kernels that take longest. Cases take turns, three rounds: a machine that slows down meanwhile slows all of them. A
fraction is the speed of a round's median step over the matmul peak of that round; figures have the best of the rounds.

FLOPs are those that the gradient of the loss needs: matrix products, attention included, two a multiply-add. What is
computed again (activation checkpointing, flash attention's backward pass) counts as time, not as work.
"""

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import train
from benchmarks.memory import LiveMemory, mlp_peak
from benchmarks.record import write_record
from networks.attention import attention
from utils.compiler import compile_modules
from utils.config import load_config
from utils.launch import World, join
from utils.loss import relative_l2
from utils.profiling import known_device, measured_peak, peak_flops, synchronize
from utils.sample_data import write_shape
from utils.token_shard import TokenShard

ROUNDS, STEPS, WARMUP = 3, 8, 3
# 2.58 GFLOP a sample on 128 tokens: what a CPU does in some seconds.
REFERENCE = [
    "--config=demo", "--img_size", "64", "128", "--embed_dim=192", "--depth=6", "--num_heads=6", "--local_batch_size=8",
    "--n_in_channels=20", "--n_out_channels=20", "--plot_channels=None", "--no_residual",
]  # fmt: skip
CASES = {
    "fp32": [],
    "fp32 compiled": ["--enable_jit"],
    "bf16": ["--amp_mode=bf16"],
    "bf16 compiled": ["--amp_mode=bf16", "--enable_jit"],
}
SAVERS = {
    "nothing": [],
    "activation_checkpoint block": ["--activation_checkpoint=block"],
    "activation_checkpoint mlp": ["--activation_checkpoint=mlp"],
    "mlp_chunks 4": ["--mlp_chunks=4"],
    "both": ["--activation_checkpoint=block", "--mlp_chunks=4"],
}


class Bench:
    """The training step of a configuration, on random data, with a clock at its parts."""

    def __init__(self, flags: list[str]):
        config = load_config(flags)[0].with_batches(1)
        self.config, self.device = config, train.prepare_device(config, local_rank=0)
        channels = [
            len(names) if names else n
            for names, n in ((config.in_channels, config.n_in_channels), (config.out_channels, config.n_out_channels))
        ]
        self.data = SimpleNamespace(
            in_names=range(channels[0]), out_names=range(channels[1]), origins=list(range(channels[1])),
            residual_scale=None, tokens=TokenShard(config.img_size, config.patch_size), device=self.device,
        )  # fmt: skip
        self.model = train.build_model(config, self.data).to(self.device)
        self.optimizer = train.build_optimizer(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp_mode == "fp16")
        generator = torch.Generator(self.device).manual_seed(1)
        shape = config.global_batch_size, *config.img_size
        self.batch = [torch.randn(shape[0], c, *shape[1:], device=self.device, generator=generator) for c in channels]
        self.marks: list = []
        self.is_timed = True
        self.model.register_forward_pre_hook(self._mark)
        step = partial(train.forward_backward, self.model, scaler=self.scaler, config=config)
        self.step = partial(step, distance=self._distance)
        self.update = partial(train.update_weights, self.optimizer, self.scaler, config)
        if config.enable_jit:
            compile_modules(self.model, config.compile_modules, config.compile_mode)

    def _mark(self, *_: object) -> None:
        """Note the time: on a GPU an event on its stream."""
        if not self.is_timed:
            return
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def _distance(self, forecast: Tensor, target: Tensor) -> Tensor:
        loss = relative_l2(forecast, target)
        self._mark()
        return loss

    def run_step(self) -> dict[str, float]:
        """Take a step; return the seconds of its parts."""
        self.marks = []
        self._mark()
        self.step(*self.batch)
        self._mark()
        self.update(self.config.lr)
        self._mark()
        synchronize(self.device)
        *passes, trained, updated = self.marks
        started, passes = passes[0], passes[1:]
        forward = sum(self._between(a, b) for a, b in zip(passes[::2], passes[1::2]))
        whole, optimizer = self._between(started, updated), self._between(trained, updated)
        return {"forward": forward, "backward": whole - optimizer - forward, "optimizer": optimizer, "step": whole}

    def _between(self, a: object, b: object) -> float:
        return a.elapsed_time(b) / 1e3 if self.device.type == "cuda" else b - a

    @property
    def dtype(self) -> torch.dtype:
        return train.AMP_DTYPE[self.config.amp_mode] or torch.get_default_dtype()

    def flops(self) -> int:
        """Return the floating point operations of a step: the embedding alone needs no gradient of its input."""
        N = self.data.tokens.total
        return self.config.global_batch_size * (
            3 * self.model.flops() - 2 * N * self.model.patch_embed.proj.weight.numel()
        )

    def memory(self) -> dict[str, int]:
        """Return the bytes by part, of a step without compilation: tensors alone, no workspace of a kernel."""
        after_forward = []
        hook = self.model.register_forward_hook(lambda *_: after_forward.append(live.now))
        self.model.zero_grad(set_to_none=True)
        with LiveMemory() as live:
            self.step(*self.batch)
        hook.remove()
        parameters = list(self.model.parameters())
        moments = (v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        weights, optimizer = _bytes(parameters), _bytes(moments)
        return {
            "weights": weights,
            "gradients": _bytes(p.grad for p in parameters),
            "optimizer": optimizer,
            "activations": after_forward[0],
            "peak": weights + optimizer + _bytes(self.batch) + live.peak,
        }

    def kernels(self, count: int = 8) -> list[dict]:
        """Return the operations that take longest: name, share of the step's time on the device, calls a step."""
        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
            for _ in range(3):
                self.run_step()
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        events = sorted(profiler.key_averages(), key=lambda e: -getattr(e, key))
        if on_gpu:  # each kernel stands there itself, and once more under the operation that launched it
            events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        total = sum(getattr(e, key) for e in events)
        return [{"name": e.key, "share": getattr(e, key) / total, "calls": e.count / 3} for e in events[:count]]

    def attention_seconds(self) -> float:
        """Return the time of all blocks' attention alone, forward and backward, in the kernel and dtype in use."""
        config, N = self.config, self.data.tokens.total
        heads, kernel = config.num_heads, self.model.blocks[0].attn.kernel
        q, k, v = (
            torch.randn(config.local_batch_size, N, heads, config.embed_dim // heads, device=self.device)
            .to(self.dtype).transpose(1, 2).requires_grad_() for _ in range(3)
        )  # fmt: skip
        grad, best = torch.randn_like(q), float("inf")
        for _ in range(5):
            synchronize(self.device)
            start = time.perf_counter()
            attention(q, k, v, kernel, 0.0).backward(grad)
            synchronize(self.device)
            best = min(best, time.perf_counter() - start)
        return best * config.depth * config.accumulation_steps


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def compare(cases: dict[str, list[str]]) -> dict[str, dict]:
    """Return for each case: parts (seconds of all steps, by round), peaks (FLOP/s, by round), and the rest."""
    results = {}
    for name, flags in cases.items():
        bench = Bench(flags)
        start = time.perf_counter()
        bench.run_step()
        first = time.perf_counter() - start
        for _ in range(WARMUP - 1):
            bench.run_step()
        memory = None if bench.config.enable_jit else bench.memory()
        results[name] = {"bench": bench, "memory": memory, "first": first, "rounds": [], "peaks": []}
    for _ in range(ROUNDS):
        for found in results.values():
            bench = found["bench"]
            found["peaks"].append(measured_peak(bench.device, bench.dtype))
            found["rounds"].append([bench.run_step() for _ in range(STEPS)])
    return results


def figures_of(found: dict, name: str, figures: dict, spread: dict) -> None:
    """Add the figures of a case to those of a record, under its name."""
    bench: Bench = found["bench"]
    steps = [step for steps in found["rounds"] for step in steps]
    for part in ("forward", "backward", "optimizer", "step"):
        times = [1e3 * step[part] for step in steps]
        figures[f"{name}: {part}_ms"], spread[f"{name}: {part}_ms"] = statistics.median(times), [min(times), max(times)]
    medians = [statistics.median(step["step"] for step in steps) for steps in found["rounds"]]
    fractions = [bench.flops() / t / peak for t, peak in zip(medians, found["peaks"])]
    samples = [bench.config.global_batch_size / t for t in medians]
    figures[f"{name}: samples_per_sec"], spread[f"{name}: samples_per_sec"] = max(samples), [min(samples), max(samples)]
    figures[f"{name}: gflop_a_sample"] = bench.flops() / bench.config.global_batch_size / 1e9
    figures[f"{name}: tflop_per_sec"] = bench.flops() / min(medians) / 1e12
    figures[f"{name}: matmul_tflop_per_sec"] = max(found["peaks"]) / 1e12
    figures[f"{name}: fraction_of_matmul"], spread[f"{name}: fraction_of_matmul"] = (
        max(fractions),
        [min(fractions), max(fractions)],
    )
    if bench.device.type == "cuda" and known_device(torch.cuda.get_device_name(bench.device)):
        datasheet, _ = peak_flops(bench.device, bench.config.amp_mode, bench.config.tf32)
        figures[f"{name}: fraction_of_datasheet"] = bench.flops() / min(medians) / datasheet
    # A step of attention as it is, and of everything else at the speed of a large matrix product.
    N, D = bench.data.tokens.total, bench.config.embed_dim
    in_attention = bench.config.global_batch_size * bench.config.depth * 3 * 4 * N**2 * D
    ideal = bench.attention_seconds() + (bench.flops() - in_attention) / max(found["peaks"])
    figures[f"{name}: attention_limited_fraction"] = bench.flops() / ideal / max(found["peaks"])
    figures[f"{name}: first_step_sec"] = found["first"]
    for part, size in (found["memory"] or {}).items():
        figures[f"{name}: {part}_mb"] = size / 1e6


def savers(figures: dict, spread: dict) -> None:
    """Add what activation checkpointing and chunks save, and what they cost, to the figures."""
    results = compare({name: [*REFERENCE, *flags] for name, flags in SAVERS.items()})
    plain = results.pop("nothing")
    for name, found in results.items():
        for part in ("activations", "peak"):
            figures[f"{name}: {part}_ratio"] = found["memory"][part] / plain["memory"][part]
        pairs = [
            (step["step"], base["step"])
            for ours, theirs in zip(found["rounds"], plain["rounds"])
            for step, base in zip(ours, theirs)
        ]
        _add_ratio(figures, spread, f"{name}: step_time_ratio", [a / b for a, b in pairs])
    for training, name in ((False, "validation"), (True, "training")):
        figures[f"mlp_chunks 4: mlp_peak_ratio_{name}"] = mlp_peak(4, training) / mlp_peak(1, training)
    _add_ratio(figures, spread, "mlp_chunks 4: validation_time_ratio", validation_ratios())


def _add_ratio(figures: dict, spread: dict, name: str, ratios: list[float]) -> None:
    figures[name] = statistics.median(ratios)
    spread[name] = [min(ratios), max(ratios)]


def validation_ratios() -> list[float]:
    """Return the time of a forward pass without gradients in 4 chunks over that without chunks, pair by pair."""
    benches = [Bench([*REFERENCE, f"--mlp_chunks={chunks}"]) for chunks in (1, 4)]
    ratios = []
    for i in range(WARMUP + ROUNDS * STEPS):
        times = {}
        for bench in benches if i % 2 else reversed(benches):
            synchronize(bench.device)
            start = time.perf_counter()
            with torch.no_grad():
                bench.model(bench.batch[0])
            synchronize(bench.device)
            times[bench.config.mlp_chunks] = time.perf_counter() - start
        ratios.append(times[4] / times[1])
    return ratios[WARMUP:]


def loop_overhead() -> list[float]:
    """Return what the training loop (reading, normalising, records, log) adds to the bare step, a median a round.

    An iteration of the loop and a bare step on one batch that lies in memory take turns.
    """
    batch = [torch.randn(8, 20, 64, 128) for _ in range(2)]
    ratios: list[list[float]] = []

    class Alternating(train.Run):
        def batches(self):
            ratios.append([])
            self.resumed = time.perf_counter()
            yield from super().batches()

        def after_step(self, *args: object) -> None:
            super().after_step(*args)
            begin = time.perf_counter()
            step(*batch)
            update(config.lr)
            end = time.perf_counter()
            ratios[-1].append((begin - self.resumed) / (end - begin) - 1)
            self.resumed = end

        def after_epoch(self, *_: object) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            super().__exit__(KeyboardInterrupt, None, None)  # nothing was validated, so there is no result to log

    count, rounds = 20, ROUNDS
    join(World())
    with tempfile.TemporaryDirectory() as folder:
        write_shape(f"{folder}/data", (20, 64, 128), samples=8 * count + 1)
        flags = [*REFERENCE, "--expdir", folder, "--num_iters", str(count * rounds)]
        flags += [f"--{kind}_data_path={folder}/data/{kind}" for kind in ("train", "valid")]
        flags += [
            f"--{kind}_path={folder}/data/stats/{kind}.npy" for kind in ("global_means", "global_stds", "time_means")
        ]
        config = load_config(flags)[0].with_batches(1)
        data = train.WeatherData(config)
        model = train.build_model(config, data)
        optimizer, scaler = train.build_optimizer(model, config), torch.amp.GradScaler("cpu", enabled=False)
        step = partial(train.forward_backward, model, scaler=scaler, config=config)
        update = partial(train.update_weights, optimizer, scaler, config)
        with Alternating(config, World(), data.device, data, model.flops()) as run:
            run.watch_memory(model, optimizer)
            train.train(step, update, model, data, config, run)
    torch.distributed.destroy_process_group()
    return [statistics.median(round[1:]) for round in ratios]  # the first iteration waits for the reader to start


def table(figures: dict[str, float], spread: dict[str, list[float]], cases: list[str]) -> str:
    """Return the figures of some cases as the README shows them."""
    head = ["", *(f"`{name}`" for name in cases)]
    rows = {
        "forward, backward, optimiser (ms)": lambda n: " + ".join(
            f"{figures[f'{n}: {part}_ms']:.0f}" for part in ("forward", "backward", "optimizer")
        ),
        "step (ms), with its range": lambda n: "{:.0f} ({:.0f} to {:.0f})".format(
            figures[f"{n}: step_ms"], *spread[f"{n}: step_ms"]
        ),
        "samples/s": lambda n: f"{figures[f'{n}: samples_per_sec']:.0f}",
        "fraction of the matmul peak": lambda n: f"{figures[f'{n}: fraction_of_matmul']:.2f}",
        "with attention as it is, all else at the peak": lambda n: f"{figures[f'{n}: attention_limited_fraction']:.2f}",
    }
    lines = [head, ["---"] * len(head), *([label, *map(value, cases)] for label, value in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def savers_table(figures: dict[str, float], spread: dict[str, list[float]]) -> str:
    """Return what saving memory brings and costs, as ratios, as the README shows it."""

    def timed(name: str) -> str:
        low, high = spread[name]
        return f"{figures[name]:.2f} ({low:.2f} to {high:.2f})"

    lines = ["| | activations | peak of a step | time of a step |", "|---|---|---|---|"]
    for name, flags in SAVERS.items():
        if flags:
            ratios = [f"{figures[f'{name}: {part}_ratio']:.2f}" for part in ("activations", "peak")]
            lines.append(f"| `{' '.join(flags)}` | {' | '.join(ratios)} | {timed(f'{name}: step_time_ratio')} |")
    chunks = "mlp_chunks 4"
    peaks = {name: f"{figures[f'{chunks}: mlp_peak_ratio_{name}']:.2f}" for name in ("training", "validation")}
    time = timed(f"{chunks}: validation_time_ratio")
    lines.append(f"| `--mlp_chunks=4`, an MLP alone, training | | {peaks['training']} | |")
    lines.append(f"| `--mlp_chunks=4`, an MLP alone, validation | | {peaks['validation']} | {time} (whole pass) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write")
    args, flags = parser.parse_known_args()
    figures: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    try:
        cases = {" ".join(flags): flags} if flags else {name: [*REFERENCE, *more] for name, more in CASES.items()}
        results = compare(cases)
    except ValueError as error:
        sys.exit(f"step.py: {error}")
    for name, found in results.items():
        figures_of(found, name, figures, spread)
    kernels = {name: found["bench"].kernels() for name, found in results.items()}
    print(table(figures, spread, list(cases)))
    for name, rows in kernels.items():
        print(f"\n{name}: " + ", ".join(f"{row['name']} {row['share']:.0%}" for row in rows))
    if not flags:
        for name in ("fp32", "bf16"):  # compiled or not: what this machine can reach
            fractions = [figures[f"{case}: fraction_of_matmul"] for case in (name, f"{name} compiled")]
            figures[f"{name}_fraction_of_matmul"] = max(fractions)
        del results
        savers(figures, spread)
        overhead = loop_overhead()
        figures["loop_overhead"], spread["loop_overhead"] = min(overhead), [min(overhead), max(overhead)]
        figures["loop_overhead_median"] = statistics.median(overhead)
        print(savers_table(figures, spread))
    print()
    for name, value in figures.items():
        print(f"{name:60s} {value:10.4g}  {' to '.join(f'{x:.4g}' for x in spread.get(name, []))}")
    if args.json:
        write_record(args.json, figures, spread, kernels=kernels)


if __name__ == "__main__":
    main()
