"""What only a GPU can show, in one call.

    python benchmarks/gpu_suite.py --json FILE [--skip PART ...]

Parts: tests, steps (none, TF32, bf16, fused optimiser, compilation, and their kernels), graphs, attention, memory,
loader, checkpoints, observers (what a report costs), for the sections `base` and `mp`, on random data of the full size.
Each part writes the file anew: if time runs out, what was measured stays. Whole runs are the matter of ladder.py.
On an H200 the steps take 200 s, the graphs 80, attention 5, the loader 120, the tests some 400 (docs/gpu.md).
"""

import argparse
import gc
import itertools
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.checkpoint import measure
from benchmarks.harness.bench import Bench
from benchmarks.harness.data import path_flags
from benchmarks.harness.record import Figures, write_record
from benchmarks.observers import measure as overhead
from benchmarks.step import SAVERS, compare, figures_of
from distributed.graphs import Captured, CudaGraph
from networks.attention import BACKENDS, attention
from utils.config.reader import load_config
from utils.data.dataset import WeatherData
from utils.ranks.start import join
from utils.ranks.world import World
from utils.sample_data.write import write_shape

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "none": ["--no_tf32"],
    "TF32": [],
    "bf16": ["--amp_mode=bf16"],
    "bf16, fused": ["--amp_mode=bf16", "--enable_fused"],
    "bf16, fused, jit": ["--amp_mode=bf16", "--enable_fused", "--enable_jit"],
}
# The tutorial's batch of each section on one GPU.
SECTIONS = {"base": ["--config=base", "--local_batch_size=16"], "mp": ["--config=mp", "--local_batch_size=8"]}
PLAIN = ["--no_enable_fused", "--no_enable_jit", "--amp_mode=none"]
WARMUP, STEPS = 11, 20


def clean_up() -> None:
    """Free what the last case held: models and their hooks hold each other. Forget its compiled code, too."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()


def tests(figures: Figures) -> None:
    """Run the GPU's tests; the record has the numbers of those that passed, failed and were skipped."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "--show-capture=no", "--tb=short"]
    files = sorted(str(path) for path in (ROOT / "tests/gpu").glob("test_*.py"))
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-1000:])
    figures["tests exit code"] = done.returncode
    words = done.stdout.replace(",", "").split()
    for count, word in itertools.pairwise(words):
        if word in ("passed", "failed", "skipped", "error", "errors") and count.isdigit():
            figures[f"tests {word}"] = int(count)


def steps(figures: Figures) -> dict[str, list[dict]]:
    """Time the steps of each section; return their kernels."""
    kernels = {}
    for section, flags in SECTIONS.items():
        for case, more in CASES.items():
            name = f"{section}, {case}"
            found = compare({name: [*flags, *PLAIN, *more]})[name]
            figures_of(found, name, figures)
            print(f"{name}: {figures[f'{name}: samples_per_sec']:.1f} samples/s, "
                  f"{figures[f'{name}: fraction_of_matmul']:.2f} of the matmul rate", flush=True)  # fmt: skip
            kernels[name] = found["bench"].kernels(12)
            del found
            clean_up()
    return kernels


def graphs(figures: Figures) -> None:
    """Time the step and the update as they are, recorded, and by compile_mode reduce-overhead; compare the losses."""
    small = ["--config=base", "--local_batch_size=1"]  # short kernels: here the host is the limit
    modes = {
        "as it is": ([], False), "recorded": ([], True),
        "jit": (["--enable_jit"], False), "jit, recorded": (["--enable_jit"], True),
        "jit, reduce-overhead": (["--enable_jit", "--compile_mode=reduce-overhead"], False),
    }  # fmt: skip
    torch.cuda.set_stream(torch.cuda.Stream())
    for section, flags in {"base, 1 sample": small, **SECTIONS}.items():
        curves = {}
        for mode, (more, recorded) in modes.items():
            bench, name = Bench([*flags, *PLAIN, "--amp_mode=bf16", "--enable_fused", *more]), f"{section}, {mode}"
            step, update, captured = bench.step, bench.update, None
            bench.is_timed = False  # a recording has no place for the events of a clock
            if recorded:
                make = partial(CudaGraph, [])
                bench.optimizer.param_groups[0]["capturable"] = True
                step = Captured(step, "step", WARMUP, make)
                captured = Captured(update, "update", WARMUP, make)
                update = lambda lr, captured=captured: captured(torch.full((), lr, device="cuda"))  # noqa: E731
            losses, times = [], []
            for i in range(WARMUP + STEPS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                losses.append(step(*bench.batch).clone())
                update(1e-4)
                torch.cuda.synchronize()
                if i > WARMUP:
                    times.append(1e3 * (time.perf_counter() - start))
            curves[mode] = torch.stack(losses).tolist()
            print(figures.add(f"{name}: step_ms", times), flush=True)
            reference = curves["jit" if "jit" in mode else "as it is"]
            figures[f"{name}: loss change"] = max(abs(a - b) / b for a, b in zip(curves[mode], reference))
            print(f"{name}: loss change {figures[f'{name}: loss change']:.0e}", flush=True)
            del bench, step, update, captured, losses
            clean_up()


def attention_kernels(figures: Figures) -> None:
    """Time attention alone, forward and backward, at the shapes of `base` and `mp`; errors against float32."""
    for heads, d, tokens in ((8, 48, 4050), (8, 128, 4050), (8, 128, 1013), (8, 128, 16200)):
        batch = max(1, 16 * 4050 // tokens // (1 if d == 48 else 2))
        exact = None
        for kernel in ("math", *BACKENDS, "auto"):
            name = f"attention {kernel}, head size {d}, {tokens} tokens"
            torch.manual_seed(0)
            q, k, v, g = torch.randn(4, 1, heads, tokens, d, device="cuda")
            try:
                if kernel == "math":
                    if tokens <= 4050:
                        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
                        attention(*inputs, "math", 0.0).backward(g)
                        exact = [x.grad for x in inputs]
                    continue
                small = [x.bfloat16().requires_grad_() for x in (q, k, v)]
                attention(*small, kernel, 0.0).backward(g.bfloat16())
                if exact:
                    figures[f"{name}: gradient error"] = max(
                        ((a.grad.float() - b).norm() / b.norm()).item() for a, b in zip(small, exact)
                    )
                inputs = [
                    torch.randn(batch, tokens, heads, d, device="cuda", dtype=torch.bfloat16)
                    .transpose(1, 2).requires_grad_() for _ in range(3)
                ]  # fmt: skip
                grad, times = torch.randn_like(inputs[0]), []
                for _ in range(12):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    attention(*inputs, kernel, 0.0).backward(grad)
                    end.record()
                    torch.cuda.synchronize()
                    times.append(begin.elapsed_time(end))
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0][:80]}")
                continue
            print(figures.add(f"{name}: ms", times[2:]), flush=True)
            figures[f"{name}: tflop_per_sec"] = 12 * batch * heads * tokens**2 * d / figures[f"{name}: ms"] / 1e9


def memory(figures: Figures) -> None:
    """Measure the allocator's peak and the step's time with each way to save memory."""
    for section, flags in SECTIONS.items():
        for saver, more in SAVERS.items():
            name = f"{section}, {saver}"
            bench = Bench([*flags, *PLAIN, "--amp_mode=bf16", "--enable_fused", "--enable_jit", *more])
            for _ in range(3):
                bench.run_step()
            torch.cuda.reset_peak_memory_stats()
            print(figures.add(f"{name}: step_ms", [1e3 * bench.run_step()["step"] for _ in range(6)]), flush=True)
            figures[f"{name}: peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
            figures[f"{name}: reserved_mb"] = torch.cuda.memory_reserved() / 1e6
            del bench
            clean_up()


def loader(figures: Figures) -> None:
    """Measure the loop of `base` in bf16 with each way to read, over the same step fed from memory."""
    ways = {
        "in the loop": [], "1 worker": ["--num_data_workers=1"], "4 workers": ["--num_data_workers=4"],
        "dali, 4 workers": ["--num_data_workers=4", "--data_loader_config=dali"],
    }  # fmt: skip
    flags = [*SECTIONS["base"], *PLAIN, "--amp_mode=bf16", "--enable_fused", "--enable_jit"]
    bench, epochs = Bench(flags), 4
    bench.is_timed = False  # no clock at its parts
    with tempfile.TemporaryDirectory() as folder:
        write_shape(f"{folder}/data", (20, 360, 720), samples=129)  # 8 iterations an epoch
        for name, more in ways.items():
            config = load_config([*flags, *path_flags(f"{folder}/data"), "--data_loader_config=pytorch", *more])[0]
            try:
                data = WeatherData(config.with_batches(1), bench.device)
            except ValueError as error:  # DALI is not installed
                print(f"loader, {name}: {error}")
                continue
            ratios = []
            for first in range(1, 1 + 3 * epochs, epochs):
                seconds = []
                for fed in (False, True):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for epoch in range(first, first + epochs):
                        for batch in itertools.repeat(None, 8) if fed else data.train_loader.epoch(epoch):
                            bench.step(*(bench.batch if fed else data.to_device(batch)))
                            bench.update(1e-4)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - start)
                ratios.append(seconds[1] / seconds[0])
                rate = 8 * epochs * len(bench.batch[0]) / seconds[0]
            print(figures.add(f"loader, {name}: of the step fed from memory", ratios), flush=True)
            figures[f"loader, {name}: samples_per_sec"] = rate
            del data
    del bench
    clean_up()


def checkpoints(figures: Figures) -> None:
    """Save and load `mp` while it trains: the stall on the device's timeline."""
    join(World())
    bench = Bench([*SECTIONS["mp"], *PLAIN, "--amp_mode=bf16", "--enable_fused"])
    bench.is_timed = False
    with tempfile.TemporaryDirectory() as folder:
        found = measure(bench, Path(folder), 5, saves=2)  # each brings gigabytes to the disk
    torch.distributed.destroy_process_group()
    for name, values in found.items():
        print(figures.add(f"checkpoint of mp: {name}", values), flush=True)
    del bench
    clean_up()


def observers(figures: Figures) -> None:
    """Measure what the report costs."""
    join(World())
    for section, flags in SECTIONS.items():
        found = overhead(Bench([*flags, *PLAIN, "--amp_mode=bf16", "--enable_fused", "--enable_jit"]))
        for name, values in found.items():
            print(figures.add(f"{section}: {name}", values), flush=True)
        clean_up()
    torch.distributed.destroy_process_group()


PARTS = {
    "tests": tests, "steps": steps, "graphs": graphs, "attention": attention_kernels, "memory": memory,
    "loader": loader, "checkpoints": checkpoints, "observers": observers,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--skip", nargs="*", default=[], choices=PARTS, help="parts to leave out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_suite.py: torch sees no GPU here; benchmarks/step.py runs on a CPU")
    figures, kernels, failed = Figures(), {}, []
    for name, part in PARTS.items():
        if name not in args.skip:
            start = time.perf_counter()
            try:
                kernels |= part(figures) or {}
            except Exception:  # what it has measured so far is kept, and the other parts are run
                traceback.print_exc()
                failed.append(name)
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
                clean_up()
            figures[f"{name}: seconds"] = time.perf_counter() - start
            write_record(args.json, figures, figures.spread, kernels=kernels)
    if failed:
        sys.exit(f"gpu_suite.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
