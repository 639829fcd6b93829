"""What is a device's memory for, and how much takes which batch in which precision?

    python benchmarks/memory.py [--config=base] [--batches 1 2 4 8 16 32] [--json FILE]

One training step of train.py on one device for each batch and precision: simulated (benchmarks/simulate.py: no memory,
no computation), and where a GPU is, measured as well: the peak of what PyTorch's allocator gave out, `-` where it did
not fit. Beside the simulation stands the anatomy, formulas in bytes of each part; the record has how far they are off.
"""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.harness.bench import Bench
from benchmarks.harness.command import errors_in_one_line, parser_of
from benchmarks.harness.record import write_record
from benchmarks.simulate import simulate
from utils.config.reader import load_config
from utils.config.settings import Config
from utils.data.fields import Fields
from utils.device import peak_memory_gb
from utils.measure.tables import markdown

MODES = {"none": "fp32", "fp16": "fp16", "bf16": "bf16"}
BATCHES = (1, 2, 4, 8, 16, 32)
PARTS = ("weights", "gradients", "moments", "half copies", "activations", "batch", "temporary", "peak")
# What they take, in bytes: P weights, B samples, N tokens of D numbers, L blocks, h heads, I O numbers of an image.
FORMULAS = {
    "weights": "4 P",
    "gradients": "4 P, as the backward pass frees activations",
    "moments": "8 P (Adam)",
    "half copies": "2 P in half precision, of matrices",
    "activations": "B [N D (64 L + 8) + 4 N h L + 4 (I + O)]; in half B [N D (36 L + 6) + 4 N h L + 2 (I + O)]",
    "batch": "4 B (I + O)",
    "temporary": "12 B O, of the loss",
    "peak": "weights + moments + batch + the larger of (half copies + activations + temporary) and gradients",
}


def anatomy(config: Config, parameters: int, batch: int) -> dict[str, float]:
    """Return the bytes of each part in a step of `batch` samples, on one rank, without recomputation.

    A block keeps of each token, in numbers of D: the input of both norms (4 bytes each: the residual stream stays in
    float32), the norms' results (1 + 1), q, k, v (3), what attention returns (1), what fc1 and GELU return (4 + 4), and
    for each head a sum of the softmax. In half precision what is an input of a product has 2 bytes. The rest: the last
    norm's input and result, the patches that the embedding reads, the forecast. As in Korthikanti et al. 2022, section
    4.1, with an attention kernel that keeps no table of weights (Dao et al. 2022).
    """
    rows, columns = config.img_size
    N, D, L = rows * columns // config.patch_size**2, config.embed_dim, config.depth
    inputs, outputs, _ = Fields.blank(config).sizes
    I, O = inputs * rows * columns, outputs * rows * columns  # noqa: E741
    size, per_block, last = (4, 64, 8) if config.amp_mode == "none" else (2, 36, 6)
    found = {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "moments": 8 * parameters,
        "half copies": 0 if config.amp_mode == "none" else 2 * (parameters - N * D),  # positions are in no product
        "activations": batch * (N * D * (per_block * L + last) + 4 * N * config.num_heads * L + size * (I + O)),
        "batch": 4 * batch * (I + O),
        "temporary": 12 * batch * O,
    }
    during = sum(found[name] for name in ("half copies", "activations", "temporary"))
    lasting = found["weights"] + found["moments"] + found["batch"]
    return found | {"peak": lasting + max(during, found["gradients"])}


def simulated(flags: Sequence[str]) -> dict[str, int]:
    """Return the parameters, and the bytes that lie in memory at the peak and, by part, after the forward pass."""
    found = simulate(1, flags)
    parts = found["after_forward"]
    # The tracker counts what autocast made of the weights among the activations.
    names = {"weights": "Parameter", "moments": "Optstate", "batch": "Other", "activations": "Activation"}
    return {name: parts[key] for name, key in names.items()} | {n: found[n] for n in ("parameters", "peak")}


def measured(flags: Sequence[str]) -> float | None:
    """Return the GB that tensors took at the peak of a GPU's third step; None where they did not fit."""
    try:
        bench = Bench(list(flags))
        bench.is_timed = False
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            bench.step(*bench.batch)
            bench.update(1e-4)
        return peak_memory_gb(bench.device) * 2**30 / 1e9
    except torch.OutOfMemoryError:
        return None
    finally:
        bench = None  # its model and its hooks hold each other
        gc.collect()
        torch.cuda.empty_cache()


def off(formula: dict[str, float], found: dict[str, int]) -> dict[str, float]:
    """Return how far formulas are from the simulation, as shares of it."""
    together = formula | {"activations": formula["activations"] + formula["half copies"]}
    return {part: together[part] / found[part] - 1 for part in ("weights", "moments", "batch", "activations", "peak")}


def table(cases: dict[str, dict]) -> str:
    """Return the peak by batch and precision, in GB (1e9 bytes)."""
    modes, batches = (list(dict.fromkeys(case[key] for case in cases.values())) for key in ("mode", "batch"))
    rows = []
    for batch in batches:
        rows.append([str(batch)])
        for mode in modes:
            case = cases[f"{mode}, {batch}"]
            rows[-1].append(f"{case['simulated']['peak'] / 1e9:.1f}")
            if "measured" in case:
                rows[-1].append("-" if case["measured"] is None else f"{case['measured']:.1f}")
    names = [MODES[mode] for mode in modes]
    if any("measured" in case for case in cases.values()):
        names = [text for name in names for text in (f"{name}, simulated", f"{name}, measured")]
    return markdown(["samples", *names], rows)


def anatomy_table(cases: dict[str, dict], mode: str = "fp16", batches: Sequence[int] = (1, 16)) -> str:
    """Return what each part takes in a mode, by formula, in MB and as a share of the peak."""
    rows = []
    for part in PARTS:
        rows.append([part, FORMULAS[part]])
        for batch in batches:
            formula = cases[f"{mode}, {batch}"]["formula"]
            share = "" if part in ("peak", "gradients") else f" ({formula[part] / formula['peak']:.0%})"
            rows[-1].append(f"{formula[part] / 1e6:,.0f}{share}")
    return markdown(["part", "bytes", *(f"{n} sample{'s' * (n > 1)}, {MODES[mode]}, MB" for n in batches)], rows)


def main() -> None:
    parser = parser_of(__doc__, "train.py")
    parser.add_argument("--config", default="base", help="section of config/ViT.yaml")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, help="file to write")
    args, more = parser.parse_known_args()
    cases, figures = {}, {}
    with errors_in_one_line():
        for mode in MODES:
            for batch in args.batches:
                flags = [f"--config={args.config}", *more, f"--amp_mode={mode}", f"--local_batch_size={batch}"]
                config, found = load_config(flags)[0], simulated(flags)
                formula = anatomy(config, found["parameters"], batch)
                case = {"mode": mode, "batch": batch, "simulated": found, "formula": formula}
                if torch.cuda.is_available():
                    case["measured"] = measured(flags)
                cases[f"{mode}, {batch}"] = case
                figures |= {f"{mode}, {batch}: {k} off": x for k, x in off(formula, found).items()}
                figures[f"{mode}, {batch}: peak, GB"] = found["peak"] / 1e9
    figures["worst formula"] = max(abs(x) for name, x in figures.items() if name.endswith("off"))
    print(table(cases), anatomy_table(cases, "fp16", args.batches[:: max(len(args.batches) - 1, 1)]), sep="\n\n")
    print(f"\nFormulas are within {figures['worst formula']:.1%} of the simulation.")
    if args.json:
        write_record(args.json, figures, {}, cases=cases)


if __name__ == "__main__":
    main()
