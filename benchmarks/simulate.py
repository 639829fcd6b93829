"""What would rank 0 of a large grid hold and send? One step of train_mp.py, on tensors that have a shape and no data.

    python benchmarks/simulate.py [--json FILE]                      the grids of chapter 2, on the section mp
    python benchmarks/simulate.py --dp 16 --config=mp_patch4 --local_batch_size=2 --tensor_parallel=8      yours

How that works, and what is exact in it, stands in benchmarks/planner/trace.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.command import errors_in_one_line, parser_of
from benchmarks.harness.record import write_record
from benchmarks.planner.trace import trace
from utils.measure.tables import markdown

MP, MP16 = (("--config=mp", f"--local_batch_size={n}") for n in (1, 16))
HIRES = ("--config=hires", "--local_batch_size=1", "--activation_checkpoint=none")
TP4, CP4, PLAIN, ULYSSES = (
    "--tensor_parallel=4", "--context_parallel=4", "--no_sequence_parallel", "--cp_attention=ulysses",
)  # fmt: skip
# name: data parallel size, flags
GRIDS = {
    "one rank": (1, MP),
    "tp 4, plain": (1, (*MP, TP4, PLAIN)),
    "tp 4": (1, (*MP, TP4)),
    "tp 4, re-gather": (1, (*MP, TP4, "--sp_regather")),
    "cp 4": (1, (*MP, CP4)),
    "cp 4, ulysses": (1, (*MP, CP4, ULYSSES)),
    "dp 64 x tp 4 x cp 4": (64, (*MP, TP4, CP4)),
    "dp 64 x tp 4 x cp 4, shared gradients": (64, (*MP, TP4, CP4, "--shard=gradients")),
    "dp 64 x tp 4 x cp 4, shared weights": (64, (*MP, TP4, CP4, "--shard=weights")),
    "720 x 1440, cp 16": (1, (*HIRES, "--context_parallel=16")),
    "720 x 1440, cp 16, re-gather": (1, (*HIRES, "--context_parallel=16", "--cp_regather")),
    "720 x 1440, cp 16, re-gather, 4 groups of heads": (
        1,
        (*HIRES, "--context_parallel=16", "--cp_regather", "--cp_head_groups=4"),
    ),
    "16 samples: one rank": (1, MP16),
    "16 samples: tp 4, plain": (1, (*MP16, TP4, PLAIN)),
    "16 samples: tp 4": (1, (*MP16, TP4)),
    "16 samples: cp 4": (1, (*MP16, CP4)),
    "16 samples: cp 4, ulysses": (1, (*MP16, CP4, ULYSSES)),
}
# What chapter 2's exercises ask for.
EXERCISES = {
    "mp_short, tp 1": (4, MP16),
    "mp_short, tp 4": (4, (*MP16, TP4)),
    "patches of 4, tp 4": (4, ("--config=mp", "--patch_size=4", "--local_batch_size=4", TP4)),
    "patches of 4, cp 4": (4, ("--config=mp", "--patch_size=4", "--local_batch_size=4", CP4)),
}
MB = 1e6
UNITS = (("MB", MB), ("GB", 1e9))


def simulate(dp: int, argv: Sequence[str]) -> dict:
    """Return what rank 0 does and holds in a step of a run with these flags and `dp` copies of the model."""
    return trace(dp, argv).summary()


def table(results: dict[str, dict]) -> str:
    """Return what rank 0 of each grid holds, and sends in a step, in MB (1e6 bytes)."""
    head = "grid, tokens, parameters, weights, optimiser, activations, peak, over tp, over cp, over dp-cp".split(", ")
    rows = []
    for name, r in results.items():
        if name in EXERCISES:
            continue
        parts, sent = r["after_forward"], [r["sent"][axes] for axes in ("tp", "cp", "dp-cp")]
        sizes = [parts["Parameter"], parts["Optstate"], parts["Activation"], r["peak"], *sent]
        count = f"{r['parameters'] / 1e6:.1f} million"
        rows.append([name, f"{r['tokens']:,}", count, *(f"{size / MB:,.0f}" for size in sizes)])
    return markdown(head, rows)


def main() -> None:
    parser = parser_of(__doc__, "train_mp.py")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--dp", type=int, default=1, help="copies of the model")
    args, flags = parser.parse_known_args()
    grids = {f"dp {args.dp} {' '.join(flags)}": (args.dp, flags)} if flags else GRIDS | EXERCISES
    with errors_in_one_line():
        if args.dp < 1:
            raise ValueError(f"--dp is {args.dp}: take 1 or more")
        results = {name: simulate(dp, argv) for name, (dp, argv) in grids.items()}
    print("What rank 0 holds, and sends in a step, in MB (1e6 bytes):")
    print(table(results))
    if args.json:
        figures = {}
        for name, r in results.items():
            sizes = {"peak": r["peak"], "activations": r["after_forward"]["Activation"]}
            sizes |= {f"sent over {axes}": size for axes, size in r["sent"].items() if axes in ("tp", "cp", "dp-cp")}
            figures |= {f"{name}: {what}, {unit}": size / n for what, size in sizes.items() for unit, n in UNITS}
        if not flags:
            held = {name: r["after_forward"]["Activation"] for name, r in results.items()}
            figures["activations_tp4_over_tp1"] = held["tp 4"] / held["one rank"]
            figures["activations_regathered"] = held["720 x 1440, cp 16, re-gather"] / held["720 x 1440, cp 16"]
        write_record(args.json, figures, {}, grids=results)


if __name__ == "__main__":
    main()
