"""What does each flag buy? Samples per second of train.py with one flag changed, over those without.

    python benchmarks/flags.py --json benchmarks/results/flags.json [any flag of train.py, for all runs]

Every three variants stand between two runs of the baseline, and a ratio is to the mean of these two: a machine that
slows down meanwhile slows all of them. `the same again` compares neighbouring baselines: that is the noise. A run is
two epochs of 9 iterations in a process of its own; its speed is that of the second, for the first one compiles.
`loss change` is the largest relative difference of a training loss from the baseline's.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REPEATS, ITERATIONS, EPOCHS = 3, 9, 2


class Variant(NamedTuple):
    """What differs from the baseline; `share` of the iterations is less than 1 for what is very slow."""

    flags: tuple[str, ...] = ()
    ranks: int = 1
    share: float = 1.0
    script: str = "train.py"


VARIANTS = {
    "num_data_workers 1": Variant(("--num_data_workers", "1")),
    "no_enable_fused": Variant(("--no_enable_fused",)),
    "enable_jit": Variant(("--enable_jit",)),
    "amp_mode bf16": Variant(("--amp_mode", "bf16")),
    "amp_mode fp16": Variant(("--amp_mode", "fp16"), share=1 / 9),
    "attention math": Variant(("--attention", "math")),
    "accumulation_steps 4": Variant(("--accumulation_steps", "4")),
    "train_mp.py, one rank": Variant(script="train_mp.py"),
    "2 ranks": Variant(ranks=2),
    "2 ranks, noddp": Variant(("--noddp",), 2),
    "2 ranks, tensor_parallel 2": Variant(("--tensor_parallel", "2"), 2, script="train_mp.py"),
    "2 ranks, context_parallel 2": Variant(("--context_parallel", "2"), 2, script="train_mp.py"),
}


def name_in_words(variant: Variant) -> str:
    """Return what differs, in Markdown: "`train_mp.py`, 2 ranks, `--tensor_parallel 2`"."""
    parts = [f"`{variant.script}`" if variant.script != "train.py" else ""]
    parts += [f"{variant.ranks} ranks" if variant.ranks > 1 else ""]
    parts += [f"`{' '.join(variant.flags)}`" if variant.flags else ""]
    return ", ".join(filter(None, parts)) or "nothing: the noise of the machine"


def table(figures: dict[str, float], spread: dict[str, list[float]]) -> str:
    """Return the figures of a record as the README shows them."""
    lines = ["| what changes | ratio | range | loss change |", "|---|---|---|---|"]
    for name, variant in {"the same again": Variant(), **VARIANTS}.items():
        low, high = spread[f"ratio of {name}"]
        change = figures.get(f"loss change of {name}")
        loss = "" if change is None else f"{change:.0e}" if change else "none"
        ratio = f"{figures[f'ratio of {name}']:.2f} | {low:.2f} to {high:.2f}"
        lines.append(f"| {name_in_words(variant)} | {ratio} | {loss} |")
    return "\n".join(lines)


def run(script: str, flags: list[str], ranks: int, iterations: int) -> tuple[float, list[float]]:
    """Train in a process of its own; return samples per second, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = command if ranks > 1 else [sys.executable]
        command += [script, *flags, "--expdir", folder, "--num_iters", str(EPOCHS * iterations)]
        command += ["--checkpoint_every", "None"]  # the first epoch's would be written beside the second
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:  # this machine cannot do it: the other figures still count
            print(f"  {' '.join(flags)}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
            return math.nan, []
        (records,) = Path(folder).glob("*/*/*/metrics.jsonl")
        lines = [json.loads(line) for line in records.read_text().splitlines()]
    speeds = [line["samples_per_sec"] for line in lines if line["event"] == "epoch"]
    return speeds[-1], [line["loss"] for line in lines if line["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    args, more = parser.parse_known_args()
    sys.path.insert(0, str(ROOT))
    from benchmarks.record import write_record
    from utils.config_reader import load_config

    base = more if any(flag.startswith("--config") for flag in more) else ["--config=demo", *more]
    batch = load_config(base)[0].with_batches(1).global_batch_size

    def measure(name: str, variant: Variant) -> tuple[float, list[float]]:
        iterations = max(round(ITERATIONS * variant.share), 1)
        limits = ["--limit_nsamples", str(iterations * batch), "--limit_nsamples_val", "16"]
        speed, losses = run(variant.script, [*base, *limits, *variant.flags], variant.ranks, iterations)
        print(f"{name:28s} {speed:9.1f} samples/s", flush=True)
        return speed, losses

    baselines, changes = [], {}
    ratios: dict[str, list[float]] = {name: [] for name in ("the same again", *VARIANTS)}
    for _ in range(REPEATS):
        before, losses = measure("baseline", Variant())
        for first in range(0, len(VARIANTS), 3):
            group = list(VARIANTS.items())[first : first + 3]
            speeds = {name: measure(name, variant) for name, variant in group}
            after, _ = measure("baseline", Variant())
            for name, (speed, curve) in speeds.items():
                ratios[name].append(2 * speed / (before + after))
                if VARIANTS[name].share == 1:
                    changes[name] = max((abs(a - b) / b for a, b in zip(curve, losses)), default=math.nan)
            ratios["the same again"].append(after / before)
            baselines.append(before)
            before = after
    figures = {
        "samples_per_sec": statistics.median(baselines),
        **{f"ratio of {n}": statistics.median(r) for n, r in ratios.items()},
        **{f"loss change of {n}": c for n, c in changes.items()},
    }
    spread = {
        "samples_per_sec": [min(baselines), max(baselines)],
        **{f"ratio of {n}": [min(r), max(r)] for n, r in ratios.items()},
    }
    write_record(args.json, figures, spread)
    print(table(figures, spread))


if __name__ == "__main__":
    main()
