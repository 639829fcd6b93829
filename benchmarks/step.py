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

import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.harness.bench import REFERENCE, Bench
from benchmarks.harness.command import errors_in_one_line, parser_of
from benchmarks.harness.loop import loop_overhead
from benchmarks.harness.memory import mlp_peak
from benchmarks.harness.record import Figures, write_record
from utils.device import known_device, measured_peak, peak_flops, synchronize
from utils.measure.tables import markdown

ROUNDS, STEPS, WARMUP = 3, 8, 3
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
            found["peaks"].append(measured_peak.__wrapped__(bench.device, bench.dtype))  # anew, in each round
            found["rounds"].append([bench.run_step() for _ in range(STEPS)])
    return results


def figures_of(found: dict, name: str, figures: Figures) -> None:
    """Add the figures of a case to those of a record, under its name."""
    bench: Bench = found["bench"]
    steps = [step for steps in found["rounds"] for step in steps]
    for part in ("forward", "backward", "optimizer", "step"):
        figures.add(f"{name}: {part}_ms", [1e3 * step[part] for step in steps])
    medians = [statistics.median(step["step"] for step in steps) for steps in found["rounds"]]
    fractions = [bench.flops() / t / peak for t, peak in zip(medians, found["peaks"])]
    samples = [bench.config.global_batch_size / t for t in medians]
    for key, rounds in (("samples_per_sec", samples), ("fraction_of_matmul", fractions)):
        figures.add(f"{name}: {key}", rounds)
        figures[f"{name}: {key}"] = max(rounds)
    figures[f"{name}: gflop_a_sample"] = bench.flops() / bench.config.global_batch_size / 1e9
    figures[f"{name}: tflop_per_sec"] = bench.flops() / min(medians) / 1e12
    figures[f"{name}: matmul_tflop_per_sec"] = max(found["peaks"]) / 1e12
    if bench.device.type == "cuda" and known_device(torch.cuda.get_device_name(bench.device)):
        datasheet, _ = peak_flops(bench.device, bench.config.amp_mode, bench.config.tf32)
        figures[f"{name}: fraction_of_datasheet"] = bench.flops() / min(medians) / datasheet
    # A step of attention as it is, and of everything else at the speed of a large matrix product.
    N, D = bench.tokens, bench.config.embed_dim
    in_attention = bench.config.global_batch_size * bench.config.depth * 3 * 4 * N**2 * D
    ideal = bench.attention_seconds() + (bench.flops() - in_attention) / max(found["peaks"])
    figures[f"{name}: attention_limited_fraction"] = bench.flops() / ideal / max(found["peaks"])
    figures[f"{name}: first_step_sec"] = found["first"]
    for part, size in (found["memory"] or {}).items():
        figures[f"{name}: {part}_mb"] = size / 1e6


def savers(figures: Figures) -> None:
    """Add what activation checkpointing and chunks save, and what they cost, to the figures."""
    results = compare({name: [*REFERENCE, *flags] for name, flags in SAVERS.items()})
    plain = results.pop("nothing")
    for name, found in results.items():
        for part in ("activations", "peak"):
            figures[f"{name}: {part}_ratio"] = found["memory"][part] / plain["memory"][part]
        ours, theirs = (itertools.chain.from_iterable(case["rounds"]) for case in (found, plain))
        figures.add(f"{name}: step_time_ratio", [a["step"] / b["step"] for a, b in zip(ours, theirs)])
    for training, name in ((False, "validation"), (True, "training")):
        figures[f"mlp_chunks 4: mlp_peak_ratio_{name}"] = mlp_peak(4, training) / mlp_peak(1, training)
    figures.add("mlp_chunks 4: validation_time_ratio", validation_ratios())


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


def table(figures: dict[str, float], spread: dict[str, list[float]], cases: list[str]) -> str:
    """Return the figures of some cases as chapter 1 shows them."""
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
    head = ["", *(f"`{name}`" for name in cases)]
    return markdown(head, ([label, *map(value, cases)] for label, value in rows.items()))


def savers_table(figures: dict[str, float], spread: dict[str, list[float]]) -> str:
    """Return what saving memory brings and costs, as ratios, as chapter 1 shows it."""

    def timed(name: str) -> str:
        low, high = spread[name]
        return f"{figures[name]:.2f} ({low:.2f} to {high:.2f})"

    rows = []
    for name, flags in SAVERS.items():
        if flags:
            ratios = [f"{figures[f'{name}: {part}_ratio']:.2f}" for part in ("activations", "peak")]
            rows.append([f"`{' '.join(flags)}`", *ratios, timed(f"{name}: step_time_ratio")])
    times = {"training": "", "validation": timed("mlp_chunks 4: validation_time_ratio") + " (whole pass)"}
    for name, seconds in times.items():
        peak = f"{figures[f'mlp_chunks 4: mlp_peak_ratio_{name}']:.2f}"
        rows.append([f"`--mlp_chunks=4`, an MLP alone, {name}", "", peak, seconds])
    return markdown(["", "activations", "peak of a step", "time of a step"], rows)


def main() -> None:
    parser = parser_of(__doc__, "train.py")
    parser.add_argument("--json", type=Path, help="file to write")
    args, flags = parser.parse_known_args()
    figures = Figures()
    with errors_in_one_line():
        cases = {" ".join(flags): flags} if flags else {name: [*REFERENCE, *more] for name, more in CASES.items()}
        results = compare(cases)
    for name, found in results.items():
        figures_of(found, name, figures)
    kernels = {name: found["bench"].kernels() for name, found in results.items()}
    print(table(figures, figures.spread, list(cases)))
    for name, rows in kernels.items():
        print(f"\n{name}: " + ", ".join(f"{row['name']} {row['share']:.0%}" for row in rows))
    if not flags:
        for name in ("fp32", "bf16"):  # compiled or not: what this machine can reach
            fractions = [figures[f"{case}: fraction_of_matmul"] for case in (name, f"{name} compiled")]
            figures[f"{name}_fraction_of_matmul"] = max(fractions)
        del results
        savers(figures)
        overhead = loop_overhead(ROUNDS)
        figures.add("loop_overhead", overhead)
        figures |= {"loop_overhead": min(overhead), "loop_overhead_median": statistics.median(overhead)}
        print(savers_table(figures, figures.spread))
    print()
    for name, value in figures.items():
        print(f"{name:60s} {value:10.4g}  {' to '.join(f'{x:.4g}' for x in figures.spread.get(name, []))}")
    if args.json:
        write_record(args.json, figures, figures.spread, kernels=kernels)


if __name__ == "__main__":
    main()
